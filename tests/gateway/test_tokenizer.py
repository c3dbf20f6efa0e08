"""The tokenizer against the golden prompts, the library's own decoding, transformers, and broken files."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway.chat import ChatMessage
from gateway.tokenizer import load_tokenizer
from service.gguf_metadata import read_metadata
from service.gguf_vocabulary import read_gguf
from service.model_source import ModelFilesError
from tests.fakes.gguf_vocabularies import BYTES, write_gguf

TODAY = datetime(2030, 1, 2, tzinfo=UTC)
TRICKY = [
    "",
    " ",
    "   leading and   inner   spaces  ",
    "\n\n\ttabs\r\nand lines\n",
    "don't we'll I'VE 'tis",
    "12345 3.14159 1,000,000 ١٢٣",
    "東京は日本の首都です。",
    "Zażółć gęślą jaźń; naïve café",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "<|im_start",
    "x<|im_end|>y",
    "\x00\x01\x7f\x80",
    "for(i=0;i<n;++i){a[i]^=b<<3;}",
]


def test_golden_prompts_have_their_token_ids(tokenizer, golden):
    for case in golden:
        if case["kind"] == "text":
            ids = tokenizer.encode(case["prompt"])
        else:
            messages = [ChatMessage(**message) for message in case["messages"]]
            ids = tokenizer.encode_chat(
                messages, add_generation_prompt=True, now=TODAY, characters_max=10_000
            )
        assert ids == case["prompt_ids"]


def test_golden_outputs_have_their_text(tokenizer, golden):
    for case in golden:
        assert tokenizer.decode(case["output_ids"], include_special=True) == case["output_text"]


def test_facts_of_the_model_come_from_its_file(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.max_model_len, tokenizer.eos_token_ids) == (49152, 8192, (2,))


def test_special_tokens_are_read_whole_and_hidden_unless_asked_for(tokenizer):
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, include_special=True) == "<|im_start|>hi<|im_end|>"


@given(
    st.text(
        alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF)
    )
)
def test_decoding_what_was_encoded_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 49151), max_size=12), st.booleans())
def test_pieces_joined_are_what_the_library_decodes(tokenizer, ids, include_special):
    joined = b"".join(tokenizer.piece(token_id, include_special=include_special) for token_id in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, include_special=include_special)


def test_ids_without_a_token_give_no_text(tokenizer):
    assert tokenizer.decode([49152, 10**6]) == "" and tokenizer.piece(10**6) == b""


def test_a_hugging_face_folder_gives_the_same_tokenizer(tokenizer, hugging_face_folder):
    loaded = load_tokenizer(hugging_face_folder)
    for text in TRICKY:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (49152, 8192, (2, 0))
    message = ChatMessage(role="user", content="hi")
    ids = loaded.encode_chat([message], add_generation_prompt=False, now=TODAY, characters_max=100)
    assert loaded.decode(ids, include_special=True) == "<|im_end|>user:hi"


def test_a_hugging_face_folder_agrees_with_transformers(hugging_face_folder):
    loaded = load_tokenizer(hugging_face_folder)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(hugging_face_folder / "tokenizer.json"))
    for text in TRICKY:
        ids = loaded.encode(text)
        assert ids == reference(text)["input_ids"]
        assert loaded.decode(ids, include_special=True) == reference.decode(ids)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["1", "2", "3", "4", "a", "'", "S"]),
        ("gpt-2", ["12", "3", "4", "a", "'", "S"]),
        ("default", ["12", "3", "4", "a", "'", "S"]),
        ("llama-bpe", ["12", "3", "4", "a", "'S"]),
        ("qwen2", ["1", "2", "3", "4", "a", "'S"]),
    ],
)
def test_each_pre_tokenizer_splits_by_its_own_rule(tmp_path, pre, words):
    """The merge of 1 and 2 reaches over what is split; 'S is one word where contractions have no case."""
    tokens = [*BYTES, "12", "'S"]
    path = write_gguf(tmp_path / "m.gguf", family="gpt2", pre=pre, tokens=tokens, merges=["1 2", "' S"])
    loaded = load_tokenizer(path)
    assert [loaded.decode([token_id]) for token_id in loaded.encode("1234a'S")] == words


def test_a_start_token_is_added_where_the_file_says_so(tmp_path):
    tokens = [*BYTES, "12", "<s>"]
    kinds = [1] * (len(BYTES) + 1) + [3]
    given = {"family": "gpt2", "pre": "gpt-2", "tokens": tokens, "kinds": kinds, "merges": ["1 2"]}
    start = len(tokens) - 1
    for flag, expected in ((True, [start]), (False, [])):
        path = write_gguf(tmp_path / f"{flag}.gguf", **given, bos_token_id=start, add_bos_token=flag)
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("") == expected
        assert tokenizer.encode("", add_special=False) == []


def test_scored_pieces_are_merged_best_first(scored):
    ids = scored.encode("hello hello")
    assert [scored.piece(token_id, include_special=True) for token_id in ids] == [
        b"<s>",
        b" hello",
        b" hello",
    ]
    assert scored.decode(ids) == "hello hello"


def test_characters_without_a_piece_fall_back_to_bytes(scored):
    ids = scored.encode("he€")
    assert [scored.piece(token_id) for token_id in ids] == [b"", b" ", b"he", b"\xe2", b"\x82", b"\xac"]
    assert scored.decode(ids) == "he€"


def test_unknown_kinds_of_vocabulary_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", family="rwkv", tokens=BYTES)
    with pytest.raises(ModelFilesError, match="rwkv"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "b.gguf", family="gpt2", pre="tekken", tokens=BYTES, merges=["a b"])
    with pytest.raises(ModelFilesError, match="tekken"):
        load_tokenizer(path)


def test_merges_outside_the_vocabulary_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", family="gpt2", pre="gpt-2", tokens=BYTES, merges=["a b"])
    with pytest.raises(ModelFilesError, match="does not fit together"):
        load_tokenizer(path)


def test_a_header_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", family="gpt2", pre="gpt-2", tokens=BYTES, merges=["a b"])
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(content) - 16, 7):
        cut.write_bytes(content[:size])
        with pytest.raises(ModelFilesError, match=r"cut\.gguf"):
            read_metadata(cut)


@pytest.mark.parametrize(
    "content",
    [
        b"GGML" + bytes(100),
        b"GGUF" + (9).to_bytes(4, "little") + bytes(100),
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**60).to_bytes(8, "little") + bytes(64),
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + (2**62).to_bytes(8, "little") + bytes(64),
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"k" + b"\x63\0\0\0" + bytes(64),
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"k\t\0\0\0\4\0\0\0" + b"\xff" * 8,
    ],
    ids=["magic", "version", "key count", "string length", "value type", "array length"],
)
def test_lies_in_a_header_are_refused_before_anything_is_allocated_for_them(tmp_path, content):
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"lie\.gguf"):
        read_metadata(path)


def test_missing_and_broken_folders_are_refused(tmp_path):
    with pytest.raises(ModelFilesError, match="no such"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFilesError, match="not a usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def hugging_face_folder(model_file, tmp_path_factory):
    """The default model's tokenizer as a checkpoint folder would hold it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    read_gguf(model_file).backend.save(str(folder / "tokenizer.json"))
    about = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": [
            {
                "name": "default",
                "template": "{{ eos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}",
            }
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder
