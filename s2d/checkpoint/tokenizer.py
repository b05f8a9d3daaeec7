"""Text <-> token ids, and streams of text.

A tokenizer.model that says everything is read by SentencePiece, every other folder by transformers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat import ChatFormat, Message, as_dialogue, format_by_name
from .tokenizer_model import read_sentencepiece

Messages = str | Iterable[str | Message]  # see ``as_dialogue``
# Each character of a text, and whether it is shown: those of special tokens are not.
Characters = list[tuple[str, bool]]


class Tokenizer:
    """The tokenizer of a model's folder; FileNotFoundError: there is none, ValueError: damaged.

    ``special`` is {id: text} of the tokens that leave no text. ``eos`` is the text of the EOS, ""
    if the tokenizer has none. With the ``vocab_size`` of a model, texts with tokens that the model
    does not have are refused. ModuleNotFoundError: the package transformers is needed and missing.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        self.folder = Path(path)
        if not any(
            (self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
        ):
            raise FileNotFoundError(f"{path} has no tokenizer.model and no tokenizer.json")
        self.model: Any = read_sentencepiece(self.folder)
        if self.model is None:
            from .published import PublishedTokenizer  # not every folder needs transformers

            self.model = PublishedTokenizer(self.folder)
        self.vocab_size = vocab_size
        self.special = self.model.special
        self.eos = self.model.eos

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The folder's own template; Vicuna's format, if the folder's name says so; plain text."""
        if self.model.chat_template:
            return ChatFormat("the folder's own chat template", self.model.render, is_template=True)
        return format_by_name(self.folder, self.eos)

    def encode(self, text: str, with_bos: bool = True) -> list[int]:
        """Text -> ids, BOS first where the model expects one.

        The text of a special token stands for that token wherever it occurs. Raises ValueError for
        a text with half a character, or with a token that was added here and the model lacks.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[: error.end][-20:]
            raise ValueError(f"a text is not valid UTF-8, at the end of {found!r}") from None
        ids = self.model.encode(text, with_bos)
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            words = f"the text has the token {max(ids)} of the tokenizer in {self.folder}"
            raise ValueError(f"{words}, but the model has only tokens 0 to {self.vocab_size - 1}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; special tokens and unknown ids leave none, half a character is U+FFFD."""
        ids = [int(token) for token in ids]
        text = self.model.decode(ids)
        if "\ufffd" in text:  # whole characters around the half one are shown, as in a stream
            text = TextStream(self).push(ids, last=True)
        return text

    def encode_chat(
        self,
        messages: Messages,
        system: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> list[int]:
        """A dialogue -> its ids in the chat format; after the user the assistant is next.

        ``system`` says how the assistant is to answer. ``template_options`` are given to the
        folder's own template, such as {"enable_thinking": False} to Qwen3's. Raises ValueError if
        the chat format cannot render this.
        """
        if template_options and not self.chat_format.is_template:
            raise ValueError(f"the prompt format is {self.chat_format.name}; it has no options")
        dialogue = as_dialogue(messages, system)
        return self.encode_rendered(self.chat_format.render(dialogue, **(template_options or {})))

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text, with_bos=not self.chat_format.is_template)  # which writes the BOS


class TextStream:
    """Turns tokens that arrive one after another into text that can be printed at once.

    A token is decoded after the group of tokens before it, and not after all that came before: that
    is enough to know whether it begins with a space. With ``stop_at`` the text ends before the
    first of these stop strings, see ``StopStrings``.
    """

    def __init__(self, tokenizer: Tokenizer, stop_at: Sequence[str] = ()) -> None:
        self.special = tokenizer.special
        self.decode = tokenizer.model.decode
        self.stop_at = stop_at
        # Certain text that is a stop string, or may become one, and what follows it.
        self.held: Characters = []
        self.before: list[int] = []  # ids whose text is certain: the last group that had any
        self.waiting: list[int] = []  # ids whose text is not certain yet

    def push(self, ids: Iterable[int], last: bool = False) -> str:
        """Take new ids; return the text that has become certain, with ``last`` all of it."""
        for token in ids:
            special = self.special.get(token)
            if special is not None:
                self.take_waiting()  # no character goes on behind a special token
                self.held += [(character, False) for character in special]
                self.before.append(token)
                continue
            self.waiting.append(token)
            # Half a character waits for the rest of it.
            if not self.decode(self.before + self.waiting).endswith("\ufffd"):
                self.take_waiting()
        if last:
            self.take_waiting()
        end = find_stop(written(self.held), self.stop_at, begun=not last)
        ready, self.held = self.held[:end], self.held[end:]
        return "".join(character for character, is_shown in ready if is_shown)

    def is_last(self, token: int) -> bool:
        """Take a new id; whether there is a stop string in the text so far."""
        self.push([token])
        text = written(self.held + self.decode_waiting())
        return find_stop(text, self.stop_at) < len(text)

    def take_waiting(self) -> None:
        """The text of the ids that wait is certain."""
        self.held += self.decode_waiting()
        # Ids without a text cannot show where the next ones begin.
        if self.decode(self.waiting):
            self.before = []
        self.before += self.waiting
        self.waiting = []

    def decode_waiting(self) -> Characters:
        """The text of the ids that wait, as if they were the last."""
        seen = self.decode(self.before)
        text = self.decode(self.before + self.waiting)
        if text.startswith(seen):
            text = text[len(seen) :]
        else:  # half a character has made whole ones before it U+FFFD as well
            text = self.decode(self.waiting)
        return [(character, True) for character in text]


def written(characters: Characters) -> str:
    """The text with its special tokens, in which stop strings are looked for."""
    return "".join(character for character, _ in characters)


def find_stop(text: str, stop_at: Sequence[str], begun: bool = False) -> int:
    """Where the first stop string is in ``text``; the length of the text if there is none.

    With ``begun``, a stop string of which only the first letters are there, at the end, counts.

    >>> find_stop("one two th", ["three", "two"])
    4
    >>> find_stop("one th", ["three"], begun=True)
    4
    """
    ends = [text.index(stop) for stop in stop_at if stop in text]
    for stop in stop_at if begun else ():
        starts = range(max(0, len(text) - len(stop)), len(text))
        ends += [start for start in starts if stop.startswith(text[start:])]
    return min(ends, default=len(text))


class StopStrings:
    """Texts at which answers end: see ``Options.stop_at``.

    An answer's tokens end with the one that completes a stop string, and its text ends before the
    stop string, as in vLLM. Tokens are looked at one by one, so the draft makes no difference.
    Special tokens are looked at as they are written, though an answer's text does not show them.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Raises ValueError if ``texts`` are no list of texts, or one of them is empty."""
        if isinstance(texts, str):
            raise ValueError(f"stop strings are a list of texts, not {texts!r}")
        self.tokenizer = tokenizer
        self.texts = list(texts)
        if "" in self.texts:
            raise ValueError("a stop string cannot be empty")

    def begin(self) -> Callable[[int], bool]:
        """What one answer asks about each of its tokens: whether it ends with it."""
        return TextStream(self.tokenizer, self.texts).is_last

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of an answer's ``tokens`` up to the first stop string."""
        return TextStream(self.tokenizer, self.texts).push(tokens, last=True)
