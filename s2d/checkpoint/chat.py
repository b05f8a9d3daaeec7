"""Chat formats: a folder's own template, in jinja, or Vicuna's format, which no folder brings."""

import json
import os
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ..files import names_of, read_text

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

MARK = "\ue000"  # stands for an answer: a character without a meaning
Message = dict[str, Any]  # "role", "content", and whatever else a template asks for


def as_dialogue(
    messages: str | Iterable[str | Message], system: str | None = None
) -> list[Message]:
    """Messages as a template takes them, one of the system first if there is one.

    ``messages`` are texts, user and assistant in turn, or dictionaries of "role" and "content". A
    single text is the user's. Raises ValueError for anything else.
    """
    expected = "expected texts, user and assistant in turn, or dictionaries of role and content"
    try:
        given = [messages] if isinstance(messages, (str, dict)) else list(messages)
    except TypeError:
        raise ValueError(f"{expected}; got {messages!r:.60}") from None
    if given and all(isinstance(each, str) for each in given):
        roles = ("user", "assistant") * len(given)
        given = [{"role": role, "content": text} for role, text in zip(roles, given)]
    for each in given:
        if not (
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
        ):
            raise ValueError(f"{expected}; got {each!r:.60}")
    if not given or given[-1]["role"] == "system":
        raise ValueError(f"{expected}; got no message to answer")
    if system is None:
        return given
    if given[0]["role"] == "system":
        raise ValueError("the system message is given twice")
    return [{"role": "system", "content": system}, *given]


class VicunaFormat:
    """The format of Vicuna, which no folder brings.

    Attributes:
        adds_bos: whether a rendered text begins with the BOS, where the model expects one.
        is_own: whether it is the folder's own template.
    """

    adds_bos = False
    is_own = False

    def __init__(self, eos: str) -> None:
        self.eos = eos

    def render(self, dialogue: list[Message]) -> str:
        """The text of a dialogue; after the user's last message the assistant is next."""
        system = VICUNA_SYSTEM
        if dialogue[0]["role"] == "system":
            system = dialogue[0]["content"]
            dialogue = dialogue[1:]
        text = f"{system} " if system else ""
        for turn, message in enumerate(dialogue):
            role, content = ("user", "assistant")[turn % 2], message["content"]
            if message["role"] != role:
                raise ValueError(
                    f"Vicuna's format has user and assistant in turn; message {turn + 1} is of "
                    f"{message['role']!r:.60}"
                )
            if role == "user":
                text += f"USER: {content} ASSISTANT:"
            else:
                text += f" {content}{self.eos}" if content else self.eos
        return text


class PlainFormat:
    """Paragraphs, and the EOS after each answer. Attributes are those of VicunaFormat."""

    adds_bos = False
    is_own = False

    def __init__(self, eos: str) -> None:
        self.eos = eos

    def render(self, dialogue: list[Message]) -> str:
        """The text of a dialogue; after a single message of the user, this message."""
        ends = {"assistant": self.eos}
        return "\n\n".join(each["content"] + ends.get(each["role"], "") for each in dialogue)


class ChatTemplate:
    """A folder's own template, in jinja; ``names``: {"bos_token": text, ...}.

    Attributes are those of VicunaFormat.
    """

    adds_bos = True
    is_own = True

    def __init__(self, folder: Path, source: str, names: dict[str, str]) -> None:
        self.folder = folder
        self.source = source
        self.names = names

    @cached_property
    def compiled(self) -> Any:
        """The template as jinja's; whatever is wrong with it is raised here."""
        return sandbox().from_string(self.source)

    def render(self, dialogue: list[Message]) -> str:
        """The text of a dialogue; unless the assistant has spoken last, it is next."""
        given = {"messages": dialogue, "tools": None, "documents": None}
        given["add_generation_prompt"] = dialogue[-1]["role"] != "assistant"
        try:
            return self.compiled.render(self.names | given)
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = str(error).replace("\n", " ")
            raise ValueError(f"the chat template of {self.folder} fails: {reason}") from None


def answer_after(
    asked: str, dialogue: list[Message], chat_format: ChatTemplate | VicunaFormat | PlainFormat
) -> str:
    """What a model has to write after the prompt ``asked``: the last message, and what ends it.

    Most templates write this after the prompt, as it is. In others the prompt has words that are
    not in the dialogue afterwards, as <think>, or the dialogue lacks what the assistant thought:
    then the answer is what was said, without such words of the prompt.
    """
    answered = chat_format.render(dialogue)
    *before, last = dialogue
    said = last["content"].strip()
    if answered.startswith(asked) and said in answered[len(asked) :]:
        return answered[len(asked) :]
    head, found, end = chat_format.render([*before, last | {"content": MARK}]).rpartition(MARK)
    if not found:
        raise ValueError("the chat template leaves out what the assistant says")
    same = len(os.path.commonprefix([asked, head]))
    opening = asked[same:]  # such as <think>, with which what was said may begin
    said = said.removeprefix(opening.strip())
    if opening[-1:].isspace():
        said = said.lstrip()
    begins = head[same:] if same == len(asked) else ""  # the prompt ends before the answer's header
    return begins + said + end


def read_chat_format(
    folder: Path, config: dict[str, Any], names: dict[str, str]
) -> ChatTemplate | VicunaFormat | None:
    """A folder's own template, or Vicuna's format if the folder's name says so, or None.

    ``config`` is what is in tokenizer_config.json; ``names`` are {"bos_token": text, ...}. Raises
    ValueError if the folder has several templates, and none of them is the default.
    """
    templates = {}
    source = config.get("chat_template")
    if isinstance(source, dict):  # several, by name
        templates = {str(name): text for name, text in source.items()}
    elif isinstance(source, list):
        try:
            templates = {str(each["name"]): each["template"] for each in source}
        except (TypeError, KeyError):
            raise ValueError(f"{folder}: the chat templates have no names and texts") from None
    elif source:
        templates = {"default": source}
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:  # they take the place of those in tokenizer_config.json, as in transformers
        templates = {name: read_text(path) for name, path in files.items()}
    if "default" in templates:
        return ChatTemplate(folder, templates["default"], names)
    if templates:
        names = ", ".join(sorted(templates))
        raise ValueError(f"{folder} has chat templates called {names}, but no default one")
    known_as = [each.name.lower() for each in names_of(folder)]
    if any("vicuna" in name or name.startswith("mini-") for name in known_as):
        return VicunaFormat(names.get("eos_token", ""))
    return None


def sandbox():
    """Jinja as transformers sets it up for chat templates."""
    from jinja2 import nodes  # not every model needs the package
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, which marks what the assistant says."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("as_it_is"), [], [], body).set_lineno(line)

        def as_it_is(self, caller):
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter ``tojson`` with the arguments, and the order of them, that templates rely on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(format: str) -> str:
    """The date and time, with the name of the argument that templates rely on."""
    return datetime.now().strftime(format)


def raise_exception(message):
    """What a template calls if it is given what it cannot render."""
    raise ValueError(message)


def describe(chat_format: ChatTemplate | VicunaFormat | None) -> str:
    """A few words for people: which format prompts have."""
    if chat_format is None:
        return "plain text (the folder has no chat template)"
    if chat_format.is_own:
        return "the folder's own chat template"
    return "Vicuna's format (by the folder's name)"
