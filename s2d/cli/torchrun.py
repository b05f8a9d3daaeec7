"""How a program starts and ends in the processes that torchrun started: all run it, rank 0 prints.

A rank that fails says why and exits, and torchrun then ends the others, whatever they wait for.
Nothing is sent to them: they may be in some other collective, where no message would be read.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from ..notices import tell
from .program import run_program

A_PERSON = timedelta(days=1)  # to wait for rank 0, while somebody types there
TORCHRUN = 30  # seconds, more than torchrun needs to end a rank after another one has failed


class Interrupted(BaseException):
    """Ctrl-C, where torchrun started the program."""


def run_in_each(name: str, function: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """``run_program`` in each of the processes, which ends with the exit code.

    All ranks start ``function(*arguments)``, and if none fails, they end together.
    """
    signal.signal(signal.SIGINT, interrupt)
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=A_PERSON)

    def run_in_this_process() -> int | None:
        try:
            with ExitStack() as stack:
                if rank > 0:
                    nowhere = stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(redirect_stdout(nowhere))
                    stack.enter_context(redirect_stderr(nowhere))
                code = find_code(function, *arguments)
            sys.stdout.flush()
            dist.barrier()  # as soon as a rank ends with a code but 0, torchrun ends the others
            return code
        except Exception:
            if store.add("failures", 1) > 1:
                time.sleep(TORCHRUN)  # another rank says why
            raise

    code = 1
    try:
        code = run_program(name, run_in_this_process)
    except Interrupted:
        code = 130
    except Exception:  # a bug; or another rank was killed, and torchrun ends this one as well
        time.sleep(1)
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # Python's own end may abort gloo's threads, or wait for other ranks


def find_code(function: Callable[..., int | None], *arguments: Any) -> int | None:
    """The exit code of ``function``, also if the parser of its command line ends it."""
    try:
        return function(*arguments)
    except SystemExit as end:
        return end.code


def interrupt(*_: Any) -> NoReturn:
    """Ctrl-C ends a rank, even where one process would go on: torchrun hears it too, and ends all.

    It is no KeyboardInterrupt, which a conversation takes for the end of an answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        tell("interrupted")
    raise Interrupted
