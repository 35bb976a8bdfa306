"""The fast disks of a run: which ranks share one, and which checkpoints they hold together."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections import ChainMap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.local_folder import make_durable_folder
from dist_checkpointing.format.commit import is_committed
from dist_checkpointing.format.leftovers import CONFIG_FNAME, attempt_of, is_in_attempt
from dist_checkpointing.format.run_steps import steps_of_manager
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME, Seal
from dist_checkpointing.manager.run_folder import RunFolder

logger: logging.Logger = logging.getLogger(__name__)
_MACHINE_VARIABLE: Final = "DIST_CHECKPOINTING_MACHINE"


class FastDisks:
    """Which ranks share a disk: each makes a file in its folder, and looks for those of the others.

    Making one is collective.

    Attributes:
        leaders: Lowest rank of each disk, ascending.
        names: Host and folder of each disk, in this order.
        machines: Name of the machine of each disk: its host, or what the environment variable
            DIST_CHECKPOINTING_MACHINE says.
        leader_of_rank: Lowest rank of the disk of each rank.
        leads: Whether this rank is the lowest one of its disk.
    """

    def __init__(self, comm: Comm, folder: Path) -> None:
        what, run = "looking for the ranks that share a disk", uuid.uuid4().hex
        mark = folder / f".dckpt-rank-{run}"

        def make() -> tuple[str, str, str]:
            make_durable_folder(folder)
            mark.touch()
            host = socket.gethostname()
            return run, f"{host}:{folder}", os.environ.get(_MACHINE_VARIABLE) or host

        def lowest_rank() -> int:
            seen = frozenset(location.names_in(folder))
            return next(r for r, (name, *_) in enumerate(made) if f".dckpt-rank-{name}" in seen)

        try:
            made = comm.exchange(what, make)
            self.leader_of_rank: list[int] = comm.exchange(what, lowest_rank)
        finally:
            with suppress(OSError):
                mark.unlink()
        self.leaders: list[int] = sorted(set(self.leader_of_rank))
        self.names: list[str] = [made[rank][1] for rank in self.leaders]
        self.machines: list[str] = [made[rank][2] for rank in self.leaders]
        self.leads: bool = self.leader_of_rank[comm.rank] == comm.rank

    @property
    def are_many(self) -> bool:
        """Whether not all ranks share one disk."""
        return len(self.leaders) > 1


@dataclass(frozen=True, slots=True)
class MachineFolders:
    """The folders of a run on the disks of one machine, nearest first."""

    folders: Sequence[RunFolder]

    def folder(self, step: int) -> Path:
        """Where a step is read."""
        return self.paths(step)[0]

    def paths(self, step: int) -> list[Path]:
        """Where a step is, nearest first; where it would come if it is nowhere."""
        nearest, *further = (folder.folder(step) for folder in self.folders)
        found = [path for path in further if is_committed(path)]
        return found if found and not is_committed(nearest) else [nearest, *found]

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first."""
        steps = (steps_of_manager(folder.root) for folder in self.folders)
        return sorted({*chain.from_iterable(steps)}, reverse=True)


def whole_steps(
    comm: Comm, disks: FastDisks, near: MachineFolders, home: RunFolder, *, has_parts: bool
) -> dict[int, Seal]:
    """The seals of the steps that the disks together hold as a whole, and the store does not.

    Collective. A disk that has not noted the commit of such a step notes it now. ``near`` is the
    run on this rank's disk, ``home`` the run in the store. What is committed on a disk that no part
    is on (``has_parts``) is taken to be whole: its copy says what is missing.
    """
    what = "looking at what is on the disks"
    folders: dict[int, Path] = {}

    def committed() -> dict[int, str | None]:
        if disks.leads:
            folders.update((step, near.folder(step)) for step in near.steps())
        return {step: attempt_of(path) for step, path in folders.items() if is_committed(path)}

    saves_of_ranks = comm.exchange(what, committed)

    def not_stored() -> dict[tuple[int, str], int]:
        lowest: dict[tuple[int, str], int] = {}
        for rank, saves in enumerate(saves_of_ranks):
            for step, name in saves.items():
                if name is not None:
                    lowest.setdefault((step, name), rank)
        record, abandoned = home.record(), near.folders[0].record().abandoned
        return {
            save: rank
            for save, rank in lowest.items()
            if save[0] not in abandoned and home.lacks(*save, record)
        }

    ranks_of_saves = comm.from_rank0(what, not_stored)
    if not ranks_of_saves:
        return {}

    def read_seals() -> dict[tuple[int, str], bytes]:
        own = (save for save, rank in ranks_of_saves.items() if rank == comm.rank)
        return {save: seal for save in own if (seal := _seal_in(folders[save[0]])) is not None}

    contents = ChainMap(*comm.exchange(what, read_seals))
    seals = {save: Seal.from_json(contents[save]) for save in ranks_of_saves if save in contents}

    def held() -> dict[tuple[int, str], set[int]]:
        return {save: rows_held(folders.get(save[0]), seal) for save, seal in seals.items()}

    held_by_ranks = comm.exchange(what, held)
    whole: dict[int, Seal] = {}
    with comm.agreed("noting a commit on every disk"):
        for (step, attempt), seal in seals.items():
            if step in whole:
                continue
            lost = set(range(len(seal.files))).difference(
                *(rows[step, attempt] for rows in held_by_ranks)
            )
            if not (lost and has_parts):
                whole[step] = seal
                folder = folders.get(step)
                if folder and is_in_attempt(folder, attempt) and not is_committed(folder):
                    location.write(folder / SEAL_NAME, contents[step, attempt])
                    location.write(folder / CONFIG_FNAME, json.dumps(dict(seal.config)).encode())
            elif comm.rank == 0:
                logger.warning(
                    "step %d is on some disks and not in the store, and is not loaded: %d of "
                    "its %d files are on none of %s. A restart with the disk that is missing "
                    "finds it again",
                    *(step, len(lost), len(seal.files), ", ".join(disks.names)),
                )
    return whole


def _seal_in(folder: Path) -> bytes | None:
    """The bytes of a seal, if there is one and it is not damaged."""
    try:
        content = location.read_bytes(folder / SEAL_NAME, MAX_SEAL_BYTES)
        Seal.from_json(content, str(folder / SEAL_NAME))
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("%s is not used: %s", folder, error)
        return None
    return content


def rows_held(folder: Path | None, seal: Seal) -> set[int]:
    """The numbers of the files of a seal that a folder holds, in the size that they have."""
    if folder is None or not is_in_attempt(folder, seal.attempt):
        return set()
    files = enumerate(seal.files.values())
    return {row for row, file in files if location.size_of(folder / file.name) == file.num_bytes}
