"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import is_torchelastic_launched

from s2d import Tokenizer, load_model
from s2d.fast import is_large
from s2d.generate import METHODS, Options, generate, start
from s2d.program import Parser, comma_separated, parse_tree, read_stop, run_program, tell
from s2d.text.chat import chat_template
from s2d.trace.terminal import Streamed, answer_file, as_json, compare, report
from s2d.weights import DTYPES, placement
from s2d.weights.config import read_config
from s2d.weights.names import datastore_path, draft_beside, find_target

EXAMPLE = "Explain in a few sentences why the sky is blue."
MINI_EXAMPLE = "I want to know two things about Tadastan: its capital and its main export."


def main(arguments=None):
    if not is_torchelastic_launched():
        return run_program("run.py", run, arguments)
    from s2d.extras.parallel import run_on_rank_0  # takes a second to import
    from s2d.weights.divided import load_part

    return run_program("run.py", run_on_rank_0, partial(run, arguments), load_part)


def run(arguments, load_target=None):
    """The whole program; ``load_target`` loads a target that is divided among processes."""
    # 1. Options: what cannot be run is refused before a model is loaded.
    args = parse(arguments)
    if load_target and args.prompts:
        raise ValueError("torchrun does not go with --prompts")
    f"{args.prompt}{args.system}".encode()  # raises ValueError: bytes that are not UTF-8
    args.target = find_target(args.target)
    choose_draft(args)
    config = read_config(args.target)
    given = {name: value for name, value in vars(args).items() if hasattr(Options, name)}
    options = Options(**given | {"stop": read_stop(args.stop) if args.stop else None})
    options.resolved(config, args.draft and read_config(args.draft))

    # 2. Load
    tell(f"loading target {args.target}, draft {args.draft or args.datastore or 'none'}")
    tokenizer = Tokenizer(args.target)
    template = None if args.raw else chat_template(args.target)
    if template is None and (args.interactive or args.system):
        raise ValueError("--interactive and --system need a chat template, and there is none")
    load = partial(load_model, compile=args.compile)
    target = (load_target or load)(args.target, args.device, args.dtype)
    draft = load(args.draft, args.device, target.dtype) if args.draft else None
    tell(f"target on {placement(target)}")
    if args.stop:
        options = replace(options, stop=read_stop(args.stop, draft))
    if args.datastore:
        from s2d.extras.datastore import load_datastore

        options = replace(options, datastore=load_datastore(args.datastore, config))
    if options.method != "ar" and not load_target:
        options = tune(args, options, [target, draft] if draft else [target])

    # 3. Encode
    def encode(messages):
        if template is None:
            return tokenizer.encode(messages[0])
        return tokenizer.encode_chat([text.strip() for text in messages], template, args.system)

    # 4. Generate
    begin = partial(start, target, draft=draft, **vars(options))
    if args.interactive:
        from s2d.trace.conversation import converse

        return converse(begin, tokenizer, encode, config.max_position_embeddings, args.prompt)
    if args.prompts:
        from s2d.extras.many import as_finished

        begin_all = partial(as_finished, target, draft=draft, batch=args.batch, **vars(options))
        return answer_file(begin_all, tokenizer, encode, args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if text is None:
        text = MINI_EXAMPLE if args.target.resolve().name.startswith("mini-") else EXAMPLE
    prompt = encode([text])
    generation = begin(prompt)
    streamed = Streamed(tokenizer, sys.stdout, generation.options.exits)
    if args.trace:
        from s2d.trace.page import write_page
        from s2d.trace.record import Recorder

        names = {"target": args.target.name, "draft": args.draft and args.draft.name}
        recorder = Recorder(tokenizer, prompt, names, generation)
    for step in generation:
        if args.trace:
            recorder.add(step)
        if not args.json:
            streamed.add(step)

    # 5. Print
    if args.json:
        print(as_json(generation, tokenizer, args))
    else:
        streamed.finish()
        print(f"\n{report(generation, streamed.colors)}", flush=True)
        if args.prompt is None and options.method != "ar":
            print(compare(partial(generate, target, prompt, draft), options, generation))
    if args.trace:
        write_page(recorder.data(), args.trace)


def choose_draft(args):
    """Choose what drafts: exit 0 alone where the target has a datastore, or no draft beside it."""
    args.datastore = None
    if args.method == "ar":
        args.draft = None
        return
    beside, datastore = draft_beside(args.target), datastore_path(args.target)
    if args.exits is None and args.draft is None and (datastore.is_file() or not beside.is_dir()):
        args.exits = (0,)
    if args.exits and 0 in args.exits and datastore.is_file():
        args.datastore = datastore
    alone = args.exits == (0,)
    args.draft = None if alone else args.draft or beside
    grows = alone and args.draft_length is None and (args.coupled or args.tree)
    args.method = args.method or ("s2d-tree" if grows else "s2d")


def tune(args, options, models):
    """Pack weights for passes of several rows, and choose how many nodes exit 0 alone sends."""
    if args.compile or any(is_large(model) for model in models):
        from s2d.fast.linear import lay_out

        for model in models:
            lay_out(model)
    if options.exits != (0,) or options.stop is not None or options.init != "draft":
        return options
    from s2d.extras.node_count import MAX_ROWS, options_for
    from s2d.fast.costs import pass_seconds

    batch = args.batch if args.prompts else 1
    costs = pass_seconds(models[0], rows=batch * MAX_ROWS)
    return replace(options, **options_for(costs, batch))


def parse(arguments):
    parser = Parser(prog="run.py", description="Generate text with Sorted Speculative Decoding.")
    add = parser.add_argument
    add("--target", required=True, help="7b, 13b, 70b, smollm2-135m or a folder: the large model")
    add("--draft", type=Path, help="a folder; default: the draft of the target's family, or exit 0")
    add("--method", choices=METHODS, help="ar: no draft; sd, mcsd: one exit; s2d...: sorted")
    add("--prompt", metavar="TEXT|-", help="what to say; - reads stdin; default: an example")
    add("--system", metavar="TEXT", help="a system message, where the chat template has one")
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--interactive", action="store_true", help="a conversation")
    one_of("--prompts", type=Path, metavar="FILE", help="answer each line of a file")
    add("--batch", type=int, default=8, metavar="B", help="how many of --prompts at a time")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the answer ends there")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; 1: all tokens")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="S", help="one seed, one text")
    add("--rejection", dest="coupled", action="store_false", help="sampling as in the papers")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1; auto: a GPU if present")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own, if fast")
    add("--compile", action="store_true", help="compiled passes, after a minute; untried on CUDA")
    add("--exits", type=comma_separated(int), metavar="E,E", help="draft layers; 0: n-gram table")
    add("--thresholds", type=comma_separated(float), help="confidence that is enough, per exit")
    add("--draft-length", type=int, metavar="N", help="of a chain; default: the draft's own")
    add("--tree", type=parse_tree, metavar="SHAPE", help="4,2,2,1: widths; 6x4x60: a growing tree")
    add("--init", choices=("draft", "target"), default="draft", help="source of a tree's roots")
    add("--stop", metavar="P|FILE", help="least probability of a path; or a decision model")
    add("--json", action="store_true", help="print one JSON object; with --prompts one per line")
    one_of("--trace", type=Path, metavar="FILE.html", help="the answer, step by step, as a page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
