"""Chat templates: a folder's own, in jinja, or Vicuna's format, which no folder brings."""

import json
from datetime import datetime
from functools import partial
from pathlib import Path

from .tokenizer_model import read_special_tokens

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


def chat_template(folder):
    """A folder's own ChatTemplate, or "vicuna" where its name says so, or None."""
    folder = Path(folder)
    config, names = read_special_tokens(folder)
    source, file = config.get("chat_template"), folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        source = {each["name"]: each["template"] for each in source}.get("default")
    if source:
        return ChatTemplate(folder, source, names)
    name = folder.resolve().name.lower()
    return "vicuna" if "vicuna" in name or name.startswith("mini-") else None


def sandbox():
    """Jinja as transformers sets it up for chat templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # not every model needs the package

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def raise_exception(message):
    """What a template calls where it is given what it cannot render."""
    raise ValueError(message)
