"""Folders that will not load say why, and nothing is ever half-written."""

import json
import os

import pytest
import torch
from helpers import WEIGHTS, peak_growth, random_llama
from safetensors.torch import load_file, save_file

from s2d import load_model, weights
from s2d.files import former_of, staged_folder
from s2d.weights import save_model


@pytest.fixture
def folder(tmp_path):
    save_model(random_llama(0), tmp_path / "m", dtype=torch.float32)
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path):
    save_model(random_llama(0), tmp_path / "s", dtype=torch.float32, max_shard_bytes=20000)
    assert len(list((tmp_path / "s").glob("model-*.safetensors"))) > 2
    return tmp_path / "s"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not ...})
    )


def refused(folder, error, message, **arguments):
    with pytest.raises(error, match=message) as caught:
        load_model(folder, **arguments)
    assert "\n" not in str(caught.value)


def test_missing_files(tmp_path, folder, sharded):
    refused(tmp_path / "nowhere", FileNotFoundError, "no model folder at")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    refused(folder, FileNotFoundError, "neither model.safetensors nor")
    (folder / "config.json").unlink()
    refused(folder, FileNotFoundError, "config.json is missing")
    second = sorted(sharded.glob("model-*.safetensors"))[1]
    second.unlink()
    refused(sharded, FileNotFoundError, f"shard {second.name} is missing")


def test_damaged_files(folder, sharded):
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 2000):
        (folder / "model.safetensors").write_bytes(damaged)
        refused(folder, ValueError, "is damaged")
    (folder / "config.json").write_text("{broken")
    refused(folder, ValueError, "not valid JSON")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, ValueError, "not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, ValueError, "expected a JSON object")
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(sharded, ValueError, "is in no shard")


def test_wrong_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 4)}, folder / "model.safetensors")
    refused(
        folder, ValueError, r"up_proj.weight has shape \(3, 4\), config.json asks for \(48, 32\)"
    )
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    refused(folder, ValueError, f"has no tensor {name}")


def test_architectures_that_are_not_ours(folder):
    for changes, message in (
        (dict(model_type="mistral"), "model_type is 'mistral'"),
        (
            dict(rope_scaling={"rope_type": "yarn", "factor": 8.0}),
            "rope type 'yarn' is not supported",
        ),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "has no 'low_freq_factor'"),
        (
            dict(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            ),
            "must be below",
        ),
        (
            dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope type 'dynamic' is not supported",
        ),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dict(attention_bias=True), "attention_bias is True"),
        (dict(num_key_value_heads=3), "cannot share 3 key/value heads"),
        (dict(rope_scaling={"type": "linear"}), "has no 'factor'"),
        (dict(hidden_size=...), "has no 'hidden_size'"),
        (
            dict(exit_layers=[2, 3, 4], thresholds=[0.5, 0.0]),
            "3 exit_layers cannot have 2 thresholds",
        ),
        (dict(exit_layers=[2], draft_stop=1.5), "draft_stop is 1.5; expected a number within 0..1"),
        (
            dict(exit_layers=[2, 9]),
            "exit_layers is .2, 9.; exits must increase and lie within the draft's 4 layers",
        ),
        (dict(exit_layers=["2"]), "exit_layers is '2'; expected a whole number"),
        (dict(draft_length="6"), "draft_length is '6'; expected a whole number"),
        (
            dict(max_position_embeddings="2"),
            "max_position_embeddings is '2'; expected a whole number",
        ),
        (dict(head_dim="x"), "head_dim is 'x'; expected a whole number"),
        (dict(head_dim=7), "needs an even number"),
        (dict(rope_scaling=-0.5), "rope_scaling is -0.5; expected an object or null"),
        (dict(rope_parameters=-1), "rope_parameters is -1; expected an object or null"),
        (dict(rope_theta=float("nan")), "rope_theta is nan; expected a number"),
        (
            dict(eos_token_id={"a": 1}),
            "eos_token_id is {'a': 1}; expected a whole number within 0..60",
        ),
        (dict(eos_token_id=[]), "eos_token_id is ..; expected a token id, a list of them, or null"),
        (dict(eos_token_id=61), "eos_token_id is 61; expected a whole number within 0..60"),
        (dict(tie_word_embeddings=1), "tie_word_embeddings is 1; expected true or false"),
        (dict(exit_layers=[2], draft_tree=[4, 2]), "draft_tree is .4, 2.; expected three numbers"),
        (dict(hidden_size="wide"), "hidden_size is 'wide'; expected a whole number"),
    ):
        before = (folder / "config.json").read_text()
        edit_config(folder, **changes)
        refused(folder, ValueError, message)
        (folder / "config.json").write_text(before)


def test_where_an_answer_ends(folder):
    """config.json, over which generation_config.json has the last word; and what the tokenizer calls its end."""

    def ends(generation=None, tokenizer=None):
        for name, content in (
            ("generation_config.json", generation),
            ("tokenizer_config.json", tokenizer),
        ):
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_text(json.dumps(content))
        return load_model(folder).config.eos_token_ids

    added = {
        "added_tokens_decoder": {
            "5": {"content": "<|eot|>"},
            "9": {"content": "x"},
            "700": {"content": "<|eot|>"},
        }
    }
    assert ends() == (2,)
    assert ends({"temperature": 1.0}) == (2,) and ends({"eos_token_id": None}) == (2,)
    assert ends({"eos_token_id": [7, 8]}) == (7, 8)
    assert ends(tokenizer=added | {"eos_token": "<|eot|>"}) == (2, 5)
    assert ends({"eos_token_id": [5, 7]}, added | {"eos_token": {"content": "<|eot|>"}}) == (5, 7)
    assert ends(tokenizer=added) == (2,) and ends(
        tokenizer={"added_tokens_decoder": {"5": {}}}
    ) == (2,)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 61}))
    refused(folder, ValueError, "generation_config.json: eos_token_id is 61")


def test_the_device_is_a_gpu_where_there_is_one(folder, monkeypatch):
    for count, name in ((0, "cpu"), (1, "cuda"), (8, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert weights.check_device("auto") == torch.device(name)
    monkeypatch.undo()
    model = load_model(folder, dtype="float64")
    size = sum(p.nbytes for p in model.parameters()) / 1e9
    assert (
        weights.placement(model)
        == f"cpu, {torch.get_num_threads()} threads, float64, {size:.2f} GB of weights"
    )
    assert weights.placement(model, model).endswith(f", float64, {2 * size:.2f} GB of weights")


def test_devices_and_dtypes(folder):
    refused(folder, ValueError, "unknown dtype 'float8'", dtype="float8")
    refused(folder, ValueError, "unknown device 'tpu9'", device="tpu9")
    if not torch.cuda.is_available():
        refused(folder, ValueError, "torch sees no GPU here", device="cuda")
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").rope_cos.dtype == torch.bfloat16


def test_a_swap_that_was_cut_short_loses_nothing(folder):
    """Killed between moving the old folder away and the new one in, then killed again while the next is written."""
    before = load_model(folder).state_dict()
    folder.rename(former_of(folder))
    with pytest.raises(RuntimeError, match="killed"), staged_folder(folder):
        raise RuntimeError("killed")
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in load_model(folder).state_dict().items()
    )


def test_first_layers_only(folder):
    full, cut = load_model(folder), load_model(folder, num_layers=2)
    tokens = torch.arange(20)[None]
    assert torch.equal(cut(tokens), full.logits(full.run_layers(full.embed(tokens), 0, 2)))
    refused(folder, ValueError, "cannot keep the first 5 of 4 layers", num_layers=5)


def test_exits_survive_saving(tmp_path):
    model = random_llama(1, exit_layers=(1, 2, 4), thresholds=(0.7, 0.6, 0.0), draft_length=9, draft_stop=0.3,
                         draft_tree=(3, 5, 8))  # fmt: skip
    save_model(model, tmp_path / "d")
    assert load_model(tmp_path / "d").config == model.config


def test_a_failed_save_leaves_the_old_folder(folder, monkeypatch):
    before = load_model(folder).state_dict()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "config_to_dict", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(random_llama(2), folder)
    monkeypatch.undo()
    after = load_model(folder).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    save_model(random_llama(2), folder, dtype=torch.float32)
    assert not torch.equal(
        load_model(folder).state_dict()["lm_head.weight"], before["lm_head.weight"]
    )
    assert os.listdir(folder.parent) == [folder.name]


def test_only_a_folder_that_is_plainly_ours_is_replaced(tmp_path, folder):
    """Whatever else stands there, or was added or changed, stays as it is; so do a user's names that look temporary."""
    for name in ("m.old", "m.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("precious")
    models = tmp_path / "weights"
    save_model(random_llama(0), models / "a")
    changed = tmp_path / "changed"
    save_model(random_llama(0), changed)
    (changed / "model.safetensors").write_bytes(b"mine")
    added = tmp_path / "added"
    save_model(random_llama(0), added)
    (added / "decision.safetensors").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for taken in (models, changed, added, tmp_path / "file", tmp_path / "link", tmp_path):
        with pytest.raises(ValueError, match="name another"):
            save_model(random_llama(1), taken)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "empty").mkdir()
    for free in (folder, tmp_path / "empty"):
        save_model(random_llama(1), free)
        assert torch.equal(
            load_model(free).lm_head.weight, random_llama(1).bfloat16().float().lm_head.weight
        )
    assert [(tmp_path / name / "mine").read_text() for name in ("m.old", "m.partial")] == [
        "precious"
    ] * 2


def test_files_have_the_mode_that_the_umask_says(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            save_model(random_llama(0), tmp_path / f"m{mask}", max_shard_bytes=20000)
        finally:
            os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / f"m{mask}").iterdir()} == {mode}


def test_an_index_names_files_of_its_own_folder(sharded, folder):
    index = sharded / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for outside in (
        "../m/model.safetensors",
        str(folder / "model.safetensors"),
        "..",
        ".",
        "",
        "a\nb",
        None,
        3,
    ):
        index.write_text(
            json.dumps(whole | {"weight_map": whole["weight_map"] | {"lm_head.weight": outside}})
        )
        refused(sharded, ValueError, "is no name of a file in this folder")
    for wrong in (None, 3, [], "x"):
        index.write_text(json.dumps(whole | {"weight_map": wrong}))
        refused(sharded, ValueError, "weight_map is no object")


def test_loading_holds_one_shard_beside_the_model(tmp_path):
    """Peak memory of a load from bf16 to float32: the model itself and little more, not a second copy."""
    model = random_llama(
        3, hidden_size=512, intermediate_size=1536, num_hidden_layers=24, head_dim=128
    ).float()
    megabytes = sum(p.nbytes for p in model.parameters()) / 2**20
    save_model(model, tmp_path / "m", max_shard_bytes=16 * 2**20)
    del model
    prepare = "from s2d import load_model; load_model(sys.argv[1])"  # imports what every load needs
    grown = peak_growth(
        prepare, "m = load_model(sys.argv[2], dtype='float32')", WEIGHTS / "mini-7b", tmp_path / "m"
    )
    assert megabytes > 200
    assert 0.9 * megabytes < grown < 1.4 * megabytes


def test_a_share_of_every_tensor(sharded):
    """What one process of several reads: slices, of which shapes are still checked whole."""
    whole = load_model(sharded).state_dict()
    halves = load_model(
        sharded,
        share=lambda name, shape: (slice(0, shape[0] // 2), *[slice(None)] * (len(shape) - 1)),
    )
    for name, parameter in halves.named_parameters():
        assert torch.equal(parameter, whole[name][: len(whole[name]) // 2])
    edit_config(sharded, vocab_size=50)
    refused(
        sharded,
        ValueError,
        "config.json asks for",
        share=lambda name, shape: (slice(0, 1),) * len(shape),
    )
