"""A save to disks that not all of its ranks share: each disk gets what its own ranks write.

Rank 0 claims, seals and commits on its own disk. The lowest rank of every other disk claims the
folder there for the same attempt, and notes the commit when it has happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import Durability
from dist_checkpointing.format.commit import Attempt, CheckpointingConfig
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of a save whose ranks do not share one.

    The lowest rank of each disk calls the hooks that else rank 0 alone calls.

    Attributes:
        place: Name of the checkpoint, the same on all ranks, whose folders may have any names.
        leads: Whether this rank is the lowest one of its disk.
        on_part: Called on these ranks but rank 0, once the checkpoint is committed.
    """

    place: str
    leads: bool
    on_part: Callable[[], None]

    def secure_part(self, part: Attempt | None, durability: Durability, comm: Comm) -> None:
        """Make the names of what is on each disk durable, where rank 0 cannot do it. Collective."""
        with comm.agreed("securing every disk"):
            if part is not None and comm.rank and durability is Durability.FSYNC:
                names = [name for name, _ in local_folder.files_below(part.folder, part.folder)]
                local_folder.fsync_folders([part.folder / name for name in names], part.folder)
                local_folder.fsync_folder(part.folder)

    def commit_part(
        self, part: Attempt | None, config: CheckpointingConfig, durability: Durability, comm: Comm
    ) -> None:
        """Note on every disk but rank 0's that rank 0 has committed, and of what. Collective.

        Nothing is taken back from here on. A part on which this is not noted can still be used.

        Args:
            part: the attempt of this rank, if it has one. It is ended.
            config: what ``metadata.json`` says.
            durability: see ``write_seal``.
            comm: the ranks that save together.
        """

        def read() -> bytes:
            assert part is not None
            return location.read_bytes(part.folder / SEAL_NAME, MAX_SEAL_BYTES)

        try:
            seal = comm.from_rank0("telling every disk of the commit", read)
            if part is None or comm.rank == 0:
                return
            try:
                location.write(part.folder / SEAL_NAME, seal, durability)
                part.commit(config)
            except OSError as error:
                logger.warning("%s: the commit is not noted on this disk: %s", part.folder, error)
            self.on_part()
        finally:
            if part is not None:
                part.release()
