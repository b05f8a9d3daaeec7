"""What tests of tokenizers share: folders with one, and texts that are hard to cut."""

import json
import shutil

import tokenizers
from helpers import WEIGHTS

from s2d.checkpoint.chat import VICUNA_SYSTEM

TEXTS = ["Hello world", "  two  spaces ", "Die Königin hört 123 Vögel."]
TEXTS += ["line\nbreak\ttab", "日本語 🙂 ¿qué?", "a</b>c"]
SAID = ["  Hi there, 12345 \n", "Hello! 日本 naïve", "And you? <|eot|>", "skip me", "Bye"]
BRACKETS = """{% for m in messages %}{% if m['role'] == 'user' -%}
{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }} {{ eos_token }}
{%- endif %}{% endfor %}"""
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_trained(folder, more=(), **changes):
    """A folder with a byte-level tokenizer.json, as Llama 3's, in which ``more`` is added.

    ``changes`` are of its tokenizer_config.json.
    """
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|begin|>", "<|end|>", "<|start|>", "<|/start|>", "<|eot|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator([*TEXTS, VICUNA_SYSTEM, *SAID] * 3, trainer)
    begin = {"single": "<|begin|> $A", "special_tokens": [("<|begin|>", 0)]}
    model.post_processor = tokenizers.processors.TemplateProcessing(**begin)
    model.add_tokens(list(more))
    model.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    config |= {"eos_token": "<|eot|>"} | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_folder(folder, changes, **files):
    """A miniature without weights whose tokenizer_config.json is changed; ``files`` next to it."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.model", "config.json"):
        shutil.copy(WEIGHTS / "mini-7b" / name, folder)
    config = json.loads((WEIGHTS / "mini-7b/tokenizer_config.json").read_text())
    del config["legacy"]
    for name, content in {"tokenizer_config": config | changes, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
