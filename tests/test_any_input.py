"""Whatever a user hands in, run.py answers, or says in one line what is wrong and exits with 2.

Where an invented case fails, Hypothesis prints a line that brings the same case back.
"""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import LLAMA_2, WEIGHTS, random_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import save_trained

import run
from s2d.extras.decision import Decision, fingerprint, save_decision
from s2d.generate import METHODS
from s2d.text.tokenizer import Tokenizer
from s2d.weights import DTYPES, save_model
from s2d.weights.shards import INDEX, SINGLE

CONTEXT = 72
SIZES = dict(vocab_size=1024, hidden_size=16, intermediate_size=24, head_dim=4, num_hidden_layers=2)
SIZES |= {"max_position_embeddings": CONTEXT}
DECISION = "decision.safetensors"
HEADROOM = 2**30  # bytes that a case may take: the tests must not depend on a machine's memory
NOTICES = (
    "(loading )?target |measuring what|timing the target|every step: |Ctrl-C ends|chat template: "
    "|\\d+ tokens in |the context of|that makes|that line|.* which transformers applies"
)


def cases(count):
    unhealthy = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = dict(deadline=None, database=None, print_blob=True, suppress_health_check=unhealthy)
    return settings(max_examples=count, **how)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: a target; the same in shards, and with a tokenizer.json; a draft; its decisions."""
    folder = tmp_path_factory.mktemp("models")
    names = ("target", "sharded", "json", "draft", "decision")
    made = SimpleNamespace(**{name: folder / name for name in names})
    target = random_llama(0, **SIZES | {"num_hidden_layers": 3})
    draft = random_llama(1, **SIZES, exit_layers=(1, 2), thresholds=(0.3, 0.0))
    save_model(target, made.target, WEIGHTS / "mini-7b", torch.float32)
    save_model(target, made.sharded, WEIGHTS / "mini-7b", torch.float32, max_shard_bytes=60_000)
    save_model(target, made.json, dtype=torch.float32)
    save_trained(made.json)
    save_model(draft, made.draft, dtype=torch.float32)
    made.decision.mkdir()
    save_decision(Decision("stats", 16, 0.4, fingerprint(draft)), made.decision / DECISION)
    return made


@contextlib.contextmanager
def little_memory():
    """What would take more than HEADROOM is refused by the system, as it is somewhere anyway."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_case(*arguments, stdin=b""):
    """Run run.py and assert what holds for any input; returns its exit code and what is wrong."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        warnings.catch_warnings(record=True) as warned,
        little_memory(),
    ):
        try:
            code = run.main(list(arguments))
        except SystemExit as stopped:  # argparse
            code = stopped.code
    err.flush()
    lines = err.buffer.getvalue().decode().splitlines()
    errors = [line for line in lines if not re.match(NOTICES, line)]
    assert (code, len(errors)) in ((0, 0), (2, 1)), (code, lines)
    assert all(line.startswith("run.py: ") for line in errors) and not warned
    return code, "".join(errors)


def run_models(target, draft, *more):
    draft = [] if {"ar", "--method=ar"} & {*more} else ["--draft", str(draft)]
    common = ["--max-new-tokens", "4", "--prompt", "A word"]
    return run_case("--target", str(target), *draft, *common, *more)


def run_changed(models, whose, name, content, *options):
    """run.py with a copy of a model's folder in which the file ``name`` has another content."""
    with tempfile.TemporaryDirectory() as folder:
        for file in getattr(models, whose).iterdir():
            Path(folder, file.name).symlink_to(file)
        Path(folder, name).unlink(missing_ok=True)
        Path(folder, name).write_bytes(content)
        if whose == "decision":
            options += ("--stop", str(Path(folder, name)))
            return run_models(models.target, models.draft, *options)
        pair = (models.target, folder) if whose == "draft" else (folder, models.draft)
        return run_models(*pair, *options)


def read_object(file):
    return json.loads(file.read_text())


# Half surrogate pairs and control characters too.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
EDGES = st.sampled_from([-1, 0, 1, 2, 2**10, 2**20, 2**20 + 1, 2**24, 2**31, 2**63, 2**64, 10**300])
NUMBERS = st.integers(-2, 40) | EDGES | st.integers() | st.floats() | st.floats(0, 2)
SCALARS = st.none() | st.booleans() | NUMBERS | ANY_TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(ANY_TEXT, inside, max_size=3),
    max_leaves=6,
)


# JSON text of arrays or objects in each other; Python's own limit is near 1000.
DEPTHS = st.integers(900, 1000) | st.just(50_000)
PAIRS = st.sampled_from([("[", "]"), ('{"a":', "}")])
DEEP = st.builds(lambda depth, pair: pair[0] * depth + "0" + pair[1] * depth, DEPTHS, PAIRS)
LISTS = st.lists(NUMBERS, max_size=4).map(json.dumps)
JSON = st.one_of(*[VALUES.map(json.dumps)] * 3, LISTS, DEEP)


def with_fields(original, changes):
    """JSON text of an object with other fields; ``changes``: JSON texts, None leaves one out."""
    fields = {name: json.dumps(value) for name, value in original.items()} | changes
    said = [f"{json.dumps(name)}: {text}" for name, text in fields.items() if text is not None]
    return "{" + ", ".join(said) + "}"


def fields(names, values=JSON, count=3):
    """What ``with_fields`` may change: some of the ``names``, to any JSON text or to ``values``."""
    return st.dictionaries(st.sampled_from(names), st.none() | values | JSON, max_size=count)


def damaged(content, damage):
    """``content`` cut off, or with some bytes changed from each of several positions on."""
    if isinstance(damage, int):
        return content[: damage % len(content)]
    changed = bytearray(content)
    for position, count, change in damage:
        for offset in range(count):
            changed[(position + offset) % len(changed)] ^= change
    return bytes(changed)


POSITIONS = st.integers(0, 40) | st.integers(0, 3000) | st.integers(0, 2**18)
BITS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 15, 255])
FLIPS = st.tuples(POSITIONS, st.sampled_from([1, 1, 2, 5000]), BITS)
DAMAGE = POSITIONS | st.lists(FLIPS, max_size=3)
ROPE_NUMBERS = "factor rope_theta low_freq_factor high_freq_factor".split()
ROPE_NUMBERS += ["original_max_position_embeddings"]
ROPE_TYPES = st.sampled_from(["default", "linear", "llama3"]) | VALUES
ROPE = dict.fromkeys(ROPE_NUMBERS, NUMBERS | VALUES) | {"rope_type": ROPE_TYPES, "type": VALUES}
ROPE = st.fixed_dictionaries({}, optional=ROPE).map(json.dumps)
OURS = "exit_layers thresholds draft_stop draft_tree draft_length".split()
OTHERS = "head_dim attention_bias mlp_bias rope_theta rope_parameters".split()
CHANGES = fields([*LLAMA_2, *OTHERS, *OURS], NUMBERS.map(json.dumps))
CHANGES |= fields(["rope_scaling", "rope_parameters"], ROPE)
SOME_OPTIONS = st.tuples(
    st.sampled_from(METHODS).map("--method={}".format),
    st.sampled_from(["--temperature=0", "--temperature=1", "--temperature=1.5"]),
    st.sampled_from(["--json", "--chat", "--init=target", "--with-replacement", "--coupled"]),
)


@cases(120)
@given(changes=CHANGES, whose=st.sampled_from(["target", "draft"]), options=SOME_OPTIONS)
def test_any_field_of_a_config(models, changes, whose, options):
    """Fields with any value, missing, or nested thousands deep, of the target or of the draft."""
    content = with_fields(read_object(getattr(models, whose) / "config.json"), changes).encode()
    run_changed(models, whose, "config.json", content, *options)


DAMAGED = [(whose, name) for whose in ("target", "draft") for name in ("config.json", SINGLE)]
DAMAGED += [("sharded", INDEX), ("target", "tokenizer_config.json"), ("json", "tokenizer.json")]
DAMAGED += [("decision", DECISION)]


@pytest.mark.parametrize(("whose", "name"), DAMAGED)
@cases(40)
@given(damage=DAMAGE, options=SOME_OPTIONS)
def test_a_damaged_file(models, whose, name, damage, options):
    """Truncated anywhere, or with flipped bits: of the safetensors in header or numbers."""
    content = damaged((getattr(models, whose) / name).read_bytes(), damage)
    # Of the options some would be refused before a decision model is read.
    run_changed(models, whose, name, content, *(() if whose == "decision" else options))


NO_SHARDS = ["", "a\nb", "a\0b", "x" * 300, "config.json", INDEX]
NO_SHARDS += [".", "..", "../x", "/etc/passwd", "sub/x"]


@cases(80)
@given(data=st.data(), whole=st.none() | JSON, options=SOME_OPTIONS)
def test_any_index_of_shards(models, data, whole, options):
    """A weight_map of any kind, or with some tensors in files of any name."""
    index = read_object(models.sharded / INDEX)
    names, files = sorted(index["weight_map"]), sorted(set(index["weight_map"].values()))
    changes = data.draw(fields(names, st.sampled_from(NO_SHARDS + files).map(json.dumps)))
    weight_map = with_fields(index["weight_map"], changes)
    content = with_fields(index, {"weight_map": whole or weight_map}).encode()
    run_changed(models, "sharded", INDEX, content, *options)


NAMES = st.sampled_from(["<s>", "</s>", "<|eot|>", "<x>", "A", ""]) | ANY_TEXT
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), st.booleans())
TOKEN = st.fixed_dictionaries({"content": NAMES}, optional=FLAGS | {"special": SCALARS})
WHOLE_TOKEN = FLAGS | {"id": st.integers(0, 600), "content": NAMES, "special": st.booleans()}
IDS = st.integers(0, 1030)
BESIDE = st.one_of(
    TOKEN | SCALARS,
    st.lists(TOKEN | ANY_TEXT, max_size=2),
    st.dictionaries(IDS.map(str) | ANY_TEXT, TOKEN, max_size=3),
    st.dictionaries(NAMES, IDS | NUMBERS, max_size=3),
).map(json.dumps)
BESIDES = "chat_template legacy add_bos_token add_prefix_space bos_token eos_token other_token"
BESIDES += " added_tokens_decoder extra_special_tokens tokenizer_class sp_model_kwargs <x> </s>"
FILES = st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])


@cases(120)
@given(name=FILES, changes=fields(BESIDES.split(), BESIDE), whole=st.none() | JSON)
@pytest.mark.parametrize("whose", ["target", "json"])
def test_any_file_beside_a_tokenizer(models, whose, name, changes, whole):
    file = getattr(models, whose) / name
    content = whole or with_fields(read_object(file) if file.is_file() else {}, changes)
    run_changed(models, whose, name, content.encode(), "--chat")


REGEXES = ["(a+)+$", r"(\w+\s?)+$!", r"((\w*)*)*;", "(?<=a", "", ".", r"\p{L}+"]
PATTERN = st.fixed_dictionaries({"Regex": st.sampled_from(REGEXES) | ANY_TEXT})
PLAIN = "NFC NFKD Lowercase StripAccents ByteLevel Whitespace Punctuation BertPreTokenizer Fuse"
PLAIN += " ByteFallback UnicodeScripts BertNormalizer"
BEGINNING = [{"Sequence": {"id": "A", "type_id": 0}}]
BEGINNING += [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("<|eot|>", "<no>")]
SPLIT = {"pattern": PATTERN, "invert": st.booleans()}
SPLIT["behavior"] = st.sampled_from(["Isolated", "Removed", "MergedWithNext", "Contiguous"])
EOT = {"<|eot|>": {"id": "<|eot|>", "ids": [4], "tokens": ["x"]}}
TEMPLATE = {"single": st.lists(st.sampled_from(BEGINNING), max_size=3), "pair": st.just([])}
TEMPLATE["special_tokens"] = st.just(EOT)
KINDS = {"Split": SPLIT, "Replace": {"pattern": PATTERN, "content": ANY_TEXT}}
KINDS |= {"TemplateProcessing": TEMPLATE} | dict.fromkeys(PLAIN.split(), {})
STEP = [st.fixed_dictionaries({"type": st.just(kind), **KINDS[kind]}) for kind in KINDS]
STEP = st.one_of(STEP).map(json.dumps)
PARTS = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "padding"]
ADDED = st.lists(st.fixed_dictionaries(WHOLE_TOKEN), max_size=3).map(json.dumps)
INSIDE = {"vocab": st.sampled_from([{"A": 5}, {"A": 5, "<|eot|>": 4}]), "merges": st.just([])}
INSIDE |= {"unk_token": st.sampled_from([None, "<no>", "<|eot|>"]), "fuse_unk": st.booleans()}
INSIDE = st.fixed_dictionaries(INSIDE) | st.dictionaries(
    st.sampled_from([*INSIDE, "dropout", "byte_fallback"]), VALUES, max_size=1
)


@cases(80)
@given(steps=fields(PARTS, STEP, 2), added=fields(["added_tokens"], ADDED), inside=INSIDE)
def test_any_tokenizer_json(models, steps, added, inside):
    """Parts of any kind, a missing unknown token, regular expressions that explode."""
    raw = read_object(models.json / "tokenizer.json")
    raw |= {"model": raw["model"] | inside} | ({"added_tokens": []} if len(inside) > 1 else {})
    content = with_fields(raw, steps | added).encode()
    run_changed(models, "json", "tokenizer.json", content, "--prompt", "A" * 50 + ";")


DTYPES_OF_FILES = "BOOL F4 F6_E2M3 F8_E4M3 F8_E8M0 I8 U16 F16 BF16 I32 U32 C64 F64 U64".split()
DESCRIBED = st.sampled_from(DTYPES_OF_FILES).map(json.dumps)


@cases(80)
@given(data=st.data(), options=SOME_OPTIONS)
def test_any_header_of_a_decision_model(models, data, options):
    """Any fields in its configuration, any text instead of it, any description of its tensors."""
    whole = (models.decision / DECISION).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, tensors = json.loads(whole[8:end]), whole[end:]
    config = json.loads(header["__metadata__"]["decision"])
    changed = fields(sorted(config)).map(lambda each: with_fields(config, each)) | ANY_TEXT
    metadata = changed.map(lambda text: json.dumps({"decision": text}))
    changes = data.draw(fields(sorted(header)))
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=2, unique=True)):
        described = fields(["dtype", "shape", "data_offsets"], DESCRIBED)
        changes[name] = with_fields(header[name], data.draw(described))
    changes["__metadata__"] = data.draw(metadata | JSON)
    text = with_fields(header, changes).encode()
    content = len(text).to_bytes(8, "little") + text + tensors
    run_changed(models, "decision", DECISION, content, *options)


NUMERALS = (NUMBERS | st.floats(-0.5, 1.5)).map(str)
LISTED = st.lists(st.integers(-1, 6).map(str) | NUMERALS, max_size=4).map(",".join)
FEW = st.integers(1, 12).map(str)
NONSENSE = ANY_TEXT | st.sampled_from(
    ["", " ", "\u0663", "a\nb", "a\r\n\x85\u2028b", "\0", "\udc80", "\ud800", "x" * 5000]
    + "- -- nan inf -inf 1e-40 1e-7 1e400 -0 1_0 , 1,,2 %s {0} . / /etc/passwd /dev/null".split()
    + ["9" * 30, "9" * 5000, "TARGET", "SHARDED", "DRAFT", "DECISION"]
)
DEVICES = st.sampled_from(
    "cpu:0 cuda:00 cuda:128 cuda:999 meta CPU cuda:\u0661".split() + ["cuda:1 "]
)
SOME = """target TARGET SHARDED; draft DRAFT TARGET; prompt A_word -; device cpu
temperature 0 1e-6 0.7 1 1e38; top-p 1e-40 0.5 1; top-k 0 1 5; seed 0 1 9223372036854775807
exits 1 2 1,2; thresholds 0 0.5,0 1e-40,1; tree 4,2,2,1 1,1 70; init draft target
stop DECISION 0.5 0; color auto always never; trace page.html page_2.html"""
COUNTED = ("max-new-tokens", "draft-length", "tree-top-k", "tree-depth", "tree-size")
FITTING = {f"--{name}": FEW for name in COUNTED}
FITTING |= {"--method": st.sampled_from(METHODS), "--dtype": st.sampled_from(["auto", *DTYPES])}
for name, *values in map(str.split, SOME.replace("\n", ";").split(";")):
    FITTING[f"--{name}"] = st.sampled_from([value.replace("_", " ") for value in values])
FLAGS = ("--chat", "--json", "--with-replacement", "--coupled", "--interactive")
WITH_VALUES = [st.tuples(st.just(name), values) for name, values in FITTING.items()]
SENSIBLE = st.lists(st.one_of(*WITH_VALUES, st.tuples(st.sampled_from(FLAGS))), max_size=5)


def with_strange_value(option):
    values = DEVICES if option == "--device" else NUMERALS | LISTED
    return st.tuples(st.just(option), values | NONSENSE)


ANY_OPTION = st.sampled_from([*FITTING, *FLAGS]).flatmap(with_strange_value)
STRANGE = st.lists(ANY_OPTION | st.tuples(NONSENSE), max_size=2)


@cases(200)
@given(sensible=SENSIBLE, strange=STRANGE, joined=st.booleans(), stdin=st.binary(max_size=30))
def test_any_options(models, sensible, strange, joined, stdin):
    """Any combination, most with values that fit, some with any text; on stdin any bytes."""
    pair = ["--target", str(models.target), "--draft", str(models.draft)]
    arguments = [*pair, "--max-new-tokens", "4"]
    names = {name.upper(): path for name, path in vars(models).items()}
    names["DECISION"] /= DECISION
    for words in sensible + strange:
        words = [str(names.get(word, word)) for word in words]
        arguments += ["=".join(words)] if joined else words
    with contextlib.chdir(models.target.parent):  # where pages may be written, under any name
        run_case(*arguments, stdin=stdin)


OPTIONS = [
    (["--temperature", "1", "--top-p", "1e-9"], None),  # keeps the likeliest token
    (["--prompt", "half a pair: \ud800"], "character 13 of the text is no Unicode character"),
    (["--draft", "two\nlines"], "no model folder at two lines"),
    (["--device", "cuda:00"], "unknown device 'cuda:00'"),
    (["--device", "cuda:128"], "device 'cuda:128' was asked for, but torch sees"),
    (f"--method s2d-tree --tree-top-k 1024 --tree-depth {CONTEXT} --tree-size 8".split(), ""),
]


def test_what_was_once_not_refused_in_an_option_or_not_taken(models):
    for options, message in OPTIONS:
        code, error = run_models(models.target, models.draft, *options)
        assert code == (0 if message is None else 2) and (message or "") in error


@pytest.mark.parametrize("damage", ["no numbers", "no numbers in later steps", "huge numbers"])
def test_weights_that_nothing_can_be_drawn_from(tmp_path, models, damage):
    """The target's or the draft's; at a temperature that makes them larger still."""
    model = random_llama(0, **SIZES, eos_token_ids=())
    if damage == "no numbers":
        model.lm_head.weight[:, 0] = torch.nan
    elif damage == "huge numbers":
        model.lm_head.weight *= 1e33
    else:
        prompt = Tokenizer(models.target / "tokenizer.model").encode("A word")
        others = [token for token in range(1024) if token not in prompt]
        model.model["embed_tokens"].weight[others] = torch.nan
    save_model(model, tmp_path / "broken", WEIGHTS / "mini-7b", torch.float32)
    for pair in ((tmp_path / "broken", models.draft), (models.target, tmp_path / "broken")):
        for method in METHODS:
            for temperature in ("0", "1e-6", "1"):
                options = ["--with-replacement"] if method == "mcsd" else []
                run_models(*pair, "--method", method, "--temperature", temperature, *options)


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path):
    """Tokens that the tokenizer does not know may be generated; they are no reason to stop."""
    model = random_llama(0, **SIZES | {"vocab_size": 1200})
    save_model(model, tmp_path / "target", WEIGHTS / "mini-7b", torch.float32)
    options = "--method ar --prompt word --temperature 1".split()
    for form in ([], ["--json"]):
        assert run_case("--target", str(tmp_path / "target"), *options, *form) == (0, "")


def test_a_folder_whose_name_is_no_text(tmp_path, models):
    """Bytes that are not UTF-8, as Linux allows in names."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(models.target, folder)
    for pair in ((folder, models.draft), (models.target, folder)):
        run_models(*pair)


TOO_LARGE = [
    ({"max_position_embeddings": 2**20, "head_dim": 1024}, []),
    ({"max_position_embeddings": 2**20, "head_dim": 128}, []),
    ({"max_position_embeddings": 2**20}, ["--draft-length", "1000000"]),
]


@pytest.mark.parametrize(("change", "options"), TOO_LARGE)
def test_more_than_there_is_memory_for(models, change, options):
    content = json.dumps(read_object(models.target / "config.json") | change).encode()
    assert run_changed(models, "target", "config.json", content, *options)[0] == 2
