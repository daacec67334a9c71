"""The boards: what each is, how its bitstream is set up, and how it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from boards import arty_a7, colorlight, ecpix5, nitefury, orangecrab, ulx3s, versa
from hw.formats.params import Params


@dataclass(frozen=True)
class Board:
    """One board.

    Parameters
    ----------
    name
        As the command line and ``boards/results/`` know it.
    platform
        Makes its Amaranth platform.
    params
        The most token lanes, then the largest batch, that leave a fifth of every resource free.
    baud
        Of its UART, 0 where it has PCIe; the board's module says where the figure is from.
    target_mhz
        Clock of the bitstream.
    program
        Arguments of openFPGALoader that name the board.
    note
        One line for the table.
    others
        By token lanes: further parameters that fit the part, if only by breaking the rule of ``params``.
    family
        Which flow builds it: ``ecp5`` is :mod:`boards.build`; ``artix`` and ``artix_pcie`` are :mod:`boards.artix`.
    constraints
        Name of its file in ``constraints/``, by default the board's.
    """

    name: str
    platform: Callable[[], Any]
    params: Params
    baud: int
    target_mhz: float
    program: tuple[str, ...]
    note: str
    others: dict[int, Params] = field(default_factory=dict)
    family: str = "ecp5"
    constraints: str = ""

    def with_tokens(self, tokens: int | None) -> Params:
        """The parameters for so many token lanes; the board's own for None.

        Raises
        ------
        ValueError
            Naming the board and the lanes that it can have.
        """
        if tokens is None or tokens == self.params.tokens:
            return self.params
        if tokens not in self.others:
            known = ", ".join(map(str, sorted({self.params.tokens, *self.others})))
            raise ValueError(f"{self.name} cannot be built with {tokens} token lanes, only with {known}")
        return self.others[tokens]

    def result_name(self, params: Params) -> str:
        """Name of its result in ``boards/results/``, without ``.json``."""
        return self.name if params.tokens == self.params.tokens else f"{self.name}_t{params.tokens}"


def _params(tokens: int, max_batch: int, frame_bytes: int = 4096) -> Params:
    """Wide enough for Granite's experts: width 1024, expert width 512, 32 experts."""
    return Params(
        tokens=tokens,
        max_batch=max_batch,
        max_width=1024,
        max_expert_width=512,
        max_experts=64,
        frame_bytes=frame_bytes,
    )


# Block RAMs: 43 of a 25F's 56, 83 of a 45F's 108, 115 of an 85F's 208; multipliers: 19 of 28, 35 of 72, 67 of 156.
_25F = _params(1, 4, frame_bytes=1024)
_45F = _params(2, 8)
_85F = _params(4, 8)
_FOUR_ON_45F = {4: _params(4, 4)}
_ONE_ON_45F = _ONE_ON_85F = {1: _params(1, 8)}

_NITEFURY = Params(
    tokens=16, max_batch=16, max_width=2048, max_expert_width=1024, max_experts=64, frame_bytes=65536, memory_bits=30
)
"""Widths of OLMoE; 768 experts of Granite are 990,904,320 of the memory's 2**30 bytes."""

_ALL = (
    Board("ulx3s_12f", ulx3s.Ulx3s12F, _25F, ulx3s.BAUD, 162.5, ("-b", "ulx3s"), "smallest part"),
    Board("ulx3s_25f", ulx3s.Ulx3s25F, _25F, ulx3s.BAUD, 162.5, ("-b", "ulx3s"), "as the 12F, another identifier"),
    Board("ulx3s_45f", ulx3s.Ulx3s45F, _45F, ulx3s.BAUD, 150, ("-b", "ulx3s"), "", _FOUR_ON_45F),
    Board("ulx3s_85f", ulx3s.Ulx3s85F, _85F, ulx3s.BAUD, 150, ("-b", "ulx3s"), "", _ONE_ON_85F),
    Board("ecpix5_45f", ecpix5.Ecpix5With45F, _45F, ecpix5.BAUD, 200, ("-b", "ecpix5"), "5G part", _ONE_ON_45F),
    Board("ecpix5_85f", ecpix5.Ecpix5With85F, _85F, ecpix5.BAUD, 200, ("-b", "ecpix5"), "5G part"),
    Board(
        "orangecrab_85f",
        orangecrab.OrangeCrab85F,
        _85F,
        orangecrab.BAUD,
        180,
        ("-b", "orangeCrab"),
        "needs a 3.3 V UART adapter; hold the button when plugging in to load it",
    ),
    Board(
        "colorlight_i9",
        colorlight.ColorlightI9,
        _45F,
        colorlight.BAUD,
        125,
        ("-b", "colorlight-i9"),
        "on the extension board",
    ),
    Board(
        "versa_ecp5",
        versa.VersaEcp5,
        _45F,
        versa.BAUD,
        175,
        # The chain's first device is the board's clock chip, which openFPGALoader does not know.
        ("-c", "ft2232", "--misc-device", "0x00191043,8,ispclock"),
        "end of life",
    ),
    Board(
        "arty_a7_35",
        arty_a7.ArtyA7_35,
        _params(2, 4),
        arty_a7.BAUD,
        100,
        ("-b", "arty_a7_35t"),
        "",
        {1: _params(1, 4), 4: _params(4, 4)},
        family="artix",
    ),
    Board(
        "arty_a7_100",
        arty_a7.ArtyA7_100,
        _params(8, 8),
        arty_a7.BAUD,
        100,
        ("-b", "arty_a7_100t"),
        "",
        {1: _params(1, 8), 4: _params(4, 8)},
        family="artix",
    ),
    Board(
        "nitefury_ii",
        nitefury.NiteFuryII,
        _NITEFURY,
        0,
        150,
        ("-c", "digilent_hs3"),
        "M.2 card",
        family="artix_pcie",
    ),
    Board(
        "acorn_cle_215p",
        nitefury.AcornCle215Plus,
        _NITEFURY,
        0,
        150,
        ("-b", "acornCle215"),
        "the NiteFury-II with a faster part",
        family="artix_pcie",
        constraints="nitefury_ii",
    ),
)
BOARDS = {board.name: board for board in _ALL}
ARTIX_BOARDS = {name: board for name, board in BOARDS.items() if board.family.startswith("artix")}
ECP5_BOARDS = {name: board for name, board in BOARDS.items() if board.family == "ecp5"}
