import json

import pytest

from boards import table
from boards.build import ROOT
from sim.record import markers

DOCS = ROOT / "docs" / "boards.md"
MARKERS = markers("boards.table")


def test_docs_hold_the_results():
    """Every figure of the table is that of a file in boards/results; ``python -m boards.table --write`` makes it so."""
    assert table.replaced(DOCS.read_text(), DOCS) == DOCS.read_text()


def test_row():
    result = {
        "device": "LFE5U-45F",
        "speed_grade": "6",
        "params": {"tokens": 4, "max_batch": 8},
        "fmax_worst_hz": 81_260_000,
        "clock_cap_hz": 175_763_359,
        "bitstream_clock_hz": 75_000_000,
        "met": True,
        "seeds": [1, 2, 3],
        "utilisation": {
            name: {"used": 1200, "available": 4800, "percent": 25.0} for name in ("lut4", "flip_flops", "block_rams")
        }
        | {"multipliers": {"used": 67, "available": 72, "percent": 93.1}},
    }
    assert table.row("ulx3s_45f_t4", result) == [
        *("`ulx3s_45f_t4`", "LFE5U-45F-6", "4 x 8", "81.3 MHz of 3", "175.8 MHz", "75 MHz"),
        *("1,200 (25 %)", "1,200 (25 %)", "67 (93 %)", "1,200 (25 %)", "no"),
    ]
    result |= {"met": False}
    assert table.row("x", result)[5] == "75 MHz, MISSED"
    result["utilisation"]["multipliers"] = {"used": 35, "available": 72, "percent": 48.6}
    assert table.row("x", result)[-1] == "yes"


def test_writes_between_the_markers(tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n")
    assert table.main(["--write", str(path)]) == 0
    assert path.read_text() == f"before\n{MARKERS[0]}\n{table.table()}\n{MARKERS[1]}\nafter\n"
    assert table.main([]) == 0
    assert capsys.readouterr().out == table.table() + "\n"


@pytest.mark.parametrize("text", ["", "".join(MARKERS[:1]), "".join(MARKERS) * 2])
def test_a_file_without_markers_is_refused(text, tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text(text)
    assert table.main(["--write", str(path)]) == 2
    assert f"error: {path} needs one line <!-- boards.table -->" in capsys.readouterr().err
    assert path.read_text() == text


def test_results_name_their_files():
    for path in table.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert path.stem in (result["board"], f"{result['board']}_t{result['params']['tokens']}")
