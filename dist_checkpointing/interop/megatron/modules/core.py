"""Whether a folder holds a checkpoint, and of which backend."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format import commit
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.leftovers import CONFIG_FNAME

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]


def maybe_load_config(checkpoint_dir: str | PathLike[str]) -> CheckpointingConfig | None:
    """The content of ``metadata.json``; None for no folder, and for one without the file."""
    if not checkpoint_dir or not location.is_file(Path(checkpoint_dir) / CONFIG_FNAME):
        return None
    return commit.read_config(checkpoint_dir)


def check_is_distributed_checkpoint(checkpoint_dir: str | PathLike[str]) -> bool:
    """Whether there is a ``metadata.json`` that can be read."""
    # Plain checkpoints of torch DCP have none, and Megatron's training has its own code for them.
    is_there = bool(checkpoint_dir) and location.is_file(Path(checkpoint_dir) / CONFIG_FNAME)
    return is_there and commit.check_is_distributed_checkpoint(checkpoint_dir)


def save_config(config: CheckpointingConfig, checkpoint_dir: str | PathLike[str]) -> None:
    """Write ``metadata.json``, which turns the files in the folder into a checkpoint."""
    local_folder.write_atomic(
        Path(checkpoint_dir) / CONFIG_FNAME, json.dumps(asdict(config)).encode()
    )
