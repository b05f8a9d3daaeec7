"""Two ideas of improved multi-candidate speculative decoding (arXiv 2409.10644).

generation.py asks ``make_decoder`` for a Decoder if the options name one of them.
"""

from collections.abc import Callable

from ..decoder import Decoder
from ..draft import LayerExit, SortedDraft
from ..model import Llama
from ..options import Options
from ..rules import Rule
from .decision import Decided
from .roots import LongestPath, RootsDecoder


def make_decoder(
    target: Llama,
    drafter: SortedDraft,
    rule: Rule,
    context: list[int],
    limit: int,
    options: Options,
    is_last: Callable[[int], bool],
) -> Decoder:
    """A Decoder with roots from the target, with a decision model, or with both.

    Raises ValueError for options that do not go together.
    """
    longest = None
    if options.init == "target":
        if not isinstance(options.rule, str):
            raise ValueError("init='target' goes with rule='noise' or 'rejection'")
        if options.rule == "rejection":
            rule = longest = LongestPath(rule, roots=options.shape.width(0))
    if options.decision is not None:
        if not all(isinstance(each, LayerExit) for each in drafter.exits):
            raise ValueError("a decision model judges exits with layers")
        options.decision.prepare_for(drafter.exits[0].model)
        rule = Decided(rule, options.decision)
    if options.init == "draft":
        return Decoder(target, drafter, rule, context, limit, options, is_last)
    return RootsDecoder(target, drafter, rule, context, limit, options, is_last, longest=longest)
