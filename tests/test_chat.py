"""Chat templates: rendered and encoded as transformers does; Vicuna's format; what goes wrong."""

import re

import pytest
from helpers import WEIGHTS, change_json, raises_line
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
    first = "{{ messages[0]['content'] }}"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": f"{first}!"}]
    by_name = {"tool_use": "no", "default": f"{first};"}
    for template, expected in ((f"{first}?", "Hi?"), (several, "Hi!"), (by_name, "Hi;")):
        change_json(folder / "tokenizer_config.json", chat_template=template)
        assert Tokenizer(folder).chat_format.render(messages(["Hi"])) == expected
    (folder / "chat_template.jinja").write_text(f"{first}.\n")  # which transformers prefers
    assert Tokenizer(folder).chat_format.render(messages(["Hi"])) == "Hi."
    link = tmp_path / "vicuna-13b"  # as into a cache, whose folders are called by checksums
    link.symlink_to(sentencepiece_folder(tmp_path / "0a1b", {}))
    assert "Vicuna" in Tokenizer(link).chat_format.name
    assert Tokenizer(tmp_path / "0a1b").chat_format is None
    (tmp_path / "mine").symlink_to(WEIGHTS / "mini-7b")
    assert "Vicuna" in Tokenizer(tmp_path / "mine").chat_format.name


def test_a_folder_without_a_format(tmp_path):
    """It is prompted with plain text, and no other model's format is made up for it."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "base", {}))
    assert ours.chat_format is None
    raises_line(ours.encode_chat, ValueError, "base has no chat template; encode plain", ["Hi"])
    assert ours.encode_prompt(["Hi"]) == ours.encode("Hi")
    said = ["Hi", "Hello", "And you?"]
    assert ours.encode_prompt(said) == ours.encode("Hi\n\nHello</s>\n\nAnd you?")
    [(prompt, answer)] = ours.rounds(said)
    assert prompt == ours.encode("Hi") and ours.decode(answer) == "\n\nHello"
    assert answer[-1] == ours.eos_id


def test_what_messages_are(tokenizer):
    """Texts in turn or dictionaries, of which the system's may be the first."""
    hi, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    expected = tokenizer.encode_chat(["Hi"])
    for same in ("Hi", ("Hi",), hi, [hi], iter([hi]), [hi | {"name": "Anna"}]):
        assert tokenizer.encode_chat(same) == expected
    brief = tokenizer.encode_chat([system, hi])
    assert brief == tokenizer.encode_chat("Hi", system="Be brief.") != expected
    assert list(tokenizer.rounds([system, hi])) == []
    for wrong in ([], None, 7, b"Hi", [7], [None], ["Hi", hi], [["Hi"]], [{}], [system]):
        raises_line(tokenizer.encode_chat, ValueError, "expected texts, user and", wrong)
    for content in (None, ["Hi"], 7):
        raises_line(
            tokenizer.encode_chat, ValueError, "expected texts", [hi | {"content": content}]
        )
    raises_line(tokenizer.encode_chat, ValueError, "user and assistant in turn", [hi, hi])
    raises_line(tokenizer.encode_chat, ValueError, "at most one system", [system, hi], "Be brief.")
    for wrong in (system, ["Be brief."], b"Be brief.", 5):
        raises_line(tokenizer.encode_chat, ValueError, "expected texts", "Hi", wrong)


@pytest.mark.parametrize("template", [HEADERS, MARKED])
def test_templates_on_a_tokenizer_json(trained, template):
    ours, theirs = with_config(trained, chat_template=template)
    for count in (1, 3, 5):
        said = messages(SAID[:count])
        text = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert ours.chat_format.render(said) == text
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


def test_rounds_by_a_template_are_the_whole_in_pieces(trained):
    """Each answer up to its end of turn; what comes after belongs to the next prompt."""
    chatml = CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|eot|>")
    ours, _ = with_config(trained, chat_template=chatml)
    said = ["Hi", "Hello", "And you?", "Fine"]
    rounds = list(ours.rounds(said))
    assert [ours.decode(answer) for _, answer in rounds] == ["Hello", "Fine"]
    assert all(answer[-1] == ours.eos_id and answer.count(ours.eos_id) == 1 for _, answer in rounds)
    whole = [token for prompt, answer in rounds for token in (*prompt, *answer)]
    assert ours.encode_chat(said[:3]) == whole[: -len(rounds[1][1])]
    assert list(ours.rounds(said[:1])) == []


def slow_rounds(tokenizer, said):
    """By encoding the dialogue anew for each round, if no tokens melt at a border."""
    ids = []
    for turn in range(0, len(said), 2):
        asked = tokenizer.encode_chat(said[: turn + 1])
        answer = tokenizer.encode_chat(said[: turn + 2])[len(asked) :]
        answer = answer[: answer.index(tokenizer.eos_id) + 1]
        yield asked[len(ids) :], answer
        ids += asked[len(ids) :] + answer


@pytest.mark.parametrize("legacy", [True, False])
def test_rounds_are_the_dialogue_in_pieces(tmp_path, legacy):
    """By Vicuna's format, and by templates, in a tokenizer.model."""
    said = ["Where is Nora?", "In the north.", " Why?", "Because. ", "日本", "24."]
    for template in (None, BRACKETS):  # a name that begins with mini- has Vicuna's format
        config = {"legacy": legacy, "chat_template": template}
        ours = Tokenizer(sentencepiece_folder(tmp_path / "mini-m", config))
        assert list(ours.rounds(said)) == list(slow_rounds(ours, said))


def test_rounds_whose_borders_melt(tmp_path):
    """An answer's tokens are those that a model writes after the prompt."""
    end_only = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    end_only += "{% if add_generation_prompt %}assistant\n{% else %}{{ eos_token }}{% endif %}"
    folders = {
        "model": sentencepiece_folder(tmp_path / "m", {"chat_template": end_only}),
        "bytes": save_trained(tmp_path),
    }
    with_config(tmp_path, chat_template=end_only)
    for folder in folders.values():
        ours = Tokenizer(folder)
        said = ["Hi", "\n\n\nOK", "And?", "Bye"]
        rounds = list(ours.rounds(said))
        for turn, (prompt, answer) in enumerate(rounds):
            assert ours.decode(answer) == said[2 * turn + 1] + "\n" and answer[-1] == ours.eos_id
            assert ours.eos_id not in prompt
        assert rounds[0][0] == ours.encode_chat(said[:1])
        assert [*rounds[1][0], *rounds[1][1]].count(ours.eos_id) == 1


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
COUNTED = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}|{% endfor %}"
COUNTED += "{% if add_generation_prompt %}A: {% endif %}"


def test_rounds_are_what_a_model_is_given_and_has_to_write(tmp_path):
    """Also if a thought is left out of the prompt that comes after it."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": LAST_THOUGHT}))
    answers = [f"{THOUGHTS[1]}<|im_end|>\n", "Bye<|im_end|>\n"]
    rounds = list(ours.rounds(THOUGHTS))
    assert len(rounds) == 2
    for turn, (prompt, answer) in enumerate(rounds):
        assert prompt == ours.encode_chat(THOUGHTS[: 2 * turn + 1])
        assert answer == ours.encode(answers[turn], after=prompt[-1])


@pytest.mark.parametrize("template", [THINK, DEEPSEEK, COUNTED])
def test_rounds_of_which_an_answer_is_written_otherwise_than_it_was_asked_are_refused(
    tmp_path, template
):
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": template}))
    assert ours.encode_chat(THOUGHTS)
    with pytest.raises(ValueError, match="does not write an answer whole after its prompt"):
        list(ours.rounds(THOUGHTS))


@pytest.mark.parametrize("config", [{}, {"legacy": True}, {"add_prefix_space": False}])
def test_rounds_of_both_kinds_of_tokenizer_are_the_same(tmp_path, config):
    """Also where a space would be put before a text, though an answer goes on after its prompt."""
    said = ["Hi", "Fine", "And you? ", "24.", "\n", "日本"]
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    config = {"tokenizer_class": "LlamaTokenizer", "extra_special_tokens": [*ids]} | config
    folders = (
        sentencepiece_folder(tmp_path / "mini-model", {}, added_tokens=ids),
        save_published(tmp_path / "mini-json"),
    )
    for template in (None, BRACKETS, CHATML):
        for folder in folders:
            change_json(folder / "tokenizer_config.json", chat_template=template, **config)
        by_model, by_json = map(Tokenizer, folders)
        expected = list(by_model.rounds(said))
        if config.get("legacy"):  # the package would put a space before each answer
            with pytest.raises(ValueError, match="puts a space before each part of a text"):
                list(by_json.rounds(said))
        else:
            assert list(by_json.rounds(said)) == expected


def test_what_cannot_be_divided_into_rounds(tmp_path):
    said = messages(["Hi", "Hello"])
    for template, wrong, message in (
        ("{{ messages[0]['content'] }}", said, "does not write an answer whole"),
        ("{% if messages | length > 1 %}x{% endif %}", said, "does not write an answer whole"),
        ("x", said[1:], "the assistant speaks first"),
    ):
        folder = sentencepiece_folder(tmp_path / "m", {"chat_template": template})
        with pytest.raises(ValueError, match=message):
            list(Tokenizer(folder).rounds(wrong))


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
def test_half_a_character_is_refused_wherever_it_stands(tmp_path, kind):
    """A surrogate without its other half, in a question and in an answer."""
    if kind == "tokenizer.model":
        ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": CHATML}))
    else:
        ours, _ = with_config(save_trained(tmp_path), chat_template=CHATML)
    for said in (["\ud800", "Hello"], ["Hi", "\ud800"], ["Hi", "Hello", "\ud800", "Bye"]):
        with pytest.raises(ValueError, match="not valid UTF-8"):
            list(ours.rounds(said))
    raises_line(ours.encode, ValueError, "expected a text, got None", None)


def test_a_folder_of_several_templates_without_a_default_is_refused(tmp_path):
    """Its names are told; a raw prompt would be answered in silence. Plain text is encoded."""
    named = [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}]
    sentencepiece_folder(tmp_path, {"chat_template": named})

    def ask():
        assert Tokenizer(tmp_path).encode("Hi")
        Tokenizer(tmp_path).encode_chat(["Hi"])

    raises_line(ask, ValueError, "templates called rag, tool_use, but")
    change_json(tmp_path / "tokenizer_config.json", chat_template={"rag": "x"})
    raises_line(ask, ValueError, "templates called rag, but")
    (tmp_path / "chat_template.jinja").write_text("default")
    assert Tokenizer(tmp_path).chat_format.render(messages(["Hi"])) == "default"


def test_what_transformers_adds_to_jinja(trained):
    """A function, and arguments of a filter."""
    for template in (
        "{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true) }}",
        "{{ strftime_now(format='%Y') }}",
    ):
        ours, theirs = with_config(trained, chat_template=template)
        expected = theirs.apply_chat_template(messages(SAID[:3]), tokenize=False)
        assert ours.chat_format.render(messages(SAID[:3])) == expected


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
        assert ours.encode_prompt("Hi", None, options) == expected
    off = ours.encode_chat("Hi", template_options={"enable_thinking": False})
    assert off != ours.encode_chat("Hi") and len(off) > len(ours.encode_chat("Hi"))
    for wrong in ("enable_thiking", "messages", "add_generation_prompt"):
        message = f"has no option {wrong!r}"
        with pytest.raises(ValueError, match=message):
            ours.encode_chat("Hi", template_options={wrong: False})
    plain = Tokenizer(sentencepiece_folder(tmp_path / "base", {}))
    with pytest.raises(ValueError, match="it has no template options"):
        plain.encode_prompt("Hi", template_options={"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "no loader"),
        ("{% generation %}{% endgeneration %}", "unknown tag 'generation'"),
        (7, "fails"),
    ],
)
def test_a_template_that_fails(trained, template, message):
    with_config(trained, chat_template=None)
    change_json(trained / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(trained)
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer.encode_chat(["Hi"], "Be brief.")
    assert tokenizer.chat_format.is_own
