"""Which vendor's instances a platform wants."""


def is_ecp5(platform) -> bool:
    """Whether ``platform`` is a Lattice ECP5 part (``None``, the simulator's, is not)."""
    return str(getattr(platform, "device", "")).startswith("LFE5")


def is_xc7(platform) -> bool:
    """Whether ``platform`` is a Xilinx 7-series part, as the Artix-7."""
    return str(getattr(platform, "device", "")).startswith("xc7")
