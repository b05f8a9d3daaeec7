"""Chat templates: a folder's own, in jinja, or Vicuna's format, which no folder brings."""

import json
import os
from datetime import datetime
from pathlib import Path

from ..files import read_text
from .special import read_special_tokens

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def render_vicuna(messages, system=None, eos="</s>"):
    """Texts, user and assistant in turn -> one text; after the user's the assistant is next."""
    system = VICUNA_SYSTEM if system is None else system
    text = f"{system} " if system else ""
    for turn, message in enumerate(messages):
        if turn % 2 == 0:
            text += f"USER: {message} ASSISTANT:"
        else:
            text += f" {message}{eos}" if message else eos
    return text


class ChatTemplate:
    """A folder's own template, in jinja; ``names``: {"bos_token": text, ...}."""

    def __init__(self, folder, source, names):
        self.folder, self.source, self.names = folder, source, names

    def render(self, messages, system=None):
        """As ``render_vicuna``."""
        roles = ("user", "assistant") * len(messages)
        dialogue = [{"role": role, "content": text} for role, text in zip(roles, messages)]
        if system is not None:
            dialogue.insert(0, {"role": "system", "content": system})
        given = {"messages": dialogue, "add_generation_prompt": len(messages) % 2 == 1}
        given |= {"tools": None, "documents": None}
        environment = sandbox()
        try:
            return environment.from_string(self.source).render(self.names | given)
        except Exception as error:  # a template is a program: anything can go wrong in it
            raise ValueError(f"the chat template of {self.folder} fails: {error}") from None


def chat_template(folder: Path | str) -> "ChatTemplate | str | None":
    """A folder's own ChatTemplate, or "vicuna" if its name says so, or None.

    Raises ValueError if the folder has several templates, and none of them is the default.
    """
    folder = Path(folder)
    tokens = read_special_tokens(folder)
    templates = {}
    source = tokens.config.get("chat_template")
    if isinstance(source, list):  # several, by name
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
        return ChatTemplate(folder, templates["default"], tokens.names)
    if templates:
        names = ", ".join(sorted(templates))
        raise ValueError(f"{folder} has chat templates called {names}, but no default one")
    name = Path(os.path.abspath(folder)).name.lower()  # of a link, the link's own name
    return "vicuna" if "vicuna" in name or name.startswith("mini-") else None


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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter ``tojson`` with the arguments, and the order of them, that templates rely on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    """What a template calls if it is given what it cannot render."""
    raise ValueError(message)
