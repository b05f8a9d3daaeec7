"""Chat templates: rendered and encoded as transformers does; Vicuna's format; what goes wrong."""

import json

import pytest
from helpers import change_json, raises_line
from transformers import AutoTokenizer
from vocabularies import (
    PROMPT,
    SAID,
    messages,
    save_published,
    save_trained,
    sentencepiece_folder,
    with_config,
)

from s2d import Tokenizer
from s2d.checkpoint.chat import VICUNA_SYSTEM

HEADERS = """{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|/start|>

{{ message['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt -%}
<|start|>assistant<|/start|>

{% endif %}"""
MARKED = """{%- for message in messages %}
    {%- if loop.index0 == 0 %}
        {{- '<|start|>system ' + {"tools": tools, "key": 'v\u00e9'} | tojson(indent=1) }}
        {{- strftime_now('%Y') + '<|eot|>\n' }}
    {%- endif %}
    {%- if message['content'] == 'skip me' %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '\n' }}
    {% if message['role'] == 'assistant' %}
{{ message['content'] }}<|eot|>
    {% else %}
{{ message['content'] + '<|eot|>' }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
BRACKETS = """{% for m in messages %}{% if m['role'] == 'user' -%}
{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }} {{ eos_token }}
{%- endif %}{% endfor %}"""
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_vicunas_format(tokenizer):
    """As FastChat writes it; each round is encoded on its own, the EOS after each answer."""
    said = ["Hi", "Hello", "And you?"]
    first = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello")
    second = tokenizer.encode("USER: And you? ASSISTANT:")[1:]
    assert tokenizer.encode_chat(said) == [*first, tokenizer.eos_id, *second]
    rounds = list(tokenizer.rounds(said))
    assert tokenizer.decode(rounds[0][1]) == "Hello" and rounds[0][1][-1] == tokenizer.eos_id
    assert len(rounds) == 1
    brief = tokenizer.encode("Be brief. USER: Hi ASSISTANT:")
    assert tokenizer.encode_chat(["Hi"], system="Be brief.") == brief
    assert tokenizer.encode_chat(["Hi"], system="") == tokenizer.encode("USER: Hi ASSISTANT:")


def test_a_template_is_the_folders_own_or_vicunas(tmp_path):
    folder = sentencepiece_folder(tmp_path / "vicuna-7b-v1.5", {})
    assert "Vicuna" in Tokenizer(folder).chat_format.name
    change_json(folder / "tokenizer_config.json", chat_template="{{ messages[0]['content'] }}?")
    assert Tokenizer(folder).chat_format.render(messages(["Hi"])) == "Hi?"
    # A dictionary or a list of templates.
    for several in ({"rag": "x"}, [{"name": "default", "template": "x"}]):
        change_json(folder / "tokenizer_config.json", chat_template=several)
        ours = Tokenizer(folder)
        assert ours.encode("Hi")
        raises_line(ours.encode_chat, ValueError, "several chat templates; write one to", ["Hi"])
    # transformers prefers this file.
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}.\n")
    assert Tokenizer(folder).chat_format.render(messages(["Hi"])) == "Hi."
    link = tmp_path / "vicuna-13b"  # as into a cache, whose folders are called by checksums
    link.symlink_to(sentencepiece_folder(tmp_path / "0a1b", {}))
    assert "Vicuna" in Tokenizer(link).chat_format.name
    assert Tokenizer(tmp_path / "0a1b").chat_format.is_plain


def test_a_folder_without_a_format(tmp_path):
    """It is prompted with plain text, and no other model's format is made up for it."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "base", {}))
    said = ["Hi", "Hello", "And you?"]
    assert ours.encode_chat(said) == ours.encode("Hi\nHello</s>\nAnd you?\n")


@pytest.mark.parametrize("like", ["llama-3", "smollm2", "qwen"])
def test_plain_text_is_divided_between_tokens(tmp_path, like):
    """In every kind of byte-level tokenizer, a prompt's last token is no answer's first."""
    ours, _ = with_config(save_trained(tmp_path, like))
    for question in ("Hi", "And you?", "Hello!", "12345", "skip me."):
        [(prompt, answer)] = ours.rounds([question, "Bye"])
        assert prompt == ours.encode(f"{question}\n")
        assert ours.decode(answer) == "Bye" and answer[-1] == ours.eos_id


def test_what_messages_are(tokenizer):
    """Texts in turn or dictionaries, of which the system's may be the first."""
    hi, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    expected = tokenizer.encode_chat(["Hi"])
    for same in ("Hi", ("Hi",), hi, iter([hi]), [hi | {"name": "Anna"}]):
        assert tokenizer.encode_chat(same) == expected
    brief = tokenizer.encode_chat([system, hi])
    assert brief == tokenizer.encode_chat("Hi", system="Be brief.") != expected
    for wrong in ([], None, [7], ["Hi", hi], [{}], [system], [hi | {"content": None}]):
        raises_line(tokenizer.encode_chat, ValueError, "expected texts, user and", wrong)
    raises_line(tokenizer.encode_chat, ValueError, "user and assistant in turn", [hi, hi])
    raises_line(tokenizer.encode_chat, ValueError, "at most one system", [system, hi], "Be brief.")
    raises_line(tokenizer.encode_chat, ValueError, "expected texts", "Hi", 5)


@pytest.mark.parametrize("template", [HEADERS, MARKED])
def test_templates_on_a_tokenizer_json(trained, template):
    ours, theirs = with_config(trained, chat_template=template)
    for count in (1, 3, 5):
        said = messages(SAID[:count])
        expected = theirs.apply_chat_template(said, **PROMPT)
        assert ours.encode_chat(SAID[:count]) == expected
        system = {"role": "system", "content": " Be <|eot|> brief.\n"}
        expected = theirs.apply_chat_template([system, *said], **PROMPT)
        assert ours.encode_chat(SAID[:count], system["content"]) == expected
        assert ours.encode_chat([system, *said]) == expected
    text = theirs.apply_chat_template(messages(SAID[:2]), tokenize=False)
    assert ours.chat_format.render(messages(SAID[:2])) == text


@pytest.mark.parametrize("legacy", [{"legacy": True}, {"legacy": False}, {}])
@pytest.mark.parametrize("template", [BRACKETS, CHATML])
def test_templates_on_a_tokenizer_model(tmp_path, template, legacy):
    """There is no second BOS. ChatML's tokens, in added_tokens.json, are found in a user's text."""
    config = {"chat_template": template, "eos_token": "</s>"} | legacy
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    folder = sentencepiece_folder(tmp_path / "m", config, added_tokens=ids)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    said = ["Where is Nora?", "In the north.", "日本, </s>and<|im_end|>24?"]
    expected = theirs.apply_chat_template(messages(said), **PROMPT)
    assert ours.encode_chat(said) == expected
    assert 1025 in expected and expected.count(1024) == (4 if template == CHATML else 0)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("template", [None, BRACKETS, CHATML])
def test_rounds_are_the_dialogue_in_pieces(tmp_path, legacy, template):
    """Each answer up to its EOS; what comes after it belongs to the next prompt."""
    said = ["Where is Nora?", "In the north.", " Why?", "Because. ", "日本", "24."]
    eos = "<|im_end|>" if template == CHATML else "</s>"
    config = {"legacy": legacy, "chat_template": template, "eos_token": eos}
    config |= {"tokenizer_class": "LlamaTokenizer", "extra_special_tokens": ["<|im_start|>"]}
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    # A name that begins with mini- has Vicuna's format.
    folder = sentencepiece_folder(tmp_path / "mini-model", config, added_tokens=ids)
    rounds = list(Tokenizer(folder).rounds(said))
    whole: list[int] = []
    for turn, (prompt, answer) in enumerate(rounds):
        tokenizer = Tokenizer(folder)
        whole += prompt
        assert whole == tokenizer.encode_chat(said[: 2 * turn + 1])
        whole += answer
        assert answer[-1] == tokenizer.eos_id and answer.count(tokenizer.eos_id) == 1
        assert tokenizer.decode(answer).strip() == said[2 * turn + 1].strip()
    assert len(rounds) == 3
    other = save_published(tmp_path / "mini-json")  # and so by the other kind of tokenizer
    change_json(other / "tokenizer_config.json", **config)
    (other / "added_tokens.json").write_text(json.dumps(ids))
    assert list(Tokenizer(other).rounds(said)) == rounds


def test_an_answer_that_begins_within_a_token_is_refused(tmp_path):
    template = "{% for m in messages %}{% if m.role == 'assistant' %}H{% endif %}{{ m.content }}"
    template += "{% endfor %}{% if add_generation_prompt %}H{% endif %}"
    ours, _ = with_config(save_trained(tmp_path), chat_template=template)
    with pytest.raises(ValueError, match="one token is the end of a prompt and the beginning"):
        list(ours.rounds(["Why? ", "ello world"]))


THOUGHTS = ["Hi", "<think>\nWell.\n</think>\n\nFine", "And?", "Bye"]
THINK = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: <think>
{% endif %}"""
DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>
{{- m['content'] }}{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"""
LAST_THOUGHT = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_rounds_are_what_a_model_is_given_and_has_to_write(tmp_path):
    """Also if a thought is left out of the prompt that comes after it."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": LAST_THOUGHT}))
    answers = [f"{THOUGHTS[1]}<|im_end|>\n", "Bye<|im_end|>\n"]
    rounds = list(ours.rounds(THOUGHTS))
    assert len(rounds) == 2
    for turn, (prompt, answer) in enumerate(rounds):
        assert prompt == ours.encode_chat(THOUGHTS[: 2 * turn + 1])
        assert ours.decode(answer) == answers[turn]


@pytest.mark.parametrize("template", [THINK, DEEPSEEK])
def test_rounds_of_which_an_answer_is_written_otherwise_than_it_was_asked_are_refused(
    tmp_path, template
):
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": template}))
    assert ours.encode_chat(THOUGHTS)
    with pytest.raises(ValueError, match="does not write an answer whole after its prompt"):
        list(ours.rounds(THOUGHTS))


QWEN3 = CHATML.replace(
    "assistant\n{% endif %}",
    """assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}
{%- endif %}""",
)


def test_a_template_is_given_options(trained, tmp_path):
    """As Qwen3's, which asks a model to think unless it is told not to."""
    ours, theirs = with_config(trained, chat_template=QWEN3)
    for options in ({"enable_thinking": False}, {"enable_thinking": True}, {}, None):
        expected = theirs.apply_chat_template(messages(["Hi"]), **PROMPT, **(options or {}))
        assert ours.encode_chat("Hi", template_options=options) == expected
    off = ours.encode_chat("Hi", template_options={"enable_thinking": False})
    assert off != ours.encode_chat("Hi") and len(off) > len(ours.encode_chat("Hi"))
    for wrong in ("enable_thiking", "messages", "add_generation_prompt"):
        message = f"has no option {wrong!r}"
        with pytest.raises(ValueError, match=message):
            ours.encode_chat("Hi", template_options={wrong: False})
    plain = Tokenizer(sentencepiece_folder(tmp_path / "base", {}))
    with pytest.raises(ValueError, match="it has no options"):
        plain.encode_chat("Hi", template_options={"enable_thinking": False})


def test_a_template_that_fails(trained):
    for template, message in (
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        (7, "fails"),
    ):
        ours, _ = with_config(trained, chat_template=template)
        raises_line(ours.encode_chat, ValueError, message, ["Hi"], "Be brief.")
