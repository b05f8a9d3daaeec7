"""Generate text with Sorted Speculative Decoding: ``python run.py --target 13b``."""

import sys


def say_interrupted(kind, error, trace):
    """One word about Ctrl-C, and a traceback of all else."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":  # before the imports that follow, which take a second or two
    sys.excepthook = say_interrupted

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch.distributed import get_world_size, is_initialized, is_torchelastic_launched

from s2d import StopStrings, Tokenizer, load_model
from s2d.checkpoint import DTYPES, placement
from s2d.checkpoint.config import read_config, read_drafting
from s2d.checkpoint.names import FoundDraft, find_draft, find_target, is_same_folder, miniature_note
from s2d.cli.colors import Color, color_exits
from s2d.cli.conversation import converse, typed
from s2d.cli.program import Parser, add_drafting_options, count, run_program
from s2d.cli.terminal import Streamed, as_json, compare, report
from s2d.decoder import Decoder, Step
from s2d.files import read_parts, refuse_other_than_file
from s2d.generation import fit_costs, make_decoder, prepare_models
from s2d.model import Llama
from s2d.notices import tell, tell_of_next_pass
from s2d.options import Options, Settings, resolve
from s2d.speed.ranks import each_from_rank_0, from_rank_0, is_rank_0

EXAMPLE = "Explain in a few sentences why the sky is blue."
LONG_PROMPT = 1000  # tokens; a CPU may take minutes to read them, in a single pass
MINI_EXAMPLE = "I want to know two things about Tadastan: its capital and its main export."


def main(arguments: list[str] | None = None) -> int:
    if not is_torchelastic_launched():
        return run_program("run.py", run, arguments)
    from s2d.cli.torchrun import run_in_each

    run_in_each("run.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    """The whole program, which torchrun runs in each of its processes; returns the exit code."""
    args = parse(arguments)
    if is_initialized() and args.graphs:
        raise ValueError("--graphs does not go with torchrun")
    choice = choose(args)
    lines = []
    if args.prompts:
        lines = from_rank_0(partial(read_parts, args.prompts)).split("\n")
        args.batch = min(args.batch, len(lines))
    models = load(args, choice)
    if args.interactive:
        return hold_conversation(args, models)
    if args.prompts:
        return answer_file(args, lines, models)
    return answer_prompt(args, models)


# 1. Parse


def parse(arguments: list[str] | None) -> Namespace:
    parser = Parser(prog="run.py", description="Generate text with Sorted Speculative Decoding.")
    add = parser.add_argument
    add("--target", required=True, help="7b, 13b, 70b, smollm2-135m or a folder: the large model")
    add_drafting_options(parser)
    add("--prompt", metavar="TEXT|-", help="what to say; - reads stdin; default: an example")
    add("--system", metavar="TEXT", help="a system message, if the chat template has one")
    add("--raw", action="store_true", help="no chat template: the model continues the text")
    add("--interactive", action="store_true", help="a conversation")
    add("--prompts", type=Path, metavar="FILE", help="answer each line of a file")
    add("--batch", type=count, default=8, metavar="B", help="how many of --prompts at a time")
    add(
        "--stop-at",
        dest="stop_strings",
        action="append",
        default=[],
        metavar="TEXT",
        help="the answer ends before this text; may be given several times",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="the answer ends there")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; 1: all tokens")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="S", help="one seed, one text")
    add(
        "--device",
        default="auto",
        metavar="D",
        help="cpu, cuda, cuda:1, mps ...; auto: CUDA if there is",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="auto: the model's own, or float32",
    )
    add("--graphs", action="store_true", help="passes as CUDA graphs, on a CUDA GPU (untried)")
    add("--compare", action="store_true", help="time the target alone as well, on this prompt")
    add("--json", action="store_true", help="print one JSON object; with --prompts one per line")
    add("--trace", type=Path, metavar="FILE.html", help="the answer, step by step, as a page")
    args = parser.parse_args(arguments)
    for one, other in (
        ("interactive", "prompts"),
        ("interactive", "trace"),
        ("interactive", "json"),
        ("interactive", "compare"),
        ("prompts", "compare"),
        ("json", "compare"),
        ("prompts", "trace"),
        ("prompts", "prompt"),
    ):
        if getattr(args, one) and getattr(args, other) not in (None, False):  # "" is a prompt
            parser.error(f"--{one} and --{other} do not go together")
    if args.interactive and args.prompt == "-":
        parser.error("--interactive reads stdin itself; it does not go with --prompt -")
    if args.compare and args.method == "ar":
        parser.error("--method ar is the target alone: there is nothing to --compare")
    return args


# 2. Choose: what cannot be run is refused before a model is loaded.


@dataclass
class Choice:
    """What a command line stands for."""

    target: Path
    found: FoundDraft
    settings: Settings
    colors: dict[int, Color]  # of the exits


def choose(args: Namespace) -> Choice:
    """Find the folders, read what is small in them, and check the options."""
    target = find_target(args.target)
    config = read_config(target)
    found = FoundDraft(draft=None, datastore=None, words="none")
    if args.method != "ar":
        found = find_draft(target, args.draft, args.exits)
    options = options_of(args)
    if found.datastore is not None:
        from s2d.ngram.datastore import load_datastore

        options = replace(options, datastore=load_datastore(found.datastore, config))
    if found.draft is None:
        settings = resolve(options, config)
        colors = color_exits(own=(), used=settings.exits)
    else:
        draft_config = read_config(found.draft)
        drafting = read_drafting(found.draft)
        settings = resolve(options, config, draft_config, drafting)
        colors = color_exits(own=drafting.exits, used=settings.exits)
    if args.trace is not None:
        refuse_other_than_file(args.trace)
    return Choice(target, found, settings, colors)


def options_of(args: Namespace) -> Options:
    """The options that were given on the command line, by the names that Options has for them."""
    names = {field.name for field in fields(Options)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if isinstance(args.stop, str):  # the file of a decision model
        from s2d.decision import load_decision

        given["stop"] = None
        given["decision"] = load_decision(args.stop)
    return Options(**given)


# 3. Load


@dataclass
class Models:
    """What answers, and the settings by which it does."""

    choice: Choice
    target: Llama  # or, under torchrun, this process's part of one
    draft: Llama | None
    tokenizer: Tokenizer
    raw: bool  # prompts are plain text, in no chat format
    system: str | None
    settings: Settings
    make: Callable[..., Decoder]  # ``make_decoder``, or that of a divided target

    def encode(self, messages: list[str]) -> list[int]:
        """Messages, user and assistant in turn -> ids; of plain text, of the first alone."""
        if self.raw:
            return self.tokenizer.encode(messages[0])
        texts = [text.removesuffix("\n") for text in messages]  # stdin's last line may end
        return self.tokenizer.encode_chat(texts, self.system)

    def start(self, prompt: list[int]) -> Decoder:
        """A Decoder that continues the ids of a prompt; if that is long, progress will be shown."""
        decoder = self.make(self.target, prompt, self.draft, self.settings)
        if len(prompt) > LONG_PROMPT:
            tell_of_next_pass(
                self.target.model.layers, f"reading a prompt of {len(prompt)} tokens: layers"
            )
        return decoder


def load(args: Namespace, choice: Choice) -> Models:
    tokenizer = Tokenizer(choice.target)
    raw = args.raw or tokenizer.chat_format is None
    if raw and (args.interactive or args.system):
        raise ValueError("--interactive and --system need a chat template, and there is none")
    note = miniature_note(args.target)
    tell(f"{note}loading target {choice.target}, draft {choice.found.words}")
    tell(f"prompt format: {'plain text (--raw)' if args.raw else tokenizer.prompt_format.name}")
    make = make_decoder
    settings = choice.settings
    if args.stop_strings:
        settings = replace(settings, stop_at=StopStrings(tokenizer, args.stop_strings))
    each = ""
    if is_initialized():
        from s2d.speed.tensor_parallel import load_part, make_shared_decoder

        target = load_part(choice.target, args.device, args.dtype)
        make = make_shared_decoder
        each = f", in each of {get_world_size()} processes"
    else:
        target = load_model(choice.target, args.device, args.dtype, graphs=args.graphs)
    tell(f"target on {placement(target)}{each}")
    draft = None
    if choice.found.draft is not None and is_rank_0():
        if not is_initialized() and is_same_folder(choice.found.draft, choice.target):
            draft = target  # it drafts for itself: its first layers are in memory already
        else:
            draft = load_model(
                choice.found.draft,
                args.device,
                target.dtype,
                graphs=args.graphs,
                layers=settings.exits[-1],
            )
    prepare_models(settings, target, draft)
    if args.stop is None and not is_initialized():  # every process would measure other costs
        settings = fit_costs(settings, target, batch=args.batch if args.prompts else 1)
    return Models(choice, target, draft, tokenizer, raw, args.system, settings, make)


# 4. Answer


def answer_prompt(args: Namespace, models: Models) -> int:
    """Answer one prompt; with --trace the answer becomes a page as well."""
    text = from_rank_0(sys.stdin.read) if args.prompt == "-" else args.prompt
    if text is None:
        text = MINI_EXAMPLE if models.choice.target.name.startswith("mini-") else EXAMPLE
    prompt = models.encode([text])
    decoder = models.start(prompt)
    if args.trace is None or not is_rank_0():
        show_answer(args, models, text, decoder, iter(decoder))
        return 0
    steps = traced(args.trace, models, decoder)
    try:
        show_answer(args, models, text, decoder, steps)
    except OSError:  # nobody reads stdout any more, or it is full; the page is still written
        for _ in steps:
            pass
        raise
    return 0


def show_answer(
    args: Namespace, models: Models, text: str, decoder: Decoder, steps: Iterator[Step]
) -> None:
    """Print the answer to the prompt ``text``: as its ``steps`` come, and a report; or as JSON."""
    prompt = decoder.context  # its ids
    if args.json:
        named = {"prompt": text} | about(args, models)
        try:
            for _ in steps:
                pass
        except KeyboardInterrupt:  # what there is of the answer may be all that was wanted
            cut = replace(decoder.result(), ended="interrupted")
            print(as_json(cut, models.tokenizer, named), flush=True)
            raise
        print(as_json(decoder.result(), models.tokenizer, named))
        return
    streamed = Streamed(models.tokenizer, sys.stdout, models.choice.colors, args.stop_strings)
    for step in steps:
        streamed.add(step)
    streamed.finish()
    answer = decoder.result()
    print(f"\n{report(answer, streamed.colors, models.target.dtype)}", flush=True)
    # By itself only for the example, as the comparison decodes the first tokens ten times more.
    if args.compare or (args.prompt is None and answer.settings.method != "ar"):
        print(compare(models.make, models.target, models.draft, prompt, answer))


def traced(page: Path, models: Models, decoder: Decoder) -> Iterator[Step]:
    """The Steps of ``decoder``; after the last one the ``page`` is written."""
    from s2d.trace.page import write_page
    from s2d.trace.record import Recorder

    draft = models.choice.found.draft
    names = {"target": models.choice.target.name, "draft": draft and draft.name}
    recorder = Recorder(models.tokenizer, decoder, names, models.choice.colors)
    yield from recorder.record()
    write_page(recorder.data(), page)
    tell(f"wrote {page}")


def hold_conversation(args: Namespace, models: Models) -> int:
    ended = "the program" if is_initialized() else "an answer"
    tell(f"Ctrl-C ends {ended}, Ctrl-D the conversation")
    size = models.target.config.max_position_embeddings
    converse(
        models.start,
        models.encode,
        models.tokenizer,
        context_size=size,
        colors=models.choice.colors,
        lines=each_from_rank_0(typed(first=args.prompt)),
        stop_at=args.stop_strings,
    )
    return 0


def answer_file(args: Namespace, lines: list[str], models: Models) -> int:
    """Answer each of the ``lines`` of a file, in their order; 2 if one cannot be, else 0."""
    from s2d.batch import decode_many, in_order

    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = []
    refused = []
    for index, (_, line) in enumerate(numbered):
        try:
            prompts.append((index, models.encode([line])))
        except ValueError as error:  # it is no text, or the chat template fails
            refused.append((index, error))
    answers = decode_many(
        models.target, prompts, models.draft, models.settings, args.batch, models.make
    )
    code = 0
    for (number, line), result in zip(numbered, in_order(chain(refused, answers))):
        if isinstance(result, ValueError):  # stands for a prompt that cannot be run
            tell(f"line {number}: {result}")
            code = 2
        elif args.json:
            named = {"line": number, "prompt": line} | about(args, models)
            print(as_json(result, models.tokenizer, named), flush=True)
        else:
            print(f"## line {number}: {line}\n\n{result.text(models.tokenizer)}\n", flush=True)
    return code


def about(args: Namespace, models: Models) -> dict[str, Any]:
    """What JSON says about an answer besides the Decoder's own Settings."""
    dtype = str(models.target.dtype).removeprefix("torch.")
    options = {"system": args.system, "datastore": models.choice.found.datastore}
    options |= {"stop_at": args.stop_strings, "device": models.target.device, "dtype": dtype}
    if isinstance(args.stop, str):
        options["stop"] = args.stop
    return {"model": models.choice.target, "draft": models.choice.found.draft, "options": options}


if __name__ == "__main__":
    sys.exit(main())
