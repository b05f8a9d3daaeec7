"""Static passes as compiled code, for a CPU: torch.compile makes it for each number of rows.

That takes some seconds whenever a pass over so many rows is first needed, and less if the compiler
finds it in its own cache (TORCHINDUCTOR_CACHE_DIR).
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..notices import tell
from .static import Slots, StaticInputs, StaticLlama


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

    def run_static(self, inputs: StaticInputs) -> Tensor:
        rows = len(inputs.slots)
        blocks = list(self.model.layers[inputs.first : inputs.end])
        cos, sin = self.rope(inputs.positions)
        read = inputs.hidden, cos, sin, inputs.mask, inputs.slots, inputs.cache.layers
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
            raise ValueError(
                f"--compile failed (it needs a C++ compiler, such as g++): {reason}"
            ) from None
        inputs.made[rows] = code
        return hidden


def run_blocks(
    blocks: list[nn.Module],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    slots: Tensor,
    layers: list[tuple[Tensor, Tensor]],
) -> Tensor:
    for block, (keys, values) in zip(blocks, layers):
        hidden = run_block(block, hidden, (cos, sin), mask, slots, keys, values)
    return hidden


@torch.compiler.nested_compile_region  # compiled once for all blocks
def run_block(
    block: nn.Module,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    mask: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    cache = Slots([(keys, values)], slots, columns=mask.shape[1])
    return block(hidden, rope, mask, cache, layer=0)
