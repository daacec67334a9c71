"""The parameters of one build of the hardware, checked once, readable by host and simulator."""

from dataclasses import dataclass

from .q6_k import BLOCK_WEIGHTS, SUB_BLOCKS

LINK_BYTES = (1, 4, 8, 16)
MAX_TOKENS = 16
MAX_BATCH = 64
MAX_WIDTH = 16384
MAX_ROWS = 65535
MAX_EXPERTS = 1024
MAX_FRAME_BYTES = 65536
MEMORY_BITS = range(20, 41)
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
        Longest token vector, in elements: columns of the up and gate matrices and rows of the down matrix; a multiple
        of 256.
    max_expert_width
        Widest expert: rows of the up and gate matrices and columns of the down matrix; a multiple of 256.
    max_experts
        Experts of a layer.
    frame_bytes
        Most payload of a frame that the link takes (:mod:`hw.formats.frames`); a power of two from 256 to 65536. Two
        such payloads are buffered.
    memory_bits
        The board's own memory holds ``2**memory_bits`` bytes, 20..40; 0: it has none.

    Raises
    ------
    TypeError, ValueError
        Naming the parameter, its value and the allowed range.
    """

    link_bytes: int = 16
    tokens: int = 1
    max_batch: int = 8
    max_width: int = 1024
    max_expert_width: int = 512
    max_experts: int = 128
    frame_bytes: int = 4096
    memory_bits: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
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
        for name in ("max_width", "max_expert_width"):
            width = getattr(self, name)
            if not BLOCK_WEIGHTS <= width <= MAX_WIDTH or width % BLOCK_WEIGHTS:
                raise ValueError(
                    f"{name} must be a multiple of {BLOCK_WEIGHTS} in {BLOCK_WEIGHTS}..{MAX_WIDTH}, not {width}"
                )
        if not 1 <= self.max_experts <= MAX_EXPERTS:
            raise ValueError(f"max_experts must be in 1..{MAX_EXPERTS}, not {self.max_experts}")
        if not 256 <= self.frame_bytes <= MAX_FRAME_BYTES or self.frame_bytes & (self.frame_bytes - 1):
            raise ValueError(f"frame_bytes must be a power of two in 256..{MAX_FRAME_BYTES}, not {self.frame_bytes}")
        if self.memory_bits and self.memory_bits not in MEMORY_BITS:
            raise ValueError(f"memory_bits must be 0 or in 20..40, not {self.memory_bits}")

        depth = self.store_blocks * SUB_BLOCKS
        if depth > MAX_STORE_DEPTH:
            raise ValueError(
                f"max_batch / tokens x (max_width + max_expert_width) = {self.passes} x ({self.max_width} + "
                f"{self.max_expert_width}) takes {depth} words of activation memory a multiplier, more than "
                f"{MAX_STORE_DEPTH}: lower one of them or take more tokens"
            )

    @property
    def max_columns(self) -> int:
        """Blocks in the longest token vector."""
        return self.max_width // BLOCK_WEIGHTS

    @property
    def max_hidden_columns(self) -> int:
        """Blocks in the longest vector between an expert's matrices."""
        return self.max_expert_width // BLOCK_WEIGHTS

    @property
    def store_columns(self) -> int:
        """Blocks that the activation memory holds for a token: its vector, then the one between the matrices."""
        return self.max_columns + self.max_hidden_columns

    @property
    def passes(self) -> int:
        """Passes over a block that a full batch takes."""
        return self.max_batch // self.tokens

    @property
    def store_blocks(self) -> int:
        """Blocks that a lane's activation memory addresses: passes and columns, each rounded up to a power of two."""
        return 1 << ((self.passes - 1).bit_length() + (self.store_columns - 1).bit_length())
