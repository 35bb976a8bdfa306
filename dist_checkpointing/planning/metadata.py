"""Metadata: what a checkpoint holds, in the words of torch DCP's protocols."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.chunking import Layout, RowBlockLayout, index_of
from dist_checkpointing.planning.coverage import main_rows
from dist_checkpointing.planning.items import (
    MetadataIndex,
    SavePlan,
    WriteItem,
    WriteItemType,
    part_of,
)
from dist_checkpointing.planning.shard_table import ShardTable, concatenate

_EXTRAS = ("planner_data", "storage_data", "storage_meta", "version")


def whole_items(layout: Layout) -> Layout:
    """The layout for a storage that asks for this one, but with every item as one chunk."""
    if not isinstance(layout, RowBlockLayout):
        return layout
    return replace(layout, max_chunk_bytes=1 << 62, keeps_ranges=True)


class Metadata(Index):
    """What a checkpoint holds, and what a planner, a writer and a reader keep with it.

    It is an Index of the tensors and objects. A writer may pickle it in ``finish``, and a reader
    return it from ``read_metadata``: every rank then gets it in ``set_up_storage_reader``.

    Args:
        state_dict_metadata: for each key of a tensor anything with ``properties`` (which has a
            ``dtype``), ``size`` and ``chunks`` (each has ``offsets`` and ``sizes``), such as a
            TensorStorageMetadata of torch; for an object of one cell, anything else.
        planner_data: for a planner's own use.
        storage_data: for a storage's own use.
        storage_meta: for a storage's own use.
        version: of the format, for a storage's own use.
        columns: the fields of an Index, in place of ``state_dict_metadata``.

    Raises:
        InvalidShardingError: if a tensor has no usable ``properties``, ``size`` or ``chunks``.

    Example:
        >>> import torch
        >>> from dist_checkpointing.planning import Metadata
        >>> chunk = {"offsets": (0,), "sizes": (4,)}
        >>> tensor = {"properties": torch.float32, "size": (4,), "chunks": [chunk]}
        >>> metadata = Metadata({"w": tensor}, storage_data={"w": "w.bin"})
        >>> metadata["w"].global_shape, metadata.storage_data
        ((4,), {'w': 'w.bin'})
    """

    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: str = "1.0"

    def __init__(
        self,
        state_dict_metadata: Mapping[str, Any] | None = None,
        planner_data: Any = None,
        storage_data: Any = None,
        storage_meta: Any = None,
        version: str = "1.0",
        **columns: Any,
    ) -> None:
        if not columns:
            described = _described(state_dict_metadata or {})
            index = index_of(whole_items(RowBlockLayout()), described, main_rows(described))
            columns = {field.name: getattr(index, field.name) for field in fields(Index)}
        super().__init__(**columns)
        extras = (planner_data, storage_data, storage_meta, version)
        self.__dict__.update(zip(_EXTRAS, extras, strict=True))

    @classmethod
    def from_index(cls, index: Index) -> Metadata:
        """The same as an index; itself if it is one."""
        if isinstance(index, cls):
            return index
        metadata = cls.__new__(cls)
        metadata.__dict__.update(index.__dict__)  # with what it has worked out
        return metadata

    @classmethod
    def laid_out(
        cls, given: object, layout: Layout, announced: ShardTable, written: ShardTable
    ) -> Metadata:
        """What the checkpoint holds if every item of a user's planner is stored as one chunk.

        Args:
            given: what the planner returned; what it keeps for itself is kept.
            layout: stores every item as one chunk, see ``whole_items``.
            announced: shards of all ranks, sorted by key.
            written: those that are written, sorted by key.

        Raises:
            CheckpointingException: if the planner returned no metadata.
        """
        if not hasattr(given, "state_dict_metadata"):
            finding = Finding(
                "build_global_plan must return the plans of all ranks and what they make up",
                expected="Metadata or Index",
                found=type(given).__name__,
            )
            raise CheckpointingException("the plan of a planner cannot be used", [finding])
        filled = written.take(written.num_elements > 0)
        metadata = cls.from_index(index_of(layout, announced, filled))
        extras = {name: getattr(given, name) for name in _EXTRAS if hasattr(given, name)}
        metadata.__dict__.update(extras)
        return metadata

    @cached_property
    def state_dict_metadata(self) -> dict[str, Any]:
        """For each key a TensorStorageMetadata or BytesStorageMetadata of torch."""
        dcp = importlib.import_module("torch.distributed.checkpoint.metadata")
        size = importlib.import_module("torch").Size
        described: dict[str, Any] = {}
        for tensor in map(self.__getitem__, self):
            described[tensor.key] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=tensor.dtype.torch),
                size(tensor.global_shape),
                [
                    dcp.ChunkStorageMetadata(size(box.offset), size(box.shape))
                    for box, _ in tensor.parts()
                ],
            )
        return described | {key: dcp.BytesStorageMetadata() for key in self.objects}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in _EXTRAS}


def _described(state_dict_metadata: Mapping[str, Any]) -> ShardTable:
    """The chunks of tensors and the cells of objects as a table, sorted by key."""
    items: list[WriteItem] = []
    for key, described in state_dict_metadata.items():
        chunks = part_of(described, "chunks")
        if chunks is None:
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            continue
        rest = {name: part_of(described, name) for name in ("properties", "size")}
        if not chunks and rest["size"] is not None:  # a tensor without elements
            chunks = [Box.whole(tuple(rest["size"]))]
        for chunk in chunks:
            data: Any = {**rest, "chunk": chunk}
            items.append(WriteItem(MetadataIndex(key), WriteItemType.TENSOR, data))
    return concatenate([SavePlan(items).table])
