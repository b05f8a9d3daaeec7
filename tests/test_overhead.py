"""What a step costs besides the forward passes of the two models.

``python tests/test_overhead.py`` prints it for mini-70b; the draft is an oracle that knows the target's own greedy
continuation and proposes it as a tree of 16 nodes, 4 deep, at almost no cost of its own.
"""

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import torch
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


class Oracle:
    """A draft model in name only: after position i it predicts text[i + 1]. Its hidden states are positions."""

    def __init__(self, config, text, clock):
        self.config = replace(
            config, num_hidden_layers=1, hidden_size=1, exit_layers=(), thresholds=()
        )
        self.device, self.dtype, self.clock = torch.device("cpu"), torch.float32, clock
        self.following = torch.nn.functional.one_hot(
            torch.tensor(text[1:]), config.vocab_size
        ).float()

    def new_cache(self, capacity, start, stop):
        cache = SimpleNamespace(length=0)
        cache.advance = lambda count: setattr(cache, "length", cache.length + count)
        cache.keep = lambda length, places: setattr(
            cache, "length", min(cache.length, length) + len(places)
        )
        return cache

    def embed(self, tokens):
        self.clock.start()
        return tokens[..., None].float()

    def run_layers(self, hidden, start, stop, positions, mask, cache):
        if positions is None:
            positions = torch.arange(cache.length, cache.length + hidden.shape[1])
        cache.advance(len(positions))
        return positions[None, :, None].float()

    draft_vocabulary = None

    def draft_logits(self, hidden):
        rows = self.following[hidden[:, 0].long().clamp(max=len(self.following) - 1)]
        self.clock.stop()
        return rows


def measure(target, prompt, new_tokens=64):
    """(share of the time outside both models' forwards, target forwards in ms, the rest in ms), the latter two a step."""
    text = prompt + generate(target, prompt, method="ar", max_new_tokens=new_tokens).tokens
    clock, drafting = Clock(), Clock()
    hooks = [target.model["embed_tokens"].register_forward_pre_hook(clock.start),
             target.lm_head.register_forward_hook(clock.stop)]  # fmt: skip
    oracle = Oracle(target.config, text, drafting)
    output = generate(
        target, prompt, draft=oracle, method="mcsd", tree=(4, 1, 1, 1), max_new_tokens=new_tokens
    )
    for hook in hooks:
        hook.remove()
    assert prompt + output.tokens == text
    assert set(output.stats.accept_lengths[:-1]) == {
        5
    }  # the oracle is right: 4 drafted tokens and one more
    rest = output.stats.seconds - clock.seconds - drafting.seconds
    steps = output.stats.steps
    return rest / output.stats.seconds, 1000 * clock.seconds / steps, 1000 * rest / steps


def test_all_but_the_forwards_takes_less_than_15_percent_of_a_step():
    """The median of nine runs; measured in seconds of one process, so that a busy machine slows all parts alike."""
    target = load_model(WEIGHTS / "mini-70b")
    prompts = held_out_prompts(Tokenizer(WEIGHTS / "mini-70b" / "tokenizer.model"), 1)
    shares = [measure(target, prompt)[0] for prompt in prompts[:1] * 9]
    assert statistics.median(shares) < 0.15


if __name__ == "__main__":
    target = load_model(WEIGHTS / "mini-70b")
    for prompt in held_out_prompts(Tokenizer(WEIGHTS / "mini-70b" / "tokenizer.model"), 1):
        share, forward, rest = measure(target, prompt)
        print(f"target forward {forward:.2f} ms, rest {rest:.2f} ms a step: {share:.1%}")
