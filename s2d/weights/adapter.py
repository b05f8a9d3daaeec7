"""A low-rank adapter in PEFT's layout: the folder of a model that is another one's first layers and a small change of them.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): the weight W of a linear layer becomes W + (alpha / r) B A, with A (r,
in) and B (out, r). Here it is added once, when the model is loaded. adapter_config.json says where W is.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import number, read_json, shown, whole

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names, before those of the model


def write_adapter(folder, base, pairs, scale):
    """Write ``pairs`` {weight's name: (A, B)}, their ``scale``, and where their ``base`` is: a path, as seen from ``folder``."""
    rank = len(next(iter(pairs.values()))[0])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in pairs}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {}
    for name, (a, b) in pairs.items():
        layer = PREFIX + name.removesuffix(".weight")
        tensors |= {
            f"{layer}.lora_A.weight": a.contiguous(),
            f"{layer}.lora_B.weight": b.contiguous(),
        }
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


class Adapter:
    """The adapter in ``folder``; ``base`` is the folder of the model it changes. Raises ValueError for what is not LoRA."""

    def __init__(self, folder):
        self.folder, raw = Path(folder), read_json(Path(folder) / CONFIG)
        try:
            self.base, self.scale = self._read(raw)
        except ValueError as error:
            raise ValueError(f"{self.folder / CONFIG}: {error}") from None
        if not self.base.is_dir():
            known = self.base.name if self.base.name.startswith("smollm2-") else "its folder"
            raise FileNotFoundError(f"{self.folder} is an adapter of {self.base}, which is not there; "
                                    f"get it with: python -m s2d.weights get {known}")  # fmt: skip

    def _read(self, raw):
        if raw.get("peft_type") != "LORA":
            raise ValueError(
                f"peft_type is {shown(raw.get('peft_type'))}; only 'LORA' is supported"
            )
        for key, plain in (("bias", "none"), ("fan_in_fan_out", False), ("use_dora", False), ("use_rslora", False),
                           ("rank_pattern", {}), ("alpha_pattern", {}), ("modules_to_save", None)):  # fmt: skip
            if raw.get(key) not in (None, plain):
                raise ValueError(f"{key} is {shown(raw[key])}; only {plain!r} is supported")
        base = raw.get("base_model_name_or_path")
        if not isinstance(base, str) or not base.isprintable():
            raise ValueError(f"base_model_name_or_path is {shown(base)}; expected a path")
        return (self.folder / base).resolve(), number(raw, "lora_alpha") / whole(
            raw, "r", high=2**16
        )

    def changes(self, shapes):
        """{name: change (out, in) in float32} of the weights among ``shapes`` that it changes."""
        try:
            with safe_open(self.folder / TENSORS, framework="pt") as file:
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}
        except (FileNotFoundError, SafetensorError, OSError) as error:
            raise ValueError(
                f"{self.folder / TENSORS} is missing or damaged ({shown(str(error))[1:-1]})"
            ) from None
        changes = {}
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            weight = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
            a, b = tensors.pop(name), tensors.pop(name.replace("lora_A", "lora_B"), None)
            if (
                b is None
                or weight not in shapes
                or (b.shape[0], a.shape[1], a.shape[0]) != (*shapes[weight], b.shape[1])
            ):
                raise ValueError(
                    f"{self.folder / TENSORS}: {shown(name)} fits no weight of the model"
                )
            changes[weight] = self.scale * (b @ a)
        if tensors:
            raise ValueError(
                f"{self.folder / TENSORS} has {shown(min(tensors))}, which is no part of an adapter"
            )
        return changes
