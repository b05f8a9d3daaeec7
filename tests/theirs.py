"""transformers, made comparable in float64."""

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def load_transformers(folder, dtype):
    """LlamaForCausalLM in ``dtype``, with torch's RMSNorm: its own rounds float64 to float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.float64:
        for name, norm in list(model.named_modules()):
            if isinstance(norm, LlamaRMSNorm):
                precise = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=dtype)
                precise.weight = norm.weight
                model.set_submodule(name, precise)
    return model


def assert_greedy(model, prompt, tokens, count):
    """``tokens`` are what transformers writes greedily: its argmax each time, in one pass.

    They end with EOS or are ``count``, and no EOS is inside.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(dim=-1).tolist()
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos)
    assert not ends.intersection(tokens[:-1]) and (len(tokens) == count or tokens[-1] in ends)
