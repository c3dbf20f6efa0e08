"""The life of a rank that follows: loads its share, joins the others, does as it is told until it is told to stop.

Called once, on the main thread of its process. Plans nothing, samples nothing, answers nobody but the rank that plans.
"""

import mmap
import os
from collections.abc import Callable

import zmq

from engine.collective import Share
from engine.errors import EngineError, RankLost
from engine.loading import Loaded, load
from engine.progress import SILENT
from engine.ranks import Follower, Work
from engine.runner import TransformerRunner
from engine.wishes import EngineWishes
from tensor_parallel import wire
from tensor_parallel.channel import Channel
from tensor_parallel.followers import EXIT_REFUSED, Meeting
from tensor_parallel.group import STALL_S, TorchCollective, patience_s


def follow(
    wishes: EngineWishes,
    share: Share,
    meeting: Meeting,
    threads: Callable[[], tuple[int, ...]],
    *,
    stall_s: float = STALL_S,
) -> int:
    """Returns what its process is to exit with: 0 when told to stop, EXIT_REFUSED when what it was refused for has been
    said. threads: kernel ids of those of this process that compute; asked when there are no others yet. Raises
    RankLost."""
    collective = TorchCollective(share, stall_s)
    loaded, refusal = None, ""
    try:
        loaded = load(wishes, collective, SILENT)
    except EngineError as error:
        refusal = str(error)
    computing = threads()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = Channel.dial(context, meeting.endpoint, patience_s(stall_s, wishes.device))
    if loaded is None:
        channel.say(wire.Refused(text=refusal))
    else:
        channel.say(wire.Loaded(free_bytes=loaded.room_bytes(wishes)))
        follower = _opened(channel, wishes, loaded, collective, meeting)
        channel.say(wire.Ready(threads=computing))
        _work(channel, follower)
    channel.close()
    context.term()
    return EXIT_REFUSED if loaded is None else 0


def _opened(
    channel: Channel, wishes: EngineWishes, loaded: Loaded, collective: TorchCollective, meeting: Meeting
) -> Follower:
    """Its cache over the memory of all, once the other side knows how large that is."""
    opened = channel.hear()
    if not isinstance(opened, wire.Open):
        raise RankLost(f"told {type(opened).__name__} before there was a cache")
    layout = loaded.layout(wishes, "")
    memory = mmap.mmap(meeting.memory, opened.num_blocks * layout.block_bytes())
    os.close(meeting.memory)
    cache = loaded.cache(layout, opened.num_blocks, memory)
    loaded.take_step_memory(wishes)
    channel.bounds = wire.Bounds(
        vocab_size=loaded.config.vocab_size,
        positions=loaded.model.max_model_len,
        num_blocks=opened.num_blocks,
        block_size=layout.block_size,
    )
    collective.join(meeting.rendezvous_path(), loaded.backend.device)
    return Follower(TransformerRunner(loaded.model, cache), cache)


def _work(channel: Channel, follower: Follower) -> None:
    while not isinstance(message := channel.hear(), wire.Stop):
        if not isinstance(message, Work):
            raise RankLost(f"told {type(message).__name__}, which is no work")
        if follower.do(message):
            channel.say(wire.Done())
