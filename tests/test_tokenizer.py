"""The tokenizer: round trips, streaming, chat templates, and its peers' ids."""

import json
import re
import shutil
import sys

import pytest
import tokenizers
from helpers import ROOT, WEIGHTS
from transformers import AutoTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from s2d import Tokenizer
from s2d.chat import VICUNA_SYSTEM, chat_template
from s2d.tokenizer import TextStream

SHARED = ROOT.parent / "shared" / "data"
TEXTS = [
    "Hello world",
    "  two  spaces ",
    "Die Königin hört 123 Vögel.",
    "line\nbreak\ttab",
    "日本語 🙂 ¿qué?",
    "a</s>b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_streaming_never_shows_half_a_character(tokenizer, text, group):
    stream, parts = TextStream(tokenizer), []
    ids = tokenizer.encode(text)[1:]
    for start in range(0, len(ids), group):
        parts.append(stream.push(ids[start : start + group]))
        assert "\ufffd" not in parts[-1]
    assert "".join(parts) + stream.finish() == text
    assert len([part for part in parts if part]) > 1  # it did stream


def test_streaming_shows_a_broken_end_at_last(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("ok 🙂")[1:-1]) == ""
    assert stream.finish().rstrip("\ufffd") == "ok "


def test_digits_are_single_pieces_and_unknown_characters_are_bytes(tokenizer):
    assert tokenizer.model.pieces.encode("2024", out_type=str) == ["▁", "2", "0", "2", "4"]
    assert tokenizer.model.pieces.encode("日", out_type=str) == ["▁", "<0xE6>", "<0x97>", "<0xA5>"]
    assert 900 <= tokenizer.vocab_size <= 1100


def test_vicuna_template(tokenizer):
    ids = tokenizer.encode_chat(["Hi", "Hello", "And you?"])
    assert (
        tokenizer.decode(ids)
        == f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello USER: And you? ASSISTANT:"
    )
    assert ids.count(tokenizer.bos_id) == 1 and ids.count(tokenizer.eos_id) == 1
    first_round = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello") + [
        tokenizer.eos_id
    ]
    assert ids == first_round + tokenizer.encode("USER: And you? ASSISTANT:")[1:]


def test_llama_2_template(tokenizer):
    ids = tokenizer.encode_chat(["Hi", "Hello", "And you?"], "llama-2")
    first_round = tokenizer.encode("[INST] Hi [/INST] Hello ") + [tokenizer.eos_id]
    assert ids == first_round + tokenizer.encode("[INST] And you? [/INST]")


def test_a_dialogue_ends_with_the_user(tokenizer):
    with pytest.raises(ValueError, match="ends with the user"):
        tokenizer.encode_chat(["Hi", "Hello"])
    with pytest.raises(ValueError, match="unknown chat template 'alpaca'"):
        tokenizer.encode_chat(["Hi"], "alpaca")


def test_template_is_read_from_the_folder(tmp_path):
    for name in ("vicuna-7b-v1.5", "Llama-2-70b-chat-hf", "some-base-model", "named", "beside"):
        (tmp_path / name).mkdir()
    found = [
        chat_template(tmp_path / name)
        for name in ("vicuna-7b-v1.5", "Llama-2-70b-chat-hf", "some-base-model")
    ]
    assert (
        found == ["vicuna", "llama-2", "vicuna"]
        and chat_template(WEIGHTS / "mini-7b", unknown=None) == "vicuna"
    )
    assert chat_template(tmp_path / "some-base-model", unknown=None) is None
    several = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ messages[0]['content'] }}!"},
    ]
    for name, template in (
        ("vicuna-7b-v1.5", "{{ messages[0]['content'] }}?"),
        ("named", several),
        ("beside", "no"),
    ):
        (tmp_path / name / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": template})
        )
    (tmp_path / "beside/chat_template.jinja").write_text("{{ messages[0]['content'] }}.")
    rendered = [
        chat_template(tmp_path / name).render(["Hi"])
        for name in ("vicuna-7b-v1.5", "named", "beside")
    ]
    assert rendered == ["Hi?", "Hi!", "Hi."]


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_auto_tokenizer_gives_the_same_ids(name):
    ours, theirs = (
        Tokenizer(WEIGHTS / name / "tokenizer.model"),
        AutoTokenizer.from_pretrained(WEIGHTS / name),
    )
    # transformers reads control tokens in plain text, and leaves out SentencePiece's space before a text's own.
    plain = [text for text in TEXTS if "</s>" not in text and not text.startswith(" ")]
    for text in [*plain, VICUNA_SYSTEM + " USER: Was ist das? ASSISTANT:"]:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_llama_tokenizer_on_spec_bench():
    """The real 32,000-piece tokenizer on the 480 Spec-Bench questions; its files live outside the repository."""
    model, questions = (
        SHARED / "llama_tokenizer/tokenizer.model",
        SHARED / "spec_bench/question.jsonl",
    )
    if not (model.is_file() and questions.is_file()):
        print(f"not compared: {SHARED} is absent")
        return
    ours = Tokenizer(model)
    # From a bare tokenizer.model transformers orders the merges by id; the published tokenizer.json goes by score.
    vocab = {ours.model.pieces.id_to_piece(i): i for i in range(ours.vocab_size)}
    scores = {piece: ours.model.pieces.get_score(i) for piece, i in vocab.items()}
    theirs = LlamaTokenizer(
        vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True, legacy=True
    )
    lines = questions.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 480
    for line in lines:
        for turn in json.loads(line)["turns"]:
            assert theirs(turn).input_ids == ours.encode(turn)


# ------------------------------------------------------------------------------------------- tokenizer.json, templates

HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|/start|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|/start|>\n\n{% endif %}"
)
MARKED = """{%- for message in messages %}
    {%- if loop.index0 == 0 %}
        {{- '<|start|>system ' + {"tools": tools, "key": 'v\u00e9'} | tojson + strftime_now('%Y') + '<|eot|>\n' }}
    {%- endif %}
    {%- if message['content'] == 'skip me' %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '\n' }}
    {% if message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] }}<|eot|>
        {% endgeneration %}
    {% else %}
{{ message['content'] + '<|eot|>' }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
SAID = ["  Hi there, 12345 \n", "Hello! 日本 naïve", "And you? <|eot|>", "skip me", "Bye"]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer.json of Llama 3's kind: byte-level, words split by a regular expression, BOS by a post-processor."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    model.pre_tokenizer, model.decoder = (
        tokenizers.pre_tokenizers.Sequence([words, bytes_]),
        tokenizers.decoders.ByteLevel(),
    )
    special = ["<|begin|>", "<|end|>", "<|start|>", "<|/start|>", "<|eot|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=special,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    model.train_from_iterator([*TEXTS, VICUNA_SYSTEM, *SAID] * 3, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    folder = tmp_path_factory.mktemp("trained")
    model.save(str(folder / "tokenizer.json"))
    return folder


def with_config(folder, **changes):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eot|>", "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_tokenizer_json_gives_the_ids_of_transformers(trained):
    for changes in ({}, {"add_bos_token": False}, {"add_bos_token": True}, {"bos_token": None}):
        ours, theirs = with_config(trained, **changes)
        for text in [*TEXTS, *SAID, "", "<|start|>x<|eot|>"]:
            expected = theirs(text).input_ids
            assert ours.encode(text) == expected, (changes, text)
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (None, 4)
    ours, theirs = with_config(trained)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (0, 4, len(theirs)) and ours.encode("a")[
        0
    ] == 0


def test_half_characters_are_held_back_with_a_tokenizer_json_too(trained):
    ours, _ = with_config(trained)
    ids, stream = ours.encode("日本語 naïve ✓ end"), TextStream(ours)
    parts = [stream.push([token]) for token in ids]
    assert "".join(parts) + stream.finish() == "日本語 naïve ✓ end"
    assert "" in parts[1:] and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("template", [HEADERS, MARKED])
def test_templates_are_rendered_as_transformers_does(trained, template):
    ours, theirs = with_config(trained, chat_template=template)
    own = chat_template(trained)
    for count in (1, 3, 5):
        said = [
            {"role": ("user", "assistant")[turn % 2], "content": text}
            for turn, text in enumerate(SAID[:count])
        ]
        text = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert own.render(SAID[:count], to_be_answered=True) == text
        assert own.render(SAID[:count]) == theirs.apply_chat_template(said, tokenize=False)
        expected = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(SAID[:count], own) == expected


def test_rounds_by_a_template_are_the_whole_in_pieces(trained):
    """What a model is trained on: each answer up to its end of turn; what comes after belongs to the next prompt."""
    chatml = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>\n{% endfor %}"
    )
    ours, _ = with_config(
        trained,
        chat_template=chatml + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    )
    template, said = chat_template(trained), ["Hi", "Hello", "And you?", "Fine"]
    rounds = list(ours.rounds(said, template))
    assert [ours.decode(answer) for _, answer in rounds] == ["Hello", "Fine"]
    assert all(answer[-1] == ours.eos_id and answer.count(ours.eos_id) == 1 for _, answer in rounds)
    whole = [token for prompt, answer in rounds for token in (*prompt, *answer)]
    assert ours.encode_chat(said[:3], template) == whole[: -len(rounds[1][1])]
    assert list(ours.rounds(said[:1], template)) == [(ours.encode_chat(said[:1], template), [])]
    with_config(
        trained,
        chat_template="{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        list(ours.rounds(said, chat_template(trained)))


@pytest.mark.parametrize("legacy", [{"legacy": True}, {"legacy": False}, {}])
def test_special_tokens_in_a_template_with_sentencepiece(tmp_path, legacy):
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    config = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    del config["legacy"]
    for template in (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}",
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ):
        (tmp_path / "m/tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template} | legacy)
        )
        ours, theirs = Tokenizer(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
        said = ["Where is Nora?", "In the north.", "日本, and 24?"]
        messages = [
            {"role": ("user", "assistant")[turn % 2], "content": text}
            for turn, text in enumerate(said)
        ]
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_chat(said, chat_template(tmp_path / "m")) == expected


def test_tokens_added_to_a_sentencepiece_vocabulary(tmp_path):
    """A chat model made from a Llama-2: its turns begin and end with tokens that tokenizer.model does not know."""
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    config = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    kinds = {
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 1024: "<|im_start|>", 1025: "<|im_end|>"}
    config |= {
        "added_tokens_decoder": {
            str(number): kinds | {"content": text} for number, text in names.items()
        },
        "eos_token": "<|im_end|>",
        "legacy": False,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
    }
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = theirs.apply_chat_template(
        [{"role": "user", "content": "Where is Nora?"}], return_dict=False
    )
    ids = ours.encode_chat(["Where is Nora?"], chat_template(tmp_path / "m"))
    assert ids == expected and 1024 in ids and (ours.eos_id, ours.vocab_size) == (1025, 1026)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_named_elsewhere(tmp_path):
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "m")
    for named, expected in (({}, "<s>Hi</s>"), ({"bos_token": {"content": "<b>"}}, "<b>Hi</s>")):
        (tmp_path / "m/tokenizer_config.json").write_text(
            '{"chat_template": "{{ bos_token }}Hi{{ eos_token }}"}'
        )
        (tmp_path / "m/special_tokens_map.json").write_text(json.dumps(named))
        assert chat_template(tmp_path / "m").render(["Hi"]) == expected
        several = [{"name": "default", "template": "{{ bos_token }}Hi{{ eos_token }}"}]
        (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
        assert chat_template(tmp_path / "m").render(["Hi"]) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% for %}", "Expected"), ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
     ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ messages.append(1) }}", "unsafe"), ("{{ 1 / 0 }}", "division by zero"),
     ("{{ cycler.__init__.__globals__ }}", "unsafe"), ("{{ none.x.y }}", "has no attribute"), ("{% include 'x' %}", "no loader"),
     ("{{ (1).__class__.__base__.__subclasses__() }}", "unsafe"), (7, "chat_template is 7; expected text")],
)  # fmt: skip
def test_a_template_that_fails_or_leaves_the_sandbox(trained, template, message):
    with_config(trained, chat_template=None)
    config = json.loads((trained / "tokenizer_config.json").read_text())
    (trained / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        Tokenizer(trained).encode_chat(["Hi"], chat_template(trained))
    assert "\n" not in str(refused.value)


def test_tokenizer_json_that_cannot_be_read(trained, tmp_path, monkeypatch):
    for content in ("", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "New"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(
            ValueError, match=r"tokenizer.json is not a tokenizer .*; download it again$"
        ) as refused:
            Tokenizer(tmp_path)
        assert "\n" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ValueError, match=r"needs the package tokenizers.*: pip install tokenizers==\d"
    ):
        Tokenizer(trained)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer(tmp_path)
