"""What tests of tokenizers share: folders with one, and texts that are hard to cut."""

import json
import random
import shutil

import tokenizers
from helpers import WEIGHTS

from s2d.checkpoint.chat import VICUNA_SYSTEM

TEXTS = ["Hello world", "  two  spaces ", "Die Königin hört 123 Vögel."]
TEXTS += ["line\nbreak\ttab", "日本語 🙂 ¿qué?", "a</b>c"]
SAID = ["  Hi there, 12345 \n", "Hello! 日本 naïve", "And you? <|eot|>", "skip me", "Bye"]
ODD = [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x1c", "\x00", "▁", "a", "Hi", "word", " the"]
ODD += ["ing", "日", "é", "\u0301", "🙂", "<0x0A>", "<", "|>", "'s", "123", "</", "s>"]
BRACKETS = """{% for m in messages %}{% if m['role'] == 'user' -%}
{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }} {{ eos_token }}
{%- endif %}{% endfor %}"""
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINK = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"  # as Qwen3's


def messages(said):
    """A dialogue as transformers takes it: texts, user and assistant in turn."""
    roles = ("user", "assistant") * len(said)
    return [{"role": role, "content": text} for role, text in zip(roles, said)]


def odd_texts(names):
    """Random texts of what is hard to cut, the ``names`` of special tokens among it."""
    rng, parts = random.Random(0), [*ODD, *names]
    return ["".join(rng.choices(parts, k=rng.randrange(1, 12))) for _ in range(300)]


def in_groups(ids, rng):
    """A list in parts of one to three."""
    while ids:
        size = rng.randrange(1, 4)
        yield ids[:size]
        ids = ids[size:]


def assert_agree(ours, theirs, texts):
    """Ids and texts back are those of transformers."""
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


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


def added(text, **flags):
    """A token as tokenizer_config.json writes it."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return plain | {"content": text, "special": True} | flags
