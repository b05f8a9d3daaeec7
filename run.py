"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``.

``--help`` lists every option.
"""

from s2d import Tokenizer, generate, load_model  # first: what Ctrl-C does is said there

# isort: split
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from s2d.extras.decision import read_stop
from s2d.generate import METHODS, TABLE_ALONE, choose_exits, start
from s2d.program import Parser, comma_separated, path, read_stdin, run_program, tell
from s2d.text.chat import choose_template
from s2d.trace import Recorder, check_page, in_force, traced
from s2d.trace.conversation import converse
from s2d.trace.terminal import Streamed, announced, as_json, colors_of, report
from s2d.tree import Dynamic
from s2d.weights import DTYPES, own_device, placement
from s2d.weights.config import read_config, unread_settings
from s2d.weights.datastore import find_datastore, open_datastore
from s2d.weights.get import draft_beside, find_target, is_whole

ALL_DRAFTS = ("draft", "exits", "init", "stop")
CHAINS = (*ALL_DRAFTS, "draft_length")
TREES = (*ALL_DRAFTS, "tree", "tree_top_k", "tree_depth", "tree_size", "with_replacement")
TAKEN = {  # method -> the options of drafting that it takes
    "ar": (),
    "sd": CHAINS,
    "mcsd": TREES,
    "s2d": (*CHAINS, "thresholds"),
    "s2d-tree": (*TREES, "thresholds"),
}
DRAFTING = tuple(dict.fromkeys(name for taken in TAKEN.values() for name in taken))
MINI_EXAMPLE = (
    "Quick one: I want to know two things about Tadastan: its capital and its main export."
)
EXAMPLE = "Explain in a few sentences why the sky is blue."


def main(arguments=None):
    from torch.distributed import is_torchelastic_launched

    args = parse(arguments)
    return run_program("run.py", run_on_every_rank if is_torchelastic_launched() else run, args)


def run_on_every_rank(args):
    """``run`` in each of the processes that torchrun started, the target divided among them."""
    if os.environ.get("RANK", "0") != "0":
        args.trace = None  # the first one writes it
    for chosen, what in ((args.compile, "--compile"), (args.interactive, "--interactive")):
        if chosen:
            raise ValueError(
                f"{what} is for a target in one process; leave it out, or run without torchrun"
            )
    if args.trace:
        check_page(args.trace)
    from s2d.extras import parallel  # takes a second to import
    from s2d.weights.divided import load_target

    args.device = own_device(args.device)
    with parallel.joined(args.device) as mesh:
        if args.prompt == "-":
            args.prompt = parallel.from_rank_0(read_stdin)
        return run(args, partial(load_target, mesh=mesh))


def run(args, load_target=None):
    """Load what ``args`` ask for, and answer; ``load_target`` stands for ``load_model``."""
    refuse_what_does_not_go_together(args)
    if args.trace:
        check_page(args.trace)
    target_path = find_target(args.target)
    asked = given_for_drafting(args)
    config = read_config(target_path)
    draft_path, store = choose_draft(args, target_path, config)
    refuse_unused(args.method, asked)
    tell(f"loading target {target_path}, draft {draft_path or store or 'none'}")
    tokenizer = Tokenizer(target_path)
    template, which = choose_template(target_path, args.raw, args.chat)
    for line in filter(None, (which, unread_settings(target_path))):
        tell(line)
    encode = partial(tokenizer.encode_chat, template=template, system=args.system)
    prompt = encode_prompt(args, tokenizer, encode if template else None, target_path, config)
    load = partial(load_model, compile=args.compile)
    target = (load_target or load)(target_path, args.device, args.dtype, config=config)
    dtype = str(target.dtype).removeprefix("torch.")
    draft = load(draft_path, args.device, dtype) if draft_path else None
    what = "target and draft" if draft else "target"
    tell(f"{what} on {placement(*filter(None, (target, draft)))}")
    options = generation_options(args, draft)
    if store:
        options["datastore"] = open_datastore(store, target_path, target.config)
    exits = choose_exits(target, draft, args.method, args.exits, args.thresholds)[0]
    colors = colors_of(exits, args.color, sys.stdout)
    if args.interactive:
        start(target, prompt, **options)  # what cannot be run is refused before anything is typed
        converse(target, tokenizer, encode, options, args.prompt, colors)
        return
    recorder, names = None, {"target": target_path, "draft": draft_path}
    if args.trace:
        shown = {what: found and found.resolve().name for what, found in names.items()}
        recorder = Recorder(target, tokenizer, prompt, shown, options)
    about = about_answer(args, target, options, names | {"datastore": store})
    with traced(args.trace, recorder) if args.trace else nullcontext():
        answer(args, target, tokenizer, prompt, options, colors, recorder, about)


def about_answer(args, target, options, names):
    """What ``--json`` says of an answer besides itself: the models and the options in force."""
    used = in_force(target, options) | {name: found and str(found) for name, found in names.items()}
    used |= {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
    used |= {"stop": args.stop if callable(used["stop"]) else used["stop"], "system": args.system}
    about = {"model": used.pop("target")}
    about |= {name: used.pop(name) for name in ("draft", "method", "seed")}
    return about | {"options": used}


def answer(args, target, tokenizer, prompt, options, colors, recorder, about):
    """One answer, on the terminal or as JSON, and what it took."""
    only_target = {name: options[name] for name in ("temperature", "top_p", "top_k", "seed")}
    only_target |= {"method": "ar", "max_new_tokens": args.max_new_tokens}
    demonstration = args.prompt is None and args.method != "ar" and not args.json
    if demonstration:  # the first passes of a process are slow; keep them out of the comparison
        for each in (options, only_target):
            generate(target, prompt, **each | {"max_new_tokens": 8})
    generation = start(target, prompt, **options)
    streamed = Streamed(tokenizer, None if args.json else sys.stdout, colors)
    try:
        for step in announced(generation, len(prompt)):
            streamed.add(step)
            if recorder:
                recorder.add(step)
    except KeyboardInterrupt:
        if args.json:
            print(json.dumps(as_json(generation, prompt, tokenizer, about)))
        raise
    finally:
        if generation.tokens:
            streamed.finish()
    if args.json:
        print(json.dumps(as_json(generation, prompt, tokenizer, about)), flush=True)
    else:
        print(f"\n{report(generation, args.method, colors)}", flush=True)
    if recorder and target.mesh is None:
        tell("timing the target alone, to compare")
        recorder.time_alone(target, prompt, **only_target)
    if demonstration:
        tell("timing the target alone, to compare")
        alone = generate(target, prompt, **only_target)
        ratio = generation.tokens_per_second / alone.tokens_per_second
        print(
            f"target alone   {alone.tokens_per_second:.1f} tokens/s: "
            f"{args.method} is {ratio:.2f} times as fast"
        )


def refuse_what_does_not_go_together(args):
    others = {"--json": args.json, "--trace": args.trace, "--raw": args.raw}
    others["--prompt -"] = args.prompt == "-"
    if args.raw and args.system is not None:
        raise ValueError("--raw uses no chat template, so it does not go with --system")
    if args.interactive and (given := [name for name, value in others.items() if value]):
        raise ValueError(f"--interactive does not go with {' and '.join(given)}")


def given_for_drafting(args):
    """The names of the options of drafting that the user gave."""
    return [name for name in DRAFTING if getattr(args, name) is not None]


def generation_options(args, draft):
    """Everything that ``generate`` is told besides the target and the prompt."""
    names = "method max_new_tokens temperature top_p top_k seed exits thresholds draft_length"
    options = {name: getattr(args, name) for name in names.split()}
    options |= {"draft": draft, "tree": tree_shape(args, draft), "init": args.init or "draft"}
    options["stop"] = None if args.stop is None else read_stop(args.stop, draft)
    return options | {"replacement": bool(args.with_replacement)}


def refuse_unused(method, given):
    """ValueError where ``given``, names in DRAFTING, has an option ``method`` does not take."""
    for name in given:
        if name not in TAKEN[method]:
            others = " or ".join(other for other in TAKEN if name in TAKEN[other])
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"--method {method} does not use {option}; leave it out, or use {others}"
            )


def tree_shape(args, draft):
    """What --tree or the --tree-... options ask for, the draft's own tree for the rest, or None."""
    grown = {"top_k": args.tree_top_k, "depth": args.tree_depth, "size": args.tree_size}
    grown = {name: value for name, value in grown.items() if value is not None}
    if args.tree is not None and grown:
        raise ValueError(
            "--tree gives a fixed shape; "
            "it does not go with --tree-top-k, --tree-depth or --tree-size"
        )
    config = draft.config if draft else TABLE_ALONE
    return replace(Dynamic(*config.draft_tree), **grown) if grown else args.tree


def choose_draft(args, target_path, config):
    """(folder of the draft, file of the datastore), or None for either; sets method and exits.

    Exit 0 drafts where there is no draft, or where the target or the draft beside it has a
    datastore, unless ``args`` name other exits or another draft.
    """
    if args.method == "ar":
        return None, None
    folder, beside = args.draft, draft_beside(target_path)
    if folder is None and is_whole(beside):
        same = read_config(beside).vocab_size == config.vocab_size
        folder = beside if same else None
    layers = args.exits[0] > 0 if args.exits else bool(args.draft)  # and no table
    store = None if layers else find_datastore(target_path, folder or beside, config)
    if args.exits is None and not args.draft and (store or not folder):
        args.exits = (0,)
        if not folder:
            tell(f"no draft for it at {beside}: drafting from what was seen before (exit 0)")
    if args.exits and args.exits[0] == 0:
        if args.draft and len(args.exits) == 1:
            raise ValueError("--exits 0 uses no layers of --draft; leave one of them out")
        folder = folder if len(args.exits) > 1 else None
        chain = len(args.exits) > 1 or args.draft_length is not None
        args.method = args.method or ("s2d" if chain else "s2d-tree")
    else:
        store, args.method = None, args.method or "s2d"
    if not folder and args.exits != (0,):
        raise FileNotFoundError(f"no draft model at {beside}; name one with --draft")
    return folder, store


def encode_prompt(args, tokenizer, encode, target_path, config):
    """The prompt in a chat template, by ``encode``; without one, it is continued as it is."""
    if args.prompt == "-":
        args.prompt = read_stdin()
    example = MINI_EXAMPLE if target_path.resolve().name.startswith("mini-") else EXAMPLE
    if args.interactive:
        example = "?"
    text = example if args.prompt is None else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; give some text with --prompt")
    text = text.strip() if encode else text
    tokenizer.refuse_longer(text, config.max_position_embeddings)
    if not encode and (args.interactive or args.system is not None):
        what = "a conversation" if args.interactive else "--system"
        raise ValueError(f"{target_path} knows no chat template; {what} in Vicuna's takes --chat")
    return encode([text]) if encode else tokenizer.encode(text)


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
    add("--with-replacement", action="store_const", const=True, help=alike)
    roots = "who gives a tree its first level; default: draft"
    add("--init", choices=("draft", "target"), help=roots)
    ends = (
        "end a draft where its path is less probable than P, or where this decision model says "
        "so; default: the draft's own P for chains; exit 0 alone has its own"
    )
    add("--stop", metavar="P|FILE", help=ends)
    add("--interactive", action="store_true", help="a conversation")
    colors = "text in colours of the exits it came from"
    add("--color", choices=("auto", "always", "never"), default="auto", help=colors)
    page = "write the whole answer, step by step, as one page"
    add("--trace", type=path, metavar="FILE.html", help=page)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
