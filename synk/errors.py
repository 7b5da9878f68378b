"""Errors that only synk raises."""

from ._base.errors import (
    CheckpointError,
    DisagreementError,
    DivergedError,
    LawError,
    PeerError,
    Preempted,
    SharedLostError,
    SynkError,
)

__all__ = [
    "CheckpointError", "DisagreementError", "DivergedError", "LawError", "PeerError", "Preempted", "SharedLostError",
    "SynkError",
]  # fmt: skip

for _name in __all__:
    globals()[_name].__module__ = "synk.errors"
