"""Training a decision model (extras/decision.py): draft, let the target verify, learn from that.

Improved MCSD (arXiv 2409.10644, "decision model").
"""

from itertools import islice

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..cli.program import progress
from ..extras.decision import Decision, fingerprint, save_decision
from ..files import refuse_other_than_file
from ..generation import start
from ..text.tokenizer import Tokenizer
from ..weights import load_model
from .dialogues import dialogues_of

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features
FEATURES = tuple(LEARNING_RATE)
DRAFT_LENGTH = 10
THRESHOLD = 0.4  # drafting stops where no path is as likely to be accepted as this


def collect(decision, target, draft, prompts):
    """Features (M, F) and acceptance probabilities (M,) of every token drafted at T = 0 and 1."""
    inputs, labels = [], []

    class Remember:
        """A decision model that never stops."""

        def stops(self, tree, parents, prediction):
            inputs.append(decision.inputs(prediction))
            return False

        def prepare_for(self, draft):
            pass

    options = dict(draft_length=DRAFT_LENGTH, coupled=False, decision=Remember())
    for temperature in (0.0, 1.0):
        what = f"answers to draft for at temperature {temperature:g}"
        for seed, prompt in enumerate(progress(prompts, what, len(prompts))):
            law = dict(temperature=temperature, seed=seed)
            for step in start(target, prompt, draft, **law, **options):
                labels.append(accepted(step, temperature))
    return torch.cat(inputs), torch.cat(labels)


def accepted(step, temperature):
    """Acceptance probabilities (N,) of a step's chain: min(1, p / q), one-hot at T = 0."""
    tree, logits = step.tree, step.logits[:-1].float()  # (N, V)
    tokens, paths = logits.new_tensor(tree.tokens).long(), logits.new_tensor([1.0, *tree.probs])
    if temperature == 0:
        return (logits.argmax(dim=-1) == tokens).float()
    p = logits.softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    return (p / (paths[1:] / paths[:-1])).clamp(max=1.0)


def fit_decision(decision, features, labels, epochs, seed):
    """Learn ``labels`` (M,) from ``features`` (M, F) by cross entropy and AdamW, in place."""
    generator, peak = torch.Generator().manual_seed(seed), LEARNING_RATE[decision.features]
    optimizer = torch.optim.AdamW(decision.parameters(), lr=peak, weight_decay=0.01)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = peak * (1 - epoch / epochs)
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(256):
            logits = decision.layers(features[rows])[:, 0]
            loss = binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_decision(run, target, draft, features, data="mini", prompts=400, epochs=6):
    """Learn from four fifths of the ``prompts``, print how good it is on the others, save."""
    refuse_other_than_file(run.out)
    if prompts < 5 or epochs < 1:
        raise ValueError(f"expected 5 prompts, 1 epoch or more; got {prompts} and {epochs}")
    model, drafter = load_model(target, run.device), load_model(draft, run.device)
    tokenizer = Tokenizer(target, model.config.vocab_size)
    dialogues = islice(dialogues_of(data, run.seed + 2), prompts)
    questions = [tokenizer.encode_prompt(messages[:1]) for messages in dialogues]
    if len(questions) < 5:
        raise ValueError(f"{data} has {len(questions)} dialogues; expected 5 or more")
    torch.manual_seed(run.seed)
    decision = Decision(features, drafter.config.hidden_size, THRESHOLD, fingerprint(drafter))
    decision.to(run.device)
    kept_out = prompts // 5
    inputs, labels = collect(decision, model, drafter, questions[kept_out:])
    fit_decision(decision, inputs, labels, epochs, run.seed)
    inputs, labels = collect(decision, model, drafter, questions[:kept_out])
    with torch.inference_mode():
        right = (decision.layers(inputs)[:, 0] > 0) == (labels > 0.5)
    print(f"kept out: right about {right.float().mean():.1%} of {len(right)} drafted tokens")
    save_decision(decision, run.out)
