"""The decision model: how likely is the target to accept what the draft just said?

A small network is asked about each node that the draft has predicted from; when no path is likely
enough to be accepted, drafting stops (Improved MCSD, arXiv 2409.10644, "decision model"). It knows
nothing about the target: it sees what the draft computed. A draft that stops keeps every token it
has drawn, so the output stays exact (verify.py's lemma), although where the draft ends depends on
the tokens in it. How one is trained: train/decision.py.
"""

import json
import zlib

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..exits import Prediction
from ..fields import number, shown, whole
from ..files import staged_file
from ..tree import CONTEXT

FEATURES = ("hidden", "stats")
TOP = 10


class Decision(nn.Module):
    """A Prediction of R rows -> probabilities (R,) that the target accepts a token drafted there.

    The two published feature sets: "hidden", the draft's hidden state at the exit that was used,
    scaled to unit size; "stats", the entropy of its distribution and its ten largest probabilities.
    ``threshold`` is for PathStop. ``draft`` names the draft it was made for, see ``fingerprint``.
    """

    def __init__(self, features, hidden_size, threshold, draft):
        super().__init__()
        self.features, self.hidden_size = features, hidden_size
        self.threshold, self.draft = threshold, draft
        widths = {"hidden": (hidden_size, 512, 256, 1), "stats": (1 + TOP, 44, 1)}[features]
        layers = []
        for sizes in zip(widths, widths[1:]):
            layers += [nn.Linear(*sizes), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def inputs(self, prediction):
        """The features (R, F) of a Prediction."""
        if self.features == "hidden":
            hidden = prediction.hidden.float()
            return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True))
        probs = prediction.probs.float()
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        probs = nn.functional.pad(probs, (0, max(0, TOP - probs.shape[-1])))  # of few tokens
        return torch.cat((entropy, probs.topk(TOP).values), dim=-1)

    def forward(self, prediction):
        return self.layers(self.inputs(prediction)).squeeze(-1).sigmoid()


class PathStop:
    """The stopping rule of a decision model: no path is likely enough to be accepted whole."""

    reason, least = "policy", 0.0

    def __init__(self, decision):
        self.decision = decision
        self.paths = None  # the probability that the target accepts the path to each node; last, 1

    def ends(self, tree, expanded, prediction, children) -> bool:
        """As LeastProbable's, asked after every round: nodes are numbered as they were added."""
        if expanded[0] == CONTEXT:
            self.paths = torch.ones(1, device=children.device)  # CONTEXT, -1, finds the last one
        above = self.paths[list(expanded)][:, None]  # (R, 1)
        if not isinstance(prediction, Prediction):  # the target's own count as accepted
            nodes = above.expand(children.shape)
        else:
            probs = prediction.probs.gather(1, children)
            nodes = above * child_probabilities(self.decision(prediction), probs)  # (R, K)
        self.paths = torch.cat((self.paths[:-1], nodes.flatten(), self.paths[-1:]))
        return bool((self.paths[list(tree.frontier)] < self.decision.threshold).all())


def child_probabilities(first, probs):
    """Probabilities (R, K) that the target accepts each of K siblings, given the first's (R,)."""
    # What that leaves is divided among the others in proportion to the draft's ``probs`` (R, K).
    others = probs.float().index_fill(1, torch.tensor(0, device=probs.device), 0.0)
    others = others / others.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    return torch.cat((first[:, None], (1.0 - first)[:, None] * others[:, 1:]), dim=1)


def fingerprint(draft):
    """A short name for a draft's weights: the checksum of its final norm in bfloat16."""
    weight = draft.model["norm"].weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(weight.numpy().tobytes()):08x}"


def save_decision(decision, path):
    """One safetensors file, configuration included; written under another name first."""
    names = ("features", "hidden_size", "threshold", "draft")
    config = {name: getattr(decision, name) for name in names}
    with staged_file(path) as stage:
        save_file(decision.state_dict(), stage, metadata={"decision": json.dumps(config)})


def load_decision(path, draft=None):
    """The decision model at ``path``; ValueError where it is none, or for another ``draft``."""
    config, tensors = read_decision(path)
    decision = Decision(**config)
    try:
        decision.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a decision model ({error})") from None
    decision.requires_grad_(False)
    if draft is None:
        return decision
    if (decision.hidden_size, decision.draft) != (draft.config.hidden_size, fingerprint(draft)):
        raise ValueError(
            f"{path} was made for draft {decision.draft} of width {decision.hidden_size}; "
            f"this draft is {fingerprint(draft)} of width {draft.config.hidden_size}"
        )
    return decision.to(draft.device)


def read_decision(path):
    """(configuration, tensors) of the decision model at ``path``; ValueError where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = json.loads((file.metadata() or {})["decision"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        known = isinstance(raw, dict) and raw.get("features") in FEATURES
        if not known or not isinstance(raw.get("draft"), str):
            raise ValueError(f"its header is {shown(raw)}")
        config = {name: raw[name] for name in ("features", "draft")}
        config["hidden_size"] = whole(raw, "hidden_size")
        config["threshold"] = number(raw, "threshold", low=0.0, high=1.0)
    except FileNotFoundError:
        raise FileNotFoundError(f"no decision model at {path}") from None
    except KeyError:
        raise ValueError(f"{path} is not a decision model (its header does not say so)") from None
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is not a decision model ({error})") from None
    return config, tensors


def read_stop(text, draft=None):
    """What a user gave as --stop: a number is a probability, all else a decision model's file."""
    try:
        return float(text)
    except ValueError:
        return load_decision(text, draft)
