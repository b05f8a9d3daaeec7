"""The loop of speculative decoding, whatever drafts: draft, one target pass, verify, roll back.

A ``Decoder`` is one answer, and ``Decoder.decode`` is the algorithm. The root of a tree, node 0, is
the last token of the context.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .devices import to_device
from .draft import SortedDraft
from .mask import MAX_UNREAD, positions_and_mask
from .model import Llama
from .options import Options
from .rules import Rule
from .stats import Generation, Stats, Step
from .tree import Tree


class Decoder:
    """The decoding of one answer. Iterate over it to decode, a Step at a time.

    ``target`` writes the text after ``context``, the ids of the prompt; ``drafter`` grows trees,
    and ``rule`` says what of them is accepted. ``options`` say when the answer ends.
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
        self.context = tuple(context)
        self.options = options
        self.prompt_length = len(context)
        size = target.config.max_position_embeddings
        # The length of the context at which decoding ends.
        self.limit = min(len(context) + options.max_new_tokens, size)
        self.ended = ""  # why the answer has ended, see ``Generation``
        self.stats = Stats([each.exit_layer for each in drafter.exits])
        stop_at = options.stop_at
        # This function is called with each token but EOS: does the answer end with it?
        self.is_last = (lambda token: False) if stop_at is None else stop_at.begin()
        self.cache = target.new_cache()

    def __iter__(self) -> Iterator[Step]:
        return self.steps

    @cached_property
    def steps(self) -> Iterator[Step]:
        """One generator for every loop: a second loop goes on, and after an error it is over."""
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
            # 3. Verify: which path of the tree is accepted, and which token follows it?
            accepted, bonus = self.rule.verify(tree, logits)
            # 4. Emit: the tokens become a part of the context, up to the answer's end.
            step = self.emit(tree, logits, hidden, accepted, bonus)
            # 5. Roll back: both models forget the nodes that are not on the path.
            self.roll_back(step)
            step.seconds = time.perf_counter() - began
            self.stats.add(step)
            if self.ended:
                self.end()
            yield step

    def draft(self) -> Tree:
        """A tree of tokens that may follow the context."""
        n = len(self.context)
        # One position is for the bonus token. To draft level d, the draft reads n + d - 1 tokens.
        shape = self.drafter.shape
        depth = min(shape.depth, self.limit - n - 1, self.drafter.max_positions - n + 1)
        return self.drafter.grow(Tree.root(self.context), depth, self.rule)

    def run_target(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """The target's hidden states (T, hidden) of what it reads, and its logits (N+1, V)."""
        long_prompt = self.read_long_prompt()
        tokens, positions, mask = self.inputs(tree)
        hidden = self.target.embed(tokens)
        hidden = self.target.run_layers(hidden, positions=positions, mask=mask, cache=self.cache)
        logits = self.target.logits(hidden[0, -len(tree.tokens) :])
        return torch.cat((*long_prompt, hidden[0])), logits

    def read_long_prompt(self) -> list[Tensor]:
        """Read a long prompt, into an empty cache, before the tree: a mask of both would be large.

        Returns its hidden states (T, hidden) in a list, which is empty if nothing was read.
        """
        if len(self.context) - self.cache.length <= MAX_UNREAD:
            return []
        tokens = to_device([self.context[:-1]], self.target.device)  # (1, T)
        return [self.target.run_layers(self.target.embed(tokens), cache=self.cache)[0]]

    def inputs(self, tree: Tree) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the target has not read of the context and the tree: tokens, positions, mask.

        The root is always among it, as no pass has read it.
        """
        n = len(self.context)
        read = self.cache.length
        device = self.target.device
        tokens = to_device([(self.context + tree.tokens[1:])[read:]], device)  # (1, T)
        return tokens, *positions_and_mask(read, n, tree.ancestors, device, self.target.dtype)

    def emit(
        self, tree: Tree, logits: Tensor, hidden: Tensor, accepted: list[int], bonus: int
    ) -> Step:
        """Append the new tokens to the context, up to the answer's end."""
        tokens = self.new_tokens(tree, accepted, bonus)
        for count, token in enumerate(tokens, start=1):
            if token in self.target.config.eos_token_ids:
                self.ended = "eos"
            elif self.is_last(token):
                self.ended = "stop_at"
            if self.ended:  # the last token may be inside of the accepted path
                tokens, accepted = tokens[:count], accepted[:count]
                break
        self.context += tuple(tokens)
        if not self.ended and len(self.context) >= self.limit:
            full = len(self.context) == self.target.config.max_position_embeddings
            self.ended = "context" if full else "length"
        return Step(tree, logits, hidden, accepted, tokens)

    def new_tokens(self, tree: Tree, accepted: list[int], bonus: int) -> list[int]:
        """What a step emits; a subclass may emit other tokens."""
        return [*(tree.tokens[node] for node in accepted), bonus]

    def roll_back(self, step: Step) -> None:
        """Keep the context before the step and the accepted nodes in the caches of both models."""
        n = len(step.tree.context)
        self.cache.keep(n, [n - 1 + node for node in step.accepted])  # node i is entry n - 1 + i
        for each in self.drafter.exits:
            each.keep(step)

    def end(self) -> None:
        """Tell the exits of your own that the answer has ended."""
        for each in self.drafter.exits:
            if hasattr(each, "end"):
                each.end()

    @property
    def tokens(self) -> list[int]:
        """The new ones so far, with EOS last if it was produced."""
        return list(self.context[self.prompt_length :])

    def run(self) -> Generation:
        """Decode to the end."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> Generation:
        """The answer so far, without the caches and whatever else decoding takes."""
        return Generation(
            self.tokens, self.ended, self.stats, self.options, self.rule.exact, self.prompt_length
        )
