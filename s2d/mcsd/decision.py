"""The decision model: how likely is the target to accept what the draft just predicted?

A small network is asked about each node that the draft predicted from (improved MCSD, arXiv
2409.10644, "decision model"). Its answers take the place of the rule's estimates: a path that is
not likely enough to be accepted is not continued. Every token that was drawn is still sent, so the
text stays exact (see ``rules.Rejection``).
"""

import json
import zlib
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.files import read_safetensors, staged
from ..draft import Exit, SortedDraft
from ..options import short
from ..rules import Prediction, Proposal, Rule
from ..tree import Node, Tree


class Decision(nn.Module):
    """Features (R, F) -> probabilities (R,) that the target accepts a token drafted there.

    Args:
        features: one of the two published sets. "hidden" is the draft's hidden state at the exit
            that was used, scaled to unit mean square. "stats" is the entropy of its distribution
            and its ten largest probabilities.
        threshold: a path whose estimate is lower is not continued.
        draft: the ``fingerprint`` of the draft that the model was made for.
    """

    def __init__(self, features: str, hidden_size: int, threshold: float, draft: str) -> None:
        super().__init__()
        self.features = features
        self.hidden_size = hidden_size
        self.threshold = threshold
        self.draft = draft
        sizes = {"hidden": (hidden_size, 512, 256, 1), "stats": (11, 44, 1)}[features]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def inputs(self, prediction: Prediction) -> Tensor:
        """The features (R, F) of what an exit predicts about R nodes."""
        if self.features == "hidden":
            hidden = prediction.hidden.float()
            return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True))
        probs = prediction.logits.float().softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        return torch.cat((entropy, probs.topk(10).values), dim=-1)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(-1).sigmoid()

    def estimate(self, prediction: Prediction, proposal: Proposal) -> Tensor:
        """Estimates (R, C) that the children in ``proposal`` are accepted.

        The network's answer is about the first child of a node. The others share what it leaves in
        proportion to the rule's estimates. If those are 0.5, 0.3 and 0.1 and the network says 0.8,
        the children get 0.8, 0.15 and 0.05.
        """
        features = self.inputs(prediction).to(self.layers[0].weight.device)
        answers = self(features).to(proposal.estimates)[:, None]  # (R, 1)
        others = proposal.estimates[:, 1:]
        share = (1.0 - answers) / others.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        return torch.cat((answers, share * others), dim=-1)


class DecisionRule:
    """A rule whose estimates are those of a decision model."""

    def __init__(self, rule: Rule, decision: Decision) -> None:
        self.rule = rule
        self.decision = decision
        self.exact = rule.exact
        self.verify = rule.verify

    def propose(
        self, tree: Tree, nodes: list[Node], prediction: Prediction, width: int
    ) -> Proposal:
        proposal = self.rule.propose(tree, nodes, prediction, width)
        estimates = self.decision.estimate(prediction, proposal)
        # An estimate of 0 says that there is no child. A child that was drawn has to be sent.
        estimates = estimates.clamp(min=1e-30).where(proposal.estimates > 0, 0.0)
        return proposal._replace(estimates=estimates)


def with_decision(decision: Decision) -> type[SortedDraft]:
    """A draft that a decision model stops, as it is given, with any rule:

    ``generate(..., drafter=with_decision(decision), stop=decision.threshold)``
    """

    class DecidedDraft(SortedDraft):
        def ask(
            self, exit_: Exit, tree: Tree, nodes: list[Node], rule: Rule
        ) -> tuple[list[Node], float]:
            return super().ask(exit_, tree, nodes, DecisionRule(rule, decision))

    return DecidedDraft


def fingerprint(norm: Tensor) -> str:
    """A short name for a draft: the checksum of the weight of its final norm in bfloat16."""
    plain = norm.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(plain.numpy().tobytes()):08x}"


def save_decision(decision: Decision, path: Path) -> None:
    """Write one safetensors file, configuration included."""
    names = "features", "hidden_size", "threshold", "draft"
    config = {name: getattr(decision, name) for name in names}
    with staged(path) as stage:
        save_file(decision.state_dict(), stage, metadata={"decision": json.dumps(config)})


def load_decision(path: Path | str) -> Decision:
    """The decision model in the file ``path``; ValueError if it holds none."""
    tensors, metadata = read_safetensors(path, "decision model")
    try:
        decision = Decision(**json.loads(metadata["decision"]))
        decision.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"no decision model at {path}: {short(error)}") from None
    return decision
