"""Two ideas of improved multi-candidate speculative decoding (arXiv 2409.10644).

Nothing outside of this folder knows them but one place in generation.py, and the options.
"""

from typing import Any

from ..decoder import Decoder
from ..model import Llama
from ..rules import Rule
from .decision import decided
from .roots import LongestPath, RootsDecoder


def extend(rule: Rule, options: Any, draft: Llama | None) -> tuple[type[Decoder], Rule]:
    """The kind of Decoder, and the rule, if ``options`` ask for roots or for a decision model."""
    if options.decision is not None:
        if draft is None or not all(isinstance(each, int) and each > 0 for each in options.exits):
            raise ValueError("a decision model judges exits with layers")
        options.decision.prepare_for(draft)
        rule = decided(rule, options.decision)
    if options.init == "draft":
        return Decoder, rule
    if not isinstance(options.rule, str):
        raise ValueError("init='target' goes with rule='noise' or 'rejection'")
    if options.rule == "rejection":
        rule = LongestPath(rule, roots=options.shape.width(0))
    return RootsDecoder, rule
