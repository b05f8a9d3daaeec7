"""Exits, rules and shapes of one's own: they have the rights of ours, and break nothing."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from helpers import DEVICE, nearly_equal, raises_line, random_llama, random_tokens

from s2d import Draws, LayerExit, Prediction, Proposal, generate, generate_many, start
from s2d.options import METHODS
from s2d.rules import Greedy, Rejection, SharedNoise
from s2d.sampling import warp
from s2d.tree import FixedShape, GrowingShape

OWN = dict(exits=[4], max_new_tokens=40)


@pytest.fixture(scope="module")
def target():
    return random_llama(1, eos_token_ids=())


@pytest.fixture(scope="module")
def pair():
    return nearly_equal(2, eos_token_ids=(), exits=(1, 2, 4), thresholds=(0.4, 0.4))


@pytest.mark.parametrize(("rule", "name"), [(SharedNoise, "noise"), (Rejection, "rejection")])
def test_an_own_rule_has_the_settings_of_ours(pair, rule, name):
    """Of each answer: temperature, top-k, top-p and seed, alone and with other prompts."""
    target, draft = pair
    prompts = [random_tokens(i, 3 + i) for i in range(3)]
    law = dict(temperature=0.7, top_p=0.9, seed=3, max_new_tokens=8)
    named = list(generate_many(target, prompts, draft, rule=name, **law))
    for batch in (1, 2):
        found = generate_many(target, prompts, draft, batch=batch, rule=rule, **law)
        assert [each.tokens for each in found] == [each.tokens for each in named]
    assert generate(target, prompts[0], draft, rule=rule, **law).tokens == named[0].tokens
    greedy = generate(target, prompts[0], method="ar", max_new_tokens=8).tokens
    for change in (dict(top_k=1), dict(temperature=0)):
        found = generate(target, prompts[0], draft, rule=rule, **law | change)
        assert found.tokens == greedy != named[0].tokens


class Penalised:
    """A rule that wraps a rule: tokens that are in the text become less probable."""

    exact = True

    def __init__(self, distribution, draws):
        self.rule = SharedNoise(distribution, draws)

    def propose(self, tree, nodes, prediction, widths):
        logits = penalised(tree, nodes, prediction.logits)
        return self.rule.propose(tree, nodes, prediction._replace(logits=logits), widths)

    def verify(self, tree, logits):
        return self.rule.verify(tree, penalised(tree, range(len(logits)), logits))


def penalised(tree, nodes, logits):
    texts = [[*tree.context, *tree.path(node)] for node in nodes]
    return torch.stack([penalise(row, text) for row, text in zip(logits, texts)])


def penalise(row, text):
    """Logits (V,) after a repetition penalty (Keskar et al. 2019, arXiv 1909.05858)."""
    seen = torch.tensor([*{*text}], device=row.device)
    return row.index_copy(0, seen, torch.where(row > 0, row / 1.5, row * 1.5)[seen])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_is_a_rule_that_wraps_a_rule(pair, temperature):
    """By every method the text is that of a plain loop over whole passes."""
    target, draft = pair
    draws, text = Draws(5), [3, 1]
    for position in range(2, 18):
        logits = target(torch.tensor([text], device=target.device))[0, -1]
        p = warp(penalise(logits, text)[None], temperature)
        text.append((p.log() + draws.noise([position], like=p)).argmax().item())
    law = dict(temperature=temperature, seed=5, max_new_tokens=16)
    assert text[2:] != generate(target, [3, 1], draft, **law).tokens
    for way in (*(dict(method=method) for method in METHODS), dict(exits=[0, 2])):
        found = generate(target, [3, 1], draft, rule=Penalised, **way, **law)
        assert found.tokens == text[2:], way
        assert way.get("method") == "ar" or found.stats.accepted_tokens > 0, way


@pytest.mark.parametrize("kind", [Greedy, SharedNoise, Rejection])
def test_a_rule_that_allows_nothing_is_one_line(target, kind):
    class Nothing(kind):
        def verify(self, tree, logits):
            return super().verify(tree, torch.full_like(logits, -math.inf))

    rules = [Nothing, partial(Nothing, chosen=True)] if kind is Rejection else [Nothing]
    for rule, temperature, options in product(rules, (0.0, 1.0), (OWN, dict(method="ar"))):
        law = dict(temperature=temperature, rule=rule)
        raises_line(generate, ValueError, "allows nothing", target, [3], target, **options | law)


class Eagle:
    """An exit that goes on from the target's hidden states with a head of its own (EAGLE)."""

    exit_layer, max_positions = 5, math.inf
    ended = []  # how many states each one was handed in each step

    def __init__(self, head, target, draft):
        self.target, self.head, self.hidden, self.read = target, head, None, []

    def predict(self, tree, nodes):
        if self.hidden is None:  # the target has read nothing yet
            return Prediction(torch.zeros(1, 61, device=self.target.device), confidence=0.0)
        hidden = self.hidden  # (1, hidden), before the root
        for token in [tree.tokens[0], *tree.path(nodes[0])]:
            hidden = features(self.target, hidden, [token]) @ self.head
        return Prediction(self.target.logits(hidden), confidence=1.0)

    def keep(self, step):
        last = [0, *step.accepted][-1]
        rows = step.hidden[-len(step.tree.tokens) :]
        self.hidden = rows[last][None]
        self.read.append(len(step.hidden))

    def end(self):
        self.ended.append(self.read)


def features(target, hidden, tokens):
    """Of hidden states (T, hidden), and of the T tokens that follow them: (T, 2 * hidden)."""
    return torch.cat((hidden, target.embed(torch.tensor(tokens, device=hidden.device))), dim=-1)


def test_a_head_on_the_targets_hidden_states(target, monkeypatch):
    """It is fitted to three texts exactly, so that whatever it drafts of them is right."""
    monkeypatch.setattr("s2d.decoder.MAX_UNREAD", 5)  # one prompt is read in a pass of its own
    prompts, rows, following = [random_tokens(i, 3 + 2 * i) for i in range(3)], [], []
    texts = [generate(target, prompt, method="ar", max_new_tokens=17).tokens for prompt in prompts]
    for prompt, text in zip(prompts, texts):
        tokens = torch.tensor([prompt + text], device=target.device)
        hidden = target.run_layers(target.embed(tokens))[0, len(prompt) - 1 :]
        rows.append(features(target, hidden[:-1], text))
        following.append(hidden[1:])
    rows, following = torch.cat(rows), torch.cat(following)
    head = torch.linalg.lstsq(rows, following, driver="gelsd").solution
    options = dict(exits=[partial(Eagle, head)], draft_length=3, max_new_tokens=17)
    for batch in (1, 2, 3):
        Eagle.ended = []
        found = list(generate_many(target, prompts, batch=batch, **options))
        assert [each.tokens for each in found] == texts
        assert [each.stats.accept_lengths for each in found] == [[1, 4, 4, 4, 4]] * 3
        assert sorted(Eagle.ended) == [[len(prompt), 4, 4, 4, 4] for prompt in prompts]


class Sequoia:
    """Trees whose nodes have the more children the better they are among their siblings."""

    depth, prunes = 3, False

    def frontier(self, tree, leaves):
        return [leaf for leaf in leaves if self.rank(tree, leaf) < 2]

    def width(self, tree, node):
        return max(1, 3 - self.rank(tree, node) - tree.depths[node])

    def rank(self, tree, node):
        return tree.children(tree.parents[node]).index(node) if node else 0


def test_a_shape_that_sees_the_tree(pair):
    """Its children are drawn under rejection sampling, from q, and chosen under shared noise."""
    target, draft = pair
    options = dict(tree=Sequoia(), exits=[2], temperature=1.0, stop=0.0, max_new_tokens=40)
    decoder = start(target, [3, 1], draft, rule="rejection", **options)
    for step in decoder:
        tree = step.tree
        if tree.depth == 3:
            assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 4, 5, 6)
            assert tree.q[0] is None and all(q is not None for q in tree.q[1:])
        for node, q in zip(tree.parents[1:], tree.q[1:]):
            text = torch.tensor([[*tree.context, *tree.path(node)]], device=target.device)
            row = draft.logits(draft.run_layers(draft.embed(text), 0, 2))[0, -1]
            assert (q - row.softmax(dim=-1).cpu()).abs().max() < 1e-10
    assert decoder.stats.accepted_tokens > 0 and decoder.result().exact
    found = start(target, [3, 1], draft, **options)
    assert not any(q is not None for step in found for q in step.tree.q)
    law = dict(temperature=1.0, max_new_tokens=40)
    assert found.tokens == generate(target, [3, 1], method="ar", **law).tokens
    assert isinstance(found.result().options.shape, Sequoia)


def test_an_exit_goes_on_from_an_own_one(pair):
    """And statistics list each exit once, also one that never drafts."""
    target, draft = pair
    rows = []
    hook = draft.model.layers[0].register_forward_hook(lambda _, x, y: rows.append(y.shape[1]))

    class Own(LayerExit):
        def __init__(self, target, draft):
            super().__init__(draft, None, 1)

        def predict(self, tree, nodes):
            return super().predict(tree, nodes)._replace(confidence=0.5)

    def found(*exits, threshold):
        rows.clear()
        options = dict(exits=exits, thresholds=[threshold], max_new_tokens=40)
        stats = generate(target, [3, 1], draft, **options).stats
        return stats.accept_lengths, stats.exit_counts, stats.acceptance()["per_exit"], [*rows]

    assert found(Own, 3, threshold=0.6) == found(1, 3, threshold=1.0)
    counts = found(Own, 3, threshold=0.4)
    hook.remove()
    assert counts[1].keys() == {1} and [*counts[2]] == [1, 3]
    both = dict(exits=[Own, Own], thresholds=[0.6])
    raises_line(generate, ValueError, "a number of its own", target, [3, 1], draft, **both)


def spoil(value):
    """Change all of it that can be changed."""
    if isinstance(value, torch.Tensor):
        value.fill_(-5.0)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[:] = False
    elif isinstance(value, list | dict):
        value.clear()
    for each in value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values():
        spoil(each)


class Spoils:
    """A part that changes what it was handed, after one of ours has answered."""

    def __init__(self, part):
        self.part = part

    def __getattr__(self, name):
        value = getattr(self.part, name)

        def call(*given):
            found = value(*given)
            spoil(given)
            return found

        return call if callable(value) else value


OURS = {
    "exits": [lambda target, draft: Spoils(LayerExit(draft, None, 2)), 4],
    "rule": lambda *settings: Spoils(SharedNoise(*settings)),
    "tree": Spoils(GrowingShape(3, 3, 6)),
}


@pytest.mark.parametrize("part", OURS)
def test_what_a_part_is_handed_is_a_copy_or_cannot_be_changed(pair, part):
    target, draft = pair
    plain = dict(exits=[2, 4], thresholds=[0.3], tree=GrowingShape(3, 3, 6), rule="noise")
    said = []
    for options in (plain, plain | {part: OURS[part]}):
        decoder = start(target, [3, 1], draft, temperature=1.0, max_new_tokens=20, **options)
        logs = [each for step in decoder for each in step.log_probabilities()]
        said.append((decoder.tokens, decoder.stats.accept_lengths, decoder.stats.exit_counts, logs))
    assert said[0] == said[1]


def shape(widths=(2, 2, 2), **own):
    """Options with a shape that is ours but for some of its methods."""
    methods = {name: (lambda self, *given, do=do: do(*given)) for name, do in own.items()}
    return dict(tree=type("Own", (FixedShape,), methods | {"prunes": "sent" in own})(widths))


def rule(widths=(2, 2, 1), **own):
    """With a rule whose methods change, or are, what Greedy says."""
    return dict(tree=widths, rule=type("Own", (Greedy,), own))


def accepting(change):
    return rule(verify=lambda *given: change(*Greedy.verify(*given)))


def proposing(*proposal):
    return rule((2,), propose=lambda *given: Proposal(*proposal))


def exit_(logits=None, confidence=0.5, **own):
    """With an exit that says the same whenever it is asked."""
    logits = torch.zeros(1, 61) if logits is None else logits
    own = {"exit_layer": 1, "max_positions": 99, "__init__": lambda *models: None} | own
    said = Prediction(logits.to(DEVICE), confidence)
    own = {"keep": lambda *given: None, "predict": lambda *given: said} | own
    law = dict(temperature=1.0, rule="rejection", tree=(1, 1))
    return dict(exits=[type("Own", (), own)]) | law


def all_of(tree):
    return list(range(len(tree.tokens)))


class OnlyRoots(FixedShape):
    prunes = True

    def sent(self, tree):
        return [0]


ORDER = "nodes are sent in order, with their parents"
FRONTIER = "a frontier is some of"
PATH = "a rule accepts a path from the root down"
TOKENS = "a rule proposes up to 2 different tokens of 61, not"
BROKEN = [
    (ORDER, shape(sent=lambda tree: [0, 2, 1, *all_of(tree)[3:]])),
    (ORDER, shape(sent=lambda tree: [-1, 0])),
    (ORDER, shape(sent=lambda tree: [0, *all_of(tree)[2:]])),
    (ORDER, shape(sent=lambda tree: [*all_of(tree), len(tree.tokens)])),
    (FRONTIER, shape(frontier=lambda tree, leaves: [1, 2][: len(leaves)])),
    (FRONTIER, shape(frontier=lambda tree, leaves: [*leaves[::-1], 0])),
    ("the width of a tree: expected", shape(width=lambda *given: -1)),
    ("the depth of a tree", dict(tree=type("Own", (Sequoia,), {"depth": 2000})())),
    ("the nodes of a tree before it is cut", shape(width=lambda *given: 900)),
    ("tree: expected 1 to 1024 nodes", dict(tree=(10**9,) * 3)),
    ("and up to 8192 before a tree is cut", dict(tree=GrowingShape(1000, 2, 5))),
    (PATH, accepting(lambda path, bonus: (path[1:], bonus))),
    (PATH, accepting(lambda path, bonus: ([*path, 999], bonus))),
    ("a rule verifies to", accepting(lambda path, bonus: ([1.0], bonus))),
    ("a bonus token: expected", accepting(lambda path, bonus: (path, 61))),
    (TOKENS, proposing([[np.int64(5)]], [[0.5]])),
    (TOKENS, proposing([[5, 5]], [[0.5, 0.5]])),
    (TOKENS, proposing([[1, 2, 3]], [[0.5, 0.5, 0.5]])),
    ("a rule proposes lists of tokens", proposing([[5], [6]], [[0.5], [0.5]])),
    ("a rule's estimates are 1 numbers", proposing([[5]], [[]])),
    ("a rule's estimates are 1 numbers", proposing([[5]], [[math.nan]])),
    ("a rule's q are", proposing([[5]], [[0.5]], [torch.ones(60)])),
    ("a rule that draws does not go", dict(rule=Rejection, method="s2d-tree", temperature=1.0)),
    (r"floats of shape \(1, 61\), not \(\(2, 61\), torch.float32", exit_(torch.zeros(2, 61))),
    (r"not tensor\(\[\[0, 0", exit_(torch.zeros(1, 61).long())),
    ("an exit returns a Prediction, not None", exit_(predict=lambda *given: None)),
    ("an exit's confidence is", exit_(confidence=math.nan)),
    ("not finite", exit_(torch.full((1, 61), math.nan))),
    ("an exit's number: expected", exit_(exit_layer=-1)),
    ("max_positions is a number", exit_(max_positions=None)),
    ("a prompt is a list of ids", dict(tokens="Hi")),
    ("a prompt is a list of ids", dict(tokens={})),
    ("must share a vocabulary", dict(draft=random_llama(1, vocab_size=190))),
    ("exits .4.: there is no draft model", dict(draft=None)),
    ("not 'x'", dict(method="x")),
    ("max_new_tokens: expected a whole number from 1", dict(max_new_tokens=0)),
    ("temperature: expected a number from 0 up to", dict(temperature=np.zeros((2, 2)))),
    ("exits: expected numbers of layers or functions", dict(exits=["4"])),
    ("exits .5.: the draft has 4 layers", dict(exits=[5])),
    ("exits: expected increasing numbers", dict(exits=[2, 1])),
    ("3 exits, but 1 thresholds", dict(exits=[1, 2, 3], thresholds=[0.5])),
    ("thresholds: expected numbers from 0", dict(exits=[1, 2], thresholds=[math.nan])),
    ("rule: expected 'noise', 'rejection' or a function", dict(rule="coupled")),
    ("init='target' goes with", dict(rule=Greedy, init="target")),
    ("leaves out the token that", dict(tree=OnlyRoots((2, 2, 2)), init="target")),
    ("tree: expected without draft_length", dict(tree=(2, 1), draft_length=3)),
]


@pytest.mark.parametrize(("message", "options"), BROKEN)
def test_what_breaks_a_promise_or_cannot_be_run_is_one_line(target, message, options):
    """Of prompts that are empty, too long or outside the vocabulary see ``test_batch``."""
    given = dict(tokens=[3, 1], draft=target) | OWN | options
    raises_line(generate, ValueError, message, target, **given)


def test_an_exit_that_knows_nothing_ends_drafting(target):
    steps = start(target, [3, 1], max_new_tokens=5, **exit_(confidence=0))
    assert [len(step.tree.tokens) for step in steps] == [1] * 5
    flat = exit_(torch.full((1, 61), -1.0))  # all tokens are equally probable
    assert generate(target, [3, 1], max_new_tokens=5, **flat).stats.draft_tokens > 0


def test_a_prompt_that_fails_within_a_step_does_not_take_others_along():
    target = random_llama(1, eos_token_ids=())
    with torch.no_grad():
        target.model.embed_tokens.weight[29] = math.nan
    expected = generate(target, [3, 1], max_new_tokens=5).tokens
    answers = generate_many(target, [[3, 1], [29, 1], [4, 2]], max_new_tokens=5)
    assert next(answers).tokens == expected
    raises_line(next, ValueError, "prompt 1: the logits are not finite", answers)


@pytest.mark.parametrize("method", ["ar", "s2d-tree"])
@pytest.mark.parametrize("law", [dict(), dict(temperature=1.0), dict(init="target")])
def test_log_probabilities_and_tokens_per_step(target, method, law):
    """Of every emitted token, under the target alone. Steps add up to the answer."""
    tokens = generate(target, [3, 1], method="ar", max_new_tokens=30).tokens
    ending = random_llama(1, eos_token_ids=(tokens[11],))
    decoder = start(ending, [3, 1], ending, method=method, max_new_tokens=30, **law)
    steps = list(decoder)
    text = torch.tensor([[3, 1, *decoder.tokens]], device=target.device)
    rows = target(text)[0, 1:-1].log_softmax(dim=-1)
    expected = rows.gather(1, text[0, 2:, None])[:, 0].tolist()
    found = [each for step in steps for each in step.log_probabilities()]
    assert found == pytest.approx(expected, abs=1e-9)
    assert sum(decoder.stats.accept_lengths) == len(decoder.tokens)
    assert decoder.stats.mean_accepted_tokens == len(decoder.tokens) / len(steps)
