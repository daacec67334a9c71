import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from host import ledger
from host.cli import main
from host.device import Device
from host.ledger import kv
from host.link import Link
from host.model_file import ModelFile, ModelFileError
from host.storage import Store, held_bytes
from hw.formats.messages import Layer
from hw.formats.params import Params
from models import synthetic
from sim.golden.device import GoldenTransport
from tests.host import gguf_files
from tests.host.gguf_files import F32, Q6_K, Tensor

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-moe-q6k.gguf"
# Of the published Granite 3.1 1B-A400M Instruct, Q6_K.
GRANITE_BYTES = 1_099_212_096
GRANITE: dict[str, Any] = {
    "granitemoe.block_count": 24,
    "granitemoe.context_length": 131_072,
    "granitemoe.embedding_length": 1024,
    "granitemoe.feed_forward_length": 512,
    "granitemoe.expert_count": 32,
    "granitemoe.expert_used_count": 8,
    "granitemoe.attention.head_count": 16,
    "granitemoe.attention.head_count_kv": 8,
}


def granite_tensors() -> dict[str, Tensor]:
    tensors = {"token_embd.weight": Tensor(Q6_K, (49_155, 1024)), "output_norm.weight": Tensor(F32, (1024,))}
    for n in range(24):
        tensors |= gguf_files.layer_tensors(n, 32, 1024, 512)
        tensors[f"blk.{n}.attn_norm.weight"] = Tensor(F32, (1024,))
        for part, rows in (("q", 1024), ("k", 512), ("v", 512), ("output", 1024)):
            tensors[f"blk.{n}.attn_{part}.weight"] = Tensor(Q6_K, (rows, 1024))
    return tensors


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Path:
    """Granite's tensors, as a hole; a description instead of its vocabulary makes the header as long as the real one's.

    The real file's 169 Q6_K and 73 F32 tensors leave 1.7 MB for its header; only that length is taken from it.
    """
    path = tmp_path_factory.mktemp("granite") / "granite.gguf"
    tensors = granite_tensors()
    short = gguf_files.write(path, tensors, metadata=GRANITE | {"general.description": "x"}, hole=True)
    fill = "x" * (1 + GRANITE_BYTES - short.stat().st_size)
    path.unlink()
    return gguf_files.write(path, tensors, metadata=GRANITE | {"general.description": fill}, hole=True)


def report_of(capsys, *argv: str | Path) -> dict[str, Any]:
    assert main(["ledger", "--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def test_granite(capsys, granite):
    """The published floors: 1,099,212,096 + context x 49,152 resident, 108,307,776 that stay with the GPU."""
    assert granite.stat().st_size == GRANITE_BYTES
    report = report_of(capsys, granite, "--cache-slots", "8")
    assert report["bytes"]["file"] == GRANITE_BYTES
    assert report["bytes"]["experts"] == 990_904_320
    assert report["bytes"]["others"] == 108_307_776
    assert report["bytes"]["kv_token"] == 49_152
    assert report["bytes"]["framework"] is None
    inputs = report["bytes"]["input"]
    assert inputs["upstream"] == 132_306 == 2 * 65536 + 210 + 1024
    # Two buffers of 2 MiB, two frames of 65,536 B with header and trailer, 1 MiB for the DMA driver.
    assert inputs["uart"] == 2 * 2**21 + 2 * (65536 + 32)
    assert inputs["pcie"] == inputs["uart"] + 2**20
    assert [row["context"] for row in report["contexts"]] == [2048, 4096, 8192, 16384, 32768, 65536, 131072]
    for row in report["contexts"]:
        assert row["resident"] == 1_099_212_096 + row["context"] * 49_152
        assert row["serial"] == inputs["pcie"] + 108_307_776 + row["context"] * 49_152
        assert row["cached"] == row["serial"] + 24 * 8 * 1_290_240
        assert not row["beyond_model"]
    assert report["wall"] == {"others": 2169, "file": 22_364}
    assert report["wall"]["file"] * 49_152 >= GRANITE_BYTES > (report["wall"]["file"] - 1) * 49_152
    assert report_of(capsys, granite, "--kv", "f32")["bytes"]["kv_token"] == 98_304


def test_what_fits(capsys, granite):
    """The longest context fits, one more does not."""
    report = report_of(capsys, granite, "--context", "1", "--context", "200000")
    assert [(row["context"], row["beyond_model"]) for row in report["contexts"]] == [(1, False), (200_000, True)]
    assert [row["memory"] for row in report["longest"][:-1]] == [f"{size} GB" for size in (4, 6, 8, 12, 16, 24)]
    assert report["longest"][-1]["memory"] == "this host's RAM"
    for row in report["longest"]:
        for name in ("resident", "serial"):
            total = report["floors"][name] + row[name] * 49_152
            assert total <= row["bytes"] < total + 49_152


@pytest.mark.parametrize(
    ("shape", "bytes_"),
    # By hand, 2 B a value: 2 x layers x KV heads x head width x 2 B; 128 KiB a token is Mixtral's published figure.
    [("granite-1b", 49_152), ("granite-3b", 65_536), ("olmoe", 131_072), ("qwen3-30b", 98_304), ("mixtral", 131_072)],
)
def test_kv_of_public_shapes(capsys, tmp_path, shape, bytes_):
    """Whole models, as holes."""
    model = synthetic.SHAPES[shape]
    infos = list(synthetic.tensors(model, model.layers))
    path = tmp_path / "shape.gguf"
    synthetic._write_header(path, model, model.layers, 1, infos)
    data = sum(synthetic._padded(tensor.data_bytes) for tensor in infos)
    os.truncate(path, synthetic._padded(path.stat().st_size) + data)
    report = report_of(capsys, path)
    assert report["bytes"]["kv_token"] == bytes_
    assert report["bytes"]["experts"] + report["bytes"]["others"] == path.stat().st_size
    if shape == "mixtral":  # 37 GB of experts
        assert report["longest"][5]["memory"] == "24 GB"
        assert report["longest"][5]["resident"] == -1
        assert report["longest"][5]["serial"] > 32_768
        assert main(["ledger", str(path)]) == 0
        assert "24 GB                            does not fit" in capsys.readouterr().out


LLAMA = """
import os
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, context, kind = sys.argv[1:]
params.n_ctx, params.n_parallel, params.n_gpu_layers = int(context), 1, 0
params.offline, params.warmup, params.verbosity = True, False, 4
params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind}")
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_kv_as_llama_cpp_allocates_it(capsys, kind):
    pytest.importorskip("xllamacpp")
    command = [sys.executable, "-c", LLAMA, TINY, "2048", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (mib,) = re.findall(r"KV buffer size = +([0-9.]+) MiB", done.stdout + done.stderr)
    report = report_of(capsys, TINY, "--context", "2048", "--kv", kind.lower())
    assert report["contexts"][0]["kv"] == float(mib) * 2**20  # 3 and 6 MiB: no digit is lost


def test_table(capsys):
    assert main(["ledger", str(TINY), "--context", "128", "--context", "129"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 120
    lines = [" ".join(line.split()) for line in out.splitlines()]
    with ModelFile.open(TINY) as model:
        assert f"model file {model.file_bytes:,} counted" in lines
        assert f"all else: stays with the GPU {model.gpu_bytes:,} derived: file - experts" in lines
    assert "KV a token, f16 1,536 derived: 3 layers x 4 KV heads x (32 + 32) values x 2 B" in lines
    assert "framework's activations, workspace unknown unknown; they come on top" in lines
    assert any(line.startswith("129* ") for line in lines)
    assert any(line.startswith("128 ") for line in lines)
    assert "* beyond the model's own context of 128" in lines


def test_every_figure_has_its_provenance(capsys):
    said = report_of(capsys, TINY, "--cache-slots", "99")["provenance"]
    known = ("counted", "derived", "measured", "reported", "unknown")
    assert all(text.split(":")[0].split()[0] in known for text in said.values())
    assert {"resident", "serial", "cached", "kv_token", "input", "input_upstream", "framework", "ram"} <= set(said)


def test_the_input_path_is_what_is_held(tmp_path, monkeypatch):
    """Read buffers and frames of a layer whose matrices take several of each."""
    size = 512 * 512 // 256 * 210
    (tmp_path / "experts.bin").write_bytes(bytes(3 * 4 * size))
    layer = Layer(512, 512, 4, (0, 4 * size, 8 * size))
    pieces: list[int] = []
    write = Link._write
    monkeypatch.setattr(Link, "_write", lambda link, data: (pieces.append(len(data)), write(link, data))[1])
    params = Params(max_batch=4, max_width=512, max_expert_width=512, max_experts=8, frame_bytes=65536)
    for ahead in (True, False):
        with (
            Device(GoldenTransport(params)) as device,
            Store(tmp_path / "experts.bin", ahead=ahead) as store,
        ):
            device.run_layer(layer, [[1.0] * 512], [(0, 1, 65536), (0, 3, 65536)], store)
            held = sum(len(buffer) for buffer in store._reader.buffers)
            assert held == held_bytes(size, ahead=ahead)
    assert 65536 < max(pieces) <= ledger.FRAMES * ledger.FRAME_BYTES


def test_unknown_ram(capsys, monkeypatch):
    monkeypatch.setattr(ledger, "ram_bytes", lambda: None)
    assert main(["ledger", str(TINY)]) == 0
    out = capsys.readouterr().out
    assert "this host's RAM unknown unknown" in [" ".join(line.split()) for line in out.splitlines()]


@pytest.fixture
def write(tmp_path):
    def write(**attention: Any) -> Path:
        keys = {f"granitemoe.attention.{key}": value for key, value in attention.items()}
        return gguf_files.write(tmp_path / "small.gguf", metadata=keys)

    return write


@pytest.mark.parametrize(
    ("attention", "values"),
    [
        ({"head_count": 4}, 2 * 4 * (64 + 64)),
        ({"head_count": 4, "head_count_kv": 2}, 2 * 2 * (64 + 64)),
        ({"head_count": 4, "head_count_kv": 1, "key_length": 96}, 2 * (96 + 64)),
        ({"head_count": 4, "key_length": 32, "value_length": 16}, 2 * 4 * (32 + 16)),
    ],
)
def test_kv_by_metadata(write, attention, values):
    with ModelFile.open(write(**attention)) as model:
        assert (kv(model).values, kv(model).bound) == (values, False)


def test_kv_of_a_window_is_at_most(capsys, write):
    report = report_of(capsys, write(head_count=4, sliding_window=512))
    assert report["provenance"]["kv_token"].endswith("at most, some layers' attention has a window")


def test_kv_by_tensors(tmp_path):
    """Grouped heads that differ by layer are an array in the metadata; the tensors tell."""
    tensors = gguf_files.model_tensors()
    for layer, rows in enumerate((64, 128)):
        for part in "kv":
            tensors[f"blk.{layer}.attn_{part}.weight"] = Tensor(F32, (rows, 256))
    path = gguf_files.write(tmp_path / "t.gguf", tensors)
    with ModelFile.open(path) as model:
        assert kv(model).values == 2 * 64 + 2 * 128
        assert "rows of all attn_k and attn_v tensors" in kv(model).provenance
    path.unlink()
    path = gguf_files.write(path, tensors, metadata={"granitemoe.attention.head_count": 4})
    with ModelFile.open(path) as model, pytest.raises(ModelFileError) as caught:
        kv(model)
    assert str(caught.value) == (
        f"{path}: keys 'granitemoe.attention.*' make 1,024 KV values a token, tensors attn_k and attn_v 384; "
        "heads differ by layer or the file is damaged: convert it again"
    )


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        ({}, "neither key 'granitemoe.attention.head_count' nor tensors blk.N.attn_k and attn_v of all 2 layers say"),
        ({"head_count": 4, "kv_lora_rank": 64}, "a latent or a recurrent one is not known here"),
        ({"head_count": 0}, "key 'granitemoe.attention.head_count' must be a whole number above 0, not 0"),
        ({"head_count": 4, "head_count_kv": 0}, "head_count_kv' must be a whole number above 0, not 0"),
        ({"head_count": 4, "key_length": "long"}, "key_length' must be a whole number above 0, not 'long'"),
        ({"head_count": 512}, "key_length' must be a whole number above 0, not 0"),
    ],
)
def test_files_that_do_not_say(capsys, write, attention, text):
    path = write(**attention)
    assert main(["ledger", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"emufpga: error: {path}: ")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--context", "0"], "0 is not above 0"),
        (["--context", "long"], "invalid whole value: 'long'"),
        (["--kv", "q8"], "invalid choice: 'q8'"),
        (["--cache-slots", "1"], "holds less than one token's 2 experts a layer"),
    ],
)
def test_usage(capsys, arguments, text):
    assert main(["ledger", str(TINY), *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
