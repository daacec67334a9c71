"""``make cosim``: the driver, a process of its own, against the Verilated devices on a UART and on AXI-Stream.

The UART device sits behind a pseudo-terminal, which the driver takes for a serial port; the AXI-Stream device runs
under cocotb with random pauses both ways, behind a socket. Layers of the tiny model go through both, every output is
compared with the golden model's, and ``build/cosim/report.json`` is written. Exit status 1 if a bit differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from host.model_file import ModelFile
from hw.formats.params import Params
from sim import board, verilator
from sim.run import say

ROOT = Path(__file__).resolve().parent.parent
IDLE_CYCLES, RESEND_CYCLES = 200_000, 400_000
START_S = 300
"""Building the device may take so long."""
DRIVER_S = 1800


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.cosim", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-moe-q6k.gguf", metavar="FILE.gguf")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="only the first N layers (default: all)")
    parser.add_argument("--uart-text", default="m", help="batch on the UART (default: %(default)s)")
    parser.add_argument("--axis-text", default="moe:", help="batch on AXI-Stream (default: %(default)s)")
    parser.add_argument("--only", choices=("uart", "axis"), help="one of the two")
    parser.add_argument("--seed", type=int, default=1, help="of the pauses")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cosim", metavar="DIR")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with ModelFile.open(args.model) as model:
        shape = {"max_width": model.width, "max_expert_width": model.expert_width, "max_experts": model.expert_count}
        shape = {name: max(value, board.SIZES[name]) for name, value in shape.items()}
    reports = {}
    if args.only != "axis":
        reports["uart"] = uart(args, shape)
    if args.only != "uart":
        reports["axis"] = axis(args, Params(frame_bytes=65536, **shape))
    path = args.out / "report.json"
    path.write_text(json.dumps(reports, indent=2) + "\n")
    right = all(report["right"] for report in reports.values())
    for link, report in reports.items():
        rows = report["layers"]
        outputs = sum(row["outputs"] for row in rows)
        differing = sum(row["differing"] for row in rows)
        written = sum(row["ledger"]["link_written"] for row in rows)
        print(f"{link}: {len(rows)} layers, {outputs:,} outputs, {differing} differ; {written:,} bytes over the link")
    print(f"{'bit-exact over both links' if right else 'OUTPUTS DIFFER'}; written to {path}")
    return 0 if right else 1


def drive(device: str, args: argparse.Namespace, text: str) -> dict:
    """Run the driver, a process of its own, on ``device``; its report."""
    command = [sys.executable, "-m", "host.cli", "layers", str(args.model), "--json"]
    command += ["--device", device, "--text", text]
    if args.layers is not None:
        command += ["--layers", str(args.layers)]
    say(f"driver on {device}")
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DRIVER_S)
    if not result.stdout.strip():
        raise RuntimeError(f"the driver failed on {device} with status {result.returncode}")
    return json.loads(result.stdout)


def uart(args: argparse.Namespace, shape: dict[str, int]) -> dict:
    """The driver against :mod:`sim.board`."""
    say("the UART device behind a pseudo-terminal")
    command = [sys.executable, "-m", "sim.board"]
    for name, value in shape.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            device = process.stdout.readline().strip()
            if not device:
                raise RuntimeError("the simulated board did not start")
            return drive(device, args, args.uart_text)
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def axis(args: argparse.Namespace, params: Params) -> dict:
    """The driver against :mod:`sim.bench.axis_device`."""
    from hw.device import AxisDevice

    say("the AXI-Stream device under cocotb")
    build = args.out / "axis"
    device = AxisDevice(params, idle_cycles=IDLE_CYCLES, resend_cycles=RESEND_CYCLES)
    runner = verilator.build(device, "device", build, say=say)
    failures: list[Exception] = []
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "device"

        def simulate() -> None:
            try:
                env = {"EMUFPGA_SOCKET": str(socket)}
                verilator.run(runner, "device", build, "sim.bench.axis_device", seed=args.seed, env=env)
            except Exception as error:
                failures.append(error)

        bench = threading.Thread(target=simulate)
        bench.start()
        end = time.monotonic() + START_S
        while not socket.exists():
            if failures or time.monotonic() > end:
                raise RuntimeError("the device under cocotb did not start") from (failures[0] if failures else None)
            time.sleep(0.1)
        try:
            report = drive(f"socket:{socket}", args, args.axis_text)
        finally:
            bench.join()
    if failures:
        raise failures[0]
    return report


if __name__ == "__main__":
    sys.exit(main())
