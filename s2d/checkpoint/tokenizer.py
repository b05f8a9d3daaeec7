"""Text <-> token ids, as transformers does it.

A folder has SentencePiece's tokenizer.model or, for the package ``tokenizers``, a tokenizer.json.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import read_json, refuse_other_than_utf8
from .chat import (
    ChatFormat,
    ChatTemplate,
    Message,
    PlainFormat,
    VicunaFormat,
    answer_after,
    as_dialogue,
    read_chat_format,
)
from .special import is_llama
from .tokenizer_model import SentencePieceModel, fits

if TYPE_CHECKING:
    from .tokenizer_json import JsonModel  # not every model needs the package


class Tokenizer:
    """The tokenizer of a Llama's folder; FileNotFoundError: there is none, ValueError: damaged.

    ``eos`` is the text of the EOS and ``eos_id`` its id, None if the tokenizer has none. With the
    ``vocab_size`` of a model, texts with tokens that the model does not have are refused.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        refuse_other_than_utf8(path)
        self.folder = Path(path)
        if not any((self.folder / f"tokenizer.{kind}").is_file() for kind in ("model", "json")):
            raise FileNotFoundError(f"{path} has no tokenizer.model and no tokenizer.json")
        try:
            self.config = read_json(self.folder / "tokenizer_config.json", missing={})
            self.model = read_model(self.folder, self.config)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"the tokenizer in {path} is damaged ({error})") from None
        self.names = self.model.names
        self.eos = self.names.get("eos_token", "")
        self.eos_id = self.model.eos_id
        self.vocab_size = vocab_size

    @cached_property
    def chat_format(self) -> ChatTemplate | VicunaFormat | None:
        """The folder's own template; Vicuna's format, if the folder's name says so; or None.

        Raises ValueError if templates cannot be read, or none of several is the default. A folder
        of which only plain text is encoded is not asked.
        """
        return read_chat_format(self.folder, self.config, self.names)

    @property
    def prompt_format(self) -> ChatFormat:
        """The ``chat_format``; or plain text if the folder has none."""
        return self.chat_format or PlainFormat(self.eos)

    def encode(self, text: str, with_bos: bool = True) -> list[int]:
        """Text -> ids, BOS first where the model expects one.

        The text of a special token stands for that token wherever it occurs. Raises ValueError for
        what is no text.
        """
        return self.check_ids(self.model.encode(check_text(text), with_bos))

    def encode_after(self, text: str, last_id: int) -> list[int]:
        """The ids of a text that goes on after others, of which the last one is ``last_id``."""
        return self.check_ids(self.model.encode_after(check_text(text), last_id))

    def check_ids(self, ids: list[int]) -> list[int]:
        """The ``ids``; ValueError if the model has no such token, as it was only added here."""
        largest = max(ids, default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"the text has the token {largest} of the tokenizer in {self.folder}, but the "
                f"model has only tokens 0 to {self.vocab_size - 1}"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; special tokens and unknown ids leave none, half a character is U+FFFD."""
        return self.model.decode([int(token) for token in ids])

    def encode_chat(
        self, messages: str | Iterable[str | Message], system: str | None = None
    ) -> list[int]:
        """A dialogue -> its ids in the folder's chat format.

        After the user's last message the assistant is next. ``messages`` are texts, user and
        assistant in turn, or dictionaries of "role" and "content"; a single text is the user's.
        ``system`` says how the assistant is to answer. Raises ValueError if the folder has no chat
        format, or it cannot render this.
        """
        if self.chat_format is None:
            raise ValueError(
                f"{self.folder} has no chat template; encode plain text, or give the folder a "
                "chat_template.jinja"
            )
        return self.encode_prompt(messages, system)

    def encode_prompt(
        self, messages: str | Iterable[str | Message], system: str | None = None
    ) -> list[int]:
        """As ``encode_chat``, but in plain text if the folder has no chat format."""
        return self.encode_rendered(self.prompt_format.render(as_dialogue(messages, system)))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of what ``prompt_format`` rendered; a template of the folder writes the BOS."""
        return self.encode(text, with_bos=not self.prompt_format.is_own)

    def rounds(
        self, messages: str | Iterable[str | Message], system: str | None = None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (ids of the prompt, ids of the answer up to its EOS) of each round.

        This is in the format of ``encode_prompt``; ``encode_chat`` says what ``messages`` are.

        The ids of a prompt are those that a model is given, and the ids of the answer those that it
        has to write then, also if another token would stand for the end of the one and the
        beginning of the other together. Each prompt is only what follows the round before it; but
        it is whole if the template has written that round otherwise since, as those do that leave
        out what a model thought.
        """
        dialogue = as_dialogue(messages, system)
        if dialogue[0]["role"] == "assistant":
            raise ValueError("the assistant speaks first; expected a message to answer")
        turns = [turn for turn, each in enumerate(dialogue) if each["role"] == "assistant"]
        if dialogue[-1]["role"] != "assistant":
            turns.append(len(dialogue))  # a last question, without an answer
        done = None  # the text of the rounds so far, without the last EOS
        last_id = None
        for turn in turns:
            asked = self.prompt_format.render(dialogue[:turn])
            if done is not None and asked.startswith(done):
                rest = asked[len(done) :]
                # ``done`` lacks the EOS of the last answer, whose id was yielded already; but some
                # templates write an EOS only at the very end.
                if last_id == self.eos_id:
                    rest = rest.removeprefix(self.eos)
                prompt = self.encode_after(rest, last_id)
            else:
                prompt = self.encode_rendered(asked)
            if not prompt:
                raise ValueError("the chat template leaves nothing of what the user says")
            said = ""
            answer = []
            if turn < len(dialogue):
                text = answer_after(asked, dialogue[: turn + 1], self.prompt_format)
                said = text.split(self.eos)[0] if self.eos else text
                end = self.eos if said != text else ""
                answer = self.encode_after(said + end, prompt[-1])
            yield prompt, answer
            done = asked + said
            last_id = (answer or prompt)[-1]


def read_model(folder: Path, config: dict[str, Any]) -> "SentencePieceModel | JsonModel":
    """What turns text into ids and back; ``config`` is what is in tokenizer_config.json.

    transformers reads a tokenizer.json, if there is one. A tokenizer.model next to it says the same
    if the class is a Llama's, and then it is read, so that the package ``tokenizers`` is not
    needed. But it may be left over from another model.
    """
    content = read_json(folder / "tokenizer.json", missing={})
    if not (folder / "tokenizer.json").is_file() or (is_llama(config) and fits(folder, content)):
        return SentencePieceModel(folder, config, content)
    from .tokenizer_json import JsonModel

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
        text = self.held + self.decode_certain(ids, last)
        end = find_first(text, self.stop_at)
        if not last:
            end = min(end, find_begun(text, self.stop_at))
        self.held = text[end:]
        return text[:end]

    def has_stopped(self) -> bool:
        """Whether there is a stop string in the text of the ids so far."""
        text = self.held + self.decode_waiting()
        return find_first(text, self.stop_at) < len(text)

    def decode_certain(self, ids: list[int], last: bool) -> str:
        self.waiting += ids
        if not self.waiting:
            return ""
        if not last and self.tokenizer.model.is_open(self.waiting):
            return ""
        text = self.decode_waiting()
        if text.endswith("\ufffd") and not last:  # half a character
            return ""
        # A group without text of its own cannot show where the next one begins.
        if self.tokenizer.decode(self.waiting):
            self.before = []
        self.before += self.waiting
        self.waiting = []
        return text

    def decode_waiting(self) -> str:
        """The text of the ids whose text is not certain yet, as if they were the last."""
        shown = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + self.waiting)[len(shown) :]


def find_first(text: str, stop_at: Sequence[str]) -> int:
    """Where the first of the stop strings begins in ``text``; its length if there is none.

    >>> find_first("one two three", ["three", "two"])
    4
    """
    return min((text.find(stop) for stop in stop_at if stop in text), default=len(text))


def find_begun(text: str, stop_at: Sequence[str]) -> int:
    """Where ``text`` ends with the first letters of a stop string; its length if it does not.

    >>> find_begun("one two th", ["three", "two"])
    8
    """
    longest = max(map(len, stop_at), default=0)
    for start in range(max(0, len(text) - longest), len(text)):
        if any(stop.startswith(text[start:]) for stop in stop_at):
            return start
    return len(text)


class StopStrings:
    """Texts at which answers end: an ``options.Ending``.

    An answer's tokens end with the one that completes a stop string, and its text ends before the
    stop string, as in vLLM. Tokens are looked at one by one, so the draft makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Raises ValueError if ``texts`` are no list of texts, or one of them is empty."""
        if isinstance(texts, str):
            raise ValueError(f"stop strings are a list of texts, not {texts!r}")
        self.tokenizer = tokenizer
        self.texts = [check_text(text) for text in texts]
        if "" in self.texts:
            raise ValueError("a stop string cannot be empty")

    def begin(self) -> Callable[[int], bool]:
        """What one answer asks about each of its tokens: whether it ends with it."""
        stream = TextStream(self.tokenizer, self.texts)

        def is_last(token: int) -> bool:
            stream.push([token])
            return stream.has_stopped()

        return is_last

    def cut(self, text: str) -> str:
        """The ``text`` of an answer, up to the first stop string."""
        return text[: find_first(text, self.texts)]
