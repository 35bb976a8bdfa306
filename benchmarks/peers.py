"""Copies at peers: the time of a copy, and how long a save with copies holds up the training."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dist_checkpointing import CheckpointManager, Place, Retention, ShardedTensor
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.manager.peer_files import Transfer, send_files
from runner import SkippedError, Stage, Way

COPY, EXCHANGE = "files to a peer", "exchange by gloo"
WITH_COPIES, WITHOUT = "save with copies", "save without copies"
_MEMORY = Path("/dev/shm")  # noqa: S108 - where such a place lies
_BLOCK_BYTES = 1 << 24
_STEP_SECONDS = 1.0


class _Timed(Way):
    """A call that is timed on all ranks together."""

    def __init__(self, name: str, family: str, stage: Stage, call: Callable[[], object]) -> None:
        self.name, self.family = name, family
        self._stage, self._call = stage, call

    def round(self) -> Mapping[str, float]:
        return {"copy s": self._stage.world.timed(self._call)}


class _Saves(Way):
    """Asynchronous saves, of which each begins while the last one may still be copied."""

    def __init__(self, name: str, copies: int, root: Path, home: Path, stage: Stage) -> None:
        self.name, self.family = name, "ours"
        self._stage, self._step, self._home = stage, 0, home / name
        places = [Place(root / name, copies=copies), Place(self._home, every=1 << 40)]
        self._manager = CheckpointManager(places, retention=Retention(keep_last=1))
        rank, size = stage.world.rank, stage.world.size
        shard = torch.rand(_num_bytes(stage) // 4)
        self._state = {"w": ShardedTensor.from_rank_offsets("w", shard, (0, rank, size))}

    def round(self) -> Mapping[str, float]:
        blocked = []
        for _ in range(2):
            self._step += 1
            save = partial(self._manager.async_save, self._step, self._state)
            blocked.append(self._stage.world.timed(save))
            time.sleep(_STEP_SECONDS)
        return {"blocked s": blocked[-1]}

    def close(self) -> None:
        self._manager.close()
        if self._stage.world.rank == 0:
            shutil.rmtree(self._home)


def _num_bytes(stage: Stage) -> int:
    return 1 << (20 if stage.settings.tiny else 27)


def open_peers(stage: Stage) -> list[Way]:
    """Two processes stand for two machines, each with a folder in memory."""
    if not _MEMORY.is_dir():
        raise SkippedError(f"{_MEMORY} is not here")
    rank, size, num_bytes = stage.world.rank, stage.world.size, _num_bytes(stage)
    os.environ["DIST_CHECKPOINTING_MACHINE"] = f"machine{rank}"
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=_MEMORY))
    folder = root / "step"
    folder.mkdir()
    (folder / f"file{rank}").write_bytes(os.urandom(1 << 20) * (num_bytes >> 20))
    files = [SealedFile(f"file{number}", num_bytes) for number in range(size)]
    transfers = [Transfer(files[n], n, (n + 1) % size) for n in range(size)]
    comm, sent, received = chosen_comm(None), torch.ones(num_bytes, dtype=torch.uint8), []
    received.append(torch.empty_like(sent))

    def copy() -> None:
        if send_files(comm, folder, transfers):
            raise RuntimeError("a file did not arrive")

    def exchange() -> None:
        for start in range(0, num_bytes, _BLOCK_BYTES):
            block = slice(start, start + _BLOCK_BYTES)
            going = dist.isend(sent[block], (rank + 1) % size)
            coming = dist.irecv(received[0][block], (rank - 1) % size)
            for request in (going, coming):
                assert request is not None
                request.wait()

    class Last(_Timed):
        def close(self) -> None:
            shutil.rmtree(root)

    return [
        _Timed(COPY, "ours", stage, copy),
        _Saves(WITH_COPIES, 1, root, stage.folder, stage),
        _Saves(WITHOUT, 0, root, stage.folder, stage),
        Last(EXCHANGE, "raw", stage, exchange),
    ]
