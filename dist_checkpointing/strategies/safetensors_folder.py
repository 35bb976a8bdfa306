"""Safetensors: one file, or a folder as Hugging Face lays it out, with its configuration.

A file is 8 bytes with the length of a JSON header, the header, and the values. Files are created
with room for the values, before these are known.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
    counted,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format.dtypes import from_name
from dist_checkpointing.format.geometry import Box, ints_from_json
from dist_checkpointing.strategies.tensor_files import TensorFiles, TensorRow

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
MODEL_FILES_KEY: Final = "hugging_face"
"""Where the common state keeps the configuration and tokenizer files of a model: name -> bytes."""

DTYPE_NAMES: Final = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_BY_DTYPE = {name: code for code, name in DTYPE_NAMES.items()}
_METADATA_KEY = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
"""What readers of the format accept."""

_MAX_INDEX_BYTES = 1 << 30
_ALIGNMENT = 8
_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_MAX_MODEL_FILE_BYTES = 128 * 2**20


class SafetensorsFiles(TensorFiles):
    """Safetensors files. The texts in their headers are its common state.

    Args:
        path: a file, an ``...index.json``, or a folder with an index or any safetensors files.

    Raises:
        CheckpointingException: if the package ``safetensors`` is not installed.
        CorruptCheckpointError: if a file is damaged, or files and index differ.
        UnsupportedFormatError: if a file holds a dtype that we do not.
    """

    backend = "safetensors"

    def __init__(self, path: Path) -> None:
        files, weight_map = _files(path)
        super().__init__(path, files)
        self.kind = f"safetensors, {counted(len(files), 'file')}"
        tensors: list[TensorRow] = []
        findings = []
        for file in files:
            opened = self._open(file)
            with _reading(file):
                self._common |= opened.metadata() or {}
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    if key in self._file_of:
                        findings.append(Finding("is in two files", key, path=str(file)))
                    self._file_of[key] = file
                    view = opened.get_slice(key)
                    if (code := view.get_dtype()) not in DTYPE_NAMES:
                        finding = Finding("unknown dtype", key, found=code)
                        raise UnsupportedFormatError("a tensor cannot be read", [finding])
                    # The library accepts extents that no tensor can have if another one is 0.
                    shape = tuple(ints_from_json(list(view.get_shape())))
                    tensors.append((key, from_name(DTYPE_NAMES[code]), shape))
        findings += [
            Finding("is not in the file that the index names", key, path=name)
            for key, name in weight_map.items()
            if key not in self._file_of or self._file_of[key].name != name
        ]
        if findings:
            raise CorruptCheckpointError("the files do not fit together", findings)
        self._set_index(tensors)
        # It says what wrote the file, which will not be true of the next one.
        self._common.pop("format", None)

    def common(self) -> dict[Any, Any]:
        folder = self.path if self.path.is_dir() else self.path.parent
        if self.path.suffix == SUFFIX or not (folder / "config.json").is_file():
            return self._common
        files = {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if _is_model_file(path.name)
            and path.is_file()
            and path.stat().st_size <= _MAX_MODEL_FILE_BYTES
        }
        return {**self._common, MODEL_FILES_KEY: files}

    def _open(self, file: Path) -> Any:
        # Not at the top: the package is an extra.
        try:
            from safetensors import safe_open  # noqa: PLC0415
        except ModuleNotFoundError as error:
            remedy = "pip install 'dist_checkpointing[safetensors]'"
            finding = Finding("the package safetensors is missing", path=str(file), remedy=remedy)
            raise CheckpointingException("safetensors files cannot be read", [finding]) from error
        with _reading(file):
            return safe_open(file, framework="pt")

    def _copy(self, key: str, box: Box, out: torch.Tensor) -> None:
        file = self._file_of[key]
        with _reading(file):
            view = self._content(file).get_slice(key)[box.slices() or ...]
        out.copy_(view)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        yield
    except (SafetensorError, ValueError) as error:
        finding = Finding(str(error), path=str(file), remedy="Fetch the file again.")
        raise CorruptCheckpointError("not a safetensors file", [finding]) from error


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


def _is_model_file(name: str) -> bool:
    return (
        Path(name).name == name
        and not name.startswith(".")
        and name.endswith(_MODEL_FILE_SUFFIXES)
        and not name.endswith(".index.json")
    )


def model_files_of(common: Mapping[Any, Any]) -> dict[str, bytes]:
    """The files of a model in a common state; nothing that could be written elsewhere."""
    kept = common.get(MODEL_FILES_KEY)
    return {
        name: data
        for name, data in (kept.items() if isinstance(kept, dict) else ())
        if isinstance(name, str) and isinstance(data, bytes) and _is_model_file(name)
    }


def texts_of(common: Mapping[Any, Any]) -> dict[str, str]:
    """What of a common state the header of a file can hold: texts by name."""
    return {k: v for k, v in common.items() if isinstance(k, str) and isinstance(v, str)}


def require_storable(rows: Iterable[TensorRow]) -> None:
    """Raise CheckpointingException if the format cannot hold some tensors, naming all of them."""
    findings = []
    for key, dtype, _ in rows:
        if dtype.name not in _BY_DTYPE:
            remedy = "Leave it out with --exclude, or --cast it."
            problem = "safetensors has no such dtype"
            findings.append(Finding(problem, key, found=dtype.name, remedy=remedy))
        if key == _METADATA_KEY:
            findings.append(Finding("is a name of the format itself", key, remedy="--rename it."))
    if findings:
        raise CheckpointingException("cannot be converted to safetensors", findings)


def create(
    path: Path, rows: Sequence[TensorRow], texts: Mapping[str, str], shard_bytes: int | None
) -> dict[Path, dict[str, int]]:
    """Create one file, or a model as Hugging Face lays it out, with room for the values.

    ``path`` is a folder to make with files of at most ``shard_bytes`` of values, or a file if that
    is None. Returns for each file at which byte the values of each key begin, in C order.
    """
    sizes = {key: math.prod(shape) * dtype.itemsize for key, dtype, shape in rows}
    files = [list(rows)]
    if shard_bytes is not None:
        files = list(in_batches(((row, sizes[row[0]]) for row in rows), shard_bytes)) or [[]]
        path.mkdir()
    count = len(files)
    created: dict[Path, dict[str, int]] = {}
    weight_map: dict[str, str] = {}
    for number, own in enumerate(files, 1):
        name = f"model-{number:05d}-of-{count:05d}{SUFFIX}" if count > 1 else f"model{SUFFIX}"
        header: dict[str, Any] = {_METADATA_KEY: {**texts, "format": "pt"}}
        starts, end = {}, 0
        # Without gaps, wide elements first, so that all are aligned.
        for key, dtype, shape in sorted(own, key=lambda row: (-row[1].itemsize, row[0])):
            starts[key], end = end, end + sizes[key]
            header[key] = {
                "dtype": _BY_DTYPE[dtype.name],
                "shape": list(shape),
                "data_offsets": [starts[key], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        if len(text) > _MAX_HEADER_BYTES:
            finding = Finding("the header", found=f"{8 + len(text)} bytes")
            raise CheckpointingException("too many tensors for one safetensors file", [finding])
        file = path if shard_bytes is None else path / name
        with file.open("xb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + end)
        created[file] = {key: 8 + len(text) + start for key, start in starts.items()}
        weight_map |= dict.fromkeys(starts, name)
    if count > 1:
        content = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = json.dumps(content, indent=2).encode() + b"\n"
        local_folder.write_atomic(path / f"model{INDEX_SUFFIX}", text)
    return created
