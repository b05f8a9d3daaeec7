"""Full-size Llamas with random weights: what forward passes cost, and what the memory allows.

Speed does not ask what the weights say, acceptance does. Here the draft is the first layers of its
target, and what the layers after the draft's first exit add is scaled down until draft and target
agree to a degree that is measured. Knows nothing about files and text.
"""

import os
from copy import copy
from dataclasses import replace
from functools import partial
from statistics import mean, median

import torch
from torch.nn.attention import sdpa_kernel

from ..decode import Scorer, clock, run_pass
from ..generate import generate
from ..model import DECODING_KERNELS, LlamaConfig
from ..tree import Dynamic, TokenTree
from ..weights import DTYPES, check_device, empty_model, placement
from .agreement import exits_right
from .methods import peer_of
from .tables import render

POSITIONS = 4096
llama = partial(LlamaConfig, max_position_embeddings=POSITIONS, eos_token_ids=())
SHAPES = {  # one to try this program with, then Llama-2 and Vicuna v1.5
    "tiny": llama(1024, 64, 176, 8, 4, 2, 16),
    "7b": llama(32000, 4096, 11008, 32, 32, 32, 128),
    "13b": llama(32000, 5120, 13824, 40, 40, 40, 128),
}
NODES = (1, 2, 4, 8, 16, 32, 64)
LOGIT_STD = 12.0  # of a confident model: one of 32,000 tokens then has most of the probability
SCALE = 0.05  # of what layers after the draft's first exit add


def random_model(config, device, dtype, full_layers, scale=SCALE):
    """A random Llama; each layer after ``full_layers`` adds ``scale`` times what the others add."""
    model, state = empty_model(config), {}
    generator = torch.Generator(device).manual_seed(0)
    for name, empty in model.named_parameters():
        state[name] = torch.ones(empty.shape, device=device, dtype=dtype)
        if empty.dim() == 2:
            std = LOGIT_STD if name.startswith("lm_head") else 1.0
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            if into_residual and int(name.split(".")[2]) >= full_layers:
                std = scale
            state[name].normal_(0.0, std * empty.shape[1] ** -0.5, generator=generator)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).to(device=device, dtype=dtype).eval()


def first_layers(model, exits):
    """A draft with these ``exits``: the first layers of ``model`` itself."""
    draft = copy(model)
    draft.config = replace(model.config, exit_layers=exits, thresholds=(0.6, 0.6, 0.0))
    return draft


def seconds(device, function, repetitions):
    """Median wall time of ``function()``, after one call that does not count."""
    times = []
    for _ in range(repetitions + 1):
        began = clock(device)
        function()
        times.append(clock(device) - began)
    return median(times[1:])


def copy_bandwidth(device, repetitions):
    """Bytes per second that a large copy reads and writes: what this memory can do in practice."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(device, lambda: target.copy_(source), repetitions)


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def pass_table(model, draft, context, repetitions, bandwidth):
    """The target's pass over ``context`` tokens and over trees behind them; the draft's segments.

    A segment is run for one token there, LM head included.
    """
    scorer = Scorer(model, context, Dynamic(1, 1, max(NODES)))
    prompt = random_tokens(model, context, 0)
    hidden = torch.randn(1, 1, draft.config.hidden_size, device=draft.device).to(draft.dtype)
    weights = sum(p.nbytes for p in model.parameters()) - model.model["embed_tokens"].weight.nbytes

    def score(seen, tree):
        scorer.cache.length = seen
        scorer.rows(run_pass(model, scorer.wanted(prompt, tree)))
        scorer.keep(context, [])

    def run_segment(start, stop, cache):
        cache.length = context
        draft.logits(draft.run_layers(hidden, start, stop, cache=cache)[0])

    lines = [["pass", "ms", "of a copy's speed"]]
    for nodes in (0, *NODES):
        numbers = torch.arange(nodes, device=model.device)
        tree = TokenTree(numbers, numbers // 2 - 1)  # any tree will do
        took = seconds(model.device, partial(score, context if nodes else 0, tree), repetitions)
        name = f"{nodes} node{'s'[: nodes > 1]}" if nodes else f"prompt of {context}"
        lines.append([name, f"{took * 1e3:.2f}", f"{weights / took / bandwidth:.0%}"])
    for start, stop in zip((0, *draft.config.exit_layers), draft.config.exit_layers):
        run = partial(run_segment, start, stop, draft.new_cache(context + 1, start, stop))
        took = seconds(draft.device, run, repetitions)
        lines.append([f"draft layers {start + 1}-{stop}", f"{took * 1e3:.2f}", ""])
    return lines


def random_tokens(model, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def agreement(target, draft, length):
    """How often each exit's likeliest next token is the target's on random text: E numbers."""
    tokens = torch.tensor(random_tokens(target, length, 1), device=target.device)
    expected = target(tokens[None])[0].argmax(dim=-1)
    right = exits_right(draft, draft.config.exit_layers, tokens, expected)
    return right.float().mean(dim=1).tolist()


def decoding_table(target, draft, context, new_tokens, rounds):
    """Tokens per second of whole generations, the methods in turn, and the median speedups."""
    methods = "ar", "s2d", "s2d-tree"
    lines, found = [["method", "tokens/s", "speedup", "MAT"]], []
    for number in range(rounds + 1):
        prompt = random_tokens(target, context, number)
        how = dict(draft=draft, max_new_tokens=new_tokens)
        found.append([generate(target, prompt, method=method, **how) for method in methods])
    alone, *_ = columns = list(zip(*found[1:]))  # the first round warms up
    for method, own in zip(methods, columns):
        speeds = [each.tokens_per_second for each in own]
        ratio = median(a / b.tokens_per_second for a, b in zip(speeds, alone))
        mat = mean(each.stats.mean_accepted_tokens for each in own)
        lines.append([method, f"{median(speeds):.1f}", f"{ratio:.2f}", f"{mat:.2f}"])
    return lines


@torch.inference_mode()
def beside_transformers(model, length):
    """One line on our logits and those of transformers' Llama, which takes the same weights."""
    tokens = torch.tensor([random_tokens(model, length, 0)], device=model.device)
    ours, theirs = model(tokens).float(), peer_of(model)(tokens).logits.float()
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean().item()
    difference = f"{(ours - theirs).abs().max():.3g} of {theirs.std():.3g} (standard deviation)"
    likeliest = f"same likeliest token at {same:.1%} of {length} positions"
    return f"beside transformers: largest difference of a logit {difference}, {likeliest}"


def refuse_too_large(args, device, dtype):
    """ValueError where a prompt does not fit the shapes, or on a CPU a shape its memory."""
    if args.context > (longest := POSITIONS - max(NODES)):
        raise ValueError(f"--context is at most {longest} for these shapes")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for shape in args.shapes:
        needed = sum(p.numel() for p in empty_model(SHAPES[shape]).parameters()) * dtype.itemsize
        if device.type == "cpu" and needed > memory:
            needs = f"{shape} needs {needed / 1e9:.0f} GB in {dtype}"
            raise ValueError(f"{needs}, this machine has {memory / 1e9:.0f} GB and no GPU")


def report(args):
    device = check_device(args.device)
    on_gpu = device.type == "cuda"
    dtype = (DTYPES | {"auto": torch.bfloat16 if on_gpu else torch.float32})[args.dtype]
    refuse_too_large(args, device, dtype)
    bandwidth = copy_bandwidth(device, args.repetitions)
    print(f"torch {torch.__version__}, a large copy moves {bandwidth / 1e9:.0f} GB/s")
    for shape in args.shapes:
        report_shape(shape, device, dtype, bandwidth, args)
        if on_gpu:
            print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")
            torch.cuda.reset_peak_memory_stats(device)


def report_shape(shape, device, dtype, bandwidth, args):
    """All tables of one shape; its models are out of memory afterwards."""
    exits, context = (2, 3, 4) if shape == "tiny" else (6, 9, 12), args.context
    model = random_model(SHAPES[shape], device, dtype, exits[0])
    draft = first_layers(model, exits)
    print(f"\n{shape} on {placement(model)}")
    if args.hf:
        print(beside_transformers(model, 128))
    parts = zip(exits, agreement(model, draft, 256))
    agree = ", ".join(f"exit {exit_layer} {part:.0%}" for exit_layer, part in parts)
    print(f"draft and target agree: {agree}", flush=True)
    passes = pass_table(model, draft, context, args.repetitions, bandwidth)
    print(f"\n{render(passes)}\n", flush=True)
    print(render(decoding_table(model, draft, context, args.max_new_tokens, args.rounds)))
