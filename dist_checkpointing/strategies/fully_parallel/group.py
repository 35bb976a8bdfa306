"""The ranks that share their work."""

from __future__ import annotations

import uuid

import torch.distributed as dist

from dist_checkpointing.comm import Comm, group_comm

GivenGroup = dist.ProcessGroup | Comm | None
"""A process group, the comm of simulated ranks, or None for all ranks."""


class ParallelizationGroup:
    """A group as a caller gives it; a rank that is not in it is alone.

    Args:
        given: the group.
        keeps: whether the groups of all ranks are asked for only once.
    """

    def __init__(self, given: GivenGroup, *, keeps: bool) -> None:
        self._given = given
        self._keeps = keeps
        self._comm: Comm | None = None
        self._numbers: tuple[Comm, list[int]] | None = None

    def comm(self, everybody: Comm) -> Comm:
        """The group, which is ``everybody`` if none was given. Collective over the group."""
        if self._given is None:
            return everybody
        if self._comm is None:
            self._comm = group_comm(self._given)
        return self._comm

    def numbers(self, everybody: Comm) -> list[int]:
        """Number of the group of every rank. Collective over ``everybody``."""
        if self._keeps and self._numbers is not None and self._numbers[0] is everybody:
            return self._numbers[1]
        with everybody.agreed("finding out who shares"):
            # Ranks may have other numbers in the group, so each group draws a name.
            name = self.comm(everybody).broadcast(uuid.uuid4().hex)
        names = everybody.all_gather(name)
        numbers = [names.index(name) for name in names]
        self._numbers = everybody, numbers
        return numbers
