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

_MODULES = {
    "Checkpoint": "checkpoint",
    "ObjectHandle": "checkpoint",
    "StoredChunk": "checkpoint",
    "TensorHandle": "checkpoint",
    "Examination": "verify_checkpoint",
    "examine_checkpoint": "verify_checkpoint",
    "verify_checkpoint": "verify_checkpoint",
}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
