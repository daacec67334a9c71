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
    Mutant("decode: NaN taken for a number", "hw/decode.py", "bad.eq(biased.all())", "bad.eq(0)", DECODE),
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
        "step.eq(places >= 2)",
        "step.eq(1)",
        DECODE,
    ),
    Mutant(
        "align: word cut two bytes off",
        "hw/align.py",
        "window[8 * shift :]",
        "window[4 * shift :]",
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
        "half_write[i // LOAD_VALUES]",
        "half_write[1 - i // LOAD_VALUES]",
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
        "credit queue: what leaves is still there",
        "hw/primitives/queue.py",
        "(only_one & pop)",
        "0",
        "tests/hw/test_primitives.py",
    ),
    Mutant(
        "place: taken over what waits",
        "hw/primitives/queue.py",
        "self.i.ready.eq(vacant)",
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

MORE = (
    # (what, file, old, new, tests), as above: the engine's own components.
    (
        "normalise: rounding bit dropped",
        "hw/normalise.py",
        "rounded.eq(rest[1:] + rest[0])",
        "rounded.eq(rest[1:])",
        "tests/hw/test_normalise.py",
    ),
    (
        "normalise: no step up after a 19th bit",
        "hw/normalise.py",
        "self.scaled.exponent.eq(exponent + carry)",
        "self.scaled.exponent.eq(exponent)",
        "tests/hw/test_normalise.py",
    ),
    (
        "normalise: carry between the magnitude's halves lost",
        "hw/normalise.py",
        "(high + low[half])[:half]",
        "high",
        "tests/hw/test_normalise.py",
    ),
    (
        "normalise: argument not clipped at 64",
        "hw/normalise.py",
        "(beyond | argument[-1]).replicate",
        "argument[-1].replicate",
        "tests/hw/test_normalise.py",
    ),
    (
        "normalise: argument cut instead of rounded",
        "hw/normalise.py",
        "[:ARGUMENT_BITS] + magnitude[cut - 1]",
        "[:ARGUMENT_BITS]",
        "tests/hw/test_normalise.py",
    ),
    (
        "swiglu: products cut instead of rounded",
        "hw/swiglu.py",
        "rounded.eq(top[1:] + top[0])",
        "rounded.eq(top[1:])",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: no step up after a 19th bit",
        "hw/swiglu.py",
        "exponent.eq(delay(m, power_14, 1) + carry)",
        "exponent.eq(delay(m, power_14, 1))",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: line below the middle rounded the wrong way",
        "hw/swiglu.py",
        "base + fall + fall_cut",
        "base + fall",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: tiny t shifted by too little",
        "hw/swiglu.py",
        "Mux(too_small[5:].any(), 31, too_small)",
        "too_small",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: t kept a step late",
        "hw/swiglu.py",
        "kept_write.en.eq(step == 2)",
        "kept_write.en.eq(step == 3)",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: takes an element without a free place",
        "hw/swiglu.py",
        "self.i.ready.eq(~busy_15)",
        "self.i.ready.eq(1)",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: sign of u lost",
        "hw/swiglu.py",
        "element.g.negative ^ element.u.negative",
        "element.g.negative",
        "tests/hw/test_swiglu.py",
    ),
    (
        "swiglu: rest counted from the interval's start",
        "hw/swiglu.py",
        "(1 << unit) + (1 << (REST_BITS - 1)) - rest",
        "(1 << unit) - rest",
        "tests/hw/test_swiglu.py",
    ),
    (
        "requant: half up instead of to even",
        "hw/requant.py",
        "(kept[0] & (lost | kept[1]))",
        "kept[0]",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: what was shifted out forgotten",
        "hw/requant.py",
        "lost | (chosen & kept[:step].any())",
        "lost",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: 32767 units taken for too large",
        "hw/requant.py",
        "self.i.h.magnitude > LARGEST",
        "self.i.h.magnitude >= LARGEST",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: exponent one too small near 2^15",
        "hw/requant.py",
        "EXPONENT_STEP + above",
        "EXPONENT_STEP",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: exponent not clamped to -128",
        "hw/requant.py",
        "zero | (own < EXPONENT_MIN)",
        "zero",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: exponent of a zero counted",
        "hw/requant.py",
        "zero | (own < EXPONENT_MIN)",
        "own < EXPONENT_MIN",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: peak of the block before kept",
        "hw/requant.py",
        "Mux(was_seen, before, EXPONENT_MIN)",
        "before",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: far shifts not limited",
        "hw/requant.py",
        "Mux(distance > MOST_RIGHT, MOST_RIGHT, distance[: len(right)])",
        "distance[: len(right)]",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: done after every block",
        "hw/requant.py",
        "token_end & ~waiting & final",
        "token_end & ~left.any()",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: peak of the block that comes",
        "hw/requant.py",
        "Cat(self.r_token, ~parity)",
        "Cat(self.r_token, parity)",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: address counted as taken in any case",
        "hw/requant.py",
        "taken.eq(reading & self.r_ready)",
        "taken.eq(reading)",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: words land on the token's own vector",
        "hw/requant.py",
        "params.max_columns + delayed(base, stages + 1)",
        "delayed(base, stages + 1)",
        "tests/hw/test_requant.py",
    ),
    (
        "requant: peaks for powers of two only",
        "hw/requant.py",
        "depth=2 << len(place.token)",
        "depth=2 * params.max_batch",
        "tests/hw/test_requant.py",
    ),
    (
        "hidden: gate sums taken without a place in the queue",
        "hw/hidden.py",
        "ready.eq(places >= 5)",
        "ready.eq(1)",
        "tests/hw/test_hidden.py",
    ),
    (
        "hidden: margin one short",
        "hw/hidden.py",
        "ready.eq(places >= 5)",
        "ready.eq(places >= 1)",
        "tests/hw/test_hidden.py",
    ),
    (
        "hidden: rounding reads while an up sum is read",
        "hw/hidden.py",
        "requant.r_ready.eq(~asked)",
        "requant.r_ready.eq(1)",
        "tests/hw/test_hidden.py",
    ),
    (
        "hidden: rows one too many",
        "hw/hidden.py",
        "before_last.eq(self.rows - 2)",
        "before_last.eq(self.rows - 1)",
        "tests/hw/test_hidden.py",
    ),
    (
        "hidden: up sums queued as gate sums",
        "hw/hidden.py",
        "gates.i.valid.eq(delayed(taken & gate,",
        "gates.i.valid.eq(delayed(taken,",
        "tests/hw/test_hidden.py",
    ),
    (
        "hidden: a row for every sum",
        "hw/hidden.py",
        "m.If(taken & self.i.p.end)",
        "m.If(taken)",
        "tests/hw/test_hidden.py",
    ),
    (
        "combine: carry into the high half lost",
        "hw/combine.py",
        "delayed(value[half:], 1).as_signed() + low[half]",
        "delayed(value[half:], 1).as_signed()",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: clamped to the wrong end",
        "hw/combine.py",
        "Cat((~high[-1]).replicate(ACCUMULATOR_BITS - 1), high[-1])",
        "Cat(high[-1].replicate(ACCUMULATOR_BITS - 1), ~high[-1])",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: no clamp",
        "hw/combine.py",
        "Mux(outside, clamped, Cat(",
        "Mux(0, clamped, Cat(",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: sums of the layer before added",
        "hw/combine.py",
        "Mux(delayed(is_fresh, 4), 0, stored)",
        "stored",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: token without an expert reads the layer before",
        "hw/combine.py",
        "Mux(delayed(Array(fresh)[self.r_token], 4), 0, stored)",
        "stored",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: only the first row is written fresh",
        "hw/combine.py",
        "m.Elif(valid & last_row)",
        "m.Elif(valid)",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: overflow not told",
        "hw/combine.py",
        "delayed(adding, 2, control=True) & outside",
        "0",
        "tests/hw/test_combine.py",
    ),
    (
        "combine: finished with every token's last sum",
        "hw/combine.py",
        "valid & item.end & last_row, 9",
        "valid & last_row, 9",
        "tests/hw/test_combine.py",
    ),
    (
        "decode: down matrix meets the tokens' own vectors",
        "hw/decode.py",
        "column.eq(Mux(ahead.kind == Kind.DOWN, params.max_columns, 0))",
        "column.eq(0)",
        "tests/hw/test_decode.py",
    ),
    (
        "decode: second row of a down matrix meets the tokens' own vectors",
        "hw/decode.py",
        "column.eq(Mux(kind == Kind.DOWN, params.max_columns, 0))",
        "column.eq(0)",
        "tests/hw/test_decode.py",
    ),
    (
        "decode: down matrix as wide as the others may be",
        "hw/decode.py",
        "Mux(ahead.kind == Kind.DOWN, params.max_hidden_columns, params.max_columns)",
        "params.max_columns",
        "tests/hw/test_decode.py",
    ),
    (
        "decode: every group called the last",
        "hw/decode.py",
        "s1_final.eq((left & (left - 1)) == 0)",
        "s1_final.eq(1)",
        "tests/hw/test_decode.py",
    ),
    (
        "accumulate: row's end in every group",
        "hw/accumulate.py",
        "delayed(tag.final, 1) & (",
        "(",
        "tests/hw/test_accumulate.py",
    ),
    (
        "accumulate: row's end with every lane",
        "hw/accumulate.py",
        "(delayed(tag.lanes >> lane, 1) == 1)",
        "1",
        "tests/hw/test_accumulate.py",
    ),
    (
        "accumulate: kind a stage early",
        "hw/accumulate.py",
        "delayed(tag.kind.as_value(), 14)",
        "delayed(tag.kind.as_value(), 13)",
        "tests/hw/test_accumulate.py",
    ),
    (
        "accumulate: the exponent of the group's first token",
        "hw/accumulate.py",
        "self.e_token.eq(token)",
        "self.e_token.eq(token & ~(params.tokens - 1))",
        "tests/hw/test_accumulate.py",
    ),
    (
        "activations: every lane written",
        "hw/activations.py",
        "(came.token[:lanes] == t) & ",
        "",
        "tests/hw/test_activations.py",
    ),
    (
        "activations: written with the next word's enable",
        "hw/activations.py",
        "enable.eq(valid & (came.token[:lanes] == t) & (came.word[:half_bits] == half))",
        "enable.eq(self.i.valid & (self.i.p.token[:lanes] == t) & (self.i.p.word[:half_bits] == half))",
        "tests/hw/test_activations.py",
    ),
    (
        "mac: several lanes' sums a cycle early",
        "hw/mac.py",
        "Multiplier.LATENCY + self.apart + tree_levels",
        "Multiplier.LATENCY + tree_levels",
        "tests/hw/test_mac.py",
    ),
    (
        "mac: several lanes' products a cycle early",
        "hw/mac.py",
        "delayed(dsp.p[:28].as_signed(), self.apart)",
        "dsp.p[:28].as_signed()",
        "tests/hw/test_mac.py",
    ),
    (
        "memory: bank chosen a cycle early",
        "hw/primitives/memory.py",
        "delay(m, self.r_addr[bank_bits:], self.LATENCY)",
        "delay(m, self.r_addr[bank_bits:], self.LATENCY - 1)",
        "tests/hw/test_vendor_primitives.py",
    ),
    (
        "memory: every bank written",
        "hw/primitives/memory.py",
        "self.w_en & (self.w_addr >> bank_bits == bank)",
        "self.w_en",
        "tests/hw/test_vendor_primitives.py",
    ),
    (
        "memory: a ROM's words 18 bits apart",
        "hw/primitives/memory.py",
        "sum(word << 20 * n",
        "sum(word << 18 * n",
        "tests/hw/test_vendor_primitives.py",
    ),
    (
        "route table: a place's second route not told",
        "hw/route_table.py",
        "done & (~good | (before & bit).any())",
        "done & ~good",
        "tests/hw/test_route_table.py",
    ),
    (
        "route table: masks not cleared after a reset",
        "hw/route_table.py",
        "written.eq(Mux(clearing, clear_expert, place))",
        "written.eq(place)",
        "tests/hw/test_route_table.py",
    ),
    (
        "route table: exponent not lowered with the shift",
        "hw/route_table.py",
        "scaled.exponent.eq(scaled.exponent - 1)",
        "scaled.exponent.eq(scaled.exponent)",
        "tests/hw/test_route_table.py",
    ),
    (
        "route table: weight of exactly 1 refused",
        "hw/route_table.py",
        "entry.weight <= 1 <<",
        "entry.weight < 1 <<",
        "tests/hw/test_route_table.py",
    ),
    (
        "route table: mask replaced instead of joined",
        "hw/route_table.py",
        "Mux(held, before | bit, 0)",
        "Mux(held, bit, 0)",
        "tests/hw/test_route_table.py",
    ),
    (
        "fetch: unwanted expert's down matrix keeps its place",
        "hw/fetch.py",
        "with m.If(~(wanted | config.tape)):\n                    m.d.sync += turn.eq(1)",
        "with m.If(~(wanted | config.tape)):\n                    m.d.sync += turn.eq(~down)",
        "tests/hw/test_fetch.py",
    ),
    (
        "fetch: limit of unanswered requests ignored",
        "hw/fetch.py",
        "with m.Elif(room):",
        "with m.Else():",
        "tests/hw/test_fetch.py",
    ),
    (
        "fetch: one request more than allowed",
        "hw/fetch.py",
        "self.waiting < config.outstanding",
        "self.waiting <= config.outstanding",
        "tests/hw/test_fetch.py",
    ),
    (
        "fetch: not busy while answers are to come",
        "hw/fetch.py",
        "with m.If(self.waiting == 0):",
        "with m.If(1):",
        "tests/hw/test_fetch.py",
    ),
    (
        "fetch: unwanted experts named in tape mode",
        "hw/fetch.py",
        "self.o_expert.valid.eq(wanted)",
        "self.o_expert.valid.eq(wanted | config.tape)",
        "tests/hw/test_fetch.py",
    ),
    (
        "receive: last word that lacks bytes not noticed",
        "hw/receive.py",
        " & (word.missing == 0)",
        "",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: routes' last word taken however long",
        "hw/receive.py",
        "filled.eq(word.missing == Mux(routes.count[0], route_beats, 0))",
        "filled.eq(1)",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: halted engine obeys",
        "hw/receive.py",
        "idle = ~self.halted & ~self.running",
        "idle = ~self.running",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: configuration survives RESET",
        "hw/receive.py",
        "accepted[Message.CONFIG] | accepted[Message.RESET]",
        "accepted[Message.CONFIG]",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: starts while a route is at work",
        "hw/receive.py",
        "with m.If(~self.routes_held):",
        "with m.If(1):",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: starts after a wrong route",
        "hw/receive.py",
        "self.start.eq(~self.halted)",
        "self.start.eq(1)",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: remains of a bad message kept",
        "hw/receive.py",
        "fresh.eq(1),",
        "fresh.eq(0),",
        "tests/hw/test_receive.py",
    ),
    (
        "receive: rest of a bad message taken for the next",
        "hw/receive.py",
        "returns.eq(last & ~Cat",
        "returns.eq(~Cat",
        "tests/hw/test_receive.py",
    ),
    (
        "send: outputs read without a place for them",
        "hw/send.py",
        "read.eq(reading & room)",
        "read.eq(reading)",
        "tests/hw/test_send.py",
    ),
    (
        "send: fatal error told again and again",
        "hw/send.py",
        "self.halted & ~told",
        "self.halted",
        "tests/hw/test_send.py",
    ),
    (
        "send: word replaced while its last beat waits",
        "hw/send.py",
        "free.eq(left == 0)",
        "free.eq(left <= 1)",
        "tests/hw/test_send.py",
    ),
    (
        "cut: broken message not ended",
        "hw/send.py",
        "m.d.sync += cutting.eq(inside)",
        "m.d.sync += cutting.eq(0)",
        "tests/hw/test_send.py",
    ),
    (
        "cut: beat taken from a sender in reset",
        "hw/send.py",
        "~cutting & ~self.cut)",
        "~cutting)",
        "tests/hw/test_send.py",
    ),
    (
        "counters: what was counted before the start stays in flight",
        "hw/counters.py",
        "self.running & ~self.start",
        "self.running",
        "tests/hw/test_counters.py",
    ),
    (
        "counters: level instead of its maximum",
        "hw/counters.py",
        "m.Elif(level > register)",
        "m.Elif(level != register)",
        "tests/hw/test_counters.py",
    ),
    (
        "counters: the upper half misses carries",
        "hw/counters.py",
        "high + above + low[half]",
        "high + above",
        "tests/hw/test_counters.py",
    ),
    (
        "counters: starved cycles also overhead",
        "hw/counters.py",
        "~(activity.active | activity.back_pressured | activity.starved)",
        "~(activity.active | activity.back_pressured)",
        "tests/hw/test_counters.py",
    ),
    (
        "receive: any header sets the batch",
        "hw/receive.py",
        "with m.If(accepted[Message.ROUTES]):\n                    m.d.sync += self.batch",
        "with m.If(1):\n                    m.d.sync += self.batch",
        "tests/hw/test_receive.py",
    ),
    (
        "engine: down matrix does not wait for its input",
        "hw/engine.py",
        "looked_at & (~waits | hidden_ready)",
        "looked_at",
        "tests/sim/test_engine_cocotb.py",
    ),
    (
        "engine: weights of the expert after",
        "hw/engine.py",
        "experts.o.ready.eq(hidden.done)",
        "experts.o.ready.eq(1)",
        "tests/sim/test_engine_cocotb.py",
    ),
    (
        "golden: an expert's outputs not added",
        "sim/golden/layer.py",
        "after = before + out.values",
        "after = out.values",
        "tests/sim/test_golden_layer.py",
    ),
    (
        "golden: router's weight forgotten",
        "sim/golden/layer.py",
        "[[route.weight] for route in here]",
        "[[65536] for route in here]",
        "tests/sim/test_golden_layer.py",
    ),
    (
        "golden: up and gate exchanged",
        "sim/golden/layer.py",
        "swiglu(g.values, u.values, p)",
        "swiglu(u.values, g.values, p)",
        "tests/sim/test_golden_layer.py",
    ),
)
# The link, the driver's side of it, the device and its memory.
RECEIVE, UART, HOST_LINK = (
    "tests/hw/link/test_frame_receive.py",
    "tests/hw/link/test_uart.py",
    "tests/host/test_link.py",
)
CROSSING = "tests/hw/link/test_crossing.py"
LINKS = (
    (
        "frames: trailer not compared",
        "hw/link/frame_receive.py",
        "with m.If((compared & ~same.all()) | ~crc_same):",
        "with m.If(0):",
        RECEIVE,
    ),
    (
        "frames: header's CRC not looked at",
        "hw/link/frame_receive.py",
        "is_header.eq(acceptable & (crc.crc == RESIDUE))",
        "is_header.eq(acceptable)",
        RECEIVE,
    ),
    ("frames: any number taken", "hw/link/frame_receive.py", "store.eq(is_wanted & room)", "store.eq(room)", RECEIVE),
    (
        "frames: taken without room",
        "hw/link/frame_receive.py",
        "store.eq(is_wanted & room)",
        "store.eq(is_wanted)",
        RECEIVE,
    ),
    (
        "uart: sampled at the bit's edge",
        "hw/link/uart.py",
        "bit + bit // 2 - clock), count",
        "bit - clock), count",
        UART,
    ),
    (
        "uart: the stop bit not looked at",
        "hw/link/uart.py",
        'with m.If(line):\n                        m.next = "IDLE"\n                        with',
        'with m.If(1):\n                        m.next = "IDLE"\n                        with',
        UART,
    ),
    ("crossing: a place taken that is not there", "hw/link/crossing.py", "room.eq(several)", "room.eq(1)", CROSSING),
    (
        "crossing: the beat that leaves is still there",
        "hw/link/crossing.py",
        "(Mux(moved, count[1], count[0]) & ~pop)",
        "Mux(moved, count[1], count[0])",
        CROSSING,
    ),
    (
        "crossing: what follows a reset is let go",
        "hw/link/crossing.py",
        "up.o.ready.eq(self.o_link.ready & ~self.busy)",
        "up.o.ready.eq(self.o_link.ready | self.busy)",
        CROSSING,
    ),
    (
        "crossing: the connection before is not forgotten",
        "hw/link/crossing.py",
        '"link": asked & answered}',
        '"link": asked & ~asked}',
        CROSSING,
    ),
    ("axis: pieces of beats taken", "hw/link/axis.py", " & self.s_axis_tkeep.all()", "", "tests/hw/link/test_axis.py"),
    (
        "outgoing: a request inside a message",
        "hw/link/outgoing.py",
        "self.i_request.valid & ~inside",
        "self.i_request.valid",
        "tests/hw/link/test_outgoing.py",
    ),
    (
        "narrow: bytes in the wrong order",
        "hw/link/narrow.py",
        "bytes_ >> 8",
        "bytes_ << 8",
        "tests/hw/link/test_narrow.py",
    ),
    (
        "host: trailer not compared",
        "host/link.py",
        "if not header.words:\n            return True",
        "if True:\n            return True",
        HOST_LINK,
    ),
    ("host: any number taken", "host/link.py", "if header.sequence == self._want:", "if True:", HOST_LINK),
    ("host: credit not looked at", "host/link.py", "self._words_sent + part.words > self._credit or ", "", HOST_LINK),
    (
        "device: requests not compared",
        "host/device.py",
        "if part.expected[place : place + 1] != requests[place:]:",
        "if False:",
        "tests/host/test_device.py",
    ),
)
# Whole models: what surrounds the experts, and the batch that they are joined in.
RUNTIME, ARCHITECTURES, TOKENIZER = (f"tests/host/test_{name}.py" for name in ("runtime", "architectures", "tokenizer"))
WHOLE = (
    (
        "whole model: outputs left in the device's order",
        "host/runtime.py",
        "y[order] = result.y",
        "y = result.y",
        RUNTIME,
    ),
    ("whole model: a failed step stays in the cache", "host/runtime.py", "layer.crop(-extra)", "pass", RUNTIME),
    ("whole model: a failed step's routes counted", "host/runtime.py", "self.routing.drop_step()\n", "pass\n", RUNTIME),
    (
        "whole model: logits that are no numbers taken",
        "host/runtime.py",
        "if not np.isfinite(logits[-1]).all():",
        "if False:",
        RUNTIME,
    ),
    (
        "whole model: chunks depend on who else is there",
        "host/runtime.py",
        "request.prompt[request._seen : request._seen + self.chunk]",
        "request.prompt[request._seen : request._seen + max(self.chunk // len(self.live), 1)]",
        RUNTIME,
    ),
    (
        "whole model: rows of Q and K left for adjacent pairs",
        "host/architectures.py",
        "pairs.swapaxes(1, 2)",
        "pairs",
        ARCHITECTURES,
    ),
    (
        "whole model: up before gate",
        "host/architectures.py",
        "(layer.gate, layer.up)",
        "(layer.up, layer.gate)",
        ARCHITECTURES,
    ),
    (
        "whole model: experts get storage",
        "host/architectures.py",
        "for layer in model.layers if experts else ():",
        "for layer in model.layers:",
        ARCHITECTURES,
    ),
    (
        "whole model: a tensor without a place left out",
        "host/architectures.py",
        "if name not in known and not",
        "if False and not",
        ARCHITECTURES,
    ),
    (
        "whole model: weights of a token always normed",
        "host/architectures.py",
        '"norm_topk_prob": False',
        '"norm_topk_prob": True',
        ARCHITECTURES,
    ),
    (
        "whole model: an unfinished character shown",
        "host/tokenizer.py",
        "self._decoder.decode(self._tokenizer.bytes_of(token))",
        'self._tokenizer.bytes_of(token).decode(errors="replace")',
        TOKENIZER,
    ),
    (
        "whole model: the beginning of a stop string shown",
        "host/tokenizer.py",
        "cut = len(text) - keep",
        "cut = len(text)",
        TOKENIZER,
    ),
    (
        "whole model: digits of Granite's text not cut",
        "host/tokenizer.py",
        '"refact": (_DIGITS, _GPT2)',
        '"refact": (_GPT2,)',
        TOKENIZER,
    ),
    (
        "whole model: groups of requests overlap",
        "host/routing_stats.py",
        "range(0, len(decoding) - batch + 1, batch)",
        "range(0, len(decoding) - batch + 1)",
        "tests/host/test_routing_stats.py",
    ),
)
# The server: who leaves, who waits, who is told.
SERVE_TESTS = "tests/host/test_serve.py"
SERVE = (
    ("serve: who went keeps its place", "host/serve_api.py", "self._cancel()", "pass", SERVE_TESTS),
    ("serve: a failed step not taken again", "host/serve_worker.py", "ATTEMPTS = 2", "ATTEMPTS = 1", SERVE_TESTS),
    ("serve: a queue without end", "host/serve_worker.py", ">= self.max_requests + self.queue", "< 0", SERVE_TESTS),
    (
        "serve: any number shares the steps",
        "host/serve_worker.py",
        "while self._waiting and len(self._live) < self.max_requests:",
        "while self._waiting:",
        SERVE_TESTS,
    ),
    ("serve: the layer under way not given up", "host/serve_worker.py", "raise _Halted", "return", SERVE_TESTS),
    (
        "serve: only the newest text is passed on",
        "host/serve_api.py",
        "piece._replace(text=self._held.text + piece.text)",
        "piece",
        SERVE_TESTS,
    ),
    (
        "serve: prompt tokens counted again in each step",
        "host/serve_worker.py",
        "self.accounts.prompt(request.prompt_done - job._given)",
        "self.accounts.prompt(request.prompt_done)",
        SERVE_TESTS,
    ),
    ("serve: a client that takes nothing waited for", "host/serve_api.py", "WRITE_SECONDS)", "None)", SERVE_TESTS),
    (
        "chat: what begins a text twice",
        "host/chat.py",
        "return tokens[len(begin) :] if begin and tokens[: 2 * len(begin)] == 2 * begin else tokens",
        "return tokens",
        "tests/host/test_chat.py",
    ),
)
# Caches and what a model needs.
CACHE, REPLAY, FLOORS = (f"tests/host/test_{name}.py" for name in ("expert_cache", "cache_replay", "ledger"))
CACHES = (
    ("cache: the most recently used goes", "host/expert_cache.py", "self._sizes.move_to_end(key)", "pass", CACHE),
    ("cache: what a pass wants may go", "host/expert_cache.py", "if other not in self._wanted:", "if True:", CACHE),
    ("cache: no pass announced", "host/device.py", "        store.announce(part.expected)\n", "", CACHE),
    (
        "cache: a part of an expert is a hit",
        "host/expert_cache.py",
        "parts is not None and None not in parts, size",
        "parts is not None, size",
        CACHE,
    ),
    ("cache: the buffer kept, not its bytes", "host/expert_cache.py", "= bytes(data)", "= data  # type: ignore", CACHE),
    (
        "cache: hits before their turn",
        "host/expert_cache.py",
        "self._asked.append(_Asked",
        "self._asked.appendleft(_Asked",
        CACHE,
    ),
    ("cache: hits not in the ledger", "host/device.py", 'storage["cached"]', "0", CACHE),
    ("cache: too few slots taken", "host/expert_cache.py", "if share < used * one:", "if False:", CACHE),
    ("cache: a failed load is a hit", "host/expert_cache.py", "pool.drop((number, expert))", "pass", CACHE),
    (
        "cache: loaded bytes not in the ledger",
        "host/device.py",
        "Counter, 0), loaded=total",
        "Counter, 0), loaded=0",
        CACHE,
    ),
    ("cache: no room is used again", "host/device.py", "free[-1] if free else", "", CACHE),
    (
        "replay: a prompt's tokens one by one",
        "host/cache_replay.py",
        "row.step if row.decoded else 0",
        "row.step",
        REPLAY,
    ),
    ("replay: the nearest use goes first", "host/cache_replay.py", "(-kept[key], key))", "(kept[key], key))", REPLAY),
    ("ledger: keys only, no values", "host/ledger.py", "kv_heads * (key + value)", "kv_heads * key", FLOORS),
    (
        "ledger: a KV head for each head",
        "host/ledger.py",
        '{name}.head_count_kv", heads)',
        '{name}.head_count", heads)',
        FLOORS,
    ),
    ("ledger: tensors not compared", "host/ledger.py", "and said != counted:", "and False:", FLOORS),
    ("ledger: one read buffer", "host/storage.py", "return (1 + ahead) * (", "return (", FLOORS),
)
# Many requests at a time: the modelled clock and the accounts.
AGENTS = "tests/host/test_bench_agents.py"
MANY = (
    (
        "agents: passes of the whole batch",
        "host/seconds.py",
        "some = self.chosen[:batch]",
        "some = self.chosen",
        AGENTS,
    ),
    (
        "agents: counted cycles not used",
        "host/seconds.py",
        "    if cycles is None:\n        return sum",
        "    if True:\n        return sum",
        AGENTS,
    ),
    ("agents: an unknown clock taken", "host/seconds.py", "    if not board.clock_hz:", "    if False:", AGENTS),
    (
        "agents: the host's time left out",
        "host/bench_agents.py",
        "steps.append(step.host + here)",
        "steps.append(here)",
        AGENTS,
    ),
    (
        "agents: what the cache had is read",
        "host/bench_agents.py",
        "rate *= each.requested / each.read",
        "rate *= 1",
        AGENTS,
    ),
    ("agents: parts of a package counted too", "host/agents.py", 'zone.name.count(":") == 1', "True", AGENTS),
    ("agents: noise has a score", "host/bench_agents.py", "None if None in marks else", "", AGENTS),
    ("agents: runs go on alone", "host/agents.py", "os.getppid() != int(parent)", "False", AGENTS),
    ("agents: a run without a limit", "host/agents.py", "time.monotonic() > end", "False", AGENTS),
)
QUEUES = "tests/sim/test_queues.py"
SIZES = (
    (
        "queues: those of two places hold one",
        "hw/primitives/queue.py",
        "self.i.ready.eq(~held[self.depth])",
        "self.i.ready.eq(held[0] if self.depth == 2 else ~held[self.depth])",
        QUEUES,
    ),
    ("queues: one far deeper than it needs", "hw/matrix_engine.py", "_WAITING = 4", "_WAITING = 64", QUEUES),
    (
        "widths: a block sum one bit too wide",
        "hw/formats/arithmetic.py",
        "BLOCK_SUM_BITS = 36",
        "BLOCK_SUM_BITS = 37",
        "tests/sim/test_intervals.py",
    ),
)
REPORT_TESTS, BROWSER = "tests/report/test_report.py", "tests/report/test_browser.py"
REPORT = (
    ("report: what is missing not said", "host/report/page.py", 'if missing else ""', 'if False else ""', REPORT_TESTS),
    ("report: text is HTML", "host/report/page.py", "Html(html.escape(str(text)))", "Html(str(text))", REPORT_TESTS),
    (
        "report: a changed file keeps its commit",
        "host/report/inputs.py",
        "if logged and not changed",
        "if logged",
        REPORT_TESTS,
    ),
    (
        "report: a failed section ends well",
        "host/report/__main__.py",
        "return 1 if failed else 0",
        "return 0",
        REPORT_TESTS,
    ),
    (
        "report: a drawing keeps its own colours",
        "host/report/plots.py",
        'svg = svg.replace(sentinel, f"var(--{variable})")',
        "continue",
        REPORT_TESTS,
    ),
    (
        "report: a missing input is a success",
        "host/report/sections/scorecard.py",
        'return Result(claim, UNKNOWN, str(error), "unknown")',
        'return Result(claim, SUCCESS, str(error), "unknown")',
        REPORT_TESTS,
    ),
    (
        "report: a median above zero is enough",
        "host/report/sections/scorecard.py",
        'if all(gain["min"] > 0',
        'if all(gain["median"] > 0',
        REPORT_TESTS,
    ),
    (
        "report: a resident model without KV cache",
        "host/report/sections/capacity.py",
        '"resident": size["file"] + cache',
        '"resident": size["file"]',
        REPORT_TESTS,
    ),
    (
        "report: the page's floors without KV cache",
        "host/report/static/capacity.js",
        "size.input + size.others + kv",
        "size.input + size.others",
        BROWSER,
    ),
    ("report: any row of a placement", "host/report/static/agents.js", "each.n === n && ", "", BROWSER),
    (
        "report: a row left out of a download",
        "host/report/static/page.js",
        "rows = report.data(section)[table];",
        "rows = report.data(section)[table].slice(1);",
        BROWSER,
    ),
    (
        "report: tables widen the page",
        "host/report/static/page.css",
        ".scroll { overflow-x: auto;",
        ".scroll {",
        BROWSER,
    ),
    ("traces: reuse across turns", "host/traces.py", "if before[0] == now[0]", "if True", REPORT_TESTS),
    ("host layer: the first run counts", "sim/host_layer.py", "if turn:", "if True:", "tests/sim/test_host_layer.py"),
)
MUTANTS += [Mutant(*row) for row in (*MORE, *LINKS, *WHOLE, *CACHES, *SERVE, *MANY, *SIZES, *REPORT)]


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
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, copy)
    (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    # The copy's folder comes first on sys.path, before the installed (editable) tree.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900)
    if result.returncode not in (0, 1):  # 1: tests failed; anything else is not a verdict
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
