"""The sections of the report, in their order; each module has ``section(inputs) -> Section``."""

NAMES = ("capacity",)
"""Modules of this package."""
