"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from s2d import __version__
from s2d.cli.ending import run_program

# The options that say what drafts, and how.
DRAFTING = "draft exits thresholds draft_length tree stop rule init decision datastore".split()
MAX_BATCH = 1024  # prompts in a pass


def parse(arguments: list[str] | None = None) -> Namespace:
    from s2d.cli.program import Parser, add_drafting_options, file_name, named_value, whole

    parser = Parser(
        prog="run.py",
        usage="python run.py --target MODEL [options]",
        description="Generate text with Sorted Speculative Decoding. (Defaults are in brackets.)",
        epilog='Example: python run.py --target 13b --prompt "Tell me a story." --temperature 1',
    )
    parser.add_argument("--version", action="version", version=f"s2d {__version__}")

    add = parser.add_argument_group("model").add_argument
    words = "7b, 13b, 70b, smollm2-135m or a folder"
    add("--target", required=True, type=file_name, metavar="MODEL", help=words)
    words = "cpu, cuda, cuda:1, mps ... (auto: CUDA if it is there, else cpu)"
    add("--device", default="auto", metavar="D", help=words)
    dtypes = "auto", "float64", "float32", "float16", "bfloat16"
    words = f"{', '.join(dtypes)} (auto: the model's own, or float32)"
    add("--dtype", default="auto", choices=dtypes, metavar="D", help=words)

    words = "What is not given is as the draft's config.json says."
    add_drafting_options(parser.add_argument_group("drafting", words))

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, metavar="T", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling (1: all tokens)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest (0: all)")
    add("--seed", type=int, metavar="S", help="one seed, one text (0)")
    add("--paper", action="store_true", help="as in the S2D paper: --rejection, and --stop (0)")

    group = parser.add_argument_group("input")
    add = group.add_mutually_exclusive_group().add_argument
    words = "what to say; - reads stdin (an example)"
    add("--prompt", action="append", metavar="TEXT", help=words)  # a list: a second one is refused
    add("--prompts", type=file_name, metavar="FILE", help="answer each line of a file")
    add("--interactive", action="store_true", help="a conversation")
    add = group.add_argument
    words = "how many of --prompts share a pass (8)"
    add("--batch", type=whole(1, MAX_BATCH), metavar="B", help=words)
    add("--system", metavar="TEXT", help="a system message, if the chat template has one")
    several = {"action": "append", "default": []}
    words = "for the chat template, such as enable_thinking=false; several times"
    add("--template-option", type=named_value, metavar="NAME=VALUE", help=words, **several)
    add("--raw", action="store_true", help="no chat template: the model continues the text")

    add = parser.add_argument_group("output").add_argument
    add("--max-new-tokens", type=int, metavar="N", help="per answer (128)")
    words = "an answer ends before this text; several times"
    add("--stop-at", dest="stop_strings", metavar="TEXT", help=words, **several)
    add(
        "--compare", action="store_true", help="time the target alone, too (always for the example)"
    )
    add("--json", action="store_true", help="a JSON object per answer")
    words = "the answer, step by step, as a page"
    add("--trace", type=file_name, metavar="FILE.html", help=words)

    args = parser.parse_args(arguments)
    refuse_mistakes(args, parser)
    if args.prompt:
        args.prompt = args.prompt[0]
    if args.paper:
        args.rule = "rejection"
        if args.stop is None:
            args.stop = 0.0
    return args


def refuse_mistakes(args: Namespace, parser: ArgumentParser) -> None:
    """Refuse an option that would do nothing beside others."""
    many = args.prompts or args.interactive
    single = args.trace or args.compare
    is_text = args.interactive or args.compare
    drafts = args.paper or args.compare or any(getattr(args, name) is not None for name in DRAFTING)
    messages = {
        "--prompt is given twice; --prompts FILE answers several": len(args.prompt or ()) > 1,
        "--batch is for --prompts": args.batch and not args.prompts,
        "--trace and --compare are for a single prompt": single and many,
        "--bitwise goes with one prompt in a pass": args.bitwise and args.prompts,
        "--json goes neither with --interactive nor with --compare": args.json and is_text,
        "--method ar does not draft, and is the target alone": args.method == "ar" and drafts,
    }
    for message, is_made in messages.items():
        if is_made:
            parser.error(message)


def main(arguments: list[str] | None = None) -> int:
    return run_program("run.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    """The exit code. Mistakes in the options, and --help, end the program in ``parse``."""
    args = parse(arguments)
    from s2d.cli.answer import answer  # imports PyTorch, which takes seconds

    if args.trace is None:
        return answer(args, watch=lambda decoder, pair: decoder)
    from s2d.trace.page import trace

    return answer(args, watch=partial(trace, file=args.trace))


if __name__ == "__main__":
    sys.exit(main())
