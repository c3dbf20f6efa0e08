"""The served model's tokenizer for routers that ask the engine for it: a zip with the files of a Hugging Face folder.

`vllm_engine` sends it. It is made of what the model's files said, of whichever kind they are: no file is opened here,
and no path is told.
"""

from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import orjson
from smg_grpc_proto.generated import common_pb2

from gateway.tokenizer import Tokenizer

CHUNK_BYTES = 64 << 10


def bundle(tokenizer: Tokenizer) -> bytes:
    """The same bytes in every gateway. Takes tens of milliseconds, in part without letting other threads run."""
    about = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    files = {
        "tokenizer.json": tokenizer.json().encode(),
        "tokenizer_config.json": orjson.dumps(about | {"model_max_length": tokenizer.max_model_len}),
        "generation_config.json": orjson.dumps({"eos_token_id": tokenizer.eos_token_ids}),
    }
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as folder:
        for name, content in files.items():
            folder.writestr(ZipInfo(name), content, ZIP_DEFLATED)
    return packed.getvalue()


def chunks(packed: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """As it travels. The last one has the digest of the whole."""
    for first in range(0, len(packed), CHUNK_BYTES):
        last = first + CHUNK_BYTES >= len(packed)
        yield common_pb2.GetTokenizerChunk(
            data=packed[first : first + CHUNK_BYTES], sha256=sha256(packed).hexdigest() if last else ""
        )
