"""run.py as a user runs it: its output, --json, and one line with exit code 2 per mistake."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import WEIGHTS, change_json, program, refuses

import run
from s2d import Tokenizer
from s2d.checkpoint.config import read_folder
from s2d.checkpoint.files import taken
from s2d.checkpoint.tokenizer import TextStream
from s2d.cli.answer import choose
from s2d.cli.ending import run_program
from s2d.decoder import Decoder
from s2d.mcsd.roots import RootsDecoder
from s2d.ngram.datastore import save_datastore
from s2d.options import Options
from s2d.pair import names
from s2d.pair.loading import choose_pair
from s2d.tree import FixedShape, GrowingShape

EXAMPLE_ANSWER = "The capital of Tadastan is Vorbiburg. The main export of Tadastan is salt."
EXAMPLE_PROMPT = (WEIGHTS / "prompts.txt").read_text().splitlines()[0]
QUESTION, EXAMPLE_QUESTION = "What is\u20283 + 4?", "What is the capital of Tadastan?"


def run_json(capsys, *arguments):
    assert program(run.main, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def type_in(monkeypatch, content):
    """Have these bytes on stdin."""
    typed = io.TextIOWrapper(io.BytesIO(content), "utf-8")
    monkeypatch.setattr(sys, "stdin", typed)


def test_stdin_and_json(capsys, monkeypatch):
    """--json leaves stdout to one object; notices go to stderr. A byte order mark is no token."""
    type_in(monkeypatch, b"\xef\xbb\xbf" + QUESTION.encode() + b"\n")
    answer = run_json(capsys, *"--target 7b --prompt - --max-new-tokens 20".split())
    tokenizer, stats = Tokenizer(WEIGHTS / "mini-7b"), answer["stats"]
    assert Path(answer["model"]).samefile(WEIGHTS / "mini-7b")
    assert Path(answer["draft"]).samefile(WEIGHTS / "mini-draft")
    assert answer["text"] == tokenizer.decode(answer["tokens"])
    assert answer["prompt_tokens"] == len(tokenizer.encode_chat([QUESTION]))
    assert answer["exact"] is True and answer["ended"] == "length"
    assert sum(stats["accept_lengths"]) == len(answer["tokens"]) == 20
    assert stats["speculative_decoding"]["per_exit"].keys() == {"2", "3"}


DECIDED = {
    "--method ar": dict(method="ar", exits=()),
    "--exits 2,4 --thresholds 1,0": dict(exits=(2, 4), thresholds=(1.0,)),
    "--exits 2,3,4": dict(thresholds=(0.6, 0.5)),
    "--draft-length 2 --stop 0.5": dict(tree=FixedShape((1, 1)), stop=0.5),
    "--method mcsd --tree 3,1": dict(method="mcsd", exits=(3,), tree=FixedShape((3, 1))),
    "--method s2d-tree --tree 3x2x5": dict(method="s2d-tree", tree=GrowingShape(3, 2, 5)),
    "--rejection --init target": dict(rule="rejection", decoder=RootsDecoder),
    "--paper": dict(rule="rejection", stop=0.0),
    "--temperature 1.5 --seed 3": dict(temperature=1.5, seed=3),
    "": dict(method="s2d", exits=(2, 3), tree=FixedShape((1,) * 12), rule="noise"),
}


def test_nothing_drafts_for_the_target_alone_from_python_too():
    choice = choose_pair("7b", method="ar", init="target", datastore="f", decision="f")
    assert choice.options == Options() and choice.draft_folder is None


@pytest.mark.parametrize("line", DECIDED)
def test_what_is_asked_for_is_decided(line):
    choice = choose(run.parse(["--target", "7b", *line.split()]))
    decided = vars(choice.options)
    assert decided | DECIDED[line] == decided


def chosen(target, *words):
    choice = choose(run.parse(["--target", *map(str, (target, *words))]))
    draft = choice.draft_folder and choice.draft_folder.path
    alone = [getattr(each, "exit_layer", each) for each in choice.options.exits] == [0]
    return draft, choice.datastore, alone


def test_a_real_checkpoint_is_taken_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "WEIGHTS", tmp_path)
    (tmp_path / "mini-7b").mkdir()
    assert names.find_target("7b") == tmp_path / "mini-7b"
    (tmp_path / "mini-mine").mkdir()
    assert names.miniature_note(tmp_path / "mini-mine") == ""  # it is somebody's own
    target = tmp_path / "vicuna-7b"
    for folder in (target, tmp_path / "vicuna-draft"):
        shutil.copytree(WEIGHTS / "mini-7b", folder)
    assert names.find_target("7b") == target
    assert chosen(target) == (tmp_path / "vicuna-draft", None, False)


def test_what_is_given_drafts_else_the_familys_draft_else_exit_0(tmp_path):
    for folder in ("mini-7b", "mini-draft"):
        shutil.copytree(WEIGHTS / folder, tmp_path / folder)
    target, draft = tmp_path / "mini-7b", tmp_path / "mini-draft"
    store = target.with_name("mini-7b-datastore.safetensors")
    save_datastore(store, [[5, 6, 7]], read_folder(target).config)
    assert chosen(target) == chosen(target, "--exits", "2") == (draft, None, False)
    assert chosen(target, "--draft", "13b")[0].samefile(WEIGHTS / "mini-13b")
    assert chosen(target, "--exits", "0") == (None, store, True)
    assert chosen(target, "--exits", "0,2") == (draft, store, False)
    assert chosen(target, "--method", "ar") == (None, None, False)
    given = tmp_path / "given"
    shutil.copyfile(store, given)
    assert chosen(target, "--datastore", given) == (None, given, True)
    assert chosen(target, "--datastore", given, "--exits", "0,2") == (draft, given, False)
    shutil.rmtree(draft)
    assert chosen(target) == (None, store, True)
    store.unlink()
    assert chosen(target) == (None, None, True)
    with pytest.raises(ValueError, match="there is no draft model"):
        chosen(target, "--exits", "2")


def test_what_is_found_and_does_not_fit_is_said_and_not_used(tmp_path, capsys):
    """Not so what was asked for: --draft, or exits that need a draft model."""
    target, draft = tmp_path / "llama-1b", tmp_path / "llama-draft"
    shutil.copytree(WEIGHTS / "mini-7b", target)
    shutil.copytree(WEIGHTS / "mini-draft", draft)
    before = (draft / "config.json").read_text()
    for changes in (dict(vocab_size=61), dict(model_type="mistral")):
        change_json(draft / "config.json", **changes)
        assert chosen(target) == (None, None, True)
        notice = capsys.readouterr().err.splitlines()[0]
        assert "llama-draft" in notice and "not used" in notice
        for words in (("--exits", "2"), ("--draft", draft)):
            with pytest.raises(ValueError):
                chosen(target, *words)
        (draft / "config.json").write_text(before)


def test_many_prompts_at_once(tmp_path, capsys):
    """Each answer is the one that --prompt gives, in the order of the lines.

    What is too long is named, and the others run. A byte order mark is no token.
    """
    prompts = [EXAMPLE_PROMPT, "", "word " * 600, QUESTION, EXAMPLE_QUESTION]
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(prompts).encode())
    common = "--target", "7b", "--dtype", "float64", "--max-new-tokens", 40, "--temperature", 0.1
    assert program(run.main, *common, "--prompts", file, "--batch", 2, "--seed", 5, "--json") == 2
    out, error = capsys.readouterr()
    answers = list(map(json.loads, out.splitlines()))
    assert [answer["line"] for answer in answers] == [1, 4, 5]
    assert error.splitlines()[-1].startswith("line 3: the prompt has ")
    for seed, many in zip((5, 7, 8), answers):
        prompt = prompts[many["line"] - 1]
        answer = run_json(capsys, *common, "--prompt", prompt, "--seed", seed)
        del answer["stats"], answer["arguments"]
        assert answer == {name: many[name] for name in answer} and many["prompt"] == prompt


def test_a_page_is_written_besides_the_answer(tmp_path, capsys):
    """And the comparison is made for any prompt. What could not be written is refused at once."""
    page = tmp_path / "page.html"
    line = ["--target", "7b", "--prompt", EXAMPLE_QUESTION]
    assert program(run.main, *line, "--trace", page, "--compare") == 0
    out, error = capsys.readouterr()
    assert page.is_file() and f"\nwrote {page}\n" in error and re.search("\nspeed .* times", error)
    assert out == "The capital of Tadastan is Vorbiburg.\n"
    held = tmp_path / "held.html"
    with taken(held):  # by another run
        for path, message in ((page, "page.html"), (page / "a", "page.html"), (held, "by another")):
            refuses(run.main, capsys, message, *line, "--trace", path)


def test_the_chat_template_is_used_where_there_is_one(tmp_path, capsys):
    """With its options: JSON where the value is some, else a text. Blanks of a prompt are kept."""
    tokenizer, base = Tokenizer(WEIGHTS / "mini-7b"), tmp_path / "base"  # a name without a format
    shutil.copytree(WEIGHTS / "mini-7b", base)
    text = "\n  two \n"
    common = "--max-new-tokens", 1, f"--prompt={text}", "--target"
    chat, plain = len(tokenizer.encode_chat([text])), len(tokenizer.encode(text))
    for line, tokens in ((["7b"], chat), (["7b", "--raw"], plain), ([base], plain)):
        assert run_json(capsys, *common, *line)["prompt_tokens"] == tokens
    template = "{{ messages[0]['content'] }}{{ ' yes' if think else ' no' }}{{ mood }}"
    change_json(base / "tokenizer_config.json", chat_template=template)
    line = [base, "--template-option", "think=false", "--template-option", "mood=glad"]
    answer = run_json(capsys, *common, *line)
    assert answer["prompt_tokens"] == len(tokenizer.encode(f"{text} noglad", with_bos=False))


CONTROLS = "Say \x1b]0;owned\x07\x1b[31m red\x9b1m"
VISIBLE = r"Say \x1b]0;owned\x07\x1b[31m red\x9b1m"


def test_a_terminal_shows_control_characters_and_does_not_obey_them(monkeypatch, capsys):
    """Elsewhere an answer is written as it is."""
    answer = "--target", "7b", "--max-new-tokens", 1, "--method", "ar"
    monkeypatch.setattr(TextStream, "push", lambda self, ids, last=False: CONTROLS)
    for is_terminal, shown in ((False, CONTROLS), (True, VISIBLE)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)  # noqa: B023
        assert program(run.main, *answer) == 0
        assert capsys.readouterr().out == shown * 2 + "\n"


DECISION = WEIGHTS / "mini-draft/decision-7b.safetensors"  # FILE in a line
MISTAKES = {  # all are found before a model is loaded, so that nothing else is said
    "--tree 6x4": "argument --tree: expected widths, such as 4,2,2,1",
    "--raw --system x": "need a chat template",
    "--template-option thinking": "expected NAME=VALUE, got 'thinking'",
    "--prompts /nonexistent": "run.py: /nonexistent: No such file or directory",
    "--prompts /dev/null": "/dev/null has no line to answer",
    "--batch 2": "--batch is for --prompts",
    "--prompt a --prompt b": "--prompt is given twice",
    "--prompts /dev/null --compare": "--trace and --compare are for a single prompt",
    "--compare --json": "--json goes neither with",
    "--method ar --stop 0": "--method ar does not draft",
    "--top-p 0": "run.py: --top-p: expected a number from 1e-6 to 1, not 0.0",
    "--thresholds a": "argument --thresholds: invalid list of float value",
    "--target=": "argument --target: expected a name, got ''",
    "--draft-length 5 --tree 2,2": "argument --tree: not allowed with argument --draft-length",
    "--prompts a --batch 1025": "--batch: expected a number from 1 to 1024, got 1025",
    "--exits 2,9": "run.py: --exits [2, 9]: the draft has 4 layers",
    "--prompts /proc/self/mem": "run.py: /proc/self/mem: Input/output error",
    "--prompt half:\udcff": "a text is not valid UTF-8, at the end of ",
    f"--prompt {600 * 'word.'}": "the prompt has ",
    "--interactive --template-option think=0": "it has no options",
    "--exits 0,2 --decision FILE": "run.py: --decision: expected exits with layers",
    "--draft 13b --decision FILE": "run.py: --decision: expected a model for ",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(line, monkeypatch, capsys):
    words = [DECISION if word == "FILE" else word for word in line.split()]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
    refuses(run.main, capsys, MISTAKES[line], "--target", "7b", *words)


def test_what_a_program_raises_becomes_a_line_or_is_a_fault_of_ours(capsys):
    for words, shown in (("two\nlines", "two lines"), (CONTROLS, VISIBLE)):
        assert run_program("run.py", Mock(side_effect=ValueError(words)), []) == 2
        assert capsys.readouterr().err == f"run.py: {shown}\n"
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_program("run.py", Mock(side_effect=RuntimeError("a fault of ours")), [])


def test_a_conversation_goes_on_after_ctrl_c_and_what_it_cannot_answer(monkeypatch, capsys):
    """A part of it is the answer so far, but not the line that is too long."""
    emit = Decoder.emit
    lengths = []

    def interrupted(self, *arguments):
        lengths.append(len(self.context))
        if len(lengths) == 2:
            raise KeyboardInterrupt
        return emit(self, *arguments)

    monkeypatch.setattr(Decoder, "emit", interrupted)
    type_in(monkeypatch, f"{EXAMPLE_PROMPT}\n{'word ' * 600}\n{EXAMPLE_QUESTION}\n".encode())
    assert program(run.main, "--target", "7b", "--interactive", "--draft-length", 3) == 0
    out, error = capsys.readouterr()
    begun, whole = out.splitlines()
    assert EXAMPLE_ANSWER.startswith(begun) and 5 < len(begun) < len(EXAMPLE_ANSWER)
    assert whole == "The capital of Tadastan is Vorbiburg." and lengths[2] > lengths[1]
    assert error.count("> ") == 4 and error.count("the prompt has ") == 1


def test_answers_end_before_a_stop_string(tmp_path, capsys):
    """Alone, and line by line of a file."""
    options = ["--target", "13b", "--stop-at", "nothing", "--stop-at", "bur"]
    begun = "The capital of Tadastan is Vorbi"
    assert program(run.main, *options, "--prompt", EXAMPLE_QUESTION) == 0
    out, error = capsys.readouterr()
    assert out == begun + "\n" and "\nended by       stop_at\n" in error
    file = tmp_path / "prompts.txt"
    file.write_text(EXAMPLE_QUESTION)
    assert program(run.main, *options, "--prompts", file) == 0
    assert capsys.readouterr().out == f"## 1: {EXAMPLE_QUESTION}\n\n{begun}\n\n"
