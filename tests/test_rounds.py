"""What drafts learn: the corpus; dialogues as pairs of a prompt and its answer, in every format."""

from itertools import islice

import pytest
from helpers import raises_line
from vocabularies import BRACKETS, CHATML, save_trained, sentencepiece_folder

from s2d import Tokenizer
from s2d.train.corpus import GROUPS, conversations
from s2d.train.data import as_rounds, read_dialogues


def first_questions(*which, count):
    return {turns[0][0] for turns in islice(conversations(*which), count)}


def test_no_held_out_prompt_occurs_in_training():
    """Whatever the seeds. Most prompts of a group are new."""
    held_out = first_questions(0, "held-out", count=500)
    assert len(held_out) > 300 and not held_out & first_questions(1, "train", count=5000)
    for group in GROUPS:
        assert len(first_questions(3, "train", [group], count=400)) > 300, group


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
    tokenizer = Tokenizer(folder)
    rounds = list(as_rounds(tokenizer, said))
    whole, end = [], tokenizer.encode(eos, with_bos=False)[-1]
    for turn, (prompt, answer) in enumerate(rounds):
        whole += prompt
        assert whole == tokenizer.encode_chat(said[: 2 * turn + 1])
        whole += answer
        assert answer[-1] == end and answer.count(end) == 1
        assert tokenizer.decode(answer).strip() == said[2 * turn + 1].strip()
    assert len(rounds) == 3


@pytest.mark.parametrize("make", [save_trained, lambda folder: sentencepiece_folder(folder, {})])
def test_rounds_of_plain_text(tmp_path, make):
    """Every message is a line, and no token reaches from a question into its answer."""
    tokenizer = Tokenizer(make(tmp_path))
    for asked, said in (("Why?", "! OK"), ("1", "23")):
        [(prompt, answer)] = as_rounds(tokenizer, [asked, said])
        assert prompt == tokenizer.encode_chat(asked) == tokenizer.encode(f"{asked}\n")
        assert tokenizer.decode(prompt + answer) == f"{asked}\n{said}"
        assert answer[-1:] == tokenizer.encode(tokenizer.eos, with_bos=False)


THOUGHTS = ["Hi", "<think>\nWell.\n</think>\n\nFine", "And?", "Bye"]
THINK = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: <think>
{% endif %}"""
LAST_THOUGHT = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_rounds_are_what_a_model_is_given_and_has_to_write(tmp_path):
    """Also if a thought is left out of the prompt that comes after it."""
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": LAST_THOUGHT}))
    first, second = as_rounds(ours, THOUGHTS)
    for turn, (prompt, answer) in ((1, first), (3, second)):
        assert prompt == ours.encode_chat(THOUGHTS[:turn])
        assert ours.decode(answer) == f"{THOUGHTS[turn]}<|im_end|>\n"


def test_answers_that_do_not_follow_their_prompt(tmp_path):
    """A model would never write the answer's tokens after the prompt's."""
    template = "{% for m in messages %}{% if m.role == 'assistant' %}H{% endif %}{{ m.content }}"
    template += "{% endfor %}{% if add_generation_prompt %}H{% endif %}"
    trained = Tokenizer(save_trained(tmp_path, chat_template=template))
    thinks = Tokenizer(sentencepiece_folder(tmp_path / "m", {"chat_template": THINK}))
    for tokenizer, said, message in (
        (trained, ["Why? ", "ello world"], "a token holds the end of a prompt and the beginning"),
        (trained, ["Why? ", " "], "an answer is empty, or not written whole after its prompt"),
        (trained, ["Why? ", "Be<|eot|>cause"], "not written whole after its prompt"),
        (thinks, THOUGHTS, "not written whole after its prompt"),
    ):
        raises_line(lambda: list(as_rounds(tokenizer, said)), ValueError, message)  # noqa: B023


WITH_TOOLS = "{% for tool in tools %}{{ tool.name }} {% endfor %}{{ mood }}\n"
WITH_TOOLS += CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m['name'] }}")


def test_what_a_record_has_beside_its_messages(tmp_path, capsys):
    """The template gets that, and all that a message has; else the record is passed over."""
    ids = {"<|im_start|>": 1024, "<|im_end|>": 1025}
    config = {"chat_template": WITH_TOOLS, "tokenizer_class": "LlamaTokenizer"}
    ours = Tokenizer(sentencepiece_folder(tmp_path / "m", config, added_tokens=ids))
    asked = [dict(role="user", content="Hi"), dict(role="assistant", content="No.", weight=0)]
    messages = [*asked, dict(role="user", content="2 + 2?", name=" Ann")]
    messages.append({"from": "gpt", "value": "4"})  # in ShareGPT's words
    record = {"messages": messages, "tools": [{"name": "add"}]}
    record["chat_template_kwargs"] = {"mood": "!"}
    wrong = [record | {"images": ["a.png"]}, record | {"chat_template_kwargs": {"mod": "!"}}]
    wrong += [{"messages": asked}, {"messages": [asked[0], asked[1] | {"weight": 0.5}]}]
    [[pair]] = read_dialogues("d", [record, *wrong], ours, ["<|im_end|>"])
    prompt, answer = map(ours.decode, pair)
    assert prompt.startswith("add !\n") and "No." in prompt and "4" not in prompt
    assert "<|im_start|>user Ann\n2 + 2?" in prompt and answer == "4<|im_end|>"
    notices = capsys.readouterr().err
    assert "d: 4 records are passed over; of the first, " in notices and "'images'" in notices
