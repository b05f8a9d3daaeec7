"""Throughput by batch: where drafting stops paying, as prompts fill the rows of a pass (T = 0)."""

import random
import time
from functools import partial
from itertools import product
from statistics import median

import torch

from ..decode import up_to_eos
from ..extras.many import generate_many
from ..program import tell
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model, placement
from ..weights.names import find_target
from .methods import datastore_of, draft_of, parse_method, peer_of
from .plot import check_plot, write_lines
from .specbench import choose_questions
from .tables import render


def report(args):
    """Every method with every batch, in turns; tokens a second over those of ``ar`` one by one."""
    if args.plot:
        check_plot(args.plot)
    source = find_target(args.target)
    path = draft_of(args, source)
    target, draft = (load_model(each, args.device, args.dtype) for each in (source, path))
    tokenizer, template = Tokenizer(source), chat_template(source)
    questions = choose_questions(args.questions, "held-out", args.limit)
    prompts = [tokenizer.encode_chat(each["turns"][:1], template) for each in questions]
    room = target.config.max_position_embeddings - args.max_new_tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    runs = {}
    for name in dict.fromkeys(["ar", *(args.methods or ["s2d-tree:exits=0", "s2d"])]):
        _, options = parse_method(name, draft, path, source)
        if 0 in options.get("exits", ()):
            options["datastore"] = datastore_of(source, target.config)
        runs[name] = partial(ours, target, draft, prompts, args.max_new_tokens, options)
        ours(target, draft, prompts[:1], 2, options, 1)  # what passes cost is timed before
    if args.hf:
        ends = target.config.eos_token_ids
        runs["transformers"] = partial(padded, peer_of(target), prompts, args.max_new_tokens, ends)
    print(f"{len(prompts)} prompts, on {placement(target, draft)}\n")
    speeds = {case: [] for case in product(runs, args.batches)}
    for number in range(args.rounds):
        for name, batch in random.Random(number).sample(list(speeds), len(speeds)):
            began = time.perf_counter()
            tokens = runs[name](batch)
            speeds[name, batch].append(tokens / (time.perf_counter() - began))
        tell(f"round {number + 1} of {args.rounds}")
    alone = speeds["ar", args.batches[0]]
    ratios = {
        name: [median(map(float.__truediv__, speeds[name, b], alone)) for b in args.batches]
        for name in runs
    }
    rows = [[name, *(f"{ratio:.2f}" for ratio in row)] for name, row in ratios.items()]
    print(render([["batch", *map(str, args.batches)], *rows], args.markdown))
    if args.plot:
        write_lines(args.plot, args.batches, ratios)


def ours(target, draft, prompts, count, options, batch):
    """How many tokens a method gives, with so many prompts at once."""
    how = {"batch": batch, "max_new_tokens": count, **options}
    return sum(len(each.tokens) for each in generate_many(target, prompts, draft, **how))


@torch.inference_mode()
def padded(peer, prompts, count, ends, batch):
    """As ``ours``, by transformers' own batches: prompts are padded on their left."""
    given = 0
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        longest = max(map(len, some))
        tokens = torch.tensor([[0] * (longest - len(each)) + each for each in some])
        seen = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in some])
        how = dict(attention_mask=seen.to(peer.device), do_sample=False, max_new_tokens=count)
        how |= {"pad_token_id": 0, "eos_token_id": list(ends) or None}
        answers = peer.generate(tokens.to(peer.device), **how)[:, longest:].tolist()
        given += sum(len(up_to_eos(answer, ends)) for answer in answers)  # behind an end is padding
    return given
