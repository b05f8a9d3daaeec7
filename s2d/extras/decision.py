"""The decision model: how likely is the target to accept what the draft just predicted?

A small network is asked about each node that the draft predicted from; when no path is likely
enough to be accepted, drafting stops (Improved MCSD, arXiv 2409.10644, "decision model"). A draft
that stops keeps every token it has drawn, so the output stays exact (see verify.py). How one is
trained: train/decision.py.
"""

import json
import zlib
from itertools import groupby, pairwise

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..files import staged_file
from ..tree import CONTEXT


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
    """The stop of a decision model: no path is likely enough to be accepted whole.

    Called after every level, with the tree and the prediction that the level came from.
    """

    def __init__(self, decision: Decision):
        self.decision = decision
        self.tree, self.paths = None, {}  # node -> the probability that the path to it is accepted

    def __call__(self, tree, prediction) -> bool:
        if tree is not self.tree:
            self.tree = tree
            # Roots that came from the target count as accepted.
            self.paths = {CONTEXT: 1.0} | {i: 1.0 for i, e in enumerate(tree.exits) if e is None}
        new = range(len(self.paths) - 1, len(tree.tokens))
        families = groupby(new, key=tree.parents.__getitem__)  # one for each row of the prediction
        probs = self.decision(prediction).tolist()
        for (parent, (first, *others)), accepted in zip(families, probs):
            self.paths[first] = self.paths[parent] * accepted
            # What the first child leaves is divided in proportion to the draft's probabilities.
            left = self.paths[parent] * (1.0 - accepted)
            total = sum(tree.probs[node] for node in others)
            for node in others:
                self.paths[node] = left * tree.probs[node] / max(total, 1e-9)
        return all(self.paths[node] < self.decision.threshold for node in tree.frontier)


def fingerprint(draft) -> str:
    """A short name for a draft's weights: the checksum of its final norm in bfloat16."""
    weight = draft.model["norm"].weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(weight.numpy().tobytes()):08x}"


def save_decision(decision: Decision, path):
    """Write one safetensors file, configuration included."""
    names = "features", "hidden_size", "threshold", "draft"
    config = {name: getattr(decision, name) for name in names}
    with staged_file(path) as stage:
        save_file(decision.state_dict(), stage, metadata={"decision": json.dumps(config)})


def load_decision(path, draft=None) -> Decision:
    """The decision model at ``path``; ValueError where it is none, or for another ``draft``."""
    try:
        with safe_open(path, framework="pt") as file:
            decision = Decision(**json.loads(file.metadata()["decision"]))
            decision.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"no decision model at {path} ({error})") from None
    if draft is not None:
        if decision.draft != fingerprint(draft):
            raise ValueError(f"{path} is for draft {decision.draft}, not {fingerprint(draft)}")
        decision.to(draft.device)
    return decision
