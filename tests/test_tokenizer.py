"""The tokenizer: SentencePiece's own path, everything else by transformers, streams, templates."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import raises_line
from transformers import AutoTokenizer
from vocabularies import BRACKETS, CHATML, SAID, TEXTS, save_trained, sentencepiece_folder

from s2d import StopStrings, Tokenizer
from s2d.checkpoint.chat import VICUNA_SYSTEM
from s2d.checkpoint.published import PublishedTokenizer
from s2d.checkpoint.tokenizer import TextStream
from s2d.checkpoint.tokenizer_model import SentencePieceModel

ODD = [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x1c", "\x00", "▁", "a", "Hi", "word", " the"]
ODD += ["ing", "日", "é", "\u0301", "🙂", "<0x0A>", "<", "|>", "'s", "123", "</", "s>"]
THINK = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"  # as Qwen3's


def added(text, **flags):
    """A token as tokenizer_config.json writes it."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return plain | {"content": text, "special": True} | flags


BY_ID = {"1024": added("<|im_start|>"), "1025": added("<|im_end|>")}
BY_ID |= {"0": added("<unk>"), "1": added("<s>"), "2": added("</s>")}
# Llama 2's form with added tokens: SentencePiece's file does not say everything.
LLAMA_2 = {"added_tokens_decoder": BY_ID, "legacy": False, "chat_template": BRACKETS}


def messages(said):
    """A dialogue as transformers takes it: texts, user and assistant in turn."""
    roles = ("user", "assistant") * len(said)
    return [{"role": role, "content": text} for role, text in zip(roles, said)]


def odd_texts(names):
    """Random texts of what is hard to cut, the ``names`` of special tokens among it."""
    rng, parts = random.Random(0), [*ODD, *names]
    return ["".join(rng.choices(parts, k=rng.randrange(1, 12))) for _ in range(300)]


def in_groups(ids, rng):
    """A list in parts of one to three."""
    while ids:
        size = rng.randrange(1, 4)
        yield ids[:size]
        ids = ids[size:]


def assert_agree(ours, theirs, texts):
    """Ids and texts back are those of transformers."""
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.fixture(params=["tokenizer.model", "byte-level", "llama-2"])
def any_kind(request, tokenizer, trained, tmp_path):
    if request.param == "tokenizer.model":
        return tokenizer
    folder = trained
    if request.param == "llama-2":
        folder = sentencepiece_folder(tmp_path / "m", LLAMA_2)
    return Tokenizer(folder)


def test_a_stream_is_the_whole_text_in_pieces(any_kind):
    """Cut anywhere, with special tokens and spaces; and half a character is never shown."""
    rng = random.Random(0)
    special = any_kind.encode("</s><|eot|><|im_end|>", with_bos=False)
    for _ in range(50):
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
    for _ in range(100):
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
    assert inside > 25


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_end|>\n", "m_end|>\n", "i<|im"])
def test_a_stop_string_is_or_touches_a_special_token(tmp_path, stop):
    """The token leaves no text, but it is where the answer ends, and its text before that."""
    tokenizer = Tokenizer(save_trained(tmp_path, ["<|im_end|>"], eos_token="<|im_end|>"))
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


def test_streaming_takes_a_time_that_is_linear_in_the_text(tokenizer):
    decoded = []
    model = SimpleNamespace(decode=lambda ids: decoded.append(len(ids)) or tokenizer.decode(ids))
    counting = SimpleNamespace(special={}, model=model)
    ids = tokenizer.encode("Hello world. " * 300)
    stream = TextStream(counting)
    for token in ids:
        stream.push([token])
    assert sum(decoded) < 10 * len(ids)


def test_an_answer_that_is_cut_inside_a_character_reads_the_same_streamed_and_whole(any_kind):
    """Whole characters before the half one are shown; an id that no token has leaves no text."""
    text = "ok 日é🙂"
    ids = any_kind.encode(text, with_bos=False)
    for count in range(1, len(ids) + 1):
        stream = TextStream(any_kind)
        shown = "".join(stream.push([token]) for token in [*ids[:count], 99_999])
        whole = shown + stream.push([], last=True)
        assert any_kind.decode(ids[:count]) == whole and text.startswith(whole.rstrip("\ufffd"))


@pytest.mark.parametrize(
    "changes",
    [
        {"legacy": False},
        {"legacy": True, "pad_token": "<unk>", "model_max_length": 2048},
        {"bos_token": added("<s>", __type="AddedToken", normalized=True), "sp_model_kwargs": {}},
        {"add_bos_token": False},
    ],
)
def test_a_tokenizer_model_that_says_everything(tmp_path, changes):
    """SentencePiece has transformers' ids, whatever the file says about the first space."""
    folder = sentencepiece_folder(tmp_path / "m", changes)
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes() + b"\x1a\x02\x18\x00")  # as transformers 4 saves it
    ours = Tokenizer(folder)
    assert isinstance(ours.model, SentencePieceModel)
    more = [*TEXTS, " 23", "▁23", VICUNA_SYSTEM + " USER: Was ist das? ASSISTANT:"]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert_agree(ours, theirs, [*more, *odd_texts(["<s>", "</s>", "<unk>"])])


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        (LLAMA_2, {}),
        ({}, {"added_tokens": {"<|im_end|>": 1024}}),
        ({"eos_token": added("</s>", __type="AddedToken", rstrip=True)}, {}),
        ({}, {"special_tokens_map": {"eos_token": "<|im_end|>"}}),
        ({"add_prefix_space": False}, {}),
        ({"bos_token": None}, {}),
        ({"add_eos_token": True}, {}),
    ],
)
def test_whatever_else_a_folder_says_is_for_transformers(tmp_path, changes, files):
    folder = sentencepiece_folder(tmp_path / "m", changes, **files)
    assert isinstance(Tokenizer(folder).model, PublishedTokenizer)


def test_a_published_folder_gives_what_transformers_gives(trained):
    """Ids, texts, and prompts by the template, with its options; no second BOS."""
    save_trained(trained, chat_template="{{ bos_token }}" + CHATML + THINK)
    ours, theirs = Tokenizer(trained), AutoTokenizer.from_pretrained(trained)
    assert_agree(ours, theirs, [*TEXTS, *SAID, "", *odd_texts(["<|begin|>", "<|eot|>"])])
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        for count in (1, 3, 5):
            said = [{"role": "system", "content": " Be <|eot|> brief.\n"}, *messages(SAID[:count])]
            prompt = {"add_generation_prompt": True, "return_dict": False} | options
            expected = theirs.apply_chat_template(said, **prompt)
            assert ours.encode_chat(said, template_options=options) == expected
    text = theirs.apply_chat_template(messages(SAID[:2]), tokenize=False)
    assert ours.chat_format.render(messages(SAID[:2])) == text


def test_a_template_that_fails(trained):
    for template, message in (
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ([{"name": "rag", "template": "x"}], "multiple chat templates"),
    ):
        ours = Tokenizer(save_trained(trained, chat_template=template))
        raises_line(ours.encode_chat, ValueError, f"{trained} fails: .*{message}", ["Hi"])
    ours = Tokenizer(save_trained(trained, chat_template=CHATML + THINK))
    for wrong in ("enable_thiking", "messages"):  # options that it has not
        given = partial(ours.encode_chat, template_options={wrong: False})
        raises_line(given, ValueError, f"{trained} fails: .*{wrong}", ["Hi"])


def test_vicunas_format(tokenizer):
    """As FastChat writes it; each round is encoded on its own, the EOS after each answer."""
    said = ["Hi", "Hello", "And you?"]
    first = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello</s>")
    second = tokenizer.encode("USER: And you? ASSISTANT:")[1:]
    assert tokenizer.encode_chat(said) == [*first, *second]
    brief = tokenizer.encode("Be brief. USER: Hi ASSISTANT:")
    assert tokenizer.encode_chat(["Hi"], system="Be brief.") == brief
    assert tokenizer.encode_chat(["Hi"], system="") == tokenizer.encode("USER: Hi ASSISTANT:")


def test_the_format_of_a_folder(tmp_path):
    """Its own, Vicuna's by its name, or plain text: no other model's format is made up for it."""
    assert "Vicuna" in Tokenizer(sentencepiece_folder(tmp_path / "vicuna-7b", {})).chat_format.name
    base = Tokenizer(sentencepiece_folder(tmp_path / "0a1b", {}))
    assert base.encode_chat(["Hi"]) == base.encode("Hi\n")
    expected = base.encode("Hi\nHello</s>\nAnd you?\n")
    assert base.encode_chat(["Hi", "Hello", "And you?"]) == expected
    link = tmp_path / "vicuna-13b"  # as into a cache, whose folders are called by checksums
    link.symlink_to(tmp_path / "0a1b")
    assert "Vicuna" in Tokenizer(link).chat_format.name
    (tmp_path / "vicuna-7b/chat_template.jinja").write_text("{{ messages[0]['content'] }}.\n")
    own = Tokenizer(tmp_path / "vicuna-7b").chat_format
    assert own.is_template and own.render(messages(["Hi"])) == "Hi."


def test_what_messages_are(tokenizer):
    """Texts in turn or dictionaries, of which the system's may be the first."""
    hi, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    expected = tokenizer.encode_chat(["Hi"])
    for same in ("Hi", hi, iter([hi]), [hi | {"name": "Anna"}]):
        assert tokenizer.encode_chat(same) == expected
    brief = tokenizer.encode_chat([system, hi])
    assert brief == tokenizer.encode_chat("Hi", system="Be brief.") != expected
    for wrong in ([], None, ["Hi", hi], [{}], [system]):
        raises_line(tokenizer.encode_chat, ValueError, "expected texts, user and", wrong)
    raises_line(tokenizer.encode_chat, ValueError, "user and assistant in turn", [hi, hi])
    raises_line(tokenizer.encode_chat, ValueError, "at most one system", [system, hi], "Be brief.")


def test_missing_and_damaged_files(tmp_path):
    raises_line(Tokenizer, FileNotFoundError, "has no tokenizer.model and no", tmp_path)
    (tmp_path / "tokenizer.model").write_text("not a model")
    raises_line(Tokenizer, ValueError, f"{tmp_path}.*: ", tmp_path)
