"""``.metadata`` as plain torch DCP and Megatron-Core read it: a pickle of DCP's own classes."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # the name that DCP's readers expect
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dist_checkpointing.strategies.torch_dist.metadata import DcpMetadata, DcpTensor

_DCP_VERSION = "1.0.0"
_PROTOCOL = 4  # what Megatron writes; every Python that PyTorch 2 runs on reads it


def to_pickle(metadata: DcpMetadata) -> bytes:
    """The bytes of ``.metadata``."""
    properties = {
        dtype: TensorProperties(dtype=dtype)
        for dtype in {tensor.dtype for tensor in metadata.tensors.values()}
    }
    entries: dict[str, Any] = {
        key: _entry(tensor, properties[tensor.dtype]) for key, tensor in metadata.tensors.items()
    }
    entries |= {key: BytesStorageMetadata() for key in metadata.values}
    # DCP's own tools (dcp_to_torch_save, partial loads) ask where each key belongs.
    paths = {key: metadata.paths.get(key, (key,)) for key in entries}
    content = Metadata(
        entries,
        planner_data=paths,
        storage_data={
            MetadataIndex(key, offset): _StorageInfo(place.file, place.offset, place.length)
            for (key, offset), place in metadata.places.items()
        },
        storage_meta=StorageMeta(),
        version=_DCP_VERSION,
    )
    # An attribute and not a class of its own: readers without Megatron know only DCP's classes.
    content.mcore_data = {  # type: ignore[attr-defined]
        key: {}
        if tensor.flattened_from is None
        else {"nd_reformulated_orig_global_shape": tensor.flattened_from}
        for key, tensor in metadata.tensors.items()
    }
    return pickle.dumps(content, _PROTOCOL)


def _entry(tensor: DcpTensor, properties: TensorProperties) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in tensor.chunks
    ]
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
