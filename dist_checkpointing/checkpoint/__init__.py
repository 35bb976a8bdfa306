"""A checkpoint as a read-only mapping, on one machine. Names are imported on first use."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.checkpoint.checkpoint import (
        Checkpoint,
        ObjectHandle,
        StoredChunk,
        TensorHandle,
    )
    from dist_checkpointing.checkpoint.verify_checkpoint import (
        Examination,
        examine_checkpoint,
        verify_checkpoint,
    )

__all__ = [
    "Checkpoint",
    "Examination",
    "ObjectHandle",
    "StoredChunk",
    "TensorHandle",
    "examine_checkpoint",
    "verify_checkpoint",
]

_EXAMINING = {"Examination", "examine_checkpoint", "verify_checkpoint"}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "verify_checkpoint" if name in _EXAMINING else "checkpoint"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
