"""The sections of the report, in their order; each module has ``section(inputs) -> Section``."""

NAMES = (
    "capacity",
    "bytes_by_batch",
    "routing",
    "pipeline",
    "roofline",
    "timing",
    "agents",
    "accuracy",
    "ledger",
    "scorecard",
    "methods",
    "glossary",
)
"""Modules of this package."""
