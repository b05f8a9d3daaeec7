"""What a step costs besides the forward passes of the two models; as a program it prints that.

The draft is an oracle: it proposes the target's own text in trees of 16 nodes, at almost no cost.
"""

import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from helpers import WEIGHTS

from s2d import Tokenizer, generate, load_model
from s2d.bench.specbench import corpus_questions
from s2d.cache import KVCache


class Clock:
    """Seconds spent between ``start`` and ``stop``, in all."""

    seconds = 0.0

    def start(self, *_):
        self.began = time.perf_counter()

    def stop(self, *_):
        self.seconds += time.perf_counter() - self.began


class Oracle:
    """A draft in name only: after position i it says text[i + 1]; hidden states are positions.

    It has no layers, so its KV cache holds nothing but its length.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config, text, clock):
        small = dict(num_hidden_layers=1, hidden_size=1, exit_layers=(), thresholds=())
        self.config, self.clock = replace(config, **small), clock
        self.following = F.one_hot(torch.tensor(text[1:]), config.vocab_size).float()

    def modules(self):
        return ()

    def new_cache(self, capacity, start, stop):
        return KVCache(0, 1, capacity, 1, self.device, self.dtype)

    def embed(self, tokens):
        self.clock.start()
        return tokens[..., None].float()

    def run_layers(self, hidden, first, end, positions, mask, cache):
        if positions is None:
            positions = torch.arange(cache.length, cache.length + hidden.shape[1])
        cache.advance(len(positions))
        return positions[None, :, None].float()

    def logits(self, hidden, head):
        rows = self.following[hidden[:, 0].long().clamp(max=len(self.following) - 1)]
        self.clock.stop()
        return rows


def measure(target, prompt, text):
    """The part of the time outside both models' forwards; in ms a step, the target's and it."""
    clock, drafting = Clock(), Clock()
    hooks = [
        target.model["embed_tokens"].register_forward_pre_hook(clock.start),
        target.lm_head.register_forward_hook(clock.stop),
    ]
    oracle = Oracle(target.config, text, drafting)
    options = dict(tree=(4, 1, 1, 1), max_new_tokens=len(text) - len(prompt))
    output = generate(target, prompt, oracle, "mcsd", **options)
    for hook in hooks:
        hook.remove()
    stats = output.stats
    assert prompt + output.tokens == text
    assert set(stats.accept_lengths[:-1]) == {5}  # the oracle is right: 4 tokens and the bonus
    rest = stats.seconds - clock.seconds - drafting.seconds
    return rest / stats.seconds, 1000 * clock.seconds / stats.steps, 1000 * rest / stats.steps


def examples():
    """mini-70b; a prompt for each group, and its text with the target's own next 64 tokens."""
    target, tokenizer = load_model(WEIGHTS / "mini-70b"), Tokenizer(WEIGHTS / "mini-70b")
    for question in corpus_questions(1):
        prompt = tokenizer.encode_chat(question["turns"][:1])
        alone = generate(target, prompt, method="ar", max_new_tokens=64)
        yield target, prompt, prompt + alone.tokens


def test_all_but_the_forwards_takes_less_than_15_percent_of_a_step():
    """The median of nine runs, in seconds of one process: a busy machine slows all parts alike."""
    example = next(examples())
    parts = [measure(*example)[0] for _ in range(9)]
    assert statistics.median(parts) < 0.15


if __name__ == "__main__":
    for example in examples():
        part, forward, rest = measure(*example)
        print(f"target forward {forward:.2f} ms, rest {rest:.2f} ms a step: {part:.1%}")
