"""The tokenizer: transformers' ids for folders of both kinds, streaming, damaged files."""

import json
import random
import shutil
import sys
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from helpers import SHARED, WEIGHTS, change_json, raises_line
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from vocabularies import (
    LLAMAS_OWN,
    SAID,
    TEXTS,
    added,
    assert_agree,
    messages,
    odd_texts,
    save_byte_fallback,
    save_published,
    save_trained,
    sentencepiece_folder,
    with_config,
)

from s2d import StopStrings, Tokenizer
from s2d.checkpoint.chat import VICUNA_SYSTEM
from s2d.checkpoint.tokenizer import TextStream


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
def test_streaming_never_shows_half_a_character(tokenizer, trained, kind):
    tokenizer = Tokenizer(trained) if kind == "tokenizer.json" else tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text)[1:]
        for group in (1, 3):
            stream, parts = TextStream(tokenizer), []
            for start in range(0, len(ids), group):
                parts.append(stream.push(ids[start : start + group]))
                assert "\ufffd" not in parts[-1]
            whole = "".join(parts) + stream.push([], last=True)
            # As for transformers, a tokenizer.model's first space is the one that it would add.
            assert whole == tokenizer.decode(ids) and whole.strip() == text.strip()
            assert len(ids) <= group or len([part for part in parts if part]) > 1  # it did stream


@pytest.fixture(params=["tokenizer.model", "byte-level", "byte-fallback"])
def any_kind(request, tokenizer, trained, tmp_path):
    """A tokenizer of each kind, and how many of its ids stand for bytes, special tokens, and some
    more.
    """
    if request.param == "byte-level":
        return Tokenizer(trained), 600
    if request.param == "byte-fallback":
        return Tokenizer(save_byte_fallback(tmp_path)), 280
    return tokenizer, 280


def test_a_stream_is_the_whole_text_in_pieces(any_kind):
    """Of any ids, cut anywhere: broken characters, special tokens, spaces at the beginning."""
    tokenizer, count = any_kind
    rng = random.Random(0)
    text = [token for each in TEXTS for token in tokenizer.encode(each)]
    some = [*range(count)]
    for _ in range(300):
        ids = [rng.choice(text if rng.random() < 0.5 else some) for _ in range(rng.randrange(40))]
        stream, shown = TextStream(tokenizer), ""
        rest = list(ids)
        while rest:
            size = rng.randrange(1, 4)
            shown += stream.push(rest[:size])
            rest = rest[size:]
        assert shown + stream.push([], last=True) == tokenizer.decode(ids)


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(any_kind):
    """And its text before it, also as a stream: wherever tokens and groups of them end."""
    tokenizer, _ = any_kind
    rng = random.Random(1)
    some = [token for each in TEXTS for token in tokenizer.encode(each, with_bos=False)]
    inside = 0  # stop strings that begin and end inside of tokens
    for _ in range(200):
        ids = [rng.choice(some) for _ in range(rng.randrange(40))]
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
        rest = ids[:end]
        while rest:
            size = rng.randrange(1, 4)
            found += stream.push(rest[:size])
            assert shown.startswith(found)
            rest = rest[size:]
        assert found + stream.push([], last=True) == shown
    assert inside > 50


def test_stop_strings_are_texts(tokenizer):
    raises_line(StopStrings, ValueError, "a list of texts, not 'User:'", tokenizer, "User:")
    raises_line(StopStrings, ValueError, "expected a text, got 5", tokenizer, [5])
    raises_line(StopStrings, ValueError, "cannot be empty", tokenizer, ["User:", ""])


def test_streaming_takes_a_time_that_is_linear_in_the_text(tokenizer):
    decoded = []
    counting = SimpleNamespace(
        model=tokenizer.model, decode=lambda ids: decoded.append(len(ids)) or tokenizer.decode(ids)
    )
    ids = tokenizer.encode("Hello world. " * 300)
    stream = TextStream(counting)
    for token in ids:
        stream.push([token])
    assert sum(decoded) < 10 * len(ids)


def test_streaming_shows_a_broken_end_at_last(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("ok 🙂")[1:-1] + [99_999]) == "ok "  # no token has this id
    assert set(stream.push([], last=True)) == {"\ufffd"}


def test_ids_of_any_kind_are_decoded(tokenizer, trained):
    """A list, and what holds numbers as a model or another library has them."""
    for each in (tokenizer, Tokenizer(trained)):
        ids = each.encode("Hi there", with_bos=False)
        for same in (tuple(ids), iter(ids), torch.tensor(ids), torch.tensor(ids).numpy()):
            assert each.decode(same) == "Hi there"


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
    if not (LLAMAS_OWN.is_file() and questions.is_file()):
        return
    ours = Tokenizer(LLAMAS_OWN.parent)
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


def test_a_tokenizer_model_that_is_not_sentencepieces_is_passed_over(trained):
    """As Llama 3's, which lies next to the tokenizer.json that says the same."""
    expected = Tokenizer(trained).encode("Hello")
    (trained / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert Tokenizer(trained).encode("Hello") == expected
    assert Tokenizer(trained).encode("<unk>")[0] < 600  # no name is made up
    (trained / "tokenizer.model").unlink()


def test_special_tokens_leave_no_text_even_if_they_are_normalized(tmp_path):
    """As in folders of Llama 1 and 2 from older versions of transformers."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "H": 4, "i": 5}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    spaces = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    model.normalizer = tokenizers.normalizers.Sequence(spaces)
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()]
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    model.decoder = tokenizers.decoders.Sequence([*parts, strip])
    model.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=True) for name in ("<s>", "</s>")]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    ours = Tokenizer(tmp_path)
    assert ours.decode([1, 3, 4, 5, ours.eos_id]) == "Hi"


@pytest.mark.parametrize("own", [b"", b"\x1a\x02\x18\x00", b"\x1a\x02\x18\x01"])
@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"add_prefix_space": False}])
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
FOLDERS = [
    ({}, {}),
    ({"additional_special_tokens": NAMES[:2], "legacy": False}, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "eos_token": "<|im_end|>"}, {"added_tokens": IDS}),
    ({"added_tokens_decoder": BY_ID, "legacy": True}, {}),
    ({"bos_token": added("<s>", __type="AddedToken")}, {}),
    ({}, {"added_tokens": IDS, "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}),
    # named, but not called special
    (
        {
            "added_tokens_decoder": {
                number: token | {"special": False} for number, token in BY_ID.items()
            },
            "eos_token": "<|im_end|>",
            "pad_token": "<mask>",
        },
        {},
    ),
]


@pytest.mark.parametrize(("config", "files"), FOLDERS)
def test_added_tokens_of_a_tokenizer_model_equal_transformers(tmp_path, config, files):
    """Of tokens of which one begins the other the longest wins."""
    folder = sentencepiece_folder(tmp_path / "m", config, **files)
    equals_transformers(folder)


def equals_transformers(folder):
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert_agree(ours, theirs, odd_texts([*NAMES, "<s>", "</s>", "<unk>"]))


@pytest.mark.parametrize(
    "names",
    [
        {"additional_special_tokens": [added("<|im_end|>", __type="AddedToken")]},
        {"additional_special_tokens": [{"content": "<|im_end|>"}]},
        {"extra_special_tokens": ["<|im_end|>"]},
    ],
)
def test_special_tokens_are_named_in_several_ways(tmp_path, names):
    """And leave no text, whichever it is."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", names, added_tokens=IDS))
    assert ours.decode([IDS["<|im_end|>"], *ours.encode("Hi")]) == "Hi"
    assert ours.encode("<|im_end|>")[1:] == [IDS["<|im_end|>"]]


def test_tokens_that_transformers_added_and_saved(tmp_path):
    """They are in the tokenizer.json that it leaves next to the tokenizer.model."""
    folder = sentencepiece_folder(tmp_path / "m", {})
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens(["<|im_start|>", "<mask>"])
    theirs.add_special_tokens({"extra_special_tokens": ["<|im_end|>", "<|im_end|>x"]})
    theirs.save_pretrained(folder)
    equals_transformers(folder)
    change_json(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    assert Tokenizer(folder).eos_id == theirs.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("name", ["bos_token", "add_bos_token", "eos_token"])
def test_what_is_null_is_none(tmp_path, name):
    config = {name: None, "chat_template": "{{ bos_token }}|{{ eos_token }}"}
    folder = sentencepiece_folder(tmp_path / "m", config)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.encode("Hi") == theirs("Hi").input_ids
    expected = theirs.apply_chat_template(messages(["Hi"]), tokenize=False)
    assert ours.chat_format.render(messages(["Hi"])) == expected


def test_tokens_that_a_tokenizer_json_lacks_are_added(tmp_path):
    """Those of tokenizer_config.json, and those that it or special_tokens_map.json names."""
    new = {"440": added("<|new|>", rstrip=True), "441": added("<|plain|>", special=False)}
    for config, names in (
        (dict(added_tokens_decoder=new), {}),
        (dict(extra_special_tokens=["<|new|>"]), {}),
        (dict(), dict(additional_special_tokens=["<|new|>"], eos_token="<|new|>")),
    ):
        save_trained(tmp_path)
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
        ours, theirs = with_config(tmp_path, **config)
        assert_agree(ours, theirs, ["a<|new|> b", "<|plain|>", "<|new|>\n<|new|>"])
        assert ours.eos_id == theirs.eos_token_id


@pytest.mark.parametrize("kind", ["tokenizer.model", "byte-level", "published"])
@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
def test_a_token_that_has_a_name_is_special(tmp_path, kind, name):
    """Whatever its own entry says: it leaves no text."""
    if kind == "byte-level":
        save_trained(tmp_path)
    elif kind == "published":
        save_published(tmp_path)
    else:
        sentencepiece_folder(tmp_path, {})
    config = {"tokenizer_class": "LlamaTokenizer", name: "<|new|>"}
    number = "440" if kind == "byte-level" else "1024"  # the next one
    config["added_tokens_decoder"] = {number: added("<|new|>", special=False)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(tmp_path)
    [found] = ours.encode("<|new|>", with_bos=False)
    assert ours.decode([found]) == ""


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("prefix", [{}, {"add_prefix_space": False}, {"add_prefix_space": True}])
@pytest.mark.parametrize("legacy", [{}, {"legacy": True}, {"legacy": False}, {"legacy": None}])
def test_llamas_class_says_where_spaces_are_put(published, name, prefix, legacy):
    """Whatever the tokenizer.json says itself; as it does for a tokenizer.model."""
    (published / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": name} | prefix | legacy)
    )
    ours, theirs = Tokenizer(published), AutoTokenizer.from_pretrained(published)
    # Where a text begins with a space, the file says that there are two, and SentencePiece, too.
    texts = [
        *TEXTS,
        *odd_texts(["<s>", "</s>", "<unk>"], without=["▁", " ", "  ", " the"], count=60),
    ]
    assert_agree(ours, theirs, [text for text in texts if text[0] not in " ▁"])
    assert ours.eos_id == theirs.eos_token_id == 2


@pytest.mark.parametrize("with_bos", [True, False])
def test_a_tokenizer_json_says_whether_there_is_a_bos(tmp_path, with_bos):
    """And not the config; a tokenizer.model that is read in its place does as it says."""
    save_published(tmp_path)
    shutil.copy(WEIGHTS / "mini-7b/tokenizer.model", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if not with_bos:
        content["post_processor"]["single"] = content["post_processor"]["single"][1:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for add_bos_token in (True, False):
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": add_bos_token}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        assert_agree(ours, theirs, ["Hi there", "", "<s>Hi"])
        assert (ours.encode("Hi")[0] == 1) == with_bos


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return save_published(tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizer", None]
)
def test_bytes_of_any_class(tmp_path, name, stale):
    """No name is made up beyond the vocabulary, and another model's pieces are passed over."""
    save_trained(tmp_path)
    if stale:
        shutil.copy(WEIGHTS / "mini-7b/tokenizer.model", tmp_path)
    shutil.copy(WEIGHTS / "mini-7b/config.json", tmp_path)
    ours, _ = with_config(tmp_path, tokenizer_class=name)
    # Older releases of transformers misread such a file where its class is Llama's.
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert_agree(ours, theirs, [*TEXTS, *odd_texts(["<unk>", "<s>", "</s>", "<|eot|>"], count=60)])
    assert max(max(ours.encode(text)) for text in ("<unk>", "<s>", "</s>")) < 600


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", None])
def test_a_tokenizer_json_of_no_llama_is_read_as_it_is(tmp_path, name):
    """Also if a tokenizer.model next to it has the same pieces."""
    save_published(tmp_path)
    shutil.copy(WEIGHTS / "mini-7b/tokenizer.model", tmp_path)
    config = {"tokenizer_class": name, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert_agree(ours, theirs, [*TEXTS, *odd_texts(["<s>", "</s>"], count=60)])


@pytest.mark.parametrize("like", ["llama-3", "smollm2", "qwen"])
def test_tokenizer_json_gives_the_ids_of_transformers(tmp_path, like):
    save_trained(tmp_path, like)
    name = {"tokenizer_class": "Qwen2Tokenizer"} if like == "qwen" else {}
    for changes in ({}, {"add_bos_token": False}, {"bos_token": None}):
        ours, theirs = with_config(tmp_path, **name, **changes)
        assert_agree(ours, theirs, [*TEXTS, *SAID, "", "<|start|>x<|eot|>"])
    assert ours.eos_id == 4
    ours, theirs = with_config(tmp_path, **name)
    assert ours.eos_id == 4
    assert_agree(ours, theirs, odd_texts(["<|begin|>", "<|end|>", "<|start|>"]))


def test_missing_and_damaged_files(tmp_path, trained, monkeypatch):
    raises_line(Tokenizer, FileNotFoundError, "has no tokenizer.model and no", tmp_path)
    for content in ("", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "New"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        raises_line(Tokenizer, ValueError, "is not read", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for content in (b"not a model", b"\n", b""):
        (tmp_path / "tokenizer.model").write_bytes(content)
        raises_line(Tokenizer, ValueError, "is not read", tmp_path)
    config = {"added_tokens_decoder": {"7": {"id": 7}}}
    folder = sentencepiece_folder(tmp_path / "m", config)
    raises_line(Tokenizer, ValueError, "is damaged .'content'", folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "s2d.checkpoint.tokenizer_json", raising=False)
    raises_line(Tokenizer, ModuleNotFoundError, "import of tokenizers halted", trained)
