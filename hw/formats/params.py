"""The parameters of one build of the hardware, checked once, readable by host and simulator."""

from dataclasses import dataclass

from .q6_k import BLOCK_WEIGHTS, SUB_BLOCKS

LINK_BYTES = (1, 4, 8, 16)
MAX_TOKENS = 16
MAX_BATCH = 64
MAX_WIDTH = 16384
MAX_ROWS = 65535
MAX_STORE_DEPTH = 16384
"""Words of a multiplier's activation memory: the deepest that one ECP5 block RAM (a bit wide then) can be."""


@dataclass(frozen=True)
class Params:
    """What is fixed when the hardware is generated.

    Parameters
    ----------
    link_bytes
        Bytes that the weight stream carries a cycle: 1, 4, 8 or 16.
    tokens
        Token lanes, each with 16 multipliers: a power of two up to 16. One accumulator serves all lanes within the
        16 cycles that a block takes, hence the limit.
    max_batch
        Token vectors held at once; a multiple of ``tokens``. Tokens beyond the lanes take further passes over the
        buffered block, never another fetch.
    max_width
        Longest row in weights; a multiple of 256.

    Raises
    ------
    TypeError, ValueError
        Naming the parameter, its value and the allowed range.
    """

    link_bytes: int = 16
    tokens: int = 1
    max_batch: int = 8
    max_width: int = 1024

    def __post_init__(self) -> None:
        for name in ("link_bytes", "tokens", "max_batch", "max_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, not {value!r}")
        if self.link_bytes not in LINK_BYTES:
            raise ValueError(f"link_bytes must be one of {LINK_BYTES}, not {self.link_bytes}")
        if not 1 <= self.tokens <= MAX_TOKENS or self.tokens & (self.tokens - 1):
            raise ValueError(f"tokens must be a power of two in 1..{MAX_TOKENS}, not {self.tokens}")
        if not self.tokens <= self.max_batch <= MAX_BATCH or self.max_batch % self.tokens:
            raise ValueError(
                f"max_batch must be a multiple of tokens ({self.tokens}) in {self.tokens}..{MAX_BATCH}, "
                f"not {self.max_batch}"
            )
        if not BLOCK_WEIGHTS <= self.max_width <= MAX_WIDTH or self.max_width % BLOCK_WEIGHTS:
            raise ValueError(
                f"max_width must be a multiple of {BLOCK_WEIGHTS} in {BLOCK_WEIGHTS}..{MAX_WIDTH}, not {self.max_width}"
            )

        depth = self.store_blocks * SUB_BLOCKS
        if depth > MAX_STORE_DEPTH:
            raise ValueError(
                f"max_batch / tokens x max_width = {self.passes} x {self.max_width} takes {depth} words of activation "
                f"memory a multiplier, more than {MAX_STORE_DEPTH}: lower one of them or take more tokens"
            )

    @property
    def max_columns(self) -> int:
        """Blocks in the longest row."""
        return self.max_width // BLOCK_WEIGHTS

    @property
    def passes(self) -> int:
        """Passes over a block that a full batch takes."""
        return self.max_batch // self.tokens

    @property
    def store_blocks(self) -> int:
        """Blocks that a lane's activation memory addresses: passes and columns, each rounded up to a power of two."""
        return 1 << ((self.passes - 1).bit_length() + (self.max_columns - 1).bit_length())
