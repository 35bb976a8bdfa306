"""Many small reads of one checkpoint, and many loads in one process: time, and memory kept."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from contestants import PLAIN, TENSORSTORE, strategies
from dist_checkpointing import Checkpoint, ShardedTensor, load, save
from dist_checkpointing.comm import SingleProcess
from probes import resident_mib
from runner import Stage, Way
from state import LocalTensor, State, Work, by_key

_SLICES = 2000
_TENSORS_OF_SLICES = 100_000
_TENSORS_OF_LOADS = 20_000
_EXTENT = 256
_CUT = slice(16, 48)


def _wrapped(tensors: list[LocalTensor]) -> dict[str, ShardedTensor]:
    return {t.key: ShardedTensor.from_rank_offsets(t.key, t.data) for t in tensors}


def _saved(work: Work, folder: Path) -> None:
    strategy, _ = strategies(TENSORSTORE, PLAIN)
    save(_wrapped(list(work.saved)), folder, strategy, comm=SingleProcess())


def open_slices(stage: Stage) -> list[Way]:
    """Slices of a checkpoint of 100,000 tensors of 1 KiB."""
    count, slices = (200, 20) if stage.settings.tiny else (_TENSORS_OF_SLICES, _SLICES)
    work = Work.alone(State(count, (_EXTENT,)))
    stage.say(f"slices: saving {count:,} tensors")
    _saved(work, stage.folder / "ours")
    peer = stage.folder / "state.safetensors"
    save_file(by_key(work.saved), peer)
    keys = random.Random(0).sample(sorted(by_key(work.saved)), slices)  # noqa: S311
    expected = {t.key: t.data[_CUT].clone() for t in work.saved if t.key in set(keys)}

    def ours() -> Callable[[str], torch.Tensor]:
        checkpoint = Checkpoint.open(stage.folder / "ours")
        return lambda key: checkpoint[key][_CUT]

    def theirs() -> Callable[[str], torch.Tensor]:
        opened: Any = safe_open(peer, "pt")
        return lambda key: opened.get_slice(key)[_CUT]

    return [
        SlicesWay("tensorstore 1", "ours", ours, keys, expected, stage),
        SlicesWay("safetensors", "safetensors", theirs, keys, expected, stage),
    ]


class SlicesWay(Way):
    """Opens the checkpoint in each round, and reads a part of many tensors, twice.

    Args:
        name: Name of the way.
        family: Family of the way.
        opened: Opens the checkpoint; what it returns reads the part of one tensor.
        keys: The tensors.
        expected: What should be read.
        stage: Where.
    """

    def __init__(
        self,
        name: str,
        family: str,
        opened: Callable[[], Callable[[str], torch.Tensor]],
        keys: list[str],
        expected: Mapping[str, torch.Tensor],
        stage: Stage,
    ) -> None:
        self.name, self.family = name, family
        self._opened = opened
        self._keys = keys
        self._expected = expected
        self._world = stage.world

    def warm_up(self) -> Mapping[str, float]:
        def check() -> None:
            read = self._opened()
            if not all(torch.equal(read(key), part) for key, part in self._expected.items()):
                raise ValueError("what it read is not what was saved")

        self._world.timed(check)
        return {}

    def round(self) -> Mapping[str, float]:
        values: dict[str, float] = {}

        def passes() -> None:
            values["before MiB"] = resident_mib()
            begin = time.perf_counter()
            read = self._opened()
            read(self._keys[0])
            first = time.perf_counter()
            for key in self._keys:
                read(key)
            values["a slice us"] = 1e6 * (time.perf_counter() - first) / len(self._keys)
            values["first ms"] = 1000 * (first - begin)
            values["after MiB"] = resident_mib()
            for key in self._keys:
                read(key)
            values["kept by the same again MiB"] = resident_mib() - values["after MiB"]

        self._world.timed(passes)
        return values


def open_repeated_loads(stage: Stage) -> list[Way]:
    """Loads of a checkpoint of 20,000 tensors of 1 KiB, again and again."""
    count = 200 if stage.settings.tiny else _TENSORS_OF_LOADS
    work = Work.alone(State(count, (_EXTENT,)))
    _saved(work, stage.folder / "ours")
    return [RepeatedLoadsWay(work, stage)]


class RepeatedLoadsWay(Way):
    """Loads into the same memory; a fifth of all loads is a round."""

    name = "tensorstore 1"
    family = "ours"

    def __init__(self, work: Work, stage: Stage) -> None:
        self._work = work
        self._stage = stage
        self._strategy = strategies(TENSORSTORE, PLAIN)[1]
        self._loads = max(1, stage.settings.loads // 5)
        self._start_mib = 0.0

    def _load(self) -> None:
        folder = self._stage.folder / "ours"
        load(_wrapped(list(self._work.target)), folder, self._strategy, comm=SingleProcess())

    def warm_up(self) -> Mapping[str, float]:
        def check() -> None:
            self._work.clear_target()
            for _ in range(3):
                self._load()
            if not self._work.target_is_right:
                raise ValueError("what it loaded is not what was saved")

        self._stage.world.timed(check)
        self._start_mib = resident_mib()
        return {"at the start MiB": self._start_mib, "loads a round": self._loads}

    def round(self) -> Mapping[str, float]:
        seconds = [self._stage.world.timed(self._load) for _ in range(self._loads)]
        return {"load s": min(seconds), "grown MiB": resident_mib() - self._start_mib}

    def close(self) -> None:
        shutil.rmtree(self._stage.folder / "ours", ignore_errors=True)
