"""What ranks have worked out together, kept until one of them brings something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import xxhash

from dist_checkpointing.comm import Comm

T = TypeVar("T")


class AgreedCache(Generic[T]):
    """A value that ranks made together, used again while each of them brings what it brought then.

    What a rank brings is compared in full, not by a hash. One difference on one rank makes all
    ranks work the value out again, and so do ranks that remember different values. Without
    ``keeps``, the same on all ranks, it is worked out every time.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._kept: tuple[object, int, T] | None = None

    @property
    def value(self) -> T | None:
        """The last value; None if there was none."""
        return None if self._kept is None else self._kept[2]

    def number_of(self, own: object) -> int | None:
        """The number of the value if this rank brings the same again; None for a new value.

        Ranks whose numbers are equal hold the same value.
        """
        return self._kept[1] if self._kept is not None and self._kept[0] == own else None

    def keep(self, own: object, value: T, number: int) -> None:
        """Remember a value; the number, below 2**62, stands for what all ranks brought for it."""
        self._kept = own, number, value

    def work_out(
        self,
        comm: Comm,
        step: str,
        describe: Callable[[], bytes],
        make: Callable[[Sequence[bytes]], T],
    ) -> T:
        """The value that ``make`` makes of what all ranks bring, in rank order. Collective.

        ``describe`` gives all that the value depends on besides the ranks.
        """
        with comm.agreed(step):
            data = describe()
            own = data, comm.rank, comm.world_size
        if self._keeps and comm.all_same(self.number_of(own)):
            assert self._kept is not None
            return self._kept[2]
        brought = comm.all_gather(data)
        with comm.agreed(step):
            value = make(brought)
        if self._keeps:
            digest = xxhash.xxh3_64()
            for data in brought:
                digest.update(data)
            self.keep(own, value, digest.intdigest() >> 2)
        return value
