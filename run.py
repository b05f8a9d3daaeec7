"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``.

``--help`` lists every option.
"""

from s2d import Tokenizer, load_model  # first: what Ctrl-C does is said there

# isort: split
import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import is_torchelastic_launched

from s2d.extras.datastore import datastore_path, load_datastore
from s2d.extras.decision import read_stop
from s2d.extras.many import as_finished
from s2d.files import read_text
from s2d.generate import METHODS, TABLE_ALONE, Options, refuse_long, start
from s2d.program import Parser, comma_separated, path, read_stdin, run_program, tell
from s2d.text.chat import choose_template
from s2d.trace import Recorder, check_page, traced
from s2d.trace.conversation import converse
from s2d.trace.record import target_alone
from s2d.trace.several import answer_all
from s2d.trace.terminal import Streamed, announced, as_json, colors_of, report
from s2d.tree import Dynamic
from s2d.weights import DTYPES, check_device, placement
from s2d.weights.config import read_config
from s2d.weights.names import draft_beside, find_target

MINI_EXAMPLE = (
    "Quick one: I want to know two things about Tadastan: its capital and its main export."
)
BATCH = 8  # prompts at a time
EXAMPLE = "Explain in a few sentences why the sky is blue."


def main(arguments=None):
    args = parse(arguments)
    return run_program("run.py", run_on_every_rank if is_torchelastic_launched() else run, args)


def run_on_every_rank(args):
    """``run`` in each of the processes that torchrun started, the target divided among them."""
    for what in ("compile", "interactive", "prompts"):
        if getattr(args, what):
            one = "is for a target in one process; leave it out, or run without torchrun"
            raise ValueError(f"--{what} {one}")
    first = os.environ.get("RANK", "0") == "0"
    if args.trace and first:
        check_page(args.trace)
    from s2d.extras import parallel  # takes a second to import
    from s2d.weights.divided import load_target

    device = check_device(args.device)
    with parallel.joined(device) as mesh:
        own = vars(args) | {"device": device, "trace": args.trace if first else None}
        if args.prompt == "-":
            own["prompt"] = parallel.from_rank_0(read_stdin)
        return run(Namespace(**own), partial(load_target, mesh=mesh))


def run(args, load_target=None):
    """Load what ``args`` ask for, and answer; ``load_target`` stands for ``load_model``."""
    refuse_what_does_not_go_together(args)
    if args.trace:
        check_page(args.trace)
    target_path = find_target(args.target)
    config = read_config(target_path)
    draft_path, store, chosen = choose_draft(args, target_path, config)
    draft_config = read_config(draft_path) if draft_path else None
    options = read_options(args, chosen, draft_config)
    options.plan(config, draft_config)  # what cannot be run is refused before a model is loaded
    tell(f"loading target {target_path}, draft {draft_path or store or 'none'}")
    tokenizer = Tokenizer(target_path)
    template, which = choose_template(target_path, args.raw, args.chat)
    if which:
        tell(which)
    encode = partial(tokenizer.encode_chat, template=template, system=args.system)
    if not template and (args.interactive or args.system is not None):
        what = "a conversation" if args.interactive else "--system"
        raise ValueError(f"{target_path} knows no chat template; {what} in Vicuna's takes --chat")

    def ids_of(text):
        text = text.strip() if template else text
        tokenizer.refuse_longer(text, config.max_position_embeddings)
        return encode([text]) if template else tokenizer.encode(text)

    prompts = read_prompts(args.prompts) if args.prompts else None
    prompt = None if prompts else ids_of(prompt_of(args, target_path))
    if prompt:
        refuse_long(prompt, config)
    load = partial(load_model, compile=args.compile)
    target = (load_target or load)(target_path, args.device, args.dtype)
    draft = load(draft_path, args.device, target.dtype) if draft_path else None
    what = "target and draft" if draft else "target"
    tell(f"{what} on {placement(*filter(None, (target, draft)))}")
    if args.stop:
        options = replace(options, stop=read_stop(args.stop, draft))
    if store:
        options = replace(options, datastore=load_datastore(store, config))
    colors = colors_of(options.plan(config, draft_config).exits, args.color, sys.stdout)

    def begin(prompt, options):
        return start(target, prompt, draft, **vars(options))

    if args.interactive:
        size = config.max_position_embeddings
        sizes = size, min(args.max_new_tokens, size // 4)
        converse(partial(begin, options=options), tokenizer, encode, *sizes, args.prompt, colors)
        return
    about = partial(about_answer, args, target, (target_path, draft_path, store))
    if prompts:
        how = vars(options) | dict(draft=draft, batch=BATCH if args.batch is None else args.batch)
        run_all = partial(as_finished, target, **how)
        shown = tokenizer, about if args.json else None
        return answer_all(args.prompts, prompts, ids_of, options.seed, run_all, *shown)
    answer(args, partial(begin, prompt), tokenizer, prompt, options, colors, about)


def answer(args, begin, tokenizer, prompt, options, colors, about):
    """One answer, on the terminal or as JSON, and what it took.

    ``begin``: Options -> a Generation; ``about``: its Plan -> what there is to say of it.
    """
    alone = target_alone(options)
    demonstration = args.prompt is None and options.method != "ar" and not args.json
    if demonstration:  # the first passes of a process are slow; keep them out of the comparison
        for each in (options, alone):
            begin(options=replace(each, max_new_tokens=8)).finish()
    generation = begin(options=options)
    streamed = Streamed(tokenizer, None if args.json else sys.stdout, colors)
    said = about(generation.plan)
    names = {"target": said["model"], "draft": said["draft"]}
    names = {what: found and Path(found).resolve().name for what, found in names.items()}
    recorder = Recorder(tokenizer, prompt, names, generation.plan) if args.trace else None
    with traced(args.trace, recorder) if recorder else nullcontext():
        try:
            for step in announced(generation, len(prompt)):
                streamed.add(step)
                if recorder:
                    recorder.add(step)
        except KeyboardInterrupt:
            if args.json:
                print(json.dumps(as_json(generation, prompt, tokenizer, said)))
            raise
        finally:
            if generation.tokens:
                streamed.finish()
        if args.json:
            print(json.dumps(as_json(generation, prompt, tokenizer, said)), flush=True)
        else:
            print(f"\n{report(generation, colors)}", flush=True)
        if recorder and not is_torchelastic_launched():
            tell("timing the target alone, to compare")
            recorder.time_alone(begin, alone)
    if demonstration:
        tell("timing the target alone, to compare")
        speed = begin(options=alone).finish().tokens_per_second
        ratio = generation.tokens_per_second / speed
        print(f"target alone   {speed:.1f} tokens/s: {options.method} is {ratio:.2f} times as fast")


def read_prompts(file):
    """[(name, text)] of the prompts in a file: lines, or questions in Spec-Bench's form."""
    if file.suffix == ".jsonl":
        from s2d.bench.specbench import read_questions

        questions = read_questions(file, limit=sys.maxsize)
        return [(f"question {each['question_id']}", each["turns"][0]) for each in questions]
    lines = enumerate(read_text(file).split("\n"), 1)
    return [(f"line {number}", line) for number, line in lines if line.strip()]


def about_answer(args, target, names, plan):
    """What ``--json`` says of an answer besides itself: the models and the options in force."""
    target_path, draft_path, store = (found and str(found) for found in names)
    used = plan.in_force() | {"datastore": store, "system": args.system}
    used |= {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
    used["stop"] = args.stop if used["stop"] is None else used["stop"]
    models = {"model": target_path, "draft": draft_path}
    return models | {name: used.pop(name) for name in ("method", "seed")} | {"options": used}


def refuse_what_does_not_go_together(args):
    others = {"--json": args.json, "--trace": args.trace, "--raw": args.raw}
    others["--prompt -"] = args.prompt == "-"
    alone = {"--prompt": args.prompt is not None, "--interactive": args.interactive}
    alone |= {"--trace": args.trace, "--compile": args.compile}
    if args.prompts and (given := [name for name, value in alone.items() if value]):
        raise ValueError(f"--prompts does not go with {' and '.join(given)}")
    if args.batch is not None and not args.prompts:
        raise ValueError("--batch is for --prompts FILE; leave it out, or give a file of prompts")
    if args.raw and args.system is not None:
        raise ValueError("--raw uses no chat template, so it does not go with --system")
    if args.interactive and (given := [name for name, value in others.items() if value]):
        raise ValueError(f"--interactive does not go with {' and '.join(given)}")
    if args.method == "ar" and args.draft:
        raise ValueError("method ar does not use --draft; leave it out, or use another method")


def read_options(args, chosen, draft_config):
    """The Options of a command line, without what belongs to loaded models."""
    names = "max_new_tokens temperature top_p top_k seed thresholds draft_length init coupled"
    given = {name: getattr(args, name) for name in names.split()} | chosen
    given |= {"tree": tree_shape(args, draft_config), "replacement": args.with_replacement}
    options = Options(**given, stop=args.stop)  # unused options are refused before files are read
    return replace(options, stop=read_stop(args.stop)) if args.stop else options


def tree_shape(args, draft_config):
    """What --tree or the --tree-... options ask for, the draft's own tree for the rest, or None."""
    grown = {"top_k": args.tree_top_k, "depth": args.tree_depth, "size": args.tree_size}
    grown = {name: value for name, value in grown.items() if value is not None}
    if args.tree is not None and grown:
        others = "--tree-top-k, --tree-depth or --tree-size"
        raise ValueError(f"--tree gives a fixed shape; it does not go with {others}")
    own = (draft_config or TABLE_ALONE).draft_tree
    return replace(Dynamic(*own), **grown) if grown else args.tree


def choose_draft(args, target_path, config):
    """(folder of the draft, file of the datastore, or None for either; {method and exits}).

    Exit 0 drafts where there is no draft, or where the target has a datastore, unless ``args`` name
    other exits or another draft.
    """
    exits, method = args.exits, args.method
    if method == "ar":
        return None, None, {"method": method, "exits": exits}
    folder, beside = args.draft, draft_beside(target_path)
    if folder is None and (beside / "config.json").is_file():
        folder = beside if read_config(beside).vocab_size == config.vocab_size else None
    layers = exits[0] > 0 if exits else bool(args.draft)  # and no table
    store = datastore_path(target_path)
    store = store if store.is_file() and not layers else None
    if exits is None and not args.draft and (store or not folder):
        exits = (0,)
        if not folder and not store:
            tell(f"no draft for it at {beside}: drafting from what was seen before (exit 0)")
    if exits == (0,):
        if args.draft:
            raise ValueError("--exits 0 uses no layers of --draft; leave one of them out")
        folder = None
    elif not folder:
        raise FileNotFoundError(f"no draft model at {beside}; name one with --draft")
    grows = exits == (0,) and args.draft_length is None
    return folder, store, {"method": method or ("s2d-tree" if grows else "s2d"), "exits": exits}


def prompt_of(args, target_path):
    """The text that is to be answered, or an example."""
    text = read_stdin() if args.prompt == "-" else args.prompt
    if text is None:
        mini = target_path.resolve().name.startswith("mini-")
        text = "?" if args.interactive else MINI_EXAMPLE if mini else EXAMPLE
    if not text.strip():
        raise ValueError("the prompt is empty; give some text with --prompt")
    return text


def parse(arguments):
    parser = Parser(prog="run.py", description=__doc__.split(":")[0] + ".")
    add = parser.add_argument
    sizes = "7b|13b|70b|smollm2-135m|PATH"
    add("--target", required=True, metavar=sizes, help="the large model")
    beside = "default: the one beside the target; exit 0 alone has none"
    add("--draft", type=path, metavar="PATH", help=beside)
    methods = (
        "ar: target alone; sd, mcsd: chain, tree from one exit; "
        "s2d (default), s2d-tree (default for exit 0 alone): from sorted exits"
    )
    add("--method", choices=METHODS, help=methods)
    add("--prompt", metavar="TEXT|-", help="what to say; - reads stdin; default: an example")
    instruct = "how to answer, where the chat template knows a system message"
    add("--system", metavar="TEXT", help=instruct)
    said = parser.add_mutually_exclusive_group()
    chat = "in Vicuna's chat template, if the model's own is not known"
    said.add_argument("--chat", action="store_true", help=chat)
    raw = "in no template: the model continues the text as it is"
    said.add_argument("--raw", action="store_true", help=raw)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the answer ends there")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    likeliest = "above T = 0: draw from the likeliest tokens that together have this probability"
    add("--top-p", type=float, default=1.0, metavar="P", help=likeliest)
    few = "above T = 0: draw from the K likeliest tokens; 0 (default): all"
    add("--top-k", type=int, default=0, metavar="K", help=few)
    add("--seed", type=int, default=0, metavar="S", help="the same seed, the same text")
    devices = "cpu, cuda, cuda:1 ...; auto (default): a GPU if there is one"
    add("--device", default="auto", metavar="D", help=devices)
    dtypes = "auto (default): the model's own, where the device computes in it, else float32"
    add("--dtype", default="auto", choices=("auto", *DTYPES), help=dtypes)
    add("--compile", action="store_true", help="compile the passes first (a minute, then seconds)")
    layers = "draft layers to predict after, e.g. 2,3,4; 0: what was seen before, no layers"
    add("--exits", type=comma_separated(int), metavar="E,E,...", help=layers)
    enough = "confidence that is enough, for each exit; 0: always; default: the draft's own"
    add("--thresholds", type=comma_separated(float), metavar="C,C,...", help=enough)
    add("--draft-length", type=int, metavar="N", help="of a chain; default: the draft's own")
    widths = "children of a node, level by level: 4,2,2,1"
    add("--tree", type=comma_separated(int), metavar="N,N,...", help=widths)
    add("--tree-top-k", type=int, metavar="N", help="a growing tree: children of a node")
    add("--tree-depth", type=int, metavar="N", help="a growing tree: levels")
    add("--tree-size", type=int, metavar="N", help="a growing tree: nodes sent to the target")
    alike = "sample a node's children with replacement"
    add("--with-replacement", action="store_true", help=alike)
    dice = "above T = 0: the same seed, the same text, whatever drafts"
    add("--coupled", action="store_true", help=dice)
    roots = "who gives a tree its first level; default: draft"
    add("--init", choices=("draft", "target"), default="draft", help=roots)
    ends = (
        "end a draft where its path is less probable than P, or where this decision model says "
        "so; default: the draft's own P for chains; exit 0 alone has its own"
    )
    add("--stop", metavar="P|FILE", help=ends)
    add("--interactive", action="store_true", help="a conversation")
    several = "answer each line of a file, or each question of a Spec-Bench question.jsonl"
    add("--prompts", type=path, metavar="FILE", help=several)
    at_once = f"with --prompts: how many at a time; default: {BATCH}"
    add("--batch", type=int, metavar="B", help=at_once)
    colors = "text in colours of the exits it came from"
    add("--color", choices=("auto", "always", "never"), default="auto", help=colors)
    page = "write the whole answer, step by step, as one page"
    add("--trace", type=path, metavar="FILE.html", help=page)
    json_help = "print one JSON object and nothing else; with --prompts one a line"
    add("--json", action="store_true", help=json_help)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
