"""Saves of one object each, as rank 0 makes them, and kills at each of their calls to a store."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dist_checkpointing import ObjectPath, ShardedTensor
from dist_checkpointing.filesystem import ObjectStore
from dist_checkpointing.filesystem.object_store_locks import THREAD
from dist_checkpointing.format import CheckpointingConfig, StoreAttempt, read_commit

CONFIG = CheckpointingConfig("tensorstore")
OTHER_CONFIG = CheckpointingConfig("zarr", 2)
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
    return commit.attempt


def numbered(number: int) -> dict[str, Any]:
    """A whole state of which everything is this number."""
    weight = ShardedTensor.from_rank_offsets("w", torch.full((64, 64), float(number)))
    return {"w": weight, "number": number}


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def calls_to_the_store(before: Callable[[str, str], None]) -> Iterator[None]:
    """Tell ``before`` the name and the key of each call that this thread makes."""
    thread = threading.get_ident()

    def watched(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(store: ObjectStore, key: object, *args: object, **options: object) -> object:
            if threading.get_ident() == thread:
                before(name, str(key))
            return method(store, key, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, method in list(vars(ObjectStore).items()):
            if callable(method) and not name.startswith("_"):
                patch.setattr(ObjectStore, name, watched(name, method))
        yield


def killed_at(step: int, work: Callable[[], object]) -> str | None:
    """Run ``work`` and kill it before a call to the store; that call, or None if it has ended."""
    calls: list[str] = []

    def count(name: str, key: str) -> None:
        calls.append(f"{name} {key}")
        if len(calls) > step:
            raise Killed

    try:
        with calls_to_the_store(count):
            work()
    except Killed:
        return calls[-1]
    return None


def kill_points(work: Callable[[], object], prepare: Callable[[], object]) -> Iterator[str]:
    """Prepare and kill ``work`` at each of its calls to the store, one after the other."""
    step = 0
    while True:
        prepare()
        point = killed_at(step, work)
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join()  # it ends with the process, and puts nothing afterwards
        if point is None:
            return
        yield point
        step += 1
