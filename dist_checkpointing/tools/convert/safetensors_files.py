"""Safetensors files: reads one, or a folder as Hugging Face lays it out, and writes headers.

The library writes only files whose tensors are all in memory, so the header of a file is made here,
before its values are there. A file is 8 bytes with the length of a JSON header, the header, and the
values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.dtypes import DType, from_name
from dist_checkpointing.format.geometry import Box, Ints, ints_from_json
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.tools.convert.model_files import MODEL_FILES_KEY, model_files
from dist_checkpointing.tools.convert.sources import MappedSource

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
METADATA_KEY: Final = "__metadata__"
MAX_HEADER_BYTES: Final = 100_000_000
"""What readers of the format take at most."""

_ALIGNMENT = 8
DTYPE_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_BY_DTYPE = {name: code for code, name in DTYPE_NAMES.items()}
_MAX_INDEX_BYTES = 1 << 30


class SafetensorsSource(MappedSource[dict[Path, Any]]):
    """Safetensors files. The texts in their headers are its common state.

    Args:
        path: a file, an ``...index.json``, or a folder with an index or any safetensors files.

    Raises:
        CheckpointingException: if the package ``safetensors`` is not installed.
        CorruptCheckpointError: if a file is damaged, or files and index differ.
        UnsupportedFormatError: if a file holds a dtype that we do not.
    """

    def __init__(self, path: Path) -> None:
        files, weight_map = _files(path)
        super().__init__(path, files)
        self._file_of: dict[str, Path] = {}
        self._texts: dict[str, str] = {}
        tensors: list[StoredTensor] = []
        findings = []
        for file, opened in self._mapped(0).items():
            with _reading(file):
                self._texts |= opened.metadata() or {}
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    if key in self._file_of:
                        findings.append(Finding("is in two files", key, path=str(file)))
                    self._file_of[key] = file
                    tensors.append(_stored(key, opened.get_slice(key)))
        findings += [
            Finding("is not in the file that the index names", key, path=name)
            for key, name in weight_map.items()
            if key not in self._file_of or self._file_of[key].name != name
        ]
        if findings:
            raise CorruptCheckpointError("the files do not fit together", findings)
        self._index = Index.of(sorted(tensors, key=lambda stored: stored.key))

    @property
    def kind(self) -> str:
        count = len(self._files)
        return f"safetensors, {count} file{'s' if count != 1 else ''}"

    @cached_property
    def common(self) -> dict[Any, Any]:
        # Says what wrote the file, which will not be true of the next one.
        texts = {name: text for name, text in self._texts.items() if name != "format"}
        path = Path(self.path)
        own = path.suffix == SUFFIX
        files = {} if own else model_files(path if path.is_dir() else path.parent)
        return {**texts, **({MODEL_FILES_KEY: files} if files else {})}

    def _open(self) -> dict[Path, Any]:
        return {file: _open(file) for file in self._files}

    def _copy(self, content: dict[Path, Any], key: str, box: Box) -> torch.Tensor:
        file = self._file_of[key]
        with _reading(file):
            view: torch.Tensor = content[file].get_slice(key)[box.slices() or ...]
        return view.clone(memory_format=torch.contiguous_format)

    def file_of(self, key: str) -> Path:
        return self._file_of[key]

    def files(self) -> tuple[Location, ...]:
        return (self.path, *self._files)


def _open(file: Path) -> Any:
    # Not at the top: the package is an extra.
    try:
        from safetensors import safe_open  # noqa: PLC0415
    except ModuleNotFoundError as error:
        remedy = "pip install 'dist_checkpointing[safetensors]'"
        finding = Finding("the package safetensors is missing", path=str(file), remedy=remedy)
        raise CheckpointingException("safetensors files cannot be read", [finding]) from error
    with _reading(file):
        return safe_open(file, framework="pt")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        yield
    except (SafetensorError, ValueError) as error:
        finding = Finding(str(error), path=str(file), remedy="Fetch the file again.")
        raise CorruptCheckpointError("not a safetensors file", [finding]) from error


def _stored(key: str, mapped: Any) -> StoredTensor:
    code = mapped.get_dtype()
    if code not in DTYPE_NAMES:
        finding = Finding("unknown dtype", key, found=code)
        raise UnsupportedFormatError("a tensor cannot be read", [finding])
    # The library takes extents that no tensor can have if another one is 0.
    shape = ints_from_json(list(mapped.get_shape()))
    return StoredTensor.undivided(key, from_name(DTYPE_NAMES[code]), shape)


def holds_safetensors(folder: Location) -> bool:
    """Whether a folder looks like one of safetensors files."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in location.names_in(folder))


def _files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and which tensor the index says is in which."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
        if len(indices) > 1:
            listed = ", ".join(index.name for index in indices)
            finding = Finding("several indices", path=str(path), found=listed)
            raise CheckpointingException("name the index to convert", [finding])
        if not indices:
            return sorted(path.glob(f"*{SUFFIX}")), {}
        path = indices[0]
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], {}
    with local_folder.parsing("the index cannot be read", path):
        weight_map = dict(location.read_json(path, _MAX_INDEX_BYTES)["weight_map"])
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file outside its folder")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        findings = [Finding("missing", path=str(path.parent / name)) for name in missing]
        raise CorruptCheckpointError("the index names files that are not there", findings)
    return [path.parent / name for name in names], weight_map


def can_hold(dtype: DType) -> bool:
    """Whether the format has this dtype."""
    return dtype.name in _BY_DTYPE


def header_bytes(
    tensors: Iterable[tuple[str, DType, Ints]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and at which byte of the file the values of each key begin.

    The values follow without gaps, wide elements first, so that all are aligned.
    """
    rows: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    places, position = {}, 0
    for key, dtype, shape in sorted(tensors, key=lambda row: (-row[1].itemsize, row[0])):
        places[key] = position
        position += math.prod(shape) * dtype.itemsize
        rows[key] = {
            "dtype": _BY_DTYPE[dtype.name],
            "shape": list(shape),
            "data_offsets": [places[key], position],
        }
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    starts = {key: begin + place for key, place in places.items()}
    return struct.pack("<Q", len(text)) + text, starts


def file_names(count: int) -> list[str]:
    """What Hugging Face calls the files of a model."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
