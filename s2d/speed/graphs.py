"""Static passes as CUDA graphs: all kernels of a pass are launched at once.

This was never run on a GPU. Tests do the same on a CPU: they record the operations of a static
pass, refuse those that wait, and repeat them on the same memory (tests/test_static.py).
"""

from typing import Any

import torch
from torch import Tensor

from .static import StaticInputs, StaticLlama


class GraphedLlama(StaticLlama):
    """A Llama on a CUDA GPU whose passes over a few tokens after a context are CUDA graphs.

    A graph is captured when a pass of its shape is first needed, which takes as long as a few
    passes. It holds addresses: of the weights, of a segment's memory, and of its inputs. So the
    model must not be moved, cast or loaded anew afterwards; only values that are changed in place
    are seen.
    """

    def __init__(self, config: Any, drafting: Any = None) -> None:
        super().__init__(config, drafting)
        self.stream: torch.cuda.Stream | None = None  # on which all graphs are captured
        # One memory for what all graphs compute on the way. They may share it because one runs at a
        # time, and its result is copied before another one runs.
        self.pool: Any = None

    def run_static(self, inputs: StaticInputs) -> Tensor:
        shape = inputs.mask.shape
        if shape not in inputs.made:
            with torch.cuda.device(self.device):
                inputs.made[shape] = self.capture(inputs)
        graph, hidden = inputs.made[shape]
        graph.replay()
        return hidden

    def capture(self, inputs: StaticInputs) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of the pass, and its result (1, rows, hidden) once the graph was replayed."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
        # The pass runs once before, on the same stream: kernels are loaded, and cuBLAS makes its
        # handle and the workspace for this stream, none of which may happen in a capture. That it
        # runs twice changes nothing: it writes the same keys and values to the same slots.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            super().run_static(inputs)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            hidden = super().run_static(inputs)
        return graph, hidden
