"""The ranks that share their work, and what they have worked out together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch.distributed as dist

from dist_checkpointing.comm import Comm, group_comm
from dist_checkpointing.errors import CheckpointingException, RankFailedError
from dist_checkpointing.planning.table_exchange import AgreedCache

T = TypeVar("T")

GivenGroup = dist.ProcessGroup | Comm | None
"""A process group, the comm of simulated ranks, or None for all ranks."""


class ParallelizationGroup(Generic[T]):
    """A group as a caller gives it, and what it has worked out. A rank outside of it is alone."""

    def __init__(self, given: GivenGroup, *, keeps: bool) -> None:
        self._given = given
        self._keeps = keeps
        self.cache: AgreedCache[T] = AgreedCache(keeps=keeps)
        self._found: tuple[Comm, Comm, list[int]] | None = None
        self._numbers: tuple[Comm, list[int]] | None = None

    @contextmanager
    def comm(self, everybody: Comm) -> Iterator[Comm]:
        """The group, for a body that is collective over it; all of ``everybody`` if none was given.

        Collective over ``everybody`` on first use. Errors name the ranks as they are numbered
        among ``everybody``.
        """
        if self._found is None or self._found[0] is not everybody:
            comm = group_comm(self._given, everybody)
            self._found = everybody, comm, comm.all_gather(everybody.rank)
        _, comm, members = self._found
        try:
            yield comm
        except CheckpointingException as error:
            raise _renumbered(error, members) from error

    def numbers(self, everybody: Comm) -> list[int]:
        """The lowest rank in the group of each rank. Collective over ``everybody``."""
        if self._keeps and self._numbers is not None and self._numbers[0] is everybody:
            return self._numbers[1]
        with everybody.agreed("finding out who shares"), self.comm(everybody):
            assert self._found is not None
            lowest = min(self._found[2])
        numbers = everybody.all_gather(lowest)
        self._numbers = everybody, numbers
        return numbers


def _renumbered(error: CheckpointingException, members: Sequence[int]) -> CheckpointingException:
    """The error of a group with the numbers that its ranks have outside of the group."""
    if error.names_global_ranks or members == [*range(len(members))]:
        return error
    if len(set(members)) < len(members):  # ranks that have no numbers elsewhere
        return error

    def number(rank: int) -> int:
        return members[rank] if rank < len(members) else rank

    findings = [replace(f, ranks=tuple(sorted(map(number, f.ranks)))) for f in error.findings]
    if not isinstance(error, RankFailedError):
        return type(error)(error.message, findings)
    tracebacks = {number(rank): text for rank, text in error.tracebacks.items()}
    return RankFailedError(error.message, findings, tracebacks)
