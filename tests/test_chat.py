"""Chat templates: rendered and encoded as transformers does; Vicuna's format; what goes wrong."""

import pytest
from helpers import change_json, raises_line
from transformers import AutoTokenizer
from vocabularies import BRACKETS, CHATML, PROMPT, SAID, messages, sentencepiece_folder, with_config

from s2d import Tokenizer
from s2d.checkpoint.chat import VICUNA_SYSTEM

MARKED = """{{ bos_token }}{%- for message in messages %}
    {%- if loop.index0 == 0 %}
        {{- '<|start|>system ' + {"tools": tools, "key": 'v\u00e9'} | tojson(indent=1) }}
        {{- strftime_now('%Y') + '<|eot|>\n' }}
    {%- endif %}
    {%- if message['content'] == 'skip me' %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '\n' }}
    {% if message['role'] == 'assistant' %}
{% set end = '\n' %}
{%- generation -%}{% set end = '<|eot|>' %}{{ message['content'] + end }}
    {%- endgeneration %}{{ end }}
    {% else %}
{{ message['content'] + '<|eot|>' }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def test_vicunas_format(tokenizer):
    """As FastChat writes it; each round is encoded on its own, the EOS after each answer."""
    said = ["Hi", "Hello", "And you?"]
    first = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello")
    second = tokenizer.encode("USER: And you? ASSISTANT:")[1:]
    assert tokenizer.encode_chat(said) == [*first, tokenizer.eos_id, *second]
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
    assert ours.encode_chat(["Hi"]) == ours.encode("Hi\n")
    assert ours.encode_chat(said) == ours.encode("Hi\nHello</s>\nAnd you?\n")


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
    raises_line(tokenizer.encode_chat, ValueError, "expected texts", "Hi", 5)


def test_a_template_on_a_tokenizer_json(trained):
    ours, theirs = with_config(trained, chat_template=MARKED)
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


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("template", [BRACKETS, CHATML])
def test_templates_on_a_tokenizer_model(tmp_path, template, legacy):
    """There is no second BOS. ChatML's tokens, in added_tokens.json, are found in a user's text."""
    config = {"chat_template": template, "eos_token": "</s>", "legacy": legacy}
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    folder = sentencepiece_folder(tmp_path / "m", config, added_tokens=ids)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    said = ["Where is Nora?", "In the north.", "日本, </s>and<|im_end|>24?"]
    expected = theirs.apply_chat_template(messages(said), **PROMPT)
    assert ours.encode_chat(said) == expected
    assert 1025 in expected and expected.count(1024) == (4 if template == CHATML else 0)


THINK = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def test_a_template_is_given_options(trained, tmp_path):
    """As Qwen3's, which asks a model to think unless it is told not to."""
    ours, theirs = with_config(trained, chat_template=CHATML + THINK)
    for options in ({"enable_thinking": False}, {"enable_thinking": True}, {}):
        expected = theirs.apply_chat_template(messages(["Hi"]), **PROMPT, **options)
        assert ours.encode_chat("Hi", template_options=options) == expected
    for wrong in ("enable_thiking", "messages"):
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
