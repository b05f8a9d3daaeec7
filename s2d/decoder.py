"""The loop of speculative decoding, whatever drafts: draft, one target pass, verify, roll back.

A ``Decoder`` is one generation, and ``Decoder.__iter__`` is the algorithm. The top of tree.py
explains how nodes are numbered.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .devices import to_device
from .draft import SortedDraft
from .mask import MAX_UNREAD, positions_and_mask
from .model import Llama
from .options import Options
from .rules import Rule
from .stats import Clock, Generation, Stats, Step
from .tree import Tree


def refuse_infinite(logits: Tensor) -> None:
    """Raise ValueError if ``logits`` are not finite. A GPU is waited for here."""
    if not logits.sum(dtype=torch.float32).isfinite():
        raise ValueError("the target's logits are not finite: damaged weights, or overflow")


class Decoder:
    """One generation: iterating over it decodes, a Step at a time.

    Args:
        target: the model whose text is written.
        drafter: what drafts.
        rule: how tokens are proposed and accepted.
        context: the ids of the prompt.
        limit: the context's length at which decoding ends.
        options: what the other arguments were made from.
        is_last: is called with each token of the answer but EOS, and says whether the answer ends
            with it.
    """

    def __init__(
        self,
        target: Llama,
        drafter: SortedDraft,
        rule: Rule,
        context: list[int],
        limit: int,
        options: Options,
        is_last: Callable[[int], bool],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.context = context
        self.limit = limit
        self.options = options
        self.is_last = is_last
        self.prompt_length = len(context)
        self.ended = ""  # why the answer has ended, see ``Generation``
        self.in_step = False  # stays True after an error, or Ctrl-C, in the middle of a step
        self.stats = Stats()
        self.cache = target.new_cache(limit + drafter.shape.capacity)

    def __iter__(self) -> Iterator[Step]:
        while not self.ended:
            if self.in_step:
                raise ValueError("this Decoder was interrupted within a step: start another one")
            self.in_step = True
            with torch.inference_mode():
                clock = Clock()
                # 1. Draft a tree of tokens. If it has no node but the root, this is plain decoding.
                tree = self.draft()
                clock.lap()
                # 2. Run the target once, over the whole tree.
                logits = self.run_target(tree)
                clock.lap()
                # 3. Verify: which path of the tree is accepted, and which tokens does that give?
                accepted, tokens = self.verify(tree, logits)
                # 4. Roll back: both models forget the nodes that are not on the path.
                self.roll_back(tree, accepted)
                # 5. Emit: the tokens become a part of the context, up to the answer's end.
                step = self.emit(tree, logits, accepted, tokens, clock)
            self.in_step = False
            yield step

    def draft(self) -> Tree:
        """A tree of tokens that may follow the context."""
        n = len(self.context)
        max_depth = self.limit - n - 1  # one position is for the bonus token
        if n - self.cache.length > MAX_UNREAD:
            max_depth = 0  # a long prompt is first read alone: with a tree its mask would be large
        return self.drafter.grow(self.drafter.new_tree(self.context, max_depth), self.rule)

    def run_target(self, tree: Tree) -> Tensor:
        """The target's logits (N+1, V) after each node of ``tree``."""
        tokens, positions, mask = self.inputs(tree)
        logits = self.target(
            tokens, last=len(tree.tokens), positions=positions, mask=mask, cache=self.cache
        )[0]
        refuse_infinite(logits)
        return logits

    def inputs(self, tree: Tree) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the target has not read of the context and the tree: tokens, positions, mask.

        The root is always among it.
        """
        n = len(self.context)
        read = self.cache.length
        device = self.target.device
        tokens = to_device([(self.context + tree.tokens[1:])[read:]], device)  # (1, T)
        return tokens, *positions_and_mask(read, n, tree.ancestors, device, self.target.dtype)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """The accepted nodes of ``tree``, and their tokens with the bonus token after them."""
        accepted, bonus = self.rule.verify(tree, logits)
        return accepted, [tree.tokens[node] for node in accepted] + [bonus]

    def roll_back(self, tree: Tree, accepted: list[int]) -> None:
        """Keep the context and the ``accepted`` nodes in the caches of target and draft."""
        n = len(tree.context)
        self.cache.keep(n, [n - 1 + node for node in accepted])  # node i is entry n - 1 + i
        self.drafter.keep(tree, accepted)

    def emit(
        self, tree: Tree, logits: Tensor, accepted: list[int], tokens: list[int], clock: Clock
    ) -> Step:
        """Append ``tokens`` to the context, up to the answer's last one, and note the Step."""
        for count, token in enumerate(tokens, start=1):
            if token in self.target.config.eos_token_ids:
                self.ended = "eos"
            elif self.is_last(token):
                self.ended = "stop_at"
            if self.ended:
                tokens = tokens[:count]
                break
        self.context = self.context + tokens  # a new list, as trees keep the old one
        if not self.ended and len(self.context) >= self.limit:
            full = len(self.context) == self.target.config.max_position_embeddings
            self.ended = "context" if full else "length"
        step = Step(tree, logits, accepted[: len(tokens)], tokens, **clock.seconds())
        self.stats.add(step)
        return step

    @property
    def tokens(self) -> list[int]:
        """The new ones so far, with EOS last if it was produced."""
        return self.context[self.prompt_length :]

    def run(self) -> Generation:
        """Decode to the end."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> Generation:
        """The answer so far, without the caches and whatever else decoding takes."""
        return Generation(
            tokens=self.tokens,
            ended=self.ended,
            stats=self.stats,
            options=self.options,
            exact=self.rule.exact,
            prompt_length=self.prompt_length,
        )
