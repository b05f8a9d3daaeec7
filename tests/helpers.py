"""What several tests share: small random Llamas and distributions, programs and their errors."""

import atexit
import json
import multiprocessing
import os
import re
import socket
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from s2d.mcsd.decision import with_decision
from s2d.mcsd.roots import RootsDecoder
from s2d.model import Llama, LlamaConfig
from s2d.ngram.datastore import Datastore, reading
from s2d.tree import GrowingShape

DEVICE = "cpu"  # where random Llamas are; conftest.py sets it by the option ``--device``
ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "weights"

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
TINY = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=128)


def random_llama(seed, scale=0.3, device=None, **changes):
    """A float64 Llama with weights large enough that its distributions are far from uniform.

    It is on ``device``, by default that of pytest's option ``--device``; its weights are the same
    on every device. ``changes`` are fields of LlamaConfig, and of a draft's ``drafting``.
    """
    names = "exits", "thresholds", "draft_length", "stop", "growing"
    drafting = {name: changes.pop(name) for name in names if name in changes}
    torch.manual_seed(seed)
    model = Llama(replace(TINY, **changes)).double().requires_grad_(False).eval()
    model.drafting = drafting
    for parameter in model.parameters():
        parameter.normal_(0.0, scale) if parameter.dim() == 2 else parameter.uniform_(0.5, 1.5)
    return model.to(DEVICE if device is None else device)


def nearly_equal(seed, **changes):
    """Two random Llamas, a target and a draft that often agrees with it."""
    target, draft = random_llama(seed, **changes), random_llama(seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return target, draft


class ByLastToken:
    """A whimsical decision model: its answers depend on the tokens that were drafted before."""

    def estimate(self, prediction, proposal):
        answers = prediction.logits.sum(dim=-1, keepdim=True) % 1.0  # (R, 1)
        return answers.expand_as(proposal.estimates)


class Operations(TorchDispatchMode):
    """Counts what a GPU computes, a kernel each; remembers the size of the largest result."""

    count = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.count += 1
        elif isinstance(result, torch.Tensor):  # a reshape may be a copy
            before, after = args[0].untyped_storage(), result.untyped_storage()
            self.count += before.data_ptr() != after.data_ptr()
        returned = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in returned if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def random_tokens(seed, count, vocab=61):
    """A list of ids."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def drawn_options(rng):
    """Any method, exits, tree, stop and parts that go together, for a draft of 4 layers."""
    method = rng.choice(("sd", "mcsd", "s2d", "s2d-tree"))
    several = method in ("s2d", "s2d-tree")
    exits = sorted(rng.sample((0, 1, 2, 4), rng.choice((1, 2, 3)) if several else 1))
    options = dict(method=method, stop=rng.choice((None, 0.0, 0.2)))
    exit_0 = rng.choice((0, reading(Datastore(random_tokens(0, 300), end=[5]))))
    options["exits"] = [each or exit_0 for each in exits]
    options["decoder"] = rng.choice((None, None, RootsDecoder))
    options["drafter"] = rng.choice((None, None, with_decision(ByLastToken())))
    if several:
        options["thresholds"] = [*(rng.choice((0.0, 0.3, 0.9)) for _ in exits[:-1]), 0.0]
    if method in ("sd", "s2d"):
        options["draft_length"] = rng.choice((1, 3, 7, 40))
    else:
        shapes = GrowingShape(2, 3, 5), GrowingShape(3, 4, 12), GrowingShape(4, 2, 3)
        options["tree"] = rng.choice(((3, 2, 1), (2, 1, 1, 1), *shapes))
    return options


def blocks(readme):
    """The blocks of Python that a README shows."""
    return re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)


def program(main, *arguments):
    """Exit code of a command line, ended by its parser or by itself."""
    try:
        return main([str(each) for each in arguments])
    except SystemExit as end:
        return end.code


def refuses(main, capsys, message, *arguments):
    """Assert that a command line exits with 2, with ``message`` in the one line that it says."""
    assert program(main, *arguments) == 2, message
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def raises_line(function, error, message, *arguments, **options):
    """Assert that a call raises ``error``, with the pattern ``message`` in the one line it says."""
    with pytest.raises(error, match=message) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)


def change_json(file, **fields):
    """Give fields of the object in a file other values; ``...`` takes one out."""
    changed = json.loads(file.read_text()) | fields
    changed = {name: value for name, value in changed.items() if value is not ...}
    file.write_text(json.dumps(changed))


def fork(folder, ranks, function, *arguments):
    """Run ``function`` in so many processes, which end as torchrun's do: the exit codes.

    They have loaded what this process has, so that nothing is imported again. What they print is
    in the files out and err in ``folder``.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def run_as(rank):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}
        names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in names.items()})
        sys.stdout = open(folder / "out", "a")
        sys.stderr = open(folder / "err", "a", buffering=1)
        atexit._clear()  # of the parent's functions; a forked process runs none by itself
        code = 1
        try:
            code = function(*arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.exit(code)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_as, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    # As torchrun does, this process holds the store, so that it outlives a rank that fails. The
    # store has a thread, and a process with threads is not safely forked: so it comes last.
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    while any(process.is_alive() for process in processes) and time.monotonic() - began < 200:
        wait([process.sentinel for process in processes if process.is_alive()], timeout=1)
        if any(process.exitcode for process in processes):
            time.sleep(0.1)  # torchrun looks ten times a second
            for process in processes:
                process.terminate()
    for process in processes:
        process.kill()
        process.join()
    del store
    return [process.exitcode for process in processes]


def emitted_logits(steps):
    """The target's logits (N, V) before each token that the ``steps`` emit."""
    rows = []
    for step in steps:
        followed = [step.tree.root, *step.accepted][: len(step.tokens)]
        rows.append(step.logits[[step.tree.nodes.index(node) for node in followed]])
    return torch.cat(rows)
