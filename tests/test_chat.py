"""Chat templates: rendered as transformers does, in a sandbox, for so long."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import WEIGHTS, change_json, raises_line
from transformers import AutoTokenizer
from vocabularies import PROMPT, SAID, messages, sentencepiece_folder, with_config

from s2d import Tokenizer
from s2d.text import chat
from s2d.text.chat import VICUNA_SYSTEM, ChatTemplate, chat_template, choose_template

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
        {% generation %}
{{ message['content'] }}<|eot|>
        {% endgeneration %}
    {% else %}
{{ message['content'] + '<|eot|>' }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def test_built_in_templates(tokenizer):
    said = ["Hi", "Hello", "And you?"]
    first = tokenizer.encode(f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello")
    second = tokenizer.encode("USER: And you? ASSISTANT:")[1:]
    assert tokenizer.encode_chat(said) == [*first, tokenizer.eos_id, *second]
    first = tokenizer.encode("[INST] Hi [/INST] Hello ") + [tokenizer.eos_id]
    second = tokenizer.encode("[INST] And you? [/INST]")
    assert tokenizer.encode_chat(said, "llama-2") == first + second
    for template, text in (
        ("vicuna", "Be brief. USER: Hi ASSISTANT:"),
        ("llama-2", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"),
    ):
        with_system = tokenizer.encode_chat(said[:1], template, "Be brief.")
        assert with_system == tokenizer.encode(text)
        whole = tokenizer.encode_chat(said, template, "Be brief.")
        alone = tokenizer.encode_chat(["Hi"], template)
        assert whole == with_system + tokenizer.encode_chat(said, template)[len(alone) :]
        silent = tokenizer.encode_chat(["Hi", "", "And you?"], template)
        assert silent[: len(alone) + 1] == [*alone, tokenizer.eos_id]
    assert tokenizer.encode_chat(["Hi"], system="") == tokenizer.encode("USER: Hi ASSISTANT:")
    raises_line(tokenizer.encode_chat, ValueError, "ends with the user", ["Hi", "Hello"])
    message = "unknown chat template 'alpaca'"
    raises_line(tokenizer.encode_chat, ValueError, message, ["Hi"], "alpaca")


def test_template_is_read_from_the_folder(tmp_path):
    names = {"vicuna-7b-v1.5": "vicuna", "Llama-2-70b-chat-hf": "llama-2", "Llama-2-7b-hf": None}
    names["some-base"] = None
    for name, expected in names.items():
        (tmp_path / name).mkdir()
        assert chat_template(tmp_path / name, unknown=None) == expected
    assert chat_template(tmp_path / "some-base") == "vicuna"
    assert chat_template(WEIGHTS / "mini-7b", unknown=None) == "vicuna"
    first = "{{ messages[0]['content'] }}"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": f"{first}!"}]
    config = tmp_path / "vicuna-7b-v1.5/tokenizer_config.json"
    for template, expected in ((f"{first}?", "Hi?"), (several, "Hi!"), (f"{first}.", "Hi.")):
        config.write_text(json.dumps({"chat_template": template}))
        assert chat_template(config.parent).render(["Hi"]) == expected
    jinja = config.with_name("chat_template.jinja")
    for template in (f"{first}.", f"{first}.\n"):
        jinja.write_text(template)
        assert chat_template(config.parent).render(["Hi"]) == "Hi."
    jinja.write_text(f"{first}!")
    message = "one chat template in tokenizer_config.json, another in chat_template.jinja; take one"
    raises_line(chat_template, ValueError, message, config.parent)
    config.unlink()
    assert chat_template(config.parent).render(["Hi"]) == "Hi!"


def test_a_line_says_which_template_is_used_and_why(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "chat_template.jinja").write_text("Hi")
    vicuna, base, goes_on = WEIGHTS / "mini-7b", tmp_path / "llama-2-7b", "the model continues"
    for folder, options, expected, line in (
        (own, {}, ChatTemplate, f"that in {own / 'chat_template.jinja'} (--raw: none)"),
        (vicuna, {}, str, "vicuna, by the folder's name (--raw: none)"),
        (vicuna, {"raw": True}, type(None), f"none, as --raw says; {goes_on}"),
        (base, {"chat": True}, str, "vicuna, as --chat says"),
        (base, {}, type(None), f"none, as {base} has none (--chat: vicuna); {goes_on}"),
    ):
        template, said = choose_template(folder, **options)
        assert isinstance(template, expected) and said.startswith(f"chat template: {line}"), said


@pytest.mark.parametrize("template", [HEADERS, MARKED])
def test_templates_are_rendered_as_transformers_does(trained, template):
    ours, theirs = with_config(trained, chat_template=template)
    own = chat_template(trained)
    for count in (1, 3, 5):
        said = messages(SAID[:count])
        text = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert own.render(SAID[:count], to_be_answered=True) == text
        assert own.render(SAID[:count]) == theirs.apply_chat_template(said, tokenize=False)
        expected = theirs.apply_chat_template(said, **PROMPT)
        assert ours.encode_chat(SAID[:count], own) == expected
        system = {"role": "system", "content": " Be <|eot|> brief.\n"}
        expected = theirs.apply_chat_template([system, *said], **PROMPT)
        assert ours.encode_chat(SAID[:count], own, system["content"]) == expected


def test_a_template_without_a_system_message_says_so(trained):
    without = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    for template, message in (
        (without, "knows no system message"),
        ("{{ raise_exception('System role not supported') }}", "fails: System role not supported"),
    ):
        ours, _ = with_config(trained, chat_template=template)
        raises_line(ours.encode_chat, ValueError, message, ["Hi"], chat_template(trained), "Be.")


def test_rounds_by_a_template_are_the_whole_in_pieces(trained):
    """Each answer up to its end of turn; what comes after belongs to the next prompt."""
    chatml = CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|eot|>")
    ours, _ = with_config(trained, chat_template=chatml)
    template, said = chat_template(trained), ["Hi", "Hello", "And you?", "Fine"]
    rounds = list(ours.rounds(said, template))
    assert [ours.decode(answer) for _, answer in rounds] == ["Hello", "Fine"]
    assert all(answer[-1] == ours.eos_id and answer.count(ours.eos_id) == 1 for _, answer in rounds)
    whole = [token for prompt, answer in rounds for token in (*prompt, *answer)]
    assert ours.encode_chat(said[:3], template) == whole[: -len(rounds[1][1])]
    assert list(ours.rounds(said[:1], template)) == [(ours.encode_chat(said[:1], template), [])]
    counted = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with_config(trained, chat_template=counted)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        list(ours.rounds(said, chat_template(trained)))


BRACKETS = """{% for m in messages %}{% if m['role'] == 'user' -%}
{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }} {{ eos_token }}
{%- endif %}{% endfor %}"""
BARS = """{% for m in messages %}<|{{ m['role'] }}|>
{{ m['content'] }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("legacy", [{"legacy": True}, {"legacy": False}, {}])
@pytest.mark.parametrize("template", [BRACKETS, BARS, CHATML])
def test_special_tokens_in_a_template_with_sentencepiece(tmp_path, template, legacy):
    """ChatML's are in added_tokens.json; so are those that a user types, as in transformers."""
    config = {"chat_template": template, "eos_token": "</s>"} | legacy
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    folder = sentencepiece_folder(tmp_path / "m", config, added_tokens=ids)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    said = ["Where is Nora?", "In the north.", "日本, </s>and<|im_end|>24?"]
    expected = theirs.apply_chat_template(messages(said), **PROMPT)
    assert ours.encode_chat(said, chat_template(folder)) == expected
    assert 1025 in expected and expected.count(1024) == (4 if template == CHATML else 0)


def test_special_tokens_named_elsewhere(tmp_path):
    source = "{{ bos_token }}Hi{{ eos_token }}"
    for named, expected in (({}, "<s>Hi</s>"), ({"bos_token": {"content": "<b>"}}, "<b>Hi</s>")):
        for given in (source, [{"name": "default", "template": source}]):
            folder = sentencepiece_folder(tmp_path / "m", {}, special_tokens_map=named)
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
            assert chat_template(folder).render(["Hi"]) == expected


LONG = "takes longer than 0.5 seconds"
LARGE = "takes more than 512 MB"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ raise_exception('\x1b[2J\u202ered\x07') }}", r"\x1b[2J\u202ered\x07"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ none.x.y }}", "has no attribute"),
        ("{% include 'x' %}", "no loader"),
        ("{{ (1).__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages | tojson(default=lipsum) }}", "unexpected keyword argument 'default'"),
        ("{{ lipsum(n=10**7) }}", LONG),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LONG),
        ("{{ 10 ** (10 ** 8) }}", LONG),
        ("{{ 'a' * (4 * 10**9) }}", LARGE),
        ("{{ 'a' | center(10**10) }}", LARGE),
        ("{{ messages[0]['role'] * 2**23 }}", "makes a text of 33,554,432 characters"),
        (7, "chat_template is 7; expected text"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox(trained, monkeypatch, template, message):
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    with_config(trained, chat_template=None)
    change_json(trained / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        Tokenizer(trained).encode_chat(["Hi"], chat_template(trained))
    assert str(refused.value).isprintable()


def test_a_host_keeps_its_timer_and_a_thread_is_no_way_around_the_limit(monkeypatch):
    """A template has a process of its own; one that was ended is followed by another."""
    template = ChatTemplate("here", "{{ 10 ** ((messages | length) ** 8) }}", {})
    host = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGALRM, host)
    signal.setitimer(signal.ITIMER_REAL, 60, 7)
    try:
        with ThreadPoolExecutor() as pool:
            monkeypatch.setattr(chat, "SECONDS", 0.5)
            late = pool.submit(template.render, ["Hi"] * 10)
            raises_line(late.result, ValueError, LONG)
            monkeypatch.undo()
            assert pool.submit(template.render, ["Hi"]).result() == template.render(["Hi"]) == "10"
        left, again = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 30 < left < 60 and again == 7 and signal.getsignal(signal.SIGALRM) is host
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_older_jinja_is_refused(monkeypatch):
    monkeypatch.setattr(chat, "version", lambda package: "3.1.5")
    message = "needs jinja2>=3.1.6, this is 3.1.5: pip"
    raises_line(ChatTemplate, ValueError, message, "here", "Hi", {})
