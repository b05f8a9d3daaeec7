"""Text <-> token ids, and chat templates. Knows nothing about tensors.

A folder has SentencePiece's tokenizer.model or, through the package ``tokenizers``, a tokenizer.json. How its model wants to
be spoken to, its chat template, is written in the folder too, or known for the families this project began with.
"""

import json
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sentencepiece import SentencePieceProcessor

from .program import one_line, optional
from .weights.config import added_tokens, read_json_if_there, shown, text_of

TOKENIZERS_PACKAGE = "tokenizers==0.23.3"
LLAMA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}  # unless a folder says otherwise
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class Tokenizer:
    """A Llama's tokenizer: of a folder, or in a file tokenizer.model or tokenizer.json.

    Raises FileNotFoundError if there is none and ValueError if it is damaged. ``bos_id`` and ``eos_id`` are None where
    it has none.
    """

    def __init__(self, path):
        path = Path(path)
        if path.is_dir():
            path = next(
                (
                    path / name
                    for name in ("tokenizer.model", "tokenizer.json")
                    if (path / name).is_file()
                ),
                path,
            )
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}; expected SentencePiece's tokenizer.model, or a tokenizer.json"
            )
        kind = JsonModel if path.suffix == ".json" else SentencePieceModel
        self.model = kind(path, read_json_if_there(path.with_name("tokenizer_config.json")))
        self.bos_id, self.eos_id, self.vocab_size = (
            self.model.bos_id,
            self.model.eos_id,
            self.model.vocab_size,
        )

    def encode(self, text):
        """Text -> ids, BOS first where the model wants one. ValueError for what UTF-8 cannot write (half a surrogate pair)."""
        return self.model.start + self._ids(text)

    def encode_marked(self, text):
        """Text marked up by a chat template -> ids: names of special tokens in it stand for these, and nothing is added."""
        return self.model.encode_marked(checked(text))

    def _ids(self, text):
        return self.model.encode(checked(text))

    def decode(self, ids):
        """Ids -> text; control tokens, and ids that only a padded vocabulary has, leave none; a half character is U+FFFD."""
        return self.model.decode([token for token in ids if token < self.vocab_size])

    def encode_chat(self, messages, template="vicuna"):
        """A dialogue -> the ids after which the assistant speaks.

        ``messages`` are texts, user and assistant in turn, the user first and last. ``template`` is what
        ``chat_template`` returns: a ChatTemplate, "vicuna" (v1.1 and later) or "llama-2" (Llama-2-chat, without a system
        message). With the latter two each round is encoded on its own, as both models were trained: SentencePiece puts
        its space in front of every round.
        """
        if len(messages) % 2 == 0:
            raise ValueError(
                f"a dialogue ends with the user's message; got {len(messages)} messages"
            )
        if isinstance(template, ChatTemplate):
            return self.encode_marked(template.render(messages, to_be_answered=True))
        if template not in ("vicuna", "llama-2"):
            raise ValueError(f"unknown chat template {template!r}; expected 'vicuna' or 'llama-2'")
        return [
            token
            for prompt, answer in self.rounds(messages, template)
            for token in (*prompt, *answer)
        ]

    def rounds(self, messages, template="vicuna"):
        """Yield (ids of the prompt, ids of the answer with its EOS) of each round; an answer still to come is empty."""
        if isinstance(template, ChatTemplate):
            yield from self._rounds_by_template(messages, template)
            return
        for turn, user in enumerate(messages[0::2]):
            answer = messages[2 * turn + 1] if 2 * turn + 1 < len(messages) else None
            bos = [] if self.bos_id is None else [self.bos_id]
            if template == "llama-2":
                start, prompt = bos, f"[INST] {user.strip()} [/INST]"
                whole = f"{prompt} {(answer or '').strip()} "
            else:
                start = bos if turn == 0 else []
                prompt = (
                    f"{VICUNA_SYSTEM} USER: {user} ASSISTANT:"
                    if turn == 0
                    else f"USER: {user} ASSISTANT:"
                )
                whole = f"{prompt} {answer}"
            ids = self._ids(prompt)
            # An answer begins with a space, so no piece reaches from the prompt into it.
            eos = [] if self.eos_id is None else [self.eos_id]
            yield start + ids, [] if answer is None else self._ids(whole)[len(ids) :] + eos

    def _rounds_by_template(self, messages, template):
        """What a template puts after an answer's EOS belongs to the next round's prompt."""
        said, rest = "", []
        for turn in range(0, len(messages), 2):
            asked = template.render(messages[: turn + 1], to_be_answered=True)
            answered = template.render(messages[: turn + 2]) if turn + 1 < len(messages) else asked
            if not (asked.startswith(said) and answered.startswith(asked)):
                raise ValueError(
                    "the chat template rewrites earlier turns, so they cannot be told apart"
                )
            prompt = rest + self.encode_marked(asked[len(said) :])
            answer = self.encode_marked(answered[len(asked) :])
            end = answer.index(self.eos_id) + 1 if self.eos_id in answer else len(answer)
            yield prompt, answer[:end]
            said, rest = answered, answer[end:]


def checked(text):
    """The text, unless UTF-8 cannot write it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text is no Unicode character; is it UTF-8?"
        ) from None
    return text


class SentencePieceModel:
    """tokenizer.model. In a text marked up by a template special tokens have names, which SentencePiece does not read.

    Tokens that were added to its vocabulary later are in tokenizer_config.json.
    """

    def __init__(self, path, config):
        self.pieces, self.legacy = SentencePieceProcessor(), config.get("legacy", False)
        try:  # not by the constructor, which takes an empty file for none at all
            self.pieces.load_from_serialized_proto(path.read_bytes())
        except RuntimeError:
            raise ValueError(f"{path} is not a SentencePiece model; download it again") from None
        self.size = self.pieces.vocab_size()
        self.added = {
            number: token for number, token in added_tokens(config).items() if number >= self.size
        }
        self.vocab_size = max([self.size - 1, *self.added]) + 1
        own, names = (self.pieces.bos_id(), self.pieces.eos_id()), special_tokens(config)
        ids = {text: number for number, (text, _) in self.added.items()}
        self.bos_id, self.eos_id = (ids.get(names.get(name), None if number < 0 else number)
                                    for name, number in zip(("bos_token", "eos_token"), own))  # fmt: skip
        self.start = (
            [self.bos_id] if config.get("add_bos_token", True) and self.bos_id is not None else []
        )

    def encode(self, text):
        return self.pieces.encode(text)

    @cached_property
    def named(self):
        pieces = self.pieces
        own = {
            pieces.id_to_piece(i): i
            for i in range(self.size)
            if pieces.is_control(i) or pieces.is_unknown(i)
        }
        return own | {text: number for number, (text, _) in self.added.items()}

    def encode_marked(self, text):
        names, ids = "|".join(map(re.escape, self.named)), []
        for part in filter(None, re.split(f"({names})", text)):
            if part in self.named:
                ids.append(self.named[part])
            elif (
                ids and not self.legacy
            ):  # SentencePiece's space only in front of all, not behind every special token
                ids += self.pieces.encode("\n" + part)[len(self.pieces.encode("\n")) :]
            else:
                ids += self.pieces.encode(part)
        return ids

    def decode(self, ids):
        texts, run = [], []
        for token in [*ids, None]:
            if token is None or token >= self.size:
                texts.append(self.pieces.decode(run))
                text, special = self.added.get(token, ("", True))
                texts.append("" if special else text)
                run = []
            else:
                run.append(token)
        return "".join(texts)


class JsonModel:
    """tokenizer.json, by the package ``tokenizers``. Names of special tokens in a text always stand for these."""

    def __init__(self, path, config):
        tokenizers = optional("tokenizers", TOKENIZERS_PACKAGE)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # it raises nothing more particular
            raise ValueError(
                f"{path} is not a tokenizer ({shown(str(error))[1:-1]}); download it again"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = self.tokenizer.get_vocab_size()
        tokens = special_tokens(config)
        self.bos_id, self.eos_id = (
            self.tokenizer.token_to_id(tokens.get(name, "")) for name in ("bos_token", "eos_token")
        )
        plain, whole = self.encode("a"), self.tokenizer.encode("a").ids
        begins = whole[
            : next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
        ]  # by its own rule, else as told
        told = config.get("add_bos_token") and str(config.get("tokenizer_class")).startswith(
            "Llama"
        )
        self.start = begins or ([self.bos_id] if told and self.bos_id is not None else [])

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    encode_marked = encode

    def decode(self, ids):
        return self.tokenizer.decode(ids)


class TextStream:
    """Turns tokens that arrive in groups into text that can be printed at once.

    A byte piece may be half a character, so text is held back while it ends in U+FFFD.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids, self.shown = [], 0

    def push(self, ids):
        """Take new ids; return the text that has become certain."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        return self._rest(text)

    def finish(self):
        """The text still held back, now that no more tokens come."""
        return self._rest(self.tokenizer.decode(self.ids))

    def _rest(self, text):
        rest, self.shown = text[self.shown :], len(text)
        return rest


def chat_template(folder, unknown="vicuna"):
    """How the model in ``folder`` wants to be spoken to: its own ChatTemplate, "vicuna" or "llama-2" by name, or ``unknown``."""
    folder = Path(folder)
    config, tokens = (
        read_json_if_there(folder / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    source = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):  # several by name
        by_name = {
            str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)
        }
        source = by_name.get("default", source)
    if isinstance(source, str):
        known = LLAMA_TOKENS if (folder / "tokenizer.model").is_file() else {}
        return ChatTemplate(folder, source, known | special_tokens(tokens) | special_tokens(config))
    if source is not None:
        raise ValueError(f"{folder}: chat_template is {shown(source)}; expected text")
    name = folder.resolve().name.lower()
    if "llama-2" in name:
        return "llama-2"
    return "vicuna" if "vicuna" in name or name.startswith("mini-") else unknown


def special_tokens(config):
    """{"bos_token": text, ...} of a tokenizer_config.json, those that it has."""
    texts = {
        name: text_of(config.get(name))
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    return {name: text for name, text in texts.items() if text is not None}


class ChatTemplate:
    """A folder's own chat template, in jinja, rendered in a sandbox as transformers does. ``tokens``: ``special_tokens``."""

    def __init__(self, folder, source, tokens):
        self.folder, self.tokens = folder, tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(
            value, ensure_ascii=False, **how
        )
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda how: datetime.now().strftime(how),
        }
        self.template = self._safely(environment.from_string, source)

    def render(self, messages, to_be_answered=False):
        """Texts, user and assistant in turn -> one text, up to where the assistant speaks if it is ``to_be_answered``."""
        said = [
            {"role": ("user", "assistant")[turn % 2], "content": text}
            for turn, text in enumerate(messages)
        ]
        return self._safely(self.template.render, messages=said, add_generation_prompt=to_be_answered, tools=None,
                            documents=None, **self.tokens)  # fmt: skip

    def _safely(self, function, *args, **options):
        """A template is a program of somebody else's: it can fail in every way."""
        try:
            return function(*args, **options)
        except Exception as error:
            raise ValueError(
                f"the chat template of {self.folder} fails: {one_line(error) or type(error).__name__}"
            ) from None


class Generation(Extension):
    """The tag with which templates mark what the assistant says: here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message):
    """What a template calls where it is given what it cannot render."""
    raise TemplateError(message)
