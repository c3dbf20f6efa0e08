"""The gateway's end of a stream to a worker, over real gRPC: dialled again for ever, and cut when it makes no sense."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import PrefillServiceServicer
from gateway.attach import OUTBOX_MESSAGES_MAX, PREFILL, Attachment, make_hello
from service.reports import BadReport
from tests.fakes.rim_server import Gateway, listening, serving_rim


class Heard:
    """A listener: what it hears, in order."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def on_message(self, message):
        kind = message.WhichOneof("message")
        if kind == "ended" and message.ended.detail == "nonsense":
            raise BadReport("detail: nonsense")
        self.queue.put_nowait(kind)

    def on_broken(self, detail):
        self.queue.put_nowait(f"broken: {detail}")

    async def until(self, wanted):
        while (heard := await self.queue.get()) != wanted:
            pass
        return heard

    async def next(self, count):
        return [await self.queue.get() for _ in range(count)]


@asynccontextmanager
async def attached(address):
    heard = Heard()
    attachment = Attachment(address, PREFILL, make_hello("g", 5), heard)
    running = asyncio.create_task(attachment.run())
    try:
        yield attachment, heard
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_introduces_itself_and_passes_messages_both_ways(tmp_path):
    async with serving_rim(tmp_path) as served, attached(served.address) as (attachment, heard):
        assert await heard.next(3) == ["welcome", "load", "cache"]
        cancel = pb.Cancel(request_id="r", attempt=3)
        attachment.send(pb.PrefillServiceAttachRequest(cancel=cancel))
        assert await served.worker.calls.get() == ("cancel", "g/5", "r", 3)


async def test_it_dials_until_somebody_is_there_and_again_when_the_stream_breaks(tmp_path):
    async with attached(f"unix:{tmp_path}/rim.sock") as (_, heard):
        assert (await heard.queue.get()).startswith("broken: ")
        for _ in range(2):
            async with serving_rim(tmp_path):
                await heard.until("cache")
            assert (await heard.queue.get()).startswith("broken: ")


async def test_a_stream_that_the_worker_ends_is_broken_too(tmp_path):
    async with serving_rim(tmp_path) as served, attached(served.address) as (_, heard):
        await heard.next(3)
        usurper = await Gateway(served, gateway_epoch=5).attach()
        assert await heard.queue.get() == "broken: the worker ended the stream"
        assert await heard.next(3) == ["welcome", "load", "cache"]
        assert await usurper.end() == ([], grpc.StatusCode.OK)


async def test_what_was_sent_on_a_broken_stream_is_not_sent_on_the_next(tmp_path):
    async with serving_rim(tmp_path) as served, attached(served.address) as (attachment, heard):
        await heard.next(3)
        attachment.send(pb.PrefillServiceAttachRequest(cancel=pb.Cancel(request_id="r" * 200)))
        attachment.send(pb.PrefillServiceAttachRequest(cancel=pb.Cancel(request_id="lost")))
        assert (await heard.queue.get()).startswith("broken: INVALID_ARGUMENT")
        assert await served.worker.calls.get() == ("drop", "g/5")
        await heard.next(3)
        attachment.send(pb.PrefillServiceAttachRequest(cancel=pb.Cancel(request_id="new")))
        assert await served.worker.calls.get() == ("cancel", "g/5", "new", 0)


class Talker(PrefillServiceServicer):
    """Says what it is given and then neither reads nor ends. `streams` and `ended` count."""

    def __init__(self, *messages):
        self.messages = messages
        self.streams, self.ended = asyncio.Queue(), asyncio.Queue()

    async def Attach(self, request_iterator, context):
        self.streams.put_nowait(1)
        try:
            for message in self.messages:
                await context.write(message)
            await asyncio.Event().wait()
        finally:
            self.ended.put_nowait(1)


async def test_a_worker_that_talks_nonsense_is_cut_off_and_dialled_again(tmp_path):
    address = f"unix:{tmp_path}/t.sock"
    welcome = pb.PrefillServiceAttachResponse(welcome=pb.Welcome())
    nonsense = pb.PrefillServiceAttachResponse(ended=pb.Ended(detail="nonsense"))
    talker = Talker(welcome, nonsense, welcome)
    async with listening(address, talker), attached(address) as (_, heard):
        assert await heard.next(4) == ["welcome", "broken: detail: nonsense"] * 2
        await talker.ended.get()


async def test_a_worker_that_takes_nothing_is_cut_off_when_too_much_waits_for_it(tmp_path):
    address = f"unix:{tmp_path}/t.sock"
    talker = Talker(pb.PrefillServiceAttachResponse(welcome=pb.Welcome()))
    async with listening(address, talker), attached(address) as (attachment, heard):
        await heard.until("welcome")
        message = pb.PrefillServiceAttachRequest(cancel=pb.Cancel(request_id="r"))
        for _ in range(OUTBOX_MESSAGES_MAX + 2):
            attachment.send(message)
        assert (await heard.queue.get()).startswith("broken: ")
        await talker.ended.get()
        await heard.until("welcome")
