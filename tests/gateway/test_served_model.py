"""Who may serve beside whom, and what is known of the model."""

from types import SimpleNamespace

import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.attach import DECODE
from gateway.served_model import LENGTH_UNKNOWN, ServedModel
from tests.fakes.scripted_workers import ScriptedWorker, make_pool, make_welcome


def fields(**changes):
    values = {"model": "0123456789abcdef-and-more", "dtype": "float32", "block_size": "4", **changes}
    return [pb.LayoutField(name=name, value=value) for name, value in values.items()]


def serving(*addresses, max_model_len=None, vocab_size=100):
    tokenizer = SimpleNamespace(vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=(2,))
    model = ServedModel("m", tokenizer, lambda: pool)
    pool = make_pool(DECODE, addresses, refusal=model.refusal)
    return model, [ScriptedWorker(record, DECODE) for record in pool]


def test_before_any_worker_the_card_is_what_the_files_say():
    model, _ = serving()
    card = model.card()
    assert (card.name, card.vocab_size, card.eos_token_ids) == ("m", 100, (2,))
    assert (card.max_model_len, card.capacity_tokens, card.digest) == (LENGTH_UNKNOWN, None, "")
    assert serving(max_model_len=77)[0].card().max_model_len == 77


def test_the_card_promises_what_every_ready_worker_can_hold():
    model, (big, small) = serving("a", "b", max_model_len=300)
    big.join(max_model_len=400, total_blocks=100)
    assert (model.card().max_model_len, model.card().capacity_tokens) == (300, 400)
    assert model.card().digest == "digest"
    small.join(max_model_len=200, total_blocks=20)
    assert (model.card().max_model_len, model.card().capacity_tokens) == (200, 80)
    assert model.card().tokens_max() == 80
    small.leave()
    assert (model.card().max_model_len, model.card().capacity_tokens) == (300, 400)


def test_one_that_differs_from_the_first_is_refused_by_the_names_of_what_differs():
    model, _ = serving()
    assert model.refusal(make_welcome("a", layout_fields=fields())) is None
    assert model.refusal(make_welcome("b", layout_fields=fields())) is None
    odd = fields(dtype="bfloat16", model="f" * 40, extra="x")
    refusal = model.refusal(make_welcome("c", layout_fingerprint=b"\1" * 32, layout_fields=odd))
    assert refusal == (
        f"model: {'f' * 40}, served here is 0123456789abcdef-and-more; "
        "dtype: bfloat16, served here is float32; extra: x, served here is nothing"
    )
    fewer = [field for field in fields() if field.name != "dtype"]
    refusal = model.refusal(make_welcome("d", layout_fingerprint=b"\2" * 32, layout_fields=fewer))
    assert refusal == "dtype: nothing, served here is float32"
    assert model.refusal(make_welcome("a", layout_fields=fields())) is None


def test_a_long_value_is_cut():
    model, _ = serving()
    model.refusal(make_welcome("a", layout_fields=fields()))
    odd = fields(model="f" * 200)
    refusal = model.refusal(make_welcome("b", layout_fingerprint=b"\1" * 32, layout_fields=odd))
    assert refusal.startswith(f"model: {'f' * 80}..., served here is ")


def test_values_that_begin_alike_are_shown_where_they_differ():
    model, _ = serving()
    model.refusal(make_welcome("a", layout_fields=fields(model="f" * 200 + " is one")))
    odd = fields(model="f" * 200 + " was another")
    refusal = model.refusal(make_welcome("b", layout_fingerprint=b"\1" * 32, layout_fields=odd))
    assert refusal == f"model: ...{'f' * 19} was another, served here is ...{'f' * 19} is one"


def test_a_worker_that_has_another_ticket_key_is_refused():
    model, _ = serving()
    assert "ticket_key" in model.refusal(make_welcome("a", ticket_key_check=b"other"))
    assert model.refusal(make_welcome("b")) is None


def test_another_fingerprint_is_refused_even_when_it_names_no_difference():
    model, _ = serving()
    model.refusal(make_welcome("a"))
    assert model.refusal(make_welcome("b", layout_fingerprint=b"\1" * 32)) == "layout_fingerprint: differs"


def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused_and_sets_no_example():
    model, _ = serving(vocab_size=101)
    assert "vocab_size" in model.refusal(make_welcome("a", layout_fingerprint=b"\1" * 32))
    assert model.refusal(make_welcome("b", vocab_size=101)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 1),
        ("worker_id", ""),
        ("worker_id", "é" * 65),
        ("layout_fingerprint", b""),
        ("layout_fingerprint", bytes(33)),
        ("block_size", 0),
        ("total_blocks", 0),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
    ],
)
def test_one_that_introduces_itself_with_what_cannot_be_is_refused_by_field(field, value):
    model, _ = serving()
    assert field in model.refusal(make_welcome(**{"worker_id": "a", field: value}))
    assert model.refusal(make_welcome("b")) is None
