"""What a chat template's own process runs: each line of stdin is a template, its answer a line.

Knows nothing about the rest of the project. A template is a program of somebody else's: it can
fail in every way, never end, and make texts of any size. Here the system ends it where it takes
too long, also in the middle of a single operation, and gives it no more memory than so much.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import cache

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**29  # bytes that this process may have; Python and jinja have a tenth of it
LONGEST = 2**24  # characters of an answer: more than any context holds


def main():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    compiled = cache(sandbox().from_string)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, source, given = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = json.dumps(rendered(compiled, source, given))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


def rendered(compiled, source, given):
    """[text, what went wrong], one of them None."""
    try:
        text = compiled(source).render(**given)
    except MemoryError:
        return None, f"it takes more than {MEMORY / 2**20:.0f} MB"
    except Exception as error:
        return None, str(error) or type(error).__name__
    if len(text) > LONGEST:
        return None, f"it makes a text of {len(text):,} characters"
    return text, None


def sandbox():
    """Jinja as transformers sets it up for chat templates."""
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


if __name__ == "__main__":
    main()
