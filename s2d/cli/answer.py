"""The program of run.py: it answers a prompt, the lines of a file, or a person."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path

from ..checkpoint.files import read_text, taken
from ..checkpoint.load import check_device, placement
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import StopStrings, Tokenizer
from ..decoder import Decoder
from ..generation import make_decoder
from ..options import Options
from ..pair.loading import Choice, Pair, choose_pair, load_chosen
from ..pair.names import miniature_note
from ..passes.processes import from_rank_0, join_processes  # for torchrun
from ..stats import Step
from .terminal import as_json, compare_speed, report, show, stream

EXAMPLE = "Explain in a few sentences why the sky is blue."
MINIATURE_EXAMPLE = "I want to know two things about Tadastan: its capital and its main export."
# What is done with the steps of a Decoder on their way, such as ``trace.page.trace`` does.
Watch = Callable[[Decoder, Pair], Iterable[Step]]


def answer(args: Namespace, watch: Watch) -> int:
    """The whole program: the exit code. torchrun runs it in each of its processes.

    Loading takes long, so prompts, which may be refused, are encoded first.
    """
    join_processes()
    with ExitStack() as outputs:
        if args.trace is not None:
            outputs.enter_context(taken(args.trace))
        choice = choose(args)
        if args.prompts:
            return answer_lines(read_lines(args.prompts), args, choice)
        if args.interactive:
            hold_conversation(args, choice)
        else:
            answer_prompt(args, choice, watch)
        return 0


def choose(args: Namespace) -> Choice:
    """The target, what drafts for it, and the options; ValueError for what cannot be run."""
    names = {field.name for field in fields(Options)}
    names |= {"draft_length", "bitwise", "init", "decision", "datastore"}
    given = {name: vars(args)[name] for name in names & vars(args).keys()}
    given = {name: value for name, value in given.items() if value is not None}
    check_device(args.device)
    choice = choose_pair(args.target, args.draft, **given)
    if args.stop_strings:
        stop_at = StopStrings(choice.tokenizer, args.stop_strings)
        choice = replace(choice, options=replace(choice.options, stop_at=stop_at))
    args.raw = args.raw or choice.tokenizer.chat_format.is_plain
    if args.raw and (args.interactive or args.system or args.template_option):
        which = "--interactive, --system and --template-option"
        raise ValueError(f"{which} need a chat template, and there is none")
    return choice


def encode(messages: list[str], args: Namespace, tokenizer: Tokenizer) -> list[int]:
    """Messages, user and assistant in turn -> ids; of plain text, of the first alone."""
    if args.raw:
        return tokenizer.encode(messages[0])
    return tokenizer.encode_chat(messages, args.system, dict(args.template_option))


def load(choice: Choice, args: Namespace) -> Pair:
    if note := miniature_note(args.target):
        tell(note)
    tell(f"loading target {choice.folder.path}, draft {choice.drafting}")
    tell(f"prompt format: {'plain text' if args.raw else choice.tokenizer.chat_format.name}")
    pair = load_chosen(choice, args.device, args.dtype)
    tell(f"target on {placement(pair.target)}")
    return pair


def read_prompt(args: Namespace) -> str:
    if args.prompt is None:
        return MINIATURE_EXAMPLE if miniature_note(args.target) else EXAMPLE
    if args.prompt != "-":
        return args.prompt
    return from_rank_0(lambda: sys.stdin.read()).removeprefix("\ufeff").removesuffix("\n")


def answer_prompt(args: Namespace, choice: Choice, watch: Watch) -> None:
    """Answer one prompt, as a text that comes or as JSON."""
    text = read_prompt(args)
    prompt = encode([text], args, choice.tokenizer)
    size = choice.folder.config.max_position_embeddings
    if not 0 < len(prompt) < size:
        raise ValueError(f"the prompt has {len(prompt)} tokens; expected 1 to {size - 1}")
    pair = load(choice, args)
    decoder = make_decoder(pair.target, prompt, pair.draft, pair.options)
    steps = watch(decoder, pair)
    if args.json:
        for _ in steps:
            pass
        show(as_json(decoder.result(), args, pair, prompt=text))
        return
    stream(steps, pair, args.stop_strings)
    generation = decoder.result()
    print(f"\n{report(generation, pair)}", file=sys.stderr)
    # A comparison takes ten more answers. Without --compare, it is made for the example only.
    if args.compare or (args.prompt is None and args.method != "ar"):
        print(compare_speed(pair, prompt, generation), file=sys.stderr)


def read_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of ``file`` that are not blank, each with its number; ValueError: there is none."""
    lines = from_rank_0(lambda: read_text(file).split("\n"))
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ValueError(f"{file} has no line to answer")
    return found


def answer_lines(lines: list[tuple[int, str]], args: Namespace, choice: Choice) -> int:
    """Answer each of ``lines``, in their order; returns 2 if there is one without an answer."""
    from ..passes.batch import decode_many  # which a single prompt does not need

    prompts = [encode([line], args, choice.tokenizer) for _, line in lines]
    pair = load(choice, args)
    code = 0
    answers = decode_many(pair.target, prompts, pair.draft, pair.options, args.batch or 8)
    for (number, line), result in zip(lines, answers):
        if isinstance(result, ValueError):  # stands for a prompt that cannot be run
            tell(f"line {number}: {result}")
            code = 2
        elif args.json:
            show(as_json(result, args, pair, line=number, prompt=line))
        else:
            show(f"## {number}: {line}\n\n{result.text(pair.tokenizer)}\n")
    return code


def hold_conversation(args: Namespace, choice: Choice) -> None:
    """Answer what is typed, line by line; the oldest turns are forgotten in time."""
    encode(["Hello."], args, choice.tokenizer)  # the template may refuse its options
    pair = load(choice, args)
    tell("Ctrl-C ends an answer, Ctrl-D the conversation")
    room = pair.target.config.max_position_embeddings * 3 // 4
    messages: list[str] = []
    while (line := from_rank_0(read_line)) is not None:
        if not line.strip():
            continue
        asked = [*messages, line]
        try:
            while len(asked) > 1 and len(encode(asked, args, pair.tokenizer)) > room:
                asked = asked[2:]
            prompt = encode(asked, args, pair.tokenizer)
            decoder = make_decoder(pair.target, prompt, pair.draft, pair.options)
        except ValueError as error:  # the line is too long, or the chat template refuses it
            tell(error)
            continue
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the answer
            stream(decoder, pair, args.stop_strings)
        messages = [*asked, decoder.result().text(pair.tokenizer)]


def read_line() -> str | None:
    """The line that is typed next; None if Ctrl-D ends the input."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input()
    except EOFError:
        print(file=sys.stderr)
        return None
