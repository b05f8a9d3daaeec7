"""Faults that were found in folders of public models, and what is refused, in one line."""

import json
import re

import pytest
import sentencepiece
import torch
from helpers import WEIGHTS, change_json, raises_line, random_llama
from vocabularies import TEXTS, added, save_trained, sentencepiece_folder, with_config

from s2d import StopStrings, Tokenizer, load_model, model
from s2d.checkpoint import names, save_model
from s2d.checkpoint.config import config_from_dict
from s2d.checkpoint.pair import choose_pair, load_pair
from s2d.checkpoint.tokenizer import TextStream
from s2d.model import rope_table

RAW = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
RAW |= dict(num_attention_heads=4, max_position_embeddings=64, model_type="qwen2")


def test_windows_of_no_layer_and_biases_that_are_there_anyway():
    plain = config_from_dict(RAW)
    assert plain.eos_token_ids == () and plain.bos_token_id is None  # no tokens of a Llama
    assert config_from_dict(RAW | {"model_type": "qwen3"}).head_dim == 128
    for more in (
        dict(attention_bias=True),
        dict(use_sliding_window=True, sliding_window=None, max_window_layers=0),
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=4),
        dict(use_sliding_window=True, sliding_window=16, layer_types=["full_attention"] * 4),
    ):
        assert config_from_dict(RAW | more) == plain
    for more in (dict(max_window_layers=3), dict(layer_types=["sliding_attention"] * 4)):
        raises_line(
            config_from_dict, ValueError, "sliding", RAW | {"use_sliding_window": True} | more
        )


def test_the_table_of_the_rotary_embedding_grows(monkeypatch):
    """As long as it is needed, and no longer; made in inference, it serves in training, too."""
    monkeypatch.setattr(model, "ROPE_LENGTH", 4)
    grown = random_llama(0)
    assert len(grown.rope_cos) == 4
    with torch.inference_mode():
        found = grown(torch.arange(40)[None])
    monkeypatch.undo()
    assert found.equal(random_llama(0)(torch.arange(40)[None]))
    assert 40 <= len(grown.rope_cos) < 128 and grown.rope_cos.dtype == torch.float64
    assert grown.rope_cos[39].equal(rope_table(grown.config, 40)[0][39].double())
    grown.requires_grad_()(torch.arange(40)[None]).sum().backward()


def test_names_are_known_to_load_model_and_load_pair(monkeypatch):
    """And what is not here is answered with what would get it."""
    assert load_pair("70b", WEIGHTS / "mini-draft").folder == WEIGHTS / "mini-70b"
    hub = "from the Hugging Face hub: hf download"
    monkeypatch.setattr(names, "WEIGHTS", WEIGHTS / "nowhere")
    for name, command in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B --local-dir weights/qwen3-0.6b"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct --local-dir weights/smollm2-135m"),
    ):
        message = f"no model folder at {name}; {hub} {command}$"
        for load in (load_model, load_pair):
            raises_line(load, FileNotFoundError, message, name)
    for name in ("7b", "weights/nowhere", "/a/b/c"):
        message = f"no model folder at {name}; the names are 7b, 13b, 70b, smollm2-135m$"
        raises_line(load_model, FileNotFoundError, message, name)


def test_a_draft_with_another_tokenizer_is_told(tmp_path, capsys):
    """Which has as many tokens; one without a tokenizer is nobody's fault."""
    save_model(random_llama(0, vocab_size=1024).float(), tmp_path / "draft", dtype=torch.float32)
    choose_pair("7b", tmp_path / "draft")
    choose_pair("7b", WEIGHTS / "mini-draft")
    assert not capsys.readouterr().err
    save_trained(tmp_path / "draft")
    choose_pair("7b", tmp_path / "draft")
    told = f"{tmp_path / 'draft'} has another tokenizer than {WEIGHTS / 'mini-7b'}: "
    assert capsys.readouterr().err.startswith(told)
    change_json(tmp_path / "draft/config.json", vocab_size=1200)
    raises_line(choose_pair, ValueError, "not have 1200 and 1024", "7b", tmp_path / "draft")


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_end|>\n", "m_end|>\n", "i<|im"])
@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
def test_a_stop_string_is_or_touches_a_special_token(tmp_path, kind, stop):
    """The token leaves no text, but it is where the answer ends, and its text before that."""
    if kind == "tokenizer.model":
        tokens = {"1024": added("<|im_end|>"), "2": added("</s>")}
        tokenizer = Tokenizer(sentencepiece_folder(tmp_path, {"added_tokens_decoder": tokens}))
    else:
        save_trained(tmp_path, more=["<|im_end|>"])
        tokenizer, _ = with_config(tmp_path, eos_token="<|im_end|>")
    answer = tokenizer.encode("Hi<|im_end|>\nand more", with_bos=False)
    special = answer.index(tokenizer.encode("<|im_end|>", with_bos=False)[-1])
    ending = StopStrings(tokenizer, ["never", stop])
    is_last = ending.begin()
    last = [is_last(token) for token in answer].index(True)
    assert tokenizer.decode(answer[special + 1 : last + 1]) == ("\n" if "\n" in stop else "")
    shown = "Hi" if stop.startswith(("<", "m")) else "H"
    assert ending.cut(answer[: last + 1]) == shown
    stream = TextStream(tokenizer, ["never", stop])
    parts = [stream.push([token]) for token in answer[: last + 1]]
    assert "".join(parts) + stream.push([], last=True) == shown


def test_tokenizer_models_that_are_refused(tmp_path):
    for config, message in (
        (dict(added_tokens_decoder={"1024": added("<t>", rstrip=True)}), "rstrip of the token"),
        (dict(added_tokens_decoder={"1030": added("<x>")}), r"added tokens \[1030\] leave gaps"),
        (dict(pad_token="<pad>"), "no file says the id of pad_token '<pad>'"),
        (dict(extra_special_tokens={"image_token": "<i>"}), "holds tokens by name, which is not"),
        (dict(add_eos_token=True), "add_eos_token in tokenizer_config.json is not supported"),
        (dict(tokenizer_class="CodeLlamaTokenizer"), "'CodeLlamaTokenizer' is not known"),
    ):
        raises_line(Tokenizer, ValueError, message, sentencepiece_folder(tmp_path, config))
    sentencepiece_folder(tmp_path, {})
    for kind, options in (("unigram", {}), ("bpe", {"user_defined_symbols": ["<tool>"]})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 9),
            model_prefix=str(tmp_path / "tokenizer"),
            model_type=kind,
            vocab_size=300,
            byte_fallback=True,
            minloglevel=2,
            **options,
        )
        raises_line(Tokenizer, ValueError, "is no byte-pair encoding of Llama's kind", tmp_path)


def test_tokenizer_jsons_that_are_refused(tmp_path):
    """Those of which no one can say which ids are right."""
    folder = save_trained(tmp_path)
    described = {"4": added("<|eot|>")}
    for config, message in (
        (dict(tokenizer_class="CodeLlamaTokenizer"), "'CodeLlamaTokenizer', which has rules of"),
        (dict(split_special_tokens=True), "split_special_tokens in tokenizer_config.json is not"),
        (
            dict(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=described),
            "added_tokens_decoder has not all tokens of tokenizer.json",
        ),
        (dict(added_tokens_decoder={"4": added("<|eot|>", lstrip=True)}), "another token 4 than"),
        (dict(extra_special_tokens=["<|new|>"]), "added token '<|new|>', the extra token 0"),
        (dict(eos_token="a"), "no added token 'a', the eos_token"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        raises_line(Tokenizer, ValueError, re.escape(message), folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<|eot|>": 4, "<|new|>": 440}))
    raises_line(Tokenizer, ValueError, "another token 440 than", folder)
    (folder / "added_tokens.json").unlink()
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    tokens.append(added("<|new|>") | {"id": 999})
    change_json(folder / "tokenizer.json", added_tokens=tokens)
    raises_line(Tokenizer, ValueError, "'<.new.>' has the ids 999 and [0-9]+", folder)
