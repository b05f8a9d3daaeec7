"""What a page shows of each step, as plain numbers: of vocabulary-sized rows only the tokens that matter there."""

import statistics

import torch

from ..generate import choose_exits, start
from ..proposal import TARGET
from ..sampling import warp
from ..tokenizer import TextStream
from ..verify import residual, without

LIKELY = 6  # tokens that are shown of each distribution, besides those that were drafted or taken


class Recorder:
    """A function for ``on_step`` that keeps what there is to see, and calls ``watch`` before, if there is one.

    ``options`` are those of ``generate``, ``names`` those of the models.
    """

    def __init__(self, tokenizer, prompt, names, options):
        self.tokenizer, self.prompt, self.steps, self.alone = tokenizer, prompt, [], None
        self.temperature, self.top_p = options.get("temperature", 0.0), options.get("top_p", 1.0)
        self.replacement, draft = options.get("replacement", False), options.get("draft")
        method, stop = options.get("method", "s2d"), options.get("stop")
        exits, thresholds = (), ()
        if draft and method != "ar":
            exits, thresholds = choose_exits(
                draft.config, method, options.get("exits"), options.get("thresholds")
            )
            if stop is None and method in ("sd", "s2d"):
                stop = draft.config.draft_stop
        self.about = names | {
            "method": method, "temperature": self.temperature, "top_p": self.top_p, "seed": options.get("seed", 0),
            "init": options.get("init", "draft"), "replacement": self.replacement, "exits": list(exits),
            "thresholds": list(thresholds), "stop": None if callable(stop) else stop or None,
            "decision": callable(stop), "prompt_tokens": len(prompt),
        }  # fmt: skip

    def add(self, step):
        proposal, tree = step.proposal, step.proposal.tree
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        p = warp(
            step.logits, self.temperature or 1.0, self.top_p if self.temperature else 1.0
        )  # (N+1, V)
        q = proposal.q if self.temperature else None
        given = (
            bool(proposal.exits) and proposal.exits[0] == TARGET
        )  # the first level is the target's: it faces no test
        own = (
            step.tokens[len(step.verdict.path)]
            if len(step.tokens) > len(step.verdict.path)
            else None
        )
        places, draws = (
            [],
            iter([draw if draw is None else draw.item() for draw in step.verdict.draws]),
        )
        for depth, row in enumerate([0, *(node + 1 for node in step.verdict.path)]):
            children = [node for node, parent in enumerate(parents) if parent == row - 1]
            taken = step.verdict.path[depth] if depth < len(step.verdict.path) else None
            if depth == 0 and given:
                children = []
            added = own if taken is None else None
            if q is not None:
                place = tested(
                    p[row],
                    q[row] if children else None,
                    children,
                    taken,
                    tokens,
                    draws,
                    self.replacement,
                    added,
                )
            else:
                place = matched(p[row], children, taken, tokens, added)
            places.append({"row": row, "taken": taken, "own": added, **place})
        below = [parent + 1 for parent in parents]  # the row that is about each node's place
        looks = [looked(each) for each in proposal.confidences]
        looks = (
            [[], *looks] if given else looks
        )  # one for each level, and perhaps one after which the draft gave up
        chance = lambda rows: [short(rows[row, token]) for row, token in zip(below, tokens)]  # noqa: E731
        self.steps.append({
            "n": step.n, "tokens": step.tokens, "sources": step.sources, "path": step.verdict.path, "draws": len(step.verdict.draws),
            "nodes": {"tokens": tokens, "parents": parents, "p": chance(p), "q": None if q is None else chance(q)},
            "levels": [{"exit": exit_layer, "size": size, "looks": each}
                       for exit_layer, size, each in zip(proposal.exits, proposal.level_sizes, looks)],
            "gave_up": looks[-1] if len(looks) > len(proposal.exits) else None,
            "stopped": proposal.stopped, "places": places, "caches": self.caches(step),
            "ms": [short(1000 * seconds) for seconds in (
                step.draft_seconds, step.target_seconds, step.seconds - step.draft_seconds - step.target_seconds)],
        })  # fmt: skip

    def caches(self, step):
        """Of every cache its name, how many places it held after the target's pass, and how many of these it keeps."""
        n, proposal = step.n, step.proposal
        held = [
            {"name": "target", "held": n + len(proposal.tree), "kept": n + len(step.verdict.path)}
        ]
        slots = [] if proposal.slots is None else proposal.slots[step.verdict.path].tolist()
        first = 1
        for exit_layer, seen in zip(self.about["exits"], proposal.filled):
            kept = min(seen, n + sum(n + slot < seen for slot in slots))
            held.append(
                {"name": f"draft, layers {first} to {exit_layer}", "held": seen, "kept": kept}
            )
            first = exit_layer + 1
        return held

    def time_alone(self, target, prompt, **options):
        """See how long the target alone takes for a token, on the first few of its own answer."""
        emitted = sum(len(step["tokens"]) for step in self.steps)
        options["max_new_tokens"] = max(2, min(16, emitted))
        seconds = [step.seconds for step in start(target, prompt, **options)]
        if len(seconds) > 1:  # the first one reads the prompt
            self.alone = short(1000 * statistics.median(seconds[1:]))

    def data(self):
        """All of it, to be written as JSON: also the text of every token, and of the answer token by token."""
        stream, anchor, answer = TextStream(self.tokenizer), self.tokenizer.encode("a"), []
        emitted = [token for step in self.steps for token in step["tokens"]]
        answer = [stream.push([token]) for token in emitted]
        answer[-1:] = [answer[-1] + stream.finish()] if answer else []
        known = {token for step in self.steps for token in step["nodes"]["tokens"] + step["tokens"]}
        known |= {
            token for step in self.steps for place in step["places"] for token in place["ids"]
        }
        before = len(self.tokenizer.decode(anchor))
        pieces = {
            token: self.tokenizer.decode([*anchor, token])[before:] for token in sorted(known)
        }
        return {"about": self.about, "prompt": self.tokenizer.decode(self.prompt), "answer": answer, "pieces": pieces,
                "alone_ms": self.alone, "steps": self.steps}  # fmt: skip


def short(number):
    """Four digits of a number are enough to look at."""
    return float(f"{float(number):.4g}")


def looked(looks):
    return [[exit_layer, short(confidence)] for exit_layer, confidence in looks]


def to_show(p, q, children, tokens, own):
    """Which tokens of a place are shown, a list: what was drafted, the step's ``own``, the likeliest by p (V,) and q (V,) or None."""
    likely = p.topk(min(LIKELY, len(p))).indices.tolist() + (
        [] if q is None else q.topk(min(3, len(q))).indices.tolist()
    )
    return list(
        dict.fromkeys([tokens[node] for node in children] + [own] * (own is not None) + likely)
    )


def cut(row, ids):
    """The shown part of a row (V,)."""
    return [short(chance) for chance in row[ids].tolist()]


def matched(p, children, taken, tokens, own):
    """A place where the target's own choice decides: a child that carries it stays."""
    ids = to_show(p, None, children, tokens, own)
    tests = [
        {"node": node, "p": short(p[tokens[node]]), "stays": node == taken} for node in children
    ]
    return {"ids": ids, "stages": [{"p": cut(p, ids), "q": None}], "tests": tests}


def tested(p, q, children, taken, tokens, draws, replacement, own):
    """A place whose children were drawn from q: the tests of verify.verify_sampled over again, with the numbers it drew."""
    ids = to_show(p, q, children, tokens, own)
    stages, tests = [{"p": cut(p, ids), "q": None if q is None else cut(q, ids)}], []
    for node in children:
        token = tokens[node]
        if q[token] == 0:
            continue
        ratio, draw = (p[token] / q[token]).item(), next(draws, None)
        tests.append({"node": node, "p": short(p[token]), "q": short(q[token]), "chance": short(min(1.0, ratio)),
                      "draw": draw if draw is None else short(draw), "stays": node == taken})  # fmt: skip
        if node == taken:
            break
        p, q = (
            residual(p, q),
            q if replacement else without(q, torch.tensor(token, device=q.device)),
        )
        stages.append({"p": cut(p, ids), "q": cut(q, ids)})
    return {"ids": ids, "stages": stages, "tests": tests}
