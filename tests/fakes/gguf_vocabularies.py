"""GGUF files that hold a vocabulary and nothing else."""

import gguf

BYTES = [chr(byte) for byte in range(0x21, 0x7F)] + [chr(code) for code in range(0x100, 0x144)]
"""The bytes that are tokens of a byte-level vocabulary, in its alphabet."""


def write_gguf(path, *, family, pre=None, tokens, merges=None, kinds=None, scores=None, **keys):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(family)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [1] * len(tokens))
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_scored(path):
    """A SentencePiece-like vocabulary: unknown, start, end, the bytes, and pieces with scores."""
    pieces = {"▁": -9.0, "h": -9.0, "e": -9.0, "l": -9.0, "o": -9.0, "he": -1.0, "ll": -2.0}
    pieces |= {"hell": -3.0, "hello": -4.0, "▁hello": -5.0, "el": -8.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + list(pieces.values())
    return write_gguf(
        path,
        family="llama",
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
