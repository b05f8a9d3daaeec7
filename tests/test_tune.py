"""Drafting that tunes itself: exact whatever it decides, decided as the rule says, the same again with the same history."""

import itertools
import json
import math
import random
import time

import numpy as np
import pytest
import torch
from enumeration import enumerate_outcomes
from helpers import WEIGHTS, program, random_llama
from test_draft_vocabulary import EveryDraw

import run
from s2d import Tokenizer, decode, generate, load_model, tune
from s2d.bench import __main__ as bench
from s2d.bench import simulate
from s2d.decision import fingerprint
from s2d.sampling import Sampler, Sampling
from s2d.train import __main__ as train
from s2d.tune.chances import BINS, CENTRES, EDGES, Chances, Level, Visit, bin_of
from s2d.tune.costs import (
    LARGEST,
    ROWS,
    Costs,
    cheapest_growth,
    flat_costs,
    kept_costs,
    read_costs,
    write_costs,
)
from s2d.tune.measuring import measure, rising
from s2d.tune.tuner import IDLE, SAVINGS, Tuner
from s2d.weights import save_model


def random_costs(rng, exits):
    """A table of a machine that nobody has: every part from free to dear, in stairs or not."""

    def line():
        steps = np.cumsum(rng.choice([0.0, 0.02, 0.5], size=len(ROWS)) * rng.random(len(ROWS)))
        return (rng.choice([0.05, 1.0, 5.0]) * rng.random() + 1e-3 + steps).tolist()

    target, segments, look = line(), [line() for _ in range(exits)], line()
    return Costs(
        "a test",
        [8, 64],
        [target] * 2,
        [segments] * 2,
        [look] * 2,
        *rng.random(2).tolist(),
        rng.random(2).tolist(),
    )


class Reckless(Tuner):
    """The worst policy that the rule allows: every decision by all that may be looked at, and by no reason at all."""

    most = 3  # nodes that are sent but one, few where all are enumerated

    def __init__(self, *given, salt, **more):
        super().__init__(*given, **more)
        self.salt, self.seen = salt, ()

    def whim(self, *looked_at):
        self.seen += looked_at
        return random.Random(repr((self.salt, self.seen))).random()

    def start(self, n, sampling):
        super().start(n, sampling)
        self.seen = (n,)
        return self.whim() > 0.1

    def skips(self, exit, rows, waiting):
        super().skips(exit, rows, waiting)
        return self.whim(*waiting) > 0.7

    def enough(self, exit, sure, tokens, logits, waiting):
        super().enough(exit, sure, tokens, logits, waiting)
        return exit == len(self.exits) - 1 or self.whim(*np.round(sure, 9).tolist(), *tokens) > 0.5

    def prefers_drawn(self, drawn, likeliest):
        return self.whim() > 0.4

    def worth(self, tokens=None, probs=()):
        known = len(self.every_path)
        super().worth(tokens, probs)
        del self.every_path[known:]
        worth = self.whim(*itertools.chain(*np.round(probs, 9).tolist())) > 0.15
        if worth and not self.drawn:
            self.every_path.append([0.5] * sum(map(len, self.levels[-1].tokens)))
        return worth

    def draw(self, place, prob):
        super().draw(place, prob)
        self.whim(place, round(prob, 9))  # from here on everything may depend on what was drawn

    def expand(self):
        order = list(range(len(self.every_path[-1])))[: int(4 * self.whim())]
        self.levels[-1].taken, self.paths = [0] * len(order), [1.0] * len(order)
        return order

    def send(self):
        order, plan = super().send()
        count = sum(map(len, self.every_path))
        return list(range(count if self.drawn else min(count, int(self.most * self.whim())))), plan


def error_of(kind, salt, kept, length, monkeypatch):
    """How far ``length`` tokens of a generation by such a tuner are from the target's distribution, and the trees it drafted.

    By every way that chance can fall in drafting and verifying, through ``generate`` itself.
    """
    sizes = {
        "vocab_size": 4,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "eos_token_ids": (),
    }
    target, draft = (
        random_llama(seed, scale=0.5, exit_layers=(1, 3), thresholds=(0.6, 0.0), **sizes)
        for seed in (0, 1)
    )
    if kept is not None:
        draft.keep_tokens(kept)
    seen = set()

    def decide(sampler):
        monkeypatch.setattr(decode, "Sampler", lambda seed, device: sampler)
        tuner = kind(
            random_costs(np.random.default_rng(salt), 2),
            (1, 3),
            vocabulary=draft.draft_vocabulary,
            salt=salt,
        )
        return generate(target, [3, 1], draft=draft, method="auto", tuner=tuner, max_new_tokens=length, temperature=1.0,
                        on_step=lambda step: seen.add((tuner.drawn, *step.proposal.level_sizes))).tokens  # fmt: skip

    monkeypatch.setattr("enumeration.EveryOutcome", EveryDraw)
    joint, expected = (
        torch.zeros((4,) * length, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )
    for tokens, chance in enumerate_outcomes(decide):
        joint[tuple(tokens)] += chance
    for place in range(length):
        prefixes = torch.tensor(
            [[3, 1, *prefix] for prefix in itertools.product(range(4), repeat=place)]
        )
        expected = expected[..., None] * target(prefixes)[:, -1].softmax(dim=-1).view(
            (4,) * (place + 1)
        )
    return (joint - expected).abs().max().item(), seen


@pytest.mark.parametrize("kept", [None, torch.tensor([1, 3])])
@pytest.mark.parametrize("salt", range(5))
def test_the_worst_policy_still_gives_the_targets_distribution(kept, salt, monkeypatch):
    error, seen = error_of(Reckless, salt, kept, 3, monkeypatch)
    assert error < 1e-9 and len(seen) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_greedy_text_is_the_targets_and_the_same_history_gives_the_same_again(temperature):
    """Over random models and random machines: short contexts, ends of answers, draft vocabularies, one exit or several."""
    shapes = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        eos = () if seed % 3 else (2, 7, 11)
        exits = [(4,), (1, 4), (1, 2, 4)][seed % 3]
        target = random_llama(
            seed, scale=0.2, eos_token_ids=eos, max_position_embeddings=48 if seed % 4 else 128
        )
        draft = random_llama(
            seed,
            scale=0.2,
            eos_token_ids=eos,
            exit_layers=exits,
            thresholds=(0.5,) * (len(exits) - 1) + (0.0,),
        )
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed)
            )
        if seed % 2:
            draft.keep_tokens(
                torch.randperm(61, generator=torch.Generator().manual_seed(seed))[:40].sort().values
            )
        costs, runs = random_costs(rng, len(exits)), []
        for _ in range(2):
            kind = Reckless if seed % 5 == 4 else Tuner
            tuner = kind(
                costs,
                exits,
                vocabulary=draft.draft_vocabulary,
                **({"salt": seed} if kind is Reckless else {}),
            )
            plans = []
            runs.append([generate(target, [3, 1, 4], draft=draft, method="auto", tuner=tuner, max_new_tokens=60, seed=number,
                                  temperature=temperature,
                                  on_step=lambda step: plans.append((step.proposal.level_sizes, step.proposal.plan)))  # noqa: B023
                         .tokens for number in range(2)] + [plans])  # fmt: skip
        assert runs[0] == runs[1]
        shapes |= {tuple(sizes) for sizes, _ in plans}
        if temperature == 0:
            alone = generate(target, [3, 1, 4], method="ar", max_new_tokens=60).tokens
            assert runs[0][0] == runs[0][1] == alone
    assert len(shapes) > 40


def test_a_table_is_read_between_its_sizes_and_its_lengths():
    target = [[1.0 + rows for rows in ROWS], [2.0 + 2 * rows for rows in ROWS]]
    costs = Costs(
        "",
        [0, 100],
        target,
        [[[0.5] * len(ROWS)], [[0.5] * len(ROWS)]],
        target,
        0.0,
        0.0,
        [0.1, 0.2],
    )
    found, segments, look = costs.at(50)
    assert np.array_equal(found, look)
    assert np.allclose(
        found[1 : LARGEST + 2], 1.5 + 1.5 * np.arange(1, LARGEST + 2)
    ) and segments.shape == (1, LARGEST + 2)
    assert np.allclose(costs.at(200)[0][7], 3 + 3 * 7)
    stairs = np.array([0, 1, 1, 1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6], dtype=float)
    growth = cheapest_growth(stairs)
    assert growth[1] == 0 and growth[3] == 4 / 8 and growth[5] == 0


def test_costs_that_never_fall():
    noisy = np.array([1.0, 3.0, 2.0, 4.0])
    assert rising(noisy, 0).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert rising(np.array([[2.0], [1.0]]), 0).ravel().tolist() == [1.5, 1.5]


def test_chances_are_means_that_forget():
    chances = Chances(2)
    assert chances.chance("first", 1, 9) == CENTRES[9] == pytest.approx((EDGES[8] + EDGES[9]) / 2)
    for grade in (1.0, 0.0, 1.0):
        chances.count("first", 1, 9, grade)
    assert chances.chance("first", 1, 9) == pytest.approx(
        (CENTRES[9] + 2) / 4
    )  # at face value once, then what was seen
    assert chances.chance("first", 0, 9) == CENTRES[9]
    for _ in range(500):
        chances.count("first", 1, 9, 0.25)
    assert chances.chance("first", 1, 9) == pytest.approx(0.25, abs=1e-3)
    assert len({bin_of(x) for x in np.linspace(0, 1, 2000)}) == BINS


def test_every_place_is_graded_at_every_exit_it_went_through():
    """T = 0: after a generation, counts equal those made anew from the records, the target's text and cache-free passes."""
    target, draft = random_llama(0, scale=0.25, eos_token_ids=()), random_llama(0, scale=0.25, eos_token_ids=(), exit_layers=(1, 2, 4),
                                                                                thresholds=(0.5, 0.5, 0.0))  # fmt: skip
    for parameter in draft.parameters():
        parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))

    class Open(Reckless):
        most = 99

        def learn(self, slots, tokens, p=None):
            records.append(
                (list(self.levels), [list(level.taken) for level in self.levels], slots, tokens)
            )
            super().learn(slots, tokens, p)

    records, steps = [], []
    tuner = Open(random_costs(np.random.default_rng(0), 3), (1, 2, 4), salt=3)
    tuner.chances["greedy"].memory = math.inf
    generate(
        target,
        [3, 1, 4],
        draft=draft,
        method="auto",
        tuner=tuner,
        max_new_tokens=110,
        on_step=steps.append,
    )
    counted, pairs, after, text = np.zeros((3, BINS, 2)), np.zeros((3, 3, BINS, 2)), [], [3, 1, 4]
    for (levels, _, slots, emitted), step in zip(records, steps):
        for place, token in enumerate(emitted):
            node = step.path[place - 1] if place else None
            if place and (place >= len(levels) or step.proposal.slots[node] >= 2**31) or not levels:
                break
            prefix, said = torch.tensor([text + emitted[:place]]), []
            for exit_layer in (1, 2, 4):
                hidden = draft.run_layers(draft.embed(prefix), 0, exit_layer)
                probs = draft.logits(hidden[0, -1]).softmax(dim=-1)
                said.append((probs.argmax().item() == token, bin_of(probs.max().item())))
            visited = [visit.exit for visit in levels[place].visits]
            for i, j in itertools.product(visited, repeat=2):
                if i == j:
                    counted[i, said[i][1]] += [1, said[i][0]]
                elif i < j:
                    pairs[i, j, said[i][1]] += [1, said[j][0]]
            if place:
                after.append(said[visited[-1]][0])
        text += emitted
    chances = tuner.chances["greedy"]
    for i in range(3):
        own = chances.row["first"] + i
        assert [weight - 1 for weight in chances.weighs[own]] == counted[i, :, 0].tolist()
        assert np.allclose(
            chances.table[own], (counted[i, :, 1] + CENTRES) / (counted[i, :, 0] + 1)
        )
        for j in range(i + 1, 3):
            both = chances.row["deeper"] + 3 * i + j
            assert np.allclose(
                chances.table[both], (pairs[i, j, :, 1] + CENTRES) / (pairs[i, j, :, 0] + 1)
            )
    assert counted[:, :, 0].sum() > 60 and pairs[:, :, :, 0].sum() > 20 and len(after) > 10
    assert chances.chance("after") == pytest.approx((0.6 + sum(after)) / (1 + len(after)))


def test_above_zero_everything_is_graded_by_the_chance_it_had():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6], [0.6, 0.2, 0.2]], dtype=torch.float64)
    levels = [Level([Visit(0, [2], [11], q[:1].log())], [[2, 0]], [[11, 6]], drawn=0, drawn_bin=6, taken=[6]),
              Level([Visit(0, [0], [11], q[1:].log())], [[0]], [[11]])]  # fmt: skip
    chances = Chances(1)
    chances.memory = math.inf
    chances.count_sampled(levels, [(0, 0), (1, 0)], p, Sampling(1.0, 1.0, False, None), None)
    assert chances.chance("first", 0, 11) == pytest.approx((CENTRES[11] + 0.2 + 0.1) / 3)
    assert chances.chance("drawn", 0, 11) == pytest.approx(
        (CENTRES[11] + (0.2 + 0.2 + 0.2) + (0.1 + 0.1 + 0.2)) / 3
    )
    assert chances.chance("token", 0, 6) == pytest.approx(
        (CENTRES[6] + 1.0) / 2
    )  # min(1, 0.5 / 0.2)
    assert chances.chance("other", 0, 6) == pytest.approx((CENTRES[6] + 0.5) / 2)
    assert chances.chance("next_drawn", 0, 6) == pytest.approx((0.6 + 0.4) / 2)
    assert chances.chance("root_drawn") == pytest.approx((0.6 + 0.6) / 2) and chances.chance(
        "after"
    ) == pytest.approx((0.6 + 0.1) / 2)


def a_tuner(rng, temperature=0.0, exits=3):
    tuner = Tuner(random_costs(rng, exits), tuple(range(1, exits + 1)))
    chances = tuner.chances["greedy" if temperature == 0 else "sampled"]
    chances.table = [[float(x) for x in np.sort(rng.random(BINS))] for _ in chances.table]
    tuner.tokens, tuner.milliseconds, tuner.level_ms = (
        1.0,
        float(rng.uniform(0.3, 6)),
        float(rng.uniform(0.05, 2)),
    )
    tuner.start(20, Sampling(temperature, 1.0, False, Sampler(0, "cpu")))
    return tuner


def slow_value(tuner, path, again, price):
    """What a path is worth with what may follow it, added up level by level until the next is not worth its price."""
    worth, alive = path, path
    for _ in range(16):
        alive *= min(again, 0.99)
        if alive <= price:
            break
        worth += alive - price
    return worth


def test_the_decisions_are_the_rules():
    """Exit, level, nodes: each compared with a plain sum of what is expected, minus the rate times what it takes."""
    decided = {"deeper": set(), "expand": set(), "send": set()}
    for seed in range(300):
        rng = np.random.default_rng(seed)
        tuner = a_tuner(rng)
        chances, rate = tuner.now, tuner.rate
        target, segments, look = tuner.costs.at(20)
        again, level_price = chances.chance("after"), rate * (tuner.level_ms + tuner.growth[1])
        assert tuner.value(0.7) == pytest.approx(
            slow_value(tuner, 0.7, again, level_price), abs=1e-9
        )
        sure = float(rng.random())
        own, price, deeper = chances.chance("first", 0, bin_of(sure)), 0.0, False
        for exit in (1, 2):
            price += rate * (segments[exit][1] + look[1])
            better = chances.chance("deeper", exit, bin_of(sure))
            gain = slow_value(tuner, better, again, level_price) - slow_value(
                tuner, own, again, level_price
            )
            deeper |= gain > price
        assert tuner.enough(0, [sure], [5], None, [1, 1, 1]) == (not deeper)
        decided["deeper"].add(deeper)
        probs = np.sort(rng.dirichlet([0.3] * 6))[::-1].tolist()
        if not tuner.worth([list(range(6))], [probs]):
            continue
        left, paths = 1.0, []
        for place, prob in enumerate(probs):
            chance = min(left, chances.chance("other" if place else "first", 0, bin_of(prob)))
            left, paths = left - chance, paths + [chance]
        assert tuner.every_path == [pytest.approx(paths)]
        order = sorted(range(6), key=lambda each: -paths[each])
        net, best, count = 0.0, 0.0, 0
        for place, each in enumerate(order):
            then = paths[each] * chances.chance("next", 0, bin_of(probs[each]))
            more = segments[0][place + 1] - segments[0][place] if place else tuner.level_ms
            net += slow_value(tuner, then, again, tuner.row_price if place else level_price)
            net -= rate * (more + tuner.growth[1 + tuner.sent])
            if net > best:
                best, count = net, place + 1
        assert tuner.expand() == order[:count]
        decided["expand"].add(count)
        kept, plan = tuner.send()
        totals = [
            1 + sum(paths[each] for each in order[:n]) - rate * target[1 + n] for n in range(7)
        ]
        assert len(kept) == int(np.argmax(totals)) and plan["expected_tokens"] == pytest.approx(
            1 + sum(paths[each] for each in kept)
        )
        decided["send"].add(len(kept))
    assert (
        decided["deeper"] == {True, False}
        and len(decided["expand"]) > 3
        and len(decided["send"]) > 3
    )


def test_an_exit_is_passed_by_once_looks_at_it_have_saved_less_than_they_cost():
    """A look costs a quarter of a millisecond; what it saves, counted here anew, is all that going deeper would have cost."""
    for sure, better, saves in ((0.55, 0.9, False), (0.9, 0.91, True)):
        tuner = Tuner(flat_costs(4.0, 0.1, 2, look=0.25), (1, 2))
        tuner.now = tuner.chances["greedy"]
        tuner.now.table[tuner.now.row["first"]] = [sure] * BINS
        tuner.now.table[tuner.now.row["deeper"] + 1] = [better] * BINS
        passed = []
        for _ in range(3 * IDLE):
            tuner.tokens, tuner.milliseconds, tuner.level_ms = 1.0, 4.0, 0.35
            tuner.start(10, Sampling(0.0, 1.0, False, None))
            passed.append(tuner.passes_by(0, 1, [1, 1]))
            if not passed[-1]:
                gain, price = tuner.value(better) - tuner.value(sure), tuner.rate * 0.35
                assert tuner.enough(0, [0.5], [5], None, [1, 1]) == (gain <= price) == saves
            assert not tuner.passes_by(1, 1, [1, 1])  # the last one never is
        looked = [number for number, by in enumerate(passed) if not by]
        assert looked == (list(range(3 * IDLE)) if saves else [0, 1 + IDLE, 2 + 2 * IDLE])
        if not saves:  # but not where the next exit would have much to catch up on
            tuner.start(10, Sampling(0.0, 1.0, False, None))
            assert tuner.passes_by(0, 1, [1, 5]) and not tuner.passes_by(0, 1, [1, 100 * LARGEST])


def test_catching_up_is_paid_out_of_what_an_exit_has_earned():
    """Beside a ledger: prompts of any length to read, after each of which the deeper exit is right so much more often."""
    tuner, rng, earned, decided = (
        Tuner(flat_costs(4.0, 0.1, 2), (1, 2)),
        np.random.default_rng(0),
        0.0,
        set(),
    )
    table = tuner.chances["greedy"]
    for _ in range(400):
        sure, better = sorted(rng.uniform(0.2, 1.0, 2))
        table.table[table.row["first"]], table.table[table.row["deeper"] + 1] = (
            [sure] * BINS,
            [better] * BINS,
        )
        tuner.tokens, tuner.milliseconds, tuner.level_ms = 1.0, 4.0, 0.1
        tuner.start(10, Sampling(0.0, 1.0, False, None))
        behind = int(rng.choice([1, LARGEST * 40, LARGEST * 120]))
        surplus = tuner.value(better) - tuner.value(sure) - tuner.rate * 0.1
        debt = tuner.rate * 0.1 * (max(behind, LARGEST) / LARGEST - 1)
        earned = min(earned + max(surplus, 0.0), max(SAVINGS, debt)) if surplus > 0 else earned
        deeper = surplus > 0 and earned >= debt
        assert tuner.enough(0, [0.5], [5], None, [1, behind]) == (not deeper)
        earned -= debt * deeper
        decided.add((deeper, surplus > 0, behind))
    assert len(decided) > 6


def test_where_a_draft_never_pays_it_is_tried_again_now_and_then():
    tuner = Tuner(flat_costs(1.0, 50.0, 1), (1,))
    tuner.tokens, tuner.milliseconds, tuner.level_ms = 1.0, 1.0, 50.0
    drafted = [tuner.start(10, Sampling(0.0, 1.0, False, None)) for _ in range(3 * IDLE)]
    assert drafted.count(True) == 2 and not any(drafted[:IDLE])


def test_the_rate_is_never_below_the_targets_own():
    """After a bad stretch time would seem cheap, and more would be drafted for less."""
    tuner = Tuner(flat_costs(4.0, 0.5, 1, step=1.0), (1,))
    tuner.tokens, tuner.milliseconds, tuner.level_ms = 1.0, 50.0, 0.5
    tuner.start(10, Sampling(0.0, 1.0, False, None))
    assert tuner.rate == pytest.approx(1 / 5)


def test_a_drawn_chain_or_the_likeliest_by_what_they_bring():
    """Drawing accepts sum min(p, q), the likeliest p of it: which is better, counts decide."""
    for drawn, likeliest in ((0.9, 0.4), (0.3, 0.8)):
        tuner = a_tuner(np.random.default_rng(0), temperature=1.0, exits=1)
        for name in ("first", "drawn"):
            tuner.now.table[tuner.now.row[name]] = [drawn if name == "drawn" else likeliest] * BINS
        tuner.now.table[tuner.now.row["other"]] = [0.0] * BINS
        tuner.enough(0, [0.5], [5], None, [1])
        tuner.worth([[5, 6]], [[0.5, 0.2]])
        assert tuner.drawn == (drawn > likeliest)


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, draft = (
        random_llama(0, eos_token_ids=()),
        random_llama(1, eos_token_ids=(), exit_layers=(2, 4), thresholds=(0.5, 0.0)),
    )
    options = dict(draft=draft, method="auto", max_new_tokens=12)
    first = generate(target, [3, 1], **options).tokens
    assert capsys.readouterr().err.count("measuring") == 1
    assert (
        generate(target, [3, 1], **options).tokens
        == first
        == generate(target, [3, 1], method="ar", max_new_tokens=12).tokens
    )
    assert "measuring" not in capsys.readouterr().err
    (file,) = (tmp_path / "cache" / "s2d").glob("costs-*.json")
    costs = read_costs(file, 2)
    assert kept_costs(costs.made_for, 2) == costs and kept_costs("another machine", 2) is None
    assert (
        np.diff(costs.target, axis=0).min() >= 0
        and np.diff(costs.target, axis=1).min() >= 0
        and np.min(costs.segments) >= 0
    )
    torch.set_num_threads(
        3 - torch.get_num_threads()
    )  # another number of threads is another machine
    try:
        generate(target, [3, 1], **options)
    finally:
        torch.set_num_threads(3 - torch.get_num_threads())
    assert (
        capsys.readouterr().err.count("measuring") == 1
        and len(list((tmp_path / "cache" / "s2d").iterdir())) == 2
    )
    file.write_text("{}")
    generate(target, [3, 1], **options)  # a damaged table of ours is measured anew
    assert capsys.readouterr().err.count("measuring") == 1 and read_costs(file, 2)
    mine = tmp_path / "mine.json"
    tuner = tune.tuner_for(generate, target, draft, (2, 4), mine)
    assert read_costs(mine, 2) == tuner.costs
    whole, line = json.loads(mine.read_text()), [1.0] * len(ROWS)
    damages = [{"contexts": [1, 1]}, {"contexts": [0, 1, 2]}, {"target": []}, {"target": [line, [0.0] * len(ROWS)]}, {"step": -1}, {"look": [line]},
               {"target": [line, [math.nan] * len(ROWS)]}, {"segments": [[line, line], [line]]}, {"segments": [line, line]},
               {"step": [1, 10**400]}, {"step": [1, math.inf]}, {"made_for": 3}, {"step": [1]}, {"drawn": None}, {"start": -1}, {"contexts": ["a", "b"]}]  # fmt: skip
    for text in (
        "{}",
        "[1]",
        "nonsense",
        "\u00e9",
        *(json.dumps(whole | damage) for damage in damages),
    ):
        mine.write_text(text)
        with pytest.raises(ValueError, match="holds no table of costs"):
            tune.tuner_for(generate, target, draft, (2, 4), mine)
        assert mine.read_text() == text  # a user's file is not written over
    write_costs(random_costs(np.random.default_rng(0), 3), mine)
    with pytest.raises(ValueError, match="3 exits, not of 2"):
        tune.tuner_for(generate, target, draft, (2, 4), mine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(mine))  # a file: nothing can be kept there
    assert generate(target, [3, 1], **options).tokens == first
    assert "could not be kept" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"for exits \[2, 4\], not \[4\]"):
        generate(target, [3, 1], exits=[4], tuner=tuner, **options)


def test_measuring_finds_what_is_slow():
    """A target that waits for each row, and a draft that waits in its second segment."""
    target, draft = (
        random_llama(0, eos_token_ids=()),
        random_llama(1, eos_token_ids=(), exit_layers=(2, 4), thresholds=(0.5, 0.0)),
    )
    fast = type(target).run_layers

    def slow_target(hidden, *rest, **more):
        time.sleep(0.0005 * min(hidden.shape[1], 70))
        return fast(target, hidden, *rest, **more)

    def slow_draft(hidden, start=0, stop=None, *rest, **more):
        time.sleep(0.004 * (start == 2))
        return fast(draft, hidden, start, stop, *rest, **more)

    target.run_layers, draft.run_layers = slow_target, slow_draft
    costs = measure(generate, target, draft, (2, 4))
    rows, (first, second), look = costs.at(16)
    assert 0.3 < (rows[64] - rows[1]) / 63 < 0.9
    assert second[1] > 3.5 and second[1] > 2 * first[1]


@pytest.mark.parametrize("context", [3, 8, 40])
def test_measuring_in_short_contexts(context):
    """A draft whose own is shorter than the target's, where hardly a draft fits: a table all the same, or one clear line."""
    target = random_llama(0, eos_token_ids=())
    draft = random_llama(
        1, exit_layers=(2, 4), thresholds=(0.5, 0.0), max_position_embeddings=context
    )
    if context == 3:
        with pytest.raises(ValueError, match="too soon to measure"):
            measure(generate, target, draft, (2, 4))
    else:
        target_ms, segments, _ = measure(generate, target, draft, (2, 4)).at(10)
        assert target_ms[64] >= target_ms[1] > 0 and (segments[0] > 0).all()


def test_a_compiled_model_may_measure_within_a_generation(monkeypatch):
    """Where a model has one cache for all generations, as on a GPU, none is begun before what it needs is measured."""
    target, draft = (
        random_llama(0, eos_token_ids=()),
        random_llama(1, exit_layers=(2, 4), thresholds=(0.5, 0.0)),
    )
    expected, caches = generate(target, [3] * 20, method="ar", max_new_tokens=20).tokens, {}

    def one_cache(capacity, start=0, stop=None, *rest):
        cache = caches.setdefault(
            (start, stop), type(target).new_cache(target, 200, start, stop, *rest)
        )
        cache.length = 0
        return cache

    target.new_cache = one_cache
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert (
        generate(target, [3] * 20, draft=draft, method="auto", max_new_tokens=20).tokens == expected
    )


def test_chances_come_with_a_draft(tmp_path):
    target, draft = (
        random_llama(0, eos_token_ids=()),
        random_llama(1, exit_layers=(2, 4), thresholds=(0.5, 0.0)),
    )
    save_model(draft, tmp_path / "draft")
    counted = Chances(2)
    counted.count("first", 0, 3, 1.0)
    known = {fingerprint(target): {"greedy": [counted.weighs, counted.table]}, "another": {}}
    (tmp_path / "draft" / "chances.json").write_text(json.dumps(known))
    draft = load_model(tmp_path / "draft", dtype="float64")
    tuner = Tuner(
        random_costs(np.random.default_rng(0), 2), (2, 4), tune.read_priors(draft, target, (2, 4))
    )
    assert (
        tuner.chances["greedy"].table == counted.table
        and tuner.chances["sampled"].table == Chances(2).table
    )
    assert (
        tune.read_priors(draft, target, (4,))
        == {}
        == tune.read_priors(draft, random_llama(5), (2, 4))
    )
    save_model(draft, tmp_path / "again")
    assert load_model(tmp_path / "again").chances == draft.chances
    for damaged in (
        [[1]],
        [[[10**400] * BINS] * len(counted.table)] * 2,
        [counted.weighs, [[2.0] * BINS] * len(counted.table)],
        "text",
        [[None]],
        {"a": 1},
    ):
        draft.chances[fingerprint(target)] = {"greedy": damaged}
        with pytest.raises(ValueError, match="count them again"):
            tune.read_priors(draft, target, (2, 4))
    (tmp_path / "draft" / "chances.json").write_text("[1")
    with pytest.raises(ValueError, match="chances.json"):
        load_model(tmp_path / "draft")


@pytest.mark.parametrize("options", [{"draft_length": 3}, {"tree": (2, 2)}, {"thresholds": (0.5, 0.5, 0.0)}, {"stop": 0.5},
                                     {"init": "target"}])  # fmt: skip
def test_it_takes_no_knobs(options):
    with pytest.raises(ValueError, match="auto"):
        generate(random_llama(0), [1], draft=random_llama(1), method="auto", **options)


def test_run_explains_every_step(tmp_path, capsys):
    """--json says what was decided and why; the table is written where --costs says, and read from there."""
    arguments = [
        "--target",
        "7b",
        "--method",
        "auto",
        "--costs",
        tmp_path / "new" / "costs.json",
        "--max-new-tokens",
        24,
    ]
    assert program(run.main, *arguments, "--json") == 0
    first, said = capsys.readouterr()
    answer = json.loads(first)
    assert "measuring" in said and read_costs(tmp_path / "new" / "costs.json", 3)
    assert sum(plan["tokens"] for plan in answer["plans"]) == len(answer["tokens"])
    assert [plan["tokens"] for plan in answer["plans"]] == answer["stats"]["accept_lengths"]
    for plan in answer["plans"]:
        assert set(plan) == {
            "exits",
            "nodes",
            "expected_tokens",
            "expected_ms",
            "alone_ms",
            "rate",
            "drawn",
            "tokens",
            "ms",
        }
        assert len(plan["exits"]) == len(plan["nodes"]) and 1 <= plan["expected_tokens"] <= 1 + sum(
            plan["nodes"]
        )
    assert program(run.main, *arguments, "--json") == 0
    again, said = capsys.readouterr()
    again = json.loads(again)
    assert "measuring" not in said and again["tokens"] == answer["tokens"]
    for one, other in zip(answer["plans"], again["plans"], strict=True):
        assert one | {"ms": 0} == other | {"ms": 0}
    assert program(run.main, *arguments) == 0
    assert "method auto" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("nonsense")
    for arguments in (["--costs", tmp_path / "bad.json", "--method", "auto"], ["--costs", tmp_path / "bad.json"],
                      ["--method", "auto", "--draft-length", "3"], ["--method", "auto", "--tree", "2,2"],
                      ["--method", "auto", "--tree-top-k", "2"], ["--method", "auto", "--stop", "0.5"],
                      ["--method", "auto", "--init", "target"], ["--method", "auto", "--temperature", "-1", "--costs", tmp_path / "no"], ["--method", "auto", "--thresholds", ".5,.5,0"]):  # fmt: skip
        assert program(run.main, "--target", "7b", *arguments) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("run.py: ") and (
            "auto" in last or "table of costs" in last or "temperature" in last
        ), last
        assert not (tmp_path / "no").exists()
    for arguments in (
        ["--costs", tmp_path / "none.json"],
        ["--costs", tmp_path / "bad.json"],
        ["--limit", 0],
    ):
        assert program(bench.main, "simulate", "--target", WEIGHTS / "mini-7b", *arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_counting_puts_a_target_beside_the_others(tmp_path, capsys):
    out = tmp_path / "chances.json"
    out.write_text('{"another": {}}')
    command = [
        "chances",
        "--target",
        WEIGHTS / "mini-7b",
        "--draft",
        WEIGHTS / "mini-draft",
        "--prompts",
        16,
        "--out",
        out,
    ]
    assert program(train.main, *command) == 0
    known = json.loads(out.read_text())
    draft, target = load_model(WEIGHTS / "mini-draft"), load_model(WEIGHTS / "mini-7b")
    assert set(known) == {"another", fingerprint(target)}
    draft.chances = known
    priors = tune.read_priors(draft, target, (2, 3, 4))
    assert set(priors) == {"greedy", "sampled"}
    for kind, ways in (
        ("greedy", ("first", "other", "next")),
        ("sampled", ("first", "other", "next", "drawn", "token", "next_drawn")),
    ):
        chances = Chances(3, priors[kind])
        for way, exit in itertools.product(ways, range(3)):
            weights = priors[kind][0][chances.row[way] + exit]
            assert sum(weights) > BINS + 10, (kind, way, exit)  # each was counted, at every exit
        assert (
            chances.table[chances.row["first"] + 2][-1]
            > 0.8
            > 0.5
            > chances.table[chances.row["first"] + 2][5]
        )
    capsys.readouterr()
    assert program(train.main, *command[:5], "--prompts", 0) == 2
    assert program(train.main, *command, "--data", tmp_path / "none.jsonl") == 2
    (tmp_path / "texts.jsonl").write_text('{}\n{"p": "text"}\n')
    assert program(train.main, *command, "--data", tmp_path / "texts.jsonl") == 2
    out.write_text("nonsense")
    assert program(train.main, *command) == 2 and out.read_text() == "nonsense"


def test_the_simulation_is_of_what_was_drafted(capsys):
    """By a table in which a target's pass takes 10 ms whatever it checks and drafting nothing, a speedup is the MAT."""
    free = flat_costs(10.0, 0.0, 3)
    target, draft = load_model(WEIGHTS / "mini-7b"), load_model(WEIGHTS / "mini-draft")
    prompt = Tokenizer(WEIGHTS / "mini-7b").encode_chat(["What is the capital of Tadastan?"])
    options = {"method": "sd", "exits": [3], "draft_length": 4, "stop": 0.0}
    records = simulate.run_through(target, draft, [prompt], 0.0, 40, options)
    stats = generate(target, prompt, draft=draft, max_new_tokens=40, **options).stats
    assert [record[0] for record in records] == stats.accept_lengths
    assert simulate.speed(records, free, (2, 3, 4)) * 10 == pytest.approx(
        stats.mean_accepted_tokens
    )
    two = Costs("", [0, 512], [[0.0] * len(ROWS)] * 2, [[[1.0] * len(ROWS), [2.0] * len(ROWS), [4.0] * len(ROWS)]] * 2,
                [[0.25] * len(ROWS)] * 2, 0.0, 0.0, [0.0, 0.0])  # fmt: skip
    passes = sum(stop > 0 for record in records for _, stop, _ in record[3])
    looks = sum(stop == 0 for record in records for _, stop, _ in record[3])
    assert looks == passes == stats.draft_forwards
    assert simulate.speed(records, two, (2, 3, 4)) == pytest.approx(
        len(prompt) < LARGEST and sum(stats.accept_lengths) / (3.0 * passes + 0.25 * looks)
    )
    common = [
        "simulate",
        "--target",
        WEIGHTS / "mini-7b",
        "--limit",
        1,
        "--max-new-tokens",
        6,
        "--temperature",
        0,
    ]
    assert program(bench.main, *common) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in simulate.MACHINES) and table.count("GPU") == 2


def test_the_benchmark_says_what_was_expected(tmp_path, capsys):
    """The last column is the speedup that was planned by the one that was measured; records hold both, without first steps."""
    arguments = ["--targets", "7b", "--methods", "auto", "auto:exits=2,4", "--limit", 1, "--rounds", 1, "--max-new-tokens", 12,
                 "--temperature", 0, "--out", tmp_path / "out"]  # fmt: skip
    assert program(bench.main, *arguments) == 0
    rows = [
        line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("auto")
    ]
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    records = [record for line in lines[1:] for record in json.loads(line)]

    def total(name, key):
        return sum(sum(record[key]) for record in records if record["method"] == name)

    for name in ("ar", "auto", "auto:exits=2,4"):
        emitted = sum(
            sum(lengths[1:])
            for record in records
            if record["method"] == name
            for lengths in record["accept_lengths"]
        )
        assert total(name, "later_tokens") == emitted and 0 < total(name, "later_seconds") < total(
            name, "wall_time"
        )
    for name in ("auto", "auto:exits=2,4"):
        measured = (
            total(name, "later_tokens")
            / total(name, "later_seconds")
            * total("ar", "later_seconds")
            / total("ar", "later_tokens")
        )
        shown = total(name, "expected_alone") / total(name, "expected_seconds") / measured
        assert (
            1
            < total(name, "expected_alone") / total(name, "expected_seconds")
            < total(name, "expected_tokens")
        )
        (row,) = [row for row in rows if row[0].strip() == name and len(row) > 12]
        assert row[-1].strip() == f"{shown:.2f}"
