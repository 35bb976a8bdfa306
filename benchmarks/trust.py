"""What it costs to make sure of values: replicas compared and fingerprints taken at a save."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing import PlanCache, ReplicaCheck, ShardedTensor, fingerprint, save
from dist_checkpointing.comm import default_comm
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
from runner import Stage, Values, Way
from world import World

_TENSORS, _SIDE = 32, 2048
_TINY_SIDE = 16

PLAIN, SAMPLE, ALL, KEPT = "plain", "replicas SAMPLE", "replicas ALL", "fingerprints"
_OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    SAMPLE: {"replicas": ReplicaCheck.SAMPLE},
    ALL: {"replicas": ReplicaCheck.ALL},
    KEPT: {"fingerprints": True},
}


class _Save(Way):
    """Durable saves of a state that every rank holds whole.

    Args:
        name: Of ``_OPTIONS``.
        state: State of this rank.
        stage: Where.
    """

    family = "ours"

    def __init__(self, name: str, state: dict[str, ShardedTensor], stage: Stage) -> None:
        self.name = name
        self._state = state
        self._world: World = stage.world
        self._folder: Path = stage.folder / "trust"
        self._cache = PlanCache()
        options = StorageOptions(durability=Durability.FSYNC)
        self._strategy = TensorStoreSaveShardedStrategy(options=options)

    def warm_up(self) -> Values:
        self.round()
        return {}

    def round(self) -> Values:
        self.close()
        if self._world.rank == 0:
            os.sync()  # what others left in the page cache is not this one's to write

        def once() -> None:
            save(
                self._state,
                self._folder,
                self._strategy,
                plan_cache=self._cache,
                **_OPTIONS[self.name],
            )

        cpu = os.times()
        seconds = self._world.timed(once)
        spent = os.times()
        own = spent.user + spent.system - cpu.user - cpu.system
        return {"save s": seconds, "CPU s of a rank": max(self._world.gather(own))}

    def close(self) -> None:
        self._world.barrier()
        if self._world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._world.barrier()


class _InMemory(Way):
    """``fingerprint`` of the same state."""

    family, name = "ours", "fingerprint()"

    def __init__(self, state: dict[str, ShardedTensor], stage: Stage) -> None:
        self._state, self._world = state, stage.world

    def round(self) -> Values:
        return {"fingerprint s": self._world.timed(lambda: fingerprint(self._state))}


def open_trust(stage: Stage) -> list[Way]:
    """The ways of the case."""
    side = _TINY_SIDE if stage.settings.tiny else _SIDE
    rank = default_comm().rank
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(side, side, generator=generator) for _ in range(_TENSORS)]
    state = {
        f"w{number}": ShardedTensor.from_rank_offsets(f"w{number}", tensor, replica_id=rank)
        for number, tensor in enumerate(tensors)
    }
    return [*(_Save(name, state, stage) for name in _OPTIONS), _InMemory(state, stage)]
