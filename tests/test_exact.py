"""Every method against the plain definition, and against the target alone.

``definition.py`` is the oracle: no cache, no tree, no batching.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import definition
import numpy as np
import pytest
import torch
from helpers import DEVICE, ByLastToken, drawn_options, nearly_equal, random_llama, random_tokens

from s2d import StopStrings, generate, generate_many, mask, start
from s2d.generation import with_vocabulary_of
from s2d.mcsd.decision import with_decision
from s2d.mcsd.roots import RootsDecoder
from s2d.ngram.datastore import Datastore, reading
from s2d.proof import Law, law, text_law
from s2d.sampling import Distribution, Draws
from s2d.tree import TARGET, GrowingShape

SHAPES = [(1, 1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 3)]
SHAPES += [GrowingShape(2, 3, 5), GrowingShape(3, 3, 12), GrowingShape(4, 2, 3)]


@pytest.mark.parametrize("part", range(2))
def test_every_step_is_the_definitions(part):
    """Proposals and tokens, of chains and trees of sorted exits that stop, greedy and coupled."""
    rng = random.Random(part)
    like = torch.empty((1, 61), dtype=torch.float64, device=DEVICE)
    for case in range(7):
        eos = rng.randrange(61)
        target, draft = nearly_equal(rng.randrange(4), eos_token_ids=(eos,))
        exits = tuple(sorted(rng.sample((1, 2, 3, 4), rng.choice((1, 2, 3)))))
        drafting = dict(exits=exits, stop=rng.choice((0.0, 0.05, 0.3)))
        drafting["thresholds"] = [rng.choice((0.1, 0.3, 0.6)) for _ in exits[:-1]]
        law = dict(temperature=rng.choice((0.0, 0.7, 1.0)))
        law |= dict(top_p=rng.choice((1.0, 0.8)), top_k=rng.choice((0, 9)))
        prompt = random_tokens(case, rng.choice((1, 5, 30)))
        shape = rng.choice(SHAPES)
        prompt[-1] = eos if case % 3 == 0 else prompt[-1]
        options = dict(tree=shape, max_new_tokens=12, seed=case, **drafting, **law)
        found = start(target, prompt, draft, **options)
        draws, scale, decided = Draws(case), 1, found.options
        if law["temperature"] == 0:
            scale, decided = 0, replace(decided, temperature=1.0, top_p=1.0, top_k=0)
        noise = lambda position: draws.noise([position], like)[0] * scale  # noqa: B023, E731
        expected = definition.generate(target, draft, prompt, decided, noise)
        for step, (tree, tokens) in zip(found, expected, strict=True):
            assert step.tokens == tokens, (part, case)
            n = len(step.tree.context)
            drafted = {tuple(step.tree.text(node)[n:]): node for node in step.tree.nodes[1:]}
            assert {path: node.exit_layer for path, node in drafted.items()} == tree


MODELS = [nearly_equal(seed, eos_token_ids=(7,)) for seed in range(3)]
MODELS += [(random_llama(5, eos_token_ids=()), random_llama(6, max_position_embeddings=40))]


def differing(cases):
    """How many of so many drawn generations are not the text of the target alone."""
    rng = random.Random(0)
    wrong = 0
    for case in range(cases):
        target, draft = rng.choice(MODELS)
        prompt = random_tokens(case, rng.choice((1, 4, 30, 110, 127)))
        law = dict(seed=case, max_new_tokens=rng.choice((1, 9, 20)))
        law |= dict(temperature=rng.choice((0.0, 0.7, 1.0)), top_p=rng.choice((1.0, 0.9)))
        alone = generate(target, prompt, method="ar", **law)
        found = generate(target, prompt, draft, **drawn_options(rng), **law)
        wrong += (found.tokens, found.ended) != (alone.tokens, alone.ended)
    return wrong


def test_one_seed_one_text():
    """Whatever drafts, up to EOS, the number asked for, or the end of either model's context."""
    assert differing(36) == 0


def causal(*given):
    """Attention that knows nothing of branches."""
    return [each._replace(mask=None) for each in mask.unread(*given)]


MISTAKES = {"s2d.decoder.unread": causal, "s2d.model.move_up": lambda rows, n, entries: None}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_mask_or_roll_back_shows(name, monkeypatch):
    monkeypatch.setattr(name, MISTAKES[name])
    assert differing(12) > 0


READING = reading(Datastore([0, 1, 1, 2, 1], end=[]))
DECIDED = dict(drafter=with_decision(ByLastToken()), stop=0.9)
S2D = dict(method="s2d", draft_length=2, exits=[1, 2], thresholds=[0.65], max_new_tokens=3)
REJECTION = [  # options, and the sizes of the target's vocabulary and of the draft's
    (dict(method="sd", draft_length=2, exits=[2]), 3, 5),
    (dict(method="mcsd", tree=(2,), exits=[2]), 3, 2),
    (dict(method="mcsd", tree=(2,), exits=[READING]), 3, 3),
    (S2D, 2, 2),
    (S2D | dict(exits=[0, 2]), 2, 2),
    (S2D | DECIDED, 2, 2),
    (S2D | dict(draft_length=None, tree=(2, 1)), 2, 2),
    (S2D | dict(draft_length=None, tree=GrowingShape(2, 2, 3)), 3, 3),
    (dict(tree=(1, 2), exits=[1, 2], thresholds=[0.65], decoder=RootsDecoder), 2, 2),
    (dict(tree=GrowingShape(1, 2, 2), exits=[2], decoder=RootsDecoder), 3, 3),
]


def few_tokens(size=3, draft_size=3, eos_token_ids=()):
    """A target with a small vocabulary, and a draft with its own."""
    sizes = dict(vocab_size=size, num_hidden_layers=1, eos_token_ids=eos_token_ids)
    return random_llama(1, **sizes), random_llama(2, vocab_size=draft_size, num_hidden_layers=2)


PROMPT = [1, 0, 1, 1]


def own_law(target, length, **law):
    """The target's own, alone."""
    after = definition.logits_after
    return text_law(lambda text: Distribution(**law)(after(target, [*PROMPT, *text])), length)


@pytest.mark.parametrize(("options", "size", "draft_size"), REJECTION)
def test_rejection_sampling_leaves_p(options, size, draft_size):
    """Every outcome of whole generations. Each exit drafts in some of them."""
    target, draft = few_tokens(size, draft_size)
    used = dict(rule="rejection", temperature=0.8, max_new_tokens=2) | options
    drafted = set()

    def answer(_):
        found = generate(target, PROMPT, draft, **used)
        drafted.update(found.stats.sent)
        return found.tokens

    found = law(answer)
    expected = own_law(target, used["max_new_tokens"], temperature=0.8)
    assert found.enumerated and found.distance(expected) < 1e-9
    assert len(drafted - {TARGET}) == len(used["exits"])


def test_an_end_within_a_path_leaves_p():
    """EOS, and where a caller's ``stop_at`` ends the answer; and with top-p and top-k."""
    settings = dict(temperature=0.8, top_p=0.9, top_k=2)
    stop_at = SimpleNamespace(begin=lambda: lambda token: token == 1)
    for end, changes in ((None, dict(eos_token_ids=(1,))), (stop_at, {})):
        target, draft = few_tokens(**changes)
        used = dict(draft_length=2, exits=[2], rule="rejection", max_new_tokens=3, **settings)
        found = law(lambda _: generate(target, PROMPT, draft, stop_at=end, **used).tokens)  # noqa: B023
        expected = Counter()
        for text, prob in own_law(target, 3, **settings).probs.items():
            expected[text[: (*text, 1).index(1) + 1]] += prob
        assert found.distance(Law(expected, enumerated=True)) < 1e-9


def test_a_draft_with_fewer_or_more_tokens_predicts_as_before():
    """Those that both models have. That it stays exact is enumerated above."""
    draft = random_llama(1)
    tokens = torch.tensor([[3, 1]], device=draft.device)
    smaller, larger = (with_vocabulary_of(random_llama(0, vocab_size=n), draft) for n in (50, 90))
    assert torch.equal(smaller(tokens), draft(tokens)[..., :50])
    assert torch.equal(larger(tokens)[..., :61], draft(tokens)) and larger(tokens).shape[2] == 90
    assert torch.equal(larger.embed(tokens + 80), draft.embed(tokens * 0 + 60))


def test_every_method_ends_at_the_same_stop_string(mini, tokenizer):
    """In the middle of what a step accepts; alone, and with other prompts in the same passes."""
    target, draft = mini("mini-7b"), mini("mini-draft")
    prompt = tokenizer.encode_chat(["Tell me a story about a robot called Nora."])
    law = dict(temperature=1.0, max_new_tokens=24)
    whole = generate(target, prompt, draft, **law)
    text = whole.text(tokenizer)
    law["stop_at"] = StopStrings(tokenizer, ["never", text[len(text) // 2 :][:5]])
    found = generate(target, prompt, method="ar", **law)
    count = len(found.tokens)
    assert found.tokens == whole.tokens[:count]
    assert count not in accumulate(whole.stats.accept_lengths)
    for options in (dict(method="s2d"), dict(method="s2d-tree"), dict(decoder=RootsDecoder)):
        each = generate(target, prompt, draft, **options, **law)
        assert (each.tokens, each.ended) == (found.tokens, "stop_at")
        assert sum(each.stats.accept_lengths) == count
    first, _ = generate_many(target, [prompt, prompt], draft, **law)
    assert first.tokens == found.tokens


def test_a_decoder_that_was_interrupted_within_a_step_has_no_more_steps():
    target = random_llama(1, eos_token_ids=())
    for part in ("draft", "verify", "emit"):
        decoder = start(target, [3, 1], max_new_tokens=20)
        said = next(iter(decoder)).tokens
        owner = decoder.rule if part == "verify" else decoder
        with mock.patch.object(owner, part, side_effect=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                decoder.run()
        assert list(decoder) == [] and decoder.run().tokens == said


def test_ids_and_options_of_other_kinds():
    """The small numbers of NumPy do not overflow."""
    target, draft = nearly_equal(2, eos_token_ids=())
    law = dict(temperature=1.0, max_new_tokens=120, seed=255)
    expected = generate(target, [3, 1] * 50, draft, exits=[2, 4], **law).tokens
    law |= dict(max_new_tokens=np.int8(120), seed=np.uint8(255), exits=np.array([2, 4]))
    for kind in (torch.tensor, partial(np.array, dtype=np.uint16)):
        found = generate(target, kind([3, 1] * 50), draft, **law).tokens
        assert found == expected and all(type(token) is int for token in found)
