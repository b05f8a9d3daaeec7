"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``. ``--help`` lists every option."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

try:
    from torch.distributed import is_torchelastic_launched

    from s2d import Tokenizer, generate, load_model
    from s2d.chat import chat_template
    from s2d.decision import read_stop
    from s2d.options import (
        DRAFTING,
        METHODS,
        check,
        choose_exits,
        choose_shape,
        refuse_knobs,
        refuse_unused,
    )
    from s2d.program import Parser, one_line, read_stdin, run_program
    from s2d.trace import Recorder, check_page, traced
    from s2d.trace.terminal import Streamed, as_json, colors_of, gain, plan_of, report, speed
    from s2d.tree import Dynamic
    from s2d.tune import tuner_for
    from s2d.weights import DTYPES, placement
    from s2d.weights.config import read_config
    from s2d.weights.get import draft_beside, is_whole, real_folder
except KeyboardInterrupt:  # PyTorch takes seconds to load
    print("run.py: interrupted", file=sys.stderr)
    sys.exit(130)

WEIGHTS = Path(__file__).parent / "weights"
REAL = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}
MINI_EXAMPLE = (
    "Quick one: I want to know two things about Tadastan: its capital and its main export."
)
EXAMPLE = "Explain in a few sentences why the sky is blue."


def main(arguments=None):
    args = parse(arguments)
    return run_program("run.py", run_on_every_rank if is_torchelastic_launched() else run, args)


def run_on_every_rank(args):
    """``run`` in each of the processes that torchrun started, with the target divided among them."""
    if os.environ.get("RANK", "0") != "0":
        args.trace = None  # the first one writes it
    for chosen, what in (
        (args.compile, "--compile"),
        (args.method == "auto", "--method auto"),
        (args.interactive, "--interactive"),
    ):
        if chosen:
            raise ValueError(
                f"{what} is for a target in one process; leave it out, or run without torchrun"
            )
    if args.trace:
        check_page(args.trace)
    from s2d import parallel  # takes a second to import, which a single process need not wait for

    with parallel.joined(args.device) as (mesh, args.device):
        if args.prompt == "-":
            args.prompt = parallel.from_rank_0(read_stdin)
        return run(args, partial(parallel.load_target, mesh=mesh), parallel.from_rank_0)


def run(args, load_target=None, share=None):
    refuse_what_does_not_go_together(args)
    if args.trace:
        check_page(args.trace)
    target_path = find_target(args.target)
    draft_path, args.method = choose_draft(args, target_path)
    refuse_unused(args.method, given_for_drafting(args))
    args.init = args.init or "draft"
    args.target, args.draft = target_path, draft_path
    if args.costs and args.method != "auto":
        raise ValueError("--costs is for --method auto")
    print(one_line(f"loading target {target_path}, draft {draft_path or 'none'}"), file=sys.stderr)
    tokenizer, template = Tokenizer(target_path), None
    if not args.raw:
        template = chat_template(target_path, unknown="vicuna" if args.chat else None)
    prompt = encode_prompt(args, tokenizer, template, target_path)
    load = partial(load_model, compile=args.compile)
    target = (load_target or load)(target_path, args.device, args.dtype)
    draft = load(draft_path, args.device, args.dtype) if draft_path else None
    print(
        f"target {'and draft ' if draft else ''}on {placement(*filter(None, (target, draft)))}",
        file=sys.stderr,
    )
    options = generation_options(args, target, draft, prompt, share)
    if args.interactive:
        converse(args, target, tokenizer, template, options)
    else:
        answer(args, target, tokenizer, prompt, options)


def refuse_what_does_not_go_together(args):
    others = {
        "--json": args.json,
        "--trace": args.trace,
        "--raw": args.raw,
        "--prompt -": args.prompt == "-",
    }
    if args.interactive and (given := [name for name, value in others.items() if value]):
        raise ValueError(f"--interactive does not go with {' and '.join(given)}")


def generation_options(args, target, draft, prompt, share):
    """Everything that ``generate`` is told besides the target and the prompt."""
    stop = read_stop(args.stop, draft) if draft and args.stop is not None else None
    options = dict(
        draft=draft, method=args.method, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_p=args.top_p, seed=args.seed, exits=args.exits, thresholds=args.thresholds,
        draft_length=args.draft_length, tree=tree_shape(args, draft), init=args.init, stop=stop,
        replacement=bool(args.with_replacement), share=share,
    )  # fmt: skip
    if args.method == "auto":
        refuse_knobs(args.thresholds, args.draft_length, options["tree"], args.init, stop)
    if args.method == "auto" or args.interactive:  # before anything is measured, or typed
        check(
            target,
            prompt,
            draft,
            args.method,
            args.max_new_tokens,
            args.temperature,
            args.top_p,
            args.seed,
            args.init,
            stop,
        )
        choose_shape(
            target.config, draft and draft.config, args.method, args.draft_length, options["tree"]
        )
    if args.method == "auto":
        options["tuner"] = tuner_for(
            generate, target, draft, choose_exits(draft.config, "auto", args.exits)[0], args.costs
        )
    return options


def colors_for(args, draft):
    return colors_of(
        choose_exits(draft.config, args.method, args.exits, args.thresholds)[0] if draft else (),
        args.color,
        sys.stdout,
    )


def answer(args, target, tokenizer, prompt, options):
    """One answer, on the terminal or as JSON, and what it took."""
    only_target = options | {"method": "ar", "draft_length": None, "tree": None, "tuner": None}
    demonstration = args.prompt is None and args.method != "ar" and not args.json
    if demonstration:  # the first passes of a process are slow; keep them out of the comparison
        for each in (options, only_target):
            generate(target, prompt, **each | {"max_new_tokens": 8})

    plans, streamed = [], Streamed(tokenizer, sys.stdout, colors_for(args, options["draft"]))
    watch = recorder = (lambda step: plans.append(plan_of(step))) if args.json else streamed
    if args.trace:
        names = {
            "target": args.target.resolve().name,
            "draft": args.draft and args.draft.resolve().name,
        }
        recorder = Recorder(tokenizer, prompt, names, options, watch)
    with traced(args.trace, recorder) if args.trace else nullcontext():
        try:
            output = generate(target, prompt, **options, on_step=recorder)
        except KeyboardInterrupt:
            if streamed.tokens:
                streamed.finish()
            raise
        if args.json:
            print(json.dumps(as_json(output, prompt, tokenizer, plans)), flush=True)
        else:
            streamed.finish()
            print(f"\n{report(output, args.method, streamed.colors)}", flush=True)
        if args.trace and options["share"] is None:
            print("timing the target alone, to compare", file=sys.stderr)
            recorder.time_alone(generate, target, prompt, **only_target)
    if demonstration:
        print("timing the target alone, to compare", file=sys.stderr)
        alone = generate(target, prompt, **only_target)
        ratio = speed(output) / speed(alone)
        print(
            f"target alone   {speed(alone):.1f} tokens/s: {args.method} is {ratio:.2f} times as fast"
        )


def converse(args, target, tokenizer, template, options):
    """A conversation, a line a turn. Ctrl-C ends an answer, Ctrl-D all; what does not fit the context any more is forgotten."""
    print("Ctrl-C ends an answer, Ctrl-D the conversation", file=sys.stderr)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(
            errors="surrogateescape"
        )  # so that a line which is not UTF-8 takes no other with it
    size, messages, said = (
        target.config.max_position_embeddings,
        [],
        args.prompt and args.prompt.strip(),
    )
    colors = colors_for(args, options["draft"])
    while True:
        if (line := said or ask()) is None:
            return
        said, forgotten = None, 0
        if (alone := len(tokenizer.encode_chat([line], template))) >= size:
            print(
                f"that makes {alone} tokens, and the context has room for {size}; say it in fewer words",
                file=sys.stderr,
            )
            continue
        messages.append(line)
        prompt = tokenizer.encode_chat(messages, template)
        while len(messages) > 1 and len(prompt) + min(args.max_new_tokens, size // 4) > size:
            messages, forgotten = messages[2:], forgotten + 1
            prompt = tokenizer.encode_chat(messages, template)
        if forgotten:
            print(
                f"the context of {size} tokens is full: forgotten, turns from the beginning: {forgotten}",
                file=sys.stderr,
            )
        streamed = Streamed(tokenizer, sys.stdout, colors)
        try:
            output = generate(target, prompt, **options, on_step=streamed)
        except KeyboardInterrupt:
            output = None
        streamed.finish()
        messages = (
            [*messages, tokenizer.decode(streamed.tokens)] if streamed.tokens else messages[:-1]
        )
        print(gain(output) if output else "interrupted", file=sys.stderr)
        if len(prompt) + len(streamed.tokens) >= size:
            print(f"the context of {size} tokens is full: the answer ends here", file=sys.stderr)


def ask():
    """A line from the user that says something; None at the end of input."""
    while True:
        try:
            line = input("> ").strip()
            line.encode()
            if line:
                return line
        except (EOFError, RuntimeError):  # the end, or no stdin at all
            print()
            return None
        except KeyboardInterrupt:
            print()
        except UnicodeError:
            print("that line is not UTF-8", file=sys.stderr)


def find_target(name):
    """A size (7b, 13b, 70b: the real checkpoint where it is there, else the miniature), smollm2-..., or a path -> folder."""
    if name in REAL:
        real = WEIGHTS / REAL[name]
        return real if real.is_dir() else WEIGHTS / f"mini-{name}"
    if folder := real_folder(name, WEIGHTS):
        return folder
    if not Path(name).is_dir():
        raise FileNotFoundError(
            f"no model folder at {name}; expected 7b, 13b, 70b, smollm2-135m or a Hugging Face folder"
        )
    return Path(name)


def choose_draft(args, target_path):
    """(folder of the draft or None, method): a method that was asked for needs one; without one and none, the target is alone."""
    if args.method == "ar":
        return None, "ar"
    beside = draft_beside(target_path)
    if (
        args.draft
        or is_whole(beside)
        and read_config(beside).vocab_size == read_config(target_path).vocab_size
    ):
        return args.draft or beside, args.method or "s2d"
    if args.method or args.costs or given_for_drafting(args):
        raise FileNotFoundError(
            f"no draft model at {beside}; name one with --draft, or use --method ar"
        )
    print(
        one_line(f"no draft at {beside}, so the target decodes alone; name one with --draft"),
        file=sys.stderr,
    )
    return None, "ar"


def given_for_drafting(args):
    """The names of the options of drafting that the user gave."""
    return [name for name in DRAFTING if getattr(args, name) is not None]


def encode_prompt(args, tokenizer, template, target_path):
    """The prompt in a chat template, or where there is none continued as it is."""
    example = (
        "?"
        if args.interactive
        else MINI_EXAMPLE
        if target_path.resolve().name.startswith("mini-")
        else EXAMPLE
    )
    text = example if args.prompt is None else read_stdin() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; give some text with --prompt")
    if args.interactive and not template:
        raise ValueError(
            f"{target_path} knows no chat template; a conversation in Vicuna's takes --chat"
        )
    return tokenizer.encode_chat([text.strip()], template) if template else tokenizer.encode(text)


def tree_shape(args, draft):
    """What --tree or the --tree-... options ask for, the draft's own tree for the rest; None leaves it to the method."""
    grown = {"top_k": args.tree_top_k, "depth": args.tree_depth, "size": args.tree_size}
    grown = {name: value for name, value in grown.items() if value is not None}
    if args.tree is not None and grown:
        raise ValueError(
            "--tree gives a fixed shape; it does not go with --tree-top-k, --tree-depth or --tree-size"
        )
    return replace(Dynamic(*draft.config.draft_tree), **grown) if grown and draft else args.tree


def parse(arguments):
    parser = Parser(prog="run.py", description=__doc__.split(":")[0] + ".")
    parser.add_argument(
        "--target", required=True, metavar="7b|13b|70b|smollm2-135m|PATH", help="the large model"
    )
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="PATH",
        help="the sorted draft; default: the one beside the target",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="ar: target alone; sd, mcsd: chain, tree from one exit; s2d "
        "(default, where there is a draft), s2d-tree: from sorted exits; auto: tunes itself",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT|-",
        help="what to say to the model, - reads stdin; default: an example",
    )
    said = parser.add_mutually_exclusive_group()
    said.add_argument(
        "--chat",
        action="store_true",
        help="in Vicuna's chat template, if the model's own is not known",
    )
    said.add_argument(
        "--raw", action="store_true", help="in no template: the model continues the text as it is"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="cpu, cuda, cuda:1 ...; auto (default): a GPU if there is one",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="auto: bfloat16 on a GPU, else float32",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the passes first (a minute, later on seconds)",
    )
    parser.add_argument(
        "--exits",
        type=numbers(int),
        metavar="E,E,...",
        help="draft layers to predict after, e.g. 2,3,4",
    )
    parser.add_argument(
        "--thresholds",
        type=numbers(float),
        metavar="C,C,...",
        help="confidence that is enough, each exit",
    )
    parser.add_argument(
        "--draft-length", type=int, metavar="N", help="length of a chain; default: the draft's own"
    )
    parser.add_argument(
        "--tree",
        type=numbers(int),
        metavar="N,N,...",
        help="children of a node, level by level: 4,2,2,1",
    )
    parser.add_argument(
        "--tree-top-k",
        type=int,
        metavar="N",
        help="instead: the tree grows where the draft is confident,",
    )
    parser.add_argument(
        "--tree-depth",
        type=int,
        metavar="N",
        help="N nodes wide and N children each, so many levels deep,",
    )
    parser.add_argument(
        "--tree-size", type=int, metavar="N", help="and the best N nodes of it go to the target"
    )
    parser.add_argument(
        "--with-replacement",
        action="store_const",
        const=True,
        help="sample a node's children with replacement",
    )
    parser.add_argument(
        "--init",
        choices=("draft", "target"),
        help="who gives a tree its first level; default: draft",
    )
    parser.add_argument(
        "--stop",
        metavar="C|FILE",
        help="end a draft where the last exit's confidence is below C, or "
        "where this decision model says so; default: chains by the draft's own C",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="for auto: the table of what passes cost; written if there is "
        "none yet; default: one in your cache directory",
    )
    parser.add_argument("--interactive", action="store_true", help="a conversation, a line a turn")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="text in colours of the exits it came from",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.html",
        help="write the whole answer, step by step, as one page to look at",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    return parser.parse_args(arguments)


def numbers(kind):
    def comma_separated(text):
        return tuple(kind(part) for part in text.split(","))

    comma_separated.__name__ = f"comma-separated {kind.__name__}"  # argparse names it in its error
    return comma_separated


if __name__ == "__main__":
    sys.exit(main())
