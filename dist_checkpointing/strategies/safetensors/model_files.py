"""The files of a Hugging Face model: what is in a header, and where the values of each tensor lie.

A file is 8 bytes with the length of a JSON header, the header, and the values in C order. Where
each value lies follows from the index alone, so that every rank finds the place of what it has.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.foreign_formats import MODEL_INDEX_SUFFIX, MODEL_SUFFIX
from dist_checkpointing.format.geometry import Ints, ints_from_json
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.quantization import BlockQuantization

BACKEND: Final = "safetensors"
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
CODE_OF_DTYPE = {name: code for code, name in DTYPE_NAMES.items()}
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000
"""What readers of the format accept."""

_MAX_INDEX_BYTES = 1 << 30
_ALIGNMENT = 8
_CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_SCALES = ("_scale_inv", "_scale", "_scales")
_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
MAX_MODEL_FILE_BYTES = 128 * 2**20

TensorRow = tuple[str, DType, Ints]
"""Key, dtype and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: its header, and the byte where the values of each key begin."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    num_bytes: int


def plan_files(
    tensors: Sequence[TensorRow], texts: Mapping[str, str], most_bytes: int, *, room: int = 0
) -> list[ModelFile]:
    """The files of a model, with at most ``most_bytes`` of values in each, or one tensor.

    With ``room`` the positions do not depend on the ``texts``, which must fit into so many bytes.
    """
    sizes = {key: math.prod(shape) * dtype.itemsize for key, dtype, shape in tensors}
    batches = [*in_batches(((row, sizes[row[0]]) for row in tensors), most_bytes)] or [[]]
    files = []
    for number, batch in enumerate(batches, 1):
        starts, end = dict[str, int](), 0
        header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
        # Without gaps, wide elements first, so that all are aligned.
        for key, dtype, shape in sorted(batch, key=lambda row: (-row[1].itemsize, row[0])):
            starts[key], end = end, end + sizes[key]
            offsets = [starts[key], end]
            code = CODE_OF_DTYPE[dtype.name]
            header[key] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        length = len(_json(header)) + room
        header[METADATA_KEY] |= texts
        text = _json(header)
        if len(text) > (length if room else MAX_HEADER_BYTES):
            most = f"at most {room} bytes of texts" if room else f"{MAX_HEADER_BYTES} bytes"
            finding = Finding("the header of a file", expected=most, found=f"{len(text)} bytes")
            raise CheckpointingException("too much for one safetensors file", [finding])
        length = length if room else len(text)
        length += -length % _ALIGNMENT
        name = f"model-{number:05d}-of-{len(batches):05d}{MODEL_SUFFIX}"
        places = {key: 8 + length + start for key, start in starts.items()}
        content = struct.pack("<Q", length) + text.ljust(length)
        files.append(ModelFile(name, content, places, 8 + length + end))
    return files


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


class StoredValue(NamedTuple):
    """A tensor in a file, in which its values begin at byte ``start``."""

    dtype: DType
    shape: Ints
    start: int


def parse_header(
    text: bytes, start: int, num_bytes: int
) -> tuple[dict[str, str], dict[str, StoredValue]]:
    """The texts and the tensors of a header whose values begin at byte ``start`` of the file.

    Raises:
        ValueError, or another error of a parser: if it is not that of a file of ``num_bytes``.
    """
    content = local_folder.parse_json(text)
    texts = {str(name): str(value) for name, value in content.pop(METADATA_KEY, {}).items()}
    found, ends = dict[str, StoredValue](), list[tuple[int, int]]()
    for key, entry in content.items():
        if (code := entry["dtype"]) not in DTYPE_NAMES:
            finding = Finding("unknown dtype", key, found=code)
            raise UnsupportedFormatError("a tensor cannot be read", [finding])
        dtype, shape = from_name(DTYPE_NAMES[code]), tuple(ints_from_json(entry["shape"]))
        begin, end = ints_from_json(entry["data_offsets"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{key!r} of shape {shape} does not have {end - begin} bytes")
        ends.append((begin, end))
        found[key] = StoredValue(dtype, shape, start + begin)
    last = 0
    for begin, end in sorted(ends):
        if begin != last:
            raise ValueError(f"values begin at {begin} where those before them end at {last}")
        last = end
    if start + last != num_bytes:
        raise ValueError(f"the file has {num_bytes} bytes, and its header speaks of {start + last}")
    return texts, found


class ModelFolder(NamedTuple):
    """Where the files of a model are; ``weight_map`` is what its index says, if it has one."""

    folder: Location
    names: Sequence[str]
    weight_map: Mapping[str, str]

    @classmethod
    def of(cls, path: Location) -> Self:
        """A folder with an index or any safetensors files, an index, or a file."""
        folder, name = (path, "") if location.is_folder(path) else (path.parent, path.name)
        if not name:
            names = sorted(location.names_in(folder))
            indices = [name for name in names if name.endswith(MODEL_INDEX_SUFFIX)]
            if len(indices) > 1:
                finding = Finding("several indices", path=str(path), found=", ".join(indices))
                raise CheckpointingException("name the index to read", [finding])
            if not indices:
                return cls(folder, [name for name in names if name.endswith(MODEL_SUFFIX)], {})
            name = indices[0]
        if not name.endswith(MODEL_INDEX_SUFFIX):
            return cls(folder, [name], {})
        with local_folder.parsing("the index cannot be read", folder / name):
            weight_map = location.read_json(folder / name, _MAX_INDEX_BYTES)["weight_map"]
            names = sorted(set(weight_map.values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("it names a file outside its folder")
        paths = [folder / name for name in names]
        missing = [Finding("missing", path=str(p)) for p in paths if not location.is_file(p)]
        CorruptCheckpointError.raise_if(missing, "the index names files that are not there")
        return cls(folder, names, weight_map)


def is_model_file(name: str) -> bool:
    """Whether a file may lie beside the values of a model: its configuration, its tokenizer."""
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
        if isinstance(name, str) and isinstance(data, bytes) and is_model_file(name)
    }


def quantized_as(
    common: Mapping[Any, Any], path: Location, tensors: Mapping[str, DerivedTensor]
) -> dict[Any, Any]:
    """The common state of a model of these tensors: its configuration says how they are quantized,
    or that they are not. Readers would else dequantize again, or take codes for values.

    ``path`` is named in errors.
    """
    pieces = [piece.quantization for tensor in tensors.values() for piece in tensor.pieces]
    files = model_files_of(common)
    if _CONFIG not in files or not any(pieces):
        return dict(common)
    blocks = {own.block[-2:] for own in pieces if isinstance(own, BlockQuantization)}
    with local_folder.parsing("the configuration of the model cannot be read", path / _CONFIG):
        config = local_folder.parse_json(files[_CONFIG])
        before = config.pop(_QUANTIZATION, None)
        how = {**(before or {})}
        if len(blocks) == 1 and len(block := blocks.pop()) == 2:
            # As DeepSeek has it.
            how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            how["weight_block_size"] = [*block]
        if how and any(key.endswith(_SCALES) for key in tensors):
            if how.get("quant_method") in ("fp8", "mxfp4"):
                # Whatever is no linear layer is passed over.
                how["modules_to_not_convert"] = [
                    key.removesuffix(".weight")
                    for key, tensor in tensors.items()
                    if len(tensor.shape) == 2
                    and tensor.dtype.name in FLOATING
                    and not tensor.dtype.name.startswith("float8")
                    and not key.endswith(_SCALES)
                ]
            config[_QUANTIZATION] = how
        if before != config.get(_QUANTIZATION):
            files[_CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
    return {**common, MODEL_FILES_KEY: files}


def texts_of(common: Mapping[Any, Any]) -> dict[str, str]:
    """What of a common state the header of a file can hold: texts by name."""
    return {k: v for k, v in common.items() if isinstance(k, str) and isinstance(v, str)}
