"""Every method on every target, beside transformers, as speedups over the target alone measured in the same run.

    python -m s2d.bench                       # three miniature targets, T = 0 and 1
    python -m s2d.bench --hf --markdown       # with transformers' own decoders beside it, as README shows it
    python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision
    python -m s2d.bench sweep --targets 13b   # thresholds, lengths and tree sizes, on training prompts
    python -m s2d.bench gpu                   # full-size shapes with random weights: see gpu.py

A method is a name, or a name with options of ``generate``: lists as 2,3,4, a dynamic tree as 4x8x24 (top_k, depth,
size), ``stop`` as a number, the file of a decision model, or "decision" for the one beside the draft.
"""

import json
import random
import re
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch

from . import gpu
from .check import PASSES, first_difference, observe_pass, verdict
from .decision import read_stop
from .decode import METHODS, generate
from .files import staged_file
from .program import Parser, run_program
from .specbench import corpus_questions, group_of, read_questions, write_answers
from .tables import final_table, render, summarise, target_table
from .tokenizer import Tokenizer, chat_template
from .tree import Dynamic
from .weights import checksum, load_model
from .weights.config import shown

WEIGHTS = Path(__file__).parent.parent / "weights"


# ------------------------------------------------------------------------------------------------------------- methods


def default_methods(draft):
    """Every method, and ``sd`` from each exit of the draft alone."""
    exits = draft.config.exit_layers or (draft.config.num_hidden_layers,)
    return ["ar", *(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def sweep_methods(draft):
    """Settings of s2d and s2d-tree to choose defaults from."""
    exits = len(draft.config.exit_layers)
    thresholds = [",".join([str(t)] * (exits - 1) + ["0"]) for t in (0.5, 0.8, 0.95)]
    lengths = ("6:stop=0", "10:stop=0.4", "10:stop=0.6", "12:stop=0.4", "12:stop=0.5")
    chains = [f"s2d:thresholds={t}:draft_length={n}" for t, n in product(thresholds, lengths)]
    shapes = ("2x6x8", "2x8x12", "3x8x16", "4x8x24", "3x12x32")
    trees = [f"s2d-tree:thresholds={thresholds[1]}:tree={shape}" for shape in shapes]
    return ["ar", *chains, *trees]


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
                beside = draft_path / f"decision-{target_path.name.removeprefix('mini-')}.safetensors"
                options[key] = read_stop(str(beside) if value == "decision" else value, draft)
            else:
                raise ValueError(f"no option {key!r}")
        except TypeError:
            raise ValueError(f"method {text!r}: a dynamic tree is three numbers, such as 4x8x24") from None
        except ValueError as error:
            raise ValueError(f"method {text!r}: {error}") from None
    return options


def transformers_methods(target_path, draft_path, dtype, device):
    """The peer: its greedy or sampling generate, assisted by the same draft, and with prompt look-up."""
    from transformers import LlamaForCausalLM  # measured beside us, not a dependency

    target, draft = (
        LlamaForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval() for path in (target_path, draft_path)
    )

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
        record["prompts"].append(prompt)
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
            "exit_counts": {str(layer): count for layer, count in stats.exit_counts.items()},
            "accepted": stats.accepted, "draft_levels": stats.draft_levels, "draft_forwards": stats.draft_forwards,
            "draft_seconds": stats.draft_seconds, "target_seconds": stats.target_seconds,
        }  # fmt: skip

    def theirs(run, prompt, max_new_tokens):
        return *run(prompt, min(max_new_tokens, target.config.max_position_embeddings - len(prompt)), temperature, seed), {}

    return {name: partial(ours, options) for name, options in methods.items()} | {
        name: partial(theirs, run) for name, run in peers.items()
    }


def measure(target, draft, questions, tokenizer, template, methods, peers, temperature, rounds, max_new_tokens, progress):
    """Yield for each of ``rounds`` (numbers) the list of its records, one for every question and method.

    The methods take turns at each question, so that whatever slows the machine for a while slows all alike, and each time
    in another order, so that none always follows the same one. Before the first round each warms up on the first question.
    """
    for number in (0, *rounds):
        records = []
        for place, question in enumerate(questions if number else questions[:1]):
            seed = 1000 * number + place
            every = runners(methods, target, draft, peers, temperature, seed)
            answers = {}
            for name in random.Random(seed).sample(list(every), len(every)):
                answers[name] = answer(every[name], question, tokenizer, template, max_new_tokens,
                                       target.config.max_position_embeddings)  # fmt: skip
            records += [
                {"round": number, "question_id": question["question_id"], "group": group_of(question),
                 "category": question["category"], "method": name, **answers[name]}
                for name in every if answers[name]
            ]  # fmt: skip
            progress(1 + len(rounds) * len(questions))
        if number:
            yield records


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


class Store:
    """All records so far, in memory and, with a folder, in its records.jsonl, to which whole rounds are added.

    That file begins with a line of the settings they were made with. A line that a kill cut short is dropped.
    """

    def __init__(self, folder, settings, resume):
        self.records, self.settings, self.file = [], settings, folder and folder / "records.jsonl"
        if folder and folder.exists() and not resume and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; go on with --resume, or name another folder")
        if resume and self.file.is_file():
            self._read()

    def _read(self):
        text = self.file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        first, *lines = whole.split("\n")[:-1] or [""]
        try:
            found, self.records = json.loads(first), [record for line in lines for record in json.loads(line)]
        except ValueError:
            raise ValueError(f"{self.file} is damaged; name another folder") from None
        found = found if isinstance(found, dict) else {}
        changed = [(key, found.get(key), value) for key, value in self.settings.items() if found.get(key) != value]
        if different := [f"{key} {shown(before)}, not {shown(now)}" for key, before, now in changed]:
            raise ValueError(f"{self.file} was made with other settings: {'; '.join(different)}")
        if whole != text:
            with staged_file(self.file) as stage:
                stage.write_text(whole, encoding="utf-8")

    def add(self, records):
        self.records += records
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(json.dumps(self.settings) + "\n")
                file.write(json.dumps(records, ensure_ascii=False) + "\n")

    def of(self, target, temperature, weights=None):
        """The records of a target, by its name and, if given, the checksum of its weights."""
        found = [r for r in self.records if (r["target"], r["temperature"]) == (target, temperature)]
        if weights and any(record["weights"] != weights for record in found):
            raise ValueError(f"{self.file} has records of another {target}, whose weights were different")
        return found


def names_of(paths):
    """What the folders are called in tables: their last part, or all of it where two would be called alike."""
    return [path.name if [p.name for p in paths].count(path.name) == 1 else str(path) for path in paths]


def run(args):
    """Measure, then print a table for each target and temperature and one of them all. Returns the exit code."""
    if args.resume and not args.out:
        raise ValueError("--resume needs the --out folder to go on from")
    draft = load_model(args.draft, args.device, args.dtype)
    sweep = args.program == "sweep"
    names = args.methods or (sweep_methods(draft) if sweep else default_methods(draft))
    names = ["ar", *(name for name in names if name != "ar")]  # what all others are compared to
    questions = (read_questions(args.questions, args.limit) if args.questions
                 else corpus_questions("train" if sweep else "held-out", args.limit))  # fmt: skip
    settings = {"methods": names, "questions": questions, "max_new_tokens": args.max_new_tokens, "hf": args.hf,
                "draft": checksum(draft), "device": args.device, "dtype": str(draft.dtype),
                "threads": torch.get_num_threads(), "torch": torch.__version__}  # fmt: skip
    paths = [find_target(name) for name in args.targets]
    methods = {path: {text: parse_method(text, draft, args.draft, path) for text in names} for path in paths}
    targets, store, code = dict(zip(names_of(paths), paths)), Store(args.out, settings, args.resume), 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {draft.dtype}, {len(questions)} questions, at "
          f"most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds\n")  # fmt: skip
    try:
        for name, path in targets.items():
            measure_target(args, name, path, draft, methods[path], questions, store)
            if args.check and 0.0 in args.temperature:
                code = max(code, check(name, path, draft, store.of(name, 0.0), methods[path], args))
    except KeyboardInterrupt:
        print("interrupted: what follows is of the rounds that were finished", file=sys.stderr)
        code = 130
    show(store, list(targets), args)
    return code


def measure_target(args, name, path, draft, methods, questions, store):
    """All rounds of one target that ``store`` lacks, at every temperature."""
    target, tokenizer = load_model(path, args.device, args.dtype), Tokenizer(path / "tokenizer.model")
    peers = transformers_methods(path, args.draft, target.dtype, target.device) if args.hf else {}
    weights = checksum(target)
    for temperature in args.temperature:
        done = {record["round"] for record in store.of(name, temperature, weights)}
        rounds = [number for number in range(1, args.rounds + 1) if number not in done]
        progress = progress_line(f"{name} T={temperature:g}")
        for records in measure(target, draft, questions, tokenizer, chat_template(path), methods, peers,
                               temperature, rounds, args.max_new_tokens, progress):  # fmt: skip
            store.add([{"target": name, "weights": weights, "temperature": temperature, **r} for r in records])


def check(name, path, draft, records, methods, args):
    """Greedy answers and passes of every method against the target alone, see check.py; 1 where there is a bug."""
    alone = {record["question_id"]: record for record in records if record["method"] == "ar"}
    target, found, code = load_model(path, args.device, args.dtype), {}, 0
    for method, options in ((name, options) for name, options in methods.items() if name != "ar"):
        own, differences = [record for record in records if record["method"] == method], []
        for record in own:
            expected = alone[record["question_id"]]
            turns = zip(expected["prompts"], expected["tokens"], record["tokens"])
            different = filter(None, (first_difference(target, *turn) for turn in turns))
            differences += islice(different, 1)  # from the first different answer on, later turns have another context
        prompts = [record["prompts"][0] for record in alone.values()][:PASSES]
        passes = [observe_pass(target, draft, prompt, options, number) for number, prompt in enumerate(prompts)]
        found[method] = passes, differences, all(all(record["exact"]) for record in own)
    del target  # one model at a time
    precise = load_model(path, args.device, "float64")
    for method, (passes, differences, exact) in found.items():
        text, good = verdict(precise, passes, differences)
        print(f"{name} {method}: " + (text if exact else f"not a lossless method; {text}"), flush=True)
        code = max(code, int(good is False and exact))
    print()
    return code


def show(store, targets, args):
    """All tables, and Spec-Bench's answer files."""
    summaries = {}
    for target, temperature in product(targets, args.temperature):
        if records := store.of(target, temperature):
            summaries[target, temperature] = summary = summarise(records)
            if args.program == "sweep":
                summary = dict(sorted(summary.items(), key=lambda item: -item[1]["speedup"]))
            print(f"{target}, T = {temperature:g}: speedup over ar\n\n{render(target_table(summary), args.markdown)}\n")
            for method in summary if args.out else ():
                last = max(record["round"] for record in records)
                own = [record for record in records if record["method"] == method and record["round"] == last]
                name = re.sub(r"[^\w.,]+", "-", f"{target}-T{temperature:g}-{method}")
                write_answers(args.out / f"{name}.jsonl", name, own)
    if summaries:
        print(f"speedup over ar / mean accepted tokens\n\n{render(final_table(summaries), args.markdown)}")


def temperatures(text):
    return [float(temperature) for temperature in text.split(",")]


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["gpu"]:
        return run_program("bench gpu", gpu.report, gpu.parse(arguments[1:]))
    parser = Parser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?", choices=["sweep"], help="try many settings on training prompts instead")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=["7b", "13b", "70b"],
                        metavar="7b,13b,70b|PATH,...")  # fmt: skip
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "mini-draft")
    parser.add_argument("--methods", nargs="+", help="see above; default: all")
    parser.add_argument("--temperature", type=temperatures, default=[0.0, 1.0], metavar="T,T,...")
    parser.add_argument("--questions", type=Path, help="a file in Spec-Bench's format; default: held-out ones of the corpus")
    parser.add_argument("--limit", type=int, default=2, help="questions of each of the six groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--hf", action="store_true", help="transformers beside ours")
    parser.add_argument("--check", action="store_true", help="compare greedy answers with ar's; exit code 1 for a bug")
    parser.add_argument("--markdown", action="store_true", help="tables as markdown")
    parser.add_argument("--out", type=Path, help="folder for all records and for Spec-Bench's answer files")
    parser.add_argument("--resume", action="store_true", help="go on from the rounds that are in --out")
    return run_program("bench", run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
