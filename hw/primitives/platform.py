"""Which vendor's instances a platform wants."""


def is_ecp5(platform) -> bool:
    """Whether ``platform`` is a Lattice ECP5 part (``None``, the simulator's, is not)."""
    return str(getattr(platform, "device", "")).startswith("LFE5")
