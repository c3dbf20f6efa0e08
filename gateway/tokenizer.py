"""Text to token ids and back, for one model.

Validation, the text fold and the servicers call it. It knows no requests and no limits, and never holds text
back: what is certain in a stream is the text fold's business. Encoding releases the GIL; long texts belong on
another thread.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gateway.chat import ChatMessage, ChatTemplate
from service.pieces import Pieces
from service.read_vocabulary import read_vocabulary
from service.vocabulary import Vocabulary


def load_tokenizer(path: Path) -> "Tokenizer":
    """From a Hugging Face folder or a GGUF file. Raises ModelFilesError."""
    return Tokenizer(read_vocabulary(path))


class Tokenizer:
    """chat, chat_template: None for a model without a chat template. special_tokens: see Vocabulary.
    drops_first_space: see Pieces."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.eos_token_ids = vocabulary.eos_token_ids
        self.max_model_len = vocabulary.max_model_len
        self.special_tokens = vocabulary.special_tokens
        self.chat_template = vocabulary.chat_template
        self.chat = _template(vocabulary)
        self._backend = vocabulary.backend
        self._pieces = Pieces(vocabulary)
        self.drops_first_space = self._pieces.drops_first_space

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """add_special: with the special tokens that the model's convention adds; those in the text count as such
        anyway."""
        return self._ids(text, add_special=add_special)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        now: datetime,
        characters_max: int,
    ) -> list[int]:
        """Raises InvalidRequest as ChatTemplate.render. The model must have a chat template."""
        assert self.chat is not None, "only a model with a chat template is asked to chat"
        text = self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, now=now, characters_max=characters_max
        )
        return self._ids(text, add_special=False)

    def _ids(self, text: str, *, add_special: bool) -> list[int]:
        """As a batch of one: `encode` itself keeps the interpreter to itself all the while."""
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special)
        return list(encoded.ids)

    def decode(self, token_ids: Sequence[int], *, include_special: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids without a token give nothing."""
        return str(self._backend.decode(token_ids, skip_special_tokens=not include_special))

    def json(self) -> str:
        """All of it, as the file tokenizer.json has it. Lets no other thread run meanwhile."""
        return str(self._backend.to_str())

    def piece(self, token_id: int, *, include_special: bool = False) -> bytes:
        """What one token adds to a text: any bytes, also a part of a character."""
        if not include_special and token_id in self._pieces.special:
            return b""
        return self._pieces[token_id]


def _template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if vocabulary.chat_template is None:
        return None
    return ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)
