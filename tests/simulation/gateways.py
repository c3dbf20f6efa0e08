"""The gateway processes of a history: the real orchestrator, pools and attachments behind simulated streams."""

import asyncio
from contextlib import aclosing
from functools import partial

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.admission import Admission, Bounds
from gateway.attach import Dialect, make_hello
from gateway.orchestrator import Orchestrator
from gateway.window import LIGHT_TOKENS, window_of
from gateway.worker_pool import WorkerPool, WorkerState
from service.errors import ServiceError
from tests.fakes.places import answered
from tests.simulation.processes import Looped
from tests.simulation.scenario import KEY
from tests.simulation.streams import Channel

REQUESTS_MAX = 1000


class GatewayProcess(Looped):
    """prefills, decodes: names of the workers it attaches to."""

    def __init__(self, world, name, prefills, decodes, **pace):
        super().__init__(world, name, **pace)
        hello = make_hello(name, self.epoch)
        self.prefills = self._pool(prefills, pb.PrefillServiceAttachRequest, hello)
        self.decodes = self._pool(decodes, pb.DecodeServiceAttachRequest, hello)
        self.admission = Admission(
            Bounds(requests=REQUESTS_MAX),
            clock=self.clock,
            window=self._window,
            light_tokens=LIGHT_TOKENS,
        )
        self.orchestrator = Orchestrator(
            prefills=self.prefills,
            decodes=self.decodes,
            admission=self.admission,
            ticket_key=KEY,
            gateway_epoch=self.epoch,
            randomness=world.dice.randbytes,
            clock=self.clock,
            lease_ms=world.scenario.lease_ms,
        )
        self.spawn(self.prefills.run())
        self.spawn(self.decodes.run())

    def _window(self):
        return window_of(self.prefills.views(), self.decodes.views())

    def ready(self):
        return self.prefills.all_ready() and self.decodes.all_ready()

    def attached(self):
        """Records of the workers that it has a stream to."""
        workers = (*self.prefills, *self.decodes)
        return [record for record in workers if record.state is not WorkerState.CONNECTING]

    def submit(self, client):
        """Serve a client; its fate is written down there."""
        client.task = self.spawn(self._serve(client))
        client.task.add_done_callback(client.served)

    def cancel(self, client):
        client.task.cancel()
        self.loop_thread.wake()

    def left(self):
        """Requests that it still serves, as its own books have it."""
        workers = (*self.prefills.views(), *self.decodes.views())
        booked = {view.address: view.sequences for view in workers if view.sequences}
        return {**booked, "live": self.admission.live} if booked or self.admission.live else {}

    async def _serve(self, client):
        try:
            run = answered(self.admission, self.orchestrator, client.request(self.clock()), client.unread)
            async with aclosing(run) as batches:
                async for batch in batches:
                    client.take(batch)
                    if client.outcome is not None:
                        break
                    if client.wish.pause_s:
                        await asyncio.sleep(client.wish.pause_s)
        except ServiceError as error:
            client.end(type(error).__name__, error.message)

    def _pool(self, addresses, request, hello):
        dialect = Dialect(
            request=request,
            open_stream=lambda channel, requests, metadata: channel.attach(requests),
            open_channel=lambda address: Channel(
                self.world.streams, self, partial(self.world.alive, address)
            ),
        )
        return WorkerPool(
            addresses, dialect, hello, refusal=lambda welcome: None, on_change=self._workers_changed
        )

    def _workers_changed(self):
        self.orchestrator.workers_changed()
