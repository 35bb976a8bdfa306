"""("safetensors", 1): the folder of a Hugging Face model, written and read by the ranks.

``model.safetensors.index.json`` is the commit: without it Hugging Face finds no model there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Final

import torch

from dist_checkpointing.errors import Finding, StateMismatchError, UnsupportedFormatError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.foreign_formats import MODEL_SUFFIX
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedStateDict, StateDict
from dist_checkpointing.mapping.nested_dicts import flatten, path_text
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.strategies.base import (
    KnownFormats,
    LoadCommonStrategy,
    PathOrStr,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveCommonStrategy,
)
from dist_checkpointing.strategies.safetensors.model_files import (
    BACKEND,
    MAX_MODEL_FILE_BYTES,
    MODEL_FILES_KEY,
    is_model_file,
    model_files_of,
    texts_of,
)
from dist_checkpointing.strategies.safetensors.reader import SafetensorsReader
from dist_checkpointing.strategies.safetensors.writer import TENSORS_ONLY, SafetensorsWriter

_WRAP: Final = "Wrap it: interop.shard_state_dict(model.state_dict()) wraps all of them."
logger: logging.Logger = logging.getLogger(__name__)


class SafetensorsSaveShardedStrategy(PlannedSaveStrategy):
    """Saves tensors as ("safetensors", 1): what ``from_pretrained`` of Hugging Face reads.

    Args:
        dtype: cast floating-point values to it; by default they stay as they are.
        extra_files: configuration, tokenizer and other small files of the model, by name.
        options: see PlannedSaveStrategy, also for what else there is.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "model", SafetensorsSaveShardedStrategy(dtype=torch.bfloat16))
        >>> Checkpoint.open("model")["w"].dtype
        torch.bfloat16
    """

    writer_type: ClassVar[type[SafetensorsWriter]] = SafetensorsWriter
    writes: ClassVar[tuple[str, int]] = (BACKEND, 1)

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, version, **options)
        self.writer_options: dict[str, Any] = {
            "dtype": dtype,
            "extra_files": dict(extra_files or {}),
        }

    def is_one_file(self, path: PathOrStr) -> bool:
        return os.fspath(path).endswith(MODEL_SUFFIX)

    def holdable(
        self, path: PathOrStr, common_state_dict: StateDict, objects: Mapping[str, Any]
    ) -> tuple[StateDict, Mapping[str, Any]]:
        kept: dict[Any, Any] = dict(texts_of(common_state_dict))
        files = {} if self.is_one_file(path) else model_files_of(common_state_dict)
        if files:
            kept[MODEL_FILES_KEY] = files
        return kept, {}

    def common_strategy(
        self, writer: StorageWriter, common_state_dict: StateDict
    ) -> SaveCommonStrategy:
        assert isinstance(writer, SafetensorsWriter)
        leaves, _ = flatten(common_state_dict)
        findings = [
            Finding("a plain tensor is no part of the model", path_text(path), remedy=_WRAP)
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor)
        ]
        UnsupportedFormatError.raise_if(findings, "the state cannot be saved as safetensors")
        writer.extra_files = {**model_files_of(common_state_dict), **writer.extra_files}
        writer.texts = texts_of(common_state_dict)
        return SafetensorsCommonSaveStrategy(BACKEND, 1)


class SafetensorsCommonSaveStrategy(SaveCommonStrategy):
    """Writes nothing: what the format can hold of a common state is in the headers."""

    def created_names(self, object_keys: Iterable[str]) -> Iterable[str]:
        problem = "the format holds tensors only"
        findings = [Finding(problem, key, remedy=TENSORS_ONLY) for key in object_keys]
        UnsupportedFormatError.raise_if(findings, "the state cannot be saved as safetensors")
        return []

    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: str | PathLike[str]
    ) -> Sequence[SealedFile]:
        held = {*texts_of(common_state_dict), MODEL_FILES_KEY}
        if left_out := [str(key) for key in common_state_dict if key not in held]:
            names = ", ".join(left_out)
            text = "%s: left out, because the format has no place: %s"
            logger.warning(text, checkpoint_dir, names)
        return []

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | PathLike[str]
    ) -> Sequence[SealedFile]:
        return []


class SafetensorsLoadShardedStrategy(PlannedLoadStrategy):
    """Loads safetensors: a folder of Hugging Face, with or without an index, or a file.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "model", "safetensors")
        >>> loaded = load(state, "model/model-00001-of-00001.safetensors")
    """

    reader_type: ClassVar[type[SafetensorsReader]] = SafetensorsReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({(BACKEND, 1)})


class SafetensorsCommonLoadStrategy(KnownFormats, LoadCommonStrategy):
    """Reads the texts in the headers, and the other files of a model."""

    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({(BACKEND, 1)})

    def load_common(self, checkpoint_dir: str | PathLike[str]) -> StateDict:
        path = as_location(checkpoint_dir)
        reader = SafetensorsReader(path)
        reader.reset(path)
        folder, common = reader.checkpoint_dir, dict[str, Any](reader.texts)
        if path.name.endswith(MODEL_SUFFIX) or not location.is_file(folder / "config.json"):
            return common
        sizes = {name: location.size_of(folder / name) for name in location.names_in(folder)}
        common[MODEL_FILES_KEY] = {
            name: location.read_bytes(folder / name, MAX_MODEL_FILE_BYTES)
            for name, size in sorted(sizes.items())
            if is_model_file(name) and size is not None and size <= MAX_MODEL_FILE_BYTES
        }
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | PathLike[str]
    ) -> StateDict:
        leaves, _ = flatten(sharded_objects_state_dict)
        findings = [
            Finding("not in the checkpoint", leaf.unique_key, path=str(checkpoint_dir))
            for leaf in leaves.values()
        ]
        StateMismatchError.raise_if(findings, "safetensors files hold tensors only")
        return sharded_objects_state_dict
