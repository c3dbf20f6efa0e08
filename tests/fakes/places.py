"""Asking for answers as the frontend does: for what holds a place."""

from contextlib import aclosing, asynccontextmanager, contextmanager

from gateway.cost import cost_of


@contextmanager
def placed(admission, request):
    with admission.hold(request.tenant) as held:
        held.claim(cost_of(request))
        yield held


@asynccontextmanager
async def entered(admission, request):
    """A place in the bounds, and then at the workers."""
    with placed(admission, request):
        async with admission.enter(request) as place:
            yield place


async def answered(admission, orchestrator, request, unread=frozenset()):
    """Batches of tokens."""
    with placed(admission, request):
        async with aclosing(orchestrator.run(request, unread)) as batches:
            async for batch in batches:
                yield batch
