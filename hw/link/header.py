"""What the two directions of the frame layer share: the header and the limits of parameters."""

from amaranth.lib import data

from hw.formats.frames import MAX_PAYLOAD_WORDS
from hw.formats.params import LINK_BYTES
from hw.layouts import WORD_BYTES

HEADER = data.StructLayout(
    {
        "magic": 16,
        "type": 8,
        "last": 1,
        "nak": 1,
        "poll": 1,
        "spare": 1,
        "missing": 4,  # padding bytes in the payload's last word
        "sequence": 16,
        "ack": 16,
        "words": 16,
        "credit": 16,
        "crc": 32,
    }
)
""":mod:`hw.formats.frames` describes it."""
assert HEADER.size == 8 * WORD_BYTES

MAX_BUFFER_WORDS = 1 << 15


def check_sizes(width: int, frame_words: int, buffer_words: int) -> None:
    """TypeError or ValueError for what no frame layer can have."""
    for name, value in (("width", width), ("frame_words", frame_words), ("buffer_words", buffer_words)):
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {value!r}")
    if width not in LINK_BYTES:
        raise ValueError(f"width must be one of {LINK_BYTES}, not {width}")
    if not 1 <= frame_words <= MAX_PAYLOAD_WORDS:
        raise ValueError(f"frame_words must be in 1..{MAX_PAYLOAD_WORDS}, not {frame_words}")
    if not max(2, frame_words) <= buffer_words <= MAX_BUFFER_WORDS or buffer_words & (buffer_words - 1):
        raise ValueError(
            f"buffer_words must be a power of two in {max(2, frame_words)}..{MAX_BUFFER_WORDS}, not {buffer_words}"
        )


def check_cycles(name: str, value: int) -> None:
    """ValueError for a time limit that leaves no time or needs a needlessly wide counter."""
    if not 16 <= value <= 1 << 32:
        raise ValueError(f"{name} must be in 16..{1 << 32}, not {value!r}")
