"""``bench pays``: its model of chains replays the decoder, and its tables say what was given."""

from itertools import pairwise

import pytest
from helpers import WEIGHTS, nearly_equal, program, random_tokens, refuses

from s2d import generate, start
from s2d.bench import __main__ as bench
from s2d.bench import pays
from s2d.bench.chains import (
    ALONE,
    Chain,
    Costs,
    Guess,
    Outcome,
    Text,
    every_chain,
    find_best,
    segments,
    simulate,
)
from s2d.checkpoint.config import read_drafting

PAYS = "pays --target 7b --limit 1 --rounds 1 --max-new-tokens 4".split()
FREE = Costs(
    {1: 0.0}, dict.fromkeys([(0, 0), (0, 2), (0, 3), (0, 4), (2, 3), (3, 4)], {1: 0}), 0, 0
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_takes_the_steps_of_the_decoder(temperature):
    """As many as with every exit, threshold, length and stop, also of exit 0."""
    target, draft = nearly_equal(1, eos_token_ids=(7,))
    chains = [
        Chain((2,), (0.0,), 5, 0.0),
        Chain((3,), (0.0,), 8, 0.3),
        Chain((2, 3, 4), (0.3, 0.5, 0.0), 6, 0.2),
        Chain((0, 2), (0.2, 0.0), 4, 0.0),
        Chain((0,), (0.0,), 3, 0.0),
    ]
    prompts = [random_tokens(seed, 6) * 3 for seed in range(4)]
    options = dict(temperature=temperature, max_new_tokens=40)
    texts, answered = [], []
    for prompt in prompts:
        answer = generate(target, prompt, method="ar", **options).tokens
        exits = dict(exits=(0, 2, 3, 4), draft_length=1)
        decoder = start(target, prompt, draft, **exits, **options)
        guesses = pays.judge(decoder.drafter.exits, decoder.rule, prompt + answer, len(prompt))
        texts.append(Text(len(prompt), guesses))
        answered.append(len(answer))
    steps = set()
    for chain in [*chains, ALONE]:
        asked = dict(exits=chain.exits, thresholds=chain.thresholds, stop=chain.stop)
        asked = asked | dict(draft_length=chain.length) if chain != ALONE else dict(method="ar")
        made = [generate(target, prompt, draft, **asked, **options) for prompt in prompts]
        outcome = simulate(chain, texts, FREE)
        assert outcome.steps == sum(each.stats.steps for each in made), chain
        assert outcome.tokens == sum(answered)
        steps.add(outcome.steps)
    assert len(steps) >= 4  # they differ


def text_of_four():
    by_token = [
        {1: Guess(0.9, 0.9, True)},
        {1: Guess(0.4, 0.9, True), 2: Guess(0.3, 0.9, False)},
        {1: Guess(0.9, 0.5, False)},
        {1: Guess(0.9, 0.9, True)},
    ]
    return Text(3, by_token)


COSTS = Costs(
    {1: 10.0, 5: 14.0}, {(0, 1): {1: 1.0, 2: 2.0}, (1, 2): {1: 100.0, 2: 200.0}}, 0.25, 0.5
)


def test_seconds_are_those_of_the_rows_that_are_read():
    """Step by step: drafting with its catch-up, the target's pass, the rest."""
    chain = Chain((1, 2), (0.5, 0.0), length=2, stop=0.0)
    # Exit 1 reads the prompt, then a token; exit 2 reads all four. One token is accepted.
    first = (3 + 1 + 400) + 2 * 0.25 + 14 + 0.5
    # Both exits keep what was accepted. Exit 1 reads two tokens, the first of which is wrong.
    second = (1 + 1) + 2 * 0.25 + 12 + 0.5
    third = (1 + 0.25) + 11 + 0.5  # the text ends
    assert simulate(chain, [text_of_four()], COSTS) == Outcome(4, 3, first + second + third)
    # Below the stop nothing more is drafted: one token less in the second step.
    stopped = Chain((1, 2), (0.5, 0.0), length=2, stop=0.6)
    saved = 1 + 0.25 + 1
    assert simulate(stopped, [text_of_four()], COSTS).seconds == first + second + third - saved
    # Of a long prompt the target reads all at once, and nothing is drafted.
    long = Text(300, [{1: Guess(0.9, 0.9, True)}])
    assert simulate(chain, [long], COSTS) == Outcome(1, 1, 10 + 299 + 0.5)


def test_the_best_chain():
    """A cheap exit that is right is best alone, and a dear one that is right is not used."""
    sure = {each: Guess(0.99, 0.99, True) for each in (1, 2)}
    texts = [Text(3, [sure] * 64)]
    costs = Costs(
        {1: 10.0, 5: 10.4}, {(0, 1): {1: 1.0, 2: 1.1}, (0, 2): {1: 50.0, 2: 51.0}}, 0.0, 0.0
    )
    costs.exits[1, 2] = {1: 49.0, 2: 50.0}
    best = find_best((1, 2), texts, costs)
    assert (best.exits[0], best.length) == (1, 16)
    wrong = {1: Guess(0.1, 0.1, False), 2: Guess(0.99, 0.99, True)}
    costs.exits.update({(0, 2): {1: 3.0, 2: 3.1}, (1, 2): {1: 2.9, 2: 3.0}})
    assert find_best((1, 2), [Text(3, [wrong] * 64)], costs).exits == (2,)
    chains = list(every_chain((0, 2, 3, 4)))
    assert len(set(chains)) == len(chains)
    used = {segment for chain in chains for segment in segments(chain.exits)}
    assert used == set(FREE.exits) | {(2, 4)}
    assert all(a < b for chain in chains for a, b in pairwise(chain.exits))


def test_tables():
    """What methods need is what they have, divided by how much faster they are."""
    cells = {"ar": {"mat": 1.0, "speedup": 1.0}, "sd:exits=2": {"mat": 4.0, "speedup": 1.6}}
    cells["s2d-tree:exits=2"] = {"mat": 6.0, "speedup": 0.8}
    outcomes = {"ar": Outcome(100, 100, 50.0), "sd:exits=2": Outcome(100, 20, 25.0)}
    rows = pays.table_of_methods(cells, outcomes)[1:]
    assert rows[1] == "sd:exits=2 2.50 4.00 1.60 2.50 5.00 2.00".split()
    assert rows[2] == ["s2d-tree:exits=2", "7.50", "6.00", "0.80", "", "", ""]
    line = pays.verdict(cells, "sd:exits=2")
    assert line.startswith("it pays: the fastest is sd:exits=2, 1.60 times as fast as the target")
    del cells["sd:exits=2"]
    assert pays.verdict(cells, "s2d-tree:exits=2").startswith("it does not pay: the fastest is s2d")
    lines = pays.table_of_costs(COSTS)
    assert lines[1] == ["target: ms / of one row", "10000.00 / 1.00", "14000.00 / 1.40"]
    assert [line[0].partition(":")[0] for line in lines[2:4]] == ["exit 1", "exit 2 from exit 1"]
    assert [line[1] for line in lines[4:]] == ["250.00 / 0.03", "500.00 / 0.05"]
    exits = pays.table_of_exits([Text(3, [{1: Guess(0.5, 0.5, n > 0)} for n in range(4)])], COSTS)
    assert exits[1:] == [["exit 1", "75%", "50%", "0.10"]]


def test_the_whole_command(capsys):
    """With all exits of the draft, and with exit 0, without a draft."""
    exits = len(read_drafting(WEIGHTS / "mini-draft").exits)
    # Methods: ar, each exit, all exits as chain and tree if there are several, and the best.
    cases = [([], exits, exits + 5), (["--exits", "0", "--temperature", "1"], 1, 4)]
    for line, count, method_count in cases:
        assert program(bench.main, *PAYS, *line, "--markdown") == 0
        out, _ = capsys.readouterr()
        costs, exits, found = [part for part in out.split("\n\n") if part.startswith("|")]
        assert costs.count("\n| exit ") == count * (count + 1) / 2
        assert exits.count("\n| exit ") == count
        names = [row.split(" | ")[0].strip("| ") for row in found.splitlines()[2:]]
        assert names[0] == "ar" and len(names) == method_count
        assert f"best by the model is {names[-1]}, measured " in out.splitlines()[-1]


def test_mistakes_are_one_line(capsys):
    refuses(bench.main, capsys, "no model folder at TYPO", *PAYS, "--draft", "TYPO")
    refuses(bench.main, capsys, "exits of 4 draft layers: ", *PAYS, "--exits", "2,9")
    own = ["--draft", WEIGHTS / "mini-7b"]
    refuses(bench.main, capsys, "mini-7b would draft for itself with all of its", *PAYS, *own)
    draft = WEIGHTS / "mini-draft"
    refuses(bench.main, capsys, "exits must increase", *PAYS, "--exits", "3,2", "--draft", draft)
