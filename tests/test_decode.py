"""The loop is lossless: greedy by equality in float64, sampling by the joint distribution of what it emits."""

import functools
import itertools
import math

import pytest
import torch
from helpers import WEIGHTS, load_transformers, random_llama, transformers_greedy
from s2d.options import METHODS, choose_shape

from s2d import generate
from s2d.bench.specbench import held_out_prompts
from s2d.tree import Dynamic, TokenTree, TreeAttention

TARGETS = ["mini-7b", "mini-13b", "mini-70b"]
SMALL = {
    "sd": dict(draft_length=8),
    "s2d": dict(draft_length=8),
    "s2d-tree": dict(tree=Dynamic(3, 7, 12)),
}
PER_GROUP, NEW = 9, 40  # 54 prompts in all


@functools.cache
def transformers_model(name):
    return load_transformers(WEIGHTS / name, torch.float64)


@pytest.mark.parametrize("batch", range(3))
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_the_target_alone_and_transformers(mini, tokenizer, name, batch):
    """Every prompt goes through chains and trees, thresholds, draft lengths and stop values; EOS ends many of them."""
    settings = [
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
    target, draft, inside = mini(name), mini("mini-draft"), 0
    for prompt in held_out_prompts(tokenizer, PER_GROUP)[batch::3]:
        alone = generate(target, prompt, method="ar", max_new_tokens=NEW).tokens
        assert alone == transformers_greedy(transformers_model(name), prompt, NEW)
        for setting in settings:
            output = generate(target, prompt, draft=draft, max_new_tokens=NEW, **setting)
            assert output.tokens == alone, setting
            assert output.exact
            stats = output.stats
            assert sum(stats.accept_lengths) == len(alone)
            assert max(stats.accept_lengths) <= depth(setting, target.config, draft.config) + 1
            inside += alone[-1] == tokenizer.eos_id and stats.accept_lengths[-1] > 1
    assert inside > 5  # EOS did arrive among accepted draft tokens


class ByLastToken:
    """A decision model as whimsical as can be: its chances depend on the tokens drafted so far, through the states."""

    threshold = 0.5

    def __call__(self, prediction):
        return (prediction.hidden.sum(dim=-1) % 1.0).float()


def depth(setting, *configs):
    return choose_shape(
        *configs, setting["method"], setting.get("draft_length"), setting.get("tree")
    ).depth


@pytest.mark.parametrize("method", METHODS)
def test_eos_ends_the_output_wherever_it_stands_in_a_run(method):
    """A draft that equals the target proposes tokens far beyond EOS; none of them may appear."""
    target = random_llama(0)
    free = generate(target, [3, 1, 4], method="ar", max_new_tokens=30).tokens
    for position, eos in enumerate(free):
        if eos in free[:position]:
            continue
        model = random_llama(0, eos_token_ids=(eos,))
        for init in ("draft", "target") if method in ("sd", "s2d") else ("draft",):
            output = generate(
                model, [3, 1, 4], draft=model, method=method, exits=None if method == "ar" else [4],
                max_new_tokens=30, init=init, **SMALL.get(method, {}),
            )  # fmt: skip
            assert output.tokens == free[: position + 1]
            assert sum(output.stats.accept_lengths) == position + 1


@pytest.mark.parametrize("draft_positions", [64, 20])
def test_context_limit_stops_cleanly(draft_positions):
    """At max_position_embeddings, also where the draft's own context is the shorter one."""
    target = random_llama(1, max_position_embeddings=64, eos_token_ids=())
    draft = random_llama(
        1, max_position_embeddings=draft_positions, exit_layers=(2, 4), thresholds=(0.5, 0.0)
    )
    for prompt_length in (1, 15, 40, 62, 63):
        prompt = torch.randint(
            0, 61, (prompt_length,), generator=torch.Generator().manual_seed(5)
        ).tolist()
        alone = generate(target, prompt, method="ar", max_new_tokens=1000).tokens
        assert len(alone) == 64 - prompt_length
        for setting in (
            dict(method="s2d", draft_length=1),
            dict(method="s2d", draft_length=30),
            dict(method="mcsd", tree=(2, 2, 1, 1, 1), exits=[4]),
            dict(method="s2d-tree", tree=Dynamic(3, 8, 20)),
        ):
            assert (
                generate(target, prompt, draft=draft, max_new_tokens=1000, **setting).tokens
                == alone
            )
    with pytest.raises(
        ValueError, match="has 64 tokens; the target's context of 64 has no room left"
    ):
        generate(target, [1] * 64, method="ar")


@pytest.mark.parametrize(
    "setting",
    [
        dict(method="s2d"),
        dict(method="mcsd", tree=(6, 1, 1, 1)),
        dict(method="s2d-tree", tree=(3, 2, 1)),
    ],
)
def test_no_mask_is_built_in_the_loop_for_static_shapes(setting, monkeypatch):
    """One for the target and one for the draft, however many steps there are and wherever drafts end."""
    built = []
    monkeypatch.setattr(
        TreeAttention, "set_tree", lambda self, ancestors, chain=False: built.append(len(ancestors))
    )
    monkeypatch.setattr(
        TokenTree, "ancestors", property(lambda self: pytest.fail("a mask built in the loop"))
    )
    draft = random_llama(4, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    output = generate(
        random_llama(3), [5], draft=draft, max_new_tokens=40, stop=ByLastToken(), **setting
    )
    assert output.stats.steps > 5 and len(built) == 2


def slow_target_initialised(target, draft, prompt, widths, count):
    """Greedy decoding with target-initialised roots and one exit, written out without caches or trees."""
    best = lambda model, tokens, k: model(torch.tensor([tokens]))[0, -1].topk(k).indices.tolist()  # noqa: E731
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        survivors = []
        for root in best(target, tokens, widths[0]):
            chain, alive = [root], True
            while alive and len(chain) < len(widths):
                [drafted] = best(draft, tokens + chain, 1)
                alive = [drafted] == best(target, tokens + chain, 1)
                chain += [drafted] * alive
            survivors.append(chain)
        tokens += max(survivors, key=len)
    return tokens[len(prompt) :][:count]


def slow_target_initialised_growing(target, draft, prompt, shape, count):
    """The same with a tree that grows below the roots: {path: score} by plain search, the best ``size`` paths kept.

    A root's score is its log-probability by the target; the walk below each kept root follows the target's own choices.
    """
    row = lambda model, tokens: model(torch.tensor([tokens]))[0, -1].log_softmax(-1)  # noqa: E731
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        best = row(target, tokens).topk(shape.top_k)
        level = {
            (token,): score for score, token in zip(best.values.tolist(), best.indices.tolist())
        }
        candidates = dict(level)
        for _ in range(shape.depth - 1):
            frontier = sorted(level, key=lambda path: -level[path])[: shape.top_k]  # noqa: B023 - used at once
            gains = {path: row(draft, tokens + list(path)).topk(shape.top_k) for path in frontier}
            level = {(*path, token): level[path] + gain for path, best in gains.items()
                     for gain, token in zip(best.values.tolist(), best.indices.tolist())}  # fmt: skip
            candidates |= level
        kept = set(sorted(candidates, key=lambda path: -candidates[path])[: shape.size])
        survivors = []
        for root in [path for path in candidates if len(path) == 1 and path in kept]:
            path = root
            while (longer := (*path, row(target, tokens + list(path)).argmax().item())) in kept:
                path = longer
            survivors.append(path)
        tokens += max(survivors, key=len)
    return tokens[len(prompt) :][:count]


@pytest.mark.parametrize(
    "shape",
    [Dynamic(3, 4, 9), Dynamic(4, 3, 3), Dynamic(4, 5, 2), Dynamic(3, 6, 1), Dynamic(2, 2, 40)],
)
def test_target_initialised_growing_trees_as_published(shape):
    """Also where roots are dropped for deeper nodes, so that the first nodes are not the roots."""
    dropped = 0
    for seed in range(4):
        options = dict(eos_token_ids=(), scale=0.12)
        target, draft = random_llama(seed, **options), random_llama(seed, **options)
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed)
            )

        def roots(step):
            nonlocal dropped
            dropped += 0 < (step.proposal.tree.parents == -1).sum() < shape.top_k

        expected = slow_target_initialised_growing(target, draft, [3, 1, 4], shape, 30)
        output = generate(target, [3, 1, 4], draft=draft, method="s2d-tree", exits=[4], tree=shape, init="target",
                          max_new_tokens=30, on_step=roots)  # fmt: skip
        assert (
            output.tokens[:24] == expected[:24]
        )  # the last step of either is cut off in its own way
        assert output.exact is False
    assert dropped or shape.size >= 9


@pytest.mark.parametrize("widths", [(3, 1, 1, 1), (2, 1, 1), (5, 1), (4,)])
def test_target_initialised_roots_as_published(widths):
    """Each root counts as accepted and the longest surviving chain wins; that is not what the target alone writes."""
    options, different = dict(eos_token_ids=(), scale=0.1), 0
    for seed in range(4):
        target, draft = random_llama(seed, **options), random_llama(seed, **options)
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed)
            )
        expected = slow_target_initialised(target, draft, [3, 1, 4], widths, 30)
        run = functools.partial(
            generate, target, [3, 1, 4], draft=draft, max_new_tokens=30, init="target"
        )
        output = run(method="mcsd", tree=widths)
        assert (
            output.tokens[:25] == expected[:25]
        )  # the last step of either is cut off in its own way
        assert output.exact is False
        assert 0 < output.stats.acceptance_rate <= 1
        assert run(method="s2d-tree", tree=Dynamic(widths[0], 4, 12)).exact is False
        assert run(method="mcsd", tree=(1, *widths)).exact is run(method="s2d").exact is True
        different += (
            output.tokens != generate(target, [3, 1, 4], method="ar", max_new_tokens=30).tokens
        )
    assert different or widths == (4,)


@pytest.mark.parametrize("tree", [(4, 1, 1), Dynamic(4, 3, 9)])
def test_target_initialised_roots_keep_to_top_p(tree):
    """Where top-p leaves fewer tokens than there are roots, none from outside may be emitted."""
    target, draft = random_llama(1, eos_token_ids=()), random_llama(2)
    options = dict(
        draft=draft,
        method="mcsd",
        tree=tree,
        init="target",
        max_new_tokens=20,
        temperature=1.0,
        top_p=0.3,
    )
    for seed in range(10):
        tokens = [3, 1, 4] + generate(target, [3, 1, 4], seed=seed, **options).tokens
        probs = torch.softmax(target(torch.tensor([tokens]))[0], dim=-1)
        for i in range(3, len(tokens)):
            assert probs[i - 1][probs[i - 1] > probs[i - 1, tokens[i]]].sum() < 0.3


def test_max_new_tokens_is_never_exceeded():
    target = random_llama(2, eos_token_ids=())
    for count in range(1, 15):
        for init in ("draft", "target"):
            output = generate(
                target,
                [1, 2],
                draft=target,
                method="sd",
                exits=[4],
                draft_length=6,
                max_new_tokens=count,
                init=init,
            )
            assert len(output.tokens) == count


def test_statistics_add_up():
    target, draft = (
        random_llama(3),
        random_llama(4, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0)),
    )
    alone = generate(target, [5], method="ar", max_new_tokens=20)
    assert alone.stats.mean_accepted_tokens == 1.0
    assert alone.stats.steps == len(alone.tokens)
    calls = []
    target.model["layers"][0].register_forward_hook(lambda *_: calls.append(1))
    output = generate(target, [5], draft=draft, method="s2d", max_new_tokens=20, draft_length=3)
    assert output.stats.steps == len(
        calls
    )  # one target pass a step, the prompt included in the first
    assert output.stats.mean_accepted_tokens == pytest.approx(len(output.tokens) / len(calls))
    assert 0 < sum(output.stats.exit_counts.values()) <= 3 * len(calls)
    assert set(output.stats.exit_counts) <= {1, 2, 4}
    assert output.stats.seconds > 0
    assert (
        sum(output.stats.exit_counts.values())
        == output.stats.draft_levels
        == output.stats.draft_forwards
    )  # a chain
    assert output.stats.accepted == len(output.tokens) - output.stats.steps
    assert output.stats.acceptance_rate == output.stats.accepted / output.stats.draft_levels
    assert alone.stats.acceptance_rate == alone.stats.draft_forwards == 0


@pytest.mark.parametrize("init", ["draft", "target"])
@pytest.mark.parametrize("setting", [dict(method="sd", draft_length=5), dict(method="mcsd", tree=(3, 1, 1, 1)),
                                     dict(method="s2d-tree", tree=Dynamic(3, 5, 9))])  # fmt: skip
def test_statistics_count_every_target_pass_and_nothing_after_eos(setting, init):
    """Against counts made outside: passes by a hook, accepted tokens by which of the emitted ones stood in the tree."""
    free = generate(random_llama(3), [5, 9], method="ar", max_new_tokens=30).tokens
    ended_inside = 0
    for eos in dict.fromkeys(free):
        target, passes, proposals, groups = random_llama(3, eos_token_ids=(eos,)), [], [], []
        target.model["layers"][0].register_forward_hook(lambda *_: passes.append(1))  # noqa: B023 - used at once
        draft = random_llama(3)
        output = generate(target, [5, 9], draft=draft, exits=[4], init=init, max_new_tokens=30, **setting,
                          on_tokens=groups.append, on_step=lambda step: proposals.append(step.proposal))  # fmt: skip
        stats = output.stats
        assert stats.steps == len(passes) == len(stats.accept_lengths) == len(groups)
        assert stats.accept_lengths == [len(group) for group in groups]
        accepted = 0
        for proposal, group in zip(proposals, groups):
            node = -1
            for token in group:
                children = [
                    i
                    for i, p in enumerate(proposal.tree.parents.tolist())
                    if p == node and proposal.tree.tokens[i] == token
                ]
                if not children:
                    break
                node, accepted = children[0], accepted + 1
            ended_inside += group[-1:] == [eos] and bool(children)
        assert stats.accepted == accepted
        assert stats.draft_levels == sum(len(proposal.exits) for proposal in proposals)
    assert ended_inside


def test_on_step_sees_every_draft_with_the_targets_rows():
    target, seen = random_llama(3, eos_token_ids=()), []
    options = dict(draft=random_llama(4), method="mcsd", tree=(3, 2), max_new_tokens=20)
    output = generate(
        target, [5], on_step=lambda step: seen.append((step.proposal, step.logits)), **options
    )
    assert len(seen) == output.stats.steps
    tokens = [5]
    for (proposal, logits), emitted in zip(seen, output.stats.accept_lengths):
        assert len(logits) == len(proposal.tree) + 1
        assert (logits[0] - target(torch.tensor([tokens]))[0, -1]).abs().max() < 1e-10
        tokens += output.tokens[len(tokens) - 1 :][:emitted]


def test_on_tokens_sees_every_token_once():
    target, seen = random_llama(3), []
    output = generate(
        target, [5], draft=target, method="sd", exits=[3], max_new_tokens=20, on_tokens=seen.append
    )
    assert [len(group) for group in seen] == output.stats.accept_lengths
    assert list(itertools.chain(*seen)) == output.tokens


def test_the_same_seed_gives_the_same_text():
    target, draft = random_llama(5), random_llama(6)
    options = dict(draft=draft, method="sd", max_new_tokens=40, temperature=1.0)
    first, again, other = (generate(target, [7], seed=seed, **options).tokens for seed in (1, 1, 2))
    assert first == again != other


SAMPLING = {
    "ar": dict(method="ar"),
    "sd": dict(method="sd", draft_length=3),
    "s2d": dict(method="s2d", draft_length=3),
    "mcsd": dict(method="mcsd", tree=(3, 2, 1)),
    "mcsd, with replacement": dict(method="mcsd", tree=(3, 2, 1), replacement=True),
    "s2d-tree, sampled": dict(method="s2d-tree", tree=(2, 2, 2)),
    "s2d-tree": dict(method="s2d-tree", tree=Dynamic(3, 3, 8)),
    "mcsd, dynamic": dict(method="mcsd", tree=Dynamic(2, 4, 6)),
    "mcsd, stopped by the path": dict(method="mcsd", tree=(2, 2, 2), stop=ByLastToken()),
    "s2d-tree, stopped by the path": dict(
        method="s2d-tree", tree=Dynamic(3, 3, 8), stop=ByLastToken()
    ),
    "s2d, root from the target": dict(method="s2d", draft_length=3, init="target"),
    "mcsd, root from the target": dict(method="mcsd", tree=(1, 3, 2), init="target"),
    "s2d-tree, root from the target": dict(method="s2d-tree", tree=Dynamic(1, 3, 3), init="target"),
}


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("row", SAMPLING)
def test_sampled_tokens_have_the_targets_joint_distribution(row, top_p):
    """The first two tokens of 1,500 generations against the target's exact distribution, by Pearson's chi-square.

    The threshold is the Wilson-Hilferty quantile at z = 5.2, a false-alarm rate of 1e-7 for each case.
    """
    vocab, runs, temperature = 7, 1500, 1.0
    small = dict(scale=0.15, vocab_size=vocab, eos_token_ids=())
    target = random_llama(7, **small)
    draft = random_llama(8, **small, exit_layers=(1, 3), thresholds=(0.3, 0.0))
    prompt = [1, 5, 2]
    first = exact(target, prompt, temperature, top_p)
    joint = torch.stack(
        [first[x] * exact(target, [*prompt, x], temperature, top_p) for x in range(vocab)]
    ).flatten()
    counts, exits = torch.zeros(vocab * vocab), set()
    for seed in range(runs):
        output = generate(
            target, prompt, draft=draft, max_new_tokens=3, temperature=temperature, top_p=top_p, seed=seed,
            **SAMPLING[row],
        )  # fmt: skip
        exits |= set(output.stats.exit_counts)
        counts[output.tokens[0] * vocab + output.tokens[1]] += 1
    assert counts[joint == 0].sum() == 0
    assert len(exits) == {"ar": 0, "sd": 1, "mcsd": 1}.get(SAMPLING[row]["method"], 2)
    common = joint * runs >= 5  # rare cells are pooled, so that the chi-square approximation holds
    expected = torch.cat([joint[common] * runs, joint[~common].sum()[None] * runs])
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected, observed = expected[expected > 0], observed[expected > 0]
    assert len(expected) > 5
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 5.2 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def exact(model, tokens, temperature, top_p):
    """The warped next-token distribution, written out independently of the code under test."""
    probs = torch.softmax(model(torch.tensor([tokens]))[0, -1] / temperature, dim=-1)
    kept, mass = set(), 0.0
    for token in probs.argsort(descending=True).tolist():
        if mass < top_p:
            kept.add(token)
            mass += probs[token].item()
    return (
        torch.tensor([p.item() if token in kept else 0.0 for token, p in enumerate(probs)]).double()
        / mass
    )


BAD = [
    (dict(method="fast"), "unknown method 'fast'"),
    (dict(tokens=[]), "prompt is empty"),
    (dict(tokens=[1, 61]), "outside the target's vocabulary of 61"),
    (dict(tokens=[-1]), "outside the target's vocabulary"),
    (dict(tokens=[1] * 128), "no room left"),
    (dict(draft=None), "needs a draft"),
    (dict(draft=random_llama(0, vocab_size=60)), "the draft has 60 tokens, the target 61"),
    (dict(max_new_tokens=0), "at least 1, got max_new_tokens=0"),
    (dict(max_new_tokens=-3), "at least 1"),
    (dict(draft_length=-1), "draft_length=-1"),
    (dict(method="ar", tree=(2, 2)), "method 'ar' drafts no tree"),
    (dict(tree=(2, 2)), "method 's2d' drafts no tree; use 'mcsd' or 's2d-tree'"),
    (dict(method="mcsd", draft_length=3), "drafts a tree; give its shape"),
    (dict(method="mcsd", tree=()), "whole numbers of at least 1"),
    (dict(method="mcsd", tree=(4, 0)), "whole numbers of at least 1"),
    (dict(method="s2d-tree", tree=Dynamic(0, 4, 60)), "whole numbers of at least 1"),
    (
        dict(method="s2d-tree", tree=Dynamic(62, 4, 60)),
        "cannot have 62 different children: there are 61 tokens",
    ),
    (dict(method="mcsd", tree=(62,)), "cannot have 62 different children"),
    (
        dict(method="mcsd", tree=(9, 9, 9)),
        "a tree of 819 nodes, 3 deep, is more than the target's context of 128",
    ),
    (
        dict(method="s2d-tree", tree=Dynamic(3, 400, 60)),
        "400 deep, is more than the target's context",
    ),
    (dict(draft_length=400), "400 nodes, 400 deep, is more than the target's context of 128"),
    (dict(method="mcsd", exits=[2, 4]), "drafts from one exit"),
    (dict(temperature=-0.1), "temperature must be 0 or more"),
    (dict(temperature=float("nan")), "temperature must be 0 or more"),
    (dict(top_p=0.0), "top_p must be above 0"),
    (dict(top_p=1.5), "top_p must be above 0"),
    (dict(stop=2.0), "stop is a confidence"),
    (dict(init="both"), "init is 'draft' or 'target', got 'both'"),
    (dict(exits=[1, 5]), "lie within the draft's 4 layers"),
    (dict(exits=[0, 4]), "lie within the draft's 4 layers"),
    (dict(exits=[3, 2]), "must increase"),
    (dict(exits=[2, 2]), "must increase"),
    (dict(exits=[]), "must increase"),
    (dict(exits=[2, 4], thresholds=[0.5]), "need as many thresholds, got 1"),
    (dict(exits=[2, 4], thresholds=[1.5, 0.0]), "within 0..1"),
    (dict(exits=[2, 4], thresholds=[-0.5, 0.0]), "within 0..1"),
    (dict(method="sd", exits=[2, 4]), "drafts from one exit"),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD, ids=[str(number) for number in range(len(BAD))]
)
def test_what_cannot_be_run_is_refused_in_one_line(change, message):
    arguments = dict(tokens=[1, 2], draft=random_llama(9), method="s2d") | change
    with pytest.raises(ValueError, match=message) as caught:
        generate(random_llama(9), **arguments)
    assert "\n" not in str(caught.value)


def test_exits_come_from_the_draft_unless_given():
    target = random_llama(10)
    draft = random_llama(11, exit_layers=(1, 3), thresholds=(0.0, 0.0))
    run = functools.partial(generate, target, [1, 2], draft=draft, max_new_tokens=10)
    assert set(run(method="s2d").stats.exit_counts) == {1}
    assert set(run(method="s2d", thresholds=[1.0, 0.0]).stats.exit_counts) == {3}
    assert set(run(method="s2d", exits=[2, 4], thresholds=[1.0, 0.0]).stats.exit_counts) == {4}
    assert set(run(method="sd").stats.exit_counts) == {3}
    assert set(run(method="sd", exits=[2]).stats.exit_counts) == {2}


def test_shapes_come_from_the_draft_unless_given():
    target = random_llama(10)
    draft = random_llama(10, draft_length=3, draft_tree=(2, 5, 7))
    run = functools.partial(generate, target, [1, 2], draft=draft, max_new_tokens=24, exits=[4])
    assert max(run(method="s2d").stats.accept_lengths) == 4
    assert max(run(method="s2d", draft_length=5).stats.accept_lengths) == 6
    tree = run(method="s2d-tree").stats
    assert 7 * (tree.steps - 1) < tree.exit_counts[4] <= 7 * tree.steps
    assert max(run(method="mcsd", tree=(2, 2)).stats.accept_lengths) == 3


def test_chains_end_by_the_drafts_own_stop_unless_given():
    """A stop of 1 lets no chain begin; trees have none of their own; the tokens are the target's in any case."""
    target, draft = random_llama(10), random_llama(10, draft_length=3, draft_stop=1.0)
    run = functools.partial(generate, target, [1, 2], draft=draft, max_new_tokens=24, exits=[4])
    outputs = {name: run(method=name) for name in ("sd", "s2d", "mcsd", "s2d-tree")}
    outputs["never"] = run(method="s2d", stop=0)
    assert len({tuple(output.tokens) for output in outputs.values()}) == 1
    drafted = {name: sum(output.stats.exit_counts.values()) > 0 for name, output in outputs.items()}
    assert drafted == {"sd": False, "s2d": False, "mcsd": True, "s2d-tree": True, "never": True}


@pytest.mark.parametrize("method", ["sd", "mcsd", "s2d", "s2d-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_after_which_the_draft_gives_up_is_counted(method, temperature):
    """No confidence is above 1, so every draft runs once at its only exit and then proposes nothing."""
    output = generate(random_llama(1), [3, 1, 2], draft=random_llama(2, exit_layers=(4,)), method=method, stop=1.0,
                      temperature=temperature, max_new_tokens=9)  # fmt: skip
    assert output.stats.steps == len(output.tokens) and output.stats.draft_levels == 0
    assert (
        output.stats.draft_forwards == len(output.tokens) - 1
    )  # before the last token there is no room for a draft
