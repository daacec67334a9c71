"""Processes for the simulator that feed and take beats, with stalls and the stream rules checked; frames to feed."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np
from amaranth.hdl import Value
from amaranth.sim import Simulator

from hw.formats import frames
from hw.formats.frames import WORD_BYTES, Flag, Header, Type

Process = Callable[[Any], Coroutine[Any, Any, None]]


def simulate(dut: Any, *processes: Process, background: Iterable[Process] = (), limit: int = 20000) -> None:
    """Run until all ``processes`` are done; TimeoutError after ``limit`` cycles."""

    async def watch(ctx) -> None:
        for _ in range(limit):
            await ctx.tick()
        raise TimeoutError(f"not done after {limit} cycles")

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    for process in processes:
        sim.add_testbench(process)
    for process in (watch, *background):
        sim.add_testbench(process, background=True)
    sim.run()


async def give(ctx, port, beats: Iterable[Any], *, rng: np.random.Generator, p: float = 1.0) -> None:
    """Offer all ``beats``, each in a cycle with chance ``p``."""
    for beat in beats:
        while rng.random() >= p:
            await ctx.tick()
        ctx.set(port.payload, beat)
        ctx.set(port.valid, 1)
        await ctx.tick().until(port.ready)
        ctx.set(port.valid, 0)


def beats_of(data: bytes, width: int) -> list[list[int]]:
    """Bytes as beats of ``width``, zeros behind."""
    padded = data + bytes(-len(data) % width)
    return [list(padded[low : low + width]) for low in range(0, len(padded), width)]


def message_beats(message: bytes, width: int) -> list[dict]:
    """A message as beats, the last one marked."""
    beats = beats_of(message, width)
    return [{"data": beat, "last": n == len(beats) - 1} for n, beat in enumerate(beats)]


class Taken:
    """What a stream of link beats gave: ``runs`` that ended with ``last``, ``rest`` of one that did not, ``beats``."""

    def __init__(self) -> None:
        self.runs: list[bytes] = []
        self.rest = b""
        self.beats = 0
        self.cycles: list[int] = []
        """In which each run ended."""

    def process(self, port, *, rng: np.random.Generator, p: float = 1.0, until: Value | None = None) -> Process:
        """Take beats for ever. In a cycle in which ``until`` is high, all that came is forgotten; a beat may vanish."""

        async def take(ctx) -> None:
            waiting = None
            cycle = 0
            cut = Value.cast(0 if until is None else until)
            width = len(port.p.data)
            while True:
                ready = bool(rng.random() < p)
                ctx.set(port.ready, ready)
                _, _, valid, data, last, gone = await ctx.tick().sample(
                    port.valid, Value.cast(port.p.data), port.p.last, cut
                )
                cycle += 1
                if waiting is not None:
                    assert valid, "a beat that waited was withdrawn"
                    assert (data, last) == waiting, "a beat that waited has changed"
                waiting = (data, last) if valid and not ready else None
                if gone:
                    waiting = None
                    self.runs.clear()
                    self.rest = b""
                    continue
                if valid and ready:
                    self.beats += 1
                    self.rest += data.to_bytes(width, "little")
                    if last:
                        self.runs.append(self.rest)
                        self.cycles.append(cycle)
                        self.rest = b""

        return take


def message_frame(sequence: int, payload: bytes, *, last: bool = True, ack: int = 0, flags: int = 0) -> bytes:
    """A ``MESSAGE`` frame."""
    return frames.frame(Header(Type.MESSAGE, Flag(flags | (Flag.LAST if last else 0)), 0, sequence, ack), payload)


def parse(data: bytes) -> tuple[Header, bytes]:
    """A frame that is intact and nothing else."""
    header = frames.unpack_header(data[:WORD_BYTES])
    assert header is not None, f"no header: {data[:WORD_BYTES].hex()}"
    assert len(data) == header.frame_bytes
    payload = data[WORD_BYTES:-WORD_BYTES]
    if header.words:
        assert frames.trailer(data, payload) == data[-WORD_BYTES:]
    return header, payload[: header.payload_bytes]
