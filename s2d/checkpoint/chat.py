"""How a dialogue becomes the text of a prompt.

By the folder's own template (published.py); or in Vicuna's format, which no folder brings; or, if
there is neither, as plain text.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
Message = dict[str, Any]  # "role", "content", and whatever else a template asks for


class ChatFormat(NamedTuple):
    """How a dialogue is written: ``render``; after the user's last message the assistant is next.

    ``name`` is for people. A folder's own template also writes the BOS, and its ``render`` takes
    options by their names. If a folder has no format, a prompt ``is_plain`` text.
    """

    name: str
    render: Callable[..., str]
    is_template: bool = False
    is_plain: bool = False


def as_dialogue(
    messages: str | Iterable[str | Message], system: str | None = None
) -> list[Message]:
    """Messages as a template takes them, one of the system first if there is one.

    ``messages`` are texts, user and assistant in turn, or dictionaries of "role" and "content". A
    single text is the user's. Raises ValueError for anything else.
    """
    single = isinstance(messages, (str, dict)) or not isinstance(messages, Iterable)
    given = [messages] if single else list(messages)
    if all(isinstance(each, str) for each in given):
        roles = ("user", "assistant") * len(given)
        given = [{"role": role, "content": text} for role, text in zip(roles, given)]
    if system is not None:
        given = [{"role": "system", "content": system}, *given]
    roles = [isinstance(each, dict) and each.get("role") for each in given]
    texts = all(role and isinstance(each.get("content"), str) for role, each in zip(roles, given))
    if not texts or not roles or roles[-1] == "system" or "system" in roles[1:]:
        words = "expected texts, user and assistant in turn, or dictionaries of role and content"
        raise ValueError(f"{words}, with at most one system message, the first: got {given!r:.60}")
    return given


def render_vicuna(eos: str, dialogue: list[Message]) -> str:
    """The format of Vicuna, as FastChat writes it; ``eos`` is the text of the EOS."""
    system = VICUNA_SYSTEM
    if dialogue[0]["role"] == "system":
        system, dialogue = dialogue[0]["content"], dialogue[1:]
    text = f"{system} " if system else ""
    for turn, message in enumerate(dialogue):
        content = message["content"]
        if message["role"] != ("user", "assistant")[turn % 2]:
            raise ValueError("Vicuna's format has user and assistant in turn")
        if message["role"] == "user":
            text += f"USER: {content} ASSISTANT:"
        else:  # an empty answer is not even a space, in FastChat as well
            text += f" {content}{eos}" if content else eos
    return text


def render_plain(eos: str, dialogue: list[Message]) -> str:
    """Lines, with the EOS, whose text is ``eos``, after each answer."""
    text = ""
    for message in dialogue:
        end = eos if message["role"] == "assistant" else ""
        text += f"{message['content']}{end}\n"
    return text


def format_by_name(folder: Path, eos: str) -> ChatFormat:
    """Vicuna's format if the folder's name says so, or plain text; ``eos`` is the EOS's text."""
    names = folder.absolute().name.lower(), folder.resolve().name.lower()  # it may be a link
    if any("vicuna" in name or name.startswith("mini-") for name in names):
        return ChatFormat("Vicuna's format (by the folder's name)", partial(render_vicuna, eos))
    words = "plain text (the folder has no chat template)"
    return ChatFormat(words, partial(render_plain, eos), is_plain=True)
