"""Synthetic model files: public figures, the gguf package, llama.cpp, memory, and what is refused."""

import errno
import hashlib
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from host.model_file import ModelFile
from models import synthetic
from models.synthetic import SHAPES, OutputError, Shape, Tensor, main, tensors, write
from tests.models.llama import LlamaCpp

GRANITE = SHAPES["granite-1b"]
TINY = Shape(
    name="tiny",
    architecture="granitemoe",
    layers=2,
    experts=3,
    experts_used=2,
    width=256,
    expert_width=512,
    heads=4,
    kv_heads=2,
    head_width=64,
    context=64,
    rope_base=1e4,
    norm_epsilon=1e-5,
    scales=(12.0, 0.22, 0.015625, 6.0),
)
Q6_K = gguf.GGMLQuantizationType.Q6_K
BLOCK_BYTES, D_OFFSET = 210, 208  # of Q6_K, as GGML lays it out


def small(shape: Shape) -> Shape:
    """The architecture with its width and attention, but experts that a test has room for."""
    return replace(shape, experts=4, experts_used=2, expert_width=256)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """One layer in Granite's shape, 48 MB."""
    path = tmp_path_factory.mktemp("synthetic") / "granite.gguf"
    write(path, GRANITE, 1)
    yield path
    path.unlink()


@pytest.fixture
def out(tmp_path):
    """A name to write to; whatever lies in the directory is removed after the test."""
    yield tmp_path / "out.gguf"
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()


# layers, experts, top-k, width, expert width; bytes an expert, MB a token, GB in all: as the models' public cards and
# other people's measurements have them.
FIGURES = {
    "granite-1b": (24, 32, 8, 1024, 512, 1_290_240, 247.7, 0.991),
    "granite-3b": (32, 40, 8, 1536, 512, 1_935_360, 495.5, 2.48),
    "olmoe": (16, 64, 8, 2048, 1024, 5_160_960, 660.6, 5.28),
    "qwen3-30b": (48, 128, 8, 2048, 768, 3_870_720, 1486, 23.8),
    "mixtral": (32, 8, 2, 4096, 14336, 144_506_880, 9248, 37.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_public_figures(name):
    layers, experts, experts_used, width, expert_width, expert_bytes, token_mb, bank_gb = FIGURES[name]
    shape = SHAPES[name]
    assert (shape.layers, shape.experts, shape.experts_used) == (layers, experts, experts_used)
    assert (shape.width, shape.expert_width) == (width, expert_width)
    assert shape.expert_bytes == expert_bytes
    assert float(f"{shape.token_bytes / 1e6:.4g}") == token_mb
    assert float(f"{shape.bank_bytes / 1e9:.3g}") == bank_gb
    # What would be written has these bytes too.
    expert_tensors = [tensor for tensor in tensors(shape, layers) if "_exps." in tensor.name]
    assert len(expert_tensors) == 3 * layers
    assert sum(tensor.data_bytes for tensor in expert_tensors) == layers * experts * expert_bytes
    assert {tensor.type for tensor in expert_tensors} == {Q6_K}


def test_granite_bytes(granite):
    assert GRANITE.token_bytes == 247_726_080
    assert GRANITE.bank_bytes == 990_904_320
    with ModelFile.open(granite) as model:
        assert (model.architecture, model.block_count, len(model.layers)) == ("granitemoe", 1, 1)
        assert (model.expert_count, model.experts_used, model.width, model.expert_width) == (32, 8, 1024, 512)
        assert model.context_length == 131_072
        layer = model.layer(0)
        assert layer.expert_bytes == 1_290_240
        assert layer.all_bytes == 41_287_680
        assert layer.selected_bytes(model.experts_used) == 10_321_920
        assert "Granite 3.1 1B-A400M-shaped" in model.name
        assert "Synthetic" in model.name


def test_metadata_is_the_public_configuration(granite, out):
    with ModelFile.open(granite) as model:
        # config.json of ibm-granite/granite-3.1-1b-a400m-instruct
        stated = {
            "attention.head_count": 16,
            "attention.head_count_kv": 8,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.scale": 0.015625,
            "embedding_length": 1024,
            "embedding_scale": 12.0,
            "feed_forward_length": 512,
            "logit_scale": 6.0,
            "residual_scale": 0.22,
            "rope.dimension_count": 64,
            "rope.freq_base": 1.5e6,
        }
        for key, value in stated.items():
            assert model.metadata[f"granitemoe.{key}"] == pytest.approx(value, rel=1e-6), key
    write(out, small(SHAPES["qwen3-30b"]), 1)
    with ModelFile.open(out) as model:
        # config.json of Qwen/Qwen3-30B-A3B, but for the experts' width
        stated = {
            "attention.head_count": 32,
            "attention.head_count_kv": 4,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_feed_forward_length": 256,
            "feed_forward_length": 6144,
            "rope.freq_base": 1e6,
        }
        for key, value in stated.items():
            assert model.metadata[f"qwen3moe.{key}"] == value, key
        assert not any("scale" in key for key in model.metadata)


def test_gguf_package_reads_finite_weights_of_the_stated_deviation(granite):
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(granite).tensors}
    assert len(found) == 12
    for name, tensor in found.items():
        data = np.asarray(tensor.data)
        if tensor.tensor_type == Q6_K:
            data = data[[0, 13, 31]]  # experts
        values = gguf.dequantize(data, tensor.tensor_type).astype(np.float64)
        assert np.isfinite(values).all(), name
        if "norm" in name:
            assert values.mean() == pytest.approx(1, abs=0.01), name
            assert 0.02 < values.std() < 0.1, name
        else:
            # 1.5 million weights, but their d is common to 256: 6,144 blocks give the deviation to 1/sqrt(6144)
            # times 0.3 (relative spread of d^2 within 0.5..1.5 and of scales within a block), so 2 % is five sigma.
            assert values.std() * math.sqrt(values.shape[-1]) == pytest.approx(1, rel=0.02), name
            assert abs(values.mean()) * math.sqrt(values.shape[-1]) < 0.02, name


def test_every_d_is_a_finite_number_of_both_signs(granite):
    for tensor in gguf.GGUFReader(granite).tensors:
        if tensor.tensor_type == Q6_K:
            blocks = np.asarray(tensor.data).reshape(-1, BLOCK_BYTES)
            d = blocks[:, D_OFFSET:].copy().view("<f2").astype(np.float64)[:, 0]
            assert np.isfinite(d).all()
            assert 0.3 < np.mean(d < 0) < 0.7
            size = np.abs(d)
            assert size.min() > 0.4 * size.mean()
            assert size.max() < 1.6 * size.mean()
            assert len(np.unique(d)) > 100
            # Scales and weights use all of their ranges.
            assert len(np.unique(blocks[:, 192:208])) == 256
            assert len(np.unique(blocks[:, :192])) == 256


def test_file_does_not_depend_on_the_chunk_size(out):
    seen = set()
    for chunk_bytes in (BLOCK_BYTES, 1000, 65537, 2**22, 2**30):
        write(out, TINY, chunk_bytes=chunk_bytes, force=True)
        seen.add(sha256(out))
    assert len(seen) == 1


def test_seeds(out):
    def written(seed):
        write(out, TINY, seed=seed, force=True)
        return sha256(out), {tensor.name: bytes(np.asarray(tensor.data)) for tensor in gguf.GGUFReader(out).tensors}

    (first, first_data), (again, _), (other, other_data) = written(1), written(1), written(2)
    assert first == again
    assert first != other
    data = [*first_data.values(), *other_data.values()]
    assert len({block[:1024] for block in data}) == len(data) == 2 * len(list(tensors(TINY, 2)))


def test_bits_are_those_of_the_first_release():
    """The file of a seed never changes; recorded here with NumPy 2.4."""
    made = hashlib.sha256()
    for tensor in tensors(TINY, 1):
        made.update(tensor.data(5, tensor.items // 2, 100).data)
    assert made.hexdigest() == "023ce5e4470da3952550db964792fe1ff3beee78ecabdef21a3a787bd7a34f67"


def test_any_piece_can_be_made_by_itself(granite):
    down = next(tensor for tensor in tensors(GRANITE, 1) if tensor.name == "blk.0.ffn_down_exps.weight")
    with ModelFile.open(granite) as model:
        piece = model.layer(0).down.slice(17)
        blocks = piece.length // BLOCK_BYTES
        assert np.array_equal(model.read_slice(piece), down.data(1, 17 * blocks, blocks))
    for tensor in tensors(TINY, 1):
        whole = tensor.data(3, 0, tensor.items)
        assert whole.nbytes == tensor.data_bytes
        for first, count in ((0, 1), (1, 1), (7, 30), (tensor.items - 1, 1), (tensor.items, 0)):
            stop = (first + count) * tensor.item_bytes
            assert np.array_equal(tensor.data(3, first, count), whole[first * tensor.item_bytes : stop])
        for first, count in ((-1, 1), (0, -1), (0, tensor.items + 1), (tensor.items, 1)):
            with pytest.raises(IndexError, match=tensor.name):
                tensor.data(3, first, count)


def test_fewer_layers_are_the_first_layers_of_the_whole(out):
    def data(layers):
        write(out, TINY, layers, force=True)
        return {tensor.name: bytes(np.asarray(tensor.data)) for tensor in gguf.GGUFReader(out).tensors}

    one, two = data(1), data(2)
    assert len(two) > len(one)
    assert one.items() <= two.items()


def test_memory_stays_near_the_chunk(out):
    tracemalloc.start()
    try:
        write(out, GRANITE, 1, chunk_bytes=2**18)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out.stat().st_size > 48e6
    assert peak < 8 * 2**18 + 2**18  # as CHUNK_BYTES promises, and the header


@pytest.mark.parametrize("name", SHAPES)
def test_every_architecture(name, out):
    """Both readers agree on a file with every kind of tensor, and llama.cpp runs it."""
    write(out, small(SHAPES[name]), 1)
    with ModelFile.open(out) as model:
        assert model.architecture == SHAPES[name].architecture
        assert (model.width, model.expert_count) == (SHAPES[name].width, 4)
        found = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in gguf.GGUFReader(out).tensors}
        assert {tensor.name: (tensor.offset, tensor.length) for tensor in model.tensors.values()} == found
    generates(out)


def test_tensors_that_need_padding(out):
    write(out, replace(TINY, query_norm=3, key_norm=5))
    with ModelFile.open(out) as model:  # refuses gaps and overlaps
        assert model.tensors["blk.1.attn_q_norm.weight"].length == 12
        last = list(tensors(TINY, 2))[-1]
        assert (
            model.tensor("output.weight").tobytes() == last.data(1, 0, last.items).view("<f2").astype("<f4").tobytes()
        )


def test_llama_cpp_runs_two_layers_of_granite(out):
    write(out, GRANITE, 2)
    generates(out)


def generates(path: Path) -> None:
    """llama.cpp loads the file, sees one token a byte and generates tokens with finite probabilities."""
    prompt = "moe: é"
    llama = LlamaCpp(path, context=64, threads=1)  # two threads that wait for each other take longer
    _, answer = llama.complete(prompt, max_tokens=4, logprobs=1, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == len(prompt.encode())
    assert answer["usage"]["completion_tokens"] == 4
    chances = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
    assert chances  # fewer than tokens: bytes of one character come together
    assert all(-20 < chance <= 0 for chance in chances), chances


def test_an_existing_file_is_kept_unless_forced(out, capsys):
    out.write_bytes(b"mine")
    arguments = ["--shape", "granite-1b", "--layers", "1", str(out)]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"synthetic: error: {out}: exists already; give another name, or --force to replace it\n"
    )
    assert out.read_bytes() == b"mine"
    assert main([*arguments, "--force"]) == 0
    assert out.stat().st_size > 48e6


def test_a_directory_is_refused_even_if_forced(tmp_path):
    with pytest.raises(OutputError, match="not a regular file"):
        write(tmp_path, TINY, force=True)


def test_the_part_file_of_another_run_is_kept(out):
    part = out.with_name("out.gguf.part")
    part.write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"out\.gguf\.part: exists; another run is writing it, or delete it"):
        write(out, TINY)
    assert part.read_bytes() == b"theirs"
    assert not out.exists()


def test_a_full_disk_is_seen_before_writing(out, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    # Room for the tensors, 41,287,680 B of experts and 6,961,152 B of others, but not for a header too.
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _path: usage(2**40, 2**40 - 49_000_000, 49_000_000))
    assert main(["--shape", "granite-1b", "--layers", "1", str(out)]) == 1
    assert capsys.readouterr().err == (
        f"synthetic: error: {out}: needs 49,297,408 B, the disk has 49,000,000 B left; "
        "make room or give fewer --layers\n"
    )
    assert os.listdir(out.parent) == []


def broken(error):
    """A ``Tensor.data`` that raises ``error`` in the middle of the file."""
    data = Tensor.data

    def stop(self, seed, first, count):
        if self.name == "blk.0.ffn_up_exps.weight" and first:
            raise error
        return data(self, seed, first, count)

    return stop


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "cannot write: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was kept"),
    ],
    ids=["disk full", "ctrl-C"],
)
def test_nothing_partial_stays(error, status, words, out, monkeypatch, capsys):
    out.write_bytes(b"mine")
    monkeypatch.setattr(Tensor, "data", broken(error))
    assert main(["--shape", "granite-1b", "--layers", "1", "--force", str(out)]) == status
    assert capsys.readouterr().err.splitlines()[-1] == f"synthetic: error: {out}: {words}"
    assert os.listdir(out.parent) == ["out.gguf"]
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(number, out):
    command = [sys.executable, "-m", "models.synthetic", "--shape", "granite-1b", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"writing {out}: 0 of 1,146 MB\n"
        assert os.listdir(out.parent) == ["out.gguf.part"]
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert rest == f"synthetic: error: {out}: interrupted; nothing was kept\n"
    assert os.listdir(out.parent) == []


def test_progress_and_silence(out, capsys):
    assert main(["--shape", "granite-1b", "--layers", "1", str(out)]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[0] == f"writing {out}: 0 of 48 MB"
    assert lines[-1] == f"writing {out}: 48 of 48 MB"
    assert printed.out == ""
    assert os.listdir(out.parent) == ["out.gguf"]


def test_on_a_terminal_progress_is_one_line(out, monkeypatch, capsys):
    arguments = ["--shape", "granite-1b", "--layers", "1", str(out)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(arguments) == 0
    printed = capsys.readouterr().err
    assert printed.startswith(f"\rwriting {out}: 0 of 48 MB")
    assert printed.endswith(f"\rwriting {out}: 48 of 48 MB\n")
    assert printed.count("\n") == 1
    monkeypatch.setattr(Tensor, "data", broken(OSError(errno.EIO, "broken")))
    assert main([*arguments, "--force"]) == 1
    assert capsys.readouterr().err.endswith(f" MB\nsynthetic: error: {out}: cannot write: broken\n")


def test_progress_counts_bytes_of_the_file(out):
    calls = []
    write(out, TINY, 1, chunk_bytes=10_000, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(done) > out.stat().st_size // 10_000
    assert done[-1] == out.stat().st_size
    assert {call[1] for call in calls} == {out.stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: OUT.gguf, --shape; see synthetic --help"),
        (["--shape", "granite", "OUT"], "invalid choice: 'granite'"),
        (["--shape", "granite-1b", "--layers", "0", "OUT"], "--layers must be in 1..24, not 0"),
        (["--shape", "granite-1b", "--layers", "25", "OUT"], "--layers must be in 1..24, not 25"),
        (["--shape", "granite-1b", "--seed", "-1", "OUT"], "--seed must be in 0..18446744073709551615, not -1"),
        (["--shape", "granite-1b", "--seed", "18446744073709551616", "OUT"], "--seed must be in 0.."),
    ],
)
def test_wrong_command_lines(arguments, words, out, capsys):
    assert main([str(out) if word == "OUT" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("synthetic: error: ")
    assert words in error
    assert error.count("\n") == 1
    assert os.listdir(out.parent) == []


def test_a_missing_directory_is_one_line(tmp_path, capsys):
    path = tmp_path / "none" / "out.gguf"
    assert main(["--shape", "granite-1b", str(path)]) == 1
    assert capsys.readouterr().err == f"synthetic: error: {path}: cannot write: No such file or directory\n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"width": 1400}, "width must be a multiple of 256, not 1400"),
        ({"expert_width": 0}, "expert_width must be a multiple of 256, not 0"),
        ({"experts_used": 4}, r"experts_used must be in 1\.\.3, not 4"),
        ({"experts_used": 0}, r"experts_used must be in 1\.\.3, not 0"),
    ],
)
def test_shapes_that_cannot_be(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **fields)


def test_a_chunk_holds_a_block(out):
    with pytest.raises(ValueError, match="chunk_bytes must be at least 210, not 209"):
        write(out, TINY, chunk_bytes=209)
