"""How a program starts and ends in the processes that torchrun started.

Each of them runs the whole program (``run_in_each``), or rank 0 alone does, and the others make the
passes of a target that is divided among all of them (``run_divided``).
"""

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ..speed.ranks import from_rank_0
from ..speed.tensor_parallel import DividedTarget, follow
from .program import run_program

A_PERSON = timedelta(days=1)  # to wait for rank 0's next command, while somebody types


def run_in_each(name: str, function: Callable[..., int | None], *arguments: Any) -> int:
    """``run_program`` in each of the processes; rank 0 alone gives notices.

    The first rank that fails says why and exits, and torchrun then ends the others, whatever they
    wait for. Nothing is sent to them, and the process group is only destroyed after success: both
    would wait for ranks that are in some other collective (with NCCL for ever).
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group(store=store, rank=rank, world_size=ranks)

    def run_in_this_process() -> int | None:
        try:
            with redirect_stderr(io.StringIO()) if rank > 0 else nullcontext():
                return function(*arguments)
        except (Exception, KeyboardInterrupt):
            if store.add("failures", 1) > 1:
                time.sleep(30)  # another rank says why; torchrun ends this one meanwhile
            raise

    code = 1
    try:
        code = run_program(name, run_in_this_process)
    except SystemExit as end:  # of a command line's parser
        code = end.code
    except Exception:  # a bug; or another rank was killed, and torchrun ends this one as well
        time.sleep(1)
        traceback.print_exc()
    if code:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Python's own end would destroy the process group
    time.sleep(0.1)  # gloo's threads abort if Python ends before they do
    dist.destroy_process_group()
    return 0


def run_divided(name: str, program: Callable[..., int | None]) -> int:
    """``program(load_target)`` on rank 0; the other ranks make that target's passes with it.

    ``load_target`` takes a folder, a device and a dtype, as ``load_model`` does. ``name`` is the
    program's in error messages. Returns the exit code.
    """
    return run_in_each(name, run_on_rank_0, program)


def run_on_rank_0(program: Callable[..., int | None]) -> int | None:
    commands = dist.new_group(backend="gloo", timeout=A_PERSON)

    def send(*command: Any) -> None:
        from_rank_0(lambda: command, commands)

    if dist.get_rank() > 0:
        return follow(commands)
    try:
        code = program(partial(DividedTarget, send))
    except SystemExit as end:  # of the command line's parser
        code = end.code
    send("end")
    return code
