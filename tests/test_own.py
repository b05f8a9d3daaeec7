"""Parts of one's own: they have the rights of ours, and ``checked`` says what they break."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from helpers import DEVICE, blocks, emitted_logits, nearly_equal, raises_line, random_llama

from s2d import Draws, LayerExit, Prediction, Proposal, StopStrings, generate, generate_many, start
from s2d.decoder import Decoder
from s2d.draft import SortedDraft
from s2d.mcsd.roots import RootsDecoder
from s2d.options import METHODS
from s2d.proof import checked
from s2d.rules import Greedy, Rejection, SharedNoise
from s2d.sampling import Distribution
from s2d.tree import FixedShape, GrowingShape

OWN = dict(exits=[4], max_new_tokens=40)


@pytest.fixture(scope="module")
def target():
    return random_llama(1, eos_token_ids=())


@pytest.fixture(scope="module")
def pair():
    return nearly_equal(2, eos_token_ids=(), exits=(1, 2, 4), thresholds=(0.4, 0.4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rule_that_the_readme_shows(pair, temperature):
    """By every method the text is that of a plain loop over whole passes."""
    target, draft = pair
    short = partial(generate, max_new_tokens=4)
    names = dict(target=target, draft=draft, prompt=[3, 1], generate=short)
    [block] = blocks("s2d/README.md")
    exec(block, names)
    draws = Draws(5)
    text = [3, 1]
    for position in range(2, 18):
        logits = target(torch.tensor([text], device=target.device))[:, -1]
        logits[0, text[-8:]] = -math.inf
        p = Distribution(temperature)(logits)
        text.append((p.log() + draws.noise([position], like=p)).argmax().item())
    law = dict(temperature=temperature, seed=5, max_new_tokens=16)
    assert text[2:] != generate(target, [3, 1], draft, **law).tokens
    for way in (*(dict(method=method) for method in METHODS), dict(exits=[0, 2])):
        found = generate(target, [3, 1], draft, rule=names["NoRepetition"], **way, **law)
        assert found.tokens == text[2:], way
        assert way.get("method") == "ar" or found.stats.accepted.total() > 0, way


@pytest.mark.parametrize("kind", [Greedy, SharedNoise, Rejection])
def test_a_rule_that_allows_nothing_is_one_line(target, kind):
    class Nothing(kind):
        def verify(self, tree, logits):
            return super().verify(tree, torch.full_like(logits, -math.inf))

    ways = OWN, dict(method="ar"), dict(method="s2d-tree")
    for temperature, options in product((0.0, 1.0), ways):
        law = dict(temperature=temperature, rule=Nothing)
        raises_line(generate, ValueError, "allows nothing", target, [3], target, **options | law)


class Eagle:
    """An exit that goes on from the target's hidden states with a head of its own (EAGLE)."""

    exit_layer, max_positions = 5, math.inf

    def __init__(self, head, counts, target, draft):
        self.target, self.head, self.hidden, self.read = target, head, None, []
        counts.append(self.read)  # how many states it is handed in each step

    def predict(self, tree, nodes):
        if self.hidden is None:  # the target has read nothing yet
            return Prediction(torch.zeros(1, 61, device=self.target.device), confidence=0.0)
        hidden = self.hidden  # (1, hidden), before the root
        for node in nodes[0].path:
            hidden = features(self.target, hidden, [node.token]) @ self.head
        return Prediction(self.target.logits(hidden), confidence=1.0)

    def keep(self, step):
        row = step.tree.nodes.index([step.tree.root, *step.accepted][-1])
        self.hidden = step.hidden[-len(step.tree.nodes) :][row][None]
        self.read.append(len(step.hidden))


def features(target, hidden, tokens):
    """Of hidden states (T, hidden), and of the T tokens that follow them: (T, 2 * hidden)."""
    return torch.cat((hidden, target.embed(torch.tensor(tokens, device=hidden.device))), dim=-1)


def test_a_head_on_the_targets_hidden_states(target, monkeypatch):
    """It is fitted to three texts exactly, so that whatever it drafts of them is right."""
    monkeypatch.setattr("s2d.mask.MAX_PROMPT", 5)  # one prompt is read in a pass of its own
    prompts = [[*range(9, 12 + 2 * i)] for i in range(3)]
    rows = []
    following = []
    texts = [generate(target, prompt, method="ar", max_new_tokens=17).tokens for prompt in prompts]
    for prompt, text in zip(prompts, texts):
        tokens = torch.tensor([prompt + text], device=target.device)
        hidden = target.run_layers(target.embed(tokens))[0, len(prompt) - 1 :]
        rows.append(features(target, hidden[:-1], text))
        following.append(hidden[1:])
    rows, following = torch.cat(rows), torch.cat(following)
    head = torch.linalg.lstsq(rows.cpu(), following.cpu(), driver="gelsd").solution.to(rows)
    for batch in (1, 2, 3):
        counts = []
        options = dict(exits=[partial(Eagle, head, counts)], draft_length=3, max_new_tokens=17)
        found = list(generate_many(target, prompts, batch=batch, **options))
        assert [each.tokens for each in found] == texts
        assert [each.stats.accept_lengths for each in found] == [[1, 4, 4, 4, 4]] * 3
        assert counts == [[len(prompt), 4, 4, 4, 4] for prompt in prompts]


class ByProbability:
    """Trees in which likely nodes have three children, and others one or none."""

    depth, prunes = 3, False

    def frontier(self, leaves):
        return [leaf for leaf in leaves if leaf.prob > 0.05]

    def width(self, node):
        return 3 if node.prob > 0.3 else 1

    def sent(self, nodes):
        return nodes


class Learning(ByProbability):
    """A shape that looks at what it was asked before."""

    asked = 0

    def width(self, node):
        self.asked += 1
        return 1 + self.asked % 3


def test_a_shape_that_looks_at_nodes(pair):
    """Under rejection sampling its children are drawn from q."""
    target, draft = pair
    options = dict(exits=[2], temperature=1.0, rule="rejection", stop=0.0, max_new_tokens=20)
    decoder = start(target, [3, 1], draft, tree=ByProbability(), **options)
    for tree in (step.tree for step in decoder):
        widths = [len(tree.children(node)) for node in tree.expanded]
        assert widths == [tree.shape.width(node) for node in tree.expanded]
        for node in tree.nodes[1:]:
            text = torch.tensor([tree.text(node.parent)], device=target.device)
            row = draft.logits(draft.run_layers(draft.embed(text), 0, 2))[0, -1]
            assert (node.q - row.softmax(dim=-1)).abs().max() < 1e-10
    assert decoder.stats.accepted.total() > 0 and decoder.result().exact


class OneLayer(LayerExit):
    """An exit as ours, of another confidence."""

    def __init__(self, target, draft):
        super().__init__(draft, None, 1)

    def predict(self, tree, nodes):
        return super().predict(tree, nodes)._replace(confidence=0.5)


@pytest.mark.parametrize("own", [OneLayer, checked(OneLayer)])
def test_an_exit_goes_on_from_an_own_one(pair, own):
    """And statistics list each exit once, also one that never drafts."""
    target, draft = pair
    rows = []
    hook = draft.model.layers[0].register_forward_hook(lambda _, x, y: rows.append(y.shape[1]))

    def found(*exits, threshold):
        rows.clear()
        options = dict(exits=exits, thresholds=[threshold], max_new_tokens=20)
        stats = generate(target, [3, 1], draft, **options).stats
        return stats.accept_lengths, stats.sent, stats.acceptance()["per_exit"], [*rows]

    assert found(own, 3, threshold=0.6) == found(1, 3, threshold=1.0)
    counts = found(own, 3, threshold=0.4)
    hook.remove()
    assert counts[1].keys() == {1} and [*counts[2]] == [1, 3]


class ShortTexts(OneLayer):
    """An exit that can read no prompt of two tokens."""

    def __init__(self, target, draft):
        super().__init__(target, draft)
        self.max_positions = 1


@pytest.mark.parametrize("exits, threshold", [([ShortTexts, 3], 0.9), ([3, ShortTexts], 0.0)])
def test_an_exit_that_reads_short_texts_only_ends_itself(pair, exits, threshold):
    """As if it were not there, before an exit or after one that is confident enough."""
    options = dict(tokens=[3, 1], draft=pair[1], max_new_tokens=20)
    found = generate(pair[0], exits=exits, thresholds=[threshold], **options)
    assert found.stats.levels == generate(pair[0], exits=[3], **options).stats.levels != {}


class OfTarget(LayerExit):
    def __init__(self, target, draft):
        super().__init__(target, None, 1)


class DeepFirst(SortedDraft):
    """The first level by the last exit, as most depends on it, and the others by the first one."""

    def choose_exit(self, tree, nodes, rule):
        return self.ask(self.exits[0 if tree.depth else -1], tree, nodes, rule)


class AsLast(Decoder):
    """Drafts as many tokens as the last step has emitted."""

    def draft(self):
        (length,) = self.stats.accept_lengths[-1:] or [1]
        self.options = replace(self.options, tree=FixedShape((1,) * length))
        return super().draft()


PARTS = [
    dict(rule=checked(SharedNoise), tree=checked(GrowingShape(3, 3, 6)), top_p=0.8),
    dict(rule=checked(SharedNoise), exits=[checked(OneLayer), 3], thresholds=[0.6], top_k=9),
    dict(tree=checked(ByProbability()), exits=[0, 2]),
    dict(tree=checked(Learning)),
    dict(drafter=DeepFirst, draft_length=3),
    dict(decoder=AsLast, exits=[2]),
]


@pytest.mark.parametrize("part", PARTS)
def test_parts_alone_and_with_other_prompts(pair, part):
    """One seed, one text: by ``generate``, ``start`` and ``generate_many``, and without any part.

    So a rule of one's own has the settings of ours.
    """
    target, draft = pair
    prompts = [3, 1], [4, 1, 5]
    options = dict(temperature=0.7, stop=0.0, max_new_tokens=12) | part
    plain = options | dict(method="ar", decoder=None, rule="noise")
    for seed, answer in enumerate(generate_many(target, prompts, draft, batch=2, **options)):
        decoder = start(target, prompts[seed], draft, seed=seed, **options)
        trees = [step.tree for step in decoder]
        lengths = decoder.stats.accept_lengths
        assert lengths == answer.stats.accept_lengths and max(lengths) > 1
        found = [
            generate(target, prompts[seed], draft, seed=seed, **way) for way in (options, plain)
        ]
        assert found[0].tokens == found[1].tokens == answer.tokens == decoder.tokens
        if "drafter" in part:
            assert [node.exit_layer for node in trees[0].nodes[1:]] == [4, 1, 1]
        if "decoder" in part:
            assert [tree.depth for tree in trees[:4]] == [1, *lengths[:3]]


def shape(widths=(2, 2, 2), **own):
    """Options with a shape that is ours but for some of its methods."""
    methods = {name: (lambda self, *given, do=do: do(*given)) for name, do in own.items()}
    return dict(tree=checked(type("Own", (FixedShape,), methods)(widths)))


def rule(widths=(2, 2, 1), **own):
    """With a rule whose methods change, or are, what Greedy says."""
    return dict(tree=widths, rule=checked(type("Own", (Greedy,), own)))


def proposing(tokens, estimates, q=None):
    proposal = Proposal(torch.tensor(tokens), torch.tensor(estimates), q)
    return rule((2,), propose=lambda *given: proposal)


Q = torch.ones(1, 61) / 61
DRAWN = dict(temperature=1.0, rule="rejection")


def without_q(leaves):
    """A frontier that writes into the q of the nodes that it can see."""
    for leaf in leaves:
        if leaf.q is not None:
            leaf.q.zero_()
    return leaves


def exit_(logits=Q, confidence=0.5, **own):
    """With an exit that says the same whenever it is asked."""
    said = Prediction(logits.to(DEVICE), confidence)
    ours = {"exit_layer": 1, "max_positions": 99, "__init__": lambda *models: None}
    ours |= {"keep": lambda *given: None, "predict": lambda *given: said}
    return dict(exits=[checked(type("Own", (), ours | own))], tree=(1, 1)) | DRAWN


ORDER = "nodes are sent in order, with their parents"
TOKENS = "a rule proposes up to 2 different tokens of 61, not"
WIDE = dict(width=lambda node: 61, frontier=lambda leaves: leaves[:140])
BROKEN = [
    (ORDER, shape(sent=lambda nodes: [nodes[0], *nodes[:0:-1]])),
    (ORDER, shape(sent=lambda nodes: nodes[1:])),
    (ORDER, shape(sent=lambda nodes: [nodes[0], *nodes[2:]])),
    ("a frontier is some of the leaves", shape(frontier=lambda leaves: leaves[::-1])),
    ("frontier changes what", DRAWN | shape((1, 1), frontier=without_q)),
    ("a width is a whole number from 1", shape(width=lambda node: 2.0)),
    ("a level has up to 8192 nodes, not 8540", shape((1,) * 4, **WIDE)),
    ("a tree grows up to 8192 nodes, not 12323", shape((1,) * 3, **WIDE)),
    ("a path from the root down", rule(verify=lambda *it: (Greedy.verify(*it)[0][1:], 5))),
    ("verify answers None", rule(verify=lambda *given: None)),
    ("a bonus token is one of 61", rule(verify=lambda *given: ([], 61))),
    ("verify changes what", rule(verify=lambda self, tree, logits: logits.mul_(2))),
    (TOKENS, proposing([[61, 5]], [[0.5, 0.5]])),
    (TOKENS, proposing([[5, 5]], [[0.5, 0.5]])),
    (TOKENS, proposing([[1, 2, 3]], [[0.5, 0.5, 0.5]])),
    (r"of shape \(1, C\), not", proposing([[5], [6]], [[0.5], [0.5]])),
    ("a rule's estimates are numbers from 0", proposing([[5]], [[math.nan]])),
    (r"a rule's q has the shape \(1, 61\)", proposing([[5]], [[0.5]], Q[0])),
    ("that draws does not go", proposing([[5]], [[0.5]], Q) | dict(tree=GrowingShape(2, 2, 3))),
    (r"floats of shape \(1, 61\), not torch.Size\(\[1, 60", exit_(torch.zeros(1, 60))),
    ("predict changes what", exit_(predict=lambda self, tree, nodes: tree.context.pop())),
    ("keep changes what", exit_(keep=lambda self, step: step.accepted.append(5))),
    ("an exit's confidence is", exit_(confidence=math.nan)),
    ("exit 1 of the draft: .* not finite", exit_(torch.full((1, 61), math.nan))),
    ("an exit's exit_layer is a number", exit_(exit_layer=-1)),
    ("an exit's max_positions is a number", exit_(max_positions=None)),
    ("a prompt is a list of ids", dict(tokens="Hi")),
    ("must share a vocabulary", dict(draft=random_llama(1, vocab_size=190))),
    ("exits: expected different numbers", dict(exits=[OneLayer, OneLayer], thresholds=[0.6])),
    ("not 'x'", dict(method="x")),
    ("temperature: expected 0, or a number", dict(temperature="1")),
    ("stop_at: expected an object", dict(stop_at=StopStrings)),
    (r"exits .5.: the draft has 4 layers", dict(exits=[5])),
    ("exits: expected increasing numbers", dict(exits=[2, 1])),
    ("3 exits, but 1 thresholds", dict(exits=[1, 2, 3], thresholds=[0.5])),
    ("thresholds: expected numbers from 0", dict(exits=[1, 2], thresholds=[math.nan])),
    ("rule: expected 'noise', 'rejection' or a function", dict(rule="coupled")),
    ("options: .* 'init'", dict(init="target")),
    ("roots go with rule=", dict(rule=Greedy, decoder=RootsDecoder)),
    ("leaves out the token that", dict(decoder=RootsDecoder) | shape(sent=lambda nodes: nodes[:1])),
    ("tree: expected widths from 1, or a Shape", dict(tree=GrowingShape(1000, 2, 5))),
    ("tree: expected without draft_length", dict(tree=(2, 1), draft_length=3)),
    ("options: .* missing 3", dict(tree=GrowingShape)),
    ("expected layers of another model after", dict(draft=random_llama(2), exits=[OfTarget, 4])),
]


@pytest.mark.parametrize(("message", "options"), BROKEN)
def test_what_breaks_a_promise_or_cannot_be_run_is_one_line(target, message, options):
    """Of prompts that are empty, too long or outside the vocabulary see ``test_batch``."""
    given = dict(tokens=[3, 1], draft=target) | OWN | options
    raises_line(generate, ValueError, message, target, **given)


def test_an_exit_that_knows_nothing_ends_drafting(target):
    steps = start(target, [3, 1], max_new_tokens=5, **exit_(confidence=0))
    assert [len(step.tree.nodes) for step in steps] == [1] * 5
    assert generate(target, [3, 1], max_new_tokens=5, **exit_()).stats.sent


def test_a_prompt_that_fails_within_a_step_does_not_take_others_along():
    target = random_llama(1, eos_token_ids=())
    with torch.no_grad():
        target.model.embed_tokens.weight[29] = math.nan
    expected = generate(target, [3, 1], max_new_tokens=5).tokens
    answers = generate_many(target, [[3, 1], [29, 1], [4, 2]], max_new_tokens=5)
    assert next(answers).tokens == expected
    raises_line(next, ValueError, "prompt 1: the logits are not finite", answers)


@pytest.mark.parametrize("method", ["ar", "s2d-tree"])
@pytest.mark.parametrize("law", [dict(temperature=1.0), dict(decoder=RootsDecoder)])
def test_logits_and_tokens_per_step(target, method, law):
    """Before every emitted token, by the target alone. Steps add up to the answer."""
    tokens = generate(target, [3, 1], method="ar", max_new_tokens=30).tokens
    ending = random_llama(1, eos_token_ids=(tokens[11],))
    decoder = start(ending, [3, 1], ending, method=method, max_new_tokens=30, **law)
    steps = list(decoder)
    text = torch.tensor([[3, 1, *decoder.tokens]], device=target.device)
    assert (emitted_logits(steps) - target(text)[0, 1:-1]).abs().max() < 1e-9
    assert sum(decoder.stats.accept_lengths) == len(decoder.tokens)
    assert decoder.stats.mean_accepted_tokens == len(decoder.tokens) / len(steps)
