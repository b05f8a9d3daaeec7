"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). What it then answers, at
several temperatures, is in the distribution that a draft has to predict. A draft learns from it, or
it becomes a datastore for exit 0, as any other text can.
"""

import itertools
import json
import os
import random
import time
from collections import deque

import torch

from ..files import drop_half_line, read_text, whole_lines
from ..program import tell
from ..sampling import Sampler
from ..text.chat import ChatTemplate, chat_template
from ..text.tokenizer import Tokenizer
from ..weights import checksum, datastore, load_model
from ..weights.adapter import folders_read
from ..weights.config import read_config
from .corpus import TABLES

QUESTION_TOKENS, ANSWER_TOKENS = 160, 256  # at most; a longer question is dropped
BATCH = 96  # conversations at a time
SAY_SECONDS = 20  # between two lines of progress
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, one after the other
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense


def ways_to_ask(folder):
    """(beginnings of a user's turn by kind, ids from its end to where the assistant speaks)."""
    encode, template = Tokenizer(folder).encode_marked, chat_template(folder)
    if not isinstance(template, ChatTemplate):
        alone = "to ask itself questions the target needs a chat template of its own"
        raise ValueError(f"{alone}; give a text by --data FILE or --from FILE")
    before, found, after = template.render(["\0"]).partition("\0")
    if not found or not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    kinds = [[""], *TABLES["openings"].values()]
    prompts = [[encode(before + first.replace("\\n", "\n")) for first in kind] for kind in kinds]
    return prompts, encode(after)


@torch.inference_mode()
def likeliest(target, tokens, labels, rows=16):
    """``labels`` (R, T) with what ``target`` finds likeliest in place of what was drawn.

    That is less noise to learn from. Rows of about the same length go through together.
    """
    found = labels.clone()
    ends = ((labels != -100) * torch.arange(1, labels.shape[1] + 1)).amax(dim=1)  # (R,)
    for part in ends.argsort().split(rows):
        end = ends[part].max().item()
        if end == 0:  # rows in which nothing is learnt
            continue
        own = labels[part, :end]
        learnt = own != -100
        hidden = target.run_layers(target.embed(tokens[part, :end].to(target.device)))[learnt]
        likely = target.logits(hidden).argmax(dim=-1).cpu().to(own.dtype)
        found[part, :end] = own.masked_scatter(learnt, likely)
    return found


class Conversation:
    """A row of a batch: a question that the model continues, the template's words, an answer."""

    def __init__(self, prompt, shared, temperature):
        self.text, self.told = prompt[:shared], deque(prompt[shared:])  # told: ids that come next
        self.temperature = temperature
        self.start = None  # where the answer begins
        self.left = QUESTION_TOKENS  # how many tokens the model may still choose

    def take(self, choice, after, ends):
        """Append what is told, or else the model's ``choice``."""
        if self.told:
            self.text.append(self.told.popleft())
            return
        self.text.append(choice)
        self.left -= 1
        if choice not in ends:
            return
        self.left = 0
        if self.start is None:  # the question ends, as the template ends it
            self.text[-1], self.told = after[0], deque(after[1:])
            self.start, self.left = len(self.text) + len(self.told), ANSWER_TOKENS


def drop_row(cache, row):
    """Forget a row of a batch's KV cache: the last one moves to where it was."""
    for each in (cache.keys, cache.values):
        each[:, row, :, : cache.length] = each[:, -1, :, : cache.length]
    cache.keys, cache.values = cache.keys[:, :-1], cache.values[:, :-1]
    cache.layers = list(zip(cache.keys.unbind(), cache.values.unbind()))


@torch.inference_mode()
def converse(model, prompts, after, enough, batch, seed):
    """Sample (prompt, answer, temperature) until the answers have ``enough`` tokens.

    ``prompts`` are beginnings of questions, ids by kind; the template says ``after`` behind them. A
    batch is finished whatever there is by then: else long answers would be rarer than they are.
    """
    everything = [prompt for kind in prompts for prompt in kind]
    shared = max(1, len(os.path.commonprefix(everything)))  # ids that go through in one pass
    longest = max(map(len, everything)) + QUESTION_TOKENS + len(after) + ANSWER_TOKENS
    if longest > model.config.max_position_embeddings:
        limit = f"more than the model's context of {model.config.max_position_embeddings}"
        raise ValueError(f"a question and its answer may have {longest} tokens, {limit}")
    sampler, rng = Sampler(seed, model.device), random.Random(seed)
    ends, sampled, turn = {after[0], *model.config.eos_token_ids}, 0, itertools.cycle(TEMPERATURES)
    while sampled < enough:
        drawn = [rng.choice(rng.choice(prompts)) for _ in range(batch)]
        rows = [Conversation(prompt, shared, next(turn)) for prompt in drawn]
        cache = model.new_cache(longest, batch=batch)
        while rows:
            new = torch.tensor([row.text[cache.length :] for row in rows], device=model.device)
            hidden = model.run_layers(model.embed(new), cache=cache)[:, -1]
            logits = model.logits(hidden).float()  # (B, V)
            if not logits.sum().isfinite():
                raise ValueError("the logits are NaN: the weights are damaged, or overflow")
            temperatures = [row.temperature if row.start else ASKING for row in rows]
            heat = torch.tensor(temperatures, device=model.device)[:, None]  # (B, 1)
            greedy = heat == 0
            choices = sampler.draw((logits / (heat + greedy)).softmax(dim=-1))  # (B,)
            choices = logits.argmax(dim=-1).where(greedy[:, 0], choices).tolist()
            for i in reversed(range(len(rows))):
                row = rows[i]
                row.take(choices[i], after, ends)
                if row.left == 0:
                    drop_row(cache, i)
                    rows[i] = rows[-1]
                    rows.pop()
                    if row.start:
                        sampled += len(row.text) - row.start
                        yield row.text[: row.start], row.text[row.start :], row.temperature


def read_pairs(file, header, vocab_size):
    """The (prompt, answer) in ``file``: JSON lines after ``header``, which says whose they are."""
    if not file.is_file() or not file.stat().st_size:
        return []
    if not file.read_bytes().startswith(header.encode()):
        other = "was sampled from another model, or is none of these files; name another"
        raise ValueError(f"{file} {other}")
    try:
        records = [json.loads(line) for line in whole_lines(file).split("\n")[1:-1]]
        pairs = [(record["p"], record["a"]) for record in records]
        for ids in itertools.chain.from_iterable(pairs):
            if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged; name another") from None
    drop_half_line(file)
    return pairs


def sample_to(file, folder, millions, run):
    """The model in ``folder``, what ends a question, and pairs (prompt, answer) of ids.

    The answers have so many ``millions`` of tokens: those in ``file``, then new ones.
    """
    prompts, after = ways_to_ask(folder)  # refused before a model is loaded
    model, wanted = load_model(folder, run.device, "auto"), millions * 1e6
    header = json.dumps({"model": checksum(model)}) + "\n"
    pairs = read_pairs(file, header, model.config.vocab_size)
    old = count = sum(len(answer) for _, answer in pairs)
    batch = max(1, min(BATCH, int((wanted - old) / (ANSWER_TOKENS / 2))))
    began = said = time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Seeded by how much there is, so that a run that goes on does not say the same again.
    sampling = converse(model, prompts, after, wanted - old, batch, run.seed + old)
    for prompt, answer, temperature in sampling:
        pairs.append((prompt, answer))
        record = json.dumps({"p": prompt, "a": answer, "T": temperature})
        with file.open("a", encoding="utf-8") as out:
            out.write(("" if out.tell() else header) + record + "\n")
        count += len(answer)
        if time.monotonic() > said + SAY_SECONDS or count >= wanted:
            said = time.monotonic()
            speed = (count - old) / (said - began)
            line = f"{file.name}: {count} answer tokens of {wanted:.0f}, {speed:.0f} tokens/s, "
            line += f"{max(0, wanted - count) / speed / 60:.1f} min left"
            tell(line)
    return model, after, pairs


def make_datastore(target, run, millions, files):
    """Write ``run.out``, by default in the folder ``target``.

    It is made of the text in ``files`` or, without any, of ``millions`` sampled tokens.
    """
    own = target / datastore.DATASTORE
    out = run.out or own
    datastore.check_datastore(out, run.replace, [*folders_read(target), *(files or ())])
    config, source = read_config(target), "text"
    eos, vocabulary = datastore.end_of(config, target), datastore.tokenizer_checksum(target)
    if files:
        tokenizer = Tokenizer(target)
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        if not 0 < millions < 1e6:
            raise ValueError(f"expected more than 0 and less than 1e+06 millions, got {millions:g}")
        model, after, pairs = sample_to(out.with_suffix(".self.jsonl"), target, millions, run)
        ends = itertools.accumulate(len(answer) for _, answer in pairs)
        needed = 1 + sum(end < millions * 1e6 for end in ends)
        # An answer's first words depend on the template's before it.
        documents = [after[1:] + answer for _, answer in pairs[:needed]]
        source = checksum(model)
    about = eos, config.vocab_size, vocabulary, source
    tokens = datastore.write_datastore(out, documents, *about, run.replace)
    tell(f"{out}: {len(documents)} documents, {len(tokens)} tokens")
    if out.resolve() == own.resolve():
        tell("later runs of this target draft from it by default, because it is in its folder")
