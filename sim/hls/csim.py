"""An expert through hls4ml: its C++, compiled with g++ and run, and the project for those who have the vendor's tools.

hls4ml reads the expert with ``torch.fx``: four modules and two products. The C++ is that which Vitis HLS or the Quartus
compiler would synthesise, over the arbitrary-precision types that hls4ml ships.
"""

import contextlib
import io
import math
import shutil
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.accuracy import relative_rms
from sim.hls.expert import MATRICES, Expert

PROJECT = "expert"
TABLE = 1024
"""Entries of hls4ml's sigmoid table over -8..8, by default."""
TABLE_STEP = 2.0**-10
"""Of the entries' type, ``fixed<18,8>``; hls4ml keeps it whatever its configuration says."""
RESULTS = {"x": "x", "gate": "gate", "up": "up", "sigmoid": "sigmoid", "mul": "silu", "mul_1": "hidden", "down": "y"}
"""hls4ml's name of each layer, and of its result in :meth:`sim.hls.expert.Expert.steps`."""


class HlsError(RuntimeError):
    """hls4ml or a compiler failed; the message says where its output is."""


@dataclass(frozen=True)
class Setting:
    """How hls4ml is to build an expert.

    Attributes
    ----------
    backend
        ``Vitis``, ``Quartus`` or ``oneAPI``.
    strategy
        ``Resource`` or ``Latency``.
    reuse
        Reuse factor of the three matrices.
    bits
        Of every weight and result, each with the integer bits that its values need; None: ``fixed<16,6>`` throughout,
        hls4ml's default. Accumulators get the type that hls4ml infers, and with None the default as well.
    table
        Entries of the sigmoid's table, which keep hls4ml's type for them: :data:`TABLE_STEP`.
    """

    backend: str = "Vitis"
    strategy: str = "Resource"
    reuse: int = 1
    bits: int | None = 16
    table: int = TABLE

    @property
    def name(self) -> str:
        width = "default" if self.bits is None else f"{self.bits}bit"
        return f"{self.backend}_{self.strategy}_rf{self.reuse}_{width}_t{self.table}".lower()


@dataclass(frozen=True)
class Simulation:
    """What a C simulation gave.

    Attributes
    ----------
    y
        ``(tokens, size)`` float64.
    reuse
        Reuse factor of gate, up and down, which hls4ml rounds to one that the matrices allow.
    types
        Of each layer's result, and of the matrices' accumulators and weights, as hls4ml settled them.
    """

    y: NDArray[np.float64]
    reuse: dict[str, int]
    types: dict[str, dict[str, str]]


def fixed(bits: int, values: NDArray[np.float64]) -> str:
    """The signed type of so many bits, rounding and saturating, that holds ``values`` with the most fraction bits."""
    peak = float(np.abs(values).max())
    integer = 1 if peak == 0 else math.floor(math.log2(peak)) + 2  # the sign is one of them
    return f"fixed<{bits},{integer},RND,SAT>"


def configuration(expert: Expert, model: Any, setting: Setting) -> dict[str, Any]:
    """hls4ml's configuration for a setting."""
    import hls4ml  # pyright: ignore[reportMissingImports] an extra of its own

    config = hls4ml.utils.config_from_pytorch_model(
        model,
        (expert.size,),
        granularity="name",
        backend=setting.backend,
        default_precision="fixed<16,6>",
        default_reuse_factor=setting.reuse,
    )
    config["Model"]["Strategy"] = setting.strategy
    layers, steps = config["LayerName"], expert.steps()
    for name, step in RESULTS.items():
        layers[name]["Strategy"] = setting.strategy
        if setting.bits is None:
            layers[name]["Precision"] = {kind: "fixed<16,6>" for kind in layers[name]["Precision"] if kind != "table"}
        else:
            layers[name]["Precision"]["result"] = fixed(setting.bits, steps[step])
    if setting.bits is not None:
        for name in MATRICES:
            layers[name]["Precision"]["weight"] = fixed(setting.bits, getattr(expert, name))
    layers["sigmoid"]["TableSize"] = setting.table
    return config


def table_error(expert: Expert, entries: int, step: float) -> float:
    """Relative RMS error of an expert in float64 but for hls4ml's sigmoid: a table over -8..8, rounded down twice."""
    steps = expert.steps()
    index = np.clip(np.floor((steps["gate"] + 8) / 16 * entries), 0, entries - 1)
    sigmoid = np.floor(1 / (1 + np.exp(8 - 16 * index / entries)) / step) * step
    return relative_rms((steps["gate"] * sigmoid * steps["up"]) @ expert.down.T, steps["y"])


def torch_expert(expert: Expert) -> Any:
    """The expert as a module that ``torch.fx`` can trace; HlsError where PyTorch or hls4ml is not installed."""
    try:
        import hls4ml  # noqa: F401 who reads it # pyright: ignore[reportMissingImports] an extra of its own
        import torch
    except ImportError as error:
        raise HlsError(f"{error.name} is not installed: pip install 'emufpga[hls4ml]'") from None

    def linear(matrix: NDArray[np.float64]) -> torch.nn.Linear:
        module = torch.nn.Linear(expert.size, expert.size, bias=False)
        module.weight.data = torch.from_numpy(matrix.astype(np.float32))  # Q6_K's values have 25 bits at most
        return module

    class Swiglu(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (linear(getattr(expert, name)) for name in MATRICES)
            self.sigmoid = torch.nn.Sigmoid()

        def forward(self, x):
            gate = self.gate(x)
            up = self.up(x)
            return self.down(torch.mul(torch.mul(gate, self.sigmoid(gate)), up))

    return Swiglu().eval()


def convert(expert: Expert, setting: Setting, folder: Path) -> Any:
    """hls4ml's model of the expert, whose project is to go to ``folder``."""
    model = torch_expert(expert)
    import hls4ml  # pyright: ignore[reportMissingImports] an extra of its own

    return hls4ml.converters.convert_from_pytorch_model(
        model,
        hls_config=configuration(expert, model, setting),
        output_dir=str(folder),
        project_name=PROJECT,
        backend=setting.backend,
        io_type="io_stream",
    )


def simulate(expert: Expert, setting: Setting, folder: Path) -> Simulation:
    """Convert, compile with g++ and run on all of the expert's vectors; ``folder/hls4ml.log`` has what was said.

    Raises HlsError naming that log, with the first line of the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "hls4ml.log"
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            model = convert(expert, setting, folder)
            model.compile()
            y = model.predict(np.ascontiguousarray(expert.x.astype(np.float32)))
    except HlsError:
        raise
    except Exception as error:  # hls4ml raises bare Exception, RuntimeError, OSError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        said.write(f"\n{error}\n")
        raise HlsError(f"{setting.name}: {reason} (see {log})") from error
    finally:
        log.write_text(said.getvalue())
    layers = {layer.name: layer for layer in model.get_layers()}
    types = {
        name: {kind: str(value.precision) for kind, value in layers[name].types.items() if kind in KINDS}
        for name in RESULTS
    }
    reuse = {name: int(layers[name].get_attr("reuse_factor")) for name in MATRICES}
    return Simulation(np.asarray(y, np.float64).reshape(expert.x.shape), reuse, types)


KINDS = ("result_t", "accum_t", "weight_t", "table_t")


def row(expert: Expert, setting: Setting, simulation: Simulation) -> dict[str, Any]:
    """A simulation as the results hold it."""
    exact = expert.steps()["y"]
    return {
        "size": expert.size,
        **asdict(setting),
        "reuse_factors": simulation.reuse,
        "types": simulation.types,
        "relative_rms_error": relative_rms(simulation.y, exact),
        "max_abs_error": float(np.abs(simulation.y - exact).max()),
        "outputs": simulation.y.size,
    }


def project(expert: Expert, setting: Setting, folder: Path) -> Path:
    """Write the vendor's project into ``folder``; returns the script to run.

    With Vitis HLS: ``cd folder && vitis-run --mode hls --tcl build_prj.tcl`` (before 2024.1 ``vitis_hls -f``).
    """
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        convert(expert, setting, folder).write()
    return folder / "build_prj.tcl"


@dataclass(frozen=True)
class Synthesis:
    """A report of Vitis HLS's synthesis (``*_csynth.xml``): the tool's estimates before placing anything."""

    version: str
    part: str
    clock_ns: float
    estimated_ns: float
    latency: tuple[int, int]
    """Cycles, least and most."""
    interval: tuple[int, int]
    resources: dict[str, int]
    available: dict[str, int]


def read_synthesis(path: Path) -> Synthesis:
    """Read ``syn/report/expert_csynth.xml`` of a solution; HlsError naming the file and what it lacks."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise HlsError(f"{path}: not a csynth.xml of Vitis HLS: {error}") from None

    def text(place: str) -> str:
        value = root.findtext(place)
        if value is None:
            raise HlsError(f"{path}: has no {place}; is it the csynth.xml of a whole design?")
        return value.strip()

    def number(place: str, kind: type = int) -> Any:
        value = text(place)
        try:
            return kind(value)
        except ValueError:
            raise HlsError(f"{path}: {place} is {value!r}, not a number; a loop without a fixed trip count?") from None

    def table(place: str) -> dict[str, int]:
        text(place)
        return {child.tag: number(f"{place}/{child.tag}") for child in root.find(place) or ()}

    overall = "PerformanceEstimates/SummaryOfOverallLatency"
    return Synthesis(
        version=text("ReportVersion/Version"),
        part=text("UserAssignments/Part"),
        clock_ns=number("UserAssignments/TargetClockPeriod", float),
        estimated_ns=number("PerformanceEstimates/SummaryOfTimingAnalysis/EstimatedClockPeriod", float),
        latency=(number(f"{overall}/Best-caseLatency"), number(f"{overall}/Worst-caseLatency")),
        interval=(number(f"{overall}/Interval-min"), number(f"{overall}/Interval-max")),
        resources=table("AreaEstimates/Resources"),
        available=table("AreaEstimates/AvailableResources"),
    )
