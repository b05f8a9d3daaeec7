"""Several prompts at once: each text is the one that ``generate`` gives alone, in float64."""

import random
import weakref

import pytest
from helpers import drawn_options, nearly_equal, raises_line, random_tokens

from s2d import generate, generate_many
from s2d.decoder import Decoder
from s2d.generation import decide
from s2d.model import Llama
from s2d.passes.batch import decode_many
from s2d.stats import Generation


@pytest.fixture(scope="module")
def models():
    return nearly_equal(1)


def test_each_text_is_the_one_alone(models):
    """And so is how it came about: random methods, options, prompts and numbers of them."""
    target, draft = models
    rng = random.Random(0)
    seen = set()
    for _ in range(12):
        options = rng.choice((drawn_options(rng), drawn_options(rng), dict(method="ar")))
        options |= dict(seed=rng.randrange(99), max_new_tokens=rng.choice((1, 7, 20)))
        options |= dict(temperature=rng.choice((0.0, 0.7, 1.5)), top_p=rng.choice((0.8, 1.0)))
        options["rule"] = rng.choice(("noise", "rejection"))
        longest = rng.choice((5, 40, 126))  # the target's context is 128
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 5))]
        prompts = [random_tokens(rng.randrange(99), length) for length in lengths]
        found = generate_many(target, prompts, draft, batch=rng.randint(1, 8), **options)
        for index, (prompt, each) in enumerate(zip(prompts, found, strict=True)):
            own = options | dict(seed=options["seed"] + index)
            expected = generate(target, prompt, draft, **own)
            assert each.tokens == expected.tokens, (options, index)
            assert each.stats.accept_lengths == expected.stats.accept_lengths
            assert each.stats.sent == expected.stats.sent
            assert (each.ended, each.exact) == (expected.ended, expected.exact)
            assert each.options.seed == options["seed"] + index
            seen.add(each.ended)
    assert seen == {"eos", "length", "context"}


def test_the_target_runs_once_for_all_and_its_head_for_what_is_needed(models):
    """Positions of all prompts in one row; of a prompt only the last one's logits."""
    target, draft = models
    rows, widths = [], []
    hooks = [
        target.model.layers[0].mlp.register_forward_hook(lambda _, x, y: widths.append(y.shape)),
        target.lm_head.register_forward_hook(lambda _, x, y: rows.append(len(y))),
    ]
    prompts = [random_tokens(i, 3 + i) for i in range(4)]
    options = dict(method="sd", draft_length=2, max_new_tokens=6, stop=0.0)
    found = list(generate_many(target, prompts, draft, batch=4, **options))
    for hook in hooks:
        hook.remove()
    steps = max(each.stats.steps for each in found)
    assert len(widths) == len(rows) == steps
    assert widths[0][:2] == (1, sum(map(len, prompts)) + 4 * 2) and rows[0] == 4 * 3
    assert sum(rows) < 3 * sum(each.stats.steps for each in found) + 1


def test_caches_are_those_of_a_batch_and_no_more(models, monkeypatch):
    """Of an answer that has ended nothing stays but its tokens, whoever holds it."""
    new = Llama.new_cache
    made = []
    alive = []

    def watched(self, *arguments, **options):
        made.append(weakref.ref(cache := new(self, *arguments, **options)))
        alive.append(sum(each() is not None for each in made))
        return cache

    monkeypatch.setattr(Llama, "new_cache", watched)
    prompts = [random_tokens(i, 1 + i) for i in range(12)]
    options = dict(max_new_tokens=9, exits=(1, 2, 4))
    target, draft = models
    held = list(generate_many(target, prompts, draft, batch=3, **options))
    assert len(held) == 12 and len(made) == 4 * 12  # the target's, and one for each exit
    assert max(alive) == 4 * 3 and not any(each() for each in made)
    made.clear()
    alive.clear()
    decided = decide(draft, decoder=FailsAfterAPrompt, **options)
    held = list(decode_many(target, [[5], *prompts[1:]], draft, decided, batch=3))
    assert [*map(type, held)] == [Generation, *[ValueError] * 11] and max(alive) == 4 * 3


class FailsAfterAPrompt(Decoder):
    """Its steps fail, unless the prompt is a single token."""

    def emit(self, accepted, tokens):
        if self.prompt_length > 1:
            raise ValueError("it fails")
        return super().emit(accepted, tokens)


def test_an_answers_time_is_not_that_of_who_asks(models, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    for answer in generate_many(models[0], [[1]] * 3, method="ar", batch=1, max_new_tokens=2):
        assert answer.stats.seconds == 0.0
        clock[0] += 1.0


def test_a_prompt_that_cannot_be_run_is_named_and_the_others_run(models):
    target, prompts = models[0], [[1, 2], [1] * 128, [3], [61], [], [4]]
    options = dict(method="ar", max_new_tokens=5)
    for batch in (1, 2, 8):
        found = list(decode_many(target, prompts, None, decide(None, **options), batch))
        bad = {i: str(each) for i, each in enumerate(found) if isinstance(each, ValueError)}
        assert bad.keys() == {1, 3, 4} and len(found) == 6
        assert bad[1] == "the prompt has 128 tokens; expected 1 to 127"
        for i in (0, 2, 5):
            assert found[i].tokens == generate(target, prompts[i], **options).tokens
    answers = generate_many(target, prompts, **options)
    assert next(answers).tokens == found[0].tokens
    raises_line(next, ValueError, "prompt 1: the prompt has 128 tokens", answers)
