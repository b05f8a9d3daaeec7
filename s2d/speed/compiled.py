"""Static passes as compiled code, for a CPU: torch.compile makes it for each number of rows.

That takes some seconds when such a pass is first needed; less if the compiler's own cache has it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..model import Llama
from ..notices import tell
from .static import Slots, StaticInputs, StaticLlama

# Layers: with fewer in a segment, padding costs more than compiling saves (exits of a draft).
FEWEST = 4


class CompiledLlama(StaticLlama):
    """A Llama on a CPU whose passes over a few tokens after a context are compiled.

    The code is for the weights as they lie in memory, and checks nothing when it is called. So the
    model must not be moved, cast or given other weights afterwards.
    """

    def __init__(self, config: Any, drafting: Any = None) -> None:
        """Raises ValueError if this PyTorch cannot compile each number of rows by itself."""
        super().__init__(config, drafting)
        if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            raise ValueError(f"--compile needs PyTorch 2.13 or newer; this is {torch.__version__}")

    def new_cache(self, capacity: int, first: int = 0, end: int | None = None) -> KVCache:
        if len(self.model.layers[first:end]) < FEWEST:
            return Llama.new_cache(self, capacity, first, end)  # its passes are ordinary ones
        return super().new_cache(capacity, first, end)

    def run_static(self, inputs: StaticInputs) -> Tensor:
        rows = len(inputs.slots)
        blocks = list(self.model.layers[inputs.first : inputs.end])
        rope = self.rope(inputs.positions)
        read = inputs.hidden, rope, inputs.mask, inputs.slots, inputs.cache.layers
        if rows in inputs.made:
            return inputs.made[rows](blocks, *read)
        tell(f"compiling layers {inputs.first + 1} to {inputs.end}, rows: {rows}")
        code = torch.compile(
            run_blocks,
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,  # PyTorch gives up on a function with too many kinds of calls
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        )
        try:
            # But for the number of columns, shapes never change.
            with torch.compiler.config.patch(dynamic_sources="L['mask']:1"):
                hidden = code(blocks, *read)
        except Exception as error:  # whatever a compiler that does not work raises
            reason = str(error).strip().partition("\n")[0]
            message = "--compile failed (it needs a C++ compiler, such as g++):"
            raise ValueError(f"{message} {reason}") from None
        inputs.made[rows] = code
        return hidden


Pair = tuple[Tensor, Tensor]


def run_blocks(
    blocks: list[nn.Module], hidden: Tensor, rope: Pair, mask: Tensor, slots: Tensor, kv: list[Pair]
) -> Tensor:
    for block, keys_and_values in zip(blocks, kv):
        hidden = run_block(block, hidden, rope, mask, slots, keys_and_values)
    return hidden


@torch.compiler.nested_compile_region  # compiled once for all blocks
def run_block(
    block: nn.Module, hidden: Tensor, rope: Pair, mask: Tensor, slots: Tensor, kv: Pair
) -> Tensor:
    cache = Slots([kv], slots, columns=mask.shape[1])
    return block(hidden, rope, mask, cache, layer=0)
