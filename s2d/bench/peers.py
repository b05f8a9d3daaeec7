"""transformers with the weights of a model of ours, in the same memory: its own decoders."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import empty_model
from ..checkpoint.config import config_to_dict
from ..checkpoint.notices import tell
from ..model import Llama
from .measure import Run

ASSISTED = "transformers assisted"
# How many tokens the assistant drafts in a step, and the confidence below which it ends; 0: never.
SETTINGS = (4, 0.0), (8, 0.0), (8, 0.4), (12, 0.4), (12, 0.7)


def as_transformers(model: Llama, folder: Path | None = None) -> Any:
    """transformers' Llama, or Qwen, with the weights of ``model``, in the same memory.

    Its configuration is what transformers reads in ``folder``, or else that of ``model``.
    """
    import transformers  # which only this needs

    if folder is None:
        config = transformers.AutoConfig.for_model(**config_to_dict(model.config, model.dtype))
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
    peer = empty_model(config, transformers.AutoModelForCausalLM.from_config)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.to(model.device).eval()


def keep_float64(peer: Any) -> None:
    """Put PyTorch's RMSNorm in the place of transformers', which rounds float64 to float32."""
    for name, norm in list(peer.named_modules()):
        if hasattr(norm, "variance_epsilon"):  # LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm
            size = norm.weight.shape
            precise = torch.nn.RMSNorm(size, norm.variance_epsilon, device="meta")
            precise.weight = norm.weight
            peer.set_submodule(name, precise)


def peers_of(target: Llama, draft: Llama | None) -> dict[str, Run]:
    """{name: run} of transformers' ``generate``: alone, assisted by a ``draft``, with look-up.

    Assisted with its own defaults, which are 20 tokens at a confidence of 0.4, and with each of
    SETTINGS.
    """
    run = partial(run_peer, peer=as_transformers(target))
    peers = {"transformers": run}
    if draft is not None and len(draft.model.embed_tokens.weight) != target.config.vocab_size:
        tell(f"{ASSISTED} is left out: it needs vocabularies of one size, padding included")
    elif draft is not None:
        peers[ASSISTED] = partial(run, assistant_model=as_transformers(draft))
        for count, threshold in SETTINGS:
            assistant = as_transformers(draft)  # it holds its settings; the weights are shared
            assistant.generation_config.num_assistant_tokens = count
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = threshold
            name = f"{ASSISTED}:tokens={count}:threshold={threshold:g}"
            peers[name] = partial(run, assistant_model=assistant)
    return peers | {"transformers look-up": partial(run, prompt_lookup_num_tokens=10)}


def run_peer(
    prompt: list[int],
    seed: int,
    peer: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    **options: Any,
) -> tuple[list[int], None]:
    """The answer to a ``prompt``, from a list of ids to a list of ids."""
    if temperature:
        options |= {"temperature": temperature, "top_k": 0}
    room = peer.config.max_position_embeddings - len(prompt)
    torch.manual_seed(seed)
    tokens = torch.tensor([prompt], device=peer.device)
    output = peer.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=min(max_new_tokens, room),
        do_sample=temperature > 0,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist(), None
