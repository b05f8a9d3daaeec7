"""The loop of speculative decoding, whatever drafts: draft, one target pass, verify, roll back.

A ``Decoder`` is one generation, and ``Decoder.__iter__`` is the algorithm. The root of a tree, node
0, is the last token of the context.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from .devices import to_device
from .draft import SortedDraft
from .mask import MAX_UNREAD, positions_and_mask
from .model import Llama
from .options import Plan
from .own import check_verified
from .rules import Rule
from .stats import Generation, Stats, Step
from .tree import Tree


class Decoder:
    """Iterating over it decodes, a Step at a time.

    Args:
        target: the model whose text is written.
        drafter: what drafts.
        rule: how tokens are proposed and accepted.
        context: the ids of the prompt.
        plan: the exits, the shape of the trees, and when the answer ends.
    """

    def __init__(
        self, target: Llama, drafter: SortedDraft, rule: Rule, context: list[int], plan: Plan
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.context = context
        self.plan = plan
        self.prompt_length = len(context)
        size = target.config.max_position_embeddings
        # The length of the context at which decoding ends.
        self.limit = min(len(context) + plan.options.max_new_tokens, size)
        self.ended = ""  # why the answer has ended, see ``Generation``
        self.in_step = False  # stays True after an error, or Ctrl-C, in the middle of a step
        self.stats = Stats()
        stop_at = plan.options.stop_at
        # Is called with each token of the answer but EOS, and says whether the answer ends with it.
        self.is_last = (lambda token: False) if stop_at is None else stop_at.begin()
        capacity = self.limit + plan.shape.capacity  # a cache holds the text and one tree
        self.cache = target.new_cache(capacity)
        for each in drafter.exits:
            each.start(capacity)

    def __iter__(self) -> Iterator[Step]:
        while not self.ended:
            if self.in_step:
                raise ValueError("this Decoder was interrupted within a step: start another one")
            self.in_step = True
            with torch.inference_mode():
                began = time.perf_counter()
                # 1. Draft a tree of tokens. If it has no node but the root, this is plain decoding.
                step = Step(self.draft())
                drafted = time.perf_counter()
                # 2. Run the target once, over the whole tree.
                step.logits = self.run_target(step.tree)
                step.draft_seconds = drafted - began
                step.target_seconds = time.perf_counter() - drafted
                # 3. Verify: which path of the tree is accepted, and which tokens does that give?
                step.accepted, step.tokens = self.verify(step.tree, step.logits)
                # 4. Roll back: both models forget the nodes that are not on the path.
                self.roll_back(step.tree, step.accepted)
                # 5. Emit: the tokens become a part of the context, up to the answer's end.
                self.emit(step)
                step.seconds = time.perf_counter() - began
            self.stats.add(step)
            self.in_step = False
            yield step

    def draft(self) -> Tree:
        """A tree of tokens that may follow the context."""
        n = len(self.context)
        # One position is for the bonus token. To draft level d, the draft reads n + d - 1 tokens.
        depth = min(self.plan.shape.depth, self.limit - n - 1, self.drafter.max_positions - n + 1)
        if n - self.cache.length > MAX_UNREAD:
            depth = 0  # a long prompt is first read alone: with a tree its mask would be large
        return self.drafter.grow(Tree(self.context), depth, self.rule)

    def run_target(self, tree: Tree) -> Tensor:
        """The target's logits (N+1, V) after each node of ``tree``."""
        tokens, positions, mask = self.inputs(tree)
        last = len(tree.tokens)
        return self.target(tokens, last, positions=positions, mask=mask, cache=self.cache)[0]

    def inputs(self, tree: Tree) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the target has not read of the context and the tree: tokens, positions, mask.

        The root is always among it, as no pass has read it.
        """
        n = len(self.context)
        read = self.cache.length
        device = self.target.device
        tokens = to_device([(self.context + tree.tokens[1:])[read:]], device)  # (1, T)
        return tokens, *positions_and_mask(read, n, tree.ancestors, device, self.target.dtype)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """The accepted nodes of ``tree``, and their tokens with the bonus token after them."""
        if not logits.sum(dtype=torch.float32).isfinite():  # a GPU is waited for here
            raise ValueError("the target's logits are not finite: damaged weights, or overflow")
        found = self.rule.verify(tree, logits)
        check_verified(found, tree, logits.shape[1])
        accepted, bonus = found
        return accepted, [tree.tokens[node] for node in accepted] + [bonus]

    def roll_back(self, tree: Tree, accepted: list[int]) -> None:
        """Keep the context and the ``accepted`` nodes in the caches of target and draft."""
        n = len(self.context)
        self.cache.keep(n, [n - 1 + node for node in accepted])  # node i is entry n - 1 + i
        for each in self.drafter.exits:
            each.keep(tree, accepted)

    def emit(self, step: Step) -> None:
        """Append the tokens of ``step`` to the context, up to the answer's last one."""
        for count, token in enumerate(step.tokens, start=1):
            if token in self.target.config.eos_token_ids:
                self.ended = "eos"
            elif self.is_last(token):
                self.ended = "stop_at"
            if self.ended:  # it may be inside of the accepted path
                step.tokens = step.tokens[:count]
                step.accepted = step.accepted[:count]
                break
        self.context = self.context + step.tokens  # a new list, as trees keep the old one
        if not self.ended and len(self.context) >= self.limit:
            full = len(self.context) == self.target.config.max_position_embeddings
            self.ended = "context" if full else "length"

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
            plan=self.plan,
            exact=self.rule.exact,
            prompt_length=self.prompt_length,
        )
