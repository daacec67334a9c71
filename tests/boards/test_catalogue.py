import itertools
import re
from collections import Counter

import pytest
from amaranth.hdl import Fragment

from boards import build
from boards.catalogue import ECP5_BOARDS
from boards.top import Top
from hw.device import UartDevice

AVAILABLE = {"LFE5U-12F": (28, 56), "25F": (28, 56), "45F": (72, 108), "85F": (156, 208)}
"""Multipliers and block RAMs of the dies, of the ECP5 data sheet; the open flow gives the 12F all of a 25F."""
CELLS = ("MULT18X18D", "DP16KD")


def cells(fragment: Fragment) -> Counter:
    """Instances of each type below an elaborated fragment."""
    counts = Counter([getattr(fragment, "type", None)])
    for inner, *_ in fragment.subfragments:  # type: ignore[attr-defined]
        counts += cells(inner)
    return counts


def used(board, params) -> list[int]:
    platform = board.platform()
    pll = build.clock_settings(board)
    device = UartDevice(params, clock_hz=round(pll.f_out), baud=board.baud)
    counts = cells(Fragment.get(Top(device, pll), platform))
    return [counts[cell] for cell in CELLS]


def available(board) -> tuple[int, int]:
    device = board.platform().device
    return AVAILABLE.get(device) or AVAILABLE[device.rsplit("-")[-1]]


@pytest.mark.parametrize("name", ["ulx3s_12f", "ulx3s_45f", "ulx3s_85f", "colorlight_i9"])
def test_what_is_counted_before_synthesis(name):
    """Multipliers and block RAMs are instances: below 80 % with the board's lanes, above with twice as many lanes."""
    board = ECP5_BOARDS[name]
    counts, most = used(board, board.params), available(board)
    assert counts[0] == 16 * board.params.tokens + 3
    assert all(10 * count <= 8 * limit for count, limit in zip(counts, most, strict=True)), (counts, most)
    assert 10 * (16 * 2 * board.params.tokens + 3) > 8 * most[0]
    for params in board.others.values():
        assert all(count <= limit for count, limit in zip(used(board, params), most, strict=True))


@pytest.mark.parametrize("board", ECP5_BOARDS.values(), ids=ECP5_BOARDS)
def test_the_boards_of_a_die_are_alike(board):
    """What the test above counts for one holds for all; each takes Granite's experts, its clock and eight to a bit."""
    same = [other for other in ECP5_BOARDS.values() if available(other) == available(board)]
    assert {other.params for other in same} == {board.params}
    params = board.params
    assert (params.max_width, params.max_expert_width) == (1024, 512)
    assert params.max_experts >= 32
    assert build.clock_settings(board).f_out == board.target_mhz * 1e6 >= 8 * board.baud
    assert board.target_mhz * 1e6 <= min(build.clock_cap(board.platform().speed).values())


@pytest.mark.parametrize("mhz", [160, 180, 200, 220])
@pytest.mark.parametrize(
    "f_in", sorted({round(board.platform().default_clk_frequency) for board in ECP5_BOARDS.values()})
)
def test_a_fast_clock_is_in_reach(f_in, mhz):
    """From every board's clock some setting lies within 5 % of what the fabric might do."""
    try:
        near = [float(build.pll_settings(f_in, mhz * 1_000_000).f_out)]
    except ValueError as error:
        near = [float(hz) for hz in re.findall(r"([\d.]+) Hz", str(error).split("nearest:")[1])]
    assert min(abs(made - mhz * 1e6) for made in near) <= mhz * 0.05e6


def test_result_names():
    board = ECP5_BOARDS["ulx3s_45f"]
    assert board.with_tokens(None) is board.params
    assert board.result_name(board.params) == "ulx3s_45f"
    assert board.result_name(board.with_tokens(4)) == "ulx3s_45f_t4"
    with pytest.raises(ValueError, match="ulx3s_45f cannot be built with 3 token lanes, only with 2, 4"):
        board.with_tokens(3)


@pytest.mark.parametrize("board", ECP5_BOARDS.values(), ids=ECP5_BOARDS)
def test_every_constraint_has_its_reason(board):
    """A comment comes right before each command; a file without commands says why."""
    lines = build.constraints(board).read_text().splitlines()
    assert lines[0].startswith("# ")
    for before, line in itertools.pairwise(lines):
        assert line.startswith("# ") or (before.startswith("# ") and re.fullmatch(r"(SYSCONFIG|IOBUF PORT) .*;", line))


def test_no_constraint_is_without_a_board():
    assert {path.stem for path in build.CONSTRAINTS.glob("*.lpf")} == set(ECP5_BOARDS)
