"""Converts into files of other programs: safetensors, and torch.save."""

from __future__ import annotations

import io
import itertools
import json
import logging
import mmap
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.strategies.torch_archives import entries
from dist_checkpointing.tools.convert import safetensors_files as st
from dist_checkpointing.tools.convert.copying import Copier, TensorInFile, write_tensor
from dist_checkpointing.tools.convert.plan import ConversionPlan, PlannedTensor
from dist_checkpointing.tools.convert.torch_file import (
    COMMON_KEY,
    OBJECTS_KEY,
    can_be_stored,
)

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT_SHARD_BYTES: Final = 5_000_000_000

_MAP_NORESERVE = 0x4000
_ALIGNMENT = 64


@contextmanager
def _created(path: Path, num_bytes: int) -> Iterator[int]:
    """A new file of that size, which the body fills."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def check_safetensors(plan: ConversionPlan) -> None:
    """Find out whether the format can hold all of it.

    Raises:
        CheckpointingException: naming what it cannot.
    """
    findings = [
        Finding(
            "safetensors has no such dtype",
            tensor.key,
            found=tensor.dtype.name,
            remedy="Leave it out with --exclude, or --cast it.",
        )
        for tensor in plan.tensors
        if not st.can_hold(tensor.dtype)
    ]
    findings += [
        Finding("is a name of the format itself", tensor.key, remedy="--rename it.")
        for tensor in plan.tensors
        if tensor.key == st.METADATA_KEY
    ]
    if findings:
        raise CheckpointingException("cannot be converted to safetensors", findings)


def write_safetensors(
    plan: ConversionPlan,
    path: Path,
    copier: Copier,
    *,
    as_folder: bool,
    shard_bytes: int,
    texts: dict[str, str],
) -> None:
    """Write a model as Hugging Face lays it out: one file, or several and an index.

    Args:
        plan: what to write.
        path: a folder to make, or a file.
        copier: writes the values.
        as_folder: make a folder, with several files if there are many values; else one file.
        shard_bytes: most bytes of values in one of the files of a folder.
        texts: texts for the header.
    """
    tensors = {tensor.key: tensor for tensor in plan.tensors}
    sizes = [(tensor.key, tensor.num_bytes) for tensor in plan.tensors]
    files = list(in_batches(sizes, shard_bytes)) if as_folder else []
    files = files or [list(tensors)]
    names = st.file_names(len(files))
    if as_folder:
        path.mkdir()
    with ExitStack() as opened:
        targets: list[TensorInFile] = []
        for name, keys in zip(names, files, strict=True):
            rows = [(key, tensors[key].dtype, tensors[key].shape) for key in keys]
            header, starts = st.header_bytes(rows, {**texts, "format": "pt"})
            if len(header) - 8 > st.MAX_HEADER_BYTES:
                finding = Finding("the header", found=f"{len(header)} bytes")
                raise CheckpointingException("too many tensors for one safetensors file", [finding])
            size = len(header) + sum(tensors[key].num_bytes for key in keys)
            file = opened.enter_context(_created(path / name if as_folder else path, size))
            os.pwrite(file, header, 0)
            targets += [TensorInFile(tensors[key], file, start) for key, start in starts.items()]
        copier.copy(targets)
    if len(files) > 1:
        weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        content = {
            "metadata": {"total_size": plan.num_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        local_folder.write_atomic(
            path / st.INDEX_NAME, json.dumps(content, indent=2).encode() + b"\n"
        )


def texts_for_safetensors(common: dict[Any, Any]) -> dict[str, str]:
    """What of a common state the header of a file can hold: texts by name."""
    return {
        name: value
        for name, value in common.items()
        if isinstance(name, str) and isinstance(value, str)
    }


def write_torch_file(
    plan: ConversionPlan,
    path: Path,
    copier: Copier,
    *,
    common: dict[Any, Any],
    objects: dict[str, Any],
) -> None:
    """Write a file that ``torch.load(weights_only=True)`` reads: tensors by key.

    torch.save writes the file with room for the tensors, which are then copied into it: they are
    never in memory together.

    Raises:
        CheckpointingException: if a tensor has the name of one of these keys.
    """
    state: dict[str, Any] = _without_memory(plan.tensors)
    for name, value in ((COMMON_KEY, common), (OBJECTS_KEY, objects)):
        if value and name in state:
            finding = Finding("is where the rest is kept", name, remedy="--rename it.")
            raise CheckpointingException("a tensor cannot have this key", [finding])
        if value:
            state[name] = _with_own_storages(value)
    with torch.serialization.skip_data():
        torch.save(state, path)
    rest = {name: state[name] for name in (COMMON_KEY, OBJECTS_KEY) if name in state}
    own = [leaf for leaf in flatten(rest)[0].values() if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.num_bytes for tensor in plan.tensors]
    starts = _storage_starts(path, [*sizes, *(tensor.nbytes for tensor in own)])
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for tensor, start in zip(own, starts[len(plan.tensors) :], strict=True):
            write_tensor(descriptor, tensor, start)
        targets = [
            TensorInFile(tensor, descriptor, start)
            for tensor, start in zip(plan.tensors, starts, strict=False)
        ]
        copier.copy(targets)
    finally:
        os.close(descriptor)


def _storage_starts(path: Path, sizes: Sequence[int]) -> list[int]:
    """Where in a file of torch.save the values of its storages begin.

    torch.save numbers storages in the order in which it meets their tensors.
    """
    with path.open("rb") as file:
        found = entries(
            lambda start, size: os.pread(file.fileno(), size, start), path.stat().st_size
        )
    records = [found[f"data/{number}"] for number in range(len(sizes))]
    assert [size for _, size in records] == list(sizes), "torch.save wrote other storages"
    return [start for start, _ in records]


def _without_memory(tensors: tuple[PlannedTensor, ...]) -> dict[str, Any]:
    """Tensors at addresses that take no memory, because nothing is written there."""
    starts = [
        0,
        *itertools.accumulate(-(-t.num_bytes // _ALIGNMENT) * _ALIGNMENT for t in tensors),
    ]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    addresses = mmap.mmap(-1, max(1, starts[-1]), flags=flags)
    state = {}
    for tensor, start in zip(tensors, starts, strict=False):
        dtype, count = tensor.dtype.torch, tensor.num_bytes // tensor.dtype.itemsize
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(addresses, dtype=dtype, count=count, offset=start)
        state[tensor.key] = flat.view(tensor.shape)
    return state


def _with_own_storages(value: Any) -> Any:
    leaves, skeleton = flatten(value)
    own = {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for path, leaf in leaves.items()
    }
    return unflatten(skeleton, own)


def loadable(values: dict[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """What of some values ``torch.load(weights_only=True)`` reads, and the names of the rest."""
    kept, left = {}, []
    for name, value in values.items():
        if _is_loadable({name: value}):
            kept[name] = value
        else:
            left.append(str(name))
    return kept, left


def _is_loadable(value: Any) -> bool:
    leaves, skeleton = flatten(value)
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
    others = {p: None if isinstance(leaf, torch.Tensor) else leaf for p, leaf in leaves.items()}
    buffer = io.BytesIO()
    try:
        torch.save(unflatten(skeleton, others), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a pickle of anything raises
        logger.debug("cannot be kept in a file of torch.save: %s", error)
        return False
    # A tensor inside a leaf would end up in the file without its values.
    hidden = [name for name in zipfile.ZipFile(buffer).namelist() if "/data/" in name]
    return not hidden and all(map(can_be_stored, tensors))
