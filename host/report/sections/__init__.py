"""The sections of the report, in their order; each module has ``section(inputs) -> Section``."""

NAMES = ("capacity", "bytes_by_batch", "routing")
"""Modules of this package."""
