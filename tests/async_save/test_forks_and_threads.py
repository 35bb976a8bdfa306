"""Savers in forked processes, which have none of the threads, and savers that threads share."""

import json
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dist_checkpointing import AsyncSaver, async_save, load, save, threads as background
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.storage import Progress
from dist_checkpointing.strategies import AsyncCallsQueue, AsyncRequest
from states import assert_at_step, at_step

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

PATIENCE_SECONDS = 60.0
THREADS = 6


def told_in_a_child(actions: Sequence[Callable[[], object]]) -> list[str | None]:
    """What each action raises in a forked process, as text; None for nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        texts: list[str | None] = []
        for action in actions:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - which one it is, is what is tested
                texts.append(f"{type(error).__name__}: {error}")
            else:
                texts.append(None)
        os.write(writer, json.dumps(texts).encode())
        os._exit(0)
    os.close(writer)
    try:
        has_answer, _, _ = select.select([reader], [], [], PATIENCE_SECONDS)
        assert has_answer, "the child hangs"
        answer = os.read(reader, 1_000_000)
        assert answer, "the child was aborted"
        told: list[str | None] = json.loads(answer)
        return told
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def test_a_forked_child_is_refused_a_save_that_goes_on_in_its_parent(tmp_path: Path) -> None:
    gate = threading.Event()
    saver = AsyncSaver()

    def wait(report: Progress) -> None:
        if report.phase == "committing":
            gate.wait(PATIENCE_SECONDS)

    handle = saver.save(at_step(1), tmp_path / "1", ("zarr", 2), progress=wait)
    told = told_in_a_child(
        [
            handle.result,
            handle.done,
            handle.captured.wait,
            lambda: saver.save(at_step(2), tmp_path / "2", ("zarr", 2)),
            saver.wait,
            saver.close,
        ]
    )
    gate.set()
    for text in told:
        assert text is not None
        assert text.startswith("CheckpointingException: ")
        assert "belongs to another process" in text
        assert f"process {os.getpid()}" in text
    handle.result(PATIENCE_SECONDS)
    saver.close()
    assert_at_step(tmp_path / "1", 1)


def test_async_save_works_in_a_forked_child(tmp_path: Path) -> None:
    async_save(at_step(1), tmp_path / "1", ("zarr", 2)).result(PATIENCE_SECONDS)

    def save_there() -> None:
        async_save(at_step(2), tmp_path / "2", ("zarr", 2)).result(PATIENCE_SECONDS)

    assert told_in_a_child([save_there]) == [None]
    async_save(at_step(3), tmp_path / "3", ("zarr", 2)).result(PATIENCE_SECONDS)
    for step in (1, 2, 3):
        assert_at_step(tmp_path / str(step), step)


def test_a_forked_child_goes_on_training_past_a_fence(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    handle = async_save(at_step(1), tmp_path / "1", ("zarr", 2))
    handle.fence(optimizer)
    assert told_in_a_child([optimizer.step]) == [None]
    optimizer.step()
    handle.result(PATIENCE_SECONDS)


def test_a_forked_child_is_refused_the_queue_of_its_parent() -> None:
    gate = threading.Event()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(gate.wait, (50,), []))
    told = told_in_a_child(
        [
            lambda: queue.maybe_finalize_async_calls(blocking=True),
            lambda: queue.schedule_async_request(AsyncRequest(None, (), [])),
            queue.close,
        ]
    )
    gate.set()
    for text in told:
        assert text is not None
        assert "belongs to another process" in text
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_a_forked_child_loads_and_saves(tmp_path: Path) -> None:
    save(at_step(1), tmp_path / "1", "tensorstore")
    save(at_step(2), tmp_path / "2", ("zarr", 2))
    load(at_step(0), tmp_path / "2", "tensorstore")
    told = told_in_a_child(
        [
            lambda: load(at_step(0), tmp_path / "1"),
            lambda: load(at_step(0), tmp_path / "2", "tensorstore"),
            lambda: save(at_step(3), tmp_path / "3", "tensorstore"),
            lambda: load(at_step(0), tmp_path / "2"),
        ]
    )
    assert told == [None] * 4
    for step in (1, 3):
        assert torch.equal(load(at_step(0), tmp_path / str(step))["w"], at_step(step)["w"].data)


def in_threads(action: Callable[[int], None]) -> None:
    """Run an action on many threads at once; raise the first error."""
    start = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        start.wait()
        try:
            action(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("of_process", [False, True])
def test_threads_share_a_saver(tmp_path: Path, *, of_process: bool) -> None:
    """One that a user has made, or that of their process, of which all of them find none."""
    comm = SingleProcess()
    kept = dict(comm.kept)
    comm.kept.clear()
    saver = AsyncSaver()
    save_behind = async_save if of_process else saver.save

    def one(number: int) -> None:
        for step in range(number, 3 * THREADS, THREADS):
            save_behind(at_step(step), tmp_path / str(step)).result(PATIENCE_SECONDS)

    try:
        in_threads(one)
        assert sum(isinstance(value, AsyncSaver) for value in comm.kept.values()) == of_process
    finally:
        comm.kept.update(kept)
    saver.close()
    for step in range(3 * THREADS):
        assert_at_step(tmp_path / str(step), step)


def test_a_thread_is_waited_for_until_it_has_let_go_of_its_work() -> None:
    """Not only until its result is there: it may still free tensors when the interpreter ends."""
    may_end, may_go = threading.Event(), threading.Event()

    class Freed:
        def __del__(self) -> None:
            may_go.wait(30)

        def __call__(self) -> bool:
            return may_end.wait(30)  # until nobody else holds it

    future = background.run_in_background(Freed(), "frees slowly")
    try:
        may_end.set()
        assert future.result(30)
        assert "frees slowly" in [worker.name for worker in list(background._running)]
    finally:
        may_go.set()
