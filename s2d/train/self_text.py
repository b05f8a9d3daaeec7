"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). What it then answers, at
several temperatures, is in the distribution that a draft has to predict. A draft learns from it, or
it becomes a datastore for exit 0, as any other text can.
"""

import json
import random

from ..extras.many import generate_many
from ..fields import read_json
from ..files import read_text, refuse_existing, staged_file
from ..program import tell
from ..text.chat import ChatTemplate, chat_template
from ..text.tokenizer import Tokenizer
from ..weights import datastore, load_model
from ..weights.config import read_config
from .corpus import TABLES

QUESTION_TOKENS, ANSWER_TOKENS = 160, 256  # at most; a longer question is dropped
BATCH = 96  # conversations per round, after which they are saved
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, a third each
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense


def ways_to_ask(folder):
    """(beginnings of a user's turn by kind, ids from its end to where the assistant speaks)."""
    encode, template = Tokenizer(folder).encode_marked, chat_template(folder)
    if not isinstance(template, ChatTemplate):
        alone = "to ask itself questions the target needs a chat template of its own"
        raise ValueError(f"{alone}; give a text by --data FILE or --from FILE")
    before, _, after = template.render(["\0"], to_be_answered=True).partition("\0")
    if not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    kinds = [[""], *TABLES["openings"].values()]
    prompts = [[encode(before + first.replace("\\n", "\n")) for first in kind] for kind in kinds]
    return prompts, encode(after)


def ask_and_answer(model, prompts, after, count, seed):
    """Sample ``count`` questions; returns [(prompt, answer)], ids, of those that came to an end.

    ``prompts`` are beginnings of questions by kind; the template puts ``after`` behind them.
    """
    rng = random.Random(seed)
    beginnings = [rng.choice(rng.choice(prompts)) for _ in range(count)]
    asking = dict(method="ar", temperature=ASKING, max_new_tokens=QUESTION_TOKENS, seed=seed)
    ends = {after[0], *model.config.eos_token_ids}
    questions = []
    for beginning, asked in zip(beginnings, generate_many(model, beginnings, **asking)):
        length = next((i for i, token in enumerate(asked.tokens) if token in ends), None)
        if length is not None:
            questions.append([*beginning, *asked.tokens[:length], *after])
    pairs = []
    for number, temperature in enumerate(TEMPERATURES):
        some = questions[number :: len(TEMPERATURES)]
        answering = asking | dict(temperature=temperature, max_new_tokens=ANSWER_TOKENS)
        answers = generate_many(model, some, **answering)
        pairs += [(question, answer.tokens) for question, answer in zip(some, answers)]
    return pairs


def sample_to(file, folder, millions, run):
    """Pairs (prompt, answer) of ids that the model in ``folder`` wrote, from ``file`` and new.

    New ones are added to the file until its answers have so many ``millions`` of tokens.
    """
    prompts, after = ways_to_ask(folder)
    kept = read_json(file) if file.exists() else {"target": folder.name, "rounds": []}
    if kept.get("target") != folder.name:
        raise ValueError(f"{file} was not written by {folder.name}; name another")
    model, rounds, enough = load_model(folder, run.device, "auto"), kept["rounds"], millions * 1e6
    while (have := sum(len(answer) for pairs in rounds for _, answer in pairs)) < enough:
        count = min(BATCH, max(3, int(2 * (enough - have) / ANSWER_TOKENS)))
        seed = random.Random(f"{run.seed} {len(rounds)}").randrange(2**62)
        rounds.append(ask_and_answer(model, prompts, after, count, seed))
        with staged_file(file) as stage:
            stage.write_text(json.dumps(kept))
        tell(f"{file.name}: {have} answer tokens of {enough:.0f} before round {len(rounds)}")
    return [pair for pairs in rounds for pair in pairs]


def make_datastore(run, target, millions=None, files=None):
    """Write a datastore for ``target``: the text of ``files``, or answers that it writes itself."""
    if (millions is None) == (files is None):
        raise ValueError("give one of --millions and --from")
    out, config = run.out or target / datastore.DATASTORE, read_config(target)
    if run.out is None:
        refuse_existing(out)
    if files:
        tokenizer = Tokenizer(target)
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        pairs = sample_to(out.with_suffix(".self.json"), target, millions, run)
        _, after = ways_to_ask(target)  # an answer's first words depend on the last words of this
        documents = [after[1:] + answer for _, answer in pairs]
    about = dict(eos=datastore.end_of(config, target), vocab_size=config.vocab_size)
    about |= dict(tokenizer=datastore.tokenizer_checksum(target), source=target.name)
    tokens = datastore.write_datastore(out, documents, **about)
    tell(f"{out}: {len(documents)} documents, {len(tokens)} tokens")
