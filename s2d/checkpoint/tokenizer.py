"""Text <-> token ids, as transformers does it.

A folder has SentencePiece's tokenizer.model or, for the package ``tokenizers``, a tokenizer.json.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat import ChatFormat, Message, as_dialogue, plain_format, read_chat_format
from .files import read_json
from .tokenizer_model import SentencePieceModel, has_pieces

Messages = str | Iterable[str | Message]  # see ``as_dialogue``


class Tokenizer:
    """The tokenizer of a Llama's folder; FileNotFoundError: there is none, ValueError: damaged.

    ``eos`` is the text of the EOS and ``eos_id`` its id, None if the tokenizer has none. With the
    ``vocab_size`` of a model, texts with tokens that the model does not have are refused.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        self.folder = Path(path)
        if not any((self.folder / f"tokenizer.{kind}").is_file() for kind in ("model", "json")):
            raise FileNotFoundError(f"{path} has no tokenizer.model and no tokenizer.json")
        try:
            self.config = read_json(self.folder / "tokenizer_config.json", missing={})
            self.model = read_model(self.folder, self.config)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            reason = error if isinstance(error, ValueError) else f"it is damaged ({error})"
            raise ValueError(f"the tokenizer in {path} is not read: {reason}") from None
        self.eos = self.model.names.get("eos_token", "")
        self.eos_id = self.model.specials.get(self.eos)
        self.vocab_size = vocab_size

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        """The folder's own template; Vicuna's format, if the folder's name says so; or None."""
        return read_chat_format(self.folder, self.config, self.model.names)

    @property
    def prompt_format(self) -> ChatFormat:
        """The ``chat_format``; or plain text if the folder has none."""
        return self.chat_format or plain_format(self.eos)

    def encode(self, text: str, with_bos: bool = True, after: int | None = None) -> list[int]:
        """Text -> ids, BOS first where the model expects one; not if it goes on ``after`` an id.

        The text of a special token stands for that token wherever it occurs. Raises ValueError for
        what is no text, or has a token that the model lacks, as it was only added here.
        """
        ids = self.model.encode(check_text(text), with_bos and after is None, after)
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise ValueError(
                f"the text has the token {max(ids)} of the tokenizer in {self.folder}, but the "
                f"model has only tokens 0 to {self.vocab_size - 1}"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; special tokens and unknown ids leave none, half a character is U+FFFD."""
        return self.model.decode([int(token) for token in ids])

    def encode_chat(
        self,
        messages: Messages,
        system: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> list[int]:
        """A dialogue -> its ids in the folder's chat format; after the user the assistant is next.

        ``system`` says how the assistant is to answer. ``template_options`` are given to the
        folder's own template, such as {"enable_thinking": False} to Qwen3's. Raises ValueError if
        the folder has no chat format, or it cannot render this.
        """
        if self.chat_format is None:
            raise ValueError(
                f"{self.folder} has no chat template; encode plain text, or give the folder a "
                "chat_template.jinja"
            )
        return self.encode_prompt(messages, system, template_options)

    def encode_prompt(
        self,
        messages: Messages,
        system: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> list[int]:
        """As ``encode_chat``, but in plain text if the folder has no chat format."""
        options = template_options or {}
        if options and not self.prompt_format.is_own:
            raise ValueError(
                f"the prompt format is {self.prompt_format.name}; it has no template options"
            )
        dialogue = as_dialogue(messages, system)
        return self.encode_rendered(self.prompt_format.render(dialogue, **options))

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text, with_bos=not self.prompt_format.is_own)  # which writes the BOS

    def rounds(self, messages: Messages) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (ids of the prompt, ids of the answer up to its EOS) of each answer.

        The prompt is what a model is given, and the answer what it has to write then, also if
        another token would stand for the end of the one and the beginning of the other together. A
        prompt is only what follows the round before it, or whole if the template has written that
        otherwise since. ValueError if an answer is not written whole right after its prompt, as by
        templates that leave out what the assistant thought.
        """
        dialogue = as_dialogue(messages)
        done, last_id = "", None
        for turn, message in enumerate(dialogue):
            if message["role"] != "assistant":
                continue
            if turn == 0:
                raise ValueError("the assistant speaks first; expected a message to answer")
            asked = self.prompt_format.render(dialogue[:turn])
            answered = self.prompt_format.render(dialogue[: turn + 1])
            said = answered[len(asked) :]
            whole = answered.startswith(asked) and message["content"].strip() in said
            if not asked or not whole:
                raise ValueError(
                    "the chat template does not write an answer whole after its prompt"
                )
            if self.eos in said:
                said = said[: said.index(self.eos) + len(self.eos)] if self.eos else said
            goes_on = last_id is not None and asked.startswith(done)
            rest = asked.removeprefix(done)
            prompt = self.encode(rest, after=last_id) if goes_on else self.encode_rendered(asked)
            answer = self.encode(said, after=prompt[-1])
            yield prompt, answer
            done, last_id = asked + said, (answer or prompt)[-1]


def read_model(folder: Path, config: dict[str, Any]) -> Any:
    """What turns text into ids and back: a SentencePieceModel, or a JsonModel.

    A tokenizer.model next to a tokenizer.json says the same if the class is a Llama's, and then it
    is read, so that the package ``tokenizers`` is not needed; but it may be another model's.
    """
    content = read_json(folder / "tokenizer.json", missing={})
    name = config.get("tokenizer_class")
    is_llama = name in ("LlamaTokenizer", "LlamaTokenizerFast")
    if not content and name is not None and not is_llama:
        raise ValueError(
            f"tokenizer_class {name!r} has rules of its own; only LlamaTokenizer is known"
        )
    if not content or (is_llama and has_pieces(folder, content["model"]["vocab"])):
        return SentencePieceModel(folder, config, content)
    from .tokenizer_json import JsonModel  # not every model needs the package

    return JsonModel(folder, config, content)


def check_text(text: str) -> str:
    """The ``text``; ValueError for what is none."""
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {text!r:.60}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half a character, of a file or a terminal
        raise ValueError(f"the text is not valid UTF-8 ({error})") from None
    return text


class TextStream:
    """Turns tokens that arrive in groups into text that can be printed at once.

    A group is decoded after the one before it, and not after all that came before: that is enough
    to know whether the group begins with a space. With ``stop_at`` the text ends before the first
    of these stop strings, see ``StopStrings``.
    """

    def __init__(self, tokenizer: Tokenizer, stop_at: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_at = stop_at
        self.held = ""  # certain text that is a stop string, or may become one, and what follows
        self.before: list[int] = []  # ids whose text was returned: the last group that had any
        self.waiting: list[int] = []  # ids whose text is not certain yet

    def push(self, ids: list[int], last: bool = False) -> str:
        """Take new ids; return the text that has become certain, with ``last`` all of it."""
        self.waiting += ids
        text = self.decode_waiting()
        # Half a character, or bytes that are decoded together with those that follow.
        is_open = text.endswith("\ufffd") or self.tokenizer.model.is_open(self.waiting)
        if last or not is_open:
            self.held += text
            # A group without text of its own cannot show where the next one begins.
            if self.tokenizer.decode(self.waiting):
                self.before = []
            self.before += self.waiting
            self.waiting = []
        text = self.held
        end = find_stop(text, self.stop_at, begun=not last)
        self.held = text[end:]
        return text[:end]

    def has_stopped(self) -> bool:
        """Whether there is a stop string in the text of the ids so far."""
        text = self.held + self.decode_waiting()
        return find_stop(text, self.stop_at) < len(text)

    def decode_waiting(self) -> str:
        """The text of the ids whose text is not certain yet, as if they were the last."""
        shown = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + self.waiting)[len(shown) :]


def find_stop(text: str, stop_at: Sequence[str], begun: bool = False) -> int:
    """Where in ``text`` the first stop string is, or only its begin at the end; else the length.

    >>> find_stop("one two th", ["three", "two"]), find_stop("one th", ["three"], begun=True)
    (4, 4)
    """
    ends = [text.find(stop) for stop in stop_at if stop in text]
    longest = max(map(len, stop_at), default=0) if begun else 0
    for start in range(max(0, len(text) - longest), len(text)):
        ends += [start for stop in stop_at if stop.startswith(text[start:])]
    return min(ends, default=len(text))


class StopStrings:
    """Texts at which answers end: see ``Options.stop_at``.

    An answer's tokens end with the one that completes a stop string, and its text ends before the
    stop string, as in vLLM. Tokens are looked at one by one, so the draft makes no difference. A
    special token, which leaves no text, is found by its id.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Raises ValueError if ``texts`` are no list of texts, or one of them cannot be found."""
        if isinstance(texts, str):
            raise ValueError(f"stop strings are a list of texts, not {texts!r}")
        specials = tokenizer.model.specials
        self.tokenizer = tokenizer
        self.texts = [check_text(text) for text in texts if text not in specials]
        self.ids = {specials[text] for text in texts if text in specials}
        for text in self.texts:
            inside = [token for token in specials if token in text]
            if not text or inside:
                why = f"hold the special token {inside[0]!r} and other text" if text else "be empty"
                raise ValueError(f"a stop string cannot {why}: {text!r}")

    def begin(self) -> Callable[[int], bool]:
        """What one answer asks about each of its tokens: whether it ends with it."""
        stream = TextStream(self.tokenizer, self.texts)

        def is_last(token: int) -> bool:
            stream.push([token])
            return token in self.ids or stream.has_stopped()

        return is_last

    def cut(self, text: str) -> str:
        """The ``text`` of an answer, up to the first stop string."""
        return text[: find_stop(text, self.texts)]
