"""``emufpga run`` as a user types it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from host.cli import main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-moe-q6k.gguf")
LIMIT_S = 300
"""A command that has not ended by then hangs."""


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["run", "--model", MODEL, *argv])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("placement", ["selected", "tape", "resident"])
def test_answer(capsys, placement):
    """The text alone is on stdout; progress, then the account, on stderr."""
    status, out, err = run(capsys, "--prompt", "add 47 38=", "--placement", placement, "--chunk", "4")
    assert (status, out) == (0, "85\n")
    lines = err.splitlines()
    assert lines[0].endswith(f"opening {MODEL}, {placement}" + ", golden" * (placement != "resident"))
    assert [line.split("] ")[1].split(",")[0] for line in lines if "chunk" in line] == [
        f"prompt: chunk {n} of 3" for n in (1, 2, 3)
    ]
    assert "10 tokens in, 3 out, ended by stop" in lines
    assert ("the ledger adds up" in lines) == (placement != "resident")
    assert any("this machine's time, not a board's" in line for line in lines)


def test_json(capsys, tmp_path):
    """Bytes requested by layer are whole experts, at least two for the prompt and two for the token."""
    routing = tmp_path / "routing.json"
    status, out, _ = run(capsys, "--prompt", "add 47 38=", "--json", "--routing", str(routing), "--max-tokens", "2")
    report = json.loads(out)
    assert status == 0
    assert (report["text"], report["finish_reason"], report["tokens"]) == ("85", "length", 2)
    assert report["broken"] == []
    by_layer = [each["requested"] for each in report["ledger_by_layer"].values()]
    assert sum(by_layer) == report["ledger"]["requested"]
    assert all(count % 161_280 == 0 and count >= 4 * 161_280 for count in by_layer)
    assert report["passes"] == 6  # the prompt's and one token's, of three layers
    chosen = json.loads(routing.read_text())
    assert chosen["tokens"] == {"prefill": 10, "decode": 1}


def test_temperature_and_seed(capsys):
    options = ["--prompt", "a", "--placement", "resident", "--temperature", "3", "--max-tokens", "12"]
    outs = [run(capsys, *options, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    ("options", "status", "part"),
    [
        ([], 2, "the following arguments are required: --prompt"),
        (["--prompt", ""], 2, "the prompt has no tokens; give at least one"),
        (["--prompt", "a", "--max-tokens", "0"], 2, "must be a number of 1 or more, not '0'"),
        (["--prompt", "a", "--temperature", "nan"], 2, "must be a number of 0 or more, not 'nan'"),
        (["--prompt", "a", "--placement", "gpu"], 2, "invalid choice: 'gpu'"),
        (["--prompt", "a", "--device", "gold"], 2, "device 'gold': unknown kind 'gold'"),
        (["--prompt", "a", "--device", "golden:max_experts=4"], 1, "load one built with max_experts=8"),
        (["--prompt", "a", "--placement", "resident", "--cache-slots", "4"], 2, "an expert cache is of no use where"),
        (["--prompt", "a", "--torch-device", "cuda:77"], 1, "cannot use 'cuda:77'"),
        (["--prompt", "a", "--placement", "resident", "--device", "sim"], 2, "--placement resident uses none"),
        (["--prompt", "a", "--seed", "1"], 2, "--seed 1: nothing is drawn at --temperature 0; give one above 0"),
        (
            ["--prompt", "a", "--routing", "/nowhere/r.json"],
            2,
            "--routing /nowhere/r.json: cannot write (No such file or directory)",
        ),
    ],
)
def test_refused(capsys, options, status, part):
    got, out, err = run(capsys, *options)
    assert (got, out) == (status, "")
    last = err.splitlines()[-1]
    assert last.startswith("emufpga: error: ")
    assert part in last


def test_without_torch():
    """A machine without PyTorch is told what to install, and all else of the command works there."""
    blocked = "import sys; sys.modules['torch'] = None; import runpy; "
    module = "sys.argv[0] = 'emufpga'; runpy.run_module('host.cli', run_name='__main__')"
    command = [sys.executable, "-c", blocked + module]
    done = subprocess.run(
        [*command, "run", "--model", MODEL, "--prompt", "a"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("torch is not installed: pip install 'emufpga[gpu]'")
    assert "Traceback" not in done.stderr
    assert subprocess.run([*command, "inspect", MODEL], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_interrupted():
    """Ctrl-C in the middle: what came so far, the account, status 130, nothing else."""
    command = [sys.executable, "-m", "host.cli", "run", "--model", MODEL, "--prompt", "a" * 100, "--max-tokens", "28"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--chunk", "1"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.daemon = True
        limit.start()
        while "chunk 5 of 100" not in (line := process.stderr.readline()):
            assert line, "it ended before it had begun"
        process.send_signal(signal.SIGINT)
        err, out = process.stderr.read(), process.stdout.read()
        limit.cancel()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "100 tokens in, 0 out, ended by cancelled" in err
    assert "the ledger adds up" in err
    assert out == "\n"
