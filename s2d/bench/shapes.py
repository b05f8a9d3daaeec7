"""Full-size Llamas with random weights: what forward passes and whole generations cost.

Speed does not ask what the weights say, acceptance does. Here the draft is the target's own first
layers, and what those after its first exit add is scaled down until the target accepts a part of
its tokens that is measured. Knows nothing about files and text.
"""

from functools import partial
from itertools import pairwise

import torch
from torch.nn.attention import sdpa_kernel
from torch.utils.benchmark import Timer

from ..draft import DraftConfig
from ..model import DECODING_KERNELS
from ..tree import TreeAttention
from ..weights import DTYPES, check_device, empty_model, placement
from .measure import measure, runners
from .methods import peer_of
from .tables import render, summarise, target_table

POSITIONS, NODES = 4096, (1, 2, 4, 8, 16, 32, 64)
FIXED = dict(max_position_embeddings=POSITIONS, eos_token_ids=(), thresholds=(0.6, 0.6, 0.0))
llama = partial(DraftConfig, **FIXED)
SHAPES = {  # one to try this program with, then Llama-2 and Vicuna v1.5; each is its own draft
    "tiny": llama(1024, 64, 176, 8, 4, 2, 16, exit_layers=(2, 3, 4)),
    "7b": llama(32000, 4096, 11008, 32, 32, 32, 128, exit_layers=(6, 9, 12)),
    "13b": llama(32000, 5120, 13824, 40, 40, 40, 128, exit_layers=(6, 9, 12)),
}
LOGIT_STD = 12.0  # of a confident model: one of 32,000 tokens then has most of the probability
SCALE = 0.05  # of what layers after the first exit add


def random_model(config, device, dtype, scale=SCALE):
    """A random Llama; each layer after its first exit adds ``scale`` times what the others add."""
    model, state = empty_model(config), {}
    generator = torch.Generator(device).manual_seed(0)
    for name, empty in model.named_parameters():
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        late = into_residual and int(name.split(".")[2]) >= config.exit_layers[0]
        std = scale if late else LOGIT_STD if name.startswith("lm_head") else 1.0
        state[name] = torch.ones(empty.shape, device=device, dtype=dtype)
        if empty.dim() == 2:
            state[name].normal_(0.0, std * empty.shape[1] ** -0.5, generator=generator)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).to(device=device, dtype=dtype).eval()


def median_seconds(function):
    """Of a call, among as many as fit in half a second."""
    timer = Timer("f()", globals={"f": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.5).median


def copy_bandwidth(device):
    """Bytes a second that a large copy reads and writes: what this memory can do in practice."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    return 2 * source.nbytes / median_seconds(partial(torch.empty_like(source).copy_, source))


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def pass_table(model, context, bandwidth):
    """Passes over trees behind ``context`` positions, and of a token through the draft's segments.

    ``bandwidth``: bytes a second of a copy; a pass through all layers reads all weights.
    """
    cache = model.new_cache(context + max(NODES))
    hidden = torch.randn(1, max(NODES), model.config.hidden_size).to(model.lm_head.weight)
    weights = sum(p.nbytes for p in model.parameters()) - model.model["embed_tokens"].weight.nbytes
    lines = [["pass", "ms", "of a copy's speed"]]

    def add(name, rows, first=0, end=None, **tree):
        def run():
            cache.length = context
            out = model.run_layers(hidden[:, :rows], first, end, cache=cache, **tree)
            model.logits(out[0])

        seconds = median_seconds(run)
        share = "" if end else f"{weights / seconds / bandwidth:.0%}"
        lines.append([name, f"{seconds * 1e3:.2f}", share])

    for nodes in NODES:
        parents = torch.arange(nodes, device=model.device) // 2 - 1  # any tree will do
        attention = TreeAttention(parents, model.dtype)
        positions, mask = attention.span(context, context, context + nodes)
        add(f"{nodes} node{'s'[: nodes > 1]}", nodes, positions=positions, mask=mask)
    for first, end in pairwise((0, *model.config.exit_layers)):
        add(f"draft layers {first + 1}-{end}", 1, first, end)
    return lines


def decoding_table(model, args):
    """Whole generations, by methods that take turns."""
    methods = {name: (False, {"method": name}) for name in ("ar", "s2d", "s2d-tree")}
    runs = runners({False: (model, model)}, methods, {}, 0.0, args.max_new_tokens)

    def ask(run, _, seed):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(model.config.vocab_size, (args.context,), generator=generator)
        tokens, seconds, generation = run(prompt.tolist(), seed)
        record = {"group": "overall", "tokens": [tokens], "wall_time": [seconds]}
        return record | {"generations": [generation]}

    return target_table(summarise(sum(measure(runs, [None], args.rounds, "decoding", ask), [])))


@torch.inference_mode()
def beside_transformers(model):
    """One line on our logits and those of transformers' Llama, which takes the same weights."""
    tokens = torch.arange(128, device=model.device)[None]
    ours, theirs = model(tokens).float(), peer_of(model)(tokens).logits.float()
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean().item()
    differs = f"{(ours - theirs).abs().max():.3g} of {theirs.std():.3g} (standard deviation)"
    likeliest = f"same likeliest token at {same:.1%} of 128 positions"
    return f"beside transformers: largest difference of a logit {differs}, {likeliest}"


def report(args):
    """All tables of each shape; its model is out of memory before the next one is made."""
    device = check_device(args.device)
    on_gpu = device.type == "cuda"
    dtype = (DTYPES | {"auto": torch.bfloat16 if on_gpu else torch.float32})[args.dtype]
    if args.context > (longest := POSITIONS - max(NODES)):
        raise ValueError(f"--context is at most {longest} for these shapes")
    bandwidth = copy_bandwidth(device)
    print(f"torch {torch.__version__}, a large copy moves {bandwidth / 1e9:.0f} GB/s")
    for shape in args.shapes:
        model = random_model(SHAPES[shape], device, dtype)
        print(f"\n{shape} on {placement(model)}")
        if args.hf:
            print(beside_transformers(model))
        print(f"\n{render(pass_table(model, args.context, bandwidth))}\n", flush=True)
        print(render(decoding_table(model, args)), flush=True)
        del model
        if on_gpu:
            print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")
            torch.cuda.reset_peak_memory_stats(device)
