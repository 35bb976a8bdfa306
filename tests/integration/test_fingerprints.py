"""Fingerprints of states, of checkpoints of every backend, and of what a load has restored."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import sealed
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import INDEX_NAME, Index
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import (
    FullyParallelSaveStrategyWrapper,
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
)
from dist_checkpointing.testing import random_bits, run_ranks
from states import ALONE, BACKEND, between, every_kind, flat, rows, save_on, shard, wholes

GENERATOR = torch.Generator().manual_seed(5)
FULL = torch.randn(48, 35, generator=GENERATOR)
KINDS = [row.torch for row in DTYPES]


def state(comm: Comm, *, blank: bool = False, cuts: str = "rows") -> dict[str, Any]:
    """The same tensors, cut in one of several ways."""
    full = torch.zeros_like(FULL) if blank else FULL
    rank, count = comm.rank, comm.world_size
    bounds = [48 * i * i // (count * count) for i in range(count + 1)]
    size = full.numel()
    ends = [size * i // count for i in range(count + 1)]
    weight = {
        "rows": lambda: rows("w", full, comm),
        "uneven": lambda: between("w", full, bounds[rank], bounds[rank + 1]),
        "flat": lambda: flat("w", full, ends[rank], ends[rank + 1]),
        "columns": lambda: rows("w", full, comm, 1),
    }[cuts]()
    norm = torch.zeros(9) if blank else torch.arange(9.0)
    scalar = torch.zeros(()) if blank else torch.tensor(3.5)
    return {
        "w": weight,
        "half": rows("half", full.bfloat16(), comm),
        "norm": shard("norm", norm, replica_id=rank),
        "scalar": shard("scalar", scalar, replica_id=rank),
        "empty": shard("empty", torch.zeros(0, 4), replica_id=rank),
        "layers": shard("layers", full[rank].clone(), (0, rank, count), prepend_axis_num=1)
        if count > 1
        else shard("layers", full[:1].clone()),
    }


@BACKEND
def test_checkpoint_has_those_of_the_state(tmp_path: Path, backend: tuple[str, int]) -> None:
    keeps = backend in (("tensorstore", 1), ("zarr", 2))
    if not keeps:
        with pytest.raises(dc.UnsupportedFormatError, match="has no place for fingerprints"):
            dc.save(every_kind(), tmp_path / "c", backend, fingerprints=True)
        assert not (tmp_path / "c").exists()
    save_on(4, partial(state, cuts="flat"), tmp_path / "c", backend, fingerprints=keeps)
    opened = dc.Checkpoint.open(tmp_path / "c")
    expected = run_ranks(4, lambda comm: dc.fingerprint(state(comm), comm=comm))[0]
    assert opened.fingerprints() == opened.fingerprints(stored=False) == expected
    assert opened.index.fingerprints == (expected if keeps else {})
    assert opened.fingerprint("w") == expected["w"]
    with pytest.raises(KeyError, match="no tensor 'v'"):
        opened.fingerprint("v")
    for count, cuts in ((3, "uneven"), (5, "columns"), (4, "flat")):

        def restore(comm: Comm, cuts: str = cuts) -> torch.Tensor:
            template = state(comm, blank=True, cuts=cuts)
            del template["layers"], template["half"]
            dc.load(template, tmp_path / "c", comm=comm, verify="restored")
            data: torch.Tensor = template["w"].data
            return data

        parts = run_ranks(count, restore)
        if cuts != "columns":
            assert torch.equal(torch.cat(parts).reshape(FULL.shape), FULL)


def test_every_dtype(tmp_path: Path) -> None:
    values = {f"{dtype} a": random_bits((24, 7), dtype) for dtype in KINDS}
    turned = {f"{dtype} b": random_bits((3, 5, 7), dtype).transpose(0, 2) for dtype in KINDS}
    whole = wholes(values | turned)
    expected = dc.fingerprint(whole, comm=ALONE)
    dc.save(whole, tmp_path / "c", fingerprints=True)
    assert dc.Checkpoint.open(tmp_path / "c").fingerprints() == expected
    assert dc.Checkpoint.open(tmp_path / "c").fingerprints(stored=False) == expected
    expected = {key: expected[key] for key in values}

    def pieces(comm: Comm) -> dict[str, str]:
        ends = [(0, 61), (61, 24 * 7)][comm.rank]
        return dc.fingerprint({k: flat(k, own, *ends) for k, own in values.items()}, comm=comm)

    def cut(comm: Comm) -> dict[str, str]:
        return dc.fingerprint({k: rows(k, own, comm) for k, own in values.items()}, comm=comm)

    assert run_ranks(3, cut)[0] == run_ranks(2, pieces)[0] == expected


def test_kind_and_every_value_count() -> None:
    def of(values: torch.Tensor) -> str:
        return dc.fingerprint({"w": shard("w", values)}, comm=ALONE)["w"]

    zeros = torch.zeros(4, 6)
    kinds = [zeros, zeros.int(), zeros.reshape(6, 4), zeros.reshape(-1), zeros.bfloat16(), -zeros]
    assert len({*map(of, kinds)}) == len(kinds)


def test_factories_and_other_planners(tmp_path: Path) -> None:
    def factory() -> dc.ShardedTensorFactory:
        return dc.ShardedTensorFactory(
            "f",
            torch.arange(12.0).reshape(4, 3),
            lambda key, data, *_: {
                n: shard(f"{key}.{n}", data[2 * n : 2 * n + 2]) for n in range(2)
            },
            lambda parts: torch.cat(list(parts.values())),
        )

    class Doubled(DefaultSavePlanner):
        def get_data(self, item: Any) -> Any:
            data = super().get_data(item)
            assert isinstance(data, torch.Tensor)
            return data * 2

    own = {"f": factory()}
    assert [*dc.fingerprint(own, comm=ALONE)] == ["f.0", "f.1"]
    dc.save(own, tmp_path / "c", fingerprints=True)
    assert dc.Checkpoint.open(tmp_path / "c").fingerprints() == dc.fingerprint(own, comm=ALONE)
    dc.load({"f": factory()}, tmp_path / "c", verify="restored")
    strategy = TensorStoreSaveShardedStrategy(planner=Doubled())
    dc.save(own, tmp_path / "d", strategy, fingerprints=True)
    opened = dc.Checkpoint.open(tmp_path / "d")
    assert opened.fingerprints() == opened.fingerprints(stored=False) != dc.fingerprint(own)


def test_parallel_saves_and_compressed_chunks(tmp_path: Path) -> None:
    own = FullyParallelSaveStrategyWrapper(TensorStoreSaveShardedStrategy())
    save_on(4, state, tmp_path / "c", own, fingerprints=True)
    opened = dc.Checkpoint.open(tmp_path / "c")
    assert opened.index.fingerprints == opened.fingerprints(stored=False)
    strategy = Zarr3SaveShardedStrategy(codec="zstd", options=StorageOptions(threads=2))
    save_on(4, state, tmp_path / "z", strategy, fingerprints=True)
    assert dc.Checkpoint.open(tmp_path / "z").fingerprints(stored=False) == opened.fingerprints()


def test_saves_in_the_background(tmp_path: Path) -> None:
    values = FULL.clone()
    own = {"w": shard("w", values), "n": shard("n", torch.arange(5))}
    expected = dc.fingerprint(own, comm=ALONE)
    with dc.CheckpointManager(tmp_path, comm=ALONE, fingerprints=True) as manager:
        manager.async_save(1, own)
        values.zero_()
        manager.wait()
        manager.save(2, own)
        manager.save(3, own, fingerprints=False)
    of_step = [dc.Checkpoint.open(manager.folder(step)).index.fingerprints for step in (1, 2, 3)]
    assert of_step == [expected, dc.fingerprint(own, comm=ALONE), {}]
    dc.async_save(own, tmp_path / "c", comm=ALONE, fingerprints=True).result()
    assert dc.Checkpoint.open(tmp_path / "c").index.fingerprints == of_step[1]


def test_older_readers_pass_over_them(tmp_path: Path) -> None:
    dc.save({"w": shard("w", FULL), "v": shard("v", FULL)}, tmp_path / "c", fingerprints=True)
    content = json.loads((tmp_path / "c" / INDEX_NAME).read_bytes())
    assert len(content["fingerprints"]) == 2
    assert content["format_minor"] == 0
    dc.remove_sharded_tensors(tmp_path / "c", "v")
    opened = dc.Checkpoint.open(tmp_path / "c")
    assert opened.index.fingerprints == dc.fingerprint({"w": shard("w", FULL)}, comm=ALONE)


def test_wrong_ones_are_no_index() -> None:
    index = Index(["w"], ["float32"], [(3,)], [(3,)])
    object.__setattr__(index, "fingerprints", {"w": "0" * 32})
    content = json.loads(index.to_json())
    assert Index.from_json(sealed(content)).fingerprints == {"w": "0" * 32}
    for column in (["0" * 31], ["0" * 32] * 2, {"w": "0" * 32}, [7], ["G" * 32]):
        with pytest.raises(dc.CorruptCheckpointError, match="fingerprint"):
            Index.from_json(sealed({**content, "fingerprints": column}))


def test_incomplete_states_have_none() -> None:
    def halves(comm: Comm) -> dict[str, str]:
        return dc.fingerprint({"w": shard("w", FULL, (0, comm.rank, 3))}, comm=comm)

    with pytest.raises(dc.InvalidShardingError, match="no shard holds this part"):
        run_ranks(2, halves)
    with pytest.raises(dc.InvalidShardingError, match="is None"):
        dc.fingerprint({"w": shard("w", FULL).without_data()}, comm=ALONE)


class Broken(DefaultLoadPlanner):
    """Flips the sign of the first element of each tensor that it fills, on one rank."""

    def configure_planner(self, *args: Any, rank: int, **kwargs: Any) -> None:
        self.is_broken = rank == 1
        super().configure_planner(*args, rank=rank, **kwargs)

    def apply_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        super().apply_tensor(item, tensor)
        if self.is_broken:
            self.acquire_tensor(item).reshape(-1)[0].neg_()


@pytest.mark.parametrize("keeps", [True, False])
def test_wrong_memory_is_found_on_all_ranks(tmp_path: Path, keeps: bool) -> None:
    save_on(3, state, tmp_path / "c", fingerprints=keeps)

    def restore(comm: Comm, key: str) -> None:
        template = {key: state(comm, blank=True)[key]}
        strategy = TensorStoreLoadShardedStrategy(planner=Broken())
        dc.load(template, tmp_path / "c", strategy, comm=comm, verify="restored")

    with pytest.raises(dc.CorruptCheckpointError, match="not what was saved") as caught:
        run_ranks(4, lambda comm: restore(comm, "w"))
    (finding,) = caught.value.findings
    assert finding.key == "w"
    assert finding.expected == dc.fingerprint({"w": shard("w", FULL)}, comm=ALONE)["w"]
    # Only one copy of several is wrong, and it is not the one that is counted.
    with pytest.raises(dc.CorruptCheckpointError, match="copies of one part differ") as caught:
        run_ranks(4, lambda comm: restore(comm, "norm"))
    assert [(f.key, f.ranks) for f in caught.value.findings] == [("norm", (0, 1))]


def test_what_is_not_compared_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dc.save(wholes(dict.fromkeys("abc", FULL)), tmp_path / "c", fingerprints=True)

    def overlapping(comm: Comm) -> None:
        """Two ranks have halves, and a third one a copy of all, which is no main replica."""
        half = (torch.zeros(24, 35), (0, comm.rank, 2)) if comm.rank < 2 else None
        own = shard("a", *half) if half else shard("a", torch.zeros_like(FULL), replica_id=1)
        dc.load({"a": own}, tmp_path / "c", comm=comm, verify="restored")

    with caplog.at_level(logging.WARNING):
        run_ranks(3, overlapping)
    assert "not compared" not in caplog.text
    template = {
        "a": shard("a", torch.zeros_like(FULL)),
        "b": shard("b", torch.zeros(24, 35), (0, 1, 2)),
        "c": shard("c", torch.zeros_like(FULL).double()),
    }
    with caplog.at_level(logging.WARNING):
        dc.load(template, tmp_path / "c", cast="widen", verify="restored", comm=ALONE)
    assert "tensors not compared with what was saved (2)" in caplog.text
    assert "shape: b, c" in caplog.text
    with pytest.raises(ValueError, match="verify must be"):
        dc.load(template, tmp_path / "c", verify="memory")  # type: ignore[call-overload]
