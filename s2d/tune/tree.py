"""The tree in the making that a Tuner's decisions give: a chain drawn from q, or of every level the candidates worth it."""

import torch

from ..proposal import NO_SLOT, Draft, over_all_tokens
from ..sampling import warp
from ..tree import TokenTree, ancestor_mask


class TunedTree:
    """Tokens, parents, slots and levels of the candidates, lists numbered as a GrowingTree's; their chances are the tuner's.

    As long as the nodes that are drafted from form a chain, no mask is needed.
    """

    def __init__(self, tuner, drafter, sampling):
        self.drafter, self.tuner, self.sampling, self.q = drafter, tuner, sampling, []
        self.frontier = [
            (-1, -1)
        ]  # number and slot of each node that was expanded last: first the context
        self.tokens, self.parents, self.slots, self.level, self.slot_parents = [], [], [], [], []
        self.chain = drafter.attention.chain = True

    def children(self, prediction):
        """Candidates (R, K) for the R nodes that a Prediction is about, or one that is drawn; None where none is worth it."""
        width = min(self.tuner.width(prediction.confidence), prediction.probs.shape[-1])
        if width == 1:  # is known already
            places, seen = prediction.likeliest[:, None], ()
        else:
            probs, places = prediction.probs.topk(width)
            seen = self.drafter.tokens_at(places).tolist(), probs.tolist()
        if not self.tuner.worth(*seen):
            return None, None
        if self.tuner.drawn:
            q = warp(prediction.logits, self.sampling.temperature, self.sampling.top_p)  # (1, K)
            self.q.append(over_all_tokens(q, self.drafter.model))
            places = self.sampling.sampler.candidates(q, 1, replacement=False)
            place = places.item()
            self.tuner.draw(place, prediction.probs[0, place].item())
        return places, None

    def add(self, children, log_probs):
        """Take the next level (R, K). Returns which of them are expanded, best first."""
        order, used, count = self.tuner.expand(), len(self.slot_parents), len(self.tokens)
        slots, width = [NO_SLOT] * children.numel(), children.shape[1]
        for slot, candidate in enumerate(order, used):
            slots[candidate] = slot
            self.slot_parents.append(self.frontier[candidate // width][1])
        self.chain = self.chain and len(order) < 2
        self.tokens += children.flatten().tolist()
        self.parents += [number for number, _ in self.frontier for _ in range(width)]
        self.slots += slots
        self.level += [len(self.tuner.levels) - 1] * len(slots)
        self.frontier = [(count + candidate, slots[candidate]) for candidate in order]
        if order and not self.chain:
            self.drafter.attention.set_tree(
                ancestor_mask(torch.tensor(self.slot_parents, device=children.device))
            )
        return (
            slice(order[0], order[0] + 1)
            if len(order) == 1
            else torch.tensor(order, dtype=torch.long, device=children.device)
        )

    def draft(self, exits):
        """The Draft of the candidates that the tuner sends, numbered anew."""
        kept, plan = self.tuner.send()
        number = {old: new for new, old in enumerate(kept)} | {-1: -1}
        device, level_sizes = self.drafter.tokens.device, [0] * len(exits)
        for old in kept:
            level_sizes[self.level[old]] += 1
        tokens, parents, slots = (torch.tensor(column, dtype=torch.long, device=device) for column in (
            [self.tokens[old] for old in kept], [number[self.parents[old]] for old in kept], [self.slots[old] for old in kept],
        ))  # fmt: skip
        return Draft(
            TokenTree(tokens, parents),
            torch.cat(self.q) if self.q else None,
            slots,
            exits,
            level_sizes,
            plan,
        )
