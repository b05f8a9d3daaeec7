"""Training a decision model (decision.py in front): draft, let the target verify, learn from that.

Improved MCSD (arXiv 2409.10644, "decision model"). Knows nothing about trees.
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from ..chat import chat_template
from ..extras.decision import Decision, fingerprint, read_decision, save_decision
from ..generate import start
from ..sampling import warp
from ..tokenizer import Tokenizer
from ..weights import load_model, placement
from .dialogues import dialogues_of

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features
DRAFT_LENGTH = 10


class Recorder:
    """Plays a decision model that never stops, and remembers what one would have seen."""

    def __init__(self, decision):
        self.decision, self.inputs, self.threshold = decision, [], 0.0

    def __call__(self, prediction):
        self.inputs.append(self.decision.inputs(prediction))
        return torch.ones(len(prediction.hidden), device=prediction.hidden.device)


def collect(decision, target, draft, prompts, temperature):
    """Features (M, F) and acceptance probabilities (M,) of every token drafted for ``prompts``."""
    recorder, labels = Recorder(decision), []
    options = dict(draft_length=DRAFT_LENGTH, temperature=temperature, stop=recorder)
    for seed, prompt in enumerate(prompts):
        for step in start(target, prompt, draft, seed=seed, **options):
            labels.append(accepted(step, temperature))
    return torch.cat(recorder.inputs), torch.cat(labels)


def accepted(step, temperature):
    """Acceptance probabilities (N,) of a step's chain: min(1, p / q), one-hot at T = 0."""
    tokens, logits = step.proposal.tree.tokens, step.logits[:-1]
    if temperature == 0 or not len(tokens):
        return (logits.argmax(dim=-1) == tokens).float()
    chosen = tokens[:, None]
    p, q = warp(logits, temperature).gather(1, chosen), step.proposal.q.gather(1, chosen)
    return (p / q).clamp(max=1.0)[:, 0].float()


def fit_decision(decision, features, labels, epochs, seed):
    """Cross entropy against ``labels`` (M,), AdamW, in place; yields the loss after every epoch."""
    generator = torch.Generator().manual_seed(seed)
    peak = LEARNING_RATE[decision.features]
    optimizer = torch.optim.AdamW(decision.parameters(), lr=peak, weight_decay=0.01)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = peak * (1 - epoch / epochs)
        total = 0.0
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(256):
            logits = decision.layers(features[rows])[:, 0]
            loss = binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        yield total / len(labels)


def auc(scores, labels):
    """How often a token with a label over a half scores higher than another; 0.5 is guessing."""
    positive = labels > 0.5
    _, index, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2  # equal scores have their mean rank
    n, m = positive.sum().item(), (~positive).sum().item()
    return ((ranks[index][positive].sum() - n * (n + 1) / 2) / max(1, n * m)).item()


def calibration(scores, labels):
    """A table's lines: for each tenth of the scale how many, the mean prediction and mean label."""
    yield f"{'predicted':>12} {'tokens':>8} {'mean':>7} {'observed':>9}"
    for low in range(10):
        inside = (scores * 10).long().clamp(max=9) == low
        if inside.any():
            counted = f"{low / 10 + 0.1:.1f} {int(inside.sum()):>8} {scores[inside].mean():>7.2f}"
            yield f"  {low / 10:.1f} to {counted} {labels[inside].mean():>9.2f}"


def check_replaceable(path):
    """Raise ValueError where a file at ``path`` is none of this program's. Ask before the work."""
    try:
        if Path(path).exists():
            read_decision(path)
    except ValueError:
        there = f"{path} is there already and is no decision model"
        raise ValueError(f"{there}; name another file") from None


def train_decision(args):
    """The program: collect, fit, show how good it is on prompts kept out, save."""
    check_replaceable(args.out)
    got = args.threshold, args.prompts, args.epochs
    if not 0.0 <= args.threshold <= 1.0 or min(args.prompts, args.epochs) < 1:
        least = "the threshold is within 0..1, prompts and epochs at least 1"
        raise ValueError("{}; got {:g}, {} and {}".format(least, *got))
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    tokenizer, template = Tokenizer(args.target), chat_template(args.target)
    dialogues = islice(dialogues_of(args.data, args.seed + 2), args.prompts)
    prompts = [tokenizer.encode_chat(messages[:1], template) for messages in list(dialogues)]
    kept_out = len(prompts) // 5
    if not kept_out:
        raise ValueError(f"{len(prompts)} prompts are too few to train on; give at least 5")
    report = partial(print, file=sys.stderr, flush=True)
    report(f"on {placement(target, draft)}")
    torch.manual_seed(args.seed)
    decision = Decision(args.features, draft.config.hidden_size, args.threshold, fingerprint(draft))
    decision.to(args.device)
    models, parts = (decision, target, draft), []
    for part in (prompts[kept_out:], prompts[:kept_out]):
        with torch.inference_mode():
            runs = [collect(*models, part, t) for t in (0.0, 1.0)]
        parts.append([torch.cat(pair).clone() for pair in zip(*runs)])
        report(f"{len(part)} prompts, {len(parts[-1][1])} drafted tokens")
    (features, labels), (unseen, unseen_labels) = parts
    losses = fit_decision(decision, features, labels, args.epochs, args.seed)
    for epoch, loss in enumerate(losses, 1):
        report(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}")
    with torch.inference_mode():
        scores = decision.layers(unseen)[:, 0].sigmoid()
        loss, mean = binary_cross_entropy(scores, unseen_labels), unseen_labels.mean()
        blind = binary_cross_entropy(mean.expand_as(unseen_labels), unseen_labels)
    area = auc(scores, unseen_labels)
    print(f"kept out: loss {loss:.4f} (always {mean:.2f}: {blind:.4f}), AUC {area:.3f}")
    print("\n".join(calibration(scores, unseen_labels)))
    save_decision(decision, args.out)
