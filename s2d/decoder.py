"""The loop of speculative decoding, whatever drafts: draft, one target pass, verify, roll back.

A ``Decoder`` is one answer, and ``Decoder.decode`` is the algorithm.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .draft import SortedDraft
from .mask import Inputs, unread
from .model import Llama
from .options import Options
from .rules import Rule
from .stats import Generation, Stats, Step
from .tree import Node, Tree


class Decoder:
    """The decoding of one answer. Iterate over it to decode, a Step at a time.

    ``target`` writes the text after ``context``, the ids of the prompt; ``drafter`` grows trees,
    and ``rule`` says what of them is accepted. ``options`` have the shape of the trees, and say
    when the answer ends.
    """

    def __init__(
        self,
        target: Llama,
        drafter: SortedDraft,
        rule: Rule,
        context: Sequence[int],
        options: Options,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.context = list(context)
        self.options = options
        self.prompt_length = len(context)
        self.max_positions = target.config.max_position_embeddings
        # The length of the context at which decoding ends.
        self.limit = min(len(context) + options.max_new_tokens, self.max_positions)
        self.ended = ""  # why the answer has ended, see ``Generation``
        self.stats = Stats([each.exit_layer for each in drafter.exits])
        stop_at = options.stop_at
        # (token) -> whether the answer ends with it; it is called with each token but EOS.
        self.is_last = (lambda token: False) if stop_at is None else stop_at.begin()
        self.cache = target.new_cache()

    def __iter__(self) -> Iterator[Step]:
        return self.steps

    @cached_property
    def steps(self) -> Iterator[Step]:
        """All loops share one generator: a second loop goes on, and an error ends it."""
        return self.decode()

    @torch.inference_mode()
    def decode(self) -> Iterator[Step]:
        """The algorithm."""
        while not self.ended:
            began = time.perf_counter()
            # 1. Draft a tree of tokens. If it has no node but the root, this is plain decoding.
            tree = self.draft()
            # 2. Run the target once, over the whole tree.
            hidden, logits = self.run_target(tree)
            yield self.finish(tree, hidden, logits, began)

    def finish(self, tree: Tree, hidden: Tensor, logits: Tensor, began: float) -> Step:
        """After the pass, which several prompts may share (passes/batch.py), the rest of a step."""
        # 3. Verify: which path of the tree is accepted, and which token follows it?
        accepted, bonus = self.rule.verify(tree, logits)
        # 4. Emit: the tokens become a part of the context, up to the answer's end.
        tokens = [*(node.token for node in accepted), bonus]
        accepted, tokens = self.emit(accepted, tokens)
        step = Step(tree, logits, hidden, accepted, tokens)
        # 5. Roll back: both models forget the nodes that are not on the path.
        self.roll_back(step)
        step.seconds = time.perf_counter() - began
        self.stats.add(step)
        return step

    def draft(self) -> Tree:
        """A tree of tokens that may follow the context."""
        tree = Tree(self.context, self.options.tree)
        room = self.limit - len(self.context) - 1  # one position is for the bonus token
        self.drafter.grow(tree, min(tree.shape.depth, room), self.rule)
        return tree

    def run_target(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """The target's hidden states (T, hidden) of what it reads, and its logits (N+1, V).

        The root is always read, as no pass has read it before.
        """
        like = self.target.model.norm.weight
        passes = unread(tree.context, tree.nodes, self.cache.length, like)
        hidden = torch.cat([self.read(inputs) for inputs in passes])
        return hidden, self.target.logits(hidden[-len(tree.nodes) :])

    def read(self, inputs: Inputs) -> Tensor:
        """Run the target over ``inputs``: its last hidden states (T, hidden)."""
        hidden = self.target.embed(inputs.tokens)
        return self.target.run_layers(
            hidden, positions=inputs.positions, mask=inputs.mask, cache=self.cache
        )[0]

    def emit(self, accepted: list[Node], tokens: list[int]) -> tuple[list[Node], list[int]]:
        """Append ``tokens`` to the context, up to the answer's end; returns path and tokens."""
        for count, token in enumerate(tokens, start=1):
            if token in self.target.config.eos_token_ids:
                self.ended = "eos"
            elif self.is_last(token):
                self.ended = "stop_at"
            if self.ended:  # the last token may be inside of the accepted path
                tokens, accepted = tokens[:count], accepted[:count]
                break
        self.context = self.context + tokens  # a new list: the tree keeps the old one
        if not self.ended and len(self.context) >= self.limit:
            self.ended = "context" if self.limit == self.max_positions else "length"
        return accepted, tokens

    def roll_back(self, step: Step) -> None:
        """Keep the context before the step and the accepted nodes in the caches of both models."""
        n = len(step.tree.context)
        # The root is entry n - 1, and the other nodes follow it in their order.
        self.cache.keep(n, [n - 1 + step.tree.nodes.index(node) for node in step.accepted])
        for each in self.drafter.exits:
            each.keep(step)

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
