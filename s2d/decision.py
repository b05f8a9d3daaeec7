"""The decision model: how likely is it that the target accepts what the draft just said?

A small network looks at each node the draft has predicted from; when no path is likely enough to survive, drafting
stops (Improved MCSD, arXiv 2409.10644, "decision model"). It sees what the draft computed and nothing of the target, and a
draft that stops keeps every token it has drawn: only tokens that nobody has drawn yet are left out, so the verifier's
output stays exact, although where the draft ends depends on the tokens in it.

    python -m s2d.decision train --target weights/mini-7b --draft weights/mini-draft --out decision-7b.safetensors
"""

import json
import sys
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .decode import generate
from .dialogues import corpus_dialogues, read_sharegpt, report_skipped
from .files import staged_file
from .program import Parser, run_program
from .sampling import warp
from .tokenizer import Tokenizer, chat_template
from .weights import load_model
from .weights.config import number, shown, whole

TOP = 10
LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}


class Decision(nn.Module):
    """A Prediction with R rows -> chances (R,) that the target accepts a token drafted after each of them.

    The two published feature sets: "hidden", the draft's hidden state at the exit that was used, scaled to unit size;
    "stats", the entropy of its distribution and its ten largest probabilities. Drafting stops when the product of the
    chances along every path is below ``threshold``. ``draft`` names the draft it was made for, see ``fingerprint``.
    """

    def __init__(self, features, hidden_size, threshold, draft):
        super().__init__()
        self.features, self.hidden_size, self.threshold, self.draft = features, hidden_size, threshold, draft
        widths = {"hidden": (hidden_size, 512, 256, 1), "stats": (1 + TOP, 44, 1)}[features]
        layers = [layer for sizes in zip(widths, widths[1:]) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def inputs(self, prediction):
        """The features (R, F) of a Prediction."""
        if self.features == "hidden":
            hidden = prediction.hidden.float()
            return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True))
        probs = prediction.probs.float()
        return torch.cat((torch.special.entr(probs).sum(dim=-1, keepdim=True), probs.topk(TOP).values), dim=-1)

    def forward(self, prediction):
        return self.layers(self.inputs(prediction)).squeeze(-1).sigmoid()


def fingerprint(draft):
    """A short name for a draft's weights: the checksum of its final norm, in the format weights are shipped in."""
    weight = draft.model["norm"].weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
    return f"{zlib.crc32(weight.numpy().tobytes()):08x}"


def save_decision(decision, path):
    """One safetensors file, configuration included; written under another name first."""
    config = {name: getattr(decision, name) for name in ("features", "hidden_size", "threshold", "draft")}
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
        if not isinstance(raw, dict) or raw.get("features") not in list(LEARNING_RATE) or not isinstance(raw.get("draft"), str):
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


def check_replaceable(path):
    """Raise ValueError where a file at ``path`` is none that this program wrote. Asked before the work, not after."""
    if Path(path).exists():
        try:
            read_decision(path)
        except ValueError:
            raise ValueError(f"{path} is there already and is no decision model; name another file") from None


def read_stop(text, draft):
    """What a user gave to stop drafting by: a number is a confidence, anything else the file of a decision model."""
    try:
        return float(text)
    except ValueError:
        return load_decision(text, draft)


# ------------------------------------------------------------------------------------------------------------ training


class Recorder:
    """Stands where a decision model would: never stops, and remembers what one would have seen."""

    threshold = 0.0

    def __init__(self, decision):
        self.decision, self.inputs = decision, []

    def __call__(self, prediction):
        self.inputs.append(self.decision.inputs(prediction))
        return torch.ones(len(prediction.hidden), device=prediction.hidden.device)


def collect(decision, target, draft, prompts, draft_length, temperature):
    """Draft and verify answers to ``prompts``: features (M, F) of every drafted token and its chances (M,).

    The chance is min(1, p(x) / q(x)), with p and q one-hot at T = 0.
    """
    features, labels = [], []
    for seed, prompt in enumerate(prompts):
        recorder = Recorder(decision)

        def label(proposal, logits):
            tokens = proposal.tree.tokens
            if temperature == 0:
                labels.append((logits[:-1].argmax(dim=-1) == tokens).float())
            elif len(tokens):
                p, chosen = warp(logits[:-1], temperature), tokens[:, None]
                labels.append((p.gather(1, chosen) / proposal.probs.gather(1, chosen)).clamp(max=1.0)[:, 0].float())

        generate(target, prompt, draft=draft, method="s2d", draft_length=draft_length, temperature=temperature,
                 seed=seed, stop=recorder, on_step=label)  # fmt: skip
        features += recorder.inputs
    return torch.cat(features), torch.cat(labels)


def fit_decision(decision, features, labels, epochs, seed):
    """Binary cross entropy against the soft ``labels`` (M,), AdamW, in place; yields the loss after every epoch."""
    generator = torch.Generator().manual_seed(seed)
    peak = LEARNING_RATE[decision.features]
    optimizer = torch.optim.AdamW(decision.parameters(), lr=peak, weight_decay=0.01)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = peak * (1 - epoch / epochs)
        total = 0.0
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(256):
            loss = nn.functional.binary_cross_entropy_with_logits(decision.layers(features[rows])[:, 0], labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        yield total / len(labels)


def auc(scores, labels):
    """Chance that a token likely to be accepted (label over a half) scores higher than another; 0.5 is guessing."""
    likely, unlikely = scores[labels > 0.5], scores[labels <= 0.5]
    both = torch.cat((likely, unlikely))
    values, places, counts = both.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[places]  # equal scores share their mean rank
    n, m = len(likely), len(unlikely)
    return ((ranks[:n].sum() - n * (n + 1) / 2) / max(1, n * m)).item()


def calibration(scores, labels):
    """Lines of a table: for each tenth of the scale, how many, the mean prediction, the mean chance observed."""
    yield f"{'predicted':>12} {'tokens':>8} {'mean':>7} {'observed':>9}"
    for low in range(10):
        inside = (scores * 10).long().clamp(max=9) == low
        if inside.any():
            yield (f"  {low / 10:.1f} to {low / 10 + 0.1:.1f} {int(inside.sum()):>8} {scores[inside].mean():>7.2f} "
                   f"{labels[inside].mean():>9.2f}")  # fmt: skip


def train(args):
    check_replaceable(args.out)
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    tokenizer, template = Tokenizer(args.target / "tokenizer.model"), chat_template(args.target)
    skipped = Counter()
    dialogues = corpus_dialogues(args.seed + 2) if args.data == "mini" else read_sharegpt(args.data, skipped)
    prompts = [tokenizer.encode_chat(messages[:1], template) for messages in islice(dialogues, args.prompts)]
    report_skipped(skipped)
    kept_out = len(prompts) // 5
    if not kept_out:
        raise ValueError(f"{len(prompts)} prompts are too few to train on; give at least 5")
    torch.manual_seed(args.seed)
    decision = Decision(args.features, draft.config.hidden_size, args.threshold, fingerprint(draft)).to(args.device)
    parts = []
    for part in (prompts[kept_out:], prompts[:kept_out]):
        with torch.inference_mode():
            greedy, sampled = (collect(decision, target, draft, part, args.draft_length, t) for t in (0.0, 1.0))
        parts.append([torch.cat(pair).clone() for pair in zip(greedy, sampled)])
        print(f"{len(part)} prompts, {len(parts[-1][1])} drafted tokens", file=sys.stderr, flush=True)
    (features, labels), (unseen, unseen_labels) = parts
    for epoch, loss in enumerate(fit_decision(decision, features, labels, args.epochs, args.seed), 1):
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}", file=sys.stderr, flush=True)
    with torch.inference_mode():
        scores = decision.layers(unseen)[:, 0].sigmoid()
        loss = nn.functional.binary_cross_entropy(scores, unseen_labels).item()
        mean = unseen_labels.mean()
        blind = nn.functional.binary_cross_entropy(mean.expand_as(unseen_labels), unseen_labels).item()
    print(f"kept out: loss {loss:.4f} (always {mean:.2f}: {blind:.4f}), AUC {auc(scores, unseen_labels):.3f}")
    print("\n".join(calibration(scores, unseen_labels)))
    save_decision(decision, args.out)


def main(arguments=None):
    parser = Parser(prog="python -m s2d.decision", description=__doc__.splitlines()[0])
    training = parser.add_subparsers(dest="program", required=True).add_parser("train", help="make a decision model")
    training.add_argument("--target", type=Path, required=True)
    training.add_argument("--draft", type=Path, required=True)
    training.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    training.add_argument("--features", choices=("hidden", "stats"), default="stats")
    training.add_argument("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    training.add_argument("--prompts", type=int, default=400, help="how many to answer, twice each; a fifth is kept out")
    training.add_argument("--draft-length", type=int, default=10)
    training.add_argument("--epochs", type=int, default=6)
    training.add_argument("--threshold", type=float, default=0.4, help="stop where no path is as likely as this")
    training.add_argument("--device", default="cpu")
    training.add_argument("--seed", type=int, default=0)
    return run_program("decision", train, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
