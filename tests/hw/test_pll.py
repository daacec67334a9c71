import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue]
from amaranth.hdl import Fragment

from hw.primitives.pll import Pll, PllSettings, pll_settings, xc7_pll_settings

MHZ = 1_000_000


def allowed(settings: PllSettings) -> bool:
    """The data sheet's table, written out, for both outputs: the second has half the clock."""
    return (
        all(1 <= divider <= 128 for divider in (settings.input, settings.feedback, 2 * settings.output))
        and 8 * MHZ <= settings.f_in <= 400 * MHZ
        and 10 * MHZ <= settings.f_pfd <= 400 * MHZ
        and 400 * MHZ <= settings.f_vco <= 800 * MHZ
        and Fraction(3_125_000) <= settings.f_out / 2 < settings.f_out <= 400 * MHZ
    )


def can_be_made(f_in: int, f_out: Fraction) -> bool:
    """Whether any dividers give exactly ``f_out``, by trying all."""
    return any(
        f_in * feedback == f_out * divide
        and 10 * MHZ * divide <= f_in <= 400 * MHZ * divide
        and any(400 * MHZ <= f_out * output <= 800 * MHZ for output in range(1, 65))
        for divide in range(1, 129)
        for feedback in range(1, 129)
    )


@pytest.mark.parametrize("f_in", [12, 25, 100, 400])
def test_every_clock_that_can_be_made(f_in):
    """In steps of 12.5/3 MHz over the whole range: exact and within all limits, or refused because there is no way."""
    made = 0
    for step in range(97):
        f_out = Fraction(step * 12_500_000, 3)
        try:
            settings = pll_settings(f_in * MHZ, f_out)
        except ValueError:
            assert f_out < 3_125_000 or f_out > 400 * MHZ or not can_be_made(f_in * MHZ, f_out)
            continue
        made += 1
        assert settings.f_out == f_out
        assert settings.f_in * settings.feedback == f_out * settings.input
        assert allowed(settings)
    assert made > 0


@pytest.mark.synth
@pytest.mark.parametrize(("f_in", "f_out"), [(25, 150), (25, 162.5), (25, 175), (12, 48), (100, 125), (25, 25)])
def test_agrees_with_ecppll(f_in, f_out, tmp_path):
    """Project Trellis' calculator finds the clock too, with the same dividers or others that mean the same."""
    tool = Path(sys.executable).parent / "yowasp-ecppll"
    subprocess.run(
        [tool, "-i", str(f_in), "-o", str(f_out), "-f", "pll.v"], cwd=tmp_path, check=True, capture_output=True
    )
    text = (tmp_path / "pll.v").read_text()
    divide, feedback, output = (
        int(re.search(rf"\.{name}\((\d+)\)", text)[1])  # type: ignore[index]
        for name in ("CLKI_DIV", "CLKFB_DIV", "CLKOP_DIV")
    )
    ours = pll_settings(f_in * MHZ, Fraction(f_out) * MHZ)
    assert Fraction(feedback, divide) == Fraction(ours.feedback, ours.input)
    assert abs(f_out * output - 600) == abs(float(ours.f_vco) / MHZ - 600)


@pytest.mark.parametrize(
    ("f_in", "f_out", "message"),
    [
        (25, 165, r"165000000 Hz cannot be made of 25000000 Hz; nearest: 162500000 Hz, 175000000 Hz"),
        (7, 100, r"f_in must be in 8000000\.\.400000000 Hz, not 7000000"),
        (401, 100, r"f_in must be in 8000000\.\.400000000 Hz, not 401000000"),
        (25, 3, r"f_out must be in 3125000\.\.400000000 Hz, not 3000000"),
        (25, 401, r"f_out must be in 3125000\.\.400000000 Hz, not 401000000"),
        (8, 100, r"100000000 Hz cannot be made of 8000000 Hz"),
    ],
)
def test_refuses(f_in, f_out, message):
    with pytest.raises(ValueError, match=message):
        pll_settings(f_in * MHZ, f_out * MHZ)


XC7_VCO_MHZ = {"1": 1600, "2": 1866, "3": 2133}
"""DS181, by speed grade."""


@pytest.mark.parametrize(("f_in", "speed"), [(100, "1"), (100, "1L"), (125, "2"), (200, "3")])
def test_xc7_every_clock_that_can_be_made(f_in, speed):
    """In steps of 25/3 MHz: exact and within DS181's limits, or refused because no dividers do it."""
    made = 0
    oscillators = [
        (divide, feedback)
        for divide in range(1, 57)
        for feedback in range(2, 65)
        if 19 * divide <= f_in <= 450 * divide and 800 * divide <= f_in * feedback <= XC7_VCO_MHZ[speed[0]] * divide
    ]
    for step in range(60):
        f_out = Fraction(step * 25_000_000, 3)
        ways = {
            (divide, feedback)
            for divide, feedback in oscillators
            if any(3 * f_in * feedback == 25 * step * divide * output for output in range(1, 65))
        }
        try:
            settings = xc7_pll_settings(f_in * MHZ, f_out, speed)
        except ValueError:
            assert not ways or not 6_250_000 <= f_out <= 464 * MHZ
            continue
        made += 1
        assert settings.f_out == f_out == settings.f_vco / settings.output
        assert (settings.input, settings.feedback) in ways
        assert settings.input == min(ways)[0]
    assert made > 10


@pytest.mark.parametrize(
    ("f_in", "f_out", "speed", "message"),
    [
        (100, 167, "1", r"167000000 Hz cannot be made of 100000000 Hz; nearest: 166\.\d+e6|166"),
        (18, 100, "1", r"f_in must be in 19000000\.\.800000000 Hz, not 18000000"),
        (100, 500, "1", r"f_out must be in 6250000\.\.464000000 Hz, not 500000000"),
        (100, 100, "4", r"speed must be one of 1, 2, 3, not '4'"),
    ],
)
def test_xc7_refuses(f_in, f_out, speed, message):
    with pytest.raises(ValueError, match=message):
        xc7_pll_settings(f_in * MHZ, f_out * MHZ, speed)


class Part:
    """As much of a platform as the PLL looks at."""

    def __init__(self, device: str) -> None:
        self.device = device


def test_pll_is_for_the_part_of_its_settings():
    ecp5, xc7 = pll_settings(25 * MHZ, 150 * MHZ), xc7_pll_settings(100 * MHZ, 150 * MHZ)
    for settings, platform in ((ecp5, None), (ecp5, Part("xc7a35ti")), (xc7, Part("LFE5U-25F")), (xc7, None)):
        with pytest.raises(NotImplementedError, match="PllSettings is not for"):
            Fragment.get(Pll(settings), platform)


def test_xc7_instance():
    text = rtlil.convert(Pll(xc7_pll_settings(100 * MHZ, 150 * MHZ)), platform=Part("xc7a35ti"))
    assert "cell \\PLLE2_BASE" in text
    for name, value in (("DIVCLK_DIVIDE", 1), ("CLKFBOUT_MULT", 15), ("CLKOUT0_DIVIDE", 10), ("CLKOUT1_DIVIDE", 20)):
        assert f"parameter \\{name} {value}\n" in text
    assert 'parameter real \\CLKIN1_PERIOD "10.0"' in text
