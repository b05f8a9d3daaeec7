"""Full-size Llamas with random weights on one device: what a forward pass costs, and how near that is to the memory's speed.

    python -m s2d.bench shapes                  # 7b and 13b, in bfloat16 on a GPU
    python -m s2d.bench shapes --shapes tiny    # the same program anywhere

Speed does not ask what the weights say, acceptance does. Here the draft is the first layers of its target, and whatever
the layers after the draft's first exit add is scaled down until draft and target agree to a degree that is measured.
"""

import os
import statistics
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from ..decode import generate, now
from ..extras.static import static_twin
from ..model import DECODING_KERNELS, LlamaConfig
from ..program import Parser, optional
from ..tree import TreeAttention, ancestor_mask
from ..weights import DTYPES, check_device, choose_dtype, empty_model
from .tables import render

# Llama-2 and Vicuna v1.5, and one to try this program with.
SHAPES = {
    "tiny": LlamaConfig(1024, 64, 176, 8, 4, 2, 16, max_position_embeddings=1024, eos_token_ids=()),
    "7b": LlamaConfig(
        32000, 4096, 11008, 32, 32, 32, 128, max_position_embeddings=4096, eos_token_ids=()
    ),
    "13b": LlamaConfig(
        32000, 5120, 13824, 40, 40, 40, 128, max_position_embeddings=4096, eos_token_ids=()
    ),
    "70b": LlamaConfig(
        32000, 8192, 28672, 80, 64, 8, 128, max_position_embeddings=4096, eos_token_ids=()
    ),
}
EXITS = {"tiny": (2, 3, 4), "7b": (6, 9, 12), "13b": (6, 9, 12), "70b": (6, 9, 12)}
NODES = (1, 2, 4, 8, 16, 32, 64)
LOGIT_STD = (
    12.0  # of a confident model: the likeliest of 32,000 tokens then has most of the probability
)


def random_model(config, device, dtype, seed, full_layers, scale):
    """A Llama on ``device`` whose layers after the first ``full_layers`` add ``scale`` times as much as those before."""
    model, generator = empty_model(config), torch.Generator(device).manual_seed(seed)
    for name, empty in list(model.named_parameters()):
        tensor = torch.ones(empty.shape, device=device, dtype=dtype)
        if tensor.dim() == 2:
            std = (
                config.hidden_size**-0.5 * LOGIT_STD
                if name.startswith("lm_head")
                else tensor.shape[1] ** -0.5
            )
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deep = into_residual and int(name.split(".")[2]) >= full_layers
            tensor.normal_(0.0, std * scale if deep else std, generator=generator)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    return model.to(device=device, dtype=dtype).eval()


def first_layers(model, exits):
    """A draft with these ``exits`` that is the first layers of ``model``, in the same memory."""
    config = replace(
        model.config, num_hidden_layers=exits[-1], exit_layers=exits, thresholds=(0.6, 0.6, 0.0)
    )
    draft = empty_model(config)
    wanted = dict(draft.named_parameters())
    state = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    draft.load_state_dict(state, assign=True)
    return draft.to(device=model.device, dtype=model.dtype).eval()


def seconds(device, function, repetitions):
    """Median wall time of ``function()``, after one call that does not count."""
    times = []
    for _ in range(repetitions + 1):
        began = now(device)
        function()
        times.append(now(device) - began)
    return statistics.median(times[1:])


def copy_bandwidth(device, repetitions):
    """Bytes per second that a large copy reads and writes: what this memory can do in practice."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(device, lambda: target.copy_(source), repetitions)


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def forward_table(model, context, repetitions, bandwidth, name="pass"):
    """Time of one pass over a prompt of ``context`` tokens, then over trees of 1..64 nodes behind it."""
    config, device = model.config, model.device
    attention = TreeAttention(1, max(NODES), device, model.dtype)
    cache = model.new_cache(context + max(NODES))
    weights = sum(p.nbytes for p in model.parameters()) - model.model["embed_tokens"].weight.nbytes
    tokens = torch.randint(config.vocab_size, (1, context + max(NODES)), device=device)

    def forward(start, end):
        cache.length = start
        positions, mask = attention.span(context, start, end)
        hidden = model.run_layers(
            model.embed(tokens[:, start:end]), positions=positions, mask=mask, cache=cache
        )
        model.logits(hidden[0, -max(1, end - context) :])

    lines = [[name, "ms", "GB/s of weights", "share of a copy's speed"]]
    for nodes in (0, *NODES):
        parents = torch.arange(nodes, device=device) // 2 - 1  # any tree will do
        attention.set_tree(ancestor_mask(parents.clamp(min=-1)))
        span = (context, context + nodes) if nodes else (0, context)
        took = seconds(device, partial(forward, *span), repetitions)
        name = f"{nodes} node{'s'[: nodes > 1]}" if nodes else f"prompt of {context}"
        lines.append(
            [
                name,
                f"{took * 1e3:.2f}",
                f"{weights / took / 1e9:.1f}",
                f"{weights / took / bandwidth:.0%}",
            ]
        )
    return lines


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def segment_table(draft, context, repetitions, name="draft segment"):
    """Time of each of the draft's segments for one token behind ``context`` others, LM head included."""
    exits, lines = draft.config.exit_layers, [[name, "ms"]]
    hidden = torch.randn(1, 1, draft.config.hidden_size, device=draft.device).to(draft.dtype)
    for start, stop in zip((0, *exits), exits):
        cache = draft.new_cache(context + 1, start, stop)

        def forward(start=start, stop=stop, cache=cache):
            cache.length = context
            draft.logits(draft.run_layers(hidden, start, stop, cache=cache)[0])

        lines.append(
            [
                f"layers {start + 1}-{stop}",
                f"{seconds(draft.device, forward, repetitions) * 1e3:.2f}",
            ]
        )
    return lines


@torch.inference_mode()
def agreement(target, draft, length, seed):
    """Share of ``length`` places of random text where each exit's likeliest next token is the target's: (E,)."""
    tokens = random_tokens(target, length, seed)
    expected, shares, hidden, start = target(tokens).argmax(dim=-1), [], draft.embed(tokens), 0
    for exit_layer in draft.config.exit_layers:
        hidden, start = draft.run_layers(hidden, start, exit_layer), exit_layer
        shares.append((draft.logits(hidden).argmax(dim=-1) == expected).float().mean().item())
    return shares


def random_tokens(model, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)


def decoding_table(pairs, context, new_tokens, rounds):
    """Tokens per second of whole generations, the methods in turn, and the median of their speedups.

    ``pairs`` {what follows the methods' names: (target, draft)}, of which the first has no name.
    """
    results = {(method, name): [] for name in pairs for method in ("ar", "s2d", "s2d-tree")}
    for number in range(rounds + 1):  # the first round warms up
        prompt = random_tokens(pairs[""][0], context, number)[0].tolist()
        for (method, name), outputs in results.items():
            target, draft = pairs[name]
            outputs.append(
                generate(target, prompt, draft=draft, method=method, max_new_tokens=new_tokens)
            )
    speed = {
        key: [len(o.tokens) / o.stats.seconds for o in outputs[1:]]
        for key, outputs in results.items()
    }
    lines = [["method", "tokens/s", "speedup", "MAT"]]
    for key, outputs in results.items():
        ratios = [own / alone for own, alone in zip(speed[key], speed["ar", ""])]
        mat = statistics.mean(output.stats.mean_accepted_tokens for output in outputs[1:])
        lines.append(
            [
                "".join(key),
                f"{statistics.median(speed[key]):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{mat:.2f}",
            ]
        )
    return lines


@torch.inference_mode()
def beside_transformers(model, length):
    """One line: our logits and those of transformers' Llama, which takes the same weights, on ``length`` random tokens."""
    transformers = optional(
        "transformers", "-r tests/requirements.txt"
    )  # measured beside us, not a dependency
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    config = transformers.LlamaConfig(
        **{name: getattr(model.config, name) for name in names}, tie_word_embeddings=False
    )
    with torch.device("meta"):
        peer = transformers.LlamaForCausalLM(config)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        config
    ).to(model.device)
    tokens = random_tokens(model, length, 0)
    ours, theirs = model(tokens).float(), peer.eval()(tokens).logits.float()
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean().item()
    return (
        f"beside transformers {transformers.__version__}: largest difference of a logit {(ours - theirs).abs().max():.3g} "
        f"of {theirs.std():.3g} (standard deviation), same likeliest token at {same:.1%} of {length} places"
    )


def report(args):
    def show(table):
        print(f"\n{render(table, args.markdown)}", flush=True)

    positions = min(SHAPES[shape].max_position_embeddings for shape in args.shapes)
    if not 1 <= args.context <= positions - max(NODES):
        raise ValueError(
            f"--context must be from 1 to {positions - max(NODES)} for these shapes, got {args.context}"
        )
    if min(args.repetitions, args.rounds, args.max_new_tokens) < 1:
        raise ValueError("--repetitions, --rounds and --max-new-tokens must be at least 1")
    device = check_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    for shape in (
        args.shapes if device.type == "cpu" else ()
    ):  # a GPU says itself what is too large for it
        needed = sum(p.numel() for p in empty_model(SHAPES[shape]).parameters()) * dtype.itemsize
        if needed > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise ValueError(
                f"{shape} needs {needed / 1e9:.0f} GB in {dtype}, this machine has {memory / 1e9:.0f} GB and no GPU"
            )
    bandwidth = copy_bandwidth(device, args.repetitions)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{name}, torch {torch.__version__}, {dtype}; a large copy moves {bandwidth / 1e9:.0f} GB/s"
    )
    for shape in args.shapes:
        exits = EXITS[shape]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        model = random_model(SHAPES[shape], device, dtype, 0, exits[0], args.scale)
        draft = first_layers(model, exits)
        print(f"\n{shape}: {sum(p.numel() for p in model.parameters()):,} parameters, "
              f"{sum(p.nbytes for p in model.parameters()) / 1e9:.2f} GB")  # fmt: skip
        if args.hf:
            print(beside_transformers(model, 128))
        shares = agreement(model, draft, 256, 1)
        agreeing = ", ".join(f"exit {e} {share:.0%}" for e, share in zip(exits, shares))
        print(
            f"layers after {exits[0]} scaled by {args.scale:g}; draft and target agree: {agreeing}",
            flush=True,
        )
        pairs = {"": (model, draft)}
        if args.compile:
            pairs[", compiled"] = static_twin(model), static_twin(draft)
        for name, (target, drafter) in pairs.items():
            show(forward_table(target, args.context, args.repetitions, bandwidth, f"pass{name}"))
            show(segment_table(drafter, args.context, args.repetitions, f"draft segment{name}"))
        show(decoding_table(pairs, args.context, args.max_new_tokens, args.rounds))
        if device.type == "cuda":
            print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")
        del model, draft, pairs, target, drafter


def parse(arguments):
    parser = Parser(prog="bench shapes", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7b", "13b"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument(
        "--scale", type=float, default=0.05, help="of what layers after the first exit add"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--repetitions", type=int, default=20, help="of each forward pass; the median is shown"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of whole generations, the methods in turn"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compiled passes too, on a GPU recorded ones (CUDA graphs)",
    )
    parser.add_argument("--hf", action="store_true", help="compare logits with transformers'")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(arguments)
