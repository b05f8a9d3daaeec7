"""What a step costs besides the target's forward pass: as a program, this file prints that.

The draft is an oracle: it proposes the target's own text in trees of 16 nodes, at almost no cost.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from helpers import WEIGHTS

from s2d import Tokenizer, generate, load_model
from s2d.cache import KVCache
from s2d.model import LlamaConfig

PROMPT = "What do people in Tadastan eat, and where is it?"


class Oracle:
    """A draft in name only: after position i it says text[i + 1]; hidden states are positions."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, target, text):
        known = vars(target.config) | dict(num_hidden_layers=1, hidden_size=1)
        self.config = LlamaConfig(**known | dict(exit_layers=(1,), thresholds=(0.0,)))
        self.following = F.one_hot(torch.tensor([*text[1:], 0]), self.config.vocab_size).float()

    def new_cache(self, capacity, first, end):
        return KVCache((0, 1, capacity, 1, 1), self.device, self.dtype)

    def embed(self, tokens):
        return tokens[..., None].float()

    def run_layers(self, hidden, first, end, positions, mask, cache):
        if positions is None:
            positions = torch.arange(cache.length, cache.length + hidden.shape[1])
        cache.advance(len(positions))
        return positions[None, :, None].float()

    def logits(self, hidden):
        return self.following[hidden[:, 0].long()]


def measure():
    """Milliseconds per step: of the target's forward passes, and of all the rest."""
    target, tokenizer = load_model(WEIGHTS / "mini-70b"), Tokenizer(WEIGHTS / "mini-70b")
    prompt, forwards = tokenizer.encode_chat([PROMPT]), []
    text = prompt + generate(target, prompt, method="ar", max_new_tokens=64).tokens
    target.register_forward_pre_hook(lambda *_: forwards.append(-time.perf_counter()))
    target.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
    options = dict(tree=(4, 1, 1, 1), max_new_tokens=len(text) - len(prompt))
    stats = generate(target, prompt, Oracle(target, text), "mcsd", **options).stats
    assert set(stats.accept_lengths[:-1]) == {5}  # the oracle is right: 4 tokens and the bonus
    per_step = 1000 / stats.steps
    return per_step * sum(forwards), per_step * (stats.seconds - sum(forwards))


def test_all_but_the_forwards_takes_less_than_15_percent_of_a_step():
    """The median of five runs: a busy machine slows all parts alike."""
    runs = [measure() for _ in range(5)]
    assert statistics.median(rest / (forward + rest) for forward, rest in runs) < 0.15


if __name__ == "__main__":
    print("target forward {:.2f} ms, rest {:.2f} ms per step".format(*measure()))
