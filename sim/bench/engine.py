"""The whole engine under cocotb: messages in, requests and messages out, with stalls on every stream."""

import json
import os
import random
import struct

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.queue import Queue
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout

from hw.formats import messages
from hw.formats.messages import Counter, Layer, Message, Mode
from hw.formats.params import Params
from sim.engine_sim import start_messages
from sim.golden import activations
from sim.golden import layer as golden
from sim.golden.layer import Route
from sim.verilator import CLOCK_NS
from sim.workload import random_blocks

PARAMS = Params(**json.loads(os.environ["EMUFPGA_PARAMS"]))
REQUEST_BITS = messages.OFFSET_BITS, messages.LENGTH_BITS


class Host:
    """The other end of the three streams; ``p`` is the chance of no stall in a cycle."""

    def __init__(self, dut, p: float) -> None:
        self.dut, self.p = dut, p
        self.to_send: Queue[bytes] = Queue()
        self.requests: Queue[tuple[int, int]] = Queue()
        self.received: Queue[bytes] = Queue()

    async def start(self) -> None:
        """Start the clock if need be, reset, and serve the streams from then on."""
        dut = self.dut
        dut.rst.value = 1
        for name, value in (("i__valid", 0), ("i__payload", 0), ("o__ready", 0), ("o_request__ready", 0)):
            getattr(dut, name).value = value
        Clock(dut.clk, CLOCK_NS, unit="ns").start()
        await ClockCycles(dut.clk, 2)
        dut.rst.value = 0
        cocotb.start_soon(self._send())
        cocotb.start_soon(self._take("o_request", self._request))
        cocotb.start_soon(self._take("o", self._beat))
        self._message = b""

    async def _send(self) -> None:
        dut, width = self.dut, PARAMS.link_bytes
        while True:
            data = await self.to_send.get()
            for low in range(0, len(data), width):
                while random.random() > self.p:
                    await RisingEdge(dut.clk)
                beat = int.from_bytes(data[low : low + width], "little")
                dut.i__payload.value = beat | (low + width >= len(data)) << 8 * width
                dut.i__valid.value = 1
                await RisingEdge(dut.clk)
                while not dut.i__ready.value:
                    await RisingEdge(dut.clk)
                dut.i__valid.value = 0

    async def _take(self, name: str, use) -> None:
        payload, valid, ready = (getattr(self.dut, f"{name}__{part}") for part in ("payload", "valid", "ready"))
        waiting = None
        while True:
            now = random.random() <= self.p
            ready.value = int(now)
            await RisingEdge(self.dut.clk)
            if not valid.value:
                assert waiting is None, f"{name} withdrew a payload that waited"
                continue
            bits = int(payload.value)
            assert waiting is None or bits == waiting, f"{name} changed a payload that waited"
            waiting = None if now else bits
            if now:
                use(bits)

    def _request(self, bits: int) -> None:
        offset_bits, _ = REQUEST_BITS
        self.requests.put_nowait((bits & ((1 << offset_bits) - 1), bits >> offset_bits))

    def _beat(self, bits: int) -> None:
        width = PARAMS.link_bytes
        self._message += (bits & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        if bits >> 8 * width:
            self.received.put_nowait(self._message)
            self._message = b""


async def run(host: Host, layer: Layer, x: activations.Activations, routes: list[Route], read) -> np.ndarray:
    """One layer, as the messages say; checks requests, order of messages and counters."""
    for message in start_messages(layer, x, routes):
        host.to_send.put_nowait(message)
    batch = x.exponents.shape[0]
    for want in golden.requests(layer, routes):
        assert await host.requests.get() == want
        host.to_send.put_nowait(messages.weights(read(*want).tobytes()))
    y = np.zeros((batch, layer.width), np.int64)
    for token in range(batch):
        message = await host.received.get()
        assert struct.unpack_from("<BBH", message) == (Message.OUTPUT, token, layer.width)
        y[token] = np.frombuffer(message, "<i8", offset=messages.HEADER_BYTES)
    assert (await host.received.get())[0] == Message.DONE
    assert host.requests.empty()
    host.to_send.put_nowait(messages.bare(Message.READ_COUNTERS))
    message = await host.received.get()
    assert message[0] == Message.COUNTERS
    counts = np.frombuffer(message, "<u8", message[1], messages.HEADER_BYTES)
    assert counts[: Counter.CYCLES].sum() == counts[Counter.CYCLES]
    return y


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(p=[1.0, 0.6, 0.2], mode=[Mode.SELECTED, Mode.TAPE])
async def random_layer(dut, p, mode):
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    host = Host(dut, p)
    await host.start()
    greeting = await with_timeout(host.received.get(), 1000 * CLOCK_NS, "ns")
    assert greeting[:5] == bytes([Message.HELLO, messages.VERSION, PARAMS.link_bytes, PARAMS.tokens, PARAMS.max_batch])
    experts = 4
    size = 256 * 210
    blob = random_blocks(rng, 3 * experts * 256, d=3e-5).reshape(-1)
    layer = Layer(256, 256, experts, (0, experts * size, 2 * experts * size), mode)
    x = activations.quantize(rng.standard_t(2.5, (PARAMS.max_batch, 256)))
    routes = [
        Route(token, int(expert), int(rng.integers(65537)))
        for token in range(PARAMS.max_batch)
        for expert in rng.permutation([0, 2, 3])[: rng.integers(3)]
    ]

    def read(offset: int, length: int):
        return blob[offset:][:length]

    y, errors = golden.run(layer, read, x, routes)
    assert errors == 0
    np.testing.assert_array_equal(await run(host, layer, x, routes, read), y)
