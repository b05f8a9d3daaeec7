"""Full-size Llamas with random weights: what forward passes cost, and what the memory allows.

Speed does not ask what the weights say, acceptance does. Here the draft is the first layers of its
target, and what the layers after the draft's first exit add is scaled down until draft and target
agree to a degree that is measured. Knows nothing about files and text.

python -m s2d.bench shapes                  # 7b and 13b, in bfloat16 on a GPU
python -m s2d.bench shapes --shapes tiny    # the same program anywhere
"""

import os
from dataclasses import replace
from functools import partial
from statistics import mean, median

import torch
from torch.nn.attention import sdpa_kernel

from ..decode import clock
from ..generate import generate
from ..model import DECODING_KERNELS, LlamaConfig
from ..program import Parser
from ..soft import exit_hidden
from ..tree import TreeAttention, ancestor_mask
from ..weights import DTYPES, check_device, empty_model, placement
from .methods import peer_of
from .tables import render


def llama(positions, *sizes):
    return LlamaConfig(*sizes, max_position_embeddings=positions, eos_token_ids=())


SHAPES = {  # one to try this program with, then Llama-2 and Vicuna v1.5
    "tiny": llama(1024, 1024, 64, 176, 8, 4, 2, 16),
    "7b": llama(4096, 32000, 4096, 11008, 32, 32, 32, 128),
    "13b": llama(4096, 32000, 5120, 13824, 40, 40, 40, 128),
    "70b": llama(4096, 32000, 8192, 28672, 80, 64, 8, 128),
}
NODES = (1, 2, 4, 8, 16, 32, 64)
LOGIT_STD = 12.0  # of a confident model: one of 32,000 tokens then has most of the probability
SCALE = 0.05  # of what layers after the draft's first exit add


def random_model(config, device, dtype, seed, full_layers, scale):
    """A random Llama; each layer after ``full_layers`` adds ``scale`` times what the others add."""
    model, state = empty_model(config), {}
    generator = torch.Generator(device).manual_seed(seed)
    for name, empty in model.named_parameters():
        state[name] = torch.ones(empty.shape, device=device, dtype=dtype)
        if empty.dim() == 2:
            lm_head = name.startswith("lm_head")
            std = LOGIT_STD * config.hidden_size**-0.5 if lm_head else empty.shape[1] ** -0.5
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            if into_residual and int(name.split(".")[2]) >= full_layers:
                std *= scale
            state[name].normal_(0.0, std, generator=generator)
    return with_weights(model, state, device, dtype)


def with_weights(model, state, device, dtype):
    """``model`` made of the tensors of ``state`` themselves; what it has no use for is left out."""
    names = dict(model.named_parameters())
    model.load_state_dict({name: state[name] for name in names}, assign=True)
    return model.requires_grad_(False).to(device=device, dtype=dtype).eval()


def first_layers(model, exits):
    """A draft with these ``exits`` that is the first layers of ``model``, in the same memory."""
    drafting = dict(exit_layers=exits, thresholds=(0.6, 0.6, 0.0))
    draft = empty_model(replace(model.config, num_hidden_layers=exits[-1], **drafting))
    return with_weights(draft, model.state_dict(), model.device, model.dtype)


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
def forward_table(model, context, repetitions, bandwidth):
    """One pass over a prompt of ``context`` tokens, then over trees of 1..64 nodes behind it."""
    device = model.device
    attention = TreeAttention(1, max(NODES), device, model.dtype)
    cache = model.new_cache(context + max(NODES))
    weights = sum(p.nbytes for p in model.parameters()) - model.model["embed_tokens"].weight.nbytes
    tokens = torch.randint(model.config.vocab_size, (1, context + max(NODES)), device=device)

    def forward(start, end):
        cache.length = start
        how = dict(zip(("positions", "mask"), attention.span(context, start, end)), cache=cache)
        hidden = model.run_layers(model.embed(tokens[:, start:end]), **how)
        model.logits(hidden[0, -max(1, end - context) :])

    lines = [["pass", "ms", "of a copy's speed"]]
    for nodes in (0, *NODES):
        parents = torch.arange(nodes, device=device) // 2 - 1  # any tree will do
        attention.set_tree(ancestor_mask(parents.clamp(min=-1)))
        span = (context, context + nodes) if nodes else (0, context)
        took = seconds(device, partial(forward, *span), repetitions)
        name = f"{nodes} node{'s'[: nodes > 1]}" if nodes else f"prompt of {context}"
        lines.append([name, f"{took * 1e3:.2f}", f"{weights / took / bandwidth:.0%}"])
    return lines


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def segment_table(draft, context, repetitions):
    """Each of the draft's segments for one token behind ``context`` others, LM head included."""
    exits, lines = draft.config.exit_layers, [["draft segment", "ms"]]
    hidden = torch.randn(1, 1, draft.config.hidden_size, device=draft.device).to(draft.dtype)

    def forward(start, stop, cache):
        cache.length = context
        draft.logits(draft.run_layers(hidden, start, stop, cache=cache)[0])

    for start, stop in zip((0, *exits), exits):
        cache = draft.new_cache(context + 1, start, stop)
        took = seconds(draft.device, partial(forward, start, stop, cache), repetitions)
        lines.append([f"layers {start + 1}-{stop}", f"{took * 1e3:.2f}"])
    return lines


@torch.inference_mode()
def agreement(target, draft, length, seed):
    """How often each exit's likeliest next token is the target's on random text: E numbers."""
    tokens = random_tokens(target, length, seed)
    expected = target(tokens).argmax(dim=-1)
    states = exit_hidden(draft, tokens, draft.config.exit_layers)
    same = [draft.logits(hidden).argmax(dim=-1) == expected for hidden in states]
    return [each.float().mean().item() for each in same]


def random_tokens(model, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)


def decoding_table(target, draft, context, new_tokens, rounds):
    """Tokens per second of whole generations, the methods in turn, and the median speedups."""
    results = {"ar": [], "s2d": [], "s2d-tree": []}
    for number in range(rounds + 1):
        prompt = random_tokens(target, context, number)[0].tolist()
        for method, outputs in results.items():
            outputs.append(generate(target, prompt, draft, method, max_new_tokens=new_tokens))
    lines, alone = [["method", "tokens/s", "speedup", "MAT"]], None
    for method, (_, *outputs) in results.items():  # the first round warms up
        speed = [output.tokens_per_second for output in outputs]
        alone = alone or speed
        ratio = median(own / other for own, other in zip(speed, alone))
        mat = mean(output.stats.mean_accepted_tokens for output in outputs)
        lines.append([method, f"{median(speed):.1f}", f"{ratio:.2f}", f"{mat:.2f}"])
    return lines


@torch.inference_mode()
def beside_transformers(model, length):
    """One line on our logits and those of transformers' Llama, which takes the same weights."""
    tokens = random_tokens(model, length, 0)
    ours, theirs = model(tokens).float(), peer_of(model)(tokens).logits.float()
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean().item()
    difference = f"{(ours - theirs).abs().max():.3g} of {theirs.std():.3g} (standard deviation)"
    likeliest = f"same likeliest token at {same:.1%} of {length} positions"
    return f"beside transformers: largest difference of a logit {difference}, {likeliest}"


def check(args, device, dtype):
    """Refuse numbers that make no sense, and on a CPU shapes that do not fit its memory."""
    longest = min(SHAPES[shape].max_position_embeddings for shape in args.shapes) - max(NODES)
    counts = args.repetitions, args.rounds, args.max_new_tokens
    if not 1 <= args.context <= longest or min(counts) < 1:
        raise ValueError(f"--context is from 1 to {longest} for these shapes, counts at least 1")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for shape in args.shapes if device.type == "cpu" else ():
        parameters = empty_model(SHAPES[shape]).parameters()
        needed = sum(p.numel() for p in parameters) * dtype.itemsize
        if needed > memory:
            needs = f"{shape} needs {needed / 1e9:.0f} GB in {dtype}"
            raise ValueError(f"{needs}, this machine has {memory / 1e9:.0f} GB and no GPU")


def report(args):
    device = check_device(args.device)
    on_gpu = device.type == "cuda"
    name = args.dtype if args.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    dtype = DTYPES[name]
    check(args, device, dtype)
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
    model = random_model(SHAPES[shape], device, dtype, 0, exits[0], SCALE)
    draft = first_layers(model, exits)
    print(f"\n{shape} on {placement(model)}")
    if args.hf:
        print(beside_transformers(model, 128))
    parts = zip(exits, agreement(model, draft, 256, 1))
    agree = ", ".join(f"exit {exit_layer} {part:.0%}" for exit_layer, part in parts)
    print(f"draft and target agree: {agree}", flush=True)
    passes = render(forward_table(model, context, args.repetitions, bandwidth))
    segments = render(segment_table(draft, context, args.repetitions))
    print(f"\n{passes}\n\n{segments}\n", flush=True)
    print(render(decoding_table(model, draft, context, args.max_new_tokens, args.rounds)))


def parse(arguments):
    parser = Parser(prog="bench shapes", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["7b", "13b"])
    add("--device", default="auto")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--context", type=int, default=512, help="tokens of the prompt")
    add("--max-new-tokens", type=int, default=128)
    add("--repetitions", type=int, default=20, help="of each forward pass; the median is shown")
    add("--rounds", type=int, default=3, help="of whole generations, the methods in turn")
    add("--hf", action="store_true", help="compare logits with transformers'")
    return parser.parse_args(arguments)
