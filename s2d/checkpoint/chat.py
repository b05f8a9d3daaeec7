"""How a dialogue becomes the text of a prompt.

By the folder's own template, in jinja; or in Vicuna's format, which no folder brings; or, if there
is neither, as plain text. A format has

- ``name``: words for people,
- ``is_own``: whether it is the folder's own template, which then also writes the BOS,
- ``render``: a dialogue -> its text; after the user's last message the assistant is next.
"""

import json
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ..files import read_text
from .names import names_of

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
    if not isinstance(system, str):
        raise ValueError(f"expected a text as the system message; got {system!r:.60}")
    return [{"role": "system", "content": system}, *given]


class VicunaFormat:
    """The format of Vicuna, as FastChat writes it; ``eos`` is the text of the EOS."""

    name = "Vicuna's format (by the folder's name)"
    is_own = False

    def __init__(self, eos: str) -> None:
        self.eos = eos

    def render(self, dialogue: list[Message]) -> str:
        system = VICUNA_SYSTEM
        if dialogue[0]["role"] == "system":
            system = dialogue[0]["content"]
            dialogue = dialogue[1:]
        text = f"{system} " if system else ""
        for turn, message in enumerate(dialogue):
            role = ("user", "assistant")[turn % 2]
            content = message["content"]
            if message["role"] != role:
                raise ValueError(
                    f"Vicuna's format has user and assistant in turn; message {turn + 1} is of "
                    f"{message['role']!r:.60}"
                )
            if role == "user":
                text += f"USER: {content} ASSISTANT:"
            else:  # an empty answer is not even a space, in FastChat as well
                text += f" {content}{self.eos}" if content else self.eos
        return text


class PlainFormat:
    """Paragraphs, and the EOS, whose text is ``eos``, after each answer."""

    name = "plain text (the folder has no chat template)"
    is_own = False

    def __init__(self, eos: str) -> None:
        self.eos = eos

    def render(self, dialogue: list[Message]) -> str:
        ends = {"assistant": self.eos}
        return "\n\n".join(each["content"] + ends.get(each["role"], "") for each in dialogue)


class ChatTemplate:
    """A folder's own template, in jinja; ``tokens`` are {"bos_token": text, ...}."""

    name = "the folder's own chat template"
    is_own = True

    def __init__(self, folder: Path, source: str, tokens: dict[str, str]) -> None:
        self.folder = folder
        self.source = source
        self.tokens = tokens

    @cached_property
    def compiled(self) -> Any:
        """The template as jinja's; whatever is wrong with it is raised here."""
        return make_sandbox().from_string(self.source)

    def render(self, dialogue: list[Message]) -> str:
        given = {"messages": dialogue, "tools": None, "documents": None}
        given["add_generation_prompt"] = dialogue[-1]["role"] != "assistant"
        try:
            return self.compiled.render(self.tokens | given)
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = str(error).replace("\n", " ")
            raise ValueError(f"the chat template of {self.folder} fails: {reason}") from None


ChatFormat = ChatTemplate | VicunaFormat | PlainFormat


def answer_after(asked: str, dialogue: list[Message], chat_format: ChatFormat) -> str:
    """What a model has to write after the prompt ``asked``: the last message, and what ends it.

    Most templates write this after the prompt, as it is. In others the prompt has words that are
    not in the dialogue afterwards, as <think>, or the dialogue lacks what the assistant thought:
    then the answer is what was said, without such words of the prompt. So after the prompt
    "<user>Hi<assistant><think>" the answer in "<user>Hi<assistant>Hello<end>" is "Hello<end>".
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
    folder: Path, config: dict[str, Any], tokens: dict[str, str]
) -> ChatTemplate | VicunaFormat | None:
    """A folder's own template, or Vicuna's format if the folder's name says so, or None.

    ``config`` is what is in tokenizer_config.json; ``tokens`` are {"bos_token": text, ...}. Raises
    ValueError if the folder has several templates, and none of them is the default.
    """
    templates = read_templates(folder, config)
    if "default" in templates:
        return ChatTemplate(folder, templates["default"], tokens)
    if templates:
        several = ", ".join(sorted(templates))
        raise ValueError(f"{folder} has chat templates called {several}, but no default one")
    known_as = [each.name.lower() for each in names_of(folder)]
    if any("vicuna" in name or name.startswith("mini-") for name in known_as):
        return VicunaFormat(tokens.get("eos_token", ""))
    return None


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """{name: template} of a folder; a single one is called "default".

    Files take the place of what is in tokenizer_config.json, as in transformers.
    """
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}
    source = config.get("chat_template")
    if isinstance(source, dict):
        return {str(name): text for name, text in source.items()}
    if isinstance(source, list):
        try:
            return {str(each["name"]): each["template"] for each in source}
        except (TypeError, KeyError):
            raise ValueError(f"{folder}: the chat templates have no names and texts") from None
    return {"default": source} if source else {}


def make_sandbox() -> Any:
    """Jinja as transformers sets it up for chat templates."""
    from jinja2 import nodes  # not every model needs the package
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, which marks what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("keep"), [], [], body).set_lineno(line)

        def keep(self, caller: Callable[[], str]) -> str:
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` with the arguments, and the order of them, that templates rely on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(format: str) -> str:
    """The date and time, with the name of the argument that templates rely on."""
    return datetime.now().strftime(format)


def raise_exception(message: str) -> NoReturn:
    """What a template calls if it is given what it cannot render."""
    raise ValueError(message)
