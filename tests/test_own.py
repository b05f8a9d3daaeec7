"""What a caller gives: it is used or, if it cannot be run, refused in one line."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import DEVICE, ByLastToken, raises_line, random_llama

from s2d import LayerExit, Prediction, generate, generate_many, start
from s2d.rules import Greedy, Rejection
from s2d.sampling import Draws, warp
from s2d.tree import FixedShape, GrowingShape, Proposal

OWN = dict(exits=[4], max_new_tokens=40)


@pytest.fixture(scope="module")
def target():
    return random_llama(1, eos_token_ids=())


def refused(target, message, **options):
    raises_line(generate, ValueError, message, target, [3, 1], target, **OWN | options)


SENT = {
    "a child before its parent": lambda n: [0, 2, 1, *range(3, n)],
    "without the root": lambda n: list(range(1, n)),
    "the root twice": lambda n: [0, 0, *range(1, n)],
    "a child without its parent": lambda n: [0, *range(2, n)],
    "a node that is not there": lambda n: [*range(n), n],
    "nothing": lambda n: [],
    "numbers of another type": lambda n: [float(node) for node in range(n)],
}
FRONTIER = {
    "the root again": lambda leaves: [0] if leaves != [0] else [1],
    "one node twice": lambda leaves: leaves * 2,
    "in another order": lambda leaves: leaves[::-1] if leaves[1:] else [5],
    "True for node 1": lambda leaves: [True] if leaves[0] else [False],
}


@pytest.mark.parametrize("wrong", [*SENT, *FRONTIER])
def test_shapes(target, wrong):
    class Own(FixedShape):
        def sent(self, probs):
            return SENT[wrong](len(probs)) if wrong in SENT else super().sent(probs)

        def frontier(self, leaves, probs):
            return FRONTIER[wrong](leaves) if wrong in FRONTIER else leaves

    message = "nodes are sent in their order" if wrong in SENT else "a frontier is some of"
    for temperature in (0.0, 1.0):
        refused(target, message, tree=Own((2, 2, 2)), temperature=temperature)


def test_a_shape_may_not_leave_out_what_was_drawn(target):
    class Own(FixedShape):
        def sent(self, probs):
            return [0]

    for law in (dict(temperature=1.0, rule="rejection"), dict(init="target")):
        refused(target, "leaves out nodes that a rule has drawn", tree=Own((1, 1)), **law)
    assert generate(target, [3, 1], target, tree=Own((1, 1)), **OWN).stats.draft_tokens == 0


def test_sizes_of_shapes(target):
    for tree in (
        FixedShape((2.5,)),
        FixedShape((2, 0)),
        FixedShape((10**9,) * 3),
        GrowingShape(2, 3, 0),
        range(1, 10**8),
    ):
        refused(target, "tree: expected 1 to 1024 nodes", tree=tree)

    class Large(FixedShape):
        capacity = 1

    for widths in ((3, 3), (3,)):
        refused(target, "more nodes than its capacity", tree=Large(widths))


ACCEPTED = {
    "without the first node": lambda path, bonus: (path[1:], bonus),
    "with the root": lambda path, bonus: ([0, *path], bonus),
    "one node twice": lambda path, bonus: (path + path[-1:], bonus),
    "negative numbers": lambda path, bonus: ([node - 9 for node in path], bonus),
    "numbers of another type": lambda path, bonus: ([float(node) for node in [1]], bonus),
    "a node that is not there": lambda path, bonus: ([*path, 999], bonus),
    "a bonus beyond the vocabulary": lambda path, bonus: (path, 61),
    "a bonus of another type": lambda path, bonus: (path, float(bonus)),
}


@pytest.mark.parametrize("wrong", ACCEPTED)
def test_what_rules_accept(target, wrong):
    class Own(Greedy):
        def verify(self, tree, logits):
            return ACCEPTED[wrong](*super().verify(tree, logits))

    message = "a bonus token is one of 61" if "bonus" in wrong else "a path from the root down"
    if wrong == "numbers of another type":
        message = "a rule verifies to"
    for tree in ((1, 1, 1), (2, 2, 1)):
        refused(target, message, tree=tree, rule=Own())


TOKENS = "a rule proposes up to 2 different tokens of 61, not"
AS_MANY = "a rule proposes tokens and estimates for 1 nodes, as many of each"
PROPOSED = [
    ([[61]], [[0.5]], TOKENS),
    ([[-1]], [[0.5]], TOKENS),
    ([[5.0]], [[0.5]], TOKENS),
    ([[np.int64(5)]], [[0.5]], TOKENS),
    ([[5, 5]], [[0.5, 0.5]], TOKENS),
    ([[1, 2, 3]], [[0.5, 0.5, 0.5]], TOKENS),
    ([[5]], [[]], AS_MANY),
    ([[5], [6]], [[0.5], [0.5]], AS_MANY),
]


@pytest.mark.parametrize(("tokens", "probs", "message"), PROPOSED)
def test_what_rules_propose(target, tokens, probs, message):
    class Own(Greedy):
        def propose(self, tree, nodes, logits, count):
            return Proposal(tokens, probs)

    refused(target, message, tree=(2,), rule=Own())


class Own:
    exit_layer, max_positions = 1, math.inf

    def __init__(self, logits, confidence=0.5):
        self.said = Prediction(logits.to(DEVICE), confidence)

    def start(self, capacity):
        pass

    def predict(self, tree, nodes):
        return self.said

    def keep(self, tree, accepted):
        pass


def test_what_exits_predict(target):
    law = dict(temperature=1.0, rule="rejection", tree=(1, 1))
    shape = r"an exit predicts floats of shape \(1, 61\), not \(2, 61\) in torch.float32"
    refused(target, shape, exits=[Own(torch.zeros(2, 61))])
    refused(target, r"not tensor\(\[\[0, 0", exits=[Own(torch.zeros(1, 61).long())])
    for confidence in (math.nan, -1.0, "sure"):
        own = [Own(torch.zeros(1, 61), confidence)]
        refused(target, "an exit's confidence is", exits=own)
    for value in (math.nan, math.inf):
        own = [Own(torch.full((1, 61), value))]
        refused(target, "logits that are not finite", exits=own, **law)
    own = [Own(torch.full((1, 61), -1.0))]  # all tokens are equally probable
    assert generate(target, [3, 1], exits=own, **law).tokens


class Counting(Own):
    """After token t comes t + 1. It notes which tokens were accepted."""

    def __init__(self):
        self.told = []

    def predict(self, tree, nodes):
        last = [(tree.context + tree.path(node))[-1] for node in nodes]
        following = [(token + 1) % 61 for token in last]
        return Prediction(torch.eye(61, device=DEVICE)[following].log(), confidence=0.6)

    def keep(self, tree, accepted):
        self.told.append([tree.tokens[node] for node in accepted])


class Even:
    """A shape: nodes with even numbers get children."""

    depth, capacity = 3, 20

    def width(self, depth):
        return 3

    def frontier(self, leaves, probs):
        return [node for node in leaves if node % 2 == 0]

    def sent(self, probs):
        return list(range(len(probs)))


class Best:
    """A rule that is like ``Greedy``, but does not say that it is exact."""

    exact, propose, verify = False, Greedy.propose, Greedy.verify


def test_an_exit_of_ones_own(target):
    """It says itself how sure it is, so that no default threshold is right for it."""
    alone = generate(target, [3, 1], method="ar", max_new_tokens=40).tokens
    own = Counting()
    found = start(target, [3, 1], exits=[own], max_new_tokens=40)
    accepted = [step.tokens[: len(step.accepted)] for step in found]
    assert own.told[:-1] == accepted[:-1] and sum(map(len, own.told)) > 0
    assert found.tokens == alone and found.plan.method == "s2d"  # not exit 0's trees
    both = dict(exits=[own, 4], max_new_tokens=40)
    always = generate(target, [3, 1], target, thresholds=[0.7, 0], **both)
    assert always.tokens == alone and always.stats.exit_counts.keys() == {4}
    raises_line(generate, ValueError, "give thresholds", target, [3, 1], target, **both)


def test_a_shape_and_a_rule_of_ones_own(target):
    found = start(target, [3, 1], target, tree=Even(), rule=Best(), exits=[2])
    assert {parent for step in found for parent in step.tree.parents[4:]} == {2, 4, 6}
    assert found.tokens == generate(target, [3, 1], method="ar").tokens
    assert found.result().exact is False and max(found.stats.accept_lengths) > 1


def test_an_exit_is_for_one_answer(target):
    used = dict(exits=[LayerExit(target, None, 4)], max_new_tokens=5)
    generate(target, [3, 1], **used)
    line = "exit 4 is for one answer: make another LayerExit"
    raises_line(generate, ValueError, line, target, [3, 1], **used)


def test_an_exit_that_knows_nothing_ends_the_tree(target):
    own = Own(torch.zeros(1, 61))
    own.said = None
    steps = list(start(target, [3, 1], exits=[own], max_new_tokens=5))
    assert [len(step.tree.tokens) for step in steps] == [1] * 5


def test_a_prompt_that_fails_within_a_step_does_not_take_others_along():
    target = random_llama(1, eos_token_ids=())
    with torch.no_grad():
        target.model.embed_tokens.weight[29] = math.nan
    expected = generate(target, [3, 1], max_new_tokens=5).tokens
    answers = generate_many(target, [[3, 1], [29, 1], [4, 2]], max_new_tokens=5)
    assert next(answers).tokens == expected
    raises_line(next, ValueError, "prompt 1: the target's logits are not finite", answers)
    draft = random_llama(2)
    draft.lm_head.weight.data.fill_(math.nan)
    answers = generate_many(target, [[3, 1], [4, 2]], draft, max_new_tokens=5)
    raises_line(next, ValueError, "prompt 0: an exit's confidence is nan", answers)


WRONG = {
    "unknown method 'x'": dict(method="x"),
    "unknown option 'temprature'; did you mean temperature?": dict(temprature=1.0),
    "max_new_tokens: expected a whole number from 1": dict(max_new_tokens=0),
    "temperature: expected a number from 0 up to 1e.06": dict(temperature=np.zeros((2, 2))),
    "exits: expected a list, not 4": dict(exits=4),
    "exits: expected a list, not array": dict(exits=np.array(1)),
    "exits .5.: the draft has 4 layers": dict(exits=[5]),
    "exits: expected increasing numbers": dict(exits=[2, 1]),
    "thresholds: expected a list": dict(exits=[1, 4], thresholds=np.array(1.0)),
    "2 exits, but 1 thresholds": dict(exits=[1, 2], thresholds=[0.5]),
    "stop_at is an object with begin, cut": dict(stop_at=["User:"]),
    "stop_at is an object": dict(stop_at=Own),
    "decision is an object": dict(decision=Own),
    "a decision model judges exits with layers": dict(exits=[0, 2], decision=ByLastToken()),
    "datastore is an object": dict(datastore=Own, exits=[0]),
    "rule is 'noise', 'rejection' or a Rule": dict(rule="coupled"),
    "tree: expected to grow to 8192 nodes": dict(tree=GrowingShape(1000, 2, 5)),
    "tree: expected without draft_length": dict(tree=(2, 1), draft_length=3),
    "a shape leaves out nodes that a rule has drawn": dict(
        method="s2d-tree", temperature=1.0, rule=Rejection(partial(warp, temperature=1.0), Draws(0))
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(target, message):
    refused(target, message, **WRONG[message])


def test_wrong_prompts_and_drafts(target):
    """Of prompts that are empty, too long or outside the vocabulary see ``test_batch``."""
    for message, *arguments in (
        ("a prompt is a list of ids", "Hi"),
        ("the draft is a model of load_model", [1], "mini-7b"),
        ("must share a vocabulary", [1], random_llama(1, vocab_size=190)),
    ):
        raises_line(generate, ValueError, message, target, *arguments)
    raises_line(generate, ValueError, "exits .4.: there is no draft model", target, [1], exits=[4])


def test_a_stop_at_that_is_falsy_is_used(target):
    class Falsy(list):
        cut = None

        def begin(self):
            return lambda token: True

    assert len(generate(target, [3, 1], target, stop_at=Falsy()).tokens) == 1


@pytest.mark.parametrize("method", ["ar", "s2d-tree"])
@pytest.mark.parametrize("law", [dict(), dict(temperature=1.0), dict(init="target")])
def test_log_probabilities_and_tokens_per_step(target, method, law):
    """Of every emitted token, under the target alone. Steps add up to the answer."""
    tokens = generate(target, [3, 1], method="ar", max_new_tokens=30).tokens
    ending = random_llama(1, eos_token_ids=(tokens[11],))
    decoder = start(ending, [3, 1], ending, method, max_new_tokens=30, **law)
    steps = list(decoder)
    text = torch.tensor([[3, 1, *decoder.tokens]], device=target.device)
    rows = target(text)[0, 1:-1].log_softmax(dim=-1)
    expected = rows.gather(1, text[0, 2:, None])[:, 0].tolist()
    found = [each for step in steps for each in step.log_probabilities()]
    assert found == pytest.approx(expected, abs=1e-9)
    assert sum(decoder.stats.accept_lengths) == len(decoder.tokens)
    assert decoder.stats.mean_accepted_tokens == len(decoder.tokens) / len(steps)
