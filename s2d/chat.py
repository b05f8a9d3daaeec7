"""Chat templates: how a model wants to be spoken to. Knows nothing about pieces of text and ids.

It is written in the model's folder, or known for the families that this project began with.
"""

import json
import re
import signal
import threading
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from .program import one_line, optional
from .weights.fields import shown
from .weights.special_tokens import read_special_tokens

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
    folder = Path(folder)
    tokens = read_special_tokens(folder)
    source = tokens.config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for each in source if isinstance(source, list) else []:  # several by name
        if isinstance(each, dict) and each.get("name") == "default":
            source = each.get("template")
    if isinstance(source, str):
        known = LLAMA_TOKENS if (folder / "tokenizer.model").is_file() else {}
        return ChatTemplate(folder, source, known | tokens.names)
    if source is not None:
        raise ValueError(f"{folder}: chat_template is {shown(source)}; expected text")
    name = folder.resolve().name.lower()
    if "llama-2" in name:
        return "llama-2"
    return "vicuna" if "vicuna" in name or name.startswith("mini-") else unknown


class ChatTemplate:
    """A folder's own template, in jinja; ``tokens``: {"bos_token": text, ...}."""

    def __init__(self, folder, source, tokens):
        self.folder, self.tokens = folder, tokens
        for tag, plain in (("endgeneration", "endif"), ("generation", "if true")):
            source = re.sub(MARK % tag, rf"\1{plain}\2", source)
        self.template = self._safely(sandbox().from_string, source)

    def render(self, messages, to_be_answered=False):
        """Texts, user and assistant in turn -> one; ``to_be_answered``: the assistant is next."""
        roles = ("user", "assistant") * len(messages)
        said = [{"role": role, "content": text} for role, text in zip(roles, messages)]
        given = self.tokens | {"tools": None, "documents": None}
        given |= {"messages": said, "add_generation_prompt": to_be_answered}
        return self._safely(self.template.render, **given)

    def _safely(self, function, *args, **options):
        """A template is a program of somebody else's: it can fail in every way, and never end."""
        try:
            with ended_after(SECONDS):
                return function(*args, **options)
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise ValueError(f"the chat template of {self.folder} fails: {reason}") from None


def sandbox():
    """Jinja as transformers sets it up for chat templates."""
    optional("jinja2", f"'{JINJA}'")
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < (3, 1, 6):
        raise ValueError(f"a chat template needs {JINJA}, this is {found}: pip install '{JINJA}'")
    how = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False}
    environment = ImmutableSandboxedEnvironment(**how, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """No other arguments: json.dumps calls what it is given as ``default`` or ``cls``."""
    how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def refuse(message):
    """What a template calls where it is given what it cannot render."""
    raise ValueError(message)


@contextmanager
def ended_after(seconds):
    """TimeoutError in what takes longer, in the main thread: only there an alarm can ring."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TimeoutError(f"it takes longer than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)  # again and again, should it be caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rounds(tokenizer, messages, template="vicuna"):
    """Yield (ids of the prompt, ids of the answer with its EOS) of each round of a dialogue.

    The ids of an answer still to come are empty. Arguments as for ``Tokenizer.encode_chat``.
    """
    if isinstance(template, ChatTemplate):
        yield from _rounds_by_template(tokenizer, messages, template)
        return
    bos, eos = ([] if each is None else [each] for each in (tokenizer.bos_id, tokenizer.eos_id))
    for turn in range(0, len(messages), 2):
        user, answer = messages[turn], (messages[turn + 1 : turn + 2] or [None])[0]
        if template == "llama-2":
            prompt = f"[INST] {user.strip()} [/INST]"
            whole = f"{prompt} {(answer or '').strip()} "
        else:
            prompt = f"{VICUNA_SYSTEM} " * (turn == 0) + f"USER: {user} ASSISTANT:"
            whole = f"{prompt} {answer}"
        start = bos if turn == 0 or template == "llama-2" else []
        ids = tokenizer.encode_marked(prompt)
        # An answer begins with a space, so no piece reaches from the prompt into it.
        rest = [] if answer is None else tokenizer.encode_marked(whole)[len(ids) :] + eos
        yield start + ids, rest


def _rounds_by_template(tokenizer, messages, template):
    """What a template puts after an answer's EOS belongs to the next round's prompt."""
    said, rest = "", []
    for turn in range(0, len(messages), 2):
        asked = template.render(messages[: turn + 1], to_be_answered=True)
        answered = template.render(messages[: turn + 2]) if turn + 1 < len(messages) else asked
        if not (asked.startswith(said) and answered.startswith(asked)):
            raise ValueError("the chat template rewrites earlier turns; no round can be told apart")
        prompt = rest + tokenizer.encode_marked(asked[len(said) :])
        answer = tokenizer.encode_marked(answered[len(asked) :])
        end = answer.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in answer else len(answer)
        yield prompt, answer[:end]
        said, rest = answered, answer[end:]
