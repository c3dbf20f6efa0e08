"""What a model's files say about text: the tokenizer, the tokens with a meaning, the chat template.

`gguf_vocabulary` and `folder_vocabulary` fill it, `Tokenizer` is built from it. It holds values only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """backend: encodes with the special tokens that the model's convention adds. size: one more than the
    largest token id. special_tokens: "bos_token" and the like to their text, for the chat template.
    max_model_len: tokens, None where the files do not say."""

    backend: tokenizers.Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    max_model_len: int | None
