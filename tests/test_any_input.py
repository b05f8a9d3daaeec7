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
from helpers import WEIGHTS, random_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import save_trained

import run
from s2d.extras.decision import Decision, fingerprint, save_decision
from s2d.generate import METHODS
from s2d.text.tokenizer import Tokenizer
from s2d.weights import DTYPES, save_model

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
    """Folders: a target; the same with a tokenizer.json; a draft; its decisions."""
    folder = tmp_path_factory.mktemp("models")
    names = ("target", "json", "draft", "decision")
    made = SimpleNamespace(**{name: folder / name for name in names})
    target = random_llama(0, **SIZES | {"num_hidden_layers": 3})
    draft = random_llama(1, **SIZES, exit_layers=(1, 2), thresholds=(0.3, 0.0))
    save_model(target, made.target, WEIGHTS / "mini-7b", torch.float32)
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
JSON = st.one_of(*[VALUES.map(json.dumps)] * 3, st.lists(NUMBERS).map(json.dumps), DEEP)
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
EOT, NO = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<|eot|>", "<no>"))
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEMPLATE["special_tokens"]["<|eot|>"] = {"id": "<|eot|>", "ids": [4], "tokens": ["x"]}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PARTS = [  # what some of the files below hold somewhere, or should not
    ROPE | {"rope_type": "llama3", "original_max_position_embeddings": 64},
    *({"type": kind, "factor": 2.0} for kind in ("linear", "default")),
    dict.fromkeys(("special", "lstrip", "rstrip", "normalized"), True) | {"content": "<x>"},
    *(TEMPLATE | {"single": each} for each in ([TEXT], [NO, TEXT], [EOT, TEXT], [TEXT, EOT])),
    *(SPLIT | {"pattern": {"Regex": regex}} for regex in ("(a+)+$", "(?<=a", "", r"\p{L}+")),
    *(SPLIT | {"pattern": {"Regex": regex}} for regex in (r"(\w+\s?)+$!", r"((\w*)*)*;")),
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "\0"},
    *({"type": kind} for kind in "NFKD Lowercase StripAccents Whitespace Punctuation".split()),
    *({"type": kind} for kind in "BertPreTokenizer Fuse ByteFallback UnicodeScripts".split()),
    *("<s> </s> <|eot|> <no> <x> linear . .. ../x /etc/passwd sub/x config.json".split()),
    *(["", "a\nb", "a\0b", "x" * 300, {"<x>": 1024}, {"1024": {"content": "<x>"}}]),
]


def joined(whole, texts):
    """JSON text of an object or array with other parts; ``texts``: JSON, None leaves one out."""
    said = {name: json.dumps(value) for name, value in whole_items(whole)} | texts
    said = {name: text for name, text in said.items() if text is not None}
    if isinstance(whole, list):
        return "[" + ", ".join(said.values()) + "]"
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in said.items()) + "}"


def whole_items(whole):
    """(name, value) of an object, (number, value) of an array, nothing of all else."""
    if isinstance(whole, dict):
        return whole.items()
    return enumerate(whole) if isinstance(whole, list) else ()


@st.composite
def changed(draw, whole, more=()):
    """JSON text of ``whole`` with other parts, wherever they are, or without some.

    They are of any kind, or one of PARTS, or what stands beside them; ``more`` may be added to it.
    """
    there = dict(whole_items(whole))
    if not (there or more) or draw(st.integers(0, 5)) == 0:
        part = st.sampled_from(PARTS)
        return draw(JSON | NUMBERS.map(json.dumps) | part.map(json.dumps) | part.flatmap(changed))
    texts, names = {}, st.lists(st.sampled_from([*there, *more]), min_size=1, max_size=3)
    for name in draw(names):
        beside = st.sampled_from([*there.values(), 0]).map(json.dumps)
        texts[name] = draw(st.none() | beside | changed(there.get(name)) | changed(there.get(name)))
    return joined(whole, texts)


SOME_OPTIONS = st.tuples(
    st.sampled_from(METHODS).map("--method={}".format),
    st.sampled_from(["--temperature=0", "--temperature=1", "--temperature=1.5"]),
    st.sampled_from(["--json", "--chat", "--init=target", "--with-replacement", "--coupled"]),
)


@cases(80)
@given(data=st.data(), options=SOME_OPTIONS)
def test_any_header_of_a_decision_model(models, data, options):
    """Any fields in its configuration, any text instead of it, any description of its tensors."""
    whole = (models.decision / DECISION).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    config = changed(json.loads(header["__metadata__"]["decision"])) | ANY_TEXT
    said = {"__metadata__": json.dumps({"decision": data.draw(config)})}
    text = data.draw(st.sampled_from([joined(header, said)]) | changed(header)).encode()
    content = len(text).to_bytes(8, "little") + text + whole[end:]
    run_changed(models, "decision", DECISION, content, *options)


NUMERALS = (NUMBERS | st.floats(-0.5, 1.5)).map(str)
LISTED = st.lists(st.integers(-1, 6).map(str) | NUMERALS, max_size=4).map(",".join)
FEW = st.integers(1, 12).map(str)
NONSENSE = ANY_TEXT | st.sampled_from(
    ["", " ", "\u0663", "a\nb", "a\r\n\x85\u2028b", "\0", "\udc80", "\ud800", "x" * 5000]
    + "- -- nan inf -inf 1e-40 1e-7 1e400 -0 1_0 , 1,,2 %s {0} . / /etc/passwd /dev/null".split()
    + ["9" * 30, "9" * 5000, "TARGET", "DRAFT", "DECISION"]
)
DEVICES = st.sampled_from(
    "cpu:0 cuda:00 cuda:128 cuda:999 meta CPU cuda:\u0661".split() + ["cuda:1 "]
)
SOME = """target TARGET JSON; draft DRAFT TARGET; prompt A_word -; device cpu
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
    (["--device", "cuda:128"], "no device 'cuda:128' here"),
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
