"""What ``load(verify=True)`` does before and after it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    RankFailedError,
    StateMismatchError,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import Seal, read_seal
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.mapping.nested_dicts import Position
from dist_checkpointing.planning import DefaultLoadPlanner
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.serialization.fingerprint_of_state import verify_restored
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import LoadStrategies
from dist_checkpointing.strategies.verification import Filled, verify_filled, verify_wanted


@dataclass(frozen=True, slots=True)
class Verification:
    """Verifies what a load reads; every rank calls it alike.

    Attributes:
        tensors: Shards that are wanted, with memory to fill.
        objects: Cells of sharded objects that are wanted.
        found: Strategies of the load.
        folder: Folder of the checkpoint.
        index: Index of the checkpoint; None for strategies that are not made of a reader.
        reader: StorageReader of a planned strategy.
        meter: Counts what is verified.
        comm: Ranks that load together.
    """

    tensors: WantedLeaves
    objects: Sequence[ShardedObject]
    found: LoadStrategies
    folder: Location
    index: Index | None
    reader: StorageReader | None
    meter: Meter
    comm: Comm

    def begin(self) -> Filled:
        """Verify what the load does not read whole, before anything is filled. Collective.

        Returns:
            What ``finding_damage`` compares after the load.
        """
        with self._all_findings():
            planner = getattr(self.found.sharded, "planner", None)
            if planner is None or type(planner) is DefaultLoadPlanner:
                return self._verify(self.tensors)
            # Nobody knows what a planner of a user puts into memory.
            return self._verify_all()

    @contextmanager
    def finding_damage(self, filled: Filled | None) -> Iterator[None]:
        """Verify what the body has read; if either fails, say all that is damaged. Collective.

        Args:
            filled: From ``begin``; None to verify nothing.
        """
        if filled is None:
            yield
            return
        with self._all_findings():
            yield
        if not isinstance(self.found.sharded, PlannedLoadStrategy):
            return
        try:
            with self.meter.phase("verifying"), self.comm.agreed("verifying checksums"):
                verify_filled(filled, self.found.sharded.options, self.meter)
        except RankFailedError:
            raise
        except CheckpointingException:
            self._verify_all()
            raise

    @contextmanager
    def of_restored(self, *, is_wanted: bool) -> Iterator[None]:
        """Compare what the body has put into memory with the fingerprints of the save. Collective.

        Args:
            is_wanted: Whether to compare anything.
        """
        yield
        if is_wanted:
            make_reader = None
            if isinstance(self.found.sharded, PlannedLoadStrategy):
                make_reader = partial(self.found.sharded.make_reader, self.folder)
            with self.meter.phase("verifying"):
                verify_restored(
                    self.tensors.tensors.leaves, self.folder, self.index, make_reader, self.comm
                )

    @contextmanager
    def _all_findings(self) -> Iterator[None]:
        """Where one rank meets damage first, let all ranks look for all damage, and raise that."""
        try:
            yield
        except (CorruptCheckpointError, StateMismatchError):
            self._verify_all()
            raise

    def _verify_all(self) -> Filled:
        leaves = enumerate(self.tensors.tensors.leaves)
        return self._verify(
            WantedLeaves({(Position(number),): leaf.without_data() for number, leaf in leaves})
        )

    def _verify(self, tensors: WantedLeaves) -> Filled:
        found = self.found
        with self.meter.phase("verifying"):
            # One rank reads it, as thousands of ranks would wait for each other at one file.
            seal: Seal | None = self.comm.from_rank0(
                "reading the seal", lambda: read_seal(self.folder)
            )
            with self.comm.agreed("verifying checksums"):
                return verify_wanted(
                    tensors,
                    self.objects,
                    found.sharded,
                    found.common,
                    self.folder,
                    self.index,
                    seal,
                    self.meter,
                    self.reader,
                )
