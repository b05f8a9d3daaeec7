"""Every method on every target, beside transformers, as speedups over the target alone measured in the same run.

    python -m s2d.bench                       # three miniature targets, T = 0 and 1
    python -m s2d.bench --hf --markdown       # with transformers' own decoders beside it, as README shows it
    python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision

A method is a name, or a name with options of ``generate``: lists as 2,3,4, a dynamic tree as 4x8x24 (top_k, depth,
size), ``stop`` as a number, the file of a decision model, or "decision" for the one beside the draft.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from .corpus import GROUPS, conversations
from .decision import load_decision
from .decode import METHODS, generate
from .tokenizer import Tokenizer, chat_template
from .tree import Dynamic
from .weights import load_model

WEIGHTS = Path(__file__).parent.parent / "weights"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


# ----------------------------------------------------------------------------------------------------------- questions


def held_out_prompts(tokenizer, per_group):
    """Chat prompts of the six groups, ``per_group`` of each, that no training run has seen."""
    return [tokenizer.encode_chat(question["turns"][:1]) for question in held_out_questions(per_group)]


def held_out_questions(per_group):
    """Held-out conversations in the form of Spec-Bench's question.jsonl: question_id, category, turns."""
    return [
        {"question_id": number, "category": "writing" if group == "mt_bench" else group, "turns": questions}
        for number, (group, questions) in enumerate(
            (group, [question for question, _ in conversation.turns])
            for group in GROUPS
            for conversation in islice(conversations(2, "held-out", [group]), per_group)
        )
    ]


def read_questions(path, limit):
    """A file in Spec-Bench's form; at most ``limit`` questions of each of the six groups."""
    taken, questions = Counter(), []
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            question = json.loads(line)
            group = group_of(question)
            taken[group] += 1
            if question["turns"] and taken[group] <= limit:
                questions.append({key: question[key] for key in ("question_id", "category", "turns")})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not in Spec-Bench's question format ({error!r})") from None
    return questions


def group_of(question):
    return "mt_bench" if question["category"] in MT_BENCH else question["category"]


# ------------------------------------------------------------------------------------------------------------- methods


def default_methods(draft):
    """Every method, and ``sd`` from each exit of the draft alone."""
    exits = draft.config.exit_layers or (draft.config.num_hidden_layers,)
    return ["ar", *(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def parse_method(text, draft, draft_path, target_path):
    """"s2d:draft_length=8:thresholds=.9,.9,0" -> the options of ``generate``."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")
    options = {"method": name}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            if key == "tree":
                shape = [int(number) for number in value.replace("x", ",").split(",")]
                options[key] = Dynamic(*shape) if "x" in value else shape
            elif key in ("exits", "thresholds"):
                options[key] = [(int if key == "exits" else float)(number) for number in value.split(",")]
            elif key == "draft_length":
                options[key] = int(value)
            elif key == "init":
                options[key] = value
            elif key == "stop":
                options[key] = find_stop(value, draft, draft_path, target_path)
            else:
                raise ValueError(f"no option {key!r}")
        except TypeError:
            raise ValueError(f"method {text!r}: a dynamic tree is three numbers, such as 4x8x24") from None
        except ValueError as error:
            raise ValueError(f"method {text!r}: {error}") from None
    return options


def find_stop(value, draft, draft_path, target_path):
    if value == "decision":
        value = draft_path / f"decision-{target_path.name.removeprefix('mini-')}.safetensors"
    elif value.replace(".", "", 1).isdigit():
        return float(value)
    return load_decision(value, draft)


def transformers_methods(target_path, draft_path, dtype, device):
    """The peer: its greedy or sampling generate, assisted by the same draft, and with prompt look-up."""
    from transformers import LlamaForCausalLM  # measured beside us, not a dependency

    options = {"dtype": {"auto": torch.float32}.get(dtype, dtype)}
    target, draft = (LlamaForCausalLM.from_pretrained(path, **options).to(device).eval() for path in (target_path, draft_path))

    def run(prompt, max_new_tokens, temperature, seed, **how):
        torch.manual_seed(seed)
        tokens = torch.tensor([prompt], device=device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        began = time.perf_counter()
        output = target.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
                                 pad_token_id=0, **sampling, **how)  # fmt: skip
        return output[0, len(prompt) :].tolist(), time.perf_counter() - began

    return {
        "transformers": run,
        "transformers assisted": partial(run, assistant_model=draft),
        "transformers look-up": partial(run, prompt_lookup_num_tokens=10),
    }


# ----------------------------------------------------------------------------------------------------------- measuring


def answer(run, question, tokenizer, template, max_new_tokens, context_size):
    """Feed the turns of ``question`` one by one, the answers so far in context; one record, lists by turn.

    Ends before a turn that leaves no room for an answer in the context.
    """
    messages, record = [], defaultdict(list)
    for turn in question["turns"]:
        prompt = tokenizer.encode_chat([*messages, turn], template)
        if len(prompt) >= context_size:
            break
        tokens, seconds, stats = run(prompt, max_new_tokens)
        messages += [turn, tokenizer.decode(tokens)]
        record["turns"].append(messages[-1])
        record["tokens"].append(tokens)
        record["new_tokens"].append(len(tokens))
        record["wall_time"].append(seconds)
        for key, value in stats.items():
            record[key].append(value)
    return dict(record)


def runners(methods, target, draft, peers, temperature, seed):
    """{name: function of prompt and new tokens -> (tokens, seconds, statistics)} for our methods and the peer's."""

    def ours(options, prompt, max_new_tokens):
        output = generate(target, prompt, draft=draft, temperature=temperature, seed=seed,
                          max_new_tokens=min(max_new_tokens, target.config.max_position_embeddings), **options)  # fmt: skip
        stats = output.stats
        return output.tokens, stats.seconds, {
            "decoding_steps": stats.steps, "accept_lengths": stats.accept_lengths, "exact": output.exact,
            "exit_counts": stats.exit_counts, "accepted": stats.accepted, "draft_levels": stats.draft_levels,
            "draft_forwards": stats.draft_forwards, "draft_seconds": stats.draft_seconds,
            "target_seconds": stats.target_seconds,
        }  # fmt: skip

    def theirs(run, prompt, max_new_tokens):
        return *run(prompt, min(max_new_tokens, target.config.max_position_embeddings - len(prompt)), temperature, seed), {}

    return {name: partial(ours, options) for name, options in methods.items()} | {
        name: partial(theirs, run) for name, run in peers.items()
    }


def measure(target, draft, questions, tokenizer, template, methods, peers, temperature, rounds, max_new_tokens, progress):
    """Yield one record for every round, question and method; the methods take turns at each question.

    Whatever slows the machine for a while thus slows all methods alike. Before the first round each method warms up on
    the first question.
    """
    for round_number in range(rounds + 1):
        for number, question in enumerate(questions if round_number else questions[:1]):
            every = runners(methods, target, draft, peers, temperature, 1000 * round_number + number)
            for name, run in every.items():
                record = answer(run, question, tokenizer, template, max_new_tokens, target.config.max_position_embeddings)
                if round_number and record:
                    yield {"round": round_number, "question_id": question["question_id"], "group": group_of(question),
                           "category": question["category"], "method": name, **record}  # fmt: skip
            progress(len(questions) * (rounds + 1))


# -------------------------------------------------------------------------------------------------------------- tables


def summarise(records):
    """Records of one target and temperature -> {method: {"speedup": median over rounds, "mat": ..., ...}}.

    Speedups are ratios of tokens per second to "ar" in the same round: overall, and by group.
    """
    tokens, seconds = Counter(), Counter()
    for record in records:
        for group in (record["group"], "overall"):
            key = record["method"], group, record["round"]
            tokens[key] += sum(record["new_tokens"])
            seconds[key] += sum(record["wall_time"])
    rounds = sorted({record["round"] for record in records})
    groups = [group for group in (*GROUPS, "overall") if any(record["group"] == group for record in records)] + ["overall"]

    def ratios(method, group):
        keys = [((method, group, number), ("ar", group, number)) for number in rounds]
        return [tokens[a] / seconds[a] * seconds[b] / tokens[b] for a, b in keys if tokens[a] and tokens[b]]

    summary = {}
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        total = lambda key: sum(sum(record.get(key, ())) for record in own)  # noqa: E731, B023
        spread = ratios(method, "overall")
        row = {"speedup": statistics.median(spread), "low": min(spread), "high": max(spread)}
        row["groups"] = {group: statistics.median(ratios(method, group)) for group in groups}
        if "decoding_steps" in own[0]:
            exits = sum((Counter(counts) for record in own for counts in record["exit_counts"]), Counter())
            row["mat"] = total("new_tokens") / total("decoding_steps")
            row["rate"] = total("accepted") / max(1, total("draft_levels"))
            row["forwards"] = total("draft_forwards") / total("decoding_steps")
            row["exits"] = {layer: count / exits.total() for layer, count in sorted(exits.items())}
            row["draft"], row["target"] = (total(f"{part}_seconds") / total("wall_time") for part in ("draft", "target"))
            row["exact"] = all(all(record["exact"]) for record in own)
        summary[method] = row
    return summary


def target_table(summary):
    """One target at one temperature, in full: a list of rows of text."""
    groups = list(next(iter(summary.values()))["groups"])
    lines = [["method", *groups, "spread", "MAT", "accepted", "exits", "draft/target/rest", "exact"]]
    for method, row in summary.items():
        line = [method, *(f"{row['groups'][group]:.2f}" for group in groups), f"{row['low']:.2f}-{row['high']:.2f}"]
        if "mat" in row:
            shares = " ".join(f"{layer}:{share:.0%}" for layer, share in row["exits"].items())
            rest = 1 - row["draft"] - row["target"]
            line += [f"{row['mat']:.2f}", f"{row['rate']:.0%}" if shares else "", shares,
                     f"{row['draft']:.0%}/{row['target']:.0%}/{rest:.0%}", "yes" if row["exact"] else "NO"]  # fmt: skip
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    return lines


def final_table(summaries):
    """{(target, temperature): summary} -> methods x (target, temperature), speedup / MAT, and the mean speedup."""
    lines = [["method", *(f"{target} T={temperature:g}" for target, temperature in summaries), "mean"]]
    for method in dict.fromkeys(method for summary in summaries.values() for method in summary):
        cells, speedups = [], []
        for summary in summaries.values():
            row = summary.get(method)
            cells.append("" if row is None else f"{row['speedup']:.2f}" + (f" / {row['mat']:.2f}" if "mat" in row else ""))
            speedups += [] if row is None else [row["speedup"]]
        lines.append([method, *cells, f"{statistics.mean(speedups):.2f}"])
    return lines


def render(lines, markdown):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


# ------------------------------------------------------------------------------------------------------------- program


def find_target(name):
    """7b, 13b and 70b are the miniatures; anything else is a folder."""
    return WEIGHTS / f"mini-{name}" if name in ("7b", "13b", "70b") else Path(name)


def progress_line(label):
    """A function to call after each question; says on stderr, at most every five seconds, how long it will still take."""
    state = {"done": 0, "began": time.monotonic(), "shown": 0.0}

    def progress(total):
        state["done"] += 1
        now = time.monotonic()
        if now - state["shown"] > 5:
            state["shown"] = now
            left = (now - state["began"]) / state["done"] * (total - state["done"]) / 60
            print(f"{label}: {state['done']}/{total} questions, {left:.1f} min left here", file=sys.stderr, flush=True)

    return progress


def report(args):
    """Measure and print a table for each target and temperature, and one of them all."""
    draft = load_model(args.draft, args.device, args.dtype)
    questions = read_questions(args.questions, args.limit) if args.questions else held_out_questions(args.limit)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {draft.dtype}, {len(questions)} questions, at "
          f"most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds\n")  # fmt: skip
    summaries = {}
    for path in map(find_target, args.targets):
        target, tokenizer = load_model(path, args.device, args.dtype), Tokenizer(path / "tokenizer.model")
        methods = {text: parse_method(text, draft, args.draft, path) for text in args.methods or default_methods(draft)}
        peers = transformers_methods(path, args.draft, args.dtype, args.device) if args.hf else {}
        for temperature in args.temperature:
            progress = progress_line(f"{path.name} T={temperature:g}")
            records = list(measure(target, draft, questions, tokenizer, chat_template(path), methods, peers, temperature,
                                   args.rounds, args.max_new_tokens, progress))  # fmt: skip
            summaries[path.name, temperature] = summary = summarise(records)
            print(f"{path.name}, T = {temperature:g}: speedup over ar\n")
            print(render(target_table(summary), args.markdown) + "\n", flush=True)
    print("speedup over ar / mean accepted tokens\n")
    print(render(final_table(summaries), args.markdown))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m s2d.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=lambda text: text.split(","), default=["7b", "13b", "70b"], metavar="7b,13b,70b|PATH,...")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "mini-draft")
    parser.add_argument("--methods", nargs="+", help="see above; default: all")
    parser.add_argument("--temperature", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--questions", type=Path, help="a file in Spec-Bench's format; default: held-out ones of the corpus")
    parser.add_argument("--limit", type=int, default=2, help="questions of each of the six groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--hf", action="store_true", help="transformers beside ours")
    parser.add_argument("--markdown", action="store_true", help="tables as markdown")
    args = parser.parse_args(arguments)
    try:
        if args.methods and args.methods[0] != "ar":
            args.methods = ["ar", *(method for method in args.methods if method != "ar")]  # what all others are compared to
        report(args)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
