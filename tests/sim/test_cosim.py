"""``make cosim`` with a layer of one token: the driver in a process of its own, over both links."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sim import cosim

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-moe-q6k.gguf"


@pytest.mark.cosim
@pytest.mark.parametrize("link", ["uart", "axis"])
def test_cosim(tmp_path, link):
    assert cosim.main(["--layers", "1", "--axis-text", "m", "--only", link, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())[link]
    (row,) = report["layers"]
    assert (row["outputs"], row["differing"], row["broken"]) == (256, 0, [])
    assert row["ledger"]["link_resent"] == 0


def test_interrupted(tmp_path):
    """Ctrl-C in the middle of a layer ends the driver with a line and a status; the device serves the next one."""
    command = [sys.executable, "-m", "host.cli", "layers", str(MODEL), "--layers", "1", "--text", "m", "--device"]
    with subprocess.Popen(
        [sys.executable, "-m", "sim.board"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as board:
        assert board.stdin is not None
        assert board.stdout is not None
        device = board.stdout.readline().strip()
        with subprocess.Popen([*command, device], cwd=ROOT, stderr=subprocess.PIPE, text=True) as driver:
            assert driver.stderr is not None
            while "bytes" not in (line := driver.stderr.readline()):
                assert line, "the driver ended before it had begun"
            driver.send_signal(signal.SIGINT)
            _, errors = driver.communicate(timeout=60)
        assert driver.returncode == 130
        assert errors.splitlines()[-1] == "emufpga: error: interrupted"
        result = subprocess.run([*command, device], cwd=ROOT, capture_output=True, text=True, timeout=600)
        board.stdin.close()
        assert board.wait(30) == 0
    assert "all outputs equal golden's, bit for bit" in result.stdout
    assert result.returncode == 0
