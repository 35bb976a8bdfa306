"""Savers: the one that is kept for async_save, and what happens at their edges."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, ThreadComm, TorchComm, default_comm
from dist_checkpointing.storage import Progress
from dist_checkpointing.strategies import (
    AsyncCallsQueue,
    AsyncRequest,
    Zarr3SaveShardedStrategy,
    ZarrV3Writer,
)
from dist_checkpointing.testing import run_ranks
from states import assert_at_step, at_step


def kept_by(comm: Comm) -> dc.AsyncSaver:
    (saver,) = (kept for kept in comm.kept.values() if isinstance(kept, dc.AsyncSaver))
    return saver


def test_async_save_keeps_one_saver_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    duplicate = ThreadComm.duplicate

    def count(self: ThreadComm) -> ThreadComm:
        made.append(self.rank)
        return duplicate(self)

    monkeypatch.setattr(ThreadComm, "duplicate", count)

    def one(comm: Comm) -> None:
        assert isinstance(comm, ThreadComm)
        pointers = set()
        for step in (1, 2, 3):
            again = ThreadComm(comm._rendezvous, comm.rank)  # the same ranks
            dc.async_save(at_step(step, again), tmp_path / str(step), comm=again)
            pointers.add(kept_by(comm)._buffers._memory.data_ptr())
        assert len(pointers) == 1
        kept_by(comm).close()

    run_ranks(2, one)
    assert sorted(made) == [0, 1], "a channel for each call"
    for step in (1, 2, 3):
        assert_at_step(tmp_path / str(step), step)


def test_a_world_that_is_taken_down_takes_its_saver_along(tmp_path: Path) -> None:
    """The next one gets a saver of its own; what is left of the old one ends without a word."""
    savers = []
    for step in (1, 2):
        store = dist.FileStore(str(tmp_path / f"store-{step}"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            dc.async_save(at_step(step), tmp_path / str(step)).result(30)
            savers.append(kept_by(default_comm()))
        finally:
            dist.destroy_process_group()
    assert savers[0] is not savers[1]
    for step, saver in enumerate(savers, start=1):
        saver.close_alone(1.0)
        assert_at_step(tmp_path / str(step), step)


def test_a_closed_saver(tmp_path: Path) -> None:
    saver = dc.AsyncSaver()
    saver.close()
    saver.close()
    with pytest.raises(ValueError, match="closed"):
        saver.save(at_step(1), tmp_path / "1")


def test_a_progress_callback_that_fails_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On one rank alone it would otherwise leave the others waiting."""

    def one(comm: Comm) -> None:
        def fail(_: Progress) -> None:
            raise ZeroDivisionError

        callback = fail if comm.rank == 1 else None
        dc.save(at_step(1, comm), tmp_path / "1", comm=comm, progress=callback)
        with dc.AsyncSaver(comm=comm) as saver:
            saver.save(at_step(2, comm), tmp_path / "2", progress=callback)

    run_ranks(2, one, timeout_seconds=10)
    assert_at_step(tmp_path / "1", 1)
    assert_at_step(tmp_path / "2", 2)
    told = [record for record in caplog.records if "callback failed" in record.message]
    assert len(told) == 2
    assert told[0].exc_info is not None


def test_waiting_in_vain_is_told_to_all_ranks(tmp_path: Path) -> None:
    """Else one would be at the next step while the others wait for it at this one."""
    gate = threading.Event()

    def one(comm: Comm) -> None:
        def hold(report: Progress) -> None:
            if comm.rank == 1 and report.phase == "writing":
                assert gate.wait(30)

        saver = dc.AsyncSaver(comm=comm)
        saver.save(at_step(1, comm), tmp_path / "1", progress=hold)
        with pytest.raises(TimeoutError, match="still run"):
            saver.wait(0.2)
        comm.all_gather(None)
        gate.set()
        saver.wait(30)

    run_ranks(2, one)
    assert_at_step(tmp_path / "1", 1)


def test_without_a_thread_the_work_is_done_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that cannot start one must not leave the others waiting in the background."""
    start = threading.Thread.start

    def fail(self: threading.Thread) -> None:
        if self.name.startswith("async-save"):
            raise RuntimeError("can't start new thread")
        start(self)

    def one(comm: Comm) -> None:
        with dc.AsyncSaver(comm=comm) as saver:
            saver.save(at_step(1, comm), tmp_path / "1").result(30)

    monkeypatch.setattr(threading.Thread, "start", fail)
    run_ranks(1, one)
    assert_at_step(tmp_path / "1", 1)
    assert any("in the foreground" in text for text in caplog.messages)


def test_a_last_step_that_fails_on_one_rank_fails_on_all() -> None:
    def one(comm: Comm) -> None:
        def last() -> None:
            if comm.rank == 1:
                raise dc.CheckpointingException("not today")

        queue = AsyncCallsQueue(comm=comm)
        queue.schedule_async_request(AsyncRequest(None, (), [last]))
        with pytest.raises(dc.CheckpointingException, match="not today"):
            queue.maybe_finalize_async_calls(blocking=True)
        assert queue.get_num_unfinalized_calls() == 0

    run_ranks(2, one)


class _Gone(BaseException):
    """No Exception: such as what a debugger or an interpreter that ends raises."""


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_rank_that_stopped_writing_in_any_way_is_not_left_out(
    tmp_path: Path, backend: str
) -> None:
    """What is raised behind the training and is no Exception must not end in a commit."""

    def train(comm: Comm) -> None:
        def stop(progress: Progress) -> None:
            if comm.rank == 1 and progress.phase == "writing":
                raise _Gone

        part = torch.full((2, 8), float(comm.rank))
        state = {"w": dc.ShardedTensor.from_rank_offsets("w", part, (0, comm.rank, 2))}
        request = dc.save(
            state, tmp_path / "c", backend, async_sharded_save=True, progress=stop, comm=comm
        )
        assert request is not None
        with suppress(_Gone):
            request.execute()
        with pytest.raises(dc.CheckpointingException, match="stopped writing"):
            request.finalize(comm)

    run_ranks(2, train)
    assert not (tmp_path / "c" / "metadata.json").exists()


# A saver that nobody refers to any more leaves nothing behind, closed or not.


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


def check_no_more(store: Any, before: dict[str, int]) -> None:
    after = held(store)
    for name in ("threads", "descriptors"):  # those of other tests may end meanwhile
        assert after[name] <= before[name]
        after[name] = before[name]
    assert after == before


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
        "threads": threading.active_count(),
    }


def drop(folder: Path, step: int) -> None:
    saver = dc.AsyncSaver()
    saver.save(at_step(step), folder / f"dropped-{step}").result()


def drop_without_a_save(folder: Path, step: int) -> None:
    del folder, step
    dc.AsyncSaver()


def close(folder: Path, step: int) -> None:
    with dc.AsyncSaver() as saver:
        saver.save(at_step(step), folder / f"closed-{step}")


def manage(folder: Path, step: int) -> None:
    with dc.CheckpointManager(folder / "run") as manager:
        manager.async_save(step, at_step(step))


def drop_a_manager(folder: Path, step: int) -> None:
    dc.CheckpointManager(folder / "run").async_save(step, at_step(step)).result()


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
        check_no_more(store, before)


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

    saver = dc.AsyncSaver()
    handle = saver.save(at_step(7), tmp_path / "c", Waiting())
    del saver
    gc.collect()
    assert look(store)["groups"] == before["groups"] + 1
    may_go_on.set()
    handle.result()
    assert (dc.load_plain_tensors(tmp_path / "c")["w"] == 7).all()
    check_no_more(store, before)


def test_a_channel_that_outlives_its_world_is_no_error(store: Any) -> None:
    del store
    saver = dc.AsyncSaver()
    dist.destroy_process_group()
    del saver
    gc.collect()
    # For the fixture, which destroys one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
