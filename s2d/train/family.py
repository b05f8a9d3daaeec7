"""The miniature family: three targets that learn corpus.py from nothing, and the first's draft."""

import io
import json
import math
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from ..checkpoint.chat import VICUNA_SYSTEM
from ..checkpoint.files import taken
from ..checkpoint.load import load_model
from ..checkpoint.tokenizer import Tokenizer
from ..model import Llama, LlamaConfig
from .corpus import conversations
from .data import make_rows, read_dialogues, read_records
from .fit import Divided, Recipe, Run, fit
from .nested import MINI, save_trained

VOCAB_SIZE = 1024


def make_config(layers: int, width: int, heads: int, kv_heads: int) -> LlamaConfig:
    """A miniature Llama with Llama's own proportions (8/3 of the width in the MLP, heads of 32)."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=math.ceil(width / 6) * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=512,
    )


CONFIGS = {
    "mini-7b": make_config(10, 160, 5, 5),
    "mini-13b": make_config(13, 192, 6, 6),
    "mini-70b": make_config(20, 256, 8, 2),
}
# In the order in which they are trained: the draft is the first layers of mini-7b, trained further.
RECIPES = {
    "mini-7b": replace(MINI, exits=(10,), millions=6.0, lr=2.5e-3, all_text=True),
    "mini-draft": replace(MINI, init="mini-7b", exits=(2, 3, 4)),
    "mini-13b": replace(MINI, exits=(13,), millions=7.0, lr=2e-3, all_text=True),
    # To foresee the questions as well, a model that copies would first have to unlearn it.
    "mini-70b": replace(MINI, exits=(20,), millions=4.0, lr=1.5e-3),
}
# Fast for every target, on questions like the corpus and on others.
# Exit 4 is no better than exit 3, and takes longer (end of bench/README.md).
DRAFTING = dict(exits=(2, 3), thresholds=(0.6, 0.0), draft_length=12, stop=0.35)
DRAFTING |= dict(growing=(3, 12, 32))


@torch.no_grad()
def initialise(config: LlamaConfig, seed: int) -> Llama:
    """A fresh Llama whose heads begin by attending to similar tokens and handing on what they see.

    Mimetic initialisation (Trockman and Kolter 2023, arXiv 2305.09828, section 3), without which
    models this small need several times as much text before they use the prompt. If heads share
    keys and values, attention starts almost flat, its values orthogonal and stronger than the token
    itself: a deep model with few KV heads then copies words from the first steps on.
    """
    times = config.num_attention_heads // config.num_key_value_heads
    copying = times > 1
    torch.manual_seed(seed)
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    blocks = model.model.layers
    if copying:  # values have fewer dimensions than tokens: neighbours get different ones
        squares = [torch.empty(config.hidden_size, config.hidden_size) for _ in blocks]
        rows = torch.cat([torch.nn.init.orthogonal_(square) for square in squares])
        for block, values in zip(blocks, rows.split(config.num_key_value_heads * config.head_dim)):
            block.self_attn.v_proj.weight.copy_(values)
    into_residual = (2 * config.num_hidden_layers) ** -0.5
    # Part of the query stays random, or heads that share a key would stay the same for ever.
    shares = (0.25, 0.35, 3.6) if copying else (0.5, 1.4, into_residual)
    random_part, like_key, handed_on = shares
    for block in blocks:
        attention = block.self_attn
        projections = torch.stack((attention.k_proj.weight, attention.v_proj.weight))
        by_head = projections.unflatten(1, (-1, config.head_dim))  # (2, G, D, hidden)
        keys, values = by_head.repeat_interleave(times, dim=1).flatten(1, 2)  # (H * D, hidden) each
        attention.q_proj.weight.mul_(random_part).add_(keys, alpha=like_key)
        attention.o_proj.weight.copy_(values.T * handed_on)
        block.mlp.down_proj.weight.mul_(into_residual)
    return model


def make_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Train the family's tokenizer, built as Llama's is, on 20,000 training conversations."""
    model = io.BytesIO()
    texts = (
        f"{VICUNA_SYSTEM} USER: {question} ASSISTANT: {answer}"
        for conversation in islice(conversations(seed, "train"), 20000)
        for question, answer in conversation
    )
    options = dict(model_type="bpe", vocab_size=VOCAB_SIZE, byte_fallback=True, split_digits=True)
    options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    options |= dict(character_coverage=1.0, num_threads=1, minloglevel=2)
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=texts, model_writer=model, **options)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def train_mini(run: Run, millions: float | None = None) -> None:
    """Train those that are not there, each on so many ``millions`` of tokens or its own."""
    with tempfile.TemporaryDirectory(prefix="mini-") as folder:  # so it has Vicuna's format
        tokenizer = make_tokenizer(Path(folder), run.seed)
        for name, recipe in RECIPES.items():
            member = replace(run, out=run.out / name)
            if not member.out.exists():
                recipe = replace(recipe, millions=millions or recipe.millions)
                train_member(member, recipe, tokenizer)


def train_member(run: Run, recipe: Recipe, tokenizer: Tokenizer) -> None:
    with taken(run.out):
        drafting: dict[str, Any] = {}
        if recipe.init:
            drafting = DRAFTING
            run = replace(run, seed=run.seed + 1)
            whole = run.out.with_name(recipe.init)
            model = load_model(whole, run.device, "float32", quick=False, layers=recipe.exits[-1])
        else:
            model = initialise(CONFIGS[run.out.name], run.seed).to(run.device)
        records = read_records("mini", run.seed)
        dialogues = read_dialogues("mini", records, tokenizer, (), not recipe.all_text)
        rows = make_rows(dialogues, recipe.batch, recipe.length, recipe.millions)
        trained = Divided(model)
        for _ in fit(trained, rows, recipe, run):
            pass  # it says itself how far it is
        save_trained(trained, drafting, run, tokenizer.folder)
