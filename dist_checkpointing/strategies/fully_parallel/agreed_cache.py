"""What a group of ranks has worked out together, kept until one of them brings something else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from dist_checkpointing.catalog import ShardTable
from dist_checkpointing.comm import Comm

T = TypeVar("T")
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    """A value, and what it was made of.

    Attributes:
        own: digest of what this rank brought.
        occasion: digest of what all ranks brought.
        value: made of it.
    """

    own: bytes
    occasion: bytes
    value: T


class AgreedCache(Generic[T]):
    """A value made of the tables of all ranks of a group, and of nothing else.

    If it is kept, it is used again while every rank brings what it brought when the value was made,
    and all of them hold the value of that same occasion. A difference on any rank makes all ranks
    share their tables anew.

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
                depends on; its ``repr`` must tell it from anything different.
            work_out: makes the value of what all ranks bring, in rank order.
        """
        with comm.agreed(step):
            table, facts = describe()
            own = _digest(table, facts)
        kept = self._kept
        if self._keeps:
            held = None if kept is None or kept.own != own else kept.occasion
            occasions = set(comm.all_gather(held))
            if kept is not None and len(occasions) == 1 and None not in occasions:
                return kept.value
        brought = comm.all_gather((table, facts, own))
        with comm.agreed(step):
            value = work_out([(theirs, known) for theirs, known, _ in brought])
        if self._keeps:
            occasion = hashlib.blake2b(b"".join(digest for _, _, digest in brought)).digest()
            self._kept = _Kept(own, occasion, value)
        return value


def _digest(table: ShardTable, facts: object) -> bytes:
    digest = hashlib.blake2b(repr((facts, table.names)).encode(), digest_size=16)
    for field in fields(table):
        if field.name != "names":
            column = getattr(table, field.name)
            digest.update(repr((field.name, column.shape)).encode())
            digest.update(column.tobytes())
    return digest.digest()
