"""An expert through da4ml: frozen weights become adders (distributed arithmetic), a vector goes in every cycle.

da4ml writes Verilog for any synthesis, so this is the one usual way whose result can be placed here. Every value on the
way has a type of its own: the activation is a table, the product of the two branches a multiplier.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.hls.csim import HlsError
from sim.hls.expert import MATRICES, Expert
from sim.verilator import tools
from sim.workload import silu

TOP = "expert"
TABLE_BITS = 8
"""Of the activation's argument: a table of 256 entries for each row."""


@dataclass(frozen=True)
class Format:
    """Signed fixed point: ``integer`` bits beside the sign, ``fraction`` bits behind the point."""

    integer: int
    fraction: int

    @classmethod
    def of(cls, bits: int, values: NDArray[np.float64]) -> "Format":
        """So many bits in all, as many of them behind the point as ``values`` leave."""
        peak = float(np.abs(values).max())
        integer = 0 if peak == 0 else math.floor(math.log2(peak)) + 1
        return cls(integer, bits - 1 - integer)

    def round(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Half to even, clipped."""
        limit = 2.0 ** (self.integer + self.fraction)
        return np.clip(np.rint(np.ldexp(values, self.fraction)), -limit, limit - 1) * 2.0**-self.fraction


@dataclass(frozen=True)
class Adders:
    """An expert as da4ml sees it.

    Attributes
    ----------
    logic
        da4ml's logic without registers, with an interpreter of its own.
    model
        Its Verilog.
    x
        ``(tokens, size)``: the vectors rounded to the input's format.
    formats
        Of the input, weights and results, by name.
    """

    logic: Any
    model: Any
    x: NDArray[np.float64]
    formats: dict[str, Format]

    @property
    def stages(self) -> int:
        """Registers on the way from a vector to its result, one vector a cycle."""
        return len(self.model._pipe.solutions)


def trace(expert: Expert, folder: Path, *, bits: int, depth: int) -> Adders:
    """Give da4ml the expert with weights and vectors of so many bits; a register after at most ``depth`` adders.

    The Verilog goes to ``folder``. HlsError where da4ml is not installed.
    """
    try:
        from da4ml.codegen import VerilogModel  # pyright: ignore[reportMissingImports] an extra of its own
        from da4ml.trace import (  # pyright: ignore[reportMissingImports] an extra of its own
            FixedVariableArrayInput,
            HWConfig,
            comb_trace,
        )
    except ImportError as error:
        raise HlsError(f"{error.name} is not installed: pip install 'emufpga[hls4ml]'") from None

    steps = expert.steps()
    formats = {name: Format.of(bits, steps[name]) for name in ("x", "up", "silu", "hidden")}
    formats["gate"] = Format.of(TABLE_BITS, steps["gate"])
    weights = {}
    for name in MATRICES:
        formats[f"{name} weight"] = Format.of(bits, getattr(expert, name))
        weights[name] = formats[f"{name} weight"].round(getattr(expert, name))

    def rounded(value, name: str):
        to = formats[name]
        return value.quantize(1, to.integer, to.fraction, overflow_mode="SAT", round_mode="RND")

    vector = FixedVariableArrayInput((expert.size,), hwconf=HWConfig(1, -1, -1))
    x = vector.quantize(1, formats["x"].integer, formats["x"].fraction)
    gate = rounded(x @ weights["gate"].T, "gate")
    to = formats["silu"]
    activated = gate.apply(silu).quantize(1, to.integer, to.fraction, overflow_mode="SAT", round_mode="RND")
    hidden = rounded(activated * rounded(x @ weights["up"].T, "up"), "hidden")
    logic = comb_trace(vector, hidden @ weights["down"].T)
    model = VerilogModel(logic, TOP, folder, latency_cutoff=depth, print_latency=False)
    model.write()
    return Adders(logic, model, formats["x"].round(expert.x), formats)


def interpret(adders: Adders) -> NDArray[np.float64]:
    """da4ml's interpreter on all vectors."""
    return np.asarray(adders.logic.predict(adders.x), np.float64)


def verilate(adders: Adders) -> NDArray[np.float64]:
    """The Verilog, compiled with Verilator, on all vectors, one a cycle; HlsError where that fails."""
    try:
        with tools():
            adders.model._compile(openmp=False, nproc=2, _env={"VERILATOR_FLAGS": "-Wno-fatal"})
        return np.asarray(adders.model.predict(adders.x, n_threads=-1), np.float64)
    except (OSError, RuntimeError) as error:
        raise HlsError(f"Verilator could not build da4ml's Verilog in {adders.model._path}: {error}") from error


HARNESS = """// A few pins for a wide module: vectors shift in, all result bits go into one, four a register.
module top(input clk, input [{width}:0] i, output o);
    reg [{inputs}:0] x;
    wire [{outputs}:0] y;
    expert expert(.clk(clk), .model_inp(x), .model_out(y));
    always @(posedge clk) x <= {{x, i}};
{levels}
    assign o = level{last};
endmodule
"""


def harness(adders: Adders, *, pins: int = 8) -> str:
    """Verilog of ``top``, which needs few pins and keeps every bit of the expert: registers and one XOR level each."""
    inputs, outputs = (
        int(sum(sum(kif) for kif in zip(*bits, strict=True))) for bits in (adders.logic.inp_kifs, adders.logic.out_kifs)
    )
    levels, source, count, number = [], "y", outputs, 0
    while count > 1:
        parts = math.ceil(count / 4)
        terms = ", ".join(f"^{source}[{min(4 * k + 3, count - 1)}:{4 * k}]" for k in reversed(range(parts)))
        levels.append(
            f"    reg [{parts - 1}:0] level{number};\n    always @(posedge clk) level{number} <= {{{terms}}};"
        )
        source, count, number = f"level{number}", parts, number + 1
    return HARNESS.format(
        width=pins - 1, inputs=inputs - 1, outputs=outputs - 1, levels="\n".join(levels), last=number - 1
    )
