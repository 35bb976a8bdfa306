"""The fast disks of a run: which ranks share one, and which checkpoints they hold together."""

from __future__ import annotations

import json
import logging
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.commit import is_committed
from dist_checkpointing.format.leftovers import (
    CONFIG_FNAME,
    PARTS_NAME,
    attempt_of,
    is_in_attempt,
    leftovers,
)
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME, Seal

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FastDisks:
    """Which ranks share a disk.

    Attributes:
        leaders: Lowest rank of each disk, ascending.
        places: Host and folder of each disk, in this order.
        own: Number of this rank's disk.
        leads: Whether this rank is the lowest one of its disk.
        run: Name of this use of the disks, the same on all ranks.
    """

    leaders: tuple[int, ...]
    places: tuple[str, ...]
    own: int
    leads: bool
    run: str

    @property
    def are_many(self) -> bool:
        """Whether not all ranks share one disk."""
        return len(self.leaders) > 1

    @classmethod
    def find(cls, comm: Comm, folder: Path) -> Self:
        """Find out which ranks see the same folder: each makes a file there. Collective."""
        what, run = "looking for the ranks that share a disk", uuid.uuid4().hex
        own = folder / f".dckpt-rank-{run}"
        try:

            def make() -> tuple[str, str]:
                folder.mkdir(parents=True, exist_ok=True)
                own.touch()
                return own.name, f"{socket.gethostname()}:{folder}"

            made = comm.exchange(what, make)

            def look() -> int:
                seen = frozenset(location.names_in(folder))
                return next(rank for rank, (name, _) in enumerate(made) if name in seen)

            first = comm.exchange(what, look)
        finally:
            with suppress(OSError):
                own.unlink()
        leaders = tuple(sorted(set(first)))
        return cls(
            leaders,
            tuple(made[rank][1] for rank in leaders),
            leaders.index(first[comm.rank]),
            first[comm.rank] == comm.rank,
            made[0][0].removeprefix(".dckpt-rank-"),
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A save that a disk knows as committed, and that is not in the store.

    Attributes:
        step: Step that it is of.
        attempt: Name of the save.
        rank: Lowest rank whose disk says so.
    """

    step: int
    attempt: str
    rank: int


def whole_steps(
    comm: Comm,
    disks: FastDisks,
    look: Callable[[], Mapping[int, Path]],
    is_stored: Callable[[int], bool],
) -> dict[int, Seal]:
    """The seals of the steps that the disks together hold as a whole, and the store does not.

    Collective. A disk that has not noted the commit of such a step notes it now.

    Args:
        comm: the ranks of the run.
        disks: which of them share one.
        look: gives the folder of every step on this rank's disk.
        is_stored: tells on rank 0 whether a step is in the store.
    """
    what = "looking at what is on the disks"
    own: dict[int, Path] = {}

    def committed() -> dict[int, str]:
        own.update(look() if disks.leads else {})
        named = {step: attempt_of(own[step]) for step in own if is_committed(own[step])}
        return {step: name for step, name in named.items() if name is not None}

    of_ranks = comm.exchange(what, committed)

    def unstored() -> list[_Candidate]:
        first: dict[tuple[int, str], int] = {}
        for rank, found in enumerate(of_ranks):
            for save in found.items():
                first.setdefault(save, rank)
        steps = {step for step, _ in first if not is_stored(step)}
        return [_Candidate(*save, rank) for save, rank in first.items() if save[0] in steps]

    candidates = comm.from_rank0(what, unstored)
    if not candidates:
        return {}

    def seals() -> list[bytes | None]:
        return [_seal_in(own[c.step]) if c.rank == comm.rank else None for c in candidates]

    brought = comm.exchange(what, seals)
    contents = [brought[c.rank][row] for row, c in enumerate(candidates)]
    found = [content and Seal.from_json(content) for content in contents]

    def held() -> list[set[int]]:
        pairs = zip(candidates, found, strict=True)
        return [_held(own.get(c.step), seal) if seal else set() for c, seal in pairs]

    held_by = comm.exchange(what, held)
    whole: dict[int, Seal] = {}
    with comm.agreed("noting a commit on every disk"):
        for row, (candidate, seal) in enumerate(zip(candidates, found, strict=True)):
            if not seal or candidate.step in whole:
                continue
            missing = set(range(len(seal.files))).difference(*(rows[row] for rows in held_by))
            if missing:
                _tell_missing(comm, disks, candidate, seal, len(missing))
                continue
            whole[candidate.step] = seal
            folder = own.get(candidate.step)
            is_part = folder is not None and is_in_attempt(folder, candidate.attempt)
            if folder is not None and is_part and not is_committed(folder):
                location.write(folder / SEAL_NAME, contents[row] or b"")
                location.write(folder / CONFIG_FNAME, json.dumps(dict(seal.config)).encode())
    return whole


def is_part(folder: Path) -> bool:
    """Whether what was last saved into a folder may have other parts on other disks."""
    return PARTS_NAME in leftovers(folder)


def _seal_in(folder: Path) -> bytes | None:
    """The bytes of a seal, if there is one and it is not damaged."""
    try:
        content = location.read_bytes(folder / SEAL_NAME, MAX_SEAL_BYTES)
        Seal.from_json(content, str(folder / SEAL_NAME))
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("%s is not used: %s", folder, error)
        return None
    return content


def _held(folder: Path | None, seal: Seal) -> set[int]:
    """The numbers of the files of a seal that a folder holds, in the size that they have."""
    if folder is None or not is_in_attempt(folder, seal.attempt):
        return set()
    files = enumerate(seal.files.values())
    return {row for row, file in files if location.size_of(folder / file.name) == file.num_bytes}


def _tell_missing(
    comm: Comm, disks: FastDisks, candidate: _Candidate, seal: Seal, count: int
) -> None:
    if comm.rank == 0:
        logger.warning(
            "step %d is on some disks and not in the store, and is not loaded: %d of its %d files "
            "are on none of %s. A restart with the disk that is missing finds it again",
            candidate.step,
            count,
            len(seal.files),
            ", ".join(disks.places),
        )
