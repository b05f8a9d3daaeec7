"""S2D on one page: a greedy chain, sorted exits with catch-up, caches. ``python -m s2d.onepage``"""

import time
from collections.abc import Iterator

import torch

from .model import Llama


class Exit:
    """The draft's layers from the ``previous`` exit to ``layer``, after which it may predict."""

    def __init__(self, draft: Llama, previous: "Exit | None", layer: int) -> None:
        self.draft, self.previous, self.layer = draft, previous, layer
        self.first = 0 if previous is None else previous.layer
        self.cache = draft.new_cache(self.first, layer)
        self.hidden = draft.embed(torch.tensor([[]], dtype=torch.long))  # (1, S, hidden), by token

    def predict(self, text: list[int]) -> tuple[int, float]:
        """The most probable token after ``text``, and its probability: the confidence."""
        self.catch_up(text)
        probs = self.draft.logits(self.hidden[0, -1]).softmax(dim=-1)  # (V,)
        return probs.argmax().item(), probs.max().item()

    def catch_up(self, text: list[int]) -> None:
        """Run the layers on the tokens of ``text`` that they have not read."""
        read = self.cache.length
        if self.previous is None:
            new = self.draft.embed(torch.tensor([text[read:]]))  # (1, T, hidden)
        else:  # the previous exit has just read the text
            new = self.previous.hidden[:, read:]
        new = self.draft.run_layers(new, self.first, self.layer, cache=self.cache)
        self.hidden = torch.cat((self.hidden[:, :read], new), dim=1)


@torch.inference_mode()
def generate(
    target: Llama,
    context: list[int],
    draft: Llama,
    exits: tuple[int, ...] = (2, 3),  # the numbers of layers after which the draft may predict
    thresholds: tuple[float, ...] = (0.6, 0.0),  # an exit that is more confident drafts the token
    draft_length: int = 12,  # the most tokens of a chain
    stop: float = 0.35,  # a chain ends when it is less probable than this
    max_new_tokens: int = 128,
) -> Iterator[list[int]]:
    """Yield the tokens of each step. Together they are the target's own text after ``context``."""
    eos = set(target.config.eos_token_ids)
    limit = len(context) + max_new_tokens
    cache, segments, tokens = target.new_cache(), [], []
    for layer in exits:
        segments.append(Exit(draft, segments[-1] if segments else None, layer))
    while len(context) < limit and eos.isdisjoint(tokens):
        # 1. Draft a chain: each token comes from the first exit that is confident enough.
        chain, prob = [], 1.0
        longest = min(draft_length, limit - len(context) - 1)
        while len(chain) < longest and prob >= stop and eos.isdisjoint(chain):
            for each, threshold in zip(segments, thresholds):
                token, confidence = each.predict(context + chain)
                if confidence > threshold:
                    break
            chain.append(token)
            prob *= confidence
        # 2. Run the target once, over all that it has not read: the context's end and the chain.
        new = target.embed(torch.tensor([(context + chain)[cache.length :]]))  # (1, T, hidden)
        hidden = target.run_layers(new, cache=cache)[0, -1 - len(chain) :]  # (N+1, hidden)
        # 3. Verify: the drafted tokens are right as long as they are the target's own.
        own = target.logits(hidden).argmax(dim=-1).tolist()  # own[i] follows i drafted tokens
        right = 0
        while chain[right : right + 1] == own[right : right + 1] and own[right] not in eos:
            right += 1
        # 4. Emit the tokens that are right, and the target's next one, which is free.
        tokens = own[: right + 1]
        yield tokens
        # 5. Roll back: all caches forget the wrong tokens. A later exit may have read less.
        for each in (cache, *(exit_.cache for exit_ in segments)):
            each.length = min(each.length, len(context) + right)
        context = context + tokens


if __name__ == "__main__":
    from . import Tokenizer, load_model

    target, draft = load_model("weights/mini-13b", "cpu"), load_model("weights/mini-draft", "cpu")
    tokenizer = Tokenizer("weights/mini-13b")
    prompt = tokenizer.encode_chat(["What is the capital of Tadastan?"])
    seconds, steps = {}, {}
    for length in (12, 0, 12, 0):  # 0 is plain decoding; the first two runs warm up
        began = time.perf_counter()
        steps[length] = list(generate(target, prompt, draft, draft_length=length))
        seconds[length] = time.perf_counter() - began
    text = sum(steps[12], [])
    assert text == sum(steps[0], []), "this is not the target's own text"
    rate, speed = len(text) / len(steps[12]), seconds[0] / seconds[12]
    print(tokenizer.decode(text))
    print(f"The target's own text: {rate:.1f} tokens per step, {speed:.1f} times as fast as alone.")
