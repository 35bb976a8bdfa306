"""Those that dist_checkpointing is compared with, and the protocol they all share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench_state import LocalTensor, Work

_BLOCK_BYTES = 16 << 20
_RAW_THREADS = 2


@dataclass(frozen=True, slots=True)
class Calls:
    """A contestant ready for one rank's work; only these calls are timed.

    Attributes:
        save: write ``work.saved`` into an empty folder.
        load: fill ``work.target`` from that folder, in place.
    """

    save: Callable[[Path], None]
    load: Callable[[Path], None]


class Contestant(ABC):
    """A way to save and load.

    Attributes:
        name: in tables and JSON.
        family: for colours.
        detail: its settings.
        candidate: one of several settings, of which only the best is measured in full.
        timed: it takes part in rounds, not only in the warm-up.
        max_calls: back-to-back calls a round; slow ones of which no goal speaks need not repeat.
        saved_by_loaders: the ranks that load save their own parts; it cannot reshard.
    """

    name: str
    family: str
    detail: str = ""
    candidate: bool = False
    timed: bool = True
    max_calls: int = 3
    saved_by_loaders: bool = False

    @abstractmethod
    def open(self, work: Work) -> Calls:
        """Everything that a training job would have ready before it saves or loads."""


class Raw(Contestant):
    """The limit: pwrite to new files and preadv into place, two threads on all ranks together."""

    name = "raw"
    family = "raw"
    detail = "pwrite / preadv, 2 threads"
    saved_by_loaders = True

    def open(self, work: Work) -> Calls:
        case = work.case
        tensors = work.target if case.reshards else work.saved
        side = work.loading if case.reshards else work.saving
        threads = max(1, _RAW_THREADS // side.size)
        return Calls(
            lambda folder: _in_threads(
                _write_file, tensors, threads, folder, side.rank, case.durable
            ),
            lambda folder: _in_threads(
                _read_file, work.target, threads, folder, work.loading.rank, case.durable
            ),
        )


def _blocks(tensors: Sequence[LocalTensor]) -> list[memoryview]:
    views = [tensor.data.view(torch.uint8).numpy().reshape(-1).data for tensor in tensors]
    return [
        view[start : start + _BLOCK_BYTES]
        for view in views
        for start in range(0, len(view), _BLOCK_BYTES)
    ]


def _in_threads(
    work: Callable[[Path, list[memoryview], bool], None],
    tensors: Sequence[LocalTensor],
    threads: int,
    folder: Path,
    rank: int | None,
    durable: bool,
) -> None:
    blocks = _blocks(tensors)
    share = -(-len(blocks) // threads)
    with ThreadPoolExecutor(threads) as pool:
        futures = [
            pool.submit(work, folder / f"{rank}.{i}", blocks[i * share : (i + 1) * share], durable)
            for i in range(threads)
        ]
        for future in futures:
            future.result()
    if durable:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _write_file(path: Path, blocks: list[memoryview], durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    position = 0
    for block in blocks:
        position += os.pwrite(descriptor, block, position)
    if durable:
        os.fsync(descriptor)
    os.close(descriptor)


def _read_file(path: Path, blocks: list[memoryview], durable: bool) -> None:
    del durable
    descriptor = os.open(path, os.O_RDONLY)
    position = 0
    for block in blocks:
        position += os.preadv(descriptor, [block], position)
    os.close(descriptor)


class Memcpy(Contestant):
    """No file at all: what moving the bytes once costs."""

    name = "memcpy"
    family = "memcpy"
    detail = "torch copy_"

    def open(self, work: Work) -> Calls:
        def copy(folder: Path) -> None:
            del folder
            for source, target in zip(work.saved, work.target, strict=True):
                target.data.copy_(source.data)

        return Calls(copy, copy)


class TorchSave(Contestant):
    """One pickled zip file."""

    name = "torch.save"
    family = "torch"
    detail = "torch.load + copy"
    max_calls = 1

    def open(self, work: Work) -> Calls:
        state = {tensor.key: tensor.data for tensor in work.saved}

        def load(folder: Path) -> None:
            loaded = torch.load(folder / "state.pt", weights_only=True)
            for tensor in work.target:
                tensor.data.copy_(loaded[tensor.key])

        return Calls(lambda folder: torch.save(state, folder / "state.pt"), load)


class Safetensors(Contestant):
    """One file; loaded through a memory map."""

    name = "safetensors"
    family = "safetensors"
    detail = "load_file + copy"

    def open(self, work: Work) -> Calls:
        state = {tensor.key: tensor.data for tensor in work.saved}

        def load(folder: Path) -> None:
            loaded = load_file(folder / "state.safetensors")
            for tensor in work.target:
                tensor.data.copy_(loaded[tensor.key])

        return Calls(lambda folder: save_file(state, folder / "state.safetensors"), load)
