"""The miniature family: three targets that learn corpus.py from nothing, and the first's draft."""

import io
import json
import math
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import sentencepiece
import torch

from ..checkpoint.chat import VICUNA_SYSTEM
from ..files import refuse_existing
from ..model import Llama, LlamaConfig
from ..notices import tell
from ..options import Drafting
from .corpus import conversations
from .dialogues import Counts
from .nested import MINI, cut, row_count, rows_of, train_and_save

VOCAB_SIZE = 1024


def shape(layers, width, heads, kv_heads):
    """A miniature Llama with Llama's own proportions (8/3 of the width in the MLP, heads of 32)."""
    counts = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width // heads)
    sizes = dict(hidden_size=width, intermediate_size=math.ceil(width / 6) * 16)
    counts |= dict(num_hidden_layers=layers, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    return LlamaConfig(**sizes, **counts)


# Shape, millions of training tokens, peak learning rate, and whether it starts copying and learns
# answers only. The draft is the first four layers of mini-7b.
TARGETS = {
    "mini-7b": (shape(10, 160, 5, 5), 6.0, 2.5e-3, False),
    "mini-13b": (shape(13, 192, 6, 6), 7.0, 2e-3, False),
    "mini-70b": (shape(20, 256, 8, 2), 4.0, 1.5e-3, True),
}
DRAFT_EXITS, DRAFT_TOKENS = (2, 3, 4), 1.5
# Fast for every target, on questions like the corpus and on others.
DRAFTING = Drafting(DRAFT_EXITS, (0.6, 0.4, 0.0), length=12, stop=0.35, tree=(3, 12, 32))


@torch.no_grad()
def initialise(config, seed, copying):
    """A fresh Llama whose heads begin by attending to similar tokens and handing on what they see.

    Mimetic initialisation (Trockman and Kolter 2023, arXiv 2305.09828, section 3), without which
    models this small need several times as much text before they use the prompt. With ``copying``,
    attention starts almost flat, its values orthogonal and stronger than the token itself: a deep
    model with few KV heads then copies words from the first steps on.
    """
    torch.manual_seed(seed)
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    into_residual = (2 * config.num_hidden_layers) ** -0.5
    # Part of the query stays random, or heads that share a key would stay the same for ever.
    own, like_key, handed_on = (0.25, 0.35, 3.6) if copying else (0.5, 1.4, into_residual)
    blocks, width, groups = model.model.layers, config.hidden_size, config.num_key_value_heads

    def for_each_head(weight):  # (G * D, hidden) -> (H * D, hidden)
        by_group = weight.unflatten(0, (groups, config.head_dim))
        return by_group.repeat_interleave(config.num_attention_heads // groups, dim=0).flatten(0, 1)

    model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    if copying:  # values have fewer dimensions than tokens: neighbours get different ones
        square = [torch.nn.init.orthogonal_(torch.empty(width, width)) for _ in blocks]
        parts = torch.cat(square).split(groups * config.head_dim)
        for block, values in zip(blocks, parts):
            block.self_attn.v_proj.weight.copy_(values)
    for block in blocks:
        attention = block.self_attn
        keys = for_each_head(attention.k_proj.weight)
        attention.q_proj.weight.mul_(own).add_(keys, alpha=like_key)
        attention.o_proj.weight.copy_(for_each_head(attention.v_proj.weight).T * handed_on)
        block.mlp.down_proj.weight.mul_(into_residual)
    return model


def make_tokenizer(folder, seed):
    """Train the family's tokenizer, built as Llama's is, on 20,000 training conversations."""
    texts = (
        f"{VICUNA_SYSTEM} USER: {question} ASSISTANT: {answer}"
        for conversation in islice(conversations(seed, "train"), 20000)
        for question, answer in conversation.turns
    )
    model = io.BytesIO()
    options = dict(model_type="bpe", vocab_size=VOCAB_SIZE, byte_fallback=True, split_digits=True)
    options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    options |= dict(character_coverage=1.0, num_threads=1, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def train_mini(run, millions=None):
    """Train all, each on so many ``millions`` of tokens or its own; --resume keeps those there."""
    if not run.resume:
        refuse_existing(run.out)
    if millions is not None:
        row_count(millions, MINI)  # too few are refused before anything is written
    run.remember(millions=millions)
    with tempfile.TemporaryDirectory(prefix="mini-") as tokenizer:  # so it has Vicuna's format
        make_tokenizer(Path(tokenizer), run.seed)
        members = "mini-7b", "mini-draft", "mini-13b", "mini-70b"
        for number, name in enumerate(members, start=1):
            member = replace(run, out=run.out / name)
            train = train_draft if name == "mini-draft" else train_target
            if not member.out.exists():
                tell(f"{name}, {number} of {len(members)}")
                train(member, tokenizer, millions)


def train_target(run, tokenizer, millions):
    """One of TARGETS from nothing, with the ``tokenizer`` in a folder."""
    config, own_millions, peak, copying = TARGETS[run.out.name]
    recipe = replace(MINI, lr=peak)
    model = initialise(config, run.seed, copying).to(run.device)
    # To foresee the questions as well, a model that copies would first have to unlearn it.
    millions, counts = millions or own_millions, Counts()
    rows = rows_of(tokenizer, "mini", run, recipe, millions, counts, answers_only=copying)
    train_and_save(model, (config.num_hidden_layers,), rows, recipe, run, tokenizer)


def train_draft(run, tokenizer, millions):
    """The draft from the first layers of the mini-7b that is in the same folder."""
    init, run = run.out.with_name("mini-7b"), replace(run, seed=run.seed + 1)
    model = cut(init, DRAFT_EXITS, run.device, DRAFTING)
    rows = rows_of(init, "mini", run, MINI, millions or DRAFT_TOKENS, Counts())
    train_and_save(model, DRAFT_EXITS, rows, MINI, run, init)
