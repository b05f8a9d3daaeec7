"""Text <-> token ids with SentencePiece, and the chat templates. Knows nothing about tensors."""

import json
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from .weights.config import read_json

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class Tokenizer:
    """A Llama tokenizer.

    Raises FileNotFoundError if ``path`` is not there and ValueError if it is not a SentencePiece model.
    """

    def __init__(self, path):
        if not Path(path).is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; expected SentencePiece's tokenizer.model")
        self.pieces = SentencePieceProcessor()
        try:  # not by the constructor, which takes an empty file for none at all
            self.pieces.load_from_serialized_proto(Path(path).read_bytes())
        except RuntimeError:
            raise ValueError(f"{path} is not a SentencePiece model; download it again") from None
        self.bos_id, self.eos_id = self.pieces.bos_id(), self.pieces.eos_id()
        self.vocab_size = self.pieces.vocab_size()

    def encode(self, text):
        """Text -> ids, BOS first. Raises ValueError for text that UTF-8 cannot write (half of a surrogate pair)."""
        return [self.bos_id] + self._pieces(text)

    def _pieces(self, text):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is no Unicode character; is it UTF-8?") from None
        return self.pieces.encode(text)

    def decode(self, ids):
        """Ids -> text; control tokens, and ids that only a padded vocabulary has, leave none; a half character is U+FFFD."""
        return self.pieces.decode([token for token in ids if token < self.vocab_size])

    def encode_chat(self, messages, template="vicuna"):
        """A dialogue -> the ids after which the assistant speaks.

        ``messages`` are texts, user and assistant in turn, the user first and last. ``template`` is "vicuna" (v1.1 and
        later) or "llama-2" (Llama-2-chat, without a system message). Each round is encoded on its own, as both models
        were trained: SentencePiece puts its space in front of every round.
        """
        if len(messages) % 2 == 0:
            raise ValueError(f"a dialogue ends with the user's message; got {len(messages)} messages")
        if template not in ("vicuna", "llama-2"):
            raise ValueError(f"unknown chat template {template!r}; expected 'vicuna' or 'llama-2'")
        return [token for prompt, answer in self.rounds(messages, template) for token in (*prompt, *answer)]

    def rounds(self, messages, template="vicuna"):
        """Yield (ids of the prompt, ids of the answer with its EOS) of each round; an answer still to come is empty."""
        for turn, user in enumerate(messages[0::2]):
            answer = messages[2 * turn + 1] if 2 * turn + 1 < len(messages) else None
            if template == "llama-2":
                start, prompt = [self.bos_id], f"[INST] {user.strip()} [/INST]"
                whole = f"{prompt} {(answer or '').strip()} "
            else:
                start = [self.bos_id] if turn == 0 else []
                prompt = f"{VICUNA_SYSTEM} USER: {user} ASSISTANT:" if turn == 0 else f"USER: {user} ASSISTANT:"
                whole = f"{prompt} {answer}"
            ids = self._pieces(prompt)
            # An answer begins with a space, so no piece reaches from the prompt into it.
            yield start + ids, [] if answer is None else self._pieces(whole)[len(ids) :] + [self.eos_id]


class TextStream:
    """Turns tokens that arrive in groups into text that can be printed at once.

    A byte piece may be half a character, so text is held back while it ends in U+FFFD.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids, self.shown = [], 0

    def push(self, ids):
        """Take new ids; return the text that has become certain."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        return self._rest(text)

    def finish(self):
        """The text still held back, now that no more tokens come."""
        return self._rest(self.tokenizer.decode(self.ids))

    def _rest(self, text):
        rest, self.shown = text[self.shown :], len(text)
        return rest


def chat_template(folder):
    """Which template a model folder was trained with: "llama-2" if its name or its tokenizer_config.json says so."""
    folder = Path(folder)
    config = folder / "tokenizer_config.json"
    bracketed = config.is_file() and "[INST]" in json.dumps(read_json(config).get("chat_template"))
    return "llama-2" if bracketed or "llama-2" in folder.name.lower() else "vicuna"
