"""Text <-> token ids, as transformers does it.

A folder has SentencePiece's tokenizer.model or, for the package ``tokenizers``, a tokenizer.json.
"""

from pathlib import Path

from .chat import ChatTemplate, render_vicuna
from .special import is_sentencepiece, read_special_tokens
from .tokenizer_model import SentencePieceModel


class Tokenizer:
    """The tokenizer of a Llama's folder; FileNotFoundError: there is none, ValueError: damaged.

    ``eos`` is the text of the EOS and ``eos_id`` its id, None if the tokenizer has none.
    """

    def __init__(self, path):
        folder = Path(path)
        pieces, json = folder / "tokenizer.model", folder / "tokenizer.json"
        if not (pieces.is_file() or json.is_file()):
            raise FileNotFoundError(f"{folder} has no tokenizer.model and no tokenizer.json")
        kind = SentencePieceModel
        if json.is_file() and not is_sentencepiece(pieces):
            from .tokenizer_json import JsonModel as kind  # not every model needs the package
        try:
            tokens = read_special_tokens(folder)
            self.model = kind(folder, tokens)
        except Exception as error:
            raise ValueError(f"the tokenizer in {folder} is damaged ({error})") from None
        self.eos, self.eos_id = tokens.names.get("eos_token", ""), self.model.eos_id

    def encode(self, text, with_bos=True):
        """Text -> ids, BOS first where the model expects one.

        The text of a special token stands for that token wherever it occurs. Raises ValueError for
        what is no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half a character, of a file or a terminal
            raise ValueError(f"the text is not valid UTF-8 ({error})") from None
        return self.model.encode(text, with_bos)

    def decode(self, ids):
        """Ids -> text; special tokens and unknown ids leave none, half a character is U+FFFD."""
        return self.model.decode(ids)

    def encode_chat(self, messages, template=None, system=None):
        """A dialogue -> its ids; after the user's last message the assistant is next.

        ``messages`` are texts, user and assistant in turn. ``template`` is a folder's ChatTemplate;
        without one it is Vicuna's format. ``system`` says how the assistant is to answer.
        """
        with_bos = not isinstance(template, ChatTemplate)  # which puts it there itself
        return self.encode(self.render(messages, template, system), with_bos)

    def render(self, messages, template=None, system=None):
        """A dialogue -> its text; ``encode_chat`` says what is what."""
        if isinstance(template, ChatTemplate):
            return template.render(messages, system)
        return render_vicuna(messages, system, self.eos)

    def rounds(self, messages, template=None):
        """Yield (ids of the prompt, ids of the answer up to its EOS) of each round.

        The ids of an answer are those that a model has to write after the prompt, also if another
        token would stand for the end of the one and the beginning of the other together. Raises
        ValueError if the template does not let the two be divided.
        """
        done, last_id = "", None  # the text of the rounds so far, without the last EOS
        for turn in range(0, len(messages), 2):
            asked = self.render(messages[: turn + 1], template)
            answered = self.render(messages[: turn + 2], template)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise ValueError("the chat template rewrites what was said; no round is by itself")
            prompt_text, answer_text = asked[len(done) :], answered[len(asked) :]
            if last_id is None:
                prompt = self.encode(prompt_text, with_bos=not isinstance(template, ChatTemplate))
            else:
                if last_id == self.eos_id:  # some templates have an EOS only at the very end
                    prompt_text = prompt_text.removeprefix(self.eos)
                prompt = self.model.encode_after(prompt_text, last_id)
            said, ends, _ = answer_text.partition(self.eos) if self.eos else (answer_text, "", "")
            answer = self.model.encode_after(said + ends, prompt[-1]) if said + ends else []
            yield prompt, answer
            done, last_id = asked + said, (answer or prompt)[-1]


class TextStream:
    """Turns tokens that arrive in groups into text that can be printed at once.

    A group is decoded after the one before it, and not after all that came before: that is enough
    to know whether the group begins with a space.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # ids whose text was returned, the latest that had any
        self.waiting: list[int] = []  # ids whose text is not certain yet

    def push(self, ids, last=False):
        """Take new ids; return the text that has become certain, with ``last`` all of it."""
        self.waiting += ids
        if not self.waiting:
            return ""
        if not last and self.tokenizer.model.is_open(self.waiting):
            return ""
        text = self.tokenizer.decode(self.before + self.waiting)
        if text.endswith("\ufffd") and not last:  # half a character
            return ""
        shown = self.tokenizer.decode(self.before)
        new = text[len(shown) :]
        # A group without text of its own cannot show where the next one begins.
        self.before = (
            self.waiting if self.tokenizer.decode(self.waiting) else [*self.before, *self.waiting]
        )
        self.waiting = []
        return new
