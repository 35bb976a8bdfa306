"""Ranks as threads that are also members of groups, as replicas are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_checkpointing import CheckpointingException
from dist_checkpointing.comm import Comm, SingleProcess, ThreadComm
from dist_checkpointing.planning import RowBlockLayout
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrV3Writer
from dist_checkpointing.testing import run_ranks

T = TypeVar("T")
E = TypeVar("E", bound=CheckpointingException)

SECONDS = 20.0


class _TinyChunkWriter(ZarrV3Writer):
    layout = RowBlockLayout(64)


class TinyChunks(Zarr3SaveShardedStrategy):
    """Makes many chunks of little data."""

    def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
        return _TinyChunkWriter(checkpoint_dir)


def each_rank(groups: Sequence[Sequence[int]], step: Callable[[Comm, Comm], T]) -> list[T]:
    """``step(everybody, group)`` on every rank; a group of one rank is no group."""
    rendezvous_points = [ThreadComm.Rendezvous(len(group), SECONDS) for group in groups]
    number_of = {rank: number for number, group in enumerate(groups) for rank in group}

    def one(comm: Comm) -> T:
        number = number_of[comm.rank]
        group = groups[number]
        own: Comm = SingleProcess()
        if len(group) > 1:
            own = ThreadComm(rendezvous_points[number], group.index(comm.rank), group)
        return step(comm, own)

    return run_ranks(len(number_of), one, timeout_seconds=SECONDS)


def everybody_fails(
    groups: Sequence[Sequence[int]], step: Callable[[Comm, Comm], object]
) -> list[Exception]:
    """What ``step`` raises on each rank: the same on all."""

    def attempt(comm: Comm, group: Comm) -> Exception | None:
        try:
            step(comm, group)
        except Exception as error:  # noqa: BLE001 - which one it is, is what is tested
            return error
        return None

    errors = each_rank(groups, attempt)
    assert None not in errors
    assert len({str(error) for error in errors}) == 1
    return [error for error in errors if error is not None]


@overload
def the_one_error(world_size: int, fn: Callable[[Comm], Any]) -> CheckpointingException: ...


@overload
def the_one_error(world_size: int, fn: Callable[[Comm], Any], kind: type[E]) -> E: ...


def the_one_error(world_size: int, fn: Callable[[Comm], Any], kind: Any = None) -> Any:
    """The error of rank 0, of just this class; checks that all ranks raise the same."""

    def attempt(comm: Comm) -> CheckpointingException:
        with pytest.raises(CheckpointingException) as raised:
            fn(comm)
        return raised.value

    errors = run_ranks(world_size, attempt)
    assert {type(error) for error in errors} == {kind or type(errors[0])}
    assert {str(error) for error in errors} == {str(errors[0])}
    return errors[0]


@contextmanager
def fake_rank(world_size: int, rank: int) -> Iterator[None]:
    """Be this rank of a process group that hands nothing over, as DTensors need one."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
