"""Payloads of the datapath's streams. First field = lowest bits, so a struct matches little-endian bytes."""

from amaranth.hdl import signed, unsigned
from amaranth.lib import data, enum

from hw.formats import arithmetic as arith
from hw.formats import messages
from hw.formats import q6_k as fmt
from hw.formats.params import MAX_ROWS, Params
from hw.formats.sigmoid import SIGNIFICANT_BITS

WORD_BYTES = 16
MEMORY_WORD_BITS = 4
"""Lowest bits of an address in the board's memory: 0, as it is used in words of 16 bytes."""
LOAD_VALUES = 8
"""Activations that one load word carries."""


def bits_for(count: int) -> int:
    """Bits that index ``count`` things; at least one, so that no field is empty."""
    return max(1, (count - 1).bit_length())


def link_beat(link_bytes: int) -> data.StructLayout:
    """What the link delivers in a cycle. ``last`` marks the final beat of a run of whole blocks."""
    return data.StructLayout({"data": data.ArrayLayout(8, link_bytes), "last": 1})


WIDE_BEAT = data.StructLayout(
    {
        "data": data.ArrayLayout(8, WORD_BYTES),
        "last": 1,
        "missing": 4,  # link beats that a run's final word lacks; they read as zero
    }
)

BLOCK_WORDS = fmt.BLOCK_BYTES // WORD_BYTES
"""16-byte words of a block; the two bytes that remain, ``d``, travel beside the last of them."""

WORD = data.StructLayout(
    {
        "data": data.ArrayLayout(8, WORD_BYTES),
        "d": 16,  # of the block; meaningful with its last word
        "index": bits_for(BLOCK_WORDS),
        "last": 1,  # final word of the run
        "error": 1,  # with last: the run does not end where a block ends
    }
)


class Kind(enum.Enum, shape=2):
    """Which of an expert's matrices."""

    UP = 0
    GATE = 1
    DOWN = 2
    """Its columns meet the vectors between the matrices; the columns of the others meet the tokens' own vectors."""


def matrix_command(params: Params) -> data.StructLayout:
    """One matrix of the stream: ``rows`` rows of ``columns`` blocks for the tokens in ``mask`` (none: drain it)."""
    return data.StructLayout(
        {
            "rows": bits_for(MAX_ROWS + 1),
            "columns": max(params.max_columns, params.max_hidden_columns).bit_length(),
            "kind": Kind,
            "mask": params.max_batch,
        }
    )


def block_tag(params: Params) -> data.StructLayout:
    """What travels with a block's sums: its ``d = mantissa * 2**exponent``, place and tokens."""
    return data.StructLayout(
        {
            "mantissa": signed(arith.MANTISSA_BITS),
            "exponent": signed(6),
            "bad": 1,  # d is NaN or infinite
            "group": bits_for(params.passes),  # token = group * tokens + lane
            "column": bits_for(params.store_columns),  # in the activation memory
            "kind": Kind,
            "lanes": params.tokens,  # lanes whose token wants this block
            "final": 1,  # no token of a later group wants it
            "first": 1,  # starts a row
            "last": 1,  # ends a row
        }
    )


def sub_block(params: Params) -> data.StructLayout:
    """16 weights and their scale; ``index`` counts the 16 sub-blocks of a block."""
    return data.StructLayout(
        {
            "weights": data.ArrayLayout(signed(fmt.WEIGHT_BITS), fmt.SUB_BLOCK_WEIGHTS),
            "scale": signed(fmt.SCALE_BITS),
            "index": bits_for(fmt.SUB_BLOCKS),
            "tag": block_tag(params),
        }
    )


def block_sum(params: Params) -> data.StructLayout:
    """Integer sums of one block, a lane each."""
    return data.StructLayout(
        {
            "sums": data.ArrayLayout(signed(arith.BLOCK_SUM_BITS), params.tokens),
            "tag": block_tag(params),
        }
    )


def row_sum(params: Params) -> data.StructLayout:
    """A finished row of one token in Q24.40, with ``ERROR_*`` bits; ``end`` marks the row's last token."""
    return data.StructLayout(
        {
            "value": signed(arith.ACCUMULATOR_BITS),
            "token": bits_for(params.max_batch),
            "error": 2,
            "kind": Kind,
            "end": 1,
        }
    )


def activation_word(params: Params) -> data.StructLayout:
    """Eight activations of one token: part ``word`` (0..31) of its block ``column``, and that block's exponent."""
    return data.StructLayout(
        {
            "values": data.ArrayLayout(signed(arith.ACTIVATION_BITS), LOAD_VALUES),
            "exponent": signed(arith.EXPONENT_BITS),
            "word": unsigned(bits_for(fmt.BLOCK_WEIGHTS // LOAD_VALUES)),
            "column": bits_for(params.store_columns),
            "token": bits_for(params.max_batch),
        }
    )


ROUTE = data.StructLayout({"token": 16, "expert": 16, "weight": 32})
"""A token's wish for an expert, as it lies in a ``ROUTES`` message."""

REQUEST = data.StructLayout({"offset": messages.OFFSET_BITS, "length": messages.LENGTH_BITS})
"""Bytes of the model file that the engine wants next."""


def wanted_matrix(params: Params) -> data.StructLayout:
    """A request, and which matrix of which expert it is for; begins like ``REQUEST``."""
    return data.StructLayout({**REQUEST.members, "expert": bits_for(params.max_experts), "kind": Kind})


def home(params: Params) -> data.StructLayout:
    """Where an expert lies: in the board's memory (``here``) at the ``word`` of 16 bytes, or with the host."""
    return data.StructLayout(
        {"word": params.memory_bits - MEMORY_WORD_BITS, "here": 1, "expert": bits_for(params.max_experts)}
    )


def memory_read(memory_bits: int) -> data.StructLayout:
    """Bytes of the board's memory to be read; address and length are multiples of 16, the length is not 0."""
    return data.StructLayout({"address": memory_bits, "length": messages.LENGTH_BITS})


def memory_write(memory_bits: int) -> data.StructLayout:
    """16 bytes for the board's memory; until ``last`` the next ones follow at the address after."""
    return data.StructLayout({"address": memory_bits, "data": data.ArrayLayout(8, WORD_BYTES), "last": 1})


def check_memory(params: Params) -> None:
    """ValueError unless the link is as wide as the words of the board's memory, if there is one."""
    if params.memory_bits and params.link_bytes != WORD_BYTES:
        raise ValueError(
            f"memory_bits = {params.memory_bits} needs link_bytes = {WORD_BYTES}, not {params.link_bytes}: "
            "take such a link, or memory_bits = 0"
        )


ROUTER_WEIGHT = data.StructLayout({"magnitude": SIGNIFICANT_BITS, "exponent": signed(7)})
"""``magnitude * 2**exponent``; the magnitude is 0 or has its highest bit set."""

SCALED = data.StructLayout({"magnitude": SIGNIFICANT_BITS, "exponent": signed(10), "negative": 1})
"""``magnitude * 2**exponent`` with a sign; the magnitude is 0 or has its highest bit set."""


def hidden_place(params: Params) -> data.StructLayout:
    """Where an element of the vectors between an expert's matrices belongs; ``end`` marks the last token of its row."""
    return data.StructLayout({"token": bits_for(params.max_batch), "row": bits_for(params.max_expert_width), "end": 1})


MATRICES = len(Kind)


def layer_config(params: Params) -> data.StructLayout:
    """A layer's shapes, in rows and blocks, and where expert 0's up, gate and down matrix lie."""
    columns = matrix_command(params)["columns"].shape
    return data.StructLayout(
        {
            "tape": 1,
            "outstanding": bits_for(messages.MAX_OUTSTANDING + 1),
            "experts": bits_for(params.max_experts + 1),
            "width": bits_for(params.max_width + 1),
            "expert_width": bits_for(params.max_expert_width + 1),
            "columns": columns,
            "hidden_columns": columns,
            "offsets": data.ArrayLayout(messages.OFFSET_BITS, MATRICES),
            "lengths": data.ArrayLayout(messages.LENGTH_BITS, MATRICES),
        }
    )
