"""What a group of ranks has worked out together, kept until one of them brings something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.planning.packing import pack, unpack_all
from dist_checkpointing.planning.shard_table import ShardTable

T = TypeVar("T")
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    """A value, and what it was made of.

    Attributes:
        own: what this rank brought: its packed table and its facts.
        occasion: a number for what all ranks brought.
        value: made of it.
    """

    own: tuple[bytes, object]
    occasion: int
    value: T


class AgreedCache(Generic[T]):
    """A value made of the tables of all ranks of a group, and of nothing else.

    If it is kept, it is used again while every rank brings what it brought when the value was made,
    and all of them hold the value of that same occasion. A difference on any rank makes all ranks
    share their tables again.

    Args:
        keeps: whether anything is kept at all.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: _Kept[T] | None = None

    @property
    def value(self) -> T | None:
        """What is kept, if anything."""
        return None if self._kept is None else self._kept.value

    def get(
        self,
        comm: Comm,
        step: str,
        describe: Callable[[], tuple[ShardTable, F]],
        work_out: Callable[[list[tuple[ShardTable, F]]], T],
    ) -> T:
        """The value for what all ranks bring. Collective.

        Args:
            comm: the group.
            step: what is being done, for messages.
            describe: the table of this rank, with its rank in ``comm``, and whatever else the value
                depends on; equal to nothing, and with the ``repr`` of nothing, that is different.
            work_out: makes the value of what all ranks bring, in rank order.
        """
        with comm.agreed(step):
            table, facts = describe()
            own = pack(table), facts
        kept = self._kept
        if self._keeps:
            occasion = kept.occasion if kept is not None and kept.own == own else None
            if comm.all_same(occasion):
                assert kept is not None
                return kept.value
        brought = comm.all_gather(own)
        with comm.agreed(step):
            packed, facts_of_ranks = zip(*brought, strict=True)
            value = work_out(list(zip(unpack_all(packed), facts_of_ranks, strict=True)))
        if self._keeps:
            digest = xxhash.xxh3_64(repr(facts_of_ranks).encode())
            for data in packed:
                digest.update(data)
            self._kept = _Kept(own, digest.intdigest() >> 2, value)
        return value
