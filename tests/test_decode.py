"""The loop is lossless: greedy by equality in float64, sampling by enumeration of all outcomes."""

import sys

import pytest
import torch
from enumeration import assert_lossless
from helpers import WEIGHTS, ByLastToken, path_of, raises_line, random_llama, random_tokens
from s2d.proposal import TARGET
from theirs import assert_greedy, load_transformers

from s2d import generate
from s2d.generate import start
from s2d.tree import Dynamic, ancestor_mask

TARGETS = ["mini-7b", "mini-13b", "mini-70b"]
PER_GROUP, NEW = 3, 40  # 18 prompts in all

SETTINGS = [
    dict(method="sd", draft_length=6),
    dict(method="sd", draft_length=3, exits=[2]),
    dict(method="s2d", draft_length=6),
    dict(method="s2d", draft_length=1, thresholds=[0.0, 0.0, 0.0]),
    dict(method="s2d", draft_length=9, thresholds=[0.9, 0.7, 0.0]),
    dict(method="s2d", draft_length=12, thresholds=[0.3, 1.0, 0.0], stop=0.4),
    dict(method="mcsd"),
    dict(method="mcsd", tree=(3, 1, 1, 1), exits=[2]),
    dict(method="s2d-tree", tree=(2, 2, 1, 1, 1), thresholds=[0.9, 0.7, 0.0]),
    dict(method="s2d-tree", tree=Dynamic(top_k=10, depth=4, size=60)),
    dict(method="s2d-tree", tree=Dynamic(top_k=3, depth=7, size=12), stop=0.2),
    dict(method="mcsd", tree=(6,) + (1,) * 9, stop=ByLastToken()),
    dict(method="s2d-tree", tree=(1, 2, 1, 1), init="target"),
]


@pytest.mark.parametrize("number", range(3))
def test_greedy_equals_the_target_alone_and_transformers(mini, tokenizer, number, held_out_prompts):
    """6 prompts a target, each through a third of the settings; EOS ends many of them."""
    name, ended_inside = TARGETS[number], 0
    target, draft = mini(name), mini("mini-draft")
    theirs = load_transformers(WEIGHTS / name, torch.float64)
    for index, prompt in enumerate(held_out_prompts(PER_GROUP)[number::3]):
        alone = generate(target, prompt, method="ar", max_new_tokens=NEW).tokens
        assert_greedy(theirs, prompt, alone, NEW)
        for setting in SETTINGS[index % 3 :: 3]:
            output = generate(target, prompt, draft, max_new_tokens=NEW, **setting)
            assert output.tokens == alone and output.exact, setting
            lengths = output.stats.accept_lengths
            assert sum(lengths) == len(alone)
            ended_inside += alone[-1] == tokenizer.eos_id and lengths[-1] > 1
    assert ended_inside > 1  # EOS did arrive among accepted draft tokens


@pytest.mark.parametrize("draft_positions", [64, 20])
def test_context_limit_stops_cleanly(draft_positions):
    """At max_position_embeddings, also where the draft's own context is the shorter one."""
    target = random_llama(1, max_position_embeddings=64, eos_token_ids=())
    exits = dict(exit_layers=(2, 4), thresholds=(0.5, 0.0))
    draft = random_llama(1, max_position_embeddings=draft_positions, **exits)
    for prompt_length in (1, 15, 40, 62, 63):
        prompt = random_tokens(5, prompt_length)
        alone = generate(target, prompt, method="ar", max_new_tokens=1000).tokens
        assert len(alone) == 64 - prompt_length
        for setting in (
            dict(method="s2d", draft_length=1),
            dict(method="s2d", draft_length=30),
            dict(method="mcsd", tree=(2, 2, 1, 1, 1), exits=[4]),
            dict(method="s2d-tree", tree=Dynamic(3, 8, 20)),
        ):
            output = generate(target, prompt, draft, max_new_tokens=1000, **setting)
            assert output.tokens == alone
    full = "has 64 tokens; the target's context of 64 is full"
    raises_line(generate, ValueError, full, target, [1] * 64, method="ar")


@pytest.mark.parametrize(
    ("method", "tree", "masks"),
    [("s2d", None, 0), ("mcsd", (6, 1, 1, 1), 2), ("s2d-tree", (3, 2, 1), 2)],
)
def test_no_mask_is_built_in_the_loop_for_fixed_shapes(method, tree, masks, monkeypatch):
    """One for the target and one for the draft, none for chains; drafts may end anywhere."""
    built = []
    build = lambda parents: built.append(parents) or ancestor_mask(parents)  # noqa: E731
    monkeypatch.setattr(sys.modules["s2d.tree"], "ancestor_mask", build)
    draft = random_llama(4, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    options = dict(max_new_tokens=40, stop=ByLastToken(), tree=tree)
    output = generate(random_llama(3, eos_token_ids=()), [5], draft, method, **options)
    assert output.stats.steps > 5 and len(built) == masks


def test_statistics_add_up():
    draft = random_llama(4, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    alone = generate(random_llama(3), [5], method="ar", max_new_tokens=20)
    assert alone.stats.mean_accepted_tokens == 1.0
    assert alone.stats.acceptance_rate == alone.stats.draft_forwards == 0
    assert alone.stats.steps == len(alone.tokens)
    output = generate(random_llama(3), [5], draft, max_new_tokens=20, draft_length=3)
    stats = output.stats
    assert stats.mean_accepted_tokens == pytest.approx(len(output.tokens) / stats.steps)
    assert 0 < stats.draft_levels <= 3 * stats.steps and set(stats.exit_counts) <= {1, 2, 4}
    assert stats.exit_counts.total() == stats.draft_levels == stats.draft_forwards  # a chain
    assert stats.accepted == len(output.tokens) - stats.steps
    assert stats.acceptance_rate == stats.accepted / stats.draft_levels
    assert stats.published_acceptance_rate == stats.acceptance_rate
    assert stats.seconds > stats.draft_seconds + stats.target_seconds > 0


def accepted_of(step):
    """How many of a step's tokens are in its tree, found by walking down it."""
    tree, node, count = step.proposal.tree, -1, 0
    for token in step.tokens:
        below = ((tree.parents == node) & (tree.tokens == token)).nonzero().flatten().tolist()
        if not below:
            break
        node, count = below[0], count + 1
    return count


def levels_of(step):
    """The depth of a step's tree, by climbing from each node."""
    parents = step.proposal.tree.parents.tolist()
    return max((len(path_of(parents, node)) for node in range(len(parents))), default=0)


TREES = [
    dict(method="sd", draft_length=5),
    dict(method="mcsd", tree=(3, 1, 1, 1)),
    dict(method="s2d-tree", tree=Dynamic(3, 5, 9)),
]


@pytest.mark.parametrize("init", ["draft", "target"])
@pytest.mark.parametrize("setting", TREES)
def test_statistics_count_every_target_pass_and_nothing_after_eos(setting, init):
    """Against counts made outside: passes by a hook, accepted tokens by walking down the trees.

    A draft that equals the target proposes tokens far beyond EOS; none of them may appear.
    """
    free = generate(random_llama(3), [5, 9], method="ar", max_new_tokens=30).tokens
    draft, ended_inside = random_llama(3), 0
    for eos in dict.fromkeys(free):
        target, passes = random_llama(3, eos_token_ids=(eos,)), []
        target.model["layers"][0].register_forward_hook(lambda *_, seen=passes: seen.append(1))
        options = dict(exits=[4], init=init, max_new_tokens=30, **setting)
        generation = start(target, [5, 9], draft, **options)
        steps, stats = list(generation), generation.stats
        assert stats.steps == len(passes) == len(steps)
        assert stats.accept_lengths == [len(step.tokens) for step in steps]
        walked, levels = sum(map(accepted_of, steps)), sum(map(levels_of, steps))
        roots = sum(len(step.proposal.tree) > 0 for step in steps if init == "target")
        assert (stats.accepted, stats.draft_levels) == (walked - roots, levels)
        assert stats.acceptance_rate == (walked - roots) / (levels - roots)
        assert stats.published_acceptance_rate == walked / levels
        assert generation.tokens == sum((step.tokens for step in steps), [])
        assert generation.tokens == free[: free.index(eos) + 1] or not generation.exact
        ended_inside += steps[-1].tokens[-1] == eos and accepted_of(steps[-1]) > 0
    assert ended_inside


def test_a_step_tells_its_context_its_rows_and_where_tokens_came_from():
    """The target's rows are its own; whoever consumes the steps runs in no mode of theirs."""
    target, draft = random_llama(3), random_llama(4)
    generation = start(target, [5], draft, "mcsd", tree=(3, 2), max_new_tokens=20)
    tokens = [5]
    for step in generation:
        assert not torch.is_inference_mode_enabled()
        assert step.n == len(tokens) and len(step.logits) == len(step.proposal.tree) + 1
        assert (step.logits[0] - target(torch.tensor([tokens]))[0, -1]).abs().max() < 1e-10
        assert len(step.sources) == len(step.tokens)
        assert [*step.sources, TARGET].index(TARGET) == accepted_of(step)
        tokens += step.tokens
        assert generation.tokens == tokens[1:]
    assert len(tokens) == 21 or tokens[-1] == 2


SAMPLED = {
    "ar": dict(method="ar"),
    "sd": dict(method="sd", draft_length=3),
    "s2d": dict(method="s2d", draft_length=3),
    "mcsd": dict(method="mcsd", tree=(2, 1)),
    "mcsd, with replacement": dict(method="mcsd", tree=(2, 1), replacement=True),
    "s2d-tree, sampled": dict(method="s2d-tree", tree=(3, 1)),
    "s2d-tree": dict(method="s2d-tree", tree=Dynamic(2, 2, 3)),
    "mcsd, dynamic": dict(method="mcsd", tree=Dynamic(2, 2, 4)),
    "mcsd, stopped": dict(method="mcsd", tree=(1, 1, 2), stop=ByLastToken(0.25)),
    "s2d-tree, stopped": dict(method="s2d-tree", tree=Dynamic(2, 3, 4), stop=ByLastToken()),
    "s2d, root from the target": dict(method="s2d", draft_length=2, init="target"),
    "mcsd, root from the target": dict(method="mcsd", tree=(1, 2), init="target"),
    "s2d-tree, root from the target": dict(method="s2d-tree", tree=Dynamic(1, 2, 2), init="target"),
}
THREE_TOKENS = dict(vocab_size=3, num_hidden_layers=2, scale=0.15, eos_token_ids=())


@pytest.mark.parametrize("row", SAMPLED)
def test_sampled_tokens_have_the_targets_joint_distribution(row):
    """Every outcome of a step, or of all where a root from the target is emitted by a later one."""
    options = SAMPLED[row]
    exits = dict(exit_layers=(1, 2), thresholds=(0.5, 0.0))
    target = random_llama(7, **THREE_TOKENS | {"num_hidden_layers": 1})
    draft = random_llama(11, **THREE_TOKENS, **exits)
    length, steps = (2, None) if "init" in options else (4, 1)
    used, stopped = set(), set()
    for kept, prompt in ((dict(), [1, 2, 2]), (dict(top_p=0.8), [0, 1]), (dict(top_k=2), [0, 1])):
        how = dict(draft=draft, temperature=1.5, **kept, **options)
        expected, seen = assert_lossless(target, prompt, length, steps, **how)
        possible = int((expected > 0).sum())
        assert possible == 3**length if not kept else 2**length <= possible < 3**length
        assert possible == 2**length or "top_k" not in kept
        used |= {each for step in seen for each in step.proposal.exits if each != TARGET}
        stopped |= {step.proposal.stopped for step in seen}
    assert len(used) == {"ar": 0, "sd": 1, "mcsd": 1}.get(options["method"], 2)
    assert "stop" not in options or len(stopped) == 2
