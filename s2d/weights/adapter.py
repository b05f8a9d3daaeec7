"""A low-rank adapter in PEFT's layout: the first layers of another model, and a change of them.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): the weight W of a linear layer becomes
W + (alpha / r) B A, with A (r, in) and B (out, r). Here it is added once, when the model is loaded.
adapter_config.json says where W is.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from ..fields import errors_name, field, number, read_json, refuse_unknown, shown, whole
from .shards import FULL, check_dtype, opened

ADAPTER, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names, before those of the model

# What adapter_config.json may say: what is read here or changes nothing, and what has one value.
KNOWN = set(
    "peft_type base_model_name_or_path r lora_alpha target_modules init_lora_weights auto_mapping "
    "inference_mode lora_dropout megatron_core peft_version qalora_group_size revision".split()
)
FALSE = "fan_in_fan_out use_dora use_rslora use_qalora lora_bias ensure_weight_tying merge_weights"
ONLY = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
ONLY |= dict.fromkeys(("rank_pattern", "alpha_pattern", "loftq_config"), {})
ONLY |= dict.fromkeys(FALSE.split(), False)
# Others (pissa, olora, ...) take something away from W before anything is learnt.
BEGINNINGS = (None, True, False, "gaussian", "orthogonal")


def write_adapter(folder, base, pairs, scale):
    """Write ``pairs`` {weight's name: (A, B)}; ``base`` is the path from ``folder`` to theirs."""
    rank = len(next(iter(pairs.values()))[0])
    targets = sorted({name.split(".")[-2] for name in pairs})
    config = {key: ONLY[key] for key in ("peft_type", "task_type", "bias", "fan_in_fan_out")}
    config |= {"base_model_name_or_path": base, "r": rank, "lora_alpha": scale * rank}
    config |= {"lora_dropout": 0.0, "target_modules": targets, "inference_mode": True}
    tensors = {}
    for name, (a, b) in pairs.items():
        layer = PREFIX + name.removesuffix(".weight")
        tensors[f"{layer}.lora_A.weight"] = a.contiguous()
        tensors[f"{layer}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")


def folders_read(path):
    """The folders that loading the model in ``path`` reads: it and, of an adapter, its base's."""
    return [path, Adapter(path).base] if (path / ADAPTER).is_file() else [path]


class Adapter:
    """The adapter in ``folder``; ``base`` is the folder of the model that it changes.

    Raises ValueError for what is not plain LoRA, FileNotFoundError where the base is not there.
    """

    def __init__(self, folder):
        self.file, raw = Path(folder) / TENSORS, read_json(Path(folder) / ADAPTER)
        with errors_name(Path(folder) / ADAPTER):
            refuse_unknown(raw | {"peft_type": str(raw.get("peft_type"))}, KNOWN, ONLY)
            if (beginning := raw.get("init_lora_weights")) not in BEGINNINGS:
                only = f"only {', '.join(map(repr, BEGINNINGS[1:]))} are supported"
                raise ValueError(f"init_lora_weights is {shown(beginning)}; {only}")
            base = field(raw, "base_model_name_or_path", None, (str,), "a path")
            self.targets = field(raw, "target_modules", None, (list,), "a list")
            self.rank = whole(raw, "r", high=2**16)
            self.scale = number(raw, "lora_alpha") / self.rank
            self.base = (Path(folder) / base).resolve()
        if not self.base.is_dir():
            how = f"bring it to a folder (weights/README.md) and name that in {ADAPTER}"
            if self.base.name.startswith("smollm2-"):
                how = f"get it with: python -m s2d.weights get {self.base.name}"
            name = self.base if base.startswith((".", "/")) else base  # else perhaps a hub's id
            raise FileNotFoundError(f"{folder} is an adapter of {name}, which is not there; {how}")
        if (self.base / ADAPTER).is_file():
            how = "merge that first: python -m s2d.weights merge"
            raise ValueError(f"{folder} is an adapter of {self.base}, which is one itself; {how}")

    def changes(self, shapes):
        """{name: change (out, in) in float32} of the weights among ``shapes`` that it changes."""
        pickled = self.file.with_name("adapter_model.bin")
        if pickled.is_file() and not self.file.is_file():
            how = f"save it as {TENSORS}, as PEFT does by default"
            raise ValueError(f"{pickled} is pickled, and only safetensors are read; {how}")
        with opened(self.file) as file:
            for name in file.keys():
                check_dtype(self.file, name, file.get_slice(name).get_dtype(), FULL)
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
        changes = {}
        for name, shape in shapes.items():
            layer = name.removesuffix(".weight")
            pair = [f"{PREFIX}{layer}.lora_{half}.weight" for half in "AB"]
            if len(shape) != 2 or not tensors.keys() >= set(pair):
                continue
            a, b = map(tensors.pop, pair)
            found = f"{tuple(a.shape)} and {tuple(b.shape)}"
            wanted = f"{(self.rank, shape[1])} and {(shape[0], self.rank)}"
            if found != wanted:
                both = f"{layer} are {found}, but r and the model ask for {wanted}"
                raise ValueError(f"{self.file}: A and B of {both}")
            if not f".{layer}".endswith(tuple(f".{target}" for target in self.targets)):
                says = f"changes {layer}, which is not among the target_modules"
                raise ValueError(f"{self.file} {says}")
            changes[name] = self.scale * (b @ a)
        if tensors:
            raise ValueError(f"{self.file}: {shown(min(tensors))} fits no weight of the model")
        return changes
