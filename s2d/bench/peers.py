"""transformers with the weights of a model of ours, in the same memory: its own decoders."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import empty_model
from ..checkpoint.config import config_to_dict
from ..checkpoint.notices import tell
from ..model import Llama
from ..pair.loading import Choice
from .measure import Run

ASSISTED = "transformers assisted"
# How many tokens the assistant drafts in a step, and the confidence below which it ends; 0: never.
# The last ones are transformers' defaults.
SETTINGS = (4, 0.0), (8, 0.0), (8, 0.4), (12, 0.4), (12, 0.7), (20, 0.4)


def as_transformers(model: Llama, folder: Path | None = None) -> Any:
    """transformers' Llama, or Qwen, with the weights of ``model``, in the same memory.

    Its configuration is what transformers reads in ``folder``, or else that of ``model``. Texts end
    where those of ``model`` do.
    """
    import transformers  # which only this needs

    if folder is None:
        config = transformers.AutoConfig.for_model(**config_to_dict(model.config, model.dtype))
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
    peer = empty_model(config, transformers.AutoModelForCausalLM.from_config)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    peer.generation_config.eos_token_id = list(model.config.eos_token_ids) or None
    if model.dtype == torch.float64:
        keep_float64(peer)
    return peer.to(model.device).eval()


def keep_float64(peer: Any) -> None:
    """Put PyTorch's RMSNorm in the place of transformers', which rounds float64 to float32."""
    for name, norm in list(peer.named_modules()):
        if hasattr(norm, "variance_epsilon"):  # LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm
            size = norm.weight.shape
            precise = torch.nn.RMSNorm(size, norm.variance_epsilon, device="meta")
            precise.weight = norm.weight
            peer.set_submodule(name, precise)


def choose_assistant(chosen: list[dict[str, Choice]]) -> str:
    """The first method whose draft may assist transformers on all targets; "ar" if none may."""
    for name in chosen[0]:
        if all(may_assist(choices[name]) for choices in chosen):
            return name
    tell(f"{ASSISTED} is left out: no draft model has a vocabulary of the targets' size")
    return "ar"


def may_assist(choice: Choice) -> bool:
    """Whether the draft is another model, and both vocabularies have one size, padding included."""
    draft = choice.found.draft
    if draft is None or draft.path.samefile(choice.folder.path):
        return False
    return draft.config.vocab_size == choice.folder.config.vocab_size


def peers_of(target: Llama, draft: Llama | None) -> dict[str, Run]:
    """{name: run} of transformers' ``generate``: alone, with look-up, assisted by a ``draft``."""
    run = partial(run_peer, peer=as_transformers(target))
    peers = {"transformers": run}
    peers["transformers look-up"] = partial(run, prompt_lookup_num_tokens=10)
    if draft is not None:
        for count, threshold in SETTINGS:
            assistant = as_transformers(draft)  # it holds its settings; the weights are shared
            settings = assistant.generation_config
            settings.num_assistant_tokens = count
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = threshold
            name = f"{ASSISTED}:tokens={count}:threshold={threshold:g}"
            peers[name] = partial(run, assistant_model=assistant)
    return peers


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
