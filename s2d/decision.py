"""The decision model: how likely is it that the target accepts what the draft just said?

A small network looks at each node the draft has predicted from; when no path is likely enough to survive, drafting
stops (Improved MCSD, arXiv 2409.10644, "decision model"). It sees what the draft computed and nothing of the target, and a
draft that stops keeps every token it has drawn: only tokens that nobody has drawn yet are left out, so the verifier's
output stays exact, although where the draft ends depends on the tokens in it. How one is trained: train/decision.py.
"""

import json
import zlib

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .files import staged_file
from .program import Parser
from .weights.config import number, shown, whole

FEATURES = ("hidden", "stats")
TOP = 10


class Decision(nn.Module):
    """A Prediction with R rows -> chances (R,) that the target accepts a token drafted after each of them.

    The two published feature sets: "hidden", the draft's hidden state at the exit that was used, scaled to unit size;
    "stats", the entropy of its distribution and its ten largest probabilities. Drafting stops when the product of the
    chances along every path is below ``threshold``. ``draft`` names the draft it was made for, see ``fingerprint``.
    """

    def __init__(self, features, hidden_size, threshold, draft):
        super().__init__()
        self.features, self.hidden_size, self.threshold, self.draft = (
            features,
            hidden_size,
            threshold,
            draft,
        )
        widths = {"hidden": (hidden_size, 512, 256, 1), "stats": (1 + TOP, 44, 1)}[features]
        layers = [
            layer for sizes in zip(widths, widths[1:]) for layer in (nn.Linear(*sizes), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers[:-1])

    def inputs(self, prediction):
        """The features (R, F) of a Prediction."""
        if self.features == "hidden":
            hidden = prediction.hidden.float()
            return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True))
        probs = prediction.probs.float()
        return torch.cat(
            (torch.special.entr(probs).sum(dim=-1, keepdim=True), probs.topk(TOP).values), dim=-1
        )

    def forward(self, prediction):
        return self.layers(self.inputs(prediction)).squeeze(-1).sigmoid()


def fingerprint(draft):
    """A short name for a draft's weights: the checksum of its final norm, in the format weights are shipped in."""
    weight = draft.model["norm"].weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(weight.numpy().tobytes()):08x}"


def save_decision(decision, path):
    """One safetensors file, configuration included; written under another name first."""
    config = {
        name: getattr(decision, name) for name in ("features", "hidden_size", "threshold", "draft")
    }
    with staged_file(path) as stage:
        save_file(decision.state_dict(), stage, metadata={"decision": json.dumps(config)})


def load_decision(path, draft):
    """The decision model at ``path``; ValueError where it is none, or was made for another draft."""
    config, tensors = read_decision(path)
    if (config["hidden_size"], config["draft"]) != (draft.config.hidden_size, fingerprint(draft)):
        raise ValueError(
            f"{path} was made for draft {config['draft']} of width {config['hidden_size']}; this draft is "
            f"{fingerprint(draft)} of width {draft.config.hidden_size}"
        )
    decision = Decision(**config)
    try:
        decision.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a decision model ({error})") from None
    return decision.to(draft.device).requires_grad_(False)


def read_decision(path):
    """(configuration, tensors) of the decision model at ``path``; ValueError where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = json.loads((file.metadata() or {})["decision"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if (
            not isinstance(raw, dict)
            or raw.get("features") not in FEATURES
            or not isinstance(raw.get("draft"), str)
        ):
            raise ValueError(f"its header is {shown(raw)}")
        config = {"features": raw["features"], "hidden_size": whole(raw, "hidden_size"),
                  "threshold": number(raw, "threshold", low=0.0, high=1.0), "draft": raw["draft"]}  # fmt: skip
    except FileNotFoundError:
        raise FileNotFoundError(f"no decision model at {path}") from None
    except KeyError:
        raise ValueError(f"{path} is not a decision model (its header does not say so)") from None
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is not a decision model ({error})") from None
    return config, tensors


def read_stop(text, draft):
    """What a user gave to stop drafting by: a number is a confidence, anything else the file of a decision model."""
    try:
        return float(text)
    except ValueError:
        return load_decision(text, draft)


if __name__ == "__main__":
    Parser(prog="s2d.decision").error(
        "a decision model is trained by: python -m s2d.train decision"
    )
