"""The tokenizer: transformers' ids for folders of both kinds, streaming, damaged files."""

import json
import random
import shutil
import sys
from types import SimpleNamespace

import pytest
from helpers import SHARED, WEIGHTS, change_json, raises_line
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from vocabularies import (
    SAID,
    TEXTS,
    added,
    assert_agree,
    in_groups,
    odd_texts,
    save_trained,
    sentencepiece_folder,
    with_config,
)

from s2d import StopStrings, Tokenizer
from s2d.checkpoint.chat import VICUNA_SYSTEM
from s2d.checkpoint.tokenizer import TextStream


@pytest.fixture
def llamas_json(tmp_path):
    """A folder as transformers writes it, with a tokenizer.json for the tokenizer.model."""
    AutoTokenizer.from_pretrained(WEIGHTS / "mini-7b").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(params=["tokenizer.model", "byte-level", "byte-fallback"])
def any_kind(request, tokenizer, trained, llamas_json):
    folders = {"byte-level": trained, "byte-fallback": llamas_json}
    return Tokenizer(folders[request.param]) if request.param in folders else tokenizer


def test_a_stream_is_the_whole_text_in_pieces(any_kind):
    """Cut anywhere, with special tokens and spaces; and half a character is never shown."""
    rng = random.Random(0)
    special = any_kind.encode("</s><|eot|>", with_bos=False)
    for _ in range(200):
        ids = []
        for text in rng.choices(TEXTS, k=3):
            ids += any_kind.encode(text) + special
        stream = TextStream(any_kind)
        parts = []
        for group in in_groups(ids, rng):
            parts.append(stream.push(group))
        assert "\ufffd" not in "".join(parts) and len([part for part in parts if part]) > 5
        assert "".join(parts) + stream.push([], last=True) == any_kind.decode(ids)


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(any_kind):
    """And its text before it, also as a stream: wherever tokens and groups of them end."""
    tokenizer = any_kind
    rng = random.Random(1)
    inside = 0  # stop strings that begin and end inside of tokens
    for _ in range(200):
        text = "".join(rng.choices(TEXTS, k=2))[rng.randrange(9) :]
        ids = tokenizer.encode(text, with_bos=False)
        text = tokenizer.decode(ids)
        starts = [rng.randrange(len(text) + 1) for _ in range(3)]
        texts = [text[start : start + rng.randrange(1, 9)] for start in starts] + ["never"]
        texts = [each for each in texts if each]
        prefixes = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
        expected = [any(each in prefix for each in texts) for prefix in prefixes]
        end = expected.index(True) if True in expected else len(ids)
        ending = StopStrings(tokenizer, texts)
        is_last = ending.begin()
        assert [is_last(token) for token in ids[:end]] == expected[1 : end + 1]
        whole = prefixes[end]
        shown = whole[: min((whole.find(each) for each in texts if each in whole), default=None)]
        assert ending.cut(ids[:end]) == shown
        inside += end > 0 and shown != prefixes[end - 1]
        stream = TextStream(tokenizer, texts)
        found = ""
        for group in in_groups(ids[:end], rng):
            found += stream.push(group)
            assert shown.startswith(found)
        assert found + stream.push([], last=True) == shown
    assert inside > 50


def test_stop_strings_are_texts(tokenizer):
    raises_line(StopStrings, ValueError, "a list of texts, not 'User:'", tokenizer, "User:")
    raises_line(StopStrings, ValueError, "expected a text, got 5", tokenizer, [5])
    raises_line(StopStrings, ValueError, "cannot be empty", tokenizer, ["User:", ""])


def test_streaming_takes_a_time_that_is_linear_in_the_text(tokenizer):
    decoded = []
    counting = SimpleNamespace(
        special={}, decode=lambda ids: decoded.append(len(ids)) or tokenizer.decode(ids)
    )
    ids = tokenizer.encode("Hello world. " * 300)
    stream = TextStream(counting)
    for token in ids:
        stream.push([token])
    assert sum(decoded) < 10 * len(ids)


def test_streaming_shows_a_broken_end_at_last(tokenizer):
    """And an id that no token has leaves no text."""
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("ok 🙂")[1:-1] + [99_999]) == "ok "
    assert set(stream.push([], last=True)) == {"\ufffd"}


def test_miniatures_have_the_ids_of_transformers(tokenizer):
    theirs = AutoTokenizer.from_pretrained(WEIGHTS / "mini-7b")
    more = ["a</s>b", " 23", "▁23", VICUNA_SYSTEM + " USER: Was ist das? ASSISTANT:"]
    assert_agree(tokenizer, theirs, TEXTS + more)
    own = (WEIGHTS / "mini-7b/tokenizer.model").read_bytes()
    for name in ("mini-13b", "mini-70b", "mini-draft"):
        assert (WEIGHTS / name / "tokenizer.model").read_bytes() == own


def test_llama_2_on_spec_bench():
    """The real 32,000-piece tokenizer on the 480 Spec-Bench questions; they are kept elsewhere."""
    questions = SHARED / "spec_bench/question.jsonl"
    if not questions.is_file():
        return
    ours = Tokenizer(SHARED / "llama_tokenizer")
    # From a bare tokenizer.model transformers orders the merges by id; the published
    # tokenizer.json goes by score.
    pieces = ours.model.pieces  # with its scores
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    scores = {piece: pieces.get_score(i) for piece, i in vocab.items()}
    merges = generate_merges(vocab, scores)
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, legacy=True)
    for line in questions.read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["turns"]:
            assert theirs(turn).input_ids == ours.encode(turn)


def test_special_tokens_leave_no_text_even_if_they_are_normalized(llamas_json):
    """As in folders of Llama 1 and 2 from older versions of transformers."""
    file = llamas_json / "tokenizer.json"
    tokens = json.loads(file.read_text())["added_tokens"]
    tokens = [token | {"normalized": True} for token in tokens]
    change_json(file, added_tokens=tokens, normalizer={"type": "Prepend", "prepend": "▁"})
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (llamas_json / "tokenizer_config.json").write_text(json.dumps(plain))
    ours = Tokenizer(llamas_json)
    assert ours.decode([1, *ours.encode("a日"), ours.eos_id]) == "a日"


@pytest.mark.parametrize("own", [b"", b"\x1a\x02\x18\x00"])
@pytest.mark.parametrize("config", [{}, {"add_prefix_space": False}])
def test_the_first_space_is_the_configs_and_not_the_models(tmp_path, own, config):
    """transformers 4 saves a tokenizer.model without it, and puts the space there itself."""
    folder = sentencepiece_folder(tmp_path / "m", config)
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes() + own)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert_agree(ours, theirs, ["Hello world", "Hey", "a</s>b", "line\nbreak"])


NAMES = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<mask>"]
IDS = {name: number for number, name in enumerate(NAMES, 1024)}
BY_ID = {str(IDS[name]): added(name, special=name != "<mask>") for name in NAMES}
BY_ID |= {"0": added("<unk>"), "1": added("<s>"), "2": added("</s>")}
UNNAMED = {number: token | {"special": number == "2"} for number, token in BY_ID.items()}
FOLDERS = [
    ({}, {}),
    ({"additional_special_tokens": NAMES[:2], "legacy": False}, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "eos_token": "<|im_end|>"}, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "legacy": True}, {}),
    ({"bos_token": added("<s>", __type="AddedToken"), "use_mask_token": True}, {}),
    *(({name: None}, {}) for name in ("bos_token", "add_bos_token", "eos_token")),
    ({}, {"added_tokens": IDS, "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}),
    ({"added_tokens_decoder": UNNAMED, "eos_token": "<|im_end|>", "pad_token": "<mask>"}, {}),
]


@pytest.mark.parametrize(("config", "files"), FOLDERS)
def test_added_tokens_of_a_tokenizer_model_equal_transformers(tmp_path, config, files):
    """Of tokens of which one begins the other the longest wins. One that has a name is special."""
    folder = sentencepiece_folder(tmp_path / "m", config, **files)
    theirs = equals_transformers(folder)
    theirs.save_pretrained(folder)  # with a tokenizer.json
    equals_transformers(folder)


def test_of_tokens_that_overlap_the_one_in_normalised_text_is_found_last(tmp_path):
    own = BY_ID | {"1024": added("a<", special=False, normalized=True), "1025": added("<x>")}
    folder = sentencepiece_folder(tmp_path / "m", {"added_tokens_decoder": own})
    assert_agree(Tokenizer(folder), AutoTokenizer.from_pretrained(folder), ["a<x>b", "za<x>"])


def equals_transformers(folder):
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert_agree(ours, theirs, odd_texts([*NAMES, "<s>", "</s>", "<unk>"]))
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"legacy": False},
        {"legacy": True},
        {"legacy": None, "eos_token": "</s>"},
        {"add_prefix_space": False},
        {"add_prefix_space": True, "legacy": True},
        {"bos_token": None},  # its tokenizer.json puts one nevertheless
    ],
)
def test_llamas_class_says_where_spaces_are_put(tmp_path, changes):
    """Whatever the tokenizer.json says, which has the last word on the BOS."""
    folder = sentencepiece_folder(tmp_path / "m", changes)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["byte_fallback"] = False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spaces = [{"type": "Prepend", "prepend": "▁"}, replace]  # as Llama 2's file has them
    content |= {"normalizer": {"type": "Sequence", "normalizers": spaces}, "pre_tokenizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "LlamaTokenizerFast"} | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for post_processor in (content["post_processor"], None):
        change_json(folder / "tokenizer.json", post_processor=post_processor)
        ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert_agree(ours, theirs, [*TEXTS, *odd_texts(["<s>", "</s>", "<unk>"])])
        assert ours.eos_id == theirs.eos_token_id == 2


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast", None])
def test_qwens_class_has_steps_of_its_own(tmp_path, kind, name):
    """Qwen2 is read by its class whatever tokenizer_config.json says, Qwen3 if it says nothing."""
    save_trained(tmp_path, more=["<|endoftext|>"])  # with Llama 3's steps
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    tokens[-1]["rstrip"] = True  # the class does not take this over
    change_json(tmp_path / "tokenizer.json", added_tokens=tokens)
    shutil.copy(WEIGHTS / "mini-7b/config.json", tmp_path)
    change_json(tmp_path / "config.json", model_type=kind, architectures=None, tokenizer_class=name)
    ours, theirs = with_config(tmp_path, tokenizer_class=None, unk_token="<|endoftext|>")
    assert_agree(ours, theirs, [*TEXTS, *SAID, *odd_texts(["<|endoftext|>", "<|eot|>"])])


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizer", None])
def test_bytes_of_any_class(tmp_path, name):
    """No name is made up beyond the vocabulary, and another model's pieces are passed over."""
    save_trained(tmp_path)
    for stale in ("tokenizer.model", "config.json"):
        shutil.copy(WEIGHTS / "mini-7b" / stale, tmp_path)
    ours, _ = with_config(tmp_path, tokenizer_class=name)
    # Older releases of transformers misread such a file where its class is Llama's.
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert_agree(ours, theirs, [*TEXTS, *odd_texts(["<unk>", "<s>", "</s>", "<|eot|>"])])
    assert max(max(ours.encode(text)) for text in ("<unk>", "<s>", "</s>")) < 600


@pytest.mark.parametrize("like", ["llama-3", "smollm2"])
def test_tokenizer_json_gives_the_ids_of_transformers(tmp_path, like):
    save_trained(tmp_path, like)
    for changes in ({}, {"add_bos_token": False}, {"bos_token": None}):
        ours, theirs = with_config(tmp_path, **changes)
        assert_agree(ours, theirs, [*TEXTS, *SAID, "", *odd_texts(["<|begin|>", "<|start|>"])])
        assert ours.eos_id == 4


def test_missing_and_damaged_files(tmp_path, trained, monkeypatch):
    raises_line(Tokenizer, FileNotFoundError, "has no tokenizer.model and no", tmp_path)
    for name, content in (
        ("tokenizer.json", "["),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "New"}}'),
        ("tokenizer.model", "not a model"),
    ):
        (tmp_path / name).write_text(content)
        raises_line(Tokenizer, ValueError, "is not read", tmp_path)
        (tmp_path / name).unlink()
    folder = sentencepiece_folder(tmp_path / "m", {"added_tokens_decoder": {"7": {"id": 7}}})
    raises_line(Tokenizer, ValueError, "is damaged .'content'", folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "s2d.checkpoint.tokenizer_json", raising=False)
    raises_line(Tokenizer, ModuleNotFoundError, "import of tokenizers halted", trained)
