"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``.

Five steps: options, load, encode, generate, print. ``--help`` lists every option.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from torch.distributed import is_torchelastic_launched

from s2d import Tokenizer, load_model
from s2d.fast import is_large
from s2d.generate import METHODS, Options, start
from s2d.program import Parser, comma_separated, parse_tree, read_stop, run_program, tell
from s2d.text.chat import chat_template
from s2d.trace.terminal import Streamed, answer_all, as_json, colors_of, report
from s2d.weights import DTYPES, placement
from s2d.weights.config import read_config
from s2d.weights.names import datastore_path, draft_beside, find_target

EXAMPLE = "Explain in a few sentences why the sky is blue."
MINI_EXAMPLE = (
    "Quick one: I want to know two things about Tadastan: its capital and its main export."
)
MAX_ROWS = 17  # of a pass over one prompt and its tree whose cost is asked for


def main(arguments=None):
    program = run_divided if is_torchelastic_launched() else run
    return run_program("run.py", program, arguments)


def run_divided(arguments):
    """``run``, with the target divided among the processes that torchrun started."""
    from s2d.extras.parallel import run_on_rank_0  # takes a second to import
    from s2d.weights.divided import load_part

    return run_on_rank_0(partial(run, arguments), load_part)


def run(arguments, load_target=None):
    """The whole program; ``load_target`` loads the target in the place of ``load_model``."""
    # 1. Options: what cannot be run is refused before a model is loaded.
    args = parse(arguments)
    if args.interactive and (args.prompts or args.json or args.trace):
        raise ValueError("--interactive does not go with --prompts, --json or --trace")
    if args.prompts and (args.prompt or args.trace or args.compile):
        raise ValueError("--prompts does not go with --prompt, --trace or --compile")
    if load_target and (args.prompts or args.compile):
        raise ValueError("torchrun does not go with --prompts or --compile")
    if args.trace and not args.trace.parent.is_dir():
        raise ValueError(f"there is no folder {args.trace.parent} for the page")
    f"{args.prompt}{args.system}".encode()  # raises ValueError: bytes that are not UTF-8
    target_path = find_target(args.target)
    config = read_config(target_path)
    draft_path, datastore, args.exits = choose_draft(args, target_path, config)
    options = read_options(args)
    exits = options.resolved(config, read_config(draft_path) if draft_path else None).exits

    # 2. Load
    tell(f"loading target {target_path}, draft {draft_path or datastore or 'none'}")
    tokenizer, template = Tokenizer(target_path), choose_template(args, target_path)
    load = partial(load_model, compile=args.compile)
    target = (load_target or load)(target_path, args.device, args.dtype)
    draft = load(draft_path, args.device, target.dtype) if draft_path else None
    models = [target, draft] if draft else [target]
    tell(f"target {'and draft ' if draft else ''}on {placement(*models)}")
    if args.stop:
        options = replace(options, stop=read_stop(args.stop, draft))
    if datastore:
        from s2d.extras.datastore import load_datastore

        options = replace(options, datastore=load_datastore(datastore, config))
    if options.method != "ar" and target.device.type == "cpu" and not load_target:
        options = replace(options, **tune(args, options, models))

    # 3. Encode
    def encode(messages):
        if template is None:
            return tokenizer.encode(messages[0])
        return tokenizer.encode_chat([text.strip() for text in messages], template, args.system)

    def begin(prompt, options=options):
        return start(target, prompt, draft, **vars(options))

    # 4. Generate, 5. print
    paths = {"model": target_path, "draft": draft_path}
    about = partial(describe, args, paths, datastore, target)
    colors = colors_of(exits, "auto", sys.stdout)
    if args.interactive:
        from s2d.trace.conversation import converse

        size = config.max_position_embeddings
        room = size - min(args.max_new_tokens, size // 4)
        return converse(begin, tokenizer, encode, room, args.prompt, colors)
    if args.prompts:
        lines = enumerate(args.prompts.read_text(encoding="utf-8").split("\n"), 1)
        prompts = [(f"line {number}", line) for number, line in lines if line.strip()]
        ids = [encode([text]) for _, text in prompts]
        from s2d.extras.many import as_finished

        finished = as_finished(target, ids, draft, batch=args.batch, **vars(options))
        return answer_all(prompts, ids, finished, tokenizer, about if args.json else None)
    prompt = encode([read_prompt(args, target_path)])
    generation = begin(prompt)
    streamed, recorder, page = Streamed(tokenizer, sys.stdout, colors), None, nullcontext()
    if args.trace:
        from s2d.trace.page import traced
        from s2d.trace.record import Recorder

        names = {name: file and file.name for name, file in paths.items()}
        recorder = Recorder(tokenizer, prompt, names, generation)
        page = traced(args.trace, recorder)
    with page:
        try:
            for step in generation:
                if not args.json:
                    streamed.add(step)
                if recorder:
                    recorder.add(step)
        finally:  # after Ctrl-C what there is
            if args.json:
                answer = as_json(generation, prompt, tokenizer, about(generation))
                print(json.dumps(answer, default=str))
            else:
                streamed.finish()
    if args.json:
        return
    print(f"\n{report(generation, colors)}", flush=True)
    if args.prompt is None and options.method != "ar":
        print(compare(partial(begin, prompt), options, generation))


def choose_draft(args, target_path, config):
    """(the draft's folder or None, the file of the datastore or None, exits or None).

    Exit 0 drafts alone where the target has no draft, or has a datastore, unless other exits or
    another draft are asked for.
    """
    folder, exits = args.draft, args.exits
    if args.method == "ar":
        return None, None, exits
    beside, datastore = draft_beside(target_path), datastore_path(target_path)
    if folder is None and (beside / "config.json").is_file():
        folder = beside if read_config(beside).vocab_size == config.vocab_size else None
    if not datastore.is_file() or (0 not in exits if exits else args.draft):
        datastore = None
    if exits is None and not args.draft and (datastore or not folder):
        exits = (0,)
    if exits == (0,):
        return None, datastore, exits
    if not folder:
        raise FileNotFoundError(f"no draft model at {beside}; name one with --draft")
    return folder, datastore, exits


def read_options(args):
    """The Options of a command line, but for the datastore."""
    given = {name: value for name, value in vars(args).items() if hasattr(Options, name)}
    grows = args.exits == (0,) and args.draft_length is None
    given["method"] = args.method or ("s2d-tree" if grows else "s2d")
    given["tree"] = parse_tree(args.tree) if args.tree else None
    given["stop"] = read_stop(args.stop) if args.stop else None
    return Options(**given)


def tune(args, options, models):
    """Pack weights for passes of several rows; options for how many nodes exit 0 alone sends."""
    if args.compile or any(is_large(model) for model in models):
        from s2d.fast.linear import lay_out

        for model in models:
            lay_out(model)
    if options.exits != (0,) or options.stop is not None or options.init != "draft":
        return {}
    from s2d.extras.node_count import options_for
    from s2d.fast.costs import pass_seconds

    batch = args.batch if args.prompts else 1
    costs = pass_seconds(models[0], rows=batch * MAX_ROWS)
    return options_for(costs, batch) if costs else {}


def choose_template(args, target_path):
    """The chat template for the prompt, or None; a line says which."""
    template = None if args.raw else chat_template(target_path)
    if template:
        which = "vicuna" if template == "vicuna" else "the target's own"
        tell(f"chat template: {which} (--raw: none)")
    elif args.interactive or args.system:
        raise ValueError("--interactive and --system need a chat template, and there is none")
    else:
        tell("chat template: none; the model continues the prompt as it is")
    return template


def read_prompt(args, target_path):
    """The text that is to be answered, or an example."""
    if args.prompt is None:
        return MINI_EXAMPLE if target_path.resolve().name.startswith("mini-") else EXAMPLE
    text = sys.stdin.buffer.read().decode() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; give some text with --prompt")
    return text


def describe(args, paths, datastore, target, generation):
    """What ``--json`` says of an answer besides itself: the models and the options in force."""
    options = dict(vars(generation.options), system=args.system, datastore=datastore)
    options |= {"device": target.device, "dtype": str(target.dtype).removeprefix("torch.")}
    if callable(options["stop"]):  # a decision model
        options["stop"] = args.stop
    if isinstance(options["tree"], tuple):
        options["tree"] = {"widths": options["tree"]}
    elif options["tree"]:
        options["tree"] = vars(options["tree"])
    del options["nodes_to_send"]
    first = {name: options.pop(name) for name in ("method", "seed")}
    return paths | first | {"options": options}


def compare(begin, options, generation):
    """How fast an answer was, as a line; where that does not pay, another line says why.

    The target alone and the method take turns on the answer's first tokens, two runs each.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(generation.tokens), max(16, len(generation.tokens) // 4))
    names = "temperature", "top_p", "top_k", "seed"
    alone = Options("ar", **{name: getattr(options, name) for name in names})
    speeds = {"ar": [], options.method: []}
    for each in (alone, options, alone, options):
        again = begin(replace(each, max_new_tokens=count)).finish()
        speeds[each.method].append(count / again.stats.seconds)
    ratio = median(speeds[options.method]) / median(speeds["ar"])
    lines = f"speed          {ratio:.2f} times as fast as the target alone (median of 2 runs each)"
    if ratio < 1:
        stats = again.stats
        right = stats.accepted / max(1, stats.exit_counts.total())
        tokens = stats.mean_accepted_tokens
        lines += f"\nwhy            {right:.0%} of the drafted tokens were right: a step gives "
        lines += f"{tokens:.1f} tokens, and takes {tokens / ratio:.1f} times as long as one alone"
    return lines


def parse(arguments):
    parser = Parser(prog="run.py", description=__doc__.split(":")[0] + ".")
    add = parser.add_argument
    sizes = "7b|13b|70b|smollm2-135m|PATH"
    add("--target", required=True, metavar=sizes, help="the large model")
    beside = "default: the one of its family; exit 0 alone needs none"
    add("--draft", type=Path, metavar="PATH", help=beside)
    methods = "ar: target alone; sd, mcsd: chain, tree from one exit; s2d, s2d-tree: sorted exits"
    add("--method", choices=METHODS, help=methods)
    add("--prompt", metavar="TEXT|-", help="what to say; - reads stdin; default: an example")
    add("--system", metavar="TEXT", help="a system message, where the chat template has one")
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    add("--interactive", action="store_true", help="a conversation")
    add("--prompts", type=Path, metavar="FILE", help="answer each line of a file")
    add("--batch", type=int, default=8, metavar="B", help="how many of --prompts at a time")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the answer ends there")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    nucleus = "sample from the likeliest tokens that together have this probability"
    add("--top-p", type=float, default=1.0, metavar="P", help=nucleus)
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="S", help="one seed, one text")
    papers = "rejection sampling instead, as in the papers"
    add("--rejection", dest="coupled", action="store_false", help=papers)
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1; auto: a GPU if present")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own, if fast")
    add(
        "--compile",
        action="store_true",
        help="compile the passes first (a minute, then seconds; untried on CUDA)",
    )
    layers = "draft layers to predict after, e.g. 2,3,4; 0: the table of what was seen before"
    add("--exits", type=comma_separated(int), metavar="E,E,...", help=layers)
    enough = "confidence that is enough, per exit; default: the draft's own"
    add("--thresholds", type=comma_separated(float), metavar="C,C,...", help=enough)
    add("--draft-length", type=int, metavar="N", help="of a chain; default: the draft's own")
    shapes = "children per level; or a growing tree: top-k x depth x size"
    add("--tree", metavar="4,2,2,1|6x4x60", help=shapes)
    roots = "which model gives a tree its first level"
    add("--init", choices=("draft", "target"), default="draft", help=roots)
    ends = "end a draft where its path is less probable, or where a decision model says so"
    add("--stop", metavar="P|FILE", help=ends)
    add("--json", action="store_true", help="print one JSON object; with --prompts one per line")
    page = "write the whole answer, step by step, as one page"
    add("--trace", type=Path, metavar="FILE.html", help=page)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
