"""Tensors on a GPU go through two blocks of memory: one is copied while the other is used.

The GPU is a stand-in: tensors in memory that numpy may not reach, copied as if by a device.
"""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.storage import Checksum, StorageOptions, staging
from dist_checkpointing.strategies import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    StrategyAction,
    chunk_reads,
    get_default_strategy,
)
from dist_checkpointing.strategies.tensorstore import writer
from dist_checkpointing.strategies.torch_dist import writer as data_files
from dist_checkpointing.strategies.zarr import chunk_files
from states import BACKENDS, assert_holds, shard

BLOCK = 2**18


class StandIn:
    """A device that holds some tensors, and what was done with them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self._held: set[int] = set()
        own_fillable, own_copy = tensor_memory.fillable, staging.CopyStreams.copy
        own_plain = tensor_memory.is_plain_memory

        def fillable(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
            return None if self.holds(tensor) else own_fillable(tensor, dtype)

        def is_plain_memory(tensor: Any) -> bool:
            return own_plain(tensor) and not self.holds(tensor)

        def copy(streams: Any, source: torch.Tensor, target: torch.Tensor) -> None:
            self.done.append("copy")
            own_copy(streams, source, target)

        monkeypatch.setattr(tensor_memory, "fillable", fillable)
        monkeypatch.setattr(tensor_memory, "is_plain_memory", is_plain_memory)
        monkeypatch.setattr(staging.CopyStreams, "copy", copy)
        for module in (staging, writer, data_files, chunk_files, chunk_reads):
            monkeypatch.setattr(module, "is_on_gpu", self.holds, raising=False)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._held

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._held.add(tensor.untyped_storage().data_ptr())
        return tensor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def saver(backend: tuple[str, int], **options: Any) -> PlannedSaveStrategy:
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)
    assert isinstance(found, PlannedSaveStrategy)
    return type(found)(options=StorageOptions(**options))


def loader(backend: tuple[str, int], **options: Any) -> PlannedLoadStrategy:
    found = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend).for_format(*backend)
    assert isinstance(found, PlannedLoadStrategy)
    return type(found)(options=StorageOptions(**options))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(1000, 701, generator=generator),
        "strided": torch.randn(600, 900, generator=generator).t(),
        "half": torch.randn(700, 1200, generator=generator).bfloat16(),
        "conj": torch.randn(300, 300, dtype=torch.complex64, generator=generator).conj(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        **{f"small.{i}": torch.full((100, 7), float(i)) for i in range(40)},
    }


@pytest.mark.parametrize(
    ("backend", "checksum"),
    [*((backend, Checksum.XXH3) for backend in BACKENDS), (BACKENDS[0], Checksum.NONE)],
)
def test_what_is_on_a_gpu_and_what_is_not(
    tmp_path: Path, backend: tuple[str, int], checksum: Checksum, device: StandIn
) -> None:
    state: dict[str, Any] = {}
    for number, (key, tensor) in enumerate(tensors().items()):
        state[key] = shard(key, device.moved(tensor) if number % 3 != 1 else tensor)
        if number == 3:
            state["object"] = dc.ShardedObject("object", {"x": 1}, (1,), (0,))
    options = {"buffer_bytes": 4 * BLOCK, "threads": 2}
    dc.save(state, tmp_path, saver(backend, checksum=checksum, **options))
    assert device.done
    wanted = {
        key: shard(key, device.moved(torch.zeros(tensor.shape, dtype=tensor.dtype)))
        for key, tensor in tensors().items()
    }
    verify = checksum is not Checksum.NONE
    dc.load(wanted, tmp_path, loader(backend, **options), verify=verify)
    for key, tensor in tensors().items():
        loaded = wanted[key].data
        assert loaded is not None
        assert torch.equal(loaded, tensor), key
    # Columns, into another dtype.
    data = device.moved(torch.zeros(900, 200, dtype=torch.float64))
    part = dc.ShardedTensor("large", data, data.dtype, (900, 200), (1000, 701), (50, 301), None)
    own = loader(backend, buffer_bytes=BLOCK, threads=2)
    dc.load({"large": part}, tmp_path, own, cast="widen")
    assert torch.equal(data, tensors()["large"][50:950, 301:501].double())


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("torch_dist", 1)])
def test_copies_stay_within_the_buffers(
    tmp_path: Path, backend: tuple[str, int], device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    own: Callable[..., torch.Tensor] = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made = own(*shape, **options)
        if made.device.type == "cpu":
            allocated.append(made.nbytes)
        return made

    def peak(name: str, tensor: torch.Tensor) -> int:
        tracemalloc.start()
        dc.save({"w": shard("w", tensor)}, tmp_path / name, saver(backend, **options))
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    full = torch.randn(2048, 1024)
    options = {"buffer_bytes": 2**20, "threads": 2}
    peak("warm", full)
    in_place = peak("cpu", full.clone())
    monkeypatch.setattr(torch, "empty", empty)
    assert peak("c", device.moved(full)) < in_place + 2**18
    assert 0 < sum(allocated) <= 2**20
    assert torch.equal(dc.Checkpoint.open(tmp_path / "c")["w"][:], full)


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 2), ("zarr", 1)])
def test_what_did_not_change_on_a_device_is_shared(
    backend: tuple[str, int], device: StandIn, tmp_path: Path
) -> None:
    """Digests are made of the same blocks; what begins otherwise is copied to be written only."""
    tensors = {f"w{i}": device.moved(torch.arange(BLOCK + i).float()) for i in range(8)}
    tensors["few"] = device.moved(torch.ones(3))
    strategy = saver(backend, buffer_bytes=2**20)
    state = {key: shard(key, tensor) for key, tensor in tensors.items()}
    dc.save(state, tmp_path / "1", strategy)
    full = device.done.count("copy")
    tensors["w3"] += 1
    device.done.clear()
    dc.save(state, tmp_path / "2", strategy, base=tmp_path / "1")
    if backend[0] == "tensorstore":
        assert 0 < device.done.count("copy") <= full
    written = [
        path.stat().st_size
        for path in (tmp_path / "2").rglob("*")
        if path.is_file() and path.stat().st_nlink == 1 and path.stat().st_size > 10_000
    ]
    assert written == [tensors["w3"].nbytes]
    assert_holds(tmp_path / "2", tensors)
