"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). What it then answers, at
several temperatures, is in the distribution that a draft has to predict.
"""

import itertools
import json
import os
import random
import sys
import time
from collections import deque

import torch

from ..chat import ChatTemplate
from ..files import drop_half_line, whole_lines
from ..weights import checksum
from .openings import KINDS

QUESTION_TOKENS, ANSWER_TOKENS = 160, 256  # at most; a longer question is dropped
BATCH = 96  # conversations at a time
SLACK = 64  # steps between two times that slots of the cache are freed
SAY_SECONDS = 20  # between two lines of progress
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, one after the other
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense


def ways_to_ask(tokenizer, template):
    """(beginnings of a user's turn by KINDS, ids from its end to where the assistant speaks)."""
    if not isinstance(template, ChatTemplate):
        alone = "to ask itself questions the target needs a chat template of its own"
        raise ValueError(f"{alone}; give a text by --data FILE or --from FILE")
    before, found, after = template.render(["\0"], to_be_answered=True).partition("\0")
    if not found or not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    encode = tokenizer.encode_marked
    return [[encode(before + first) for first in kind] for kind in KINDS.values()], encode(after)


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

    def __init__(self, prompt, temperature, wanted):
        self.temperature, self.wanted = temperature, wanted
        self.told = deque(prompt)  # ids that come next whatever the model chooses
        self.text = [self.told.popleft()]
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


def draw(logits, temperatures, generator):
    """One token for each row of logits (B, V), at its own temperature: (B,)."""
    logits, drawn = logits.float(), temperatures > 0
    mass = (logits[drawn] / temperatures[drawn, None]).softmax(dim=-1).cumsum(dim=-1)
    height = torch.rand(len(mass), 1, device=mass.device, generator=generator) * mass[:, -1:]
    choice = logits.argmax(dim=-1)
    # Rounding may put a height on top of all the mass.
    choice[drawn] = torch.searchsorted(mass, height, right=True)[:, 0].clamp(max=mass.shape[1] - 1)
    return choice


def next_logits(model, rows, shared, cache):
    """Run the last token of each of the ``rows``: logits (B, V) of what follows it.

    All rows write to the same slot of the cache. A row sees the slots from where it began, and
    first the ``shared`` ones. A full cache keeps only these and the slots of the longest row.
    """
    longest = max(len(row.text) for row in rows)
    if cache.length == cache.keys.shape[3]:
        written = cache.length - shared
        cache.keep(shared, list(range(written - longest + 1, written)))
    lengths = torch.tensor([len(row.text) for row in rows], device=model.device)  # (B,)
    tokens = torch.tensor([row.text[-1:] for row in rows], device=model.device)  # (B, 1)
    slots = torch.arange(cache.length + 1, device=model.device)
    hidden_slots = (slots >= shared) & (slots <= cache.length - lengths[:, None])
    mask = torch.zeros(hidden_slots.shape, dtype=model.dtype, device=model.device)
    mask.masked_fill_(hidden_slots, -torch.inf)  # (B, S+1)
    positions = (shared + lengths - 1)[:, None, None]
    how = dict(positions=positions, mask=mask[:, None, None], cache=cache)
    return model.logits(model.run_layers(model.embed(tokens), **how)[:, 0])


@torch.inference_mode()
def converse(model, prompts, after, enough, batch, seed):
    """Sample questions and answers until the answers have ``enough`` tokens.

    ``prompts`` are beginnings of questions, lists of ids by kind; ``after`` is what the template
    says after a question. Yields (prompt, answer, temperature). What has begun when there is enough
    is still finished: else long answers would be rarer than they are.
    """
    everything = [prompt for kind in prompts for prompt in kind]
    common = os.path.commonprefix(everything)[:-1]  # a row begins with a token of its own
    longest = max(map(len, everything)) + QUESTION_TOKENS + len(after) + ANSWER_TOKENS
    if longest > model.config.max_position_embeddings:
        limit = f"more than the model's context of {model.config.max_position_embeddings}"
        raise ValueError(f"a question and its answer may have {longest} tokens, {limit}")
    cache = model.new_cache(longest + SLACK, batch=batch)
    if common:
        shared = torch.tensor([common] * batch, device=model.device)
        model.run_layers(model.embed(shared), cache=cache)
    generator, rng = torch.Generator(model.device).manual_seed(seed), random.Random(seed)
    ends, sampled, turn = {after[0], *model.config.eos_token_ids}, 0, itertools.cycle(TEMPERATURES)

    def begun():
        prompt = rng.choice(rng.choice(prompts))
        return Conversation(prompt[len(common) :], next(turn), wanted=sampled < enough)

    rows = [begun() for _ in range(batch)]
    while any(row.wanted for row in rows):
        temperatures = [row.temperature if row.start else ASKING for row in rows]
        logits = next_logits(model, rows, len(common), cache)
        choices = draw(logits, torch.tensor(temperatures, device=model.device), generator)
        for i, choice in enumerate(choices.tolist()):
            rows[i].take(choice, after, ends)
            if rows[i].left == 0:
                done, start = rows[i], rows[i].start
                if done.wanted and start:
                    sampled += len(done.text) - start
                    yield common + done.text[:start], done.text[start:], done.temperature
                rows[i] = begun()


class SelfText:
    """The conversations in ``file``: JSON lines, after one that says which model's they are."""

    def __init__(self, file, model):
        self.file, self.records = file, []
        self.header = json.dumps({"model": checksum(model)}) + "\n"
        if not file.is_file() or not file.stat().st_size:
            return
        if not file.read_bytes().startswith(self.header.encode()):
            other = "was sampled from another model, or is none of these files; name another"
            raise ValueError(f"{file} {other}")
        try:
            self.records = [json.loads(line) for line in whole_lines(file).split("\n")[1:-1]]
            if not all(record["p"] and record["a"] for record in self.records):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is damaged; name another") from None
        drop_half_line(file)

    @property
    def count(self):
        """Tokens of all answers."""
        return sum(len(record["a"]) for record in self.records)

    def add(self, prompt, answer, temperature):
        self.records.append({"p": prompt, "a": answer, "T": temperature})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(("" if file.tell() else self.header) + json.dumps(self.records[-1]) + "\n")


def sample_to(file, model, tokenizer, template, wanted, seed):
    """The SelfText in ``file``, with ``wanted`` tokens of answers: what is missing is sampled."""
    prompts, after = ways_to_ask(tokenizer, template)
    text = SelfText(file, model)
    missing, new = wanted - text.count, 0
    if missing <= 0:
        return text
    batch = max(1, min(BATCH, int(missing / (ANSWER_TOKENS / 2))))
    began = said = time.monotonic()
    # Seeded by how much there is, so that a run that goes on does not say the same again.
    for conversation in converse(model, prompts, after, missing, batch, seed + text.count):
        text.add(*conversation)
        new += len(conversation[1])
        if time.monotonic() > said + SAY_SECONDS or new >= missing:
            said = time.monotonic()
            speed = new / (said - began)
            line = f"{file.name}: {wanted - missing + new:.0f} answer tokens of {wanted:.0f}, "
            line += f"{speed:.0f} tokens/s, {max(0, missing - new) / speed / 60:.1f} min left"
            print(line, file=sys.stderr, flush=True)
    return text
