"""transformers, made comparable in float64."""

import torch
from transformers import AutoModelForCausalLM

from s2d.bench.peers import keep_float64


def load_transformers(folder, dtype):
    """Their model in ``dtype``, with torch's RMSNorm: their own rounds float64 to float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.float64:
        keep_float64(model)
    return model


def greedy_tokens(folder, prompt, count):
    """The tokens, ``count`` or up to EOS, that transformers writes in float64."""
    model = load_transformers(folder, torch.float64)
    text = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0]
    return text[len(prompt) :].tolist()
