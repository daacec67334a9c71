import pytest

from hw.formats.params import Params


def test_defaults_and_derived():
    params = Params(tokens=4, max_batch=8, max_width=1536, max_expert_width=768)
    assert (params.passes, params.max_columns, params.max_hidden_columns, params.store_columns) == (2, 6, 3, 9)
    assert params.store_blocks == 2 * 16
    assert Params() == Params(
        link_bytes=16, tokens=1, max_batch=8, max_width=1024, max_expert_width=512, max_experts=128
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("link_bytes", 2, r"link_bytes must be one of \(1, 4, 8, 16\), not 2"),
        ("tokens", 0, r"tokens must be a power of two in 1\.\.16, not 0"),
        ("tokens", 3, r"tokens must be a power of two in 1\.\.16, not 3"),
        ("tokens", 32, r"tokens must be a power of two in 1\.\.16, not 32"),
        ("max_batch", 0, r"max_batch must be a multiple of tokens \(1\) in 1\.\.64, not 0"),
        ("max_batch", 65, r"max_batch must be a multiple of tokens \(1\) in 1\.\.64, not 65"),
        ("max_width", 0, r"max_width must be a multiple of 256 in 256\.\.16384, not 0"),
        ("max_width", 300, r"max_width must be a multiple of 256 in 256\.\.16384, not 300"),
        ("max_width", 16640, r"max_width must be a multiple of 256 in 256\.\.16384, not 16640"),
        ("max_expert_width", 0, r"max_expert_width must be a multiple of 256 in 256\.\.16384, not 0"),
        ("max_expert_width", 300, r"max_expert_width must be a multiple of 256 in 256\.\.16384, not 300"),
        ("max_expert_width", 16640, r"max_expert_width must be a multiple of 256 in 256\.\.16384, not 16640"),
        ("max_experts", 0, r"max_experts must be in 1\.\.1024, not 0"),
        ("max_experts", 1025, r"max_experts must be in 1\.\.1024, not 1025"),
    ],
)
def test_rejects_values(field, value, message):
    with pytest.raises(ValueError, match=message):
        Params(**{field: value})


def test_rejects_a_batch_that_is_no_multiple_of_the_lanes():
    with pytest.raises(ValueError, match=r"max_batch must be a multiple of tokens \(4\) in 4\.\.64, not 6"):
        Params(tokens=4, max_batch=6)


@pytest.mark.parametrize("field", ["link_bytes", "tokens", "max_batch", "max_width", "max_expert_width", "max_experts"])
@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_rejects_types(field, value):
    with pytest.raises(TypeError, match=f"{field} must be an int, not {value!r}"):
        Params(**{field: value})


def test_rejects_more_activations_than_a_memory_holds():
    assert Params(max_batch=16, max_width=15872, max_expert_width=512).store_blocks == 1024
    assert Params(max_batch=8, max_width=16384, max_expert_width=16384).store_blocks == 1024
    message = r"= 16 x \(16384 \+ 512\) takes 32768 words of activation memory a multiplier, more than 16384: lower"
    with pytest.raises(ValueError, match=message):
        Params(max_batch=16, max_width=16384, max_expert_width=512)
    with pytest.raises(ValueError, match=r"= 17 x \(15872 \+ 512\) takes 32768 words"):
        Params(max_batch=17, max_width=15872, max_expert_width=512)
