"""Recorded passes: on a GPU the kernel launches of a pass are recorded once and replayed as one.

Knows nothing about what a pass computes. These are CUDA graphs: they read and write fixed memory.
So a model keeps its KV caches, and a pass reads a context that is rounded up to a few lengths.
"""

import torch

SHORTEST = 128  # positions that a recorded pass attends to, at least


class Recordings:
    """The KV caches and the recorded passes of one model; one generation at a time can use them."""

    def __init__(self):
        self.caches = {}  # {(first, end): KVCache}
        self.replays = {}  # {(cache, first, end, rows, length): what replays that pass}

    def cache(self, first, end, capacity, new_cache):
        """An empty KV cache for layers first..end-1, the former one where that is long enough."""
        longest = bucket(capacity)
        cache = self.caches.get((first, end))
        if cache is None or cache.keys.shape[3] < longest:
            self.replays = {key: run for key, run in self.replays.items() if key[0] is not cache}
            cache = self.caches[first, end] = new_cache(longest)
        cache.keep(0, [])
        for part in (cache.keys, cache.values):
            part.zero_()  # masked slots are still read: an earlier text may have left NaN there
        return cache

    def run(self, key, function, inputs):
        """``function(*inputs)``, recorded when ``key`` comes for the first time."""
        if key not in self.replays:
            self.replays[key] = replayed(function, inputs)
        return self.replays[key](inputs)


def replayed(function, example):
    """``function``, recorded at fixed addresses: a call replays it and copies what it wrote."""
    own = [tensor.clone() for tensor in example]
    for _ in range(2):  # libraries set themselves up in their first calls: not to be recorded
        function(*own)
    replay, output = recorded(function, own)

    def run(inputs):
        for tensor, new in zip(own, inputs):
            tensor.copy_(new)
        replay()
        return output.clone()

    return run


def recorded(function, inputs):
    """``function(*inputs)`` as a CUDA graph: (what runs it again, the tensor it writes)."""
    graph, device = torch.cuda.CUDAGraph(), inputs[0].device
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        output = function(*inputs)
    return graph.replay, output


def bucket(length):
    """``length`` rounded up to the next power of two: few lengths, none twice what is needed."""
    return max(SHORTEST, 1 << (length - 1).bit_length())
