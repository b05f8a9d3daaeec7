"""A Llama -> a Hugging Face folder."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..model import Llama
from .config import config_to_dict
from .files import staged
from .load import HEAD

# What a model is spoken to with, and where its answers end: copied with its weights.
COMPANIONS = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "added_tokens.json")
COMPANIONS += ("special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def save_model(
    model: Llama,
    path: Path | str,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``model`` as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    The tokenizer in the folder ``tokenizer_from`` is copied along. ValueError: ``path`` is there.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already; remove it or name another")
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[HEAD]
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in state.items()}
    config = config_to_dict(model.config, dtype, model.drafting)
    with staged(path) as stage:
        stage.mkdir()
        for name in COMPANIONS:
            if tokenizer_from and Path(tokenizer_from, name).is_file():
                shutil.copyfile(Path(tokenizer_from, name), stage / name)
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n")
