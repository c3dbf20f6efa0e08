"""What a request is said to cost is no less than what the gateway keeps of it, and no more than was thought before."""

import gc
import random
import tracemalloc
from contextlib import aclosing
from dataclasses import replace

import pytest

from crossdock.v1 import inference_pb2 as pb
from crossdock.worker.v1 import worker_pb2
from gateway import messages
from gateway.cost import Cost, cost_of, least_of, most_of
from gateway.generation import generate
from gateway.journal import Journal
from gateway.openai_answers import Answer
from gateway.openai_dialects import CompletionDialect
from gateway.openai_schema import completion_call
from gateway.request import ModelCard, TokenBatch
from service.reports import TokenEnd, decode
from tests.fakes.scripted_workers import make_request

TOKENS = 400
OPTIONS = {
    "plain": {},
    "logprobs": {"logprobs": 0},
    "alternatives": {"logprobs": 20},
    "choices": {"n": 4, "best_of": 4, "logprobs": 3},
    "the best": {"n": 1, "best_of": 4},
    "the best with alternatives": {"n": 2, "best_of": 4, "logprobs": 20},
    "biases": {"logit_bias": tuple((1000 + token, float(token)) for token in range(300)), "max_tokens": 1},
    "prompt": {"prompt": range(1000, 5000), "max_tokens": 1},
}


def asked(max_tokens=TOKENS, **options):
    return make_request(max_tokens=max_tokens, **options)


def reports(request, choice):
    """As they come from a worker, one for each message."""
    dice, width = random.Random(choice), request.needed_logprobs()
    for position in range(request.stop.max_tokens):
        outputs = worker_pb2.StepOutputs(
            request_ids=["r"],
            attempts=[1],
            choices=[choice],
            positions=[position],
            token_ids=[300 + position],
        )
        if width is not None:
            ids, logprobs = [dice.randrange(300, 49_000) for _ in range(width)], [dice.random()] * width
            outputs.details.add(
                index=0,
                logprob=-dice.random(),
                top_token_ids=ids,
                top_logprobs=[each * dice.random() for each in logprobs],
            )
        (report,) = decode(worker_pb2.DecodeServiceAttachResponse(outputs=outputs))
        last = position == request.stop.max_tokens - 1
        yield report._replace(end=TokenEnd.LENGTH) if last else report


class Workers:
    """A source that enters what workers say in a journal, as an attempt does. at_once: nobody read meanwhile."""

    def __init__(self, *, at_once=False):
        self._at_once = at_once
        self.journals = []

    async def run(self, request, unread):
        for choice in range(request.best_of):
            journal = Journal(request, "r", choice=choice)
            self.journals.append(journal)
            batches = [journal.take(report) for report in reports(request, choice)]
            if self._at_once:
                tokens = tuple(token for batch in batches for token in batch.tokens)
                yield TokenBatch(tokens=tokens, end=batches[-1].end, choice=choice)
            else:
                for batch in batches:
                    yield batch


async def kept_for_grpc(request, tokenizer):
    whole, workers = messages.Whole(request), Workers()
    async with aclosing(generate(request, workers, tokenizer)) as deltas:
        async for delta in deltas:
            whole.add(delta)
    return whole, workers


async def kept_for_http(request, tokenizer):
    call = completion_call({"prompt": "x", "logprobs": request.sampling.logprobs, "n": request.n}, "id")
    answer, workers = (
        Answer(call, [request], tokenizer, CompletionDialect(), id="id", created=0),
        Workers(),
    )
    async with aclosing(generate(request, workers, tokenizer)) as deltas:
        async for delta in deltas:
            answer.keep(0, delta)
    return answer, workers


async def kept_unread(request, tokenizer):
    workers = Workers(at_once=True)
    return [batch async for batch in workers.run(request, ())], workers


@pytest.fixture
def nothing_old():
    """What is there already is not looked through again each time that garbage is collected."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("keep", [kept_for_grpc, kept_for_http, kept_unread])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
async def test_no_more_bytes_are_kept_than_are_counted(keep, options, tokenizer, nothing_old):
    """Measured a few times: what comes to be shared by all meanwhile is there the next time."""
    sizes = [await kept_bytes(keep, options, tokenizer) for _ in range(3)]
    assert 0 < min(sizes) <= cost_of(asked(**options)).bytes + 16_384  # one of anything has its own


async def kept_bytes(keep, options, tokenizer):
    gc.collect()
    tracemalloc.start()
    try:
        request = asked(**{key: copied(value) for key, value in options.items()})
        kept = await keep(request, tokenizer)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept
    return size


def copied(value):
    """Of its own, as what is read from a message is."""
    return (
        tuple((int(str(token)), float(str(bias))) for token, bias in value)
        if isinstance(value, tuple)
        else value
    )


CARD = ModelCard(
    name="m", vocab_size=49_152, max_model_len=8192, eos_token_ids=(2,), digest="", capacity_tokens=None
)
SPECS = {
    "text": pb.GenerationSpec(text="word " * 300, sampling=pb.SamplingParams(max_tokens=7)),
    "no max": pb.GenerationSpec(text="word"),
    "ids": pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5] * 100), sampling=pb.SamplingParams(max_tokens=7)),
    "chat": pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi " * 99)])),
    "choices": pb.GenerationSpec(
        text="word", sampling=pb.SamplingParams(max_tokens=7, n=2, best_of=5, logit_bias={5: 1.0})
    ),
    "beams": pb.GenerationSpec(text="word", sampling=pb.SamplingParams(max_tokens=7, n=2, beam_width=6)),
    "logprobs": pb.GenerationSpec(
        text="word " * 9, output=pb.OutputOptions(logprobs=20, prompt_logprobs=4), truncate_prompt_tokens=3
    ),
    "prompt only": pb.GenerationSpec(
        text="word " * 9, output=pb.OutputOptions(prompt_logprobs=0), sampling=pb.SamplingParams(max_tokens=0)
    ),
    "guided": pb.GenerationSpec(text="word", guide=pb.Guide(regex="a+"), cache_salt="salt"),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
async def test_before_it_is_read_a_request_is_between_the_least_and_the_most(spec, frontend_over, scripted):
    frontend = frontend_over(scripted(), card=lambda: CARD, require_guide=anything)
    with frontend.hold("") as held:
        request = await frontend.accept(spec, None, held=held)
    least, exact, most = least_of(spec, CARD), cost_of(request), most_of(spec, CARD)
    for name in Cost.__slots__:
        assert getattr(exact, name) <= getattr(most, name), name
        if name != "bytes":
            assert getattr(least, name) <= getattr(exact, name), name


async def anything(guide, tenant):
    pass


def test_what_breaks_a_limit_counts_as_the_limit():
    wild = pb.GenerationSpec(
        text="x",
        sampling=pb.SamplingParams(n=2**31 - 1, best_of=-5, beam_width=2**31 - 1, max_tokens=2**31 - 1),
        output=pb.OutputOptions(logprobs=2**31 - 1, prompt_logprobs=-7),
    )
    least, most = least_of(wild, CARD), most_of(wild, CARD)
    assert most.branches == least.branches == 16
    assert most.tokens <= 17 * CARD.max_model_len and most.bytes < 1 << 30
    assert min(getattr(most, name) for name in Cost.__slots__) >= 0


def test_a_message_counts_beside_what_comes_of_it(admission_of):
    admission = admission_of()
    with admission.hold("", message_bytes=1000) as held:
        assert held.cost == Cost(requests=1, bytes=1000)
        cost = cost_of(asked())
        held.claim(cost)
        assert held.cost == replace(cost, bytes=cost.bytes + 1000)
        held.claim(cost, message_bytes=3)
        assert held.cost.bytes == cost.bytes + 3
    assert admission.live == 0
