"""``make mutants``: break the hardware and the golden model on purpose; each break must fail a test.

Each mutant is one replaced piece of source and the test files that have to notice. The tree is copied to
``build/mutants``, changed there and tested there; the script ends with status 1 if a mutant survives. The list, with
what each stands for, is printed as the table of ``docs/testing.md``.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """``old`` in ``file``, which occurs once, becomes ``new``; ``tests`` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


GOLDEN, DECODE, MAC, ACCUMULATE = (f"tests/{name}.py" for name in (
    "sim/test_golden", "hw/test_decode", "hw/test_mac", "hw/test_accumulate"
))  # fmt: skip
MUTANTS = [
    # The golden model, held by the gguf package, exact fractions and float64.
    Mutant(
        "golden: nibbles swapped",
        "sim/golden/q6_k.py",
        "(4 * (group // 2)) & 15",
        "(4 - 4 * (group // 2)) & 15",
        GOLDEN,
    ),
    Mutant(
        "golden: high bits of the wrong group",
        "sim/golden/q6_k.py",
        "(high >> (2 * group) & 3)",
        "(high >> (2 * (group ^ 1)) & 3)",
        GOLDEN,
    ),
    Mutant(
        "golden: scales read as unsigned",
        "sim/golden/q6_k.py",
        ".view(np.int8)\n    d =",
        ".astype(np.int16)\n    d =",
        GOLDEN,
    ),
    Mutant(
        "golden: subnormal d off by one exponent",
        "sim/golden/q6_k.py",
        "np.maximum(biased, 1) - 25",
        "biased - 25",
        GOLDEN,
    ),
    Mutant("golden: activations cut instead of rounded", "sim/golden/activations.py", "np.rint(", "np.trunc(", GOLDEN),
    Mutant(
        "golden: exponent one too small near 2^15",
        "sim/golden/activations.py",
        "    exponent += np.ldexp(peak, -exponent) > ACTIVATION_MAX\n",
        "",
        GOLDEN,
    ),
    Mutant(
        "golden: +1/2 dropped when rounding",
        "sim/golden/matmul.py",
        "(product + (1 << (right - 1))) >> right",
        "product >> right",
        GOLDEN,
    ),
    Mutant("golden: overflow not clamped", "sim/golden/matmul.py", ">= 2.0**62", ">= np.inf", GOLDEN),
    # The hardware, held by the golden model.
    Mutant(
        "decode: one weight bit flipped",
        "hw/decode.py",
        "Cat(low, high[0], ~high[1])",
        "Cat(low if i != 5 else low ^ 1, high[0], ~high[1])",
        DECODE,
    ),
    Mutant(
        "decode: nibbles swapped",
        "hw/decode.py",
        ".word_select(s1.index[2], 4)",
        ".word_select(~s1.index[2], 4)",
        DECODE,
    ),
    Mutant("decode: bias of 32 not subtracted", "hw/decode.py", "high[0], ~high[1]", "high[0], high[1]", DECODE),
    Mutant("decode: NaN taken for a number", "hw/decode.py", "tag.bad.eq(biased.all())", "tag.bad.eq(0)", DECODE),
    Mutant(
        "decode: length of a run not checked",
        "hw/decode.py",
        "word.error | (word.last != matrix_end)",
        "word.error",
        DECODE,
    ),
    Mutant(
        "decode: unaligned end of a run not told",
        "hw/decode.py",
        "word.error | (word.last != matrix_end)",
        "word.last != matrix_end",
        DECODE,
    ),
    Mutant(
        "decode: waiting sub-block overwritten",
        "hw/decode.py",
        "step.eq(self.o.ready | ~self.o.valid)",
        "step.eq(1)",
        DECODE,
    ),
    Mutant(
        "align: word cut two bytes off",
        "hw/align.py",
        "s1_window[8 * TAIL * shift :]",
        "s1_window[8 * TAIL * (shift ^ 1) :]",
        "tests/hw/test_align.py",
    ),
    Mutant(
        "align: padding not checked",
        "hw/align.py",
        "block_end & (padding // self.link_bytes == beat.missing)",
        "block_end",
        "tests/hw/test_align.py",
    ),
    Mutant(
        "gather: rest of a short word not cleared",
        "hw/gather.py",
        "m.d.sync += target.eq(0)",
        "pass",
        "tests/hw/test_gather.py",
    ),
    Mutant(
        "mac: sign of the weight's top digit lost", "hw/mac.py", "for f in (0, 1, -2, -1)", "for f in (0, 1, 2, 3)", MAC
    ),
    Mutant("mac: product one bit too narrow", "hw/mac.py", "dsp.p[:28]", "dsp.p[:27]", MAC),
    Mutant("mac: block sum not restarted", "hw/mac.py", "Mux(first, 0, total)", "total", MAC),
    Mutant(
        "activations: halves of a sub-block swapped",
        "hw/activations.py",
        "== i // LOAD_VALUES",
        "!= i // LOAD_VALUES",
        MAC,
    ),
    Mutant(
        "accumulate: +1/2 dropped when rounding",
        "hw/accumulate.py",
        "term[:low_bits] + doubled[0]",
        "term[:low_bits]",
        ACCUMULATE,
    ),
    Mutant(
        "accumulate: carry into the high half lost",
        "hw/accumulate.py",
        "before_high + term_high + sum_low[low_bits]",
        "before_high + term_high",
        ACCUMULATE,
    ),
    Mutant("accumulate: no clamp", "hw/accumulate.py", "Mux(outside, Cat(", "Mux(0, Cat(", ACCUMULATE),
    Mutant("accumulate: bad scale not marked", "hw/accumulate.py", "ERROR_SCALE, 0)", "0, 0)", ACCUMULATE),
    Mutant("accumulate: row not restarted", "hw/accumulate.py", "Mux(first, 0, read.data)", "read.data", ACCUMULATE),
    Mutant(
        "queue: takes more than it holds",
        "hw/primitives/queue.py",
        "self.i.ready.eq(~held[self.depth])",
        "self.i.ready.eq(1)",
        "tests/hw/test_primitives.py",
    ),
    Mutant(
        "engine: exponents of another column",
        "hw/matrix_engine.py",
        "activations.e_column.eq(accumulate.e_column)",
        "activations.e_column.eq(mac.x_column)",
        "tests/sim/test_matrix_engine.py",
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose description contains TEXT")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.what]
    if args.list:
        print("| broken on purpose | in | noticed by |\n| --- | --- | --- |")
        for mutant in chosen:
            print(f"| {mutant.what} | `{mutant.file}` | `{mutant.tests}` |")
        return 0
    survivors = []
    for tests in sorted({mutant.tests for mutant in chosen}):
        print(f"unbroken: {tests}: ", end="", flush=True)
        if run(Mutant("none", "README.md", "# emufpga\n", "# emufpga\n", tests)):
            print("FAILS without a mutant: its verdicts would mean nothing")
            return 1
        print("passes", flush=True)
    for number, mutant in enumerate(chosen, 1):
        start = time.monotonic()
        print(f"[{number}/{len(chosen)}] {mutant.what} ({mutant.file}): ", end="", flush=True)
        caught = run(mutant)
        print(f"{'caught' if caught else 'SURVIVED'} after {time.monotonic() - start:.0f} s", flush=True)
        if not caught:
            survivors.append(mutant.what)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


def run(mutant: Mutant) -> bool:
    """Whether the tests fail on the mutant; raises ValueError if the source no longer has the piece to replace."""
    source = (ROOT / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {source.count(mutant.old)} times, not once")
    copy = ROOT / "build" / "mutants"
    shutil.rmtree(copy, ignore_errors=True)
    for folder in ("boards", "host", "hw", "models", "sim", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    # The copy's folder comes first on sys.path, before the installed (editable) tree.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900)
    if result.returncode not in (0, 1):  # 1: tests failed; anything else is not a verdict
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
