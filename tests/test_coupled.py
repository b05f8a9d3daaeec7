"""One draw for draft and target: a seed gives the text of the target alone, whatever drafts."""

import random
from collections import Counter
from functools import partial

import pytest
import torch
from helpers import ByLastToken, limit_to, nearly_equal, random_tokens
from s2d.exits import TableExit, TablePrediction

from s2d import generate
from s2d.extras.datastore import Datastore
from s2d.sampling import Sampler, Sampling
from s2d.tree import Dynamic, TokenTree
from s2d.verify import residual, verify

EXITS = dict(exit_layers=(1, 2, 4), thresholds=(0.6, 0.4, 0.0), draft_tree=(3, 4, 8))
STORE = Datastore(random_tokens(5, 200, 7), end=2)
SHAPES = [(3, 2), (1, 2, 1), (4,), Dynamic(3, 4, 9), Dynamic(2, 6, 7), Dynamic(6, 2, 12)]
LENGTH = 16


@pytest.fixture(scope="module")
def pairs():
    """Targets with drafts that agree more or less; the last draft has few tokens of its own."""
    changes = [
        dict(eos_token_ids=(2, 7)),
        dict(scale=0.1, draft_stop=0.2),
        dict(scale=0.1, draft_length=3, max_position_embeddings=30),
        dict(eos_token_ids=(), scale=0.2, draft_length=9, draft_stop=0.35),
    ]
    made = [nearly_equal(i, **EXITS | change) for i, change in enumerate(changes)]
    limit_to(made[-1][1], torch.arange(5, 45))
    return made


def random_case(rng):
    """Options of ``generate`` besides the target's own, drawn from all that go together."""
    method = rng.choice(["sd", "mcsd", "s2d", "s2d-tree"])
    several = [None, [0], [2, 4], [0, 1, 4]]
    exits = rng.choice(several if method in ("s2d", "s2d-tree") else [None, [0], [2]])
    table = exits is not None and exits[0] == 0
    options = dict(method=method, exits=exits, init=rng.choice(["draft", "draft", "target"]))
    options["stop"] = rng.choice([None, 0.0, 0.1, 0.5] + [ByLastToken()] * (not table))
    options["datastore"] = STORE if table and rng.random() < 0.5 else None
    options["tree"] = rng.choice(SHAPES) if method in ("mcsd", "s2d-tree") else None
    if exits and len(exits) > 1 and rng.random() < 0.5:
        options["thresholds"] = [rng.choice([0.1, 0.5, 0.9]) for _ in exits]
    always = isinstance(options["tree"], Dynamic) or exits == [0]  # these need not be asked
    return options | dict(coupled=not (always and options["init"] == "draft") or rng.random() < 0.5)


def test_whatever_drafts_the_text_is_the_targets_with_this_seed(pairs):
    """160 random cases in float64, by equality: with roots from the target too."""
    ends, used, accepted, tokens = Counter(), Counter(), 0, 0
    for seed in range(160):
        rng = random.Random(seed)
        target, draft = rng.choice(pairs)
        how = dict(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.5]), seed=rng.choice([seed, 2**62 + seed])
        )
        how |= dict(top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 7]))
        how["max_new_tokens"] = rng.choice([1, 2, LENGTH, LENGTH])
        prompt = random_tokens(seed, rng.choice([1, 5, 20]), rng.choice([61, 6]))
        options = random_case(rng)
        alone = generate(target, prompt, method="ar", **how)
        output = generate(target, prompt, draft, **options, **how)
        assert output.tokens == alone.tokens and output.ended == alone.ended, (seed, options, how)
        assert output.exact and output.plan.coupled, (seed, options)
        ends[output.ended] += 1
        used.update(output.stats.exit_counts)
        accepted, tokens = accepted + output.stats.accepted, tokens + len(output.tokens)
    assert min(ends[why] for why in ("eos", "context", "length")) > 3
    assert min(used[layer] for layer in (0, 1, 2, 4)) > 10
    assert accepted > 0.1 * tokens  # drafts were of use


WAYS = [
    dict(method="s2d-tree"),
    dict(method="s2d-tree", exits=[0]),
    dict(method="s2d", exits=[0]),
    dict(method="s2d-tree", stop=0.1),
    dict(method="mcsd", tree=Dynamic(3, 4, 8), stop=ByLastToken()),
    dict(method="s2d", coupled=True),
    dict(method="s2d", exits=[0, 3, 4], coupled=True),
    dict(method="sd", coupled=True),
    dict(method="mcsd", coupled=True),
    dict(method="mcsd", init="target", coupled=True),
    dict(method="s2d-tree", init="target", coupled=True),
]


@pytest.mark.parametrize("how", [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9)], ids=str)
def test_a_trained_pair_writes_the_same_text_every_way(how, mini, held_out_prompts):
    target, draft, texts = mini("mini-7b"), mini("mini-draft"), []
    for seed, prompt in enumerate(held_out_prompts(1)[::3]):
        more = how | dict(seed=seed, max_new_tokens=24)
        alone = generate(target, prompt, method="ar", **more)
        for options in WAYS:
            output = generate(target, prompt, draft, **options, **more)
            assert output.tokens == alone.tokens and output.exact, options
            assert output.stats.steps < len(alone.tokens) or options.get("exits") == [0]
        other = generate(target, prompt, method="ar", **more | dict(seed=seed + 100))
        tested = generate(target, prompt, draft, "s2d", **more)
        texts += [(alone.tokens, other.tokens, tested.tokens)]
    assert any(alone != other for alone, other, _ in texts)  # of another seed,
    assert any(alone != tested for alone, _, tested in texts)  # and where tokens face tests


SAME_DICE = [dict(method="sd"), dict(method="mcsd", tree=(2, 2, 1)), dict(tree=Dynamic(1, 4, 4))]


@pytest.mark.parametrize("options", SAME_DICE, ids=str)
def test_a_draft_that_equals_the_target_is_always_right(options, pairs):
    """It throws the same dice: every level is accepted, at every position."""
    target, _ = pairs[3]
    options = dict(method="s2d-tree", exits=[4], stop=0.0, coupled=True) | options
    for how in (dict(temperature=1.0), dict(temperature=1.5, top_p=0.8, top_k=9)):
        output = generate(target, [3, 1, 4], target, max_new_tokens=40, **options, **how)
        assert output.stats.acceptance_rate == 1.0 and output.stats.mean_accepted_tokens > 3


# The law: what a draw by position must follow, counted over many seeds.

SEEDS, HERE = 2500, 7
P = torch.tensor([0.45, 0.3, 0.2, 0.05], dtype=torch.float64)
Q = torch.tensor([0.15, 0.2, 0.25, 0.4], dtype=torch.float64)
PAIRS = P[:, None] * P  # (V, V): independent
WITHOUT_REPLACEMENT = (PAIRS - PAIRS.diag().diag()) / (1.0 - P[:, None])


def surprise(outcome, law):
    """Pearson's chi-square test of ``outcome(seed)``, indices into ``law``, over all seeds.

    Returns how probable it is under the law that counts differ from it by as much as these. The sum
    of (count - expected)^2 / expected follows chi-square with as many degrees of freedom as there
    are possible outcomes, less one.
    """
    counts = torch.zeros_like(law)
    for seed in range(SEEDS):
        counts[outcome(seed)] += 1
    possible, expected = law > 0, SEEDS * law
    assert counts[~possible].sum() == 0 and expected[possible].min() > 5
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    freedom = (possible.sum() - 1).double()
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


class ByPositionAlone(Sampler):
    """Wrong: whatever the seed is, the numbers are the same."""

    def __init__(self, seed, device):
        super().__init__(0, device)


class BySeedAlone(Sampler):
    """Wrong: at all positions the numbers are the same."""

    def numbers_at(self, position, vocab_size):
        return super().numbers_at(0, vocab_size)


class BySum(ByPositionAlone):
    """Wrong: the numbers of a seed are those of the next one, a position before."""

    def __init__(self, seed, device):
        super().__init__(seed, device)
        self.shift = seed

    def numbers_at(self, position, vocab_size):
        return super().numbers_at(self.shift + position, vocab_size)


def best(sampler, position, count=1, probs=P):
    """The ``count`` first of a race."""
    return sampler.race(probs[None], [position])[0].topk(count).indices.tolist()


LAWS = {  # name -> what is seen of a seed, by the Sampler ``make``, and its law
    "a draw": (lambda make, seed: best(make(seed, "cpu"), HERE)[0], P),
    "two positions": (
        lambda make, seed: tuple(best(make(seed, "cpu"), HERE + i)[0] for i in (0, 1)),
        PAIRS,
    ),
    "two seeds": (
        lambda make, seed: tuple(best(make(seed + i, "cpu"), HERE - i)[0] for i in (0, 1)),
        PAIRS,
    ),
    "first two": (lambda make, seed: tuple(best(make(seed, "cpu"), HERE, 2)), WITHOUT_REPLACEMENT),
}


@pytest.mark.parametrize("name", LAWS)
def test_winners_of_races_are_independent_draws(name):
    see, law = LAWS[name]
    assert surprise(partial(see, Sampler), law) > 0.01


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ByPositionAlone, "a draw"),
        (ByPositionAlone, "first two"),
        (BySeedAlone, "two positions"),
        (BySum, "two seeds"),
    ],
)
def test_numbers_of_another_key_are_caught(make, name):
    see, law = LAWS[name]
    assert surprise(partial(see, make), law) < 1e-6


def test_exit_0_runs_the_race_of_what_its_table_knows():
    table = TableExit(None, 0.5, 9, torch.device("cpu"), torch.float64)
    sampling = Sampling(1.0, 1.0, False, Sampler(4, "cpu"), coupled=True)
    known, q = {7: 0.4, 2: 0.3, 5: 0.2}, torch.zeros(9, dtype=torch.float64)
    for token, probability in known.items():
        q[token] = probability
    for n in range(30):
        tokens, _ = TablePrediction(table, [known, known]).winners(2, sampling, [n, n + 1])
        assert tokens.tolist() == [best(sampling.sampler, n + i, 2, q) for i in (0, 1)]


def by_equality(sampler):
    """The first token of a step: the draft's winner, accepted if it is the target's too."""
    tree = TokenTree(torch.tensor(best(sampler, HERE, probs=Q)), torch.tensor([-1]))
    how = Sampling(1.0, 1.0, False, sampler, coupled=True)
    return verify(HERE, tree, None, P.log().expand(2, -1), how).tokens[0]


def by_ratio(sampler, shared):
    """The same by Leviathan's test u < p/q; ``shared``: a rejection takes the numbers up again.

    That was wrong in vLLM (54282): these made the rejected token win, so they are draws no more.
    """
    [token] = best(sampler, HERE, probs=Q)
    if sampler.flip((P[token] / Q[token])[None])[0]:
        return token
    rest = residual(P, Q)
    return best(sampler, HERE, probs=rest)[0] if shared else sampler.draw(rest[None]).item()


def test_shared_numbers_are_for_equality_alone():
    sampler_of = partial(Sampler, device="cpu")
    assert surprise(lambda seed: by_equality(sampler_of(seed)), P) > 0.01
    assert surprise(lambda seed: by_ratio(sampler_of(seed), shared=False), P) > 0.01
    assert surprise(lambda seed: by_ratio(sampler_of(seed), shared=True), P) < 1e-3
    for seed in range(100):
        assert by_equality(sampler_of(seed)) == best(sampler_of(seed), HERE)[0]


def test_numbers_are_the_same_in_any_order_and_dtype():
    """Also where many were asked for in between, so that they are made again."""
    one, other = Sampler(5, "cpu"), Sampler(5, "cpu", torch.float32)
    numbers = [one.numbers_at(position, 9) for position in range(1000)]
    other.draw(P[None])  # the other kind of chance moves nothing
    for position in (999, 3, 500, 0):
        assert (one.numbers_at(position, 9) == numbers[position]).all()
        assert (other.numbers_at(position, 9) == numbers[position].float()).all()
    assert len(one.numbers) < 600
