"""Ways to save and load: the raw limit, the peers and our backends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_crc32_options, set_crc32_options

from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.interop import DCPReader, DCPWriter
from dist_checkpointing.storage import Checksum, Durability, ReadMode, StorageOptions
from dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from state import LocalTensor, Side, Work, by_key

_RAW_THREADS = 2
_BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 1024  # IOV_MAX of Linux


@dataclass(frozen=True, slots=True)
class Calls:
    """A contestant ready for one rank's work; only these calls are timed.

    Attributes:
        save: Write ``work.saved`` into an empty folder.
        load: Fill ``work.target`` from that folder, in place.
    """

    save: Callable[[Path], object]
    load: Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to save and load.

    Attributes:
        name: Name in tables and goals.
        family: "ours", "raw" or the name of a peer.
        detail: Its settings.
        open: Makes ready what a training job would have ready before it saves or loads.
        timed: It takes part in rounds, not only in the warm-up.
        saved_by_loaders: The ranks that load save their own parts; it cannot reshard.
    """

    name: str
    family: str
    detail: str
    open: Callable[[Work], Calls]
    timed: bool = True
    saved_by_loaders: bool = False


# --- the limits


def _raw(work: Work) -> Calls:
    side, source = (work.loading, work.target) if work.state.reshards else (work.saving, work.saved)
    threads = max(1, _RAW_THREADS // side.size)

    def each(move: Callable[[Path, Sequence[list[memoryview]]], None], part: Any, rank: Any) -> Any:
        batches = [_batches(tensors) for tensors in _dealt(part, threads)]

        def run(folder: Path) -> None:
            with ThreadPoolExecutor(threads) as pool:
                paths = [folder / f"{rank}.{number}" for number in range(threads)]
                list(pool.map(move, paths, batches))
            if work.state.durable:
                _fsync(folder)

        return run

    write = partial(_write_file, durable=work.state.durable)
    return Calls(each(write, source, side.rank), each(_read_file, work.target, work.loading.rank))


def _dealt(tensors: Sequence[LocalTensor], parts: int) -> list[Sequence[LocalTensor]]:
    share = -(-len(tensors) // parts)
    return [tensors[part * share : (part + 1) * share] for part in range(parts)]


def _batches(tensors: Sequence[LocalTensor]) -> list[list[memoryview]]:
    """Blocks for one ``pwritev`` or ``preadv`` each."""
    batches: list[list[memoryview]] = [[]]
    size = 0
    for tensor in tensors:
        view = tensor.data.view(torch.uint8).numpy().reshape(-1).data
        for start in range(0, len(view), _BATCH_BYTES):
            block = view[start : start + _BATCH_BYTES]
            if size + len(block) > _BATCH_BYTES or len(batches[-1]) == _BATCH_BLOCKS:
                batches.append([])
                size = 0
            batches[-1].append(block)
            size += len(block)
    return batches


def _write_file(path: Path, batches: Sequence[list[memoryview]], *, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    position = 0
    for batch in batches:
        position += os.pwritev(descriptor, batch, position)
    if durable:
        os.fsync(descriptor)
    os.close(descriptor)
    assert position == sum(len(block) for batch in batches for block in batch)


def _read_file(path: Path, batches: Sequence[list[memoryview]]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    position = 0
    for batch in batches:
        position += os.preadv(descriptor, batch, position)
    os.close(descriptor)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _memcpy(work: Work) -> Calls:
    def copy(folder: Path) -> None:
        del folder
        for source, target in zip(work.saved, work.target, strict=True):
            target.data.copy_(source.data)

    return Calls(copy, copy)


# --- the peers


def _torch_save(work: Work) -> Calls:
    state = by_key(work.saved)

    def read(folder: Path) -> None:
        loaded = torch.load(folder / "state.pt", weights_only=True)
        for tensor in work.target:
            tensor.data.copy_(loaded[tensor.key])

    return Calls(lambda folder: torch.save(state, folder / "state.pt"), read)


def _safetensors(work: Work) -> Calls:
    state = by_key(work.saved)
    targets = {tensor.key: tensor.data.view(-1).view(torch.uint8) for tensor in work.target}

    def write(folder: Path) -> None:
        save_file(state, folder / "state.safetensors")
        if work.state.durable:
            _fsync(folder / "state.safetensors")
            _fsync(folder)

    def read(folder: Path) -> None:
        # Twice as fast as load_file and a copy.
        mapped = np.memmap(folder / "state.safetensors", np.uint8, "c")
        begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8:begin].tobytes())
        values = torch.from_numpy(mapped)
        for key, target in targets.items():
            first, last = header[key]["data_offsets"]
            target.copy_(values[begin + first : begin + last])

    return Calls(write, read)


def _dcp(work: Work, threads: int, *, crc32: bool) -> Calls:
    source, target = _dcp_state(work.saved, work.saving), _dcp_state(work.target, work.loading)

    def write(folder: Path) -> None:
        with nullcontext() if crc32 else crc32_switched_off():
            writer = FileSystemWriter(folder, thread_count=threads, sync_files=work.state.durable)
            dcp_save(source, storage_writer=writer, **_dcp_ranks(work.saving))

    def read(folder: Path) -> None:
        dcp_load(target, storage_reader=FileSystemReader(folder), **_dcp_ranks(work.loading))

    return Calls(write, read)


@contextmanager
def crc32_switched_off() -> Iterator[None]:
    """Let torch.save compute no checksums."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _dcp_ranks(side: Side) -> dict[str, Any]:
    return {"no_dist": True} if side.size == 1 else {"process_group": side.group}


def _dcp_state(tensors: Sequence[LocalTensor], side: Side) -> dict[str, Any]:
    """Plain tensors, or DTensors where they are cut."""
    return {
        tensor.key: tensor.data
        if tensor.axis is None or side.size == 1
        else DTensor.from_local(tensor.data, side.mesh, [Shard(tensor.axis)], run_check=False)
        for tensor in tensors
    }


def _megatron(work: Work) -> Calls:
    """Its default strategy, which writes with two processes a rank; it knows only all ranks."""
    allow_cpu_only()
    library = import_module("megatron.core.dist_checkpointing")
    source = _sharded(library.ShardedTensor, work.saved)
    target = _sharded(library.ShardedTensor, work.target)

    def read(folder: Path) -> None:
        take_over(by_key(work.target), library.load(target, str(folder)))

    return Calls(lambda folder: library.save(source, str(folder)), read)


def megatron_is_installed() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def allow_cpu_only() -> None:
    """Megatron calls these two whatever device the tensors are on."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def take_over(targets: dict[str, torch.Tensor], loaded: Any) -> None:
    """Copy what was not loaded in place."""
    for key, target in targets.items():
        if loaded[key].data_ptr() != target.data_ptr():
            target.copy_(loaded[key])


# --- ours

PLAIN = StorageOptions(durability=Durability.PAGE_CACHE, checksum=Checksum.NONE)
CHECKED = StorageOptions(durability=Durability.PAGE_CACHE)


def strategies(backend: tuple[str, int], options: StorageOptions) -> tuple[Any, Any]:
    """The save and the load strategy of a backend, with options."""
    actions = (StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED)
    pair = [get_default_strategy(action, *backend) for action in actions]
    for strategy in pair:
        strategy.options = options
    return pair[0], pair[1]


def _ours(work: Work, backend: tuple[str, int], options: StorageOptions) -> Calls:
    if work.state.durable:
        options = replace(options, durability=Durability.FSYNC)
    save_strategy, load_strategy = strategies(backend, options)
    source = _sharded(ShardedTensor, work.saved)
    target = _sharded(ShardedTensor, work.target)
    verify = options.checksum is not Checksum.NONE

    def write(folder: Path) -> None:
        # Records of torch_dist have a CRC-32 unless torch is told otherwise, as "DCP best" is.
        with crc32_switched_off():
            save(source, folder, save_strategy, comm=work.saving.comm)

    def read(folder: Path) -> None:
        load(target, folder, load_strategy, comm=work.loading.comm, verify=verify)

    return Calls(write, read)


def _through_dcp(work: Work) -> Calls:
    source, target = _dcp_state(work.saved, work.saving), _dcp_state(work.target, work.loading)
    durability = Durability.FSYNC if work.state.durable else Durability.PAGE_CACHE
    strategy, _ = strategies(("tensorstore", 1), replace(PLAIN, durability=durability))

    def write(folder: Path) -> None:
        writer = DCPWriter(folder, strategy)
        dcp_save(source, storage_writer=writer, **_dcp_ranks(work.saving))

    def read(folder: Path) -> None:
        dcp_load(target, storage_reader=DCPReader(folder), **_dcp_ranks(work.loading))

    return Calls(write, read)


def _sharded(kind: Any, tensors: Sequence[LocalTensor]) -> dict[str, Any]:
    return {
        tensor.key: kind.from_rank_offsets(
            tensor.key,
            tensor.data,
            *([] if tensor.axis is None else [(tensor.axis, tensor.position, tensor.count)]),
        )
        for tensor in tensors
    }


def _our(name: str, backend: tuple[str, int], options: StorageOptions, detail: str) -> Contestant:
    how = partial(_ours, backend=backend, options=options)
    timed = options.read_mode is not ReadMode.PREAD
    return Contestant(name, "ours", detail, how, timed=timed)


DCP_BEST = "DCP best"
DCP_SETTINGS = tuple(
    Contestant(DCP_BEST, "dcp", f"{n} threads, no crc32", partial(_dcp, threads=n, crc32=False))
    for n in (1, 2, 4)
)
"""The fastest of them takes part in a case."""

TENSORSTORE = ("tensorstore", 1)
# Several files, as a large model has: the kernel lets one process at a time write a file.
MODEL_FILES = replace(PLAIN, data_file_bytes=2**26)
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("raw", "raw", "pwritev / preadv, 2 threads in all", _raw, saved_by_loaders=True),
        Contestant("memcpy", "memcpy", "torch copy_", _memcpy),
        Contestant("torch.save", "torch", "torch.load + copy", _torch_save),
        Contestant("safetensors", "safetensors", "save_file, read in place", _safetensors),
        Contestant("DCP default", "dcp", "as it is", partial(_dcp, threads=1, crc32=True)),
        Contestant("megatron-core", "megatron", "always durable", _megatron),
        _our("tensorstore 1", TENSORSTORE, PLAIN, "no checksums"),
        _our("tensorstore 1 + checksum", TENSORSTORE, CHECKED, "load(verify=True)"),
        _our("tensorstore 1, defaults", TENSORSTORE, StorageOptions(), "durable, checksums"),
        _our("tensorstore 1 (pread)", TENSORSTORE, replace(PLAIN, read_mode=ReadMode.PREAD), ""),
        _our("safetensors 1", ("safetensors", 1), MODEL_FILES, "files of 64 MiB"),
        _our("zarr 2", ("zarr", 2), PLAIN, "no checksums"),
        _our("zarr 1", ("zarr", 1), PLAIN, "no checksums"),
        _our("torch_dist 1", ("torch_dist", 1), PLAIN, "no checksums"),
        Contestant("DCPWriter", "ours", "dcp.save to tensorstore 1", _through_dcp),
    )
}
