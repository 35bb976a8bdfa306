"""A checkpoint as a read-only mapping, on one machine. Names are imported on first use."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.checkpoint.checkpoint import (
        Checkpoint as Checkpoint,
        ObjectHandle as ObjectHandle,
        StoredChunk as StoredChunk,
        TensorHandle as TensorHandle,
    )
    from dist_checkpointing.checkpoint.verify_checkpoint import (
        Examination as Examination,
        examine_checkpoint as examine_checkpoint,
        verify_checkpoint as verify_checkpoint,
    )

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        for module in () if name.startswith("_") else ("checkpoint", "verify_checkpoint"):
            found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
            # Not what the module itself has imported.
            if getattr(found, "__module__", "").startswith(f"{__name__}."):
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
