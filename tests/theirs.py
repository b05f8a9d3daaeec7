"""transformers: random models of its own, and what makes it comparable in float64."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from s2d.bench.peers import keep_float64


def random_transformers(model_type="llama", **config):
    """A random model of an architecture, whose norms and biases are random as well."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def load_transformers(folder, dtype):
    """Their model in ``dtype``, with torch's RMSNorm: their own rounds float64 to float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.float64:
        keep_float64(model)
    return model
