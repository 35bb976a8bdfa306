"""Formats of other programs, which have no ``metadata.json``: how they are recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.location import is_file, is_there
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.leftovers import CONFIG_FNAME, DCP_METADATA_NAME

COMMON_STATE_FNAME = "common.pt"
MODEL_SUFFIX: Final = ".safetensors"
MODEL_INDEX_SUFFIX: Final = ".safetensors.index.json"
MODEL_INDEX_NAME: Final = f"model{MODEL_INDEX_SUFFIX}"
"""The commit of a save as safetensors. Without it Hugging Face finds no model in a folder."""
_MAX_BYTES: Final = 1 << 20
_MAX_NAME_BYTES: Final = 1 << 10
_MAX_INDEX_BYTES: Final = 1 << 30
_MOST_LOOKS: Final = 100
_MARKS: Final = (CONFIG_FNAME, COMMON_STATE_FNAME, DCKPT_FOLDER)
_MARKS_OF_OTHERS: Final = (DCP_METADATA_NAME, "_METADATA", "_CHECKPOINT_METADATA")
_ZARR_3: Final = re.compile(rb'"zarr_format":\s*3\b')
_OUR_ARRAY: Final = re.compile(
    rb'"name":\s*"default",\s*"configuration":\s*{\s*"separator":\s*"\."'
)
OLD_TORCH_SIGNATURE: Final = b"\x80\x02\x8a\x0a"
"""How files of torch.save from before PyTorch 1.6 begin, which are recognized and refused."""
_TORCH_SIGNATURES: Final = (b"PK\x03\x04", OLD_TORCH_SIGNATURE)


def is_plain_dcp(folder: Location) -> bool:
    """Whether torch DCP alone saved into the folder, and came to an end.

    An unfinished save of this library or of Megatron does not count: they commit by a later file.
    """
    ours = (folder / name for name in _MARKS)
    return is_file(folder / DCP_METADATA_NAME) and not any(map(is_there, ours))


def is_database(folder: Location) -> bool:
    """Whether another program wrote zarr v3 arrays there: into OCDBT, or into folders of its own.

    Not if they are named as ours: without its commit a folder may be half of a copy, and what is
    lost of it must not read as zeros.
    """
    names = location.names_in(folder)
    if not {*_MARKS, *_MARKS_OF_OTHERS}.isdisjoint(names):
        return False
    if "manifest.ocdbt" in names:
        return True
    # In a store every look is a request.
    names = names if isinstance(folder, Path) else names[:_MOST_LOOKS]
    for place in (folder, *(folder / name for name in names)):
        text = None
        with suppress(OSError):  # what cannot be looked at does not belong to a database
            text = location.read_regular(place / "zarr.json", _MAX_BYTES, is_start=True)
        if text is not None:
            is_whole = place == folder or b'"array"' in text
            return is_whole and bool(_ZARR_3.search(text)) and not _OUR_ARRAY.search(text)
    return False


def is_model(path: Location) -> bool:
    """Whether a path is a file of safetensors or an index of them, or a folder that holds any."""
    suffixes = (MODEL_SUFFIX, MODEL_INDEX_SUFFIX)
    if path.name.endswith(suffixes) and is_file(path):
        return True
    names = location.names_in(path)
    # What a save is about to commit has no index yet.
    is_ours = DCKPT_FOLDER in names
    return any(name.endswith(MODEL_INDEX_SUFFIX if is_ours else suffixes) for name in names)


def is_torch_file(path: Location) -> bool:
    if not isinstance(path, Path) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) in _TORCH_SIGNATURES


def deepspeed_step(path: Location) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint: itself, or what ``latest`` names."""
    if not isinstance(path, Path):
        return None
    latest, folders = path / "latest", [path]
    if latest.is_file() and latest.stat().st_size <= _MAX_NAME_BYTES:
        folders.append(path / Path(latest.read_text(errors="replace").strip()).name)
    for folder in folders:
        if any(name.endswith(_DEEPSPEED_SUFFIXES) for name in location.names_in(folder)):
            return folder
    return None


_DEEPSPEED_SUFFIXES: Final = ("_model_states.pt", "_optim_states.pt")
_FORMATS: Final[Mapping[str, Callable[[Location], object]]] = {
    "torch_dist": is_plain_dcp,
    "safetensors": is_model,
    "database": is_database,
    "torch_file": is_torch_file,
    "deepspeed": deepspeed_step,
}


def foreign_backend(path: Location) -> str | None:
    """The backend that reads what another program has written to a path; None if none does."""
    return next((backend for backend, holds in _FORMATS.items() if holds(path)), None)


def foreign_files(path: Location) -> tuple[Location, list[str]]:
    if is_file(path):
        return path.parent, [path.name]
    return path, sorted(name for name, size in location.files_below(path).items() if size)


def model_names(folder: Location) -> frozenset[str]:
    """The files of a model that a save may replace: its index, and those that this names."""
    path = folder / MODEL_INDEX_NAME
    if not is_file(path):
        return frozenset()
    with local_folder.parsing("the index cannot be read", path, remedy="Delete it by hand."):
        names = location.read_json(path, _MAX_INDEX_BYTES)["weight_map"].values()
        files = {n for n in names if Path(n).name == n and n.endswith(MODEL_SUFFIX)}
        return frozenset({*files, MODEL_INDEX_NAME})
