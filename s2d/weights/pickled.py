"""A Hugging Face folder of pickled tensors, pytorch_model*.bin, as what safetensors hold."""

from pickle import UnpicklingError

import torch

from ..fields import read_json
from . import DTYPES, copy_companions, shapes_of
from .config import read_config
from .shards import EMBEDDING, HEAD, PICKLED, check_dtype, check_shape, refuse_unclaimed


class PickledShards:
    """As GGUFFile: the tensors of one file after another."""

    def __init__(self, path, dtype):
        self.path, self.dtype, self.files = path, dtype, sorted(path.glob(PICKLED))
        self.config, self.raw = read_config(path), read_json(path / "config.json")
        self.shapes = shapes_of(self.config)
        if not self.files:
            raise FileNotFoundError(f"{path} has no {PICKLED} to convert")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        file = self.files[number]
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            state = {str(name): state[name].detach() for name in state}
        except Exception as error:  # unpickling what is damaged can fail in every way
            reason = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, UnpicklingError):  # PyTorch's text is how to run what it holds
                reason = "only tensors are read, as a pickle can run any code"
            raise ValueError(f"{file} is damaged or holds more than tensors ({reason})") from None
        refuse_unclaimed(file, state, self.shapes, self.config.num_hidden_layers)
        shapes = dict(self.shapes)
        head, embedding = state.get(HEAD), state.get(EMBEDDING)
        # A tied one comes along, unless it is known here to equal the embedding: ``check_tied``.
        if head is not None and (embedding is None or not torch.equal(head, embedding)):
            shapes[HEAD] = shapes[EMBEDDING]
        tensors, memory = {}, set()  # a file of safetensors knows no two tensors in the same memory
        for name in (name for name in state if name in shapes):
            check_dtype(file, name, state[name].dtype, DTYPES.values())
            check_shape(self.path, name, state[name].shape, shapes[name])
            tensor = state[name].to(self.dtype or state[name].dtype).contiguous()
            tensors[name] = tensor.clone() if tensor.data_ptr() in memory else tensor
            memory.add(tensor.data_ptr())
        return tensors

    def write_companions(self, folder):
        copy_companions(self.path, folder)
