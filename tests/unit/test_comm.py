"""Ranks as threads. The same promises over real processes: tests/distributed/test_torch_comm.py."""

import pickle
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, SingleProcess, ThreadComm
from dist_checkpointing.errors import Finding
from dist_checkpointing.testing import run_ranks
from simulated_groups import the_one_error


def outcomes(
    world_size: int, fn: Callable[[Comm], Any], *, timeout_seconds: float = 30.0
) -> list[Any]:
    """What each rank returned or raised. A rank that raises leaves the rendezvous."""
    rendezvous = ThreadComm.Rendezvous(world_size, timeout_seconds)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(rendezvous, rank))
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt is one of the outcomes
            results[rank] = error
            rendezvous.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds + 30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def bring(errors: dict[int, Exception]) -> Callable[[Comm], None]:
    """Each rank raises its own error, with a traceback, inside one agreed step."""

    def body(comm: Comm) -> None:
        with comm.agreed("write"):
            if comm.rank in errors:
                raise errors[comm.rank]

    return body


def test_ranks_that_name_no_number_or_different_ones_are_not_the_same() -> None:
    def body(comm: Comm) -> list[bool]:
        return [comm.all_same(number) for number in (7, None, 7 if comm.rank else None, comm.rank)]

    assert run_ranks(3, body) == [[True, False, False, False]] * 3


def test_everybody_has_the_tensor_of_the_source_which_may_change_it_at_once() -> None:
    def body(comm: Comm) -> list[list[int]]:
        seen = []
        for source in range(comm.world_size):
            tensor = torch.full((3,), 10 + comm.rank, dtype=torch.uint8)
            comm.broadcast_tensor(tensor, source)
            seen.append(tensor.tolist())
            tensor.zero_()
        return seen

    assert run_ranks(3, body) == [[[10] * 3, [11] * 3, [12] * 3]] * 3


def test_findings_that_name_ranks_already_keep_them() -> None:
    findings = [Finding("p", ranks=(0, 5)), Finding("q", found=[1, 2])]
    error = the_one_error(3, bring({1: dc.StateMismatchError("m", findings)}))
    assert [finding.ranks for finding in error.findings] == [(0, 5), (1,)]
    below = dc.RankFailedError("collective", [Finding("gone", ranks=(5,))])
    failed = the_one_error(2, bring({1: below}), dc.RankFailedError)
    assert failed.ranks == (5,)
    assert "write" in str(failed)
    assert "gone" in str(failed)


class Plugin(dc.CheckpointingException):
    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (Plugin("x/y"), "cannot read x/y"),
        (dc.StateMismatchError("m", [Finding("odd", found=lambda: 0)]), "odd"),
        (Mute(), "Mute"),
    ],
)
def test_an_error_that_cannot_travel_goes_as_text(error: Exception, word: str) -> None:
    raised = the_one_error(3, bring({1: error}), dc.RankFailedError)
    assert raised.ranks == (1,)
    assert word in str(raised)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_not_turned_into_an_agreement(stop: type[BaseException]) -> None:
    results = outcomes(3, bring({1: stop()}))  # type: ignore[dict-item]
    assert type(results[1]) is stop
    assert isinstance(results[0], dc.RankFailedError)
    assert isinstance(results[2], dc.RankFailedError)


def test_a_rank_that_never_comes_is_named_after_the_timeout() -> None:
    def body(comm: Comm) -> None:
        if comm.rank != 1:
            comm.agree("commit", None)

    results = outcomes(8, body, timeout_seconds=0.3)
    raised = [result for rank, result in enumerate(results) if rank != 1]
    assert all(type(error) is dc.RankFailedError for error in raised)
    assert all(error.ranks == (1,) for error in raised)
    assert len({str(error) for error in raised}) == 1
    assert "'commit'" in str(raised[0])
    assert "0.3 s" in str(raised[0])


def test_a_round_that_was_given_up_is_not_completed_with_values_of_the_next() -> None:
    def body(comm: Comm) -> list[str]:
        seen = []
        for step in ("first", "second"):
            if comm.rank == 1 and step == "first":
                time.sleep(0.4)
            try:
                seen.append("".join(sorted(set(comm.all_gather(step)))))
            except dc.RankFailedError:
                seen.append("failed")
        return seen

    for seen in outcomes(2, body, timeout_seconds=0.3):
        assert "firstsecond" not in seen


def test_nobody_waits_for_a_rank_that_left() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 2:
            time.sleep(0.2)  # the others have come by then
            raise MemoryError
        comm.all_gather(0)

    results = outcomes(4, body, timeout_seconds=60)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], dc.RankFailedError)
        assert results[rank].ranks == (2,)


def test_all_hear_the_same_even_if_the_first_to_hear_leaves_at_once() -> None:
    """The first rank out of an agreement unwinds, and its runner aborts the rendezvous."""
    body = bring({0: dc.StateMismatchError("template", [Finding("p")])})
    for _ in range(20):
        the_one_error(16, body, dc.StateMismatchError)


def test_a_last_step_is_not_spoilt_by_a_rank_that_fails_right_after_it() -> None:
    def body(comm: Comm) -> list[int]:
        ranks = comm.all_gather(comm.rank)
        if comm.rank == 0:
            raise MemoryError
        return ranks

    for _ in range(20):
        results = outcomes(16, body)
        assert results[1:] == [list(range(16))] * 15


def test_a_rank_that_failed_says_so_when_the_others_call_something_else() -> None:
    def body(comm: Comm) -> None:
        if comm.rank:
            comm.all_same(1)
        else:
            bring({0: OSError("disk full")})(comm)

    assert "which failed: OSError: disk full" in str(the_one_error(2, body))


def in_a_group(errors: dict[int, Exception], global_ranks: list[int]) -> list[Any]:
    """What ranks of a group raise, by their numbers in the group."""
    rendezvous = ThreadComm.Rendezvous(len(global_ranks), 30.0)

    def body(comm: Comm) -> Any:
        member = ThreadComm(rendezvous, comm.rank, global_ranks)
        try:
            with member.agreed("outer"):  # agreements within agreements translate once
                bring(errors)(member)
        except dc.CheckpointingException as error:
            return pickle.loads(pickle.dumps(error))
        return None

    return run_ranks(len(global_ranks), body)


@pytest.mark.parametrize(
    ("named", "global_ranks", "expected"), [((0, 2), [1, 2, 0], (0, 1)), ((0,), [6], (6,))]
)
def test_findings_of_a_group_that_name_ranks_are_translated_once(
    named: tuple[int, ...], global_ranks: list[int], expected: tuple[int, ...]
) -> None:
    raised = in_a_group({0: dc.StateMismatchError("m", [Finding("p", ranks=named)])}, global_ranks)
    assert [finding.ranks for finding in raised[0].findings] == [expected]


def test_tracebacks_and_absent_ranks_of_a_group_have_global_numbers() -> None:
    raised = in_a_group({1: OSError("disk")}, [4, 7])
    assert raised[0].ranks == (7,)
    assert raised[0].silent_ranks == ()
    assert "rank 7 of the 2 of its group" in str(raised[0])
    rendezvous = ThreadComm.Rendezvous(2, 0.2)
    with pytest.raises(dc.RankFailedError) as caught:
        ThreadComm(rendezvous, 0, [4, 7]).all_gather(1)
    assert caught.value.ranks == caught.value.silent_ranks == (7,)


class Foreign(Comm):
    """A comm as a third party would write it: only what the protocol demands."""

    def __init__(self, lines: list[list[queue.Queue[Any]]], rank: int) -> None:
        self.rank, self.world_size = rank, len(lines)
        self._lines = lines
        self._kept: dict[str, Any] = {}

    @property
    def kept(self) -> dict[str, Any]:
        return self._kept

    def all_gather(self, value: Any) -> list[Any]:
        for line in self._lines[self.rank]:
            line.put(value)
        return [self._lines[rank][self.rank].get(timeout=30) for rank in range(self.world_size)]

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]

    def all_same(self, number: int | None) -> bool:
        return set(self.all_gather(number)) == {number} - {None}

    def duplicate(self) -> Comm:
        own: list[list[queue.Queue[Any]]] = [
            [queue.Queue() for _ in self._lines] for _ in self._lines
        ]
        return Foreign(self.broadcast(own), self.rank)

    def _all_failures(self, step: str, failure: Any) -> Any:
        del step
        return {r: f for r, f in enumerate(self.all_gather(failure)) if f is not None}


def test_a_comm_of_a_third_party_needs_no_more_than_the_protocol(tmp_path: Path) -> None:
    lines: list[list[queue.Queue[Any]]] = [[queue.Queue() for _ in range(2)] for _ in range(2)]

    def body(thread: Comm) -> Any:
        comm = Foreign(lines, thread.rank)
        part = (0, comm.rank, 2)
        data = torch.full((2,), comm.rank)
        state = {"w": dc.ShardedTensor.from_rank_offsets("w", data, part)}
        dc.save(state, tmp_path / "1", comm=comm)
        with dc.AsyncSaver(comm=comm) as saver:
            saver.save(state, tmp_path / "2").result(30)
        data.zero_()
        dc.load(state, tmp_path / "2", comm=comm)
        with pytest.raises(dc.RankFailedError) as caught:
            bring({1: OSError("disk")})(comm)
        return data.tolist(), caught.value.ranks

    assert run_ranks(2, body) == [([0, 0], (1,)), ([1, 1], (1,))]


def test_run_ranks_raises_the_error_of_the_rank_that_failed_or_the_agreed_one() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError
        comm.all_gather(0)

    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            run_ranks(4, body)
        with pytest.raises(dc.StateMismatchError) as caught:
            run_ranks(8, bring({5: dc.StateMismatchError("m", [Finding("p")])}))
        assert caught.value.findings == (Finding("p", ranks=(5,)),)


def test_alone_our_error_is_raised_as_the_very_object_and_a_foreign_one_is_the_cause() -> None:
    error = dc.InvalidShardingError("m", [Finding("p")])
    with pytest.raises(dc.InvalidShardingError) as caught:
        SingleProcess().agree("step", error)
    assert caught.value is error
    assert error.__cause__ is None
    with pytest.raises(dc.InvalidShardingError) as caught, SingleProcess().agreed("step"):
        raise error
    assert caught.value is error
    assert error.findings == (Finding("p"),)
    foreign = OSError(28, "No space left on device")
    with pytest.raises(dc.RankFailedError) as failed, SingleProcess().agreed("write"):
        raise foreign
    assert failed.value.__cause__ is foreign
    assert failed.value.ranks == (0,)
    assert "No space left" in str(failed.value)
