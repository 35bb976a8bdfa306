"""Cases that save a state and load it again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contestants import (
    CONTESTANTS,
    DCP_BEST,
    DCP_SETTINGS,
    Calls,
    Contestant,
    megatron_is_installed,
)
from probes import watched
from runner import Stage, Way
from state import State, Work, make_side
from world import WayFailedError, World

_TRIED_TENSORS = 5000


@dataclass(frozen=True, slots=True)
class SaveLoad:
    """Opens the ways of a case; see ``Case.open``.

    Attributes:
        state: What is saved and loaded.
        names: Names of the contestants.
        measures: "save", "load" or both.
        calls: Back-to-back calls a round; the fastest counts.
    """

    state: State
    names: Sequence[str]
    measures: Sequence[str] = ("save", "load")
    calls: int = 3

    def __call__(self, stage: Stage) -> list[Way]:
        state = self.state.at_most(20, 64) if stage.settings.tiny else self.state
        sides = [
            make_side(size, stage.world.rank, stage.world.size)
            for size in (state.save_ranks, state.load_ranks)
        ]
        disk = Disk(stage.world, stage.folder)

        def way(contestant: Contestant, work: Work) -> SaveLoadWay:
            tiny = Work.make(state.at_most(4, 8), *sides)
            return SaveLoadWay(contestant, work, tiny, disk, self)

        work, chosen = Work.make(state, *sides), []
        for name in self.names:
            if name == DCP_BEST:
                tried = (
                    Work.make(state.at_most(_TRIED_TENSORS), *sides)
                    if work.state.num_tensors > _TRIED_TENSORS
                    else work
                )
                seconds = [way(setting, tried).attempt() for setting in DCP_SETTINGS]
                chosen.append(DCP_SETTINGS[seconds.index(min(seconds))])
            elif name != "megatron-core" or megatron_is_installed():
                chosen.append(CONTESTANTS[name])
        return [way(contestant, work) for contestant in chosen]


@dataclass(slots=True)
class Disk:
    """The one checkpoint that exists at a time."""

    world: World
    folder: Path
    last: Path | None = None
    number: int = field(default=0)

    def new(self, *, durable: bool) -> Path:
        self.remove()
        self.number += 1
        self.last = self.folder / f"checkpoint-{self.number}"
        if self.world.rank == 0:
            self.last.mkdir()
        if durable:
            os.sync()  # what others left in the page cache is not the next one's to write
        return self.last

    def remove(self) -> None:
        self.world.barrier()
        if self.last is not None and self.world.rank == 0:
            shutil.rmtree(self.last, ignore_errors=True)
        self.last = None


class SaveLoadWay(Way):
    """A contestant in a case.

    Args:
        contestant: How to save and load.
        work: What.
        tiny: A few bytes of the same kind: what a first call imports is not what it costs.
        disk: Where.
        plan: Of the case.
    """

    def __init__(
        self, contestant: Contestant, work: Work, tiny: Work, disk: Disk, plan: SaveLoad
    ) -> None:
        self.name, self.family = contestant.name, contestant.family
        self.detail = contestant.detail
        self._contestant = contestant
        self._work = work
        self._tiny = tiny
        self._disk = disk
        self._world = disk.world
        self._plan = plan
        self._calls = contestant.open(work)

    def attempt(self) -> float:
        """Seconds of what the case measures first, the better of two calls."""
        first = self._save if "save" in self._plan.measures else self._load
        if first == self._load:
            self._save()
        seconds = self._world.fastest(first, 2)
        self._disk.remove()
        return seconds

    def warm_up(self) -> Mapping[str, float]:
        """Imports; then memory, bytes, files and whether what is loaded is right."""
        try:
            calls = self._contestant.open(self._tiny)
            self._save(calls, self._tiny)
            if "load" in self._plan.measures:
                self._load(calls)
            return self._measured_once()
        finally:
            self._disk.remove()

    def _measured_once(self) -> dict[str, float]:
        once: dict[str, float] = {}
        with watched() as watch:
            once["save s"] = self._save()
        once["save MiB"] = self._worst(watch.peak_mib)
        written = sum(self._world.gather(watch.written_bytes))
        once["written / state"] = written / self._work.state.num_bytes
        assert self._disk.last is not None
        once["files"] = sum(path.is_file() for path in self._disk.last.rglob("*"))
        if "load" in self._plan.measures:
            self._work.clear_target()
            with watched() as watch:
                once["load s"] = self._load()
            once["load MiB"] = self._worst(watch.peak_mib)
            needed = sum(self._world.gather(self._work.target_bytes))
            read = sum(self._world.gather(watch.read_bytes)) / needed
            if read > 0.95:  # else it reads through a map, which nobody counts
                once["read / needed"] = read
            if not all(self._world.gather(self._work.target_is_right)):
                raise WayFailedError("what it loaded is not what it saved")
        return {name: value for name, value in once.items() if self._counts(name)}

    def _counts(self, metric: str) -> bool:
        operation, _, unit = metric.partition(" ")
        if operation in ("save", "load") and operation not in self._plan.measures:
            return False
        return unit != "s" or self._contestant.timed

    def round(self) -> Mapping[str, float]:
        if not self._contestant.timed:
            return {}
        try:
            values = {}
            calls = self._plan.calls if "save" in self._plan.measures else 1
            seconds = self._world.fastest(self._save, calls)
            if "save" in self._plan.measures:
                values["save s"] = seconds
            if "load" in self._plan.measures:
                values["load s"] = self._world.fastest(self._load, self._plan.calls)
            return values
        finally:
            self._disk.remove()

    def _save(self, calls: Calls | None = None, work: Work | None = None) -> float:
        """One save into a new, empty folder; the one before is removed."""
        work, calls = work or self._work, calls or self._calls
        side = work.saving
        if self._contestant.saved_by_loaders and work.state.reshards:
            side = work.loading
            for tensor in work.target:
                tensor.fill()
        folder = self._disk.new(durable=work.state.durable)
        return self._world.timed(None if side.rank is None else lambda: calls.save(folder))

    def _load(self, calls: Calls | None = None) -> float:
        folder, calls = self._disk.last, calls or self._calls
        assert folder is not None
        idle = self._work.loading.rank is None
        return self._world.timed(None if idle else lambda: calls.load(folder))

    def _worst(self, value: float) -> float:
        return max(self._world.gather(value))
