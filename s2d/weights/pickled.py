"""A Hugging Face folder whose tensors are pickled, pytorch_model*.bin, as what a folder of safetensors holds."""

import zipfile

import torch

from . import check_shape, copy_companions, empty_model, parameter_shapes, torch_files
from .config import read_config, read_json


class PickledShards:
    """A checkpoint's pytorch_model*.bin files as a sequence of {name: tensor}, of which one is in memory at a time.

    ``raw`` is its config.json; ``dtype`` None keeps what the tensors have.
    """

    def __init__(self, path, dtype):
        self.path, self.dtype, self.files = path, dtype, torch_files(path)
        self.shapes, self.raw = (
            parameter_shapes(empty_model(read_config(path))),
            read_json(path / "config.json"),
        )
        if not self.files:
            raise FileNotFoundError(f"{path} has no pytorch_model*.bin to convert")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        """The tensors that a Llama has (old checkpoints hold tables beside them), in the wanted dtype."""
        file = self.files[number]
        try:
            # Before torch 1.6 a checkpoint was no zip archive; such a file cannot be mapped, so it is read whole.
            state = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
            tensors = {name: state[name] for name in state if name in self.shapes}
        except Exception as error:  # unpickling what is damaged can fail in every way
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"{file} is damaged or holds more than tensors ({reason}); download it again"
            ) from None
        for name, tensor in tensors.items():
            check_shape(self.path, name, tensor.shape, self.shapes[name])
        tensors = {
            name: tensor.to(self.dtype or tensor.dtype).contiguous()
            for name, tensor in tensors.items()
        }
        first = {}  # of those in the same memory, which a file of safetensors does not know; the others become copies
        return {name: tensor if first.setdefault(tensor.data_ptr(), name) == name else tensor.clone()
                for name, tensor in tensors.items()}  # fmt: skip

    def write_companions(self, folder):
        copy_companions(self.path, folder)
