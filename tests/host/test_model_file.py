import os
import re
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from host.model_file import ExpertTensor, ModelFile, ModelFileError, MoeLayer, Slice, TensorInfo
from tests.host import gguf_files
from tests.host.gguf_files import EXPERT_WIDTH, EXPERTS, F32, Q6_K, WIDTH, Tensor, layer_tensors, model_tensors

GATE, UP, DOWN = (f"blk.0.ffn_{role}_exps.weight" for role in ("gate", "up", "down"))
STRIDE = 107_520  # 256 · 512 weights / 256 · 210 B


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The small model; not to be changed."""
    return gguf_files.write(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def refused(path: Path, *parts: str) -> str:
    """Open a file that must be refused with a message of one line that has the file's path and all of ``parts``."""
    with pytest.raises(ModelFileError) as caught:
        ModelFile.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def field(path: Path, what: str) -> gguf_files.Field:
    (found,) = [field for field in gguf_files.fields(path) if field.what == what]
    return found


# What a good file says


def test_figures(small):
    with ModelFile.open(small) as model:
        assert model.path == str(small)
        assert model.file_bytes == small.stat().st_size
        assert (model.architecture, model.name, model.context_length) == ("granitemoe", "test model", 1024)
        assert (model.block_count, model.expert_count, model.experts_used) == (2, 4, 3)
        assert (model.width, model.expert_width) == (256, 512)
        assert [layer.index for layer in model.layers] == [0, 1]
        assert model.type_counts == {"Q6_K": 7, "F32": 5, "F16": 1}
        assert model.metadata["tokenizer.ggml.add_bos_token"] is False
        assert "tokenizer.ggml.tokens" not in model.metadata
        assert model.experts_bytes == 2_580_480  # 2 layers · 4 experts · 3 · 107,520
        assert model.token_bytes == 1_935_360  # 2 layers · 3 experts · 3 · 107,520
        assert model.gpu_bytes == model.file_bytes - 2_580_480
        # embedding 4 · 210; a layer's norm 256 · 4 and router 4 · 256 · 4; F16 3 · 5 · 2; F32 3 · 4
        assert model.gpu_tensor_bytes == 840 + 2 * (1024 + 4096) + 30 + 12


def test_layer(small):
    with ModelFile.open(small) as model:
        layer = model.layer(1)
        assert layer is model.layers[1]
        assert layer.router == "blk.1.ffn_gate_inp.weight"
        names = [f"blk.1.ffn_{role}_exps.weight" for role in ("gate", "up", "down")]
        assert [tensor.name for tensor in (layer.gate, layer.up, layer.down)] == names
        assert (layer.gate.rows, layer.gate.columns, layer.gate.experts) == (512, 256, 4)
        assert (layer.up.rows, layer.up.columns, layer.up.experts) == (512, 256, 4)
        assert (layer.down.rows, layer.down.columns, layer.down.experts) == (256, 512, 4)
        assert layer.gate.type == layer.up.type == layer.down.type == Q6_K
        assert layer.gate.expert_stride == layer.up.expert_stride == layer.down.expert_stride == STRIDE
        with pytest.raises(IndexError, match=r"layer 2.*0\.\.1"):
            model.layer(2)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_slices_against_gguf(path, alignment):
    gguf_files.write(path, alignment=alignment)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with ModelFile.open(path) as model:
        for layer in model.layers:
            for expert in range(model.expert_count):
                slices = layer.slices(expert)
                assert list(slices) == ["gate", "up", "down"]
                for role, piece in slices.items():
                    data = theirs[f"blk.{layer.index}.ffn_{role}_exps.weight"].data[expert]
                    assert piece.length == data.nbytes
                    np.testing.assert_array_equal(model.read_slice(piece), data.reshape(-1), strict=True)


def test_tensors_against_gguf(small):
    with ModelFile.open(small) as model:
        assert_same_layout(model, small)
        for name in (model.layers[0].router, "rope_freqs.weight", "scales.weight"):
            (theirs,) = [tensor for tensor in gguf.GGUFReader(small).tensors if tensor.name == name]
            np.testing.assert_array_equal(model.tensor(name), theirs.data.astype(np.float32), strict=True)
        assert model.tensor(model.layers[0].router).shape == (EXPERTS, WIDTH)
        with pytest.raises(ModelFileError, match=rf"{GATE}.*Q6_K.*offset {model.tensors[GATE].offset}.*F32 and F16"):
            model.tensor(GATE)
        with pytest.raises(ModelFileError, match="no tensor 'x'"):
            model.tensor("x")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_decoded_against_gguf(path, kind):
    """Types that public files give the tensors beside the experts."""
    tensors = model_tensors() | {"x.weight": Tensor(GGMLQuantizationType[kind], (3, 512))}
    gguf_files.write(path, tensors)
    (theirs,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "x.weight"]
    with ModelFile.open(path) as model:
        given = gguf.dequantize(theirs.data, theirs.tensor_type).astype(np.float32)
        np.testing.assert_array_equal(model.decoded("x.weight"), given, strict=True)
        with pytest.raises(ModelFileError, match="no tensor 'x'"):
            model.decoded("x")


def test_decoded_type_without_a_decoder(path):
    gguf_files.write(path, model_tensors() | {"x.weight": Tensor(GGMLQuantizationType.Q8_K, (3, 512))})
    with ModelFile.open(path) as model:
        with pytest.raises(ModelFileError, match=r"tensor 'x.weight' \(type Q8_K, .* does not decode this type"):
            model.decoded("x.weight")


def test_decoded_slices_against_gguf():
    tiny = Path(__file__).parents[2] / "models" / "tiny-moe-q6k.gguf"
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny).tensors}
    with ModelFile.open(tiny) as model:
        for tensor in (model.layers[1].gate, model.layers[0].down):
            given = gguf.dequantize(theirs[tensor.name].data, tensor.type)
            for expert in range(tensor.experts):
                np.testing.assert_array_equal(model.decoded_slice(tensor, expert), given[expert], strict=True)


def test_arrays_against_gguf(path):
    arrays = {"a.words": ["a", "", "wörter", "\x00\n"], "a.numbers": [1, -2, 3], "a.reals": [0.5, -1.25]}
    gguf_files.write(path, metadata=arrays)
    fields = gguf.GGUFReader(path).fields
    with ModelFile.open(path) as model:
        for key, value in arrays.items():
            assert model.array(key) == value == fields[key].contents()
        assert model.array("tokenizer.ggml.tokens") == ["a", "bc", "", "def"]
        assert model.array("general.name") is None
        assert not arrays.keys() & model.metadata.keys()


def test_array_that_is_not_utf8(path):
    gguf_files.write(path, metadata={"a.words": ["ab", "cd"]})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"cd", b"\xff\xff", 1))
    with ModelFile.open(path) as model:
        with pytest.raises(ModelFileError, match=f"offset {data.index(b'cd')}: .* in key 'a.words'; damaged"):
            model.array("a.words")


def test_entries_in_another_order_than_the_data(path):
    gguf_files.write(path)
    data = path.read_bytes()
    for name, other in ((UP, DOWN), (DOWN, UP)):
        position = field(path, f"{other}: offset").position
        gguf_files.patch(path, f"{name}: offset", int.from_bytes(data[position : position + 8], "little"))
    with ModelFile.open(path) as model:
        assert model.layers[0].down.file_offset < model.layers[0].up.file_offset
        assert_same_layout(model, path)


def test_version_2(small, path):
    path.write_bytes(small.read_bytes())
    gguf_files.patch(path, "version", 2)
    with ModelFile.open(path) as model:
        assert_same_layout(model, path)


def test_layers_without_experts(path):
    dense = {"blk.0.ffn_up.weight": Tensor(Q6_K, (512, 256)), "blk.1.ffn_gate_shexp.weight": Tensor(Q6_K, (512, 256))}
    gguf_files.write(path, dense | layer_tensors(1))
    with ModelFile.open(path) as model:
        assert [layer.index for layer in model.layers] == [1]
        with pytest.raises(IndexError, match="layer 0"):
            model.layer(0)


def test_optional_metadata(path):
    gguf_files.write(path, metadata={"general.name": None, "granitemoe.context_length": None})
    with ModelFile.open(path) as model:
        assert (model.name, model.context_length) == ("", None)


def granite_tensors() -> dict[str, Tensor]:
    tensors = {}
    for layer in range(24):
        tensors |= layer_tensors(layer, 32, 1024, 512)
    return tensors


GRANITE = {
    "granitemoe.block_count": 24,
    "granitemoe.embedding_length": 1024,
    "granitemoe.expert_count": 32,
    "granitemoe.expert_used_count": 8,
}


def test_granite_layer():
    gate = ExpertTensor("gate", Q6_K, 1000, 512 * 1024 // 256 * 210, 512, 1024, 32)
    down = ExpertTensor("down", Q6_K, 9000, 1024 * 512 // 256 * 210, 1024, 512, 32)
    layer = MoeLayer(0, "router", gate, gate, down)
    assert layer.expert_bytes == 1_290_240
    assert layer.all_bytes == 41_287_680
    assert layer.selected_bytes(8) == 10_321_920
    assert gate.slice(0) == Slice(1000, 430_080)
    assert gate.slice(31) == Slice(1000 + 31 * 430_080, 430_080)
    for expert in (-1, 32):
        with pytest.raises(IndexError, match=rf"0\.\.31, not {expert} \(gate\)"):
            gate.slice(expert)


def test_granite_file(path):
    # The public file's size; what is not experts, router and norm is a filler here. All of the data is a hole.
    file_bytes = 1_099_212_096
    tensors = granite_tensors() | {"filler": Tensor(GGMLQuantizationType.I8, (32,))}
    short = gguf_files.write(path, tensors, metadata=GRANITE, hole=True).stat().st_size
    tensors["filler"] = Tensor(GGMLQuantizationType.I8, (32 + file_bytes - short,))
    gguf_files.write(path, tensors, metadata=GRANITE, hole=True)
    tracemalloc.start()
    try:
        model = ModelFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with model:
        assert peak < 2**21  # bytes: the header, not the data, was read
        assert model.file_bytes == file_bytes
        assert model.layers[23].expert_bytes == 1_290_240
        assert model.layers[23].all_bytes == 41_287_680
        assert model.layers[23].selected_bytes(model.experts_used) == 10_321_920
        assert model.token_bytes == 247_726_080
        assert model.experts_bytes == 990_904_320
        assert model.gpu_bytes == 108_307_776
        last = model.read_slice(model.layers[23].down.slice(31))
        assert last.shape == (430_080,)
        assert not last.any()


def test_open_reads_the_header_only(small, path):
    """Other data, same model; and a header of a large vocabulary costs little memory."""
    with ModelFile.open(small) as model:
        end = min(tensor.offset for tensor in model.tensors.values())
    path.write_bytes(small.read_bytes()[:end] + bytes(small.stat().st_size - end))
    with ModelFile.open(small) as model, ModelFile.open(path) as hollow:
        assert hollow.tensors == model.tensors
    tokens = {"tokenizer.ggml.tokens": ["token"] * 50_000, "tokenizer.ggml.scores": [0.5] * 50_000}
    gguf_files.write(path, metadata=tokens)
    tracemalloc.start()
    try:
        ModelFile.open(path).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


# Reading


def test_short_reads_are_continued(small, monkeypatch):
    preadv = os.preadv
    with ModelFile.open(small) as model:
        piece = model.layers[0].up.slice(2)
        whole = model.read_slice(piece)
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
        np.testing.assert_array_equal(model.read_slice(piece), whole)


def test_file_cut_after_opening(small, path):
    path.write_bytes(small.read_bytes())
    with ModelFile.open(path) as model:
        piece = model.layers[1].down.slice(3)
        os.truncate(path, piece.offset + 100)
        with pytest.raises(
            ModelFileError,
            match=rf"^{re.escape(str(path))}: offset {piece.offset + 100}: .*"
            rf"{piece.length - 100} bytes early",
        ):
            model.read_slice(piece)


def test_read_error_names_the_offset(small, monkeypatch):
    def broken(fd, buffers, at):
        raise OSError(5, "Input/output error")

    with ModelFile.open(small) as model:
        piece = model.layers[1].down.slice(3)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ModelFileError, match=f"offset {piece.offset}: cannot read: Input/output error"):
            model.read_slice(piece)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, 2**62), (2_593_120, 1), (2**70, 0)])
def test_slice_outside_the_file(small, offset, length):
    with ModelFile.open(small) as model, pytest.raises(ModelFileError, match=rf"offset {offset}: {length} bytes"):
        model.read_slice(Slice(offset, length))


def test_empty_slice_and_closed_file(small):
    with ModelFile.open(small) as model:
        assert model.read_slice(Slice(model.file_bytes, 0)).shape == (0,)
    with pytest.raises(ValueError, match="closed"):
        model.read_slice(Slice(0, 1))


# Models that the engine cannot run


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4", "Q4_K", "Q5_K", "F16", "F32"])
@pytest.mark.parametrize("name", [GATE, UP, DOWN, "blk.1.ffn_down_exps.weight"])
def test_experts_of_other_types(path, name, kind):
    tensors = model_tensors()
    tensors[name] = Tensor(GGMLQuantizationType[kind], tensors[name].shape)
    gguf_files.write(path, tensors, hole=True)
    (theirs,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
    refused(path, f"tensor '{name}' (type {kind}, offset {theirs.data_offset})", "must be Q6_K", "llama-quantize")


def test_width_not_a_multiple_of_the_block(path):
    """gguf's writer makes no such file; 1,024 rows of 128 have as many bytes as 512 of 256."""
    gguf_files.write(path)
    start = field(path, f"{UP}: name length").position
    gguf_files.patch(path, f"{UP}: dimension 1", 1024)
    gguf_files.patch(path, f"{UP}: dimension 0", 128)
    refused(path, f"offset {start}: tensor '{UP}' (type Q6_K) is 4 x 1024 x 128", "multiple of 256")


@pytest.mark.parametrize("role", ["gate_exps", "up_exps", "down_exps", "gate_inp"])
def test_missing_tensor(path, role):
    tensors = model_tensors()
    del tensors[f"blk.1.ffn_{role}.weight"]
    gguf_files.write(path, tensors, hole=True)
    refused(path, f"tensor 'blk.1.ffn_{role}.weight' is missing", "type ", "offset ")


def test_router_without_experts(path):
    tensors = layer_tensors(0) | {"blk.1.ffn_gate_inp.weight": Tensor(F32, (EXPERTS, WIDTH))}
    gguf_files.write(path, tensors)
    refused(path, "'blk.1.ffn_gate_inp.weight' (type F32", "'blk.1.ffn_gate_exps.weight' is missing")


def test_not_a_mixture_of_experts(path):
    gguf_files.write(path, {"blk.0.ffn_up.weight": Tensor(Q6_K, (512, 256))})
    refused(path, "'granitemoe'", "no expert tensors", "not a mixture-of-experts model")


def test_no_tensors(path):
    gguf_files.write(path, {})
    refused(path, "no expert tensors")


def test_fused_gate_and_up(path):
    tensors = model_tensors()
    del tensors[GATE], tensors[UP]
    tensors["blk.0.ffn_gate_up_exps.weight"] = Tensor(Q6_K, (EXPERTS, 2 * EXPERT_WIDTH, WIDTH))
    gguf_files.write(path, tensors, hole=True)
    refused(path, "tensor 'blk.0.ffn_gate_up_exps.weight' (type Q6_K, offset ", "fused", "convert the model again")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.bias", "blk.0.ffn_down_exps.scale", "blk.00.ffn_up_exps.weight"])
def test_unknown_expert_tensor(path, name):
    gguf_files.write(path, model_tensors() | {name: Tensor(F32, (EXPERTS, 256))})
    refused(path, f"tensor '{name}' (type F32, offset ", "does not know this expert tensor")


@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_one_tensor_per_expert(path, role):
    gguf_files.write(path, {f"blk.0.ffn_{role}.{i}.weight": Tensor(Q6_K, (512, 256)) for i in range(4)})
    refused(path, f"tensor 'blk.0.ffn_{role}.0.weight'", "one tensor per expert", "convert the model again")


def test_split_model(path):
    writer = gguf.GGUFWriter(path, "granitemoe", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in (1, 2):
        refused(path.with_name(f"model-0000{part}-of-00002.gguf"), "2 parts of a split", "llama-gguf-split --merge")


# Metadata and shapes that disagree


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"expert_count": 5}, ["'blk.0.ffn_gate_inp.weight' (type F32, offset ", "shape 4 x 256", "want 5 x 256"]),
        ({"expert_count": 2**32 - 1}, ["shape 4 x 256", "want 4294967295 x 256"]),
        ({"expert_count": 0}, ["granitemoe.expert_used_count", "3 experts a token of 0"]),
        ({"expert_used_count": 5}, ["granitemoe.expert_used_count", "5 experts a token of 4"]),
        ({"expert_used_count": 0}, ["granitemoe.expert_used_count", "0 experts a token of 4"]),
        ({"expert_count": None}, ["'granitemoe.expert_count' is missing"]),
        ({"expert_used_count": None}, ["'granitemoe.expert_used_count' is missing"]),
        ({"embedding_length": None}, ["'granitemoe.embedding_length' is missing"]),
        ({"block_count": None}, ["'granitemoe.block_count' is missing"]),
        ({"expert_count": [4, 4]}, ["'granitemoe.expert_count' is missing or no single number"]),
        ({"expert_count": 4.0}, ["'granitemoe.expert_count' must be a whole number, not 4.0"]),
        ({"expert_count": True}, ["'granitemoe.expert_count' must be a whole number, not True"]),
        ({"expert_count": [-4]}, ["'granitemoe.expert_count' is missing or no single number"]),
        ({"embedding_length": 512}, ["'blk.0.ffn_gate_inp.weight' (type F32, offset ", "want 4 x 512"]),
        ({"block_count": 1}, ["'blk.1.ffn_gate_exps.weight' (type Q6_K, offset ", "layer 1 of a model of 1 layers"]),
    ],
)
def test_metadata_disagrees(path, metadata, parts):
    gguf_files.write(path, metadata={f"granitemoe.{key}": value for key, value in metadata.items()})
    refused(path, *parts)


def test_negative_number(path):
    gguf_files.write(path)
    gguf_files.patch(path, "granitemoe.expert_count: type", gguf.GGUFValueType.INT32)
    gguf_files.patch(path, "granitemoe.expert_count: value", 2**32 - 4)
    refused(path, "'granitemoe.expert_count' must be a whole number, not -4")


def test_architecture_missing(path):
    gguf_files.write(path)
    data = path.read_bytes()
    assert data.count(b"general.architecture") == 1
    path.write_bytes(data.replace(b"general.architecture", b"general.brchitecture"))
    refused(path, "'general.architecture' is missing")


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        (GATE, (4, 256, 512), ["shape 4 x 256 x 512", "want 4 x 256 x 256"]),
        (UP, (4, 256, 512), ["shape 4 x 256 x 512", "want 4 x 512 x 256"]),
        (DOWN, (4, 512, 256), ["shape 4 x 512 x 256", "want 4 x 256 x 512"]),
        (UP, (5, 512, 256), ["shape 5 x 512 x 256", "want 4 x 512 x 256"]),
        (GATE, (3, 512, 256), ["shape 3 x 512 x 256", "want 4 x 512 x 256"]),
        (GATE, (4 * 512, 256), ["shape 2048 x 256", "want 4 x 2048 x 256"]),
        (GATE, (4 * 512 * 256,), ["shape 524288"]),
        (DOWN, (2, 2, 256, 512), ["shape 2 x 2 x 256 x 512", "want 4 x 256 x 512"]),
        ("blk.0.ffn_gate_inp.weight", (256, 4), ["shape 256 x 4", "want 4 x 256"]),
        ("blk.1.ffn_up_exps.weight", (4, 768, 256), ["shape 4 x 768 x 256", "want 4 x 512 x 256"]),
    ],
)
def test_shapes_disagree(path, name, shape, parts):
    tensors = model_tensors()
    tensors[name] = Tensor(tensors[name].type, shape)
    gguf_files.write(path, tensors, hole=True)
    refused(path, f"tensor '{name}' (type {tensors[name].type.name}, offset ", *parts)


def test_second_layer_has_another_expert_width(path):
    gguf_files.write(path, layer_tensors(0) | layer_tensors(1, expert_width=256), hole=True)
    refused(path, "'blk.1.ffn_gate_exps.weight' (type Q6_K, offset ", "shape 4 x 256 x 256", "want 4 x 512 x 256")


# Damaged files


def test_file_that_cannot_be_read(path):
    refused(path, "No such file")
    refused(path.parent, "not a regular file")
    os.mkfifo(path)
    refused(path, "not a regular file")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ["offset 0", "the magic needs 4 bytes"]),
        (b"GGU", ["offset 0", "the magic needs 4 bytes"]),
        (b"FUGG" + bytes(28), ["offset 0", "b'FUGG'", "give the path of a .gguf file"]),
        (b"GGUF" + struct.pack("<I", 1) + bytes(24), ["offset 4", "GGUF version 1"]),
        (b"GGUF" + struct.pack("<I", 4) + bytes(24), ["offset 4", "GGUF version 4"]),
        (b"GGUF" + struct.pack(">I", 2) + bytes(24), ["offset 4", "big-endian"]),
        (b"GGUF" + struct.pack("<IQ", 3, 0), ["offset 16", "the key count needs 8 bytes"]),
    ],
)
def test_not_a_gguf_file(path, data, parts):
    path.write_bytes(data)
    refused(path, *parts)


def test_big_endian(path):
    gguf_files.write(path, endian=GGUFEndian.BIG, hole=True)
    refused(path, "offset 4", "big-endian", "little-endian")


@pytest.mark.parametrize("value", [2**25, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("tensor count", "tensors"),
        ("key count", "keys"),
        ("general.name: length", "bytes of the value of key 'general.name'"),
        ("general.name: key length", "bytes of a key"),
        ("tokenizer.ggml.tokens: items", "items of key 'tokenizer.ggml.tokens'"),
        ("tokenizer.ggml.tokens: length of item 0", "bytes of the value of key 'tokenizer.ggml.tokens'"),
        ("tokenizer.ggml.token_type: items", "items of key 'tokenizer.ggml.token_type'"),
        (f"{DOWN}: name length", "bytes of a tensor's name"),
    ],
)
def test_absurd_count(path, what, part, value):
    # So large a file that its size does not stop the smallest of these counts.
    gguf_files.write(path, granite_tensors(), metadata=GRANITE, hole=True)
    position = field(path, what).position
    gguf_files.patch(path, what, value)
    refused(path, f"offset {position}: {value} {part}")


@pytest.mark.parametrize(
    ("what", "value", "part"),
    [
        ("general.name: length", 2**22, "bytes of the value of key 'general.name'"),
        ("tokenizer.ggml.tokens: length of item 0", 2**22, "bytes of the value of key 'tokenizer.ggml.tokens'"),
        ("tokenizer.ggml.tokens: items", 2**20, "items of key 'tokenizer.ggml.tokens'"),
        ("tokenizer.ggml.token_type: items", 2**20, "items of key 'tokenizer.ggml.token_type'"),
    ],
)
def test_count_for_which_the_file_is_too_short(path, what, value, part):
    """Counts within the limits, seen where they stand and not where the file ends."""
    gguf_files.write(path)
    position = field(path, what).position
    gguf_files.patch(path, what, value)
    refused(path, f"offset {position}: {value} {part} in a file of 2593120 bytes")


def test_file_cut_while_opening(path, monkeypatch):
    size = gguf_files.write(path).stat().st_size
    os.truncate(path, 100)
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_size=size))
    refused(path, "offset ", "the file became shorter while")


def test_arrays_are_bounded_together(path):
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL, 2**21) + bytes(2**21)
    keys = b"".join(struct.pack("<Q", 1) + name + array for name in (b"a", b"b", b"c"))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + keys)
    refused(path, f"{2**21} items of key 'c'", "(limit 0)")


@pytest.mark.parametrize(
    ("what", "value", "parts"),
    [
        ("general.name: type", 13, ["key 'general.name' has unknown type 13"]),
        ("tokenizer.ggml.tokens: item type", 9, ["'tokenizer.ggml.tokens' is an array of arrays"]),
        ("tokenizer.ggml.tokens: item type", 77, ["'tokenizer.ggml.tokens' has unknown type 77"]),
        ("general.name: key length", 0, ["key '' is empty"]),
        (f"{UP}: name length", 0, ["a tensor without name"]),
        (f"{UP}: dimensions", 0, [f"tensor '{UP}' has 0 dimensions, not 1..4"]),
        (f"{UP}: dimensions", 5, [f"tensor '{UP}' has 5 dimensions, not 1..4"]),
        (f"{UP}: dimensions", 2**32 - 1, [f"tensor '{UP}' has 4294967295 dimensions"]),
        (f"{UP}: dimension 0", 0, [f"tensor '{UP}' (type Q6_K) is 4 x 512 x 0"]),
        (f"{UP}: dimension 2", 0, [f"tensor '{UP}' (type Q6_K) is 0 x 512 x 256"]),
        (f"{UP}: type", 4, [f"tensor '{UP}' has type 4, unknown"]),
        (f"{UP}: type", 2**32 - 1, [f"tensor '{UP}' has type 4294967295, unknown"]),
        (f"{UP}: dimension 2", 3, ["leaves a gap after", f"tensor '{UP}'"]),
        (f"{UP}: dimension 2", 5, [f"overlaps tensor '{UP}' (type Q6_K, offset ", f"tensor '{DOWN}'"]),
        (f"{UP}: dimension 2", 2**40, [f"tensor '{UP}' (type Q6_K, offset ", "the file ends at 2593120"]),
        # 2^64 + 1 times as many bytes: a product that wraps at 64 bits would see the right number of them
        (f"{UP}: dimension 2", 2**63 + 4, [f"tensor '{UP}' (type Q6_K, offset ", "the file ends at 2593120"]),
        (f"{UP}: offset", 2**40, [f"tensor '{UP}' (type Q6_K, offset ", "the file ends at 2593120"]),
        (f"{UP}: offset", 2**64 - 32, [f"tensor '{UP}' (type Q6_K, offset ", "the file ends at 2593120"]),
        (f"{UP}: offset", 4 * STRIDE + 1, [f"tensor '{UP}' (type Q6_K, offset ", "not aligned to 32 bytes"]),
    ],
)
def test_damaged_entry(path, what, value, parts):
    gguf_files.patch(gguf_files.write(path), what, value)
    refused(path, "offset ", *parts)


def test_overlapping_tensors(path):
    gguf_files.write(path)
    gate = int.from_bytes(path.read_bytes()[field(path, f"{GATE}: offset").position :][:8], "little")
    gguf_files.patch(path, f"{UP}: offset", gate)
    refused(path, f"tensor '{UP}' (type Q6_K, offset ", f"overlaps tensor '{GATE}' (type Q6_K, offset ")
    gguf_files.patch(path, f"{UP}: offset", gate + 4 * STRIDE - 32)
    refused(path, f"tensor '{UP}' (type Q6_K, offset ", f"overlaps tensor '{GATE}' (type Q6_K, offset ")
    gguf_files.patch(path, f"{UP}: offset", gate + 4 * STRIDE)
    ModelFile.open(path).close()


def test_gap(path):
    gguf_files.write(path, {"token_embd.weight": Tensor(Q6_K, (4, 256))} | layer_tensors(0))
    gguf_files.patch(path, "token_embd.weight: dimension 1", 3)
    refused(path, "tensor 'blk.0.ffn_norm.weight' (type F32, offset ", "leaves a gap after tensor 'token_embd.weight'")


def test_gap_after_the_header(path):
    gguf_files.write(path, layer_tensors(0))
    gguf_files.patch(path, "blk.0.ffn_norm.weight: offset", 32)
    refused(path, "leaves a gap after the header")


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1])
def test_alignment_is_no_power_of_two(path, alignment):
    gguf_files.write(path, alignment=64)
    gguf_files.patch(path, "general.alignment: value", alignment)
    refused(path, f"'general.alignment' must be a power of two, not {alignment}")


def test_alignment_of_another_type(path):
    gguf_files.write(path, alignment=64)
    gguf_files.patch(path, "general.alignment: type", gguf.GGUFValueType.INT32)
    refused(path, "'general.alignment' has type INT32, not UINT32")


@pytest.mark.parametrize("written", [1, 8, 32, 64, 128, 4096])
@pytest.mark.parametrize("read", [1, 8, 32, 64, 128, 4096, 2**31])
def test_another_alignment_never_moves_the_data(path, written, read):
    gguf_files.write(path, alignment=written)
    with ModelFile.open(path) as model:
        right = model.tensors
    gguf_files.patch(path, "general.alignment: value", read)
    try:
        with ModelFile.open(path) as model:
            assert model.tensors == right
    except ModelFileError:
        assert read != written


@pytest.mark.parametrize("what", ["key", "tensor"])
def test_names_that_come_twice(path, what):
    tensors = model_tensors() | {"output.weight": Tensor(F32, (8,)), "putput.weight": Tensor(F32, (8,))}
    gguf_files.write(path, tensors, metadata={"general.author": "a", "general.buthor": "b"})
    old, new = (b"general.buthor", b"general.author") if what == "key" else (b"putput.weight", b"output.weight")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    refused(path, repr(new.decode()), "comes twice")


def test_text_that_is_not_utf8(path):
    gguf_files.write(path)
    path.write_bytes(path.read_bytes().replace(b"test model", b"test \xffodel", 1))
    refused(path, "offset ", "the value of key 'general.name' is not UTF-8")


def test_bytes_after_the_last_tensor(small, path):
    path.write_bytes(small.read_bytes() + b"\0")
    refused(path, "follow tensor 'rope_freqs.weight' (type F32, offset ")


def test_final_padding_may_be_missing(small, path):
    with ModelFile.open(small) as model:
        last = model.tensors["rope_freqs.weight"]
    path.write_bytes(small.read_bytes()[: last.offset + 12])
    with ModelFile.open(path) as model:
        assert_same_layout(model, path)
    os.truncate(path, last.offset + 11)
    refused(path, f"tensor 'rope_freqs.weight' (type F32, offset {last.offset})", "needs 12 bytes", "truncated")


# Made damage: whatever happens to a header, a file is refused, or its experts are where they were.


def assert_same_layout(model: ModelFile, path: Path) -> None:
    """Ours against the gguf package's reader."""
    reader = gguf.GGUFReader(path)
    assert list(model.tensors) == [tensor.name for tensor in reader.tensors]
    for ours, theirs in zip(model.tensors.values(), reader.tensors, strict=True):
        assert (ours.type, ours.offset, ours.length) == (theirs.tensor_type, theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(theirs.shape.tolist()[::-1])


class Damage:
    """The small model's bytes with and without harm, and what is true of every file made from them."""

    def __init__(self, small: Path) -> None:
        self.data = small.read_bytes()
        self.path = small.with_name("damaged.gguf")
        self.fields = gguf_files.fields(small)
        with ModelFile.open(small) as model:
            self.layers, self.tensors = model.layers, model.tensors
            self.shape = (model.expert_count, model.width, model.expert_width)
        self.header_end = min(tensor.offset for tensor in self.tensors.values())
        last = max(self.tensors.values(), key=lambda tensor: tensor.offset)
        self.data_end = last.offset + last.length

    def check(self, data: bytes) -> bool:
        """True if ``data`` is a file that opens, then with the undamaged layout; anything but a refusal raises.

        The one thing that may differ is how much of its padding a tensor that is no expert calls its own.
        """
        self.path.write_bytes(data)
        model = open_or_refuse(self.path)
        if model is None:
            return False
        with model:
            assert model.layers == self.layers
            assert (model.expert_count, model.width, model.expert_width) == self.shape
            assert 1 <= model.experts_used <= model.expert_count
            assert extents(model.tensors) == extents(self.tensors)
            for layer in model.layers:
                for expert in range(model.expert_count):
                    for piece in layer.slices(expert).values():
                        assert self.header_end <= piece.offset < piece.offset + piece.length <= len(data)
            assert_same_layout(model, self.path)
        return True


def open_or_refuse(path: Path) -> ModelFile | None:
    """None if the file is refused, in words that fit on a screen."""
    try:
        return ModelFile.open(path)
    except ModelFileError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    assert len(message) < 1500
    assert "\n" not in message
    return None


def extents(tensors: dict[str, TensorInfo]) -> list[tuple[int, int]]:
    return [(tensor.offset, -(-tensor.length // 32)) for tensor in tensors.values()]


@pytest.fixture(scope="module")
def damage(small) -> Damage:
    return Damage(small)


def made(examples: int):
    # The deadline is against hangs; a loaded machine needs some ms.
    return settings(
        max_examples=examples,
        deadline=5000,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def test_damage_sees_the_undamaged_file(damage):
    assert damage.check(damage.data)


@made(300)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes(damage, flips):
    data = bytearray(damage.data)
    for where, mask in flips:
        data[int(where * damage.header_end)] ^= mask
    damage.check(bytes(data))


def test_every_bit_of_the_entries(damage):
    """One flipped bit in a length, dimension, type or offset of a layer's tensor, or in a count: always refused."""
    guarded = [field for field in damage.fields if field.what in ("tensor count", "key count")]
    guarded += [field for field in damage.fields if field.what.startswith("blk.")]
    assert len(guarded) == 2 + 2 * sum((5, 6, 7, 7, 7))  # norm, router and three matrices in each of two layers
    damage.path.write_bytes(damage.data)
    with damage.path.open("r+b", buffering=0) as file:
        for field in guarded:
            for bit in range(8 * field.size):
                at, mask = field.position + bit // 8, 1 << bit % 8
                os.pwrite(file.fileno(), bytes([damage.data[at] ^ mask]), at)
                assert open_or_refuse(damage.path) is None, (field, bit)
                os.pwrite(file.fileno(), damage.data[at : at + 1], at)
    assert damage.check(damage.data)


@made(200)
@given(st.floats(0, 1, exclude_max=True), st.booleans())
@example(0.0, False)
def test_truncated(damage, where, in_header):
    length = int(where * (damage.header_end if in_header else len(damage.data)))
    assert damage.check(damage.data[:length]) == (length >= damage.data_end)


def test_truncated_in_the_padding(damage):
    assert damage.data_end < len(damage.data)
    for length in range(damage.data_end - 40, len(damage.data)):
        assert damage.check(damage.data[:length]) == (length >= damage.data_end)


NUMBERS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 600),
    st.integers(0, 64).map(lambda bits: 2**bits % 2**64),
    st.integers(0, 90_000).map(lambda step: 32 * step),
)


@made(400)
@given(st.data())
def test_edited_field(damage, data):
    field = data.draw(st.sampled_from(damage.fields))
    value = data.draw(NUMBERS) % 2 ** (8 * field.size)
    edited = bytearray(damage.data)
    edited[field.position : field.position + field.size] = value.to_bytes(field.size, "little")
    damage.check(bytes(edited))


@made(200)
@given(st.data())
def test_overlapping_offsets(damage, data):
    """A tensor moved into another one is refused, whatever both are."""
    names = list(damage.tensors)
    moved = data.draw(st.sampled_from(names))
    onto = damage.tensors[data.draw(st.sampled_from([name for name in names if name != moved]))]
    start = min(tensor.offset for tensor in damage.tensors.values())
    within = data.draw(st.integers(0, (onto.length - 1) // 32)) * 32
    (field,) = [field for field in damage.fields if field.what == f"{moved}: offset"]
    edited = bytearray(damage.data)
    edited[field.position : field.position + 8] = (onto.offset - start + within).to_bytes(8, "little")
    assert not damage.check(bytes(edited))


@made(200)
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=40), st.integers(0, 40)), min_size=1, max_size=2))
def test_inserted_and_lost_bytes(damage, edits):
    data = damage.data
    for where, new, lost in edits:
        at = int(where * damage.header_end)
        data = data[:at] + new + data[at + lost :]
    damage.check(data)


@made(200)
@given(st.binary(max_size=400))
def test_noise_after_the_magic(damage, noise):
    assert not damage.check(b"GGUF" + struct.pack("<I", 3) + noise)
