"""Training a decision model (decision.py in front): draft, let the target verify, learn what it accepted.

Improved MCSD (arXiv 2409.10644, "decision model").
"""

import sys
from pathlib import Path

import torch
from torch import nn

from ..chat import chat_template
from ..decision import Decision, fingerprint, read_decision, save_decision
from ..decode import generate
from ..sampling import warp
from ..tokenizer import Tokenizer
from ..weights import load_model, placement
from .dialogues import first_prompts

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features


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

        def label(step):
            proposal, logits, tokens = step.proposal, step.logits, step.proposal.tree.tokens
            if temperature == 0:
                labels.append((logits[:-1].argmax(dim=-1) == tokens).float())
            elif len(tokens):
                p, chosen = warp(logits[:-1], temperature), tokens[:, None]
                labels.append(
                    (p.gather(1, chosen) / proposal.q.gather(1, chosen))
                    .clamp(max=1.0)[:, 0]
                    .float()
                )

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
            loss = nn.functional.binary_cross_entropy_with_logits(
                decision.layers(features[rows])[:, 0], labels[rows]
            )
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
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[
        places
    ]  # equal scores share their mean rank
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


def check_replaceable(path):
    """Raise ValueError where a file at ``path`` is none that this program wrote. Asked before the work, not after."""
    if Path(path).exists():
        try:
            read_decision(path)
        except ValueError:
            raise ValueError(
                f"{path} is there already and is no decision model; name another file"
            ) from None


def train_decision(args):
    """The program: collect, fit, show how good it is on prompts kept out, save."""
    check_replaceable(args.out)
    if not 0.0 <= args.threshold <= 1.0 or min(args.prompts, args.draft_length, args.epochs) < 1:
        raise ValueError(f"the threshold is within 0..1, prompts, draft length and epochs at least 1; got {args.threshold:g}, "
                         f"{args.prompts}, {args.draft_length} and {args.epochs}")  # fmt: skip
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    tokenizer, template = Tokenizer(args.target), chat_template(args.target)
    prompts = first_prompts(args.data, args.seed + 2, args.prompts, tokenizer, template)
    kept_out = len(prompts) // 5
    if not kept_out:
        raise ValueError(f"{len(prompts)} prompts are too few to train on; give at least 5")
    print(f"on {placement(target, draft)}", file=sys.stderr)
    torch.manual_seed(args.seed)
    decision = Decision(
        args.features, draft.config.hidden_size, args.threshold, fingerprint(draft)
    ).to(args.device)
    parts = []
    for part in (prompts[kept_out:], prompts[:kept_out]):
        with torch.inference_mode():
            greedy, sampled = (
                collect(decision, target, draft, part, args.draft_length, t) for t in (0.0, 1.0)
            )
        parts.append([torch.cat(pair).clone() for pair in zip(greedy, sampled)])
        print(
            f"{len(part)} prompts, {len(parts[-1][1])} drafted tokens", file=sys.stderr, flush=True
        )
    (features, labels), (unseen, unseen_labels) = parts
    for epoch, loss in enumerate(
        fit_decision(decision, features, labels, args.epochs, args.seed), 1
    ):
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}", file=sys.stderr, flush=True)
    with torch.inference_mode():
        scores = decision.layers(unseen)[:, 0].sigmoid()
        loss = nn.functional.binary_cross_entropy(scores, unseen_labels).item()
        mean = unseen_labels.mean()
        blind = nn.functional.binary_cross_entropy(
            mean.expand_as(unseen_labels), unseen_labels
        ).item()
    print(
        f"kept out: loss {loss:.4f} (always {mean:.2f}: {blind:.4f}), AUC {auc(scores, unseen_labels):.3f}"
    )
    print("\n".join(calibration(scores, unseen_labels)))
    save_decision(decision, args.out)
