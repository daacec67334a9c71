"""Where a layer's cycles and bytes went."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.decode import ACTIVITY
from hw.delay import delay
from hw.formats.messages import LENGTH_BITS, Counter
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from hw.layouts import bits_for
from hw.primitives.replica import Replica

BITS = 40
"""Of a counter: at 200 MHz, cycles of an hour and a half."""
LEVEL_BITS = 8
MEMORY_COUNTERS = (Counter.MEMORY_BYTES, Counter.MEMORY_IDLE)
"""Zero where the board has no memory."""


class Counters(wiring.Component):
    """Count from ``start`` on while ``running``; :class:`hw.formats.messages.Counter` says what.

    Every cycle is one of active, back-pressured, starved and overhead; each is counted by itself.

    Members
    -------
    start, running : In
    activity : In, ``ACTIVITY``
    waiting : In, a down matrix waits for its input
    moved, idle : In, a beat of an answer came; none came though one was due
    requested : In, a request left; length : In, its bytes
    memory_moved, memory_idle : In, a beat from the board's memory came; none came though one was due
    levels : In, of the three queues watched
    counter : In; value : Out, ``LATENCY`` cycles later
    """

    LATENCY = 3

    start: Signal
    running: Signal
    activity: data.View
    waiting: Signal
    moved: Signal
    idle: Signal
    requested: Signal
    length: Signal
    memory_moved: Signal
    memory_idle: Signal
    levels: data.View
    counter: Signal
    value: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "start": In(1),
                "running": In(1),
                "activity": In(ACTIVITY),
                "waiting": In(1),
                "moved": In(1),
                "idle": In(1),
                "requested": In(1),
                "length": In(LENGTH_BITS),
                "memory_moved": In(1),
                "memory_idle": In(1),
                "levels": In(data.ArrayLayout(LEVEL_BITS, 3)),
                "counter": In(bits_for(len(Counter))),
                "value": Out(64),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        # Everything is looked at a cycle late, in step, so that nothing that is counted waits for its counter.
        activity, levels = (
            data.View(view.shape(), delay(m, view.as_value(), 1)) for view in (self.activity, self.levels)
        )
        waiting, moved, idle, requested, length = (
            delay(m, value, 1) for value in (self.waiting, self.moved, self.idle, self.requested, self.length)
        )
        memory_moved, memory_idle = (delay(m, value, 1) for value in (self.memory_moved, self.memory_idle))
        start, running = (delay(m, value, 1, control=True) for value in (self.start, self.running & ~self.start))
        overhead = ~(activity.active | activity.back_pressured | activity.starved)
        events = {
            Counter.ACTIVE: activity.active,
            Counter.BACK_PRESSURED: activity.back_pressured,
            Counter.STARVED: activity.starved,
            Counter.OVERHEAD: overhead,
            Counter.CYCLES: 1,
            Counter.USEFUL_BYTES: Mux(activity.useful_block, BLOCK_BYTES, 0),
            Counter.DRAINED_BYTES: Mux(activity.drained_block, BLOCK_BYTES, 0),
            Counter.MOVED_BYTES: Mux(moved, self.params.link_bytes, 0),
            Counter.REQUESTED_BYTES: Mux(requested, length, 0),
            Counter.REQUESTS: requested,
            Counter.LINK_IDLE: idle,
            Counter.DRAINING: activity.draining,
            Counter.WAITING: overhead & waiting & ~activity.draining,
            Counter.MEMORY_BYTES: Mux(memory_moved, self.params.link_bytes, 0),
            Counter.MEMORY_IDLE: memory_idle,
        }
        registers = []
        for counter in Counter:
            if counter in MEMORY_COUNTERS and not self.params.memory_bits:
                register = Const(0, BITS)
            elif counter in events:
                # In two halves, the upper a cycle late: short carry chains find a place near what they count.
                name = counter.name.lower()
                half = BITS // 2
                low = Signal(half + 1, name=f"{name}_low")  # and its carry
                high = Signal(BITS - half, name=f"{name}_high")
                register = Cat(low[:half], high)
                bits = LENGTH_BITS if counter == Counter.REQUESTED_BYTES else 8
                amount = Signal(bits, name=f"{name}_amount", reset_less=True)
                above = Signal(max(bits - half, 0), name=f"{name}_above")
                m.d.sync += amount.eq(Mux(running, events[counter], 0))
                with m.If(start):
                    m.d.sync += [low.eq(0), above.eq(0), high.eq(0)]
                with m.Else():
                    m.d.sync += [
                        low.eq(low[:half] + amount[:half]),
                        above.eq(amount[half:]),
                        high.eq(high + above + low[half]),
                    ]
            else:
                level = levels[counter - Counter.MATRICES_HELD]
                register = Signal(LEVEL_BITS, name=counter.name.lower())
                with m.If(start):
                    m.d.sync += register.eq(0)
                with m.Elif(level > register):
                    m.d.sync += register.eq(level)
            registers.append(register)
        # A choice of 18 in two steps, of 4 and of 5; who chooses among many bits is near them.
        fours = []
        for n in range(0, len(registers), 4):
            m.submodules[f"low{n}"] = low = Replica(2)
            m.d.comb += low.i.eq(self.counter[:2])
            fours.append(delay(m, Array(registers[n : n + 4])[low.o], 1))
        m.d.sync += self.value.eq(Array(fours)[delay(m, self.counter[2:], 2)])
        return m
