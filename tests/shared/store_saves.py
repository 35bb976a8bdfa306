"""Saves of one object each into a store, as rank 0 makes them."""

import json
from typing import Any

import torch

from dist_checkpointing import ObjectPath, ShardedTensor
from dist_checkpointing.format import CheckpointingConfig, StoreAttempt, data_folder, read_commit
from dist_checkpointing.format.commit import read_config

CONFIG = CheckpointingConfig("tensorstore")
PERIOD = 0.02
"""Seconds. Nothing here is timed: a heartbeat either comes again or never."""


def put(path: ObjectPath, data: bytes) -> None:
    path.store.put(path.key, data)


def names(location: ObjectPath) -> list[str]:
    prefix = location.prefix
    return [info.key.removeprefix(prefix) for info in location.store.list_below(prefix)]


def begin(location: ObjectPath, *, overwrite: bool = False) -> StoreAttempt:
    return StoreAttempt.begin(location, ["x.bin"], overwrite=overwrite, period=PERIOD)


def save(location: ObjectPath, config: CheckpointingConfig = CONFIG, **options: bool) -> str:
    """Save an object that names its attempt, so that a mix of two attempts is seen."""
    attempt = begin(location, **options)
    attempt.make_durable()
    put(attempt.folder / "x.bin", attempt.id.encode())
    put(attempt.folder / ".dckpt/seal.json", b'{"checksum":"%032x",' % 7)
    attempt.commit(config)
    return attempt.id


def loaded(location: ObjectPath) -> str | None:
    """What a reader finds: the name of the attempt that is the checkpoint."""
    if location.store.head((location / "metadata.json").key) is None:
        return None
    assert len(json.loads(location.store.get((location / "metadata.json").key))) == 4
    commit = read_commit(location)
    assert commit is not None
    found = location / commit.data / "x.bin"
    assert found.store.get(found.key).decode() == commit.attempt
    assert read_config(data_folder(location)) == commit.config
    return commit.attempt


def numbered(number: int) -> dict[str, Any]:
    """A whole state of which everything is this number."""
    weight = ShardedTensor.from_rank_offsets("w", torch.full((64, 64), float(number)))
    return {"w": weight, "number": number}
