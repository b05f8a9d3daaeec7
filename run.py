"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from s2d import StopStrings, Tokenizer, start
from s2d.checkpoint import DTYPES, placement
from s2d.checkpoint.files import read_text
from s2d.checkpoint.names import find_target, miniature_note
from s2d.checkpoint.notices import tell
from s2d.checkpoint.pair import Pair, choose_pair, load_chosen
from s2d.cli.colors import Color, color_exits
from s2d.cli.conversation import hold_conversation
from s2d.cli.program import Parser, add_drafting_options, count, run_program
from s2d.cli.terminal import Streamed, about, as_json, compare, report
from s2d.decoder import Decoder
from s2d.options import Options, default_drafting
from s2d.speed.tensor_parallel import from_rank_0, join_processes
from s2d.stats import Step

EXAMPLE = "Explain in a few sentences why the sky is blue."
# Options that do not go together.
APART = ("interactive", "prompts"), ("interactive", "json"), ("interactive", "trace")
APART += ("prompts", "prompt"), ("prompts", "trace"), ("json", "compare")
MINI_EXAMPLE = "I want to know two things about Tadastan: its capital and its main export."


def main(arguments: list[str] | None = None) -> int:
    return run_program("run.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    """The whole program: the exit code. torchrun runs it in each of its processes."""
    args = parse(arguments)
    join_processes()
    lines = [] if args.prompts is None else read_lines(args.prompts)
    models = load(args)
    if args.interactive:
        hold_conversation(args, models)
    elif args.prompts:
        return answer_lines(lines, args, models)
    else:
        answer_prompt(args, models)
    return 0


def parse(arguments: list[str] | None) -> Namespace:
    parser = Parser(prog="run.py", description="Generate text with Sorted Speculative Decoding.")
    add = parser.add_argument
    add("--target", required=True, help="7b, 13b, 70b, smollm2-135m or a folder: the large model")
    add_drafting_options(parser)
    add("--paper", action="store_true", help="as in the S2D paper: --rejection --stop 0")
    add("--prompt", metavar="TEXT|-", help="what to say; - reads stdin; default: an example")
    add("--system", metavar="TEXT", help="a system message, if the chat template has one")
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    add("--interactive", action="store_true", help="a conversation")
    add("--prompts", type=Path, metavar="FILE", help="answer each line of a file")
    add("--batch", type=count, default=8, metavar="B", help="how many of --prompts at a time")
    words = "the answer ends before this text; may be given several times"
    add("--stop-at", dest="stop_strings", action="append", default=[], metavar="TEXT", help=words)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the answer ends there")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; 1: all tokens")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="S", help="one seed, one text")
    words = "cpu, cuda, cuda:1, mps ...; auto: CUDA if there is"
    add("--device", default="auto", metavar="D", help=words)
    words = "auto: the model's own, or float32"
    add("--dtype", default="auto", choices=("auto", *DTYPES), help=words)
    add("--compare", action="store_true", help="time the target alone as well, on this prompt")
    add("--json", action="store_true", help="print one JSON object; with --prompts one per line")
    add("--trace", type=Path, metavar="FILE.html", help="the answer, step by step, as a page")
    args = parser.parse_args(arguments)
    given = {name for name, value in vars(args).items() if value not in (None, False)}
    for one, other in APART:
        if {one, other} <= given:
            parser.error(f"--{one} and --{other} do not go together")
    if args.compare and args.method == "ar":
        parser.error("with --method ar there is nothing to --compare")
    if args.interactive and args.prompt == "-":
        parser.error("--interactive reads stdin itself; it does not go with --prompt -")
    if args.paper:
        args.rule = "rejection"
        args.stop = 0.0
    return args


@dataclass
class Models:
    """What answers, and how it is asked."""

    pair: Pair
    raw: bool  # prompts are plain text, in no chat format
    system: str | None
    colors: dict[int, Color]  # of the exits

    def encode(self, messages: list[str]) -> list[int]:
        """Messages, user and assistant in turn -> ids; of plain text, of the first alone."""
        if self.raw:
            return self.pair.tokenizer.encode(messages[0])
        return self.pair.tokenizer.encode_chat(messages, self.system)

    def start(self, prompt: list[int]) -> Decoder:
        """A Decoder that continues the ids of a prompt."""
        return start(self.pair.target, prompt, self.pair.draft, **vars(self.pair.options))


def load(args: Namespace) -> Models:
    """Check what is asked for; then load the models."""
    folder = find_target(args.target)
    tokenizer = Tokenizer(folder)
    raw = args.raw or tokenizer.chat_format is None
    if raw and (args.interactive or args.system):
        raise ValueError("--interactive and --system need a chat template, and there is none")
    names = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in vars(args).items() if name in names})
    if args.stop_strings:
        options = replace(options, stop_at=StopStrings(tokenizer, args.stop_strings))
    chosen = choose_pair(folder, args.draft, options)
    tell(f"{miniature_note(args.target)}loading target {folder}, draft {chosen.found.words}")
    tell(f"prompt format: {'plain text (--raw)' if args.raw else tokenizer.prompt_format.name}")
    pair = load_chosen(chosen, args.device, args.dtype)
    tell(f"target on {placement(pair.target)}")
    own = default_drafting(pair.draft.config).exits if pair.draft else ()
    return Models(pair, raw, args.system, color_exits(own=own, used=pair.options.exits))


def answer_prompt(args: Namespace, models: Models) -> None:
    """Answer one prompt, as a text that comes or as JSON; with --trace as a page as well."""
    text = args.prompt
    if text == "-":
        text = from_rank_0(lambda: sys.stdin.read()).removesuffix("\n")
    if text is None:
        text = MINI_EXAMPLE if models.pair.folder.name.startswith("mini-") else EXAMPLE
    prompt = models.encode([text])
    decoder = models.start(prompt)
    steps = iter(decoder) if args.trace is None else traced(args.trace, models, decoder)
    if args.json:
        for _ in steps:
            pass
        named = {"prompt": text} | about(args, models)
        print(as_json(decoder.result(), models.pair.tokenizer, named))
        return
    streamed = Streamed(models.pair.tokenizer, sys.stdout, models.colors, args.stop_strings)
    for step in steps:
        streamed.add(step)
    streamed.finish()
    answer = decoder.result()
    print(f"\n{report(answer, streamed.colors, models.pair.target.dtype)}", flush=True)
    # By itself only for the example, as the comparison decodes the first tokens ten times more.
    if models.pair.options.method != "ar" and (args.compare or args.prompt is None):
        print(compare(models.pair.target, models.pair.draft, prompt, answer))


def traced(page: Path, models: Models, decoder: Decoder) -> Iterator[Step]:
    """The Steps of ``decoder``; after the last one the ``page`` is written."""
    from s2d.trace.page import write_page
    from s2d.trace.record import Recorder

    names = {
        "target": models.pair.folder.name,
        "draft": models.pair.found.draft and models.pair.found.draft.name,
    }
    recorder = Recorder(models.pair.tokenizer, decoder, names, models.colors)
    yield from recorder.record()
    write_page(recorder.data(), page)
    tell(f"wrote {page}")


def read_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not blank, each with its number."""
    lines = from_rank_0(lambda: read_text(file).splitlines())
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def answer_lines(lines: list[tuple[int, str]], args: Namespace, models: Models) -> int:
    """Answer each of ``lines``, in their order; returns 2 if there is one without an answer."""
    from s2d.speed.batch import decode_many, in_order

    code = 0
    pair = models.pair
    prompts = [(index, models.encode([line])) for index, (_, line) in enumerate(lines)]
    answers = decode_many(pair.target, prompts, pair.draft, pair.options, args.batch)
    for (number, line), result in zip(lines, in_order(answers)):
        if isinstance(result, ValueError):  # stands for a prompt that cannot be run
            tell(f"line {number}: {result}")
            code = 2
        elif args.json:
            named = {"line": number, "prompt": line} | about(args, models)
            print(as_json(result, pair.tokenizer, named), flush=True)
        else:
            print(f"## line {number}: {line}\n\n{result.text(pair.tokenizer)}\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
