"""What a step costs besides the forward passes of the two models.

``python tests/test_overhead.py`` prints it for mini-70b. The draft is an oracle: it knows the
target's own greedy text and proposes it as a tree of 16 nodes, 4 deep, at almost no cost.
"""

import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from helpers import WEIGHTS

from s2d import Tokenizer, generate, load_model
from s2d.bench.specbench import held_out_prompts


class Clock:
    """Seconds spent between ``start`` and ``stop``, in all."""

    def __init__(self):
        self.seconds = 0.0

    def start(self, *_):
        self.began = time.perf_counter()

    def stop(self, *_):
        self.seconds += time.perf_counter() - self.began


class Positions:
    """A KV cache that holds nothing but its length."""

    length = 0

    def advance(self, count):
        self.length += count

    def keep(self, length, path):
        self.length = min(self.length, length) + len(path)


class Oracle:
    """A draft model in name only: after position i it predicts text[i + 1].

    Its hidden states are positions.
    """

    draft_vocabulary = None
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config, text, clock):
        small = dict(num_hidden_layers=1, hidden_size=1, exit_layers=(), thresholds=())
        self.config, self.clock = replace(config, **small), clock
        self.following = F.one_hot(torch.tensor(text[1:]), config.vocab_size).float()

    def new_cache(self, capacity, start, stop):
        return Positions()

    def embed(self, tokens):
        self.clock.start()
        return tokens[..., None].float()

    def run_layers(self, hidden, start, stop, positions, mask, cache):
        if positions is None:
            positions = torch.arange(cache.length, cache.length + hidden.shape[1])
        cache.advance(len(positions))
        return positions[None, :, None].float()

    def draft_logits(self, hidden):
        rows = self.following[hidden[:, 0].long().clamp(max=len(self.following) - 1)]
        self.clock.stop()
        return rows


def measure(target, prompt, new_tokens=64):
    """The part of the time outside both models' forwards; in ms a step, the target's and it."""
    text = prompt + generate(target, prompt, method="ar", max_new_tokens=new_tokens).tokens
    clock, drafting = Clock(), Clock()
    hooks = [
        target.model["embed_tokens"].register_forward_pre_hook(clock.start),
        target.lm_head.register_forward_hook(clock.stop),
    ]
    oracle = Oracle(target.config, text, drafting)
    options = dict(tree=(4, 1, 1, 1), max_new_tokens=new_tokens)
    output = generate(target, prompt, oracle, "mcsd", **options)
    for hook in hooks:
        hook.remove()
    stats = output.stats
    assert prompt + output.tokens == text
    assert set(stats.accept_lengths[:-1]) == {5}  # the oracle is right: 4 tokens and the bonus
    rest = stats.seconds - clock.seconds - drafting.seconds
    return rest / stats.seconds, 1000 * clock.seconds / stats.steps, 1000 * rest / stats.steps


def load():
    """mini-70b and a prompt for each group."""
    folder = WEIGHTS / "mini-70b"
    return load_model(folder), held_out_prompts(Tokenizer(folder / "tokenizer.model"), 1)


def test_all_but_the_forwards_takes_less_than_15_percent_of_a_step():
    """The median of nine runs, in seconds of one process: a busy machine slows all parts alike."""
    target, prompts = load()
    parts = [measure(target, prompts[0])[0] for _ in range(9)]
    assert statistics.median(parts) < 0.15


if __name__ == "__main__":
    target, prompts = load()
    for prompt in prompts:
        part, forward, rest = measure(target, prompt)
        print(f"target forward {forward:.2f} ms, rest {rest:.2f} ms a step: {part:.1%}")
