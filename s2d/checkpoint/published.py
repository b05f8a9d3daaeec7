"""Published tokenizers and their chat templates, by the package ``transformers``."""

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from .chat import Message

# What every template is given; these are no options.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")


class PublishedTokenizer:
    """What ``AutoTokenizer`` makes of a folder; attributes as of SentencePieceModel."""

    def __init__(self, folder: Path) -> None:
        # Nothing is looked up on the hub, and code that comes with a folder is never run.
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self.eos = self.tokenizer.eos_token or ""
        self.chat_template = self.tokenizer.chat_template
        added = self.tokenizer.added_tokens_decoder
        self.special = {
            each: str(token) for each, token in added.items() if not self.decode([each])
        }

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos, verbose=False)

    def decode(self, ids: list[int]) -> str:
        # Without the clean-up, which takes away spaces, a text does not change when it grows.
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def render(self, dialogue: list[Message], **options: Any) -> str:
        """A dialogue by the folder's own template; ValueError if the template refuses it."""
        try:
            template = self.tokenizer.get_chat_template()
            for name in options:
                if name in GIVEN or not re.search(rf"\b{re.escape(name)}\b", template):
                    raise ValueError(f"it has no option {name!r}")
            return self.tokenizer.apply_chat_template(
                dialogue,
                tokenize=False,
                add_generation_prompt=dialogue[-1]["role"] != "assistant",
                **options,
            )
        except Exception as error:  # a template is a program: anything can go wrong in it
            folder = self.tokenizer.name_or_path
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template of {folder} fails: {reason}") from None
