"""The file of a datastore: what is written is read, and what is none is refused."""

from dataclasses import replace

import pytest
import torch
from helpers import ROOT, TINY, WEIGHTS, program, raises_line
from safetensors.torch import load_file, save_file

from s2d import generate
from s2d.checkpoint.config import read_folder
from s2d.ngram.datastore import Datastore, load_datastore, reading, save_datastore
from s2d.pair.names import find_datastore
from s2d.train import __main__ as train


@pytest.mark.parametrize(("size", "dtype"), [(61, torch.uint16), (100_000, torch.int32)])
def test_documents_end_with_one_end_token_and_nothing_is_read_across(tmp_path, size, dtype):
    file, config = tmp_path / "store", replace(TINY, vocab_size=size)
    save_datastore(file, [[5, 6], [size - 1, 7]], config)
    tokens = load_file(file)["tokens"]
    assert tokens.dtype == dtype and tokens.tolist() == [5, 6, 2, size - 1, 7, 2]
    datastore = load_datastore(file, config)
    assert datastore.followers((6,)) == {2: 1} and datastore.followers((2,)) == {}


def test_what_is_no_datastore(tmp_path):
    file = tmp_path / "store"
    for ids, message in (
        ([1, 61], f"{file}: the datastore has the token 61, and the target has tokens 0 to 60"),
        ([1, -1], f"{file}: a datastore's tokens are ids .N,. from 0, not"),
        ([[1, 2]], "not numbers of shape .1, 2. in int64"),
        ([1.0], "from 0, not numbers of shape .1,. in float32"),
    ):
        save_file({"tokens": torch.tensor(ids)}, file)
        raises_line(load_datastore, ValueError, message, file, TINY)
    endless = replace(TINY, eos_token_ids=())
    raises_line(save_datastore, ValueError, "has no EOS token", tmp_path / "new", [[1]], endless)
    file.write_bytes(b"x" * 20)
    raises_line(load_datastore, ValueError, f"no datastore at {file}: Error while", file, TINY)
    raises_line(load_datastore, ValueError, f"no datastore at {tmp_path}", tmp_path, TINY)
    save_file({"other": torch.zeros(2)}, file)
    words = f"no datastore at {file}, but a file without ids called tokens"
    raises_line(load_datastore, ValueError, words, file, TINY)


def test_the_shipped_one_is_where_run_looks_for_it():
    smollm2 = read_folder(WEIGHTS / "mini-7b")._replace(path=WEIGHTS / "smollm2-135m")
    file, config = find_datastore(smollm2), smollm2.config
    assert load_datastore(file, replace(config, vocab_size=49152)).followers(())
    assert file.stat().st_size < 2 * 10**6


def test_a_text_that_is_in_it_is_drafted(tmp_path, mini, tokenizer):
    """A datastore is made by the README's command, of what the target itself writes."""
    target, prompt = mini("mini-7b"), tokenizer.encode_chat(["Tell me a story."])
    written = generate(target, prompt, method="ar", max_new_tokens=48).text(tokenizer)
    (tmp_path / "a.txt").write_text(written)
    out = tmp_path / "store.safetensors"
    line = ["text", "--target", WEIGHTS / "mini-7b", "--from", tmp_path / "a.txt", ROOT / "LICENSE"]
    assert program(train.main, *line, "--out", out) == 0
    steps = []
    for exit_0 in (0, reading(load_datastore(out, target.config))):
        found = generate(target, prompt, exits=[exit_0], max_new_tokens=48)
        steps.append(found.stats.steps)
    assert steps[1] < 0.7 * steps[0]
    large = dict(exits=[reading(Datastore([10**6], end=[]))])
    raises_line(generate, ValueError, "has the token 1000000", target, prompt, **large)
