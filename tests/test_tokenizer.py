"""The tokenizer: round trips, streaming, and transformers' ids, of folders of both kinds."""

import json
import re
import sys

import pytest
from helpers import SHARED, WEIGHTS, change_json, raises_line
from transformers import AutoTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges
from vocabularies import (
    LLAMAS_OWN,
    SAID,
    TEXTS,
    added,
    assert_agree,
    messages,
    odd_texts,
    sentencepiece_folder,
    with_config,
)

from s2d import Tokenizer
from s2d.text.chat import VICUNA_SYSTEM, chat_template
from s2d.text.tokenizer import TextStream
from s2d.weights.config import read_config


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("json", [False, True])
def test_streaming_never_shows_half_a_character(tokenizer, trained, text, group, json):
    tokenizer = Tokenizer(trained / "tokenizer.json") if json else tokenizer
    stream, parts = TextStream(tokenizer), []
    ids = tokenizer.encode(text)[1:]
    for start in range(0, len(ids), group):
        parts.append(stream.push(ids[start : start + group]))
        assert "\ufffd" not in parts[-1]
    assert "".join(parts) + stream.finish() == text
    assert len(ids) <= group or len([part for part in parts if part]) > 1  # it did stream


def test_streaming_shows_a_broken_end_at_last(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("ok 🙂")[1:-1]) == ""
    assert stream.finish().rstrip("\ufffd") == "ok "


def test_missing_and_broken_files(tmp_path):
    raises_line(Tokenizer, FileNotFoundError, "no tokenizer at", tmp_path / "tokenizer.model")
    for content in (b"not a model", b""):
        (tmp_path / "tokenizer.model").write_bytes(content)
        raises_line(Tokenizer, ValueError, "not a SentencePiece model", tmp_path)


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_auto_tokenizer_gives_the_same_ids(name):
    ours = Tokenizer(WEIGHTS / name / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(WEIGHTS / name)
    # transformers leaves out SentencePiece's space before a text's own.
    plain = [text for text in TEXTS if not text.startswith(" ")]
    more = ["a</s>b", VICUNA_SYSTEM + " USER: Was ist das? ASSISTANT:"]
    assert_agree(ours, theirs, plain + more)


def test_llama_tokenizer_on_spec_bench():
    """The real 32,000-piece tokenizer on the 480 Spec-Bench questions; they are kept elsewhere."""
    questions = SHARED / "spec_bench/question.jsonl"
    if not (LLAMAS_OWN.is_file() and questions.is_file()):
        return
    ours = Tokenizer(LLAMAS_OWN)
    # From a bare tokenizer.model transformers orders the merges by id; the published
    # tokenizer.json goes by score.
    vocab = {ours.model.pieces.id_to_piece(i): i for i in range(ours.vocab_size)}
    scores = {piece: ours.model.pieces.get_score(i) for piece, i in vocab.items()}
    merges = generate_merges(vocab, scores)
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, legacy=True)
    for line in questions.read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["turns"]:
            assert theirs(turn).input_ids == ours.encode(turn)


NAMES = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<mask>", "<pad>"]
IDS = {name: number for number, name in enumerate(NAMES, 1024)}
PLAIN = {"lstrip": True, "special": False}
FLAGS = [{}, {"rstrip": True}, {}, PLAIN | {"normalized": True}, PLAIN | {"rstrip": True}]
BY_ID = {str(IDS[name]): added(name, **flags) for name, flags in zip(NAMES, FLAGS)}
BY_ID |= {"0": added("<unk>"), "1": added("<s>"), "2": added("</s>")}
LISTED = {"additional_special_tokens": NAMES[:2], "legacy": False}
FOLDERS = [
    ({}, {}),
    (LISTED, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "eos_token": "<|im_end|>"}, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "legacy": True}, {}),
]


@pytest.mark.parametrize(("config", "files"), FOLDERS)
def test_special_tokens_beside_sentencepiece_equal_transformers(tmp_path, config, files):
    """Of tokens of which one begins the other the longest wins; some take the spaces around."""
    folder = sentencepiece_folder(tmp_path / "m", config, **files)
    equals_transformers(folder, config.get("legacy"))


def equals_transformers(folder, legacy):
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id and ours.vocab_size == len(theirs)
    # transformers leaves out SentencePiece's space before a text's own, so it is given another.
    known = theirs.get_added_vocab()
    behind = "".join(f"|(?<={re.escape(name)})(?= )" for name in known) if legacy else ""
    own_space = re.compile("^(?=[ ▁])" + behind)
    names = [*NAMES, "<s>", "</s>", "<unk>"]
    texts = odd_texts(names, without=["▁"] if legacy else ())
    assert_agree(ours, theirs, texts, lambda text: own_space.sub(" ", text))


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": {"1024": added("<mask>")}}])
def test_tokens_that_transformers_added_and_saved(tmp_path, config):
    """They are in the tokenizer.json that it leaves beside the tokenizer.model."""
    folder = sentencepiece_folder(tmp_path / "m", config)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens(["<|im_start|>", "<pad>"])
    theirs.add_special_tokens({"extra_special_tokens": ["<|im_end|>", "<|im_end|>x"]})
    theirs.save_pretrained(folder)
    equals_transformers(folder, None)
    change_json(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    change_json(folder / "config.json", vocab_size=1029)
    assert read_config(folder).eos_token_ids == (2, Tokenizer(folder).eos_id)


@pytest.mark.parametrize("name", ["bos_token", "add_bos_token", "eos_token"])
def test_what_is_null_beside_sentencepiece_is_none(tmp_path, name):
    config = {name: None, "chat_template": "{{ bos_token }}|{{ eos_token }}"}
    folder = sentencepiece_folder(tmp_path / "m", config)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.encode("Hi") == theirs("Hi").input_ids
    expected = theirs.apply_chat_template(messages(["Hi"]), tokenize=False)
    assert chat_template(folder).render(["Hi"]) == expected


def test_chatml_on_a_sentencepiece_folder_ends_its_answers(tmp_path):
    """added_tokens.json alone gives the control tokens, and with them where an answer ends."""
    ends = LISTED | {"eos_token": "<|im_end|>"}
    folder = sentencepiece_folder(tmp_path / "m", ends, added_tokens=IDS)
    change_json(folder / "config.json", vocab_size=1029)
    assert read_config(folder).eos_token_ids == (2, 1025)
    ids = Tokenizer(folder).encode("<|im_start|>Hi<|im_end|>")
    assert ids[1] == 1024 and ids[-1] == Tokenizer(folder).eos_id == 1025


def test_ids_beyond_the_number_of_tokens(trained, tmp_path):
    """In vocabularies with holes: beside SentencePiece, and in tokenizer.json."""
    plain = {"added_tokens_decoder": {"1030": added("<far>", special=False)}}
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", plain))
    assert ours.vocab_size == 1031 and ours.encode("a<far>b")[2] == 1030
    assert ours.decode([*ours.encode("a<far>b"), 1029, 9999]) == "a<far>b"
    raw = json.loads((trained / "tokenizer.json").read_text())
    raw["model"]["vocab"]["far"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    ours = Tokenizer(tmp_path)
    assert ours.encode("far") == [0, 5000] and ours.decode([5000, 4999]) == "far"
    assert ours.vocab_size == 5001


def listed(number, vocabulary=None):
    """A tokenizer.json beside the rest, in which <x> has this id."""
    tokens = [added("<x>") | {"id": number}]
    return {"tokenizer": {"model": {"vocab": vocabulary or {}}, "added_tokens": tokens}}


def token(**changes):
    return {"added_tokens_decoder": {"1024": added("<x>", **changes)}}


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({"add_eos_token": True}, {}, "add_eos_token is True; only False is supported"),
        ({"split_special_tokens": True}, {}, "split_special_tokens is True; only False"),
        ({"fold_case": 1}, {}, "'fold_case' is not known here and may change the result"),
        ({"legacy": "no"}, {}, "legacy is 'no'; expected true or false"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {}, "tokenizer_class is 'GPT2Tokenizer' beside"),
        ({"eos_token": "<e>"}, {}, "names the token '<e>', but tokenizer.model has no such token"),
        ({"extra_special_tokens": ["<e>"]}, {}, "names the token '<e>', but tokenizer.model has"),
        ({"additional_special_tokens": ["\ud800"]}, {}, "'\\ud800' is no token that is known here"),
        (token(single_word=True), {}, "single_word of '<x>' is not supported"),
        (token(fuzzy=True), {}, "is no token that is known here"),
        ({"added_tokens_decoder": {"7": added("<x>")}}, {}, "'<x>' is added as token 7, but in"),
        ({"added_tokens_decoder": {"-1": added("<x>")}}, {}, "'<x>' has the id '-1'"),
        ({"added_tokens_decoder": []}, {}, "added_tokens_decoder is [], no object"),
        ({}, {"added_tokens": {"</s>": 1024}}, "but in tokenizer.model its id is 2"),
        ({}, {"added_tokens": {"<x>": 1024, "<y>": 1024}}, "two tokens are added with one"),
        (token(), {"added_tokens": {"<x>": 1025}}, "1025 in added_tokens.json, but 1024 in"),
        (token(), {"added_tokens": {"<y>": 1025}}, "1025 in added_tokens.json, but none in"),
        ({}, {"added_tokens": {"<x>": "1024"}}, "'<x>' has the id '1024'"),
        ({}, {"added_tokens": {"\ud800": 1024}}, "'\\ud800' has the id 1024"),
        (token(), listed(1025), "'<x>' is token 1025 in tokenizer.json, but 1024 in the files"),
        ({}, listed(1024, {"<y>": 1025}), "'<y>' is token 1025 in tokenizer.json, but None in tok"),
        ({}, listed("1024"), "tokenizer.json is not a tokenizer that is known here; download it"),
        ({}, {"tokenizer": {"model": 3}}, "tokenizer.json is not a tokenizer that is known here"),
        ({"eos_token": "</s>"}, {"special_tokens_map": {"eos_token": "<s>"}}, "make them agree"),
        ({"eos_token": None}, {"special_tokens_map": {"eos_token": "<s>"}}, "make them agree"),
        ({"bos_token": "</s>"}, {}, "bos_token_id is 1 in config.json, but 2 by the tokenizer's"),
        ({}, {"generation_config": {"bos_token_id": 0}}, "is 0 in generation_config.json, but 1"),
    ],
)
def test_what_beside_sentencepiece_is_not_known_or_disagrees(tmp_path, config, files, message):
    folder = sentencepiece_folder(tmp_path / "m", config, **files)
    raises_line(Tokenizer, ValueError, re.escape(message), folder)


def test_tokenizer_json_gives_the_ids_of_transformers(trained):
    for changes in ({}, {"add_bos_token": False}, {"add_bos_token": True}, {"bos_token": None}):
        ours, theirs = with_config(trained, **changes)
        assert_agree(ours, theirs, [*TEXTS, *SAID, "", "<|start|>x<|eot|>"])
    assert (ours.bos_id, ours.eos_id) == (None, 4)
    vocabulary = json.loads((trained / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {str(vocabulary["es"]): added("es", special=False, lstrip=True)}
    ours, theirs = with_config(trained, added_tokens_decoder=by_id)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (0, 4, len(theirs))
    assert_agree(ours, theirs, odd_texts(["<|begin|>", "<|end|>", "<|start|>", "es"]))


def test_tokenizer_json_that_cannot_be_read(trained, tmp_path, monkeypatch):
    for content in ("", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "New"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        raises_line(Tokenizer, ValueError, "json is not a tokenizer .*; download it", tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"needs the package tokenizers.*: pip install token.*\d"
    raises_line(Tokenizer, ValueError, message, trained)


FEW = {name: i for i, name in enumerate("<|begin|> <|end|> <|start|> <|/start|> <|eot|>".split())}
EXPLODES = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
NO_SUCH_TOKEN, EOT = ({"SpecialToken": {"id": id, "type_id": 0}} for id in ("<no>", "<|eot|>"))
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(*single):
    of_eot = {"id": "<|eot|>", "ids": [4], "tokens": ["<|eot|>"]}
    parts = {"single": single, "pair": [TEXT, TEXT], "special_tokens": {"<|eot|>": of_eot}}
    return {"type": "TemplateProcessing", **parts}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("model", {"unk_token": "<no>", "vocab": FEW, "merges": []}, "Unk token"),
        ("model", {"dropout": 0.1}, "model.dropout makes ids random"),
        ("model", {"fold_case": True}, "model.fold_case is not known"),
        ("normalizer", {"type": "NFC", "but": 1}, "normalizer.but is not known"),
        ("normalizer", {"type": "New"}, "is not a tokenizer that works"),
        ("pre_tokenizer", EXPLODES | {"invert": False}, "retry-limit-in-match over"),
        ("post_processor", template(NO_SUCH_TOKEN, TEXT), "no entry found for key"),
        ("post_processor", template(TEXT, EOT), "puts tokens behind a text"),
        ("added_tokens", [added("<|eot|>") | {"id": 77}], "token 77 in its added_tokens, but 4"),
        ("added_tokens", [added("<|eot|>") | {"id": 4, "fuzzy": 1}], "added_tokens.0.fuzzy is not"),
    ],
)
def test_faults_inside_a_tokenizer_json(trained, tmp_path, capfd, part, change, message):
    """All in one line: a panic in Rust, which writes its own to stderr, is no Exception."""
    raw = json.loads((trained / "tokenizer.json").read_text())
    raw[part] = raw["model"] | change if part == "model" else change
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    encode = lambda: Tokenizer(tmp_path).encode("a" * 50 + "!")  # noqa: E731
    raises_line(encode, ValueError, re.escape(message))
    assert capfd.readouterr() == ("", "")


def test_what_beside_a_tokenizer_json_disagrees_with_it(trained):
    named = {"extra_special_tokens": ["<|new|>"]}
    message = "names the token '<|new|>', but tokenizer.json"
    raises_line(with_config, ValueError, re.escape(message), trained, **named)
    for by_id, message in (
        ({"5": added("<|eot|>")}, "<|eot|>' is token 5 in the files beside it, but 4 in its"),
        ({"900": added("<|new|>")}, "<|new|>' is token 900 in the files beside it, but None in"),
        ({"4": added("<|eot|>", rstrip=True)}, "it says something else; make them agree"),
    ):
        config = {"added_tokens_decoder": by_id}
        raises_line(with_config, ValueError, re.escape(message), trained, **config)


def test_texts_that_are_far_too_long_are_refused_before_they_are_encoded(tokenizer):
    tokenizer.refuse_longer("x" * 2559, 10)
    message = "has 10 tokens or more; the context has 10 positions"
    for text in ("x" * 2560, "x" + " " * 2559):  # blanks take as long
        raises_line(tokenizer.refuse_longer, ValueError, message, text, 10)
