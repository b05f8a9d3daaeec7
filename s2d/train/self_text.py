"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). Its answers, at several
temperatures, are what a draft learns from, or become a datastore for exit 0.
"""

import random
from functools import partial

from ..cli.program import tell
from ..extras.batch import generate_many
from ..extras.datastore import save_datastore
from ..files import refuse_existing
from ..text.chat import ChatTemplate, chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model
from ..weights.config import read_config
from ..weights.names import datastore_path
from .corpus import TABLES

QUESTION_TOKENS, ANSWER_TOKENS = 160, 256  # at most; a longer question is dropped
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, a third each
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense


def ways_to_ask(folder):
    """(beginnings of a user's turn by kind, ids from its end to where the assistant speaks)."""
    encode = partial(Tokenizer(folder).encode, with_bos=False)
    template = chat_template(folder)
    if not isinstance(template, ChatTemplate):
        raise ValueError(f"{folder} has no chat template to ask itself; use --data or --from FILE")
    before, _, after = template.render(["\0"]).partition("\0")
    if not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    kinds = [[""], *TABLES["openings"].values()]
    prompts = [[encode(before + first.replace("\\n", "\n")) for first in kind] for kind in kinds]
    return prompts, encode(after)


def sample(folder, millions, run):
    """[(prompt, answer)] of ids that the model in ``folder`` writes, with about so many tokens."""
    (prompts, after), model = ways_to_ask(folder), load_model(folder, run.device, "auto")
    rng, ends = random.Random(run.seed), {after[0], *model.config.eos_token_ids}
    count = max(len(TEMPERATURES), round(millions * 1e6 / (ANSWER_TOKENS / 2)))
    tell(f"{count} questions, then their answers at temperatures {TEMPERATURES}")
    beginnings = [rng.choice(rng.choice(prompts)) for _ in range(count)]
    alone, questions, pairs = dict(method="ar", seed=run.seed), [], []
    options = alone | dict(temperature=ASKING, max_new_tokens=QUESTION_TOKENS)
    for beginning, asked in zip(beginnings, generate_many(model, beginnings, **options)):
        length = next((i for i, token in enumerate(asked.tokens) if token in ends), None)
        if length is not None:
            questions.append([*beginning, *asked.tokens[:length], *after])
    for number, temperature in enumerate(TEMPERATURES):
        some = questions[number :: len(TEMPERATURES)]
        options = alone | dict(temperature=temperature, max_new_tokens=ANSWER_TOKENS)
        answers = generate_many(model, some, **options)
        pairs += [(question, answer.tokens) for question, answer in zip(some, answers)]
    return pairs


def make_datastore(run, target, millions=None, files=None):
    """Write a datastore for ``target``: the text of ``files``, or answers that it writes itself."""
    if (millions is None) == (files is None):
        raise ValueError("give one of --millions and --from")
    out = run.out or datastore_path(target)
    if run.out is None:
        refuse_existing(out)
    if files:
        tokenizer = Tokenizer(target)
        documents = [tokenizer.encode(file.read_text(encoding="utf-8")) for file in files]
    else:
        _, after = ways_to_ask(target)  # an answer's first words depend on the last words of this
        documents = [after[1:] + answer for _, answer in sample(target, millions, run)]
    count = save_datastore(out, documents, read_config(target))
    tell(f"{out}: {len(documents)} documents, {count} tokens")
