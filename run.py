"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``."""

import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

from s2d import __version__
from s2d.cli.program import Parser, add_drafting_options, count, named_value, run_program

# The options that say what drafts, and how.
DRAFTING = "draft exits thresholds draft_length tree stop rule init decision datastore".split()
EXAMPLE = "Explain in a few sentences why the sky is blue."


def parse(arguments: list[str] | None = None) -> Namespace:
    parser = Parser(
        prog="run.py",
        usage="python run.py --target MODEL [options]",
        description="Generate text with Sorted Speculative Decoding. (Defaults are in brackets.)",
        epilog='Example: python run.py --target 13b --prompt "Tell me a story." --temperature 1',
    )
    parser.add_argument("--version", action="version", version=f"s2d {__version__}")

    add = parser.add_argument_group("model").add_argument
    add("--target", required=True, metavar="MODEL", help="7b, 13b, 70b, smollm2-135m or a folder")
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
    add("--paper", action="store_true", help="as in the S2D paper: --rejection --stop 0")

    group = parser.add_argument_group("input")
    add = group.add_mutually_exclusive_group().add_argument
    words = "what to say; - reads stdin (an example)"
    add("--prompt", action="append", metavar="TEXT", help=words)  # a list: a second one is refused
    add("--prompts", type=Path, metavar="FILE", help="answer each line of a file")
    add("--examples", action="store_true", help="answer six prompts for the miniatures")
    add("--interactive", action="store_true", help="a conversation")
    add = group.add_argument
    add("--batch", type=count, metavar="B", help="how many of --prompts share a pass (8)")
    add("--system", metavar="TEXT", help="a system message, if the chat template has one")
    several = {"action": "append", "default": []}
    words = "for the chat template, such as enable_thinking=false; several times"
    add("--template-option", type=named_value, metavar="NAME=VALUE", help=words, **several)
    add("--raw", action="store_true", help="no chat template: the model continues the text")

    add = parser.add_argument_group("output").add_argument
    add("--max-new-tokens", type=int, metavar="N", help="per answer (128)")
    words = "an answer ends before this text; several times"
    add("--stop-at", dest="stop_strings", metavar="TEXT", help=words, **several)
    add("--compare", action="store_true", help="time the target alone as well")
    add("--json", action="store_true", help="a JSON object per answer")
    add("--trace", type=Path, metavar="FILE.html", help="the answer, step by step, as a page")

    args = parser.parse_args(arguments)
    refuse_useless(args, parser)
    if args.prompt:
        args.prompt = args.prompt[0]
    if args.paper:
        args.rule = "rejection"
        if args.stop is None:
            args.stop = 0.0
    return args


def refuse_useless(args: Namespace, parser: Parser) -> None:
    """End the program if an option would do nothing beside others."""
    many = args.prompts or args.examples
    if args.prompt and len(args.prompt) > 1:
        parser.error("--prompt is given twice; --prompts FILE answers several")
    if args.batch and not many:
        parser.error("--batch does nothing without --prompts")
    if (many or args.interactive) and (args.trace or args.compare):
        parser.error("--trace and --compare are for a single prompt")
    if args.json and (args.interactive or args.compare):
        parser.error("--json goes neither with --interactive nor with --compare")
    drafts = args.paper or args.compare or any(getattr(args, name) is not None for name in DRAFTING)
    if args.method == "ar" and drafts:
        parser.error("--method ar does not draft, and is the target alone")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until PyTorch is loaded, Ctrl-C is no traceback
    parse()  # --help and mistakes end the program here, before PyTorch is loaded

from dataclasses import fields, replace

from s2d import StopStrings
from s2d.checkpoint import check_device, placement
from s2d.checkpoint.files import read_text, refuse_existing
from s2d.checkpoint.notices import tell
from s2d.cli.conversation import encode, hold_conversation
from s2d.cli.terminal import as_json, compare_speed, exit_colors, report, show, stream
from s2d.generation import make_decoder
from s2d.options import Options
from s2d.pair.loading import Pair, choose_pair, load_chosen
from s2d.pair.names import MINIATURE_PROMPTS, miniature_note
from s2d.speed.batch import decode_many
from s2d.speed.tensor_parallel import from_rank_0, join_processes  # for torchrun


def main(arguments: list[str] | None = None) -> int:
    return run_program("run.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    """The whole program: the exit code. torchrun runs it in each of its processes."""
    args = parse(arguments)
    join_processes()
    if args.trace is not None:
        refuse_existing(args.trace)
    if args.prompts or args.examples:
        lines = read_lines(args)
        return answer_lines(lines, args, load(args))
    pair = load(args)
    if args.interactive:
        hold_conversation(args, pair)
    else:
        answer_prompt(args, pair)
    return 0


def read_lines(args: Namespace) -> list[tuple[int, str]]:
    """The lines of --prompts that are not blank, or the --examples, each with its number.

    Raises ValueError if there is none.
    """
    if args.prompts:
        lines = from_rank_0(lambda: read_text(args.prompts).split("\n"))
    elif miniature_note(args.target):
        lines = MINIATURE_PROMPTS
    else:
        raise ValueError("--examples are for the miniatures, such as --target 13b")
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ValueError(f"{args.prompts} has no line to answer")
    return found


def load(args: Namespace) -> Pair:
    """Check what is asked for; then load the models."""
    names = {field.name for field in fields(Options)} | {"draft_length", "tree"}
    given = {name: value for name, value in vars(args).items() if name in names}
    given = {name: value for name, value in given.items() if value is not None}
    check_device(args.device)
    choice = choose_pair(args.target, args.draft, **given)
    tokenizer = choice.tokenizer
    if args.stop_strings:
        stop_at = StopStrings(tokenizer, args.stop_strings)
        choice = replace(choice, options=replace(choice.options, stop_at=stop_at))
    words = "plain text (--raw)" if args.raw else tokenizer.chat_format.name
    if tokenizer.chat_format.is_plain:
        args.raw = True
    if args.raw and (args.interactive or args.system or args.template_option):
        which = "--interactive, --system and --template-option"
        raise ValueError(f"{which} need a chat template, and there is none")
    if note := miniature_note(args.target):
        tell(note)
    tell(f"loading target {choice.folder.path}, draft {choice.found.description}")
    tell(f"prompt format: {words}")
    pair = load_chosen(choice, args.device, args.dtype)
    tell(f"target on {placement(pair.target)}")
    return pair


def answer_prompt(args: Namespace, pair: Pair) -> None:
    """Answer one prompt, as a text that comes or as JSON; with --trace as a page as well."""
    text = args.prompt
    if text is None:
        text = MINIATURE_PROMPTS[0] if miniature_note(args.target) else EXAMPLE
    elif text == "-":
        text = from_rank_0(lambda: sys.stdin.read()).removeprefix("\ufeff").removesuffix("\n")
    if not text:
        tell("the prompt is empty")
    prompt = encode([text], args, pair.tokenizer)
    decoder = make_decoder(pair.target, prompt, pair.draft, pair.options)
    steps = iter(decoder)
    if args.trace is not None:
        from s2d.trace.page import write_page
        from s2d.trace.record import Recorder

        draft = pair.found.draft
        names = {"target": pair.folder.path.name, "draft": draft and draft.path.name}
        recorder = Recorder(pair.tokenizer, decoder, names, exit_colors(pair))
        steps = recorder.record()
    if args.json:
        for _ in steps:
            pass
    else:
        stream(steps, pair, args.stop_strings)
    answer = decoder.result()
    if args.trace is not None:
        from_rank_0(lambda: write_page(recorder.data(), args.trace))
        tell(f"wrote {args.trace}")
    if args.json:
        show(as_json(answer, args, pair, prompt=text))
        return
    print(f"\n{report(answer, pair)}", file=sys.stderr)
    # A comparison takes ten more answers. Without --compare, it is made for the example only.
    if args.compare or (args.prompt is None and args.method != "ar"):
        print(compare_speed(pair, prompt, answer), file=sys.stderr)


def answer_lines(lines: list[tuple[int, str]], args: Namespace, pair: Pair) -> int:
    """Answer each of ``lines``, in their order; returns 2 if there is one without an answer."""
    code = 0
    written = 0
    began = time.perf_counter()
    prompts = [encode([line], args, pair.tokenizer) for _, line in lines]
    answers = decode_many(pair.target, prompts, pair.draft, pair.options, args.batch or 8)
    for (number, line), result in zip(lines, answers):
        if isinstance(result, ValueError):  # stands for a prompt that cannot be run
            tell(f"line {number}: {result}")
            code = 2
            continue
        written += len(result.tokens)
        if args.json:
            show(as_json(result, args, pair, line=number, prompt=line))
        else:
            is_cut = result.ended in ("length", "context")
            end = f"\n(ended by {result.ended})" if is_cut else ""
            show(f"## {number}: {line}\n\n{result.text(pair.tokenizer)}{end}\n")
    seconds = time.perf_counter() - began
    tell(f"{written} tokens in {seconds:.2f} s, {written / seconds:.1f} tokens/s")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
