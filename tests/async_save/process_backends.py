"""Backends that do odd things in the process that writes; it imports them from here."""

from __future__ import annotations

import os
import resource
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.storage import StorageWriter, WriteResults
from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
from dist_checkpointing.strategies.zarr.v3 import ZarrV3Writer


class OddWriter(ZarrV3Writer):
    """Writes zarr, and does what ``oddity`` says first, if this is rank 1 (or the only one)."""

    oddity = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        if self._rank < self._world_size - 1:
            return super().write_data(plan, planner)
        if self.oddity == "stall":
            (self.checkpoint_dir / "pid").write_text(str(os.getpid()))
            while not (self.checkpoint_dir.parent / "go").exists():
                time.sleep(0.01)
        if self.oddity == "die once" and not (self.checkpoint_dir.parent / "died").exists():
            (self.checkpoint_dir.parent / "died").touch()
            os._exit(3)
        if self.oddity == "disk":
            raise OSError(28, "No space left on device")
        if self.oddity == "limit":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
            try:
                return super().write_data(plan, planner)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return super().write_data(plan, planner)


class Odd(Zarr3SaveShardedStrategy):
    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.oddity = oddity

    def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
        writer = OddWriter(checkpoint_dir)
        writer.options, writer.oddity = self.options, self.oddity
        return writer


class LockedWriter(ZarrV3Writer):
    """Cannot be pickled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()


class Locked(Zarr3SaveShardedStrategy):
    def make_writer(self, checkpoint_dir: Path) -> StorageWriter:  # type: ignore[override]
        return LockedWriter(checkpoint_dir)
