"""Text <-> token ids. Knows nothing about tensors.

A folder has SentencePiece's tokenizer.model or, through the package ``tokenizers``, a
tokenizer.json. A text is encoded as transformers does it: the text of a special token stands for
that token wherever it occurs, in what a user types too.
"""

from functools import partial
from pathlib import Path

from .chat import ChatTemplate, built_in
from .special_tokens import check_bos, read_special_tokens
from .tokenizer_json import JsonModel
from .tokenizer_model import SentencePieceModel

FILES = ("tokenizer.model", "tokenizer.json")  # of a folder; the first of them that is there
LONGEST = 256  # characters: no vocabulary has a token of so many


class Tokenizer:
    """A Llama's tokenizer: of a folder, or in a file tokenizer.model or tokenizer.json.

    Raises FileNotFoundError if there is none and ValueError if it is damaged. ``bos_id`` and
    ``eos_id`` are None where it has none; ids are below ``vocab_size``.
    """

    def __init__(self, path):
        path = Path(path)
        path = next((path / name for name in FILES if (path / name).is_file()), path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; expected {' or '.join(FILES)}")
        kind = JsonModel if path.suffix == ".json" else SentencePieceModel
        self.model = kind(path, read_special_tokens(path.parent))
        self.bos_id, self.eos_id = self.model.bos_id, self.model.eos_id
        self.vocab_size = self.model.vocab_size
        check_bos(path.parent, self.bos_id)

    def encode(self, text):
        """Text -> ids, BOS first where the model wants one; ValueError: UTF-8 cannot write it."""
        return self.model.start + self.encode_marked(text)

    def encode_marked(self, text):
        """Text marked up by a chat template -> ids: as ``encode``, but nothing is added."""
        return self.model.encode(checked(text))

    def decode(self, ids):
        """Ids -> text; special tokens and unknown ids leave none, half a character is U+FFFD."""
        return self.model.decode(ids)

    def refuse_longer(self, text, limit):
        """ValueError for a text that is far too long for ``limit`` tokens, before it is encoded."""
        if len(checked(text)) >= limit * LONGEST:
            has = f"a text of {len(text)} characters has {limit} tokens or more"
            raise ValueError(f"{has}; the context has {limit} positions")

    def encode_chat(self, messages, template="vicuna", system=None):
        """A dialogue -> the ids after which the assistant speaks.

        ``messages`` are texts, user and assistant in turn, the user first and last. ``template`` is
        what ``chat_template`` returns: a ChatTemplate, "vicuna" (v1.1 and later) or "llama-2"
        (Llama-2-chat). With the latter two each round is encoded on its own, as both models were
        trained: SentencePiece puts its space in front of every round. ``system`` says how the
        assistant is to answer; Vicuna has a sentence of its own, which it replaces.
        """
        if len(messages) % 2 == 0:
            raise ValueError(f"a dialogue ends with the user's message; got {len(messages)}")
        if isinstance(template, ChatTemplate):
            return self.encode_marked(template.render(messages, True, system))
        if template not in ("vicuna", "llama-2"):
            raise ValueError(f"unknown chat template {template!r}; expected 'vicuna' or 'llama-2'")
        pairs = self.rounds(messages, template, system)
        return [token for pair in pairs for ids in pair for token in ids]

    def rounds(self, messages, template="vicuna", system=None):
        """Yield (ids of the prompt, ids of the answer with its EOS, if any) of each round."""
        if isinstance(template, ChatTemplate):
            yield from self._rounds_by_template(messages, partial(template.render, system=system))
            return
        bos, eos = ([] if each is None else [each] for each in (self.bos_id, self.eos_id))
        for turn in range(0, len(messages), 2):
            user, answer = messages[turn], (messages[turn + 1 : turn + 2] or [None])[0]
            prompt, whole = built_in(template, user, answer, system, turn == 0)
            start = bos if turn == 0 or template == "llama-2" else []
            ids = self.encode_marked(prompt)
            # An answer begins with a space, so no piece reaches from the prompt into it.
            rest = self.encode_marked(whole)[len(ids) :] if (answer or "").strip() else []
            yield start + ids, rest + eos * (answer is not None)

    def _rounds_by_template(self, messages, render):
        """What a template puts after an answer's EOS belongs to the next round's prompt."""
        said, rest = "", []
        for turn in range(0, len(messages), 2):
            asked = render(messages[: turn + 1], to_be_answered=True)
            answered = render(messages[: turn + 2]) if turn + 1 < len(messages) else asked
            if not (asked.startswith(said) and answered.startswith(asked)):
                why = "the chat template rewrites earlier turns"
                raise ValueError(f"{why}; no round can be told apart")
            prompt = rest + self.encode_marked(asked[len(said) :])
            answer = self.encode_marked(answered[len(asked) :])
            end = answer.index(self.eos_id) + 1 if self.eos_id in answer else len(answer)
            yield prompt, answer[:end]
            said, rest = answered, answer[end:]


def checked(text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        which = f"character {error.start} of the text"
        raise ValueError(f"{which} is no Unicode character; is it UTF-8?") from None
    return text


class TextStream:
    """Turns tokens that arrive in groups into text that can be printed at once."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids, self.shown = [], 0

    def push(self, ids):
        """Take new ids; return the text that has become certain."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        return "" if text.endswith("\ufffd") else self._rest(text)  # half a character

    def finish(self):
        """The text still held back, now that no more tokens come."""
        return self._rest(self.tokenizer.decode(self.ids))

    def _rest(self, text):
        rest, self.shown = text[self.shown :], len(text)
        return rest
