"""Chat templates: how a model wants to be spoken to. Knows nothing about ids.

It is written in the model's folder, or known for the families that this project began with.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, PIPE

from ..fields import shown
from ..program import one_line, optional
from .special_tokens import CONFIG, read_special_tokens

JINJA_FILE = "chat_template.jinja"
JINJA = "jinja2>=3.1.6"  # what came before lets a template out of the sandbox
# The tag with which templates mark what the assistant says, for training.
MARK = r"(\{%%[-+]?\s*)%s(\s*[-+]?%%\})"
SECONDS = 2  # that a template may take
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def chat_template(folder, unknown="vicuna"):
    """A folder's own ChatTemplate, or "vicuna" or "llama-2" by its name, or ``unknown``."""
    folder, file = Path(folder), CONFIG
    tokens = read_special_tokens(folder)
    source = tokens.config.get("chat_template")
    for each in source if isinstance(source, list) else []:  # several by name
        if isinstance(each, dict) and each.get("name") == "default":
            source = each.get("template")
    if (folder / JINJA_FILE).is_file():
        other, file = (folder / JINJA_FILE).read_text(encoding="utf-8"), JINJA_FILE
        if source not in (None, other, other.removesuffix("\n")):  # which jinja leaves out
            both = f"one chat template in {CONFIG}, another in {JINJA_FILE}"
            raise ValueError(f"{folder} has {both}; take one of them away")
        source = other
    if isinstance(source, str):
        known = LLAMA_TOKENS if (folder / "tokenizer.model").is_file() else {}
        return ChatTemplate(folder / file, source, tokens.without_null(known) | tokens.names)
    if source is not None:
        raise ValueError(f"{folder}: chat_template is {shown(source)}; expected text")
    name = folder.resolve().name.lower()
    if "llama-2" in name and "chat" in name:  # the base models have none
        return "llama-2"
    return "vicuna" if "vicuna" in name or name.startswith("mini-") else unknown


def choose_template(folder, raw=False, chat=False):
    """(template or None, a line on which it is and why) for a prompt; --raw and --chat say so."""
    template = None if raw else chat_template(folder, unknown=None)
    if isinstance(template, ChatTemplate):
        return template, f"chat template: that in {template.file} (--raw: none)"
    if template:
        return template, f"chat template: {template}, by the folder's name (--raw: none)"
    if chat:
        return "vicuna", "chat template: vicuna, as --chat says"
    why = "as --raw says" if raw else f"as {folder} has none (--chat: vicuna)"
    return None, f"chat template: none, {why}; the model continues the prompt as it is"


class ChatTemplate:
    """The template in a folder's ``file``, in jinja; ``tokens``: {"bos_token": text, ...}."""

    def __init__(self, file, source, tokens):
        optional("jinja2", f"'{JINJA}'")
        found = version("jinja2")
        if tuple(map(int, re.findall(r"\d+", found)[:3])) < (3, 1, 6):
            needs = f"a chat template needs {JINJA}, this is {found}"
            raise ValueError(f"{needs}: pip install '{JINJA}'")
        self.file, self.tokens = file, tokens
        for tag, plain in (("endgeneration", "endif"), ("generation", "if true")):
            source = re.sub(MARK % tag, rf"\1{plain}\2", source)
        self.source, self.sandbox, self.one_at_a_time = source, None, threading.Lock()

    def render(self, messages, to_be_answered=False, system=None):
        """Texts, user and assistant in turn -> one; ``to_be_answered``: the assistant is next."""
        roles = ("user", "assistant") * len(messages)
        said = [{"role": role, "content": text} for role, text in zip(roles, messages)]
        if system is not None:
            said = [{"role": "system", "content": system}, *said]
        given = self.tokens | {"tools": None, "documents": None}
        given |= {"messages": said, "add_generation_prompt": to_be_answered}
        with self.one_at_a_time:
            if self.sandbox is None or not self.sandbox.end.alive:
                self.sandbox = Sandbox()
            text, reason = self.sandbox.ask(SECONDS, self.source, given)
        if text is None:
            raise ValueError(f"the chat template of {self.file} fails: {one_line(reason)}")
        if (system or "").strip() not in text:
            raise ValueError(f"the chat template of {self.file} knows no system message")
        return text


def built_in(template, user, answer, system, first):
    """A round in the template "vicuna" or "llama-2": (what comes before the answer, all of it)."""
    if template == "llama-2":
        before = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system and first else ""
        prompt = f"[INST] {(before + user).strip()} [/INST]"
        return prompt, f"{prompt} {(answer or '').strip()} "
    before = VICUNA_SYSTEM if system is None else system
    prompt = f"{before} " * bool(before and first) + f"USER: {user} ASSISTANT:"
    return prompt, f"{prompt} {answer}"


class Sandbox:
    """A process for a template (sandbox.py): whatever thread asks, it can be ended at any time."""

    def __init__(self):
        command = [sys.executable, "-P", Path(__file__).with_name("sandbox.py")]
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "text": True}
        # In a group of its own: Ctrl-C is not meant for it.
        self.process = subprocess.Popen(command, process_group=0, **pipes)
        self.end = weakref.finalize(self, ended, self.process)
        self.process.stdout.readline()  # it is ready

    def ask(self, *request):
        """[text, what went wrong], one of them None. What leaves an answer unread ends it."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):  # it was ended
            late = self.end() == -signal.SIGALRM
            return None, f"it takes longer than {SECONDS} seconds" if late else "its process ended"
        except BaseException:  # Ctrl-C
            self.end()
            raise


def ended(process):
    """The exit code of a process that is ended, if it has not ended before."""
    process.kill()
    process.communicate()
    return process.returncode
