"""run.py as a user runs it: its output, --json, and one line with exit code 2 per mistake."""

import importlib.util
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, WEIGHTS, change_json, program, random_llama, refuses
from vocabularies import PROMPT, messages, save_trained, with_config

import run
import s2d
from s2d import Tokenizer
from s2d.bench import __main__ as bench
from s2d.checkpoint import DTYPES, names, save_model
from s2d.checkpoint.config import read_config
from s2d.checkpoint.tokenizer import TextStream
from s2d.cli.colors import COLORS
from s2d.cli.program import run_program
from s2d.cli.terminal import Streamed
from s2d.decoder import Decoder
from s2d.mcsd.decision import Decision, fingerprint, save_decision
from s2d.ngram.datastore import save_datastore
from s2d.options import METHODS, Options
from s2d.speed import batch
from s2d.speed.batch import decode_many

EXAMPLE_ANSWER = "The capital of Tadastan is Vorbiburg. The main export of Tadastan is salt."
EXAMPLE_PROMPT = names.MINIATURE_PROMPTS[0]
QUESTION, EXAMPLE_QUESTION = "What is 3 + 4?", "What is the capital of Tadastan?"
NOTICES = r"mini-\w+ is a miniature|loading target |prompt format: |target on |timing the |Ctrl-C "


def run_json(capsys, *arguments):
    assert program(run.main, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_with_no_other_argument_it_shows_the_method_at_work(tmp_path, monkeypatch, capsys):
    """From any directory: stdout has the answer alone, and stderr the report and a comparison."""
    monkeypatch.chdir(tmp_path)
    assert program(run.main, "--target", "13b") == 0
    out, error = capsys.readouterr()
    assert out == EXAMPLE_ANSWER + "\n"
    notices, _, block = error.partition("\n\n")
    note, loading, form, placed = notices.splitlines()
    assert note.startswith("mini-13b is a miniature in the place of weights/vicuna-13b")
    assert re.fullmatch(r"loading target .*/mini-13b, draft .*/mini-draft", loading)
    assert form == "prompt format: Vicuna's format (by the folder's name)"
    assert placed.startswith("target on ") and "6.1 M parameters" in placed
    lines = block.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["method", "timing", "speed"]
    turns = r"\(median of 5 runs of up to \d+ tokens\)"
    assert re.fullmatch(rf"speed +\d+\.\d\d times as fast as the target alone {turns}", lines[-1])


def test_stdin_and_json(capsys, monkeypatch):
    """--json leaves stdout to one object; the text and the tokens agree; notices go to stderr."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(QUESTION.encode() + b"\n")))
    answer = run_json(capsys, *"--target 7b --prompt - --max-new-tokens 20".split())
    tokenizer, stats = Tokenizer(WEIGHTS / "mini-7b"), answer["stats"]
    for name, folder in (("model", "mini-7b"), ("draft", "mini-draft")):
        assert Path(answer[name]).samefile(WEIGHTS / folder)
    used = {"exits": [2, 3], "thresholds": [0.6, 0.0], "tree": {"widths": [1] * 12}}
    used |= {"temperature": 0.0, "stop": 0.35, "max_new_tokens": 20, "system": None}
    used |= {"method": "s2d", "seed": 0, "decision": None, "init": "draft"}
    used |= {"rule": "noise", "datastore": None, "device": "cpu"}
    assert answer["options"] | used == answer["options"]
    assert answer["text"] == tokenizer.decode(answer["tokens"])
    assert answer["prompt_tokens"] == len(tokenizer.encode_chat([QUESTION]))
    assert answer["exact"] is True and answer["ended"] == "length" and stats["seconds"] > 0
    assert sum(stats["accept_lengths"]) == len(answer["tokens"]) <= 20
    drafted = stats["speculative_decoding"]
    assert drafted["per_exit"].keys() == {"2", "3"}
    assert sum(drafted["num_accepted_tokens_per_pos"]) == drafted["num_accepted_draft_tokens"] > 0


def test_options_reach_the_decoder(capsys):
    common = ["--target", "7b", "--dtype", "float64", "--max-new-tokens", "40", "--prompt"]

    def answer_to(line):
        return run_json(capsys, *common, EXAMPLE_PROMPT, *line.split())

    alone = answer_to("--method ar")
    assert alone["stats"]["mean_accepted_tokens"] == 1.0 and alone["stats"]["exit_counts"] == {}
    drafted = alone["stats"]["speculative_decoding"]
    assert (drafted["num_spec_steps"], drafted["draft_acceptance_rate"]) == (0, None)
    for line, exits, longest, tree in (
        ("--method sd --exits 3", {"3"}, None, None),
        ("--exits 2,4 --thresholds 1,0 --draft-length 2", {"4"}, 3, None),
        ("--method mcsd --tree 3,1 --exits 2", {"2"}, 3, {"widths": [3, 1]}),
        ("--method s2d-tree --tree 3x2x5 --exits 3", {"3"}, 3, dict(top_k=3, depth=2, size=5)),
    ):
        answer = answer_to(line)
        stats = answer["stats"]
        assert answer["tokens"] == alone["tokens"] and set(stats["exit_counts"]) == exits
        assert longest is None or max(stats["accept_lengths"]) == longest
        assert tree is None or answer["options"]["tree"] == tree
    for line, exact in (("--tree 4,1 --rejection", False), ("--tree 1,4", True)):
        assert answer_to(f"--method mcsd --init target {line}")["exact"] is exact
    never_sure = answer_to("--thresholds 1,0 --stop 1")
    assert max(never_sure["stats"]["accept_lengths"]) <= 2
    sampled = [answer_to(f"--temperature 1.5 --seed {seed}")["tokens"] for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]
    one_text = answer_to("--temperature 1.5 --seed 1 --method ar")["tokens"]
    assert sampled[0] == one_text
    assert answer_to("--temperature 1.5 --seed 1 --rejection")["tokens"] != one_text
    for least in ("--top-p 0.000001", "--top-k 1"):
        assert answer_to(f"--temperature 1.5 {least}")["tokens"] == alone["tokens"]


def chosen(target, *words):
    pair = run.load(run.parse(["--target", str(target), *words]))
    return pair.found.draft, pair.found.datastore, pair.options.exits == (0,)


def datastore_path(target):
    return target.with_name(f"{target.name}-datastore.safetensors")


def test_a_real_checkpoint_is_taken_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "WEIGHTS", tmp_path)
    (tmp_path / "mini-7b").mkdir()
    assert names.find_target("7b") == tmp_path / "mini-7b"
    target = tmp_path / "vicuna-7b"
    for folder in (target, tmp_path / "vicuna-draft"):
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.model"):
            shutil.copyfile(WEIGHTS / "mini-7b" / name, folder / name)
    assert names.find_target("7b") == target
    assert chosen(target) == (tmp_path / "vicuna-draft", None, False)
    target.rename(tmp_path / "0a1b2c")  # as into a cache, whose folders are called by checksums
    target.symlink_to(tmp_path / "0a1b2c")
    assert chosen(target) == (tmp_path / "vicuna-draft", None, False)


def test_exit_0_drafts_alone_where_there_is_a_datastore_or_no_draft(tmp_path, capsys):
    for folder in ("mini-7b", "mini-draft"):
        shutil.copytree(WEIGHTS / folder, tmp_path / folder)
    target, draft = tmp_path / "mini-7b", tmp_path / "mini-draft"
    store = datastore_path(target)
    save_datastore(store, [[5, 6, 7]], read_config(target))
    for line, expected in (
        ("", (None, store, True)),
        (f"--draft {draft}", (draft, None, False)),
        ("--exits 0,2", (draft, store, False)),
        ("--exits 2 --method sd", (draft, None, False)),
        ("--method ar", (None, None, False)),
    ):
        assert chosen(target, *line.split()) == expected
    store.unlink()
    shutil.rmtree(draft)
    stats = run_json(capsys, "--target", target, "--max-new-tokens", 24)["stats"]
    assert stats["exit_counts"].keys() == {"0"} and stats["mean_accepted_tokens"] > 1


def test_what_is_found_and_does_not_fit_is_said_and_not_used(tmp_path, capsys):
    """Not so what was asked for: --draft, or exits that need a draft model."""
    target, draft = tmp_path / "llama-1b", tmp_path / "llama-draft"
    shutil.copytree(WEIGHTS / "mini-7b", target)
    shutil.copytree(WEIGHTS / "mini-draft", draft)
    assert chosen(target) == (draft, None, False)
    for changes, message in (
        (dict(vocab_size=61), "llama-draft has a vocabulary of 61 tokens, the target 1024"),
        (dict(model_type="mistral"), "llama-draft/config.json: model_type is 'mistral'"),
        (dict(exit_layers=[9]), "llama-draft/config.json: exit_layers must increase"),
        (None, "No such file or directory"),
    ):
        if changes is None:
            (draft / "config.json").unlink()
        else:
            before = (draft / "config.json").read_text()
            change_json(draft / "config.json", **changes)
        error_of(capsys)
        assert chosen(target) == (None, None, True)
        notice = error_of(capsys).splitlines()[0]
        assert notice.startswith("the draft next to the target is not used: ")
        assert message in notice
        for words in (("--exits", "2"), ("--draft", str(draft))):
            with pytest.raises((ValueError, FileNotFoundError)):
                chosen(target, *words)
        if changes is not None:
            (draft / "config.json").write_text(before)
    shutil.rmtree(draft)
    shutil.copytree(WEIGHTS / "mini-draft", draft)
    store = datastore_path(target)
    store.write_text("no datastore")
    refuses(run.main, capsys, store.name, "--target", target)
    store.unlink()
    weights = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(weights[:-9])
    assert "llama-draft/model.safetensors cannot be read" in refused(capsys, "--target", target)


def test_how_the_draft_was_chosen_is_said(tmp_path):
    target, draft = tmp_path / "base-1b", tmp_path / "base-draft"
    shutil.copytree(WEIGHTS / "mini-7b", target)

    def said(*words):
        return run.load(run.parse(["--target", str(target), *words])).found.words

    table = "exit 0, the n-grams of the text"
    assert said() == f"{table}, as there is no {draft} that fits"
    shutil.copytree(WEIGHTS / "mini-draft", draft)
    own = f"found by its family's name: {draft}"
    assert said() == said("--exits", "2,3") == own
    assert said("--exits", "0,2") == f"{own}; and {table}"
    assert said("--exits", "0") == table and said("--method", "ar") == "none"
    store = datastore_path(target)
    save_datastore(store, [[5, 6, 7]], read_config(target))
    assert said() == said("--exits", "0") == f"{store}, found next to the target"
    assert said("--exits", "0,2") == f"{own}; and {store}, found next to the target"
    assert said("--exits", "2") == own
    assert said("--draft", str(draft)) == f"{draft}, as given"


def test_many_prompts_at_once(tmp_path, capsys):
    """Each answer is the one that --prompt gives; what is too long is named, and the others run."""
    file, prompts = tmp_path / "prompts.txt", [QUESTION, "", "word " * 600, "Tell me a story."]
    file.write_text("\n".join(prompts) + "\n")
    common = "--target", "7b", "--dtype", "float64", "--max-new-tokens", 24, "--temperature", 1
    assert program(run.main, *common, "--prompts", file, "--batch", 2, "--seed", 5, "--json") == 2
    out, error = capsys.readouterr()
    answers = {line["line"]: line for line in map(json.loads, out.splitlines())}
    assert list(answers) == [1, 4]
    assert error.splitlines()[-1].startswith("line 3: the prompt has ")
    for seed, number in ((5, 1), (7, 4)):
        answer = run_json(capsys, *common, "--prompt", prompts[number - 1], "--seed", seed)
        many = answers[number]
        for each in (answer, many):
            clocks = [name for name in each["stats"] if "second" in name]
            assert len(clocks) == 4 and all(each["stats"].pop(name) > 0 for name in clocks)
        assert {"line": number} | answer == many and many["prompt"] == prompts[number - 1]
    file.write_text(EXAMPLE_QUESTION)
    assert program(run.main, "--target", "7b", "--prompts", file) == 0
    shown = f"## line 1: {EXAMPLE_QUESTION}\n\nThe capital of Tadastan is"
    assert shown in capsys.readouterr().out


def test_answers_come_in_the_order_of_the_lines_and_each_as_soon_as_it_can(
    tmp_path, monkeypatch, capsys
):
    """Also if they end in another order, or some cannot be given."""
    prompts = ["Tell me a story about a robot called Nora.", EXAMPLE_QUESTION, QUESTION] * 2
    content = [prompt.encode() for prompt in prompts]
    content.insert(1, b"word " * 600)
    content.insert(3, b"word " * 600)
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(content))
    ended = []

    def in_any_order(*arguments):
        for index, result in decode_many(*arguments):
            ended.append(index)
            yield index, result

    monkeypatch.setattr(run, "decode_many", in_any_order)
    assert program(run.main, "--target", "7b", "--prompts", file, "--json", "--seed", 5) == 2
    out, error = capsys.readouterr()
    answers = list(map(json.loads, out.splitlines()))
    assert [answer["line"] for answer in answers] == [1, 3, 5, 6, 7, 8]
    assert [answer["prompt"] for answer in answers] == prompts
    assert [answer["options"]["seed"] for answer in answers] == [5, 7, 9, 10, 11, 12]
    assert ended != sorted(ended)
    refused = [line for line in error.splitlines() if not re.match(NOTICES, line)]
    assert len(refused) == 2 and "line 2: the prompt has" in refused[0]
    assert "line 4: the prompt has" in refused[1]
    results = batch.in_order(iter([(1, "b"), (0, "a"), (2, "c"), (4, "e")]))
    assert list(results) == ["a", "b", "c"]


def test_the_comparison_is_made_for_any_prompt(capsys):
    common = "--target", "7b", "--max-new-tokens", 16, "--prompt", QUESTION
    lossless = r"^method +s2d, lossless(.*)\ntiming the .*\nspeed .* times as fast as the target "
    for dtype, rounding in (("float32", ", up to rounding in float32"), ("float64", "")):
        assert program(run.main, *common, "--compare", "--dtype", dtype) == 0
        assert re.search(lossless, error_of(capsys), re.M)[1] == rounding
    assert program(run.main, *common) == 0
    assert "times as fast" not in error_of(capsys)


@pytest.mark.parametrize("output", ["json", "text"])
def test_a_page_is_written_besides_the_answer(output, tmp_path, capsys):
    """Its notice begins a line of its own. A page that could not be written is refused at once."""
    page = tmp_path / "page.html"
    line = ["--target", "7b", "--prompt", EXAMPLE_QUESTION]
    line += ["--json"] if output == "json" else []
    assert program(run.main, *line, "--trace", page) == 0
    out, error = capsys.readouterr()
    assert "Vorbiburg" in page.read_text() and f"\nwrote {page}\n" in error
    assert out.endswith("\n") and out.count("\n") == 1
    for path in (page, tmp_path, tmp_path / "nowhere/page.html"):
        refuses(run.main, capsys, str(path), *line, "--trace", path)


def test_the_chat_template_is_used_where_there_is_one(tmp_path, capsys):
    tokenizer, base = Tokenizer(WEIGHTS / "mini-7b"), tmp_path / "base"  # a name without a format
    shutil.copytree(WEIGHTS / "mini-7b", base)
    common = "--max-new-tokens", 4, "--prompt", QUESTION, "--target"
    chat, plain = len(tokenizer.encode_chat([QUESTION])), len(tokenizer.encode(QUESTION))
    for line, tokens, said in (
        (["7b"], chat, "Vicuna's format (by the folder's name)"),
        (["7b", "--raw"], plain, "plain text (--raw)"),
        ([base], plain, "plain text (the folder has no chat template)"),
    ):
        assert program(run.main, *common, *line, "--json") == 0
        out, error = capsys.readouterr()
        assert json.loads(out)["prompt_tokens"] == tokens
        assert f"\nprompt format: {said}\n" in error
    change_json(base / "tokenizer_config.json", chat_template="Q {{ messages[0]['content'] }} A")
    own = len(tokenizer.encode(f"Q {QUESTION} A")) - 1
    assert program(run.main, *common, base, "--json") == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["prompt_tokens"] == own
    assert "\nprompt format: the folder's own chat template\n" in error


CONTROLS = "Say \x1b]0;owned\x07\x1b[31m red\x9b1m"
VISIBLE = r"Say \x1b]0;owned\x07\x1b[31m red\x9b1m"


def test_a_terminal_shows_control_characters_and_does_not_obey_them(monkeypatch, tmp_path, capsys):
    """Of answers, of the lines of a file, and of notices, which may quote a file."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    certain = SimpleNamespace(is_open=lambda ids: False)
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)), model=certain)
    streamed = Streamed(tokenizer, colors={2: COLORS[0]})
    tokens = list(map(ord, "a\x1b[2Jb\n"))
    streamed.add(SimpleNamespace(tokens=tokens, sources=[2] * len(tokens)))
    streamed.finish()
    assert capsys.readouterr().out == "\x1b[36ma\\x1b[2Jb\n\x1b[0m\n"
    file = tmp_path / "prompts.txt"
    file.write_text(CONTROLS)
    answer = "--target", "7b", "--max-new-tokens", 4
    assert program(run.main, *answer, "--prompts", file) == 0
    out, error = capsys.readouterr()
    assert f"## line 1: {VISIBLE}\n" in out and "\x1b" not in out + error
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: CONTROLS)
    assert program(run.main, *answer, "--prompts", file) == 0
    assert f"\n\n{VISIBLE}\n" in capsys.readouterr().out
    monkeypatch.setattr(TextStream, "push", lambda self, ids, last=False: CONTROLS)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert program(run.main, *answer, "--interactive", "--method", "ar") == 0
    assert capsys.readouterr().out == VISIBLE * 5 + "\n"
    assert run_program("run.py", Mock(side_effect=ValueError(CONTROLS))) == 2
    assert capsys.readouterr().err == f"run.py: {VISIBLE}\n"


def test_where_nobody_looks_an_answer_is_written_as_it_is(monkeypatch, capsys):
    monkeypatch.setattr(TextStream, "push", lambda self, ids, last=False: CONTROLS)
    assert program(run.main, "--target", "7b", "--max-new-tokens", 1, "--method", "ar") == 0
    assert capsys.readouterr().out == CONTROLS * 2 + "\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of small random models, one with a tokenizer.json, one without any tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    sizes = dict(vocab_size=1024, hidden_size=16, intermediate_size=24, head_dim=4)
    target = random_llama(0, **sizes, num_hidden_layers=3, max_position_embeddings=72)
    exits = dict(exits=(1, 2), thresholds=(0.3, 0.0), max_position_embeddings=72)
    draft = random_llama(1, **sizes, num_hidden_layers=2, **exits)
    for name in ("target", "json"):
        save_model(target, folder / name, WEIGHTS / "mini-7b", torch.float32)
    (folder / "json/tokenizer.model").unlink()
    save_trained(folder / "json")
    save_model(draft, folder / "draft", dtype=torch.float32)
    save_decision(Decision("stats", 16, 0.4, fingerprint(draft)), folder / "decision.safetensors")
    return folder


MISTAKES = {
    "--target nowhere": "no model folder at nowhere",
    "--target {m}/draft --draft {m}/target": "has no tokenizer.model and no tokenizer.json",
    "--target {m}/target --method s2d --exits 2": "no model folder at",
    "--draft=": "No such file or directory: 'config.json'",
    "--exits two": "argument --exits: invalid comma_separated_list value: 'two'",
    "--decision nowhere": "no decision model at nowhere",
    "--tree 2,2 --draft-length 2": "give tree or draft_length, not both",
    "--tree 6x4": "argument --tree: expected widths, such as 4,2,2,1",
    "--prompt=" + "word " * 600: "the prompt has ",
    "--prompt=\udce9": "the text is not valid UTF-8",
    "--device tpu9": "device 'tpu9'",
    "--raw --system x": "need a chat template",
    "--raw --template-option x=1": "need a chat template",
    "--template-option thinking": "expected NAME=VALUE, got 'thinking'",
    "--prompts /nonexistent": "No such file or directory: '/nonexistent'",
    "--prompts /dev/null --prompt x": "argument --prompt: not allowed with argument --prompts",
    "--prompts /dev/null --prompt=": "argument --prompt: not allowed with argument --prompts",
    "--prompts /dev/null --batch 0": "must be at least 1, got 0",
    "--batch 2": "--batch does nothing without --prompts",
    "--prompt a --prompt b": "--prompt is given twice",
    "--examples --prompt x": "argument --prompt: not allowed with argument --examples",
    "--target {m}/target --examples": "--examples are for the miniatures",
    "--prompts /dev/null --compare": "--trace and --compare are for a single prompt",
    "--compare --json": "--json goes neither with",
    "--compare --method ar": "--method ar does not draft",
    "--method ar --exits 2": "--method ar does not draft",
    "--stop END": "got 'END'; a text that ends an answer is --stop-at",
    "--stop-at=": "a stop string cannot be empty",
    "--temperature inf": "temperature: expected a number from 0, got inf",
    "--top-p 0": "top_p: expected a number above 0, up to 1, got 0",
    "--interactive --json": "--json goes neither with",
    "--interactive --prompt x": "argument --prompt: not allowed with argument --interactive",
    "--trace {m}": "is there already",
}


def refused(capsys, *words):
    """The one line that says what is wrong with a command line, "" if there is an answer."""
    code = program(run.main, *words)
    lines = error_of(capsys).partition("\n\n")[0].splitlines()  # up to the report
    errors = [line for line in lines if not re.match(NOTICES, line)]
    assert (code, len(errors)) in ((0, 0), (2, 1)), (words, lines)
    assert all(line.startswith("run.py: ") for line in errors), lines
    return "".join(errors)


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(line, models, capsys):
    """With the target 7b, unless the line names another."""
    words = [line] if line.startswith("--prompt=") else line.format(m=models).split(" ")
    target = [] if "--target" in words else ["--target", "7b"]
    assert MISTAKES[line] in refused(capsys, *target, *words)


def test_a_file_that_is_not_there_is_told_before_a_model_is_loaded(capsys):
    refuses(run.main, capsys, "No such file", "--target", "7b", "--prompts", "/nonexistent")


VALUES = {
    "method": METHODS,
    "prompt": ["A word", "", "x" * 5000, "\udc80", "日本 \0"],
    "max-new-tokens": [4, 0, -1, "x"],
    "temperature": [0, 1, 1e-7, "nan", "inf", -1],
    "top-p": [0.5, 0, 2],
    "top-k": [0, 5, -1, 10**30],
    "seed": [0, 2**63 - 1, 2**63, -1],
    "device": ["cpu", "cpu:0", "cuda:99", "meta"],
    "dtype": ["float64", "bfloat16", "int8"],
    "exits": ["0", "1", "1,2", "2,1", "0,2", "9", "", ",", "١"],
    "thresholds": ["0", "0.5,0", "nan,0", "2"],
    "draft-length": [1, 5, 0, 10**9],
    "tree": ["4,2,2,1", "1,1", "3x2x4", "0x1x1", "2000,2000", "x", "9" * 30],
    "init": ["draft", "target"],
    "stop": [0.5, 2, "nan", "{m}/decision.safetensors", "/dev/null"],
    "system": ["Be brief.", ""],
}
FLAGS = ["--json", "--raw", "--rejection"]


def test_options_drawn_at_random_give_an_answer_or_one_line(models, capsys):
    rng, answers = random.Random(0), 0
    for _ in range(60):
        words = ["--target", models / "target", "--draft", models / "draft"]
        words += ["--prompt=A word", "--max-new-tokens=4"]
        for name in rng.sample(sorted(VALUES), rng.randrange(1, 4)):
            words.append(f"--{name}={rng.choice(VALUES[name])}".format(m=models))
        answers += not refused(capsys, *words, *rng.sample(FLAGS, rng.randrange(2)))
    assert 10 < answers < 50


DAMAGED = ["config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json"]


def test_files_damaged_at_random_give_an_answer_or_one_line(models, tmp_path, capsys):
    """Cut short, or with some bytes changed."""
    rng, answers = random.Random(0), 0
    for case in range(40):
        folder = tmp_path / str(case)
        shutil.copytree(models / "json", folder)
        file = folder / rng.choice(DAMAGED)
        content = bytearray(file.read_bytes())
        for _ in range(rng.randrange(4)):
            content[rng.randrange(min(len(content), 3000))] ^= rng.choice([1, 4, 16, 255])
        file.write_bytes(content if rng.random() < 0.7 else content[: rng.randrange(len(content))])
        words = "--target", folder, "--draft", models / "draft", "--max-new-tokens", 4
        answers += not refused(capsys, *words, "--prompt", "A word")
    assert 0 < answers < 30


def test_what_a_program_raises_becomes_an_exit_code(capsys):
    for error, code, message in (
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("two\nlines"), 2, "run.py: two lines\n"),
        (ModuleNotFoundError("No module named 'x'"), 2, "run.py: No module named 'x'\n"),
    ):
        assert run_program("run.py", Mock(side_effect=error)) == code
        assert capsys.readouterr().err == message
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_program("run.py", Mock(side_effect=RuntimeError("a fault of ours")))


def shell(line, **options):
    options = dict(cwd=ROOT, capture_output=True) | options
    return subprocess.run(["bash", "-c", f"exec {shlex.quote(sys.executable)} {line}"], **options)


def test_stdin_is_read_as_a_file_is():
    """A mark is no token, and what is no text is one line."""
    common = "run.py --target 7b --max-new-tokens 4 --method ar"
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = shell(f"{common} --prompt - --json", input=b"\xef\xbb\xbfHi", env=strict)
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    assert json.loads(done.stdout)["prompt_tokens"] == len(tokenizer.encode_chat(["Hi"]))
    done = shell(f"{common} --interactive", input=b"caf\xe9\n", env=strict)
    assert done.returncode == 2 and b"run.py: 'utf-8' codec can't decode" in done.stderr


def test_a_conversation_goes_on_after_what_it_cannot_answer(monkeypatch, capsys):
    """stdout has the answers. The line that is too long is no part of what comes after it."""
    lines = [QUESTION, "word " * 600, EXAMPLE_QUESTION]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert program(run.main, "--target", "7b", "--interactive") == 0
    out, error = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "The capital of Tadastan is Vorbiburg." in out
    assert error.count("> ") == 4 and error.count("the prompt has ") == 1


def test_ctrl_c_in_a_conversation_ends_the_answer(monkeypatch, capsys):
    """What there was of it stays a part of the conversation."""
    emit = Decoder.emit
    steps = []

    def interrupted(self, *arguments):
        steps.append(len(self.context))
        if len(steps) == 2:
            raise KeyboardInterrupt
        return emit(self, *arguments)

    monkeypatch.setattr(Decoder, "emit", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{EXAMPLE_PROMPT}\n{EXAMPLE_QUESTION}\n"))
    line = "--target", "7b", "--interactive", "--draft-length", 3
    assert program(run.main, *line) == 0
    begun, whole = capsys.readouterr().out.splitlines()
    assert EXAMPLE_ANSWER.startswith(begun) and 5 < len(begun) < len(EXAMPLE_ANSWER)
    assert whole == "The capital of Tadastan is Vorbiburg." and steps[2] > steps[1]


def test_a_notice_that_cannot_be_written_costs_no_answer():
    done = shell("run.py --target 7b --max-new-tokens 4 --json --prompt Hi 2>/dev/full")
    assert json.loads(done.stdout)["text"]


def error_of(capsys):
    return capsys.readouterr().err


def test_ctrl_c_is_one_word(monkeypatch, capsys):
    monkeypatch.setattr(run, "load", Mock(side_effect=KeyboardInterrupt))
    assert program(run.main, "--target", "7b") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_byte_order_mark_is_no_token(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text(QUESTION, encoding="utf-8-sig")
    assert program(run.main, "--target", "7b", "--prompts", file, "--json") == 0
    with_mark = json.loads(capsys.readouterr().out)
    assert with_mark["tokens"] == run_json(capsys, "--target", "7b", "--prompt", QUESTION)["tokens"]


def test_a_reader_who_has_enough_is_met_with_silence():
    answer = "lambda: print('answer' * 99999)"
    code = f"import sys; from s2d.cli.program import *; sys.exit(run_program('run.py', {answer}))"
    line = shlex.join([sys.executable, "-c", code])
    shell = ["bash", "-o", "pipefail", "-c", f"{line} | head -c 6"]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_answers_end_before_a_stop_string(tmp_path, monkeypatch, capsys):
    """Alone, as JSON, line by line of a file, and in a conversation."""
    options = ["--target", "13b", "--stop-at", "nothing", "--stop-at", "bur"]
    begun = EXAMPLE_ANSWER.partition("bur")[0]
    assert program(run.main, *options) == 0
    out, error = capsys.readouterr()
    assert out == begun + "\n" and "\nended by       stop_at\n" in error
    answer = run_json(capsys, *options)
    assert (answer["text"], answer["ended"]) == (begun, "stop_at")
    assert answer["options"]["stop_at"] == ["nothing", "bur"]
    file = tmp_path / "prompts.txt"
    file.write_text(EXAMPLE_QUESTION)
    assert program(run.main, *options, "--prompts", file) == 0
    assert capsys.readouterr().out.splitlines()[2] == "The capital of Tadastan is Vorbi"
    monkeypatch.setattr(sys, "stdin", io.StringIO(EXAMPLE_QUESTION + "\n"))
    assert program(run.main, *options, "--interactive") == 0
    assert "The capital of Tadastan is Vorbi\n" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1])
def test_an_answer_that_is_cut_by_ctrl_c_ends_its_line(count, monkeypatch, capsys):
    """Before its first token as well. There is no JSON of it."""
    emit = Decoder.emit
    emitted = []

    def interrupted(self, *arguments):
        if len(emitted) == count:
            raise KeyboardInterrupt
        emitted.append(emit(self, *arguments))
        return emitted[-1]

    monkeypatch.setattr(Decoder, "emit", interrupted)
    assert program(run.main, "--target", "13b", "--json") == 130
    out, error = capsys.readouterr()
    assert out == "" and error.endswith("\ninterrupted\n")
    emitted.clear()
    assert program(run.main, "--target", "13b") == 130
    out = capsys.readouterr().out
    assert out.endswith("\n") and EXAMPLE_ANSWER.startswith(out[:-1]) and len(out) > 5 * count


def test_a_draft_is_known_by_the_names_of_targets(capsys):
    """In run.py and in benchmarks."""
    draft, *others = chosen(WEIGHTS / "mini-13b", "--draft", "7b")
    assert draft.samefile(WEIGHTS / "mini-7b") and others == [None, False]
    line = "--targets 13b --draft 7b --methods s2d --limit 1 --rounds 1 --max-new-tokens 2"
    assert program(bench.main, *line.split()) == 0
    capsys.readouterr()
    refuses(run.main, capsys, "no model folder at 8b", *"--target 7b --draft 8b".split())


def test_blanks_of_a_prompt_are_those_of_transformers(trained):
    """Some templates remove them, as Llama 3's; others do not. The end of a line is no blank."""
    lengths = set()
    args = run.parse(["--target", "x"])
    for content in ("messages[0]['content']", "messages[0]['content'] | trim"):
        ours, theirs = with_config(trained, chat_template="Q: {{ " + content + " }} A")
        for text in ("  two", "\tone ", "\n\nlines\n"):
            expected = theirs.apply_chat_template(messages([text]), **PROMPT)
            assert run.encode([text], args, ours) == expected
            lengths.add(len(expected))
    assert len(lengths) > 3


def test_a_chat_template_is_given_options(tmp_path, capsys):
    """JSON where the value is some, else a text."""
    folder = tmp_path / "thinking"
    shutil.copytree(WEIGHTS / "mini-7b", folder)
    template = "{{ messages[0]['content'] }}{{ ' yes' if think else ' no' }}{{ mood }}"
    change_json(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    line = ["--target", folder, "--prompt", "A", "--max-new-tokens", 1, "--template-option"]
    line += ["think=false", "--template-option", "mood=glad"]
    answer = run_json(capsys, *line)
    assert answer["prompt_tokens"] == len(tokenizer.encode("A noglad", with_bos=False))
    assert answer["options"]["template_options"] == {"think": False, "mood": "glad"}


def test_the_examples_are_answered(capsys):
    assert program(run.main, "--target", "13b", "--examples", "--max-new-tokens", 24) == 0
    out = capsys.readouterr().out
    for number, prompt in enumerate(names.MINIATURE_PROMPTS, start=1):
        assert f"## line {number}: {prompt}\n\n" in out
    assert EXAMPLE_ANSWER in out


def test_help_is_quick_and_complete():
    """PyTorch is not loaded for it, nor for a mistake, nor for the list of programs."""
    no_torch = "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    for words, code, shown in (
        (["--help"], 0, ("model:", "drafting:", "sampling:", "input:", "output:", "Example: ")),
        (["--version"], 0, (f"s2d {s2d.__version__}\n",)),
        (["--target", "7b", "--exits", "x"], 2, ("run.py: argument --exits: ",)),
    ):
        program = no_torch + "runpy.run_path('run.py', run_name='__main__')"
        line = [sys.executable, "-c", program, "run.py", *words]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert all(text in done.stdout + done.stderr for text in shown)
    line = [sys.executable, "-c", no_torch + "runpy.run_module('s2d')", "s2d"]
    line[2] = no_torch + "runpy.run_module('s2d', run_name='__main__')"
    listed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout
    programs = re.findall(r"^python -m (\S+)", listed, re.M)
    assert {"s2d.bench", "s2d.train", "s2d.definition"} <= {*programs}
    for name in programs:
        assert importlib.util.find_spec(name) is not None, name


def test_options_and_defaults_are_those_that_the_library_knows(capsys):
    assert program(run.main, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "{" + ",".join(METHODS) + "}" in shown
    assert set(re.search(r"--dtype \{auto,(.*?)\}", shown)[1].split(",")) == {*DTYPES}
    for name in ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "init"):
        default = getattr(Options(), name)
        default = default if isinstance(default, str) else f"{default:g}"
        assert re.search(rf"--{name.replace('_', '-')} [^(]*\({default}[:)]", shown), name
