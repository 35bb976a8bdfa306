"""Saves of a state of which only a part has changed since the last one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from contestants import CONTESTANTS, DCP_SETTINGS, TENSORSTORE, strategies
from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.storage import StorageOptions
from runner import Stage, Way
from state import State, Work

INCREMENTAL, FULL = "ours, incremental", "ours, full"
_STATE = State(400, (640, 1024), durable=True)  # 1 GiB


@dataclass(frozen=True, slots=True)
class ChangedPart:
    """Opens the ways of a case; see ``Case.open``.

    Attributes:
        every: Each so many tensors, one changes between two saves; all for 1.
        frozen: So many tensors at the beginning never change.
    """

    every: int
    frozen: int = 0

    def __call__(self, stage: Stage) -> list[Way]:
        tiny = stage.settings.tiny
        work = Work.alone(_STATE.at_most(20, 64) if tiny else _STATE)
        count = len(work.saved)
        first = self.frozen * count // _STATE.num_tensors
        changing = [tensor.bits for tensor in work.saved[first :: self.every]]
        strategy, _ = strategies(TENSORSTORE, StorageOptions())
        state = {t.key: ShardedTensor.from_rank_offsets(t.key, t.data) for t in work.saved}

        def ours(folder: Path, base: Path | None) -> None:
            save(state, folder, strategy, comm=SingleProcess(), base=base)

        def full(folder: Path, _: Path | None) -> None:
            ours(folder, None)

        def peer(write: Callable[[Path], object]) -> Callable[[Path, Path | None], None]:
            def save_all(folder: Path, _: Path | None) -> None:
                folder.mkdir()
                write(folder)

            return save_all

        ways = {
            FULL: ("ours", full),
            INCREMENTAL: ("ours", ours),
            "DCP": ("dcp", peer(DCP_SETTINGS[1].open(work).save)),
            "safetensors": ("safetensors", peer(CONTESTANTS["safetensors"].open(work).save)),
        }
        num_bytes = sum(tensor.data.nbytes for tensor in work.saved)
        return [
            ChangedPartWay(name, family, write, changing, num_bytes, stage)
            for name, (family, write) in ways.items()
        ]


class ChangedPartWay(Way):
    """Changes a part of the state in each round, and saves with the last checkpoint as a base.

    Args:
        name: Name of the way.
        family: Family of the way.
        write: Saves into a folder, with a base if there is one.
        changing: What changes.
        num_bytes: Bytes of the state.
        stage: Where.
    """

    def __init__(
        self,
        name: str,
        family: str,
        write: Callable[[Path, Path | None], None],
        changing: Sequence[torch.Tensor],
        num_bytes: int,
        stage: Stage,
    ) -> None:
        self.name, self.family = name, family
        self._write, self._changing, self._num_bytes = write, changing, num_bytes
        self._stage = stage
        self._number = 0
        self._base: Path | None = None

    def warm_up(self) -> Mapping[str, float]:
        self._save()
        self._save()
        return {}

    def round(self) -> Mapping[str, float]:
        return self._save()

    def _save(self) -> dict[str, float]:
        for tensor in self._changing:
            tensor.add_(1)
        self._number += 1
        folder = self._stage.folder / f"{self.name.replace(' ', '-')}-{self._number}"
        os.sync()  # what others left in the page cache is not the next one's to write
        before = _written_bytes()
        seconds = self._stage.world.timed(lambda: self._write(folder, self._base))
        written = _written_bytes() - before
        if self._base is not None:
            shutil.rmtree(self._base)
        self._base = folder
        return {"save s": seconds, "written / state": written / self._num_bytes}

    def close(self) -> None:
        if self._base is not None:
            shutil.rmtree(self._base)


def _written_bytes() -> int:
    """What write calls of this process were given."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
