"""Training a decision model (extras/decision.py): draft, let the target verify, learn from that.

Improved MCSD (arXiv 2409.10644, "decision model"). Knows nothing about caches.
"""

from itertools import islice

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..extras.decision import Decision, check_decision, fingerprint, save_decision
from ..generate import start
from ..program import tell
from ..sampling import warp
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model, placement
from ..weights.adapter import folders_read
from .dialogues import dialogues_of

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features
DRAFT_LENGTH = 10


def collect(decision, target, draft, prompts):
    """Features (M, F) and acceptance probabilities (M,) of every token drafted at T = 0 and 1."""
    inputs, labels = [], []

    def remember(prediction):
        """Plays a decision model that never stops."""
        inputs.append(decision.inputs(prediction))
        return torch.ones(len(prediction.hidden), device=prediction.hidden.device)

    remember.threshold = 0.0
    for temperature in (0.0, 1.0):
        options = dict(draft_length=DRAFT_LENGTH, temperature=temperature, stop=remember)
        for seed, prompt in enumerate(prompts):
            for step in start(target, prompt, draft, seed=seed, **options):
                labels.append(accepted(step, temperature))
    return torch.cat(inputs), torch.cat(labels)


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
    generator, peak = torch.Generator().manual_seed(seed), LEARNING_RATE[decision.features]
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


def train_decision(args):
    """The program: collect, fit, show how good it is on prompts kept out, save."""
    read = [*folders_read(args.target), *folders_read(args.draft)]
    check_decision(args.out, args.replace, [*read, args.data if args.data != "mini" else None])
    if not 0.0 <= args.threshold <= 1.0 or min(args.prompts, args.epochs) < 1:
        got = f"got {args.threshold:g}, {args.prompts} and {args.epochs}"
        raise ValueError(f"the threshold is within 0..1, prompts and epochs at least 1; {got}")
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    tokenizer, template = Tokenizer(args.target), chat_template(args.target)
    dialogues = islice(dialogues_of(args.data, args.seed + 2), args.prompts)
    prompts = [tokenizer.encode_chat(messages[:1], template) for messages in dialogues]
    if not (kept_out := len(prompts) // 5):
        raise ValueError(f"{len(prompts)} prompts are too few to train on; give at least 5")
    tell(f"on {placement(target, draft)}")
    torch.manual_seed(args.seed)
    decision = Decision(args.features, draft.config.hidden_size, args.threshold, fingerprint(draft))
    models = decision.to(args.device), target, draft
    features, labels = collect(*models, prompts[kept_out:])
    unseen, unseen_labels = collect(*models, prompts[:kept_out])
    training = fit_decision(decision, features, labels, args.epochs, args.seed)
    for epoch, loss in enumerate(training, 1):
        tell(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}")
    with torch.inference_mode():
        scores = decision.layers(unseen)[:, 0]
    print(f"kept out: {len(scores)} drafted tokens, AUC {auc(scores, unseen_labels):.3f}")
    save_decision(decision, args.out, args.replace)
