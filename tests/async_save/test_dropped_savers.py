"""A saver that nobody refers to any more leaves nothing behind, closed or not."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dist_checkpointing import AsyncSaver, CheckpointManager, load_plain_tensors
from dist_checkpointing.comm import TorchComm, default_comm
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrV3Writer
from states import at_step

ROUNDS = 2


@pytest.fixture
def store() -> Iterator[Any]:
    """A world of one rank, and the store that all its groups share."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def held(store: Any) -> dict[str, int]:
    """What a process group costs this process and the store, once all is quiet."""
    join_savers()
    looks = [look(store)]
    # The kernel shows a thread for a moment after it has ended.
    while len(looks) < 500 and looks[-5:] != [looks[-1]] * 5:
        time.sleep(0.02)
        looks.append(look(store))
    return looks[-1]


def join_savers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("async-save"):
            thread.join(30)
    gc.collect()


def look(store: Any) -> dict[str, int]:
    return {
        "keys": store.num_keys(),
        "groups": len(distributed_c10d._world.pg_map),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads of gloo": sum("gloo" in name for name in thread_names()),
        "threads": threading.active_count(),
    }


def thread_names() -> list[str]:
    """Of all threads, also those that Python does not know; TensorStore's come and go."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return names


def drop(folder: Path, step: int) -> None:
    saver = AsyncSaver()
    saver.save(at_step(step), folder / f"dropped-{step}").result()


def drop_without_a_save(folder: Path, step: int) -> None:
    del folder, step
    AsyncSaver()


def close(folder: Path, step: int) -> None:
    with AsyncSaver() as saver:
        saver.save(at_step(step), folder / f"closed-{step}")


def manage(folder: Path, step: int) -> None:
    with CheckpointManager(folder / "run") as manager:
        manager.async_save(step, at_step(step))


def drop_a_manager(folder: Path, step: int) -> None:
    CheckpointManager(folder / "run").async_save(step, at_step(step)).result()


def talk_and_drop(folder: Path, step: int) -> None:
    del folder, step
    group = dist.group.WORLD
    assert group is not None
    TorchComm(group).agree("being here", None)


@pytest.mark.parametrize(
    "use", [drop, drop_without_a_save, close, manage, drop_a_manager, talk_and_drop]
)
def test_nothing_is_left(tmp_path: Path, store: Any, use: Any) -> None:
    default_comm().agree("being here", None)
    use(tmp_path, 0)  # pools of threads that stay for the next save
    before = held(store)
    for step in range(1, 1 + ROUNDS):
        use(tmp_path, step)
        assert held(store) == before


def test_a_save_under_way_is_brought_to_its_end(tmp_path: Path, store: Any) -> None:
    """The thread needs the ranks' own channel, and gives it back."""
    default_comm().agree("being here", None)
    drop(tmp_path, 0)
    before = held(store)
    may_go_on = threading.Event()

    class Writer(ZarrV3Writer):
        def write_data(self, *args: Any) -> Any:
            assert may_go_on.wait(30)
            return super().write_data(*args)

    class Waiting(Zarr3SaveShardedStrategy):
        writer_type = Writer

    saver = AsyncSaver()
    handle = saver.save(at_step(7), tmp_path / "c", Waiting())
    del saver
    gc.collect()
    assert look(store)["groups"] == before["groups"] + 1
    may_go_on.set()
    handle.result()
    assert (load_plain_tensors(tmp_path / "c")["w"] == 7).all()
    assert held(store) == before


def test_a_channel_that_outlives_its_world_is_no_error(store: Any) -> None:
    del store
    saver = AsyncSaver()
    dist.destroy_process_group()
    del saver
    gc.collect()
    # For the fixture, which destroys one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
