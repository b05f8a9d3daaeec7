"""Training text from the target itself, without any data set: in its own chat template it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn writes the user's question (Magpie, Xu et al. 2024,
arXiv 2406.08464). What it then answers, at several temperatures, is in the distribution that a draft has to predict.
"""

import json
import sys
import time

import torch

from ..chat import ChatTemplate
from ..files import drop_half_line, whole_lines
from ..sampling import warp
from ..weights import checksum

ASKING, TOLD, ANSWERING, DONE = range(
    4
)  # what a row of a batch is doing; told: the template's words between the two
QUESTION_TOKENS, ANSWER_TOKENS = 48, 192
TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers; questions are asked at 1 with a top-p of 0.95


def around_a_question(tokenizer, template):
    """(ids before a user's question, ids from its end to where the assistant speaks) by a ChatTemplate."""
    if not isinstance(template, ChatTemplate):
        raise ValueError(
            "--data self needs a model with a chat template of its own, by which it asks itself"
        )
    before, found, after = template.render(["\0"], to_be_answered=True).partition("\0")
    if not found:
        raise ValueError("the chat template leaves out what the user says")
    return tokenizer.encode_marked(before), tokenizer.encode_marked(after)


@torch.inference_mode()
def likeliest(target, tokens, labels, rows=16):
    """``labels`` (R, T) with what ``target`` finds likeliest in place of what was drawn: less noise to learn from.

    Rows go through in order of their lengths, so that little of it is padding.
    """
    found, ends = (
        labels.clone(),
        (labels != -100).long().mul(torch.arange(1, labels.shape[1] + 1)).amax(dim=1),
    )  # (R,)
    for part in ends.argsort().split(rows):
        end = ends[part].max().item()
        if end == 0:  # rows in which nothing is learnt
            continue
        own = labels[part, :end]
        learnt = own != -100
        hidden = target.run_layers(target.embed(tokens[part, :end].to(target.device)))[learnt]
        found[part, :end] = own.masked_scatter(
            learnt, target.logits(hidden).argmax(dim=-1).cpu().to(own.dtype)
        )
    return found


@torch.inference_mode()
def converse(model, before, after, batch, generator):
    """Sample ``batch`` questions and answers; yields (prompt, answer, temperature), lists of ids, of those that came to an end.

    All rows go on in step, each at its own place of a conversation, so nothing is padded: one that has asked is told what the
    template says next, token by token. Its answer ends with the same token as a question, or after ANSWER_TOKENS.
    """
    end, told = after[0], torch.tensor(after[1:], device=model.device)
    longest = min(
        len(before) + QUESTION_TOKENS + len(after) + ANSWER_TOKENS,
        model.config.max_position_embeddings,
    )
    temperatures = torch.tensor(TEMPERATURES, device=model.device).repeat(batch)[:batch]
    phase, since = (
        torch.full((batch,), ASKING, device=model.device),
        torch.zeros(batch, dtype=torch.long, device=model.device),
    )
    starts = torch.zeros_like(since)  # where the answers begin
    tokens = torch.tensor(before, device=model.device).repeat(batch, 1)  # (B, T)
    cache, new = model.new_cache(longest, batch=batch), tokens
    while tokens.shape[1] < longest and (phase != DONE).any():
        logits = model.logits(model.run_layers(model.embed(new), cache=cache)[:, -1])  # (B, V)
        choice = logits.argmax(dim=-1)
        for which, probs in ((phase == ASKING, lambda rows: warp(rows, 1.0, 0.95)),
                             *(((phase == ANSWERING) & (temperatures == t), lambda rows, t=t: warp(rows, t))
                               for t in TEMPERATURES if t > 0)):  # fmt: skip
            if which.any():
                choice[which] = torch.multinomial(probs(logits[which]), 1, generator=generator)[
                    :, 0
                ]
        is_told = phase == TOLD
        choice[is_told] = told[since[is_told]]
        ended = (choice == end) & ~is_told
        since += 1
        over = (phase == ASKING) & (since >= QUESTION_TOKENS) & ~ended  # no question
        phase[(phase == ANSWERING) & (ended | (since >= ANSWER_TOKENS)) | over] = DONE
        begins = is_told & (since == len(told))
        asked = (phase == ASKING) & ended
        starts[begins] = tokens.shape[1] + 1
        phase[begins], phase[asked] = ANSWERING, TOLD
        since[begins | asked] = 0
        new = choice[:, None]
        tokens = torch.cat((tokens, new), dim=1)
    for row, start, temperature in zip(tokens.tolist(), starts.tolist(), temperatures.tolist()):
        answer = row[start : start + ANSWER_TOKENS] if start else []
        answer = answer[: answer.index(end) + 1] if end in answer else answer
        if answer:
            yield row[:start], answer, temperature


class SelfText:
    """The conversations in ``file``, JSON lines after one that says whose they are: resumed by whoever brings the same model."""

    def __init__(self, file, model):
        self.file, self.records = file, []
        self.header = json.dumps({"model": checksum(model)}) + "\n"
        if file.is_file():
            whole = whole_lines(file)
            if whole and not whole.startswith(self.header):
                raise ValueError(
                    f"{file} was sampled from another model, or is none of these files; name another"
                )
            try:
                self.records = [json.loads(line) for line in whole.split("\n")[1:-1]]
            except ValueError:
                raise ValueError(f"{file} is damaged; name another") from None
            drop_half_line(file)

    @property
    def count(self):
        """Tokens of all answers."""
        return sum(len(record["a"]) for record in self.records)

    def add(self, conversations):
        records = [
            {"p": prompt, "a": answer, "T": temperature}
            for prompt, answer, temperature in conversations
        ]
        self.records += records
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(
                ("" if file.tell() else self.header)
                + "".join(json.dumps(record) + "\n" for record in records)
            )


def sample_to(file, model, tokenizer, template, wanted, seed, batch=96):
    """The SelfText in ``file``, with at least ``wanted`` tokens of answers: what is missing is sampled from ``model``."""
    text, (before, after) = SelfText(file, model), around_a_question(tokenizer, template)
    had, began = text.count, time.monotonic()
    while text.count < wanted:
        # Seeded by how much there is, so that a run that goes on does not say the same again.
        generator = torch.Generator(model.device).manual_seed(seed + text.count)
        text.add(converse(model, before, after, batch, generator))
        speed = (text.count - had) / (time.monotonic() - began)
        left = max(0, wanted - text.count) / max(speed, 1e-9) / 60
        print(f"{file.name}: {text.count} answer tokens of {wanted:.0f}, {speed:.0f} tokens/s, {left:.1f} min left",
              file=sys.stderr, flush=True)  # fmt: skip
    return text
