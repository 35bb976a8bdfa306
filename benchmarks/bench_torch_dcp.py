"""torch.distributed.checkpoint, at its defaults and with settings from which the best is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_crc32_options, set_crc32_options

from bench_contestants import Calls, Contestant
from bench_state import LocalTensor, Side, Work
from dist_checkpointing.interop import DCPReader, DCPWriter
from dist_checkpointing.storage.options import Checksum, Durability, StorageOptions
from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy


class TorchDcp(Contestant):
    """Torch DCP with some settings; ``sync_files`` follows the case for all of them.

    Args:
        threads: ``thread_count`` of the writer.
        crc32: whether torch.save computes checksums, as it does by default.
    """

    family = "dcp"

    def __init__(self, threads: int = 1, *, crc32: bool = True) -> None:
        self.threads = threads
        self.crc32 = crc32
        self.candidate = not crc32
        self.name = "DCP best" if self.candidate else "DCP default"
        plural = "s" if threads > 1 else ""
        self.detail = f"{threads} thread{plural}, crc32 {'on' if crc32 else 'off'}"

    def open(self, work: Work) -> Calls:
        source, target = _state(work.saved, work.saving), _state(work.target, work.loading)

        def save(folder: Path) -> None:
            with nullcontext() if self.crc32 else crc32_switched_off():
                writer = FileSystemWriter(
                    folder, thread_count=self.threads, sync_files=work.case.durable
                )
                dcp_save(source, storage_writer=writer, **_ranks(work.saving))

        def load(folder: Path) -> None:
            dcp_load(target, storage_reader=FileSystemReader(folder), **_ranks(work.loading))

        return Calls(save, load)


class ThroughDcp(Contestant):
    """``dcp.save`` and ``dcp.load`` with one of our backends as their storage."""

    family = "ours"
    name = "DCPWriter tensorstore 1"
    detail = "dcp.save(storage_writer=DCPWriter(...)), no checksums"

    def open(self, work: Work) -> Calls:
        source, target = _state(work.saved, work.saving), _state(work.target, work.loading)
        durability = Durability.FSYNC if work.case.durable else Durability.PAGE_CACHE
        options = StorageOptions(durability=durability, checksum=Checksum.NONE)
        strategy = TensorStoreSaveShardedStrategy(options=options)

        def save(folder: Path) -> None:
            writer = DCPWriter(folder, strategy)
            dcp_save(source, storage_writer=writer, **_ranks(work.saving))

        def load(folder: Path) -> None:
            dcp_load(target, storage_reader=DCPReader(folder), **_ranks(work.loading))

        return Calls(save, load)


@contextmanager
def crc32_switched_off() -> Iterator[None]:
    """Let torch.save compute no checksums."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def dcp_contestants() -> list[Contestant]:
    return [TorchDcp(), *(TorchDcp(threads, crc32=False) for threads in (1, 2, 4)), ThroughDcp()]


def _ranks(side: Side) -> dict[str, Any]:
    return {"no_dist": True} if side.size == 1 else {"process_group": side.group}


def _state(tensors: Sequence[LocalTensor], side: Side) -> dict[str, Any]:
    """Plain tensors, or DTensors where they are cut."""
    return {
        tensor.key: tensor.data
        if tensor.axis is None
        else DTensor.from_local(tensor.data, side.mesh, [Shard(tensor.axis)], run_check=False)
        for tensor in tensors
    }
