"""The backends of dist_checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from bench_contestants import Calls, Contestant
from bench_state import LocalTensor, Side, Work
from bench_torch_dcp import crc32_switched_off
from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.storage.options import Checksum, Durability, ReadMode, StorageOptions
from dist_checkpointing.strategies.registry import StrategyAction, available_strategies
from dist_checkpointing.strategies.selection import select_strategy

BACKENDS = [("tensorstore", 1), ("zarr", 2), ("zarr", 1), ("torch_dist", 1)]


class Variant(Enum):
    """The options a backend is measured with; the value is what its name ends in."""

    PLAIN = ""
    CHECKSUM = " + checksum"
    PREAD = " (pread)"


def contestant_name(backend: tuple[str, int], variant: Variant = Variant.PLAIN) -> str:
    return f"{backend[0]} {backend[1]}{variant.value}"


class Ours(Contestant):
    """One backend with some options.

    Args:
        backend: name and version.
        variant: its options.
    """

    family = "ours"

    def __init__(self, backend: tuple[str, int], variant: Variant = Variant.PLAIN) -> None:
        self.backend = backend
        self.variant = variant
        self.name = contestant_name(backend, variant)
        self.timed = variant is not Variant.PREAD
        self.detail = {
            Variant.PLAIN: "no checksums",
            Variant.CHECKSUM: "default checksums; load(verify=True)",
            Variant.PREAD: "read_mode PREAD: what it reads can be counted",
        }[variant]

    def open(self, work: Work) -> Calls:
        save_strategy, load_strategy = make_strategies(
            self.backend, self.variant, durable=work.case.durable
        )
        source, target = _state(work.saved), _state(work.target)
        save_comm, load_comm = _comm(work.saving), _comm(work.loading)
        verify = self.variant is Variant.CHECKSUM

        def save_all(folder: Path) -> None:
            # Records of torch_dist have a CRC-32 unless torch is told otherwise, as "DCP best" is.
            with crc32_switched_off():
                save(source, folder, save_strategy, comm=save_comm)

        return Calls(
            save_all,
            lambda folder: _ignore(
                load(target, folder, load_strategy, comm=load_comm, verify=verify)
            ),
        )


def our_contestants() -> list[Contestant]:
    """Every backend that is there, in every variant."""
    known = available_strategies(StrategyAction.SAVE_SHARDED)
    return [
        Ours(backend, variant) for backend in BACKENDS if backend in known for variant in Variant
    ]


def make_strategies(
    backend: tuple[str, int], variant: Variant, *, durable: bool
) -> tuple[Any, Any]:
    """The save and the load strategy of a backend, with the options of a variant."""
    options = StorageOptions()
    if not durable:
        options = replace(options, durability=Durability.PAGE_CACHE)
    if variant is not Variant.CHECKSUM:
        options = replace(options, checksum=Checksum.NONE)
    if variant is Variant.PREAD:
        options = replace(options, read_mode=ReadMode.PREAD)
    strategies = (
        select_strategy(StrategyAction.SAVE_SHARDED, backend),
        select_strategy(StrategyAction.LOAD_SHARDED, backend),
    )
    for strategy in strategies:
        strategy.options = options
    return strategies


def _comm(side: Side) -> Comm | None:
    return SingleProcess() if side.size == 1 else side.comm


def _state(tensors: Sequence[LocalTensor]) -> dict[str, Any]:
    return {
        tensor.key: ShardedTensor.from_rank_offsets(
            tensor.key,
            tensor.data,
            *([] if tensor.axis is None else [(tensor.axis, tensor.position, tensor.count)]),
        )
        for tensor in tensors
    }


def _ignore(result: object) -> None:
    del result
