"""transformers on a model's folder: what it reads there, and its own decoders."""

from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.notices import tell
from ..model import Llama
from ..options import Options
from ..pair.loading import Pair
from .measure import Run

ASSISTED = "transformers assisted"
# How many tokens the assistant drafts in a step, and the confidence below which it ends; 0: never.
# The last ones are transformers' defaults.
SETTINGS = (4, 0.0), (8, 0.0), (8, 0.4), (12, 0.4), (12, 0.7), (20, 0.4)


def as_transformers(model: Llama, folder: Path) -> Any:
    """What transformers reads in a ``folder``, for comparison with our ``model`` from there.

    It has as many layers, and its texts are greedy or sampled from all tokens. Raises ValueError if
    transformers does not read the folder.
    """
    import transformers  # which only this needs

    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        peer = load(folder, dtype=model.dtype)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {folder}: {error}") from None
    peer.config.num_hidden_layers = model.config.num_hidden_layers  # it runs no other
    # Folders may ask for sampling, penalties and more.
    eos = peer.generation_config.eos_token_id
    peer.generation_config = transformers.GenerationConfig(eos_token_id=eos)
    if model.dtype == torch.float64:
        keep_float64(peer)
    return peer.to(model.device)


def keep_float64(peer: Any) -> None:
    """Put PyTorch's RMSNorm in the place of transformers', which rounds float64 to float32."""
    for name, norm in list(peer.named_modules()):
        if hasattr(norm, "variance_epsilon"):  # LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm
            size = norm.weight.shape
            precise = torch.nn.RMSNorm(size, norm.variance_epsilon, device="meta")
            precise.weight = norm.weight
            peer.set_submodule(name, precise)


def peers_of(pairs: dict[str, Pair]) -> dict[str, Run]:
    """{name: run} of transformers' ``generate``: alone, with look-up, assisted by a draft.

    That is the first other model which has a vocabulary of the target's size, padding included.
    """
    alone = pairs["ar"]
    run = partial(run_peer, peer=as_transformers(alone.target, alone.folder.path))
    peers = {"transformers": run}
    peers["transformers look-up"] = partial(run, prompt_lookup_num_tokens=10)
    drafting = [pair for pair in pairs.values() if pair.draft not in (None, pair.target)]
    size = alone.folder.config.vocab_size
    assisting = [pair for pair in drafting if pair.draft.config.vocab_size == size]
    if not assisting:
        tell(f"{ASSISTED} is left out: no draft model has a vocabulary of the target's size")
        return peers
    draft = as_transformers(assisting[0].draft, assisting[0].draft_folder.path)
    for count, threshold in SETTINGS:
        assistant = copy(draft)  # it holds its settings; the weights are shared
        settings = assistant.generation_config = copy(draft.generation_config)
        settings.num_assistant_tokens = count
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = threshold
        name = f"{ASSISTED}:tokens={count}:threshold={threshold:g}"
        peers[name] = partial(run, assistant_model=assistant)
    return peers


def run_peer(
    prompt: list[int], seed: int, peer: Any, options: Options, **more: Any
) -> tuple[list[int], None]:
    """The answer to a ``prompt``, from a list of ids to a list of ids."""
    if options.temperature > 0:
        more |= {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    room = peer.config.max_position_embeddings - len(prompt)
    torch.manual_seed(seed)
    tokens = torch.tensor([prompt], device=peer.device)
    output = peer.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=min(options.max_new_tokens, room),
        do_sample=options.temperature > 0,
        pad_token_id=0,
        **more,
    )
    return output[0, len(prompt) :].tolist(), None
