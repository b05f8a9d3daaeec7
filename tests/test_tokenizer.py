"""The tokenizer: round trips, streaming, chat templates, and its peers' ids."""

import json

import pytest
from helpers import ROOT, WEIGHTS
from transformers import AutoTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from s2d import Tokenizer
from s2d.tokenizer import VICUNA_SYSTEM, TextStream, chat_template

SHARED = ROOT.parent / "shared" / "data"
TEXTS = ["Hello world", "  two  spaces ", "Die Königin hört 123 Vögel.", "line\nbreak\ttab", "日本語 🙂 ¿qué?", "a</s>b"]


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
    assert tokenizer.pieces.encode("2024", out_type=str) == ["▁", "2", "0", "2", "4"]
    assert tokenizer.pieces.encode("日", out_type=str) == ["▁", "<0xE6>", "<0x97>", "<0xA5>"]
    assert 900 <= tokenizer.vocab_size <= 1100


def test_vicuna_template(tokenizer):
    ids = tokenizer.encode_chat(["Hi", "Hello", "And you?"])
    assert tokenizer.decode(ids) == f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello USER: And you? ASSISTANT:"
    assert ids.count(tokenizer.bos_id) == 1 and ids.count(tokenizer.eos_id) == 1
    first_round = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello") + [tokenizer.eos_id]
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
    for name in ("vicuna-7b-v1.5", "Llama-2-70b-chat-hf", "renamed"):
        (tmp_path / name).mkdir()
    (tmp_path / "renamed/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ '[INST] ' + m }}"}))
    found = [chat_template(tmp_path / name) for name in ("vicuna-7b-v1.5", "Llama-2-70b-chat-hf", "renamed")]
    assert found == ["vicuna", "llama-2", "llama-2"]
    assert chat_template(WEIGHTS / "mini-7b") == "vicuna"


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_auto_tokenizer_gives_the_same_ids(name):
    ours, theirs = Tokenizer(WEIGHTS / name / "tokenizer.model"), AutoTokenizer.from_pretrained(WEIGHTS / name)
    # transformers reads control tokens in plain text, and leaves out SentencePiece's space before a text's own.
    plain = [text for text in TEXTS if "</s>" not in text and not text.startswith(" ")]
    for text in [*plain, VICUNA_SYSTEM + " USER: Was ist das? ASSISTANT:"]:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_llama_tokenizer_on_spec_bench():
    """The real 32,000-piece tokenizer on the 480 Spec-Bench questions; its files live outside the repository."""
    model, questions = SHARED / "llama_tokenizer/tokenizer.model", SHARED / "spec_bench/question.jsonl"
    if not (model.is_file() and questions.is_file()):
        print(f"not compared: {SHARED} is absent")
        return
    ours = Tokenizer(model)
    # From a bare tokenizer.model transformers orders the merges by id; the published tokenizer.json goes by score.
    vocab = {ours.pieces.id_to_piece(i): i for i in range(ours.vocab_size)}
    scores = {piece: ours.pieces.get_score(i) for piece, i in vocab.items()}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True, legacy=True)
    lines = questions.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 480
    for line in lines:
        for turn in json.loads(line)["turns"]:
            assert theirs(turn).input_ids == ours.encode(turn)
