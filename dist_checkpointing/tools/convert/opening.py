"""Finds out what there is to convert at a path."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from dist_checkpointing.errors import CheckpointNotFoundError, Finding
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.commit import is_committed
from dist_checkpointing.tools.convert.deepspeed_files import DeepSpeedSource, step_folder
from dist_checkpointing.tools.convert.memory import DEFAULT_MEMORY_BYTES
from dist_checkpointing.tools.convert.safetensors_files import (
    INDEX_SUFFIX,
    SUFFIX,
    SafetensorsSource,
    holds_safetensors,
)
from dist_checkpointing.tools.convert.sources import CheckpointSource, Source
from dist_checkpointing.tools.convert.torch_file import TorchFileSource

_SIGNATURES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
"""How files of torch.save begin: as zip archives, or (before 1.6) as pickles of a number."""


def open_source(
    path: str | PathLike[str], *, trusted: bool = False, most_bytes: int = DEFAULT_MEMORY_BYTES
) -> Source:
    """Whatever there is to convert at a path.

    Args:
        path: see ``convert``.
        trusted: unpickle anything in it.
        most_bytes: size of a file that may be loaded as a whole, if it must.

    Raises:
        CheckpointNotFoundError: if nothing is there that is read.
    """
    found = as_location(path)
    if location.is_folder(found):
        is_checkpoint = is_committed(found)
        if not is_checkpoint and holds_safetensors(found):
            return SafetensorsSource(Path(found))
        if not is_checkpoint and (step := step_folder(found)) is not None:
            return DeepSpeedSource(step, trusted=trusted)
        return CheckpointSource(found, trusted=trusted)
    if not location.is_file(found):
        if location.is_there(found):
            finding = Finding("it is neither a file nor a folder", path=str(found))
            raise CheckpointNotFoundError(f"{found} cannot be read", [finding])
        finding = Finding("no such file or folder", path=str(found))
        raise CheckpointNotFoundError(f"{found} does not exist", [finding])
    place = Path(found)
    if place.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return SafetensorsSource(place)
    with place.open("rb") as file:
        signature = file.read(4)
    if signature in _SIGNATURES:
        return TorchFileSource(place, trusted=trusted, most_bytes=most_bytes)
    finding = Finding(
        "neither a folder with a checkpoint, nor a file of safetensors or torch.save",
        path=str(place),
    )
    raise CheckpointNotFoundError(f"{place} cannot be read", [finding])
