"""Lets the faults of a scenario happen: to single packets as the data network's script, to everything else when its
time has come. Counts what really happened: a fault that found nothing to hurt does not count.
"""

from collections import deque
from dataclasses import replace

import msgpack

from tests.simulation.faults import PACKET_KINDS, Kind

STREAM_NOTICE_S = 4.0
"""Within this time a gateway and a worker notice that the other is silent: keepalive and its timeout."""
DATA_NOTICE_S = 3.0
RESTART_S = 0.05
NOTICE_S = 0.002
"""When the other end's kernel is alive, it says so."""
RECORDED_MAX = 400


class Nemesis:
    def __init__(self, world):
        self._world = world
        self._packets = {}
        self._recorded = {True: deque(maxlen=RECORDED_MAX), False: deque(maxlen=RECORDED_MAX)}
        faults = world.scenario.faults
        self._records = any(fault.kind is Kind.REPLAY for fault in faults)
        for fault in faults:
            if fault.kind in PACKET_KINDS:
                self._packets.setdefault(fault.at, []).append(fault)
            else:
                world.agenda.at(fault.at, lambda fault=fault: self._happen(fault))
        self.over_at = max((fault.over_at() for fault in faults), default=0.0)

    def script(self, packet):
        """What arrives instead of a packet."""
        arriving = (packet,)
        for fault in self._packets.get(packet.number, ()):
            changed = tuple(copy for each in arriving for copy in self._hit(fault, each))
            if changed != arriving:
                self._world.counts[f"fault {fault.kind.value}"] += 1
            arriving = changed
        if self._records:
            payloads = tuple(bytes(payload) for payload in packet.payloads)
            self._recorded[packet.to_target].append((packet.header, payloads))
        return arriving

    def _hit(self, fault, packet):
        match fault.kind:
            case Kind.DROP:
                return ()
            case Kind.DUPLICATE:
                return (packet, replace(packet, late_s=fault.seconds))
            case Kind.REORDER:
                return (replace(packet, late_s=fault.seconds),)
            case Kind.TRUNCATE_HEADER:
                return (replace(packet, header=packet.header[: int(len(packet.header) * fault.share)]),)
            case Kind.FLIP_HEADER:
                return (replace(packet, header=_damaged(packet.header, fault.share)),)
            case Kind.REPLAY:
                return (packet, *self._older(packet, fault.share))
        if not packet.payloads:
            return (packet,)
        # The share picks one of the payloads, and then a place in it.
        number, share = divmod(len(packet.payloads) * fault.share, 1)
        hit = packet.payloads[int(number)]
        if fault.kind is Kind.TRUNCATE_PAYLOAD:
            changed = hit[: int(len(hit) * share)]
        else:
            assert fault.kind is Kind.FLIP_PAYLOAD
            changed = memoryview(_flipped(bytes(hit), share))
        payloads = list(packet.payloads)
        payloads[int(number)] = changed
        return (replace(packet, payloads=tuple(payloads)),)

    def _older(self, packet, share):
        recorded = self._recorded[packet.to_target]
        if recorded:
            # Mostly a recent one, whose transfer may still be going on.
            header, payloads = recorded[int(len(recorded) * (1 - share**3))]
            yield replace(packet, header=header, payloads=tuple(memoryview(payload) for payload in payloads))

    def _happen(self, fault):
        if self._do(fault):
            self._world.counts[f"fault {fault.kind.value}"] += 1

    def _do(self, fault):
        world = self._world
        match fault.kind:
            case Kind.STALL_DATA:
                world.network.stall(fault.who, fault.seconds)
            case Kind.SEVER_DATA:
                return world.network.sever(fault.who)
            case Kind.SLOW_STREAM:
                world.streams.slow(*fault.who, 0.1 + fault.share * 0.4, fault.seconds)
            case Kind.BREAK_STREAM:
                return self._break(fault)
            case Kind.KILL:
                return self._kill(fault)
            case Kind.FREEZE:
                return self._freeze(fault)
            case Kind.DRAIN:
                return self._drain(fault)
            case Kind.SLOW:
                return self._slow(fault)
            case Kind.CANCEL:
                return world.cancel(int(fault.who[0]))
        return True

    def _break(self, fault):
        streams = self._world.streams.between(*fault.who)
        for stream in streams:
            late_s = STREAM_NOTICE_S if fault.share < 0.3 else NOTICE_S
            first, second = (late_s, 0.0) if fault.share < 0.15 else (0.0, late_s)
            self._world.streams.cut(stream, first, second)
        return streams

    def _kill(self, fault):
        """Three in ten die with their machine, which sends no last word until it is back."""
        name = fault.who[0]
        comes_back = fault.share < 0.9
        silent = fault.share < 0.3
        if not self._world.alive(name):
            return False
        dark_s = fault.seconds + NOTICE_S if comes_back else STREAM_NOTICE_S
        self._world.kill(
            name,
            stream_notice_s=min(STREAM_NOTICE_S, dark_s) if silent else NOTICE_S,
            data_notice_s=min(DATA_NOTICE_S, dark_s) if silent else NOTICE_S,
        )
        if comes_back:
            self._world.agenda.after(fault.seconds, lambda: self._world.start(name))
        return True

    def _freeze(self, fault):
        process = self._world.alive(fault.who[0])
        if process is None or process.frozen:
            return False
        process.freeze()
        agenda = self._world.agenda
        agenda.after(fault.seconds, process.thaw)
        agenda.after(STREAM_NOTICE_S, lambda: self._give_up_streams(process))
        agenda.after(DATA_NOTICE_S, lambda: self._give_up_lines(process))
        return True

    def _drain(self, fault):
        """A rolling restart: drain, end, start again; whoever is not done in time is killed."""
        name = fault.who[0]
        process = self._world.alive(name)
        if process is None or process.rim.draining:
            return False

        def restart(_=None):
            if self._world.alive(name) is process:
                self._world.counts["drained"] += drained.done() and not drained.cancelled()
                self._world.kill(name, stream_notice_s=NOTICE_S, data_notice_s=NOTICE_S)
                self._world.agenda.after(RESTART_S, lambda: self._world.start(name))

        drained = process.spawn(process.rim.drain())
        drained.add_done_callback(lambda _: self._world.agenda.after(NOTICE_S, restart))
        self._world.agenda.after(fault.seconds, restart)
        return True

    def _give_up_streams(self, process):
        if process.frozen and process.alive:
            for stream in self._world.streams.of(process):
                self._world.streams.cut(stream, 0.0, 0.0)

    def _give_up_lines(self, process):
        if process.frozen and process.alive:
            self._world.network.abandon(process)

    def _slow(self, fault):
        process = self._world.alive(fault.who[0])
        if process is None:
            return False
        before, process.lag_s = process.lag_s, process.lag_s + 0.002 + 0.05 * fault.share
        self._world.agenda.after(fault.seconds, lambda: setattr(process, "lag_s", before))
        return True


def _damaged(header, share):
    """One bit of anything, or of one field of its own: those that decide are short."""
    if share < 0.3:
        return _flipped(header, share / 0.3)
    try:
        fields = msgpack.unpackb(header)
    except ValueError:
        return header  # another fault has hit it already
    place = (share - 0.3) / 0.7 * len(fields)
    number, share = int(place), place % 1
    if isinstance(fields[number], int):
        fields[number] ^= 1 << int(share * 5)
    elif isinstance(fields[number], bytes):
        fields[number] = _flipped(fields[number], share)
    return msgpack.packb(fields)


def _flipped(octets, share):
    bit = int(len(octets) * 8 * share)
    flipped = bytearray(octets)
    if flipped:
        flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
