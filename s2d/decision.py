"""The decision model: how likely is the target to accept what the draft just predicted?

A small network is asked about each node that the draft predicted from; when no path is likely
enough to be accepted, drafting stops (Improved MCSD, arXiv 2409.10644, "decision model"). A draft
that stops keeps every token it has drawn, so the output stays exact (see rules.py). How one is
trained: train/decision.py.
"""

import json
import zlib
from itertools import pairwise

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .files import staged_file
from .mask import CONTEXT
from .model import Llama
from .rules import Prediction
from .tree import Tree


class Decision(nn.Module):
    """A Prediction of R rows -> probabilities (R,) that the target accepts a token drafted there.

    features: one of the two published sets: "hidden", the draft's hidden state at the exit that was
        used, scaled to unit mean square; "stats", the entropy of its distribution and its ten
        largest probabilities
    threshold: for PathStop
    draft: the draft it was made for, see ``fingerprint``
    """

    def __init__(self, features: str, hidden_size: int, threshold: float, draft: str):
        super().__init__()
        self.features, self.hidden_size = features, hidden_size
        self.threshold, self.draft = threshold, draft
        sizes = {"hidden": (hidden_size, 512, 256, 1), "stats": (11, 44, 1)}[features]
        layers = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def inputs(self, prediction):
        """The features (R, F) of a Prediction."""
        if self.features == "hidden":
            hidden = prediction.hidden.float()
            return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True))
        probs = prediction.probs.float()
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        return torch.cat((entropy, probs.topk(10).values), dim=-1)

    def forward(self, prediction):
        return self.layers(self.inputs(prediction)).squeeze(-1).sigmoid()


class PathStop:
    """Ends drafting when no path is likely enough to be accepted whole (``DecisionModel``)."""

    def __init__(self, decision: Decision):
        self.decision = decision
        self.tree: Tree | None = None
        self.accepted: dict[int, float] = {}  # node of that tree -> P(the path to it is accepted)

    def prepare_for(self, draft: Llama) -> None:
        """Move to the device of ``draft``; ValueError if it was made for another draft."""
        if self.decision.draft != fingerprint(draft):
            made_for = f"for draft {self.decision.draft}, not {fingerprint(draft)}"
            raise ValueError(f"the decision model is {made_for}")
        self.decision.to(draft.device)

    def stops(self, tree: Tree, parents: list[int], prediction: Prediction) -> bool:
        if tree is not self.tree:
            self.tree = tree
            self.accepted = {CONTEXT: 1.0}
            for node, exit_layer in enumerate(tree.exit_layers):
                if exit_layer is None:  # a root from the target
                    self.accepted[node] = 1.0
        children: dict[int, list[int]] = {node: [] for node in parents}
        for node in range(len(self.accepted) - 1, len(tree.tokens)):  # those of the new level
            children[tree.parents[node]].append(node)
        for parent, prob in zip(parents, self.decision(prediction).tolist()):
            if not children[parent]:
                continue
            first, *others = children[parent]
            self.accepted[first] = self.accepted[parent] * prob
            # What the first child leaves is divided in proportion to the draft's estimates.
            left = self.accepted[parent] * (1.0 - prob)
            total = sum(tree.probs[node] for node in others)
            for node in others:
                self.accepted[node] = left * tree.probs[node] / max(total, 1e-9)
        return all(self.accepted[node] < self.decision.threshold for node in tree.frontier)


def fingerprint(draft) -> str:
    """A short name for a draft's weights: the checksum of its final norm in bfloat16."""
    weight = draft.model.norm.weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(weight.numpy().tobytes()):08x}"


def save_decision(decision: Decision, path):
    """Write one safetensors file, configuration included."""
    names = "features", "hidden_size", "threshold", "draft"
    config = {name: getattr(decision, name) for name in names}
    with staged_file(path) as stage:
        save_file(decision.state_dict(), stage, metadata={"decision": json.dumps(config)})


def load_decision(path) -> Decision:
    """The decision model in the file ``path``; ValueError if it holds none."""
    try:
        with safe_open(path, framework="pt") as file:
            decision = Decision(**json.loads(file.metadata()["decision"]))
            decision.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"no decision model at {path} ({error})") from None
    return decision
