"""Strategies of third parties that have no StorageWriter: they get state dicts, and a folder."""

import gc
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.mapping import flatten, is_main_replica, unflatten
from dist_checkpointing.strategies import (
    AsyncRequest,
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    default_strategies,
)
from dist_checkpointing.testing import Failures, StorageProtocol, StrategyConformance, run_ranks
from few_worlds import FewWorlds
from states import cell, rows, save_on, shard

Where = tuple[Any, ...]


def place(shard: dc.ShardedTensor) -> Where:
    """Index of the shard's elements in the global tensor."""
    return shard.global_slice() if shard.flattened_range is None else shard.global_coordinates()


def write(state_dict: dict[str, Any], folder: Path) -> None:
    """One file a shard."""
    leaves, _ = flatten(state_dict)
    for leaf in leaves.values():
        if is_main_replica(leaf.replica_id):
            path = folder / "shards" / f"{uuid.uuid4()}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(leaf, path)


class PlainSave(SaveShardedStrategy):
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        write(sharded_state_dict, Path(checkpoint_dir))


class PlainLoad(LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "plain":
            raise dc.CheckpointingException(f"backend {loaded_backend}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise dc.CheckpointingException(f"version {loaded_version}")

    def stored(self, folder: Any) -> list[Any]:
        paths = sorted(Path(folder).glob("shards/*.pt"))
        return [torch.load(path, weights_only=False) for path in paths]

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
        leaves, skeleton = flatten(sharded_state_dict)
        values: dict[Any, Any] = {}
        stored = self.stored(checkpoint_dir)
        for path, leaf in leaves.items():
            shards = [shard for shard in stored if shard.key == leaf.key]
            if isinstance(leaf, dc.ShardedObject):
                (values[path],) = (s.data for s in shards if s.unique_key == leaf.unique_key)
            else:
                values[path] = self.filled(leaf, shards)
        result: dict[str, Any] = unflatten(skeleton, values)
        return result

    def filled(self, leaf: dc.ShardedTensor, shards: list[dc.ShardedTensor]) -> torch.Tensor:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
            leaf.dtype.itemsize, leaf.dtype
        )
        whole = torch.zeros(leaf.global_shape, dtype=bits)
        seen = torch.zeros(leaf.global_shape, dtype=torch.bool)
        for one in shards:
            assert one.data is not None
            whole[place(one)] = one.data.detach().resolve_conj().resolve_neg().view(bits)
            seen[place(one)] = True
        if not bool(seen[place(leaf)].all()):
            raise dc.CorruptCheckpointError(f"{leaf.key}: some shards are lost")
        leaf.init_data("cpu")
        assert leaf.data is not None
        leaf.data.detach().copy_(whole[place(leaf)].view(leaf.dtype))
        return leaf.data

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, dc.ShardedTensor]:
        found = {s.key: s for s in self.stored(checkpoint_dir) if isinstance(s, dc.ShardedTensor)}
        return {
            key: dc.ShardedTensor(key, None, s.dtype, shape, shape, zeros, (1,) * len(shape))
            for key, s in found.items()
            for shape in [tuple(s.global_shape)]
            for zeros in [(0,) * len(shape)]
        }


class AsyncSave(AsyncSaveShardedStrategy):
    """Takes a copy, and writes it when asked to."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        leaves, skeleton = flatten(sharded_state_dict)
        staged = {path: leaf.without_data() for path, leaf in leaves.items()}
        for path, leaf in leaves.items():
            staged[path].data = leaf.data.clone() if hasattr(leaf.data, "clone") else leaf.data
        done = Path(checkpoint_dir) / "strategy-was-finalized"
        return AsyncRequest(
            write, (unflatten(skeleton, staged), Path(checkpoint_dir)), [done.touch]
        )


class TestPlain(FewWorlds, StrategyConformance):
    backend = ("plain", 1)

    def save_strategy(self) -> PlainSave:
        return PlainSave("plain", 1)

    def load_strategy(self) -> PlainLoad:
        return PlainLoad()


class TestAsyncUsedAsSync(StorageProtocol, Failures):
    """What is not the same for both: the files are written by the same function."""

    backend = ("plain", 1)

    def save_strategy(self) -> AsyncSave:
        return AsyncSave("plain", 1)

    def load_strategy(self) -> PlainLoad:
        return PlainLoad()


def test_one_method_is_enough(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Tiny(SaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            seen.append(sharded_state_dict)
            (Path(checkpoint_dir) / "mine").touch()

    one, two = shard("a", torch.ones(2)), shard("b", torch.ones(3))
    rng = dc.ShardedObject("rng", [1], (1,), (0,))
    state = {"model": {"a": one, "list": [7, two]}, "rng": rng, "step": 3}
    dc.save(state, tmp_path / "c", Tiny("tiny", 4))
    # Nested as it was, sharded tensors only; the rest is the common strategy's.
    (given,) = seen
    assert given["model"]["a"] is one
    assert given["model"]["list"] == {1: two}
    assert "step" not in given
    assert "rng" not in given
    assert (tmp_path / "c" / "mine").exists()
    assert (tmp_path / "c" / "rng" / "shard_0_1.pt").exists()
    assert json.loads((tmp_path / "c" / "metadata.json").read_text()) == {
        "sharded_backend": "tiny",
        "sharded_backend_version": 4,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


@pytest.mark.parametrize("answer", [True, False])
def test_can_handle_sharded_objects_may_be_a_method(tmp_path: Path, answer: bool) -> None:
    class Save(PlainSave):
        def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
            return answer

    class Load(PlainLoad):
        def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
            return answer

        def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
            stored = self.stored(checkpoint_dir)
            objects = [s.without_data() for s in stored if isinstance(s, dc.ShardedObject)]
            tensors = self.load_tensors_metadata(checkpoint_dir)
            return {**tensors, **{o.unique_key: o for o in objects}}

    def state(rng: object) -> dict[str, Any]:
        cell = dc.ShardedObject("rng", rng, (1,), (0,))
        return {"w": shard("w", torch.ones(2)), "deep": [{"rng": cell}, 5]}

    dc.save(state([1, 2]), tmp_path / "c", Save("plain", 1))
    by_common = list((tmp_path / "c").rglob("shard_0_1.pt"))
    assert bool(by_common) is not answer
    result = dc.load(state(None), tmp_path / "c", Load())
    assert result["deep"] == [{"rng": [1, 2]}, 5]
    assert dc.load_sharded_metadata(tmp_path / "c", Load()).keys() == {"w", "rng/shard_0_1"}


class TestAsync:
    def request(self, folder: Path, data: torch.Tensor, **options: Any) -> AsyncRequest:
        strategy = AsyncSave("plain", 1)
        state = {"w": shard("w", data), "step": 3}
        request = dc.save(state, folder, strategy, async_sharded_save=True, **options)
        assert request is not None
        return request

    def test_a_failing_write_commits_nothing(self, tmp_path: Path) -> None:
        request = self.request(tmp_path / "c", torch.ones(2))

        def fail(*_: object) -> None:
            raise OSError(28, "no space left on device")

        with pytest.raises(dc.CheckpointingException, match="no space left"):
            request._replace(async_fn=fail).execute_sync()
        assert not dc.check_is_distributed_checkpoint(tmp_path / "c")

    def test_a_live_request_owns_its_folder(self, tmp_path: Path) -> None:
        request = self.request(tmp_path / "c", torch.ones(2))
        with pytest.raises(dc.CheckpointingException, match="another save"):
            dc.save({"w": shard("w", torch.zeros(2))}, tmp_path / "c", PlainSave("plain", 1))
        request.execute_sync()
        result = dc.load({"w": shard("w", torch.empty(2))}, tmp_path / "c", PlainLoad())
        assert torch.equal(result["w"], torch.ones(2))

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the lock that went with it
    def test_a_dropped_request_frees_its_folder(self, tmp_path: Path) -> None:
        request = self.request(tmp_path / "c", torch.ones(2))
        del request
        gc.collect()
        assert not dc.check_is_distributed_checkpoint(tmp_path / "c")
        dc.save({"w": shard("w", torch.zeros(2))}, tmp_path / "c", PlainSave("plain", 1))
        assert dc.check_is_distributed_checkpoint(tmp_path / "c")

    @pytest.mark.parametrize(
        ("kind", "capture"), [(PlainSave, "copy"), (PlainSave, "background"), (AsyncSave, "copy")]
    )
    def test_behind_the_training(self, tmp_path: Path, kind: Any, capture: Any) -> None:
        """Strategies of a third party run in the thread, on copies."""
        data, values = torch.arange(4.0), [1, 2]
        state = {"w": shard("w", data), "o": dc.ShardedObject("o", values, (1,), (0,)), "step": 3}
        handle = dc.async_save(state, tmp_path / "c", kind("plain", 1), capture=capture)
        handle.captured.wait()
        data.zero_()
        values.clear()
        handle.result(30)
        template = {"w": shard("w", torch.empty(4)), "o": dc.ShardedObject("o", None, (1,), (0,))}
        result = dc.load(template, tmp_path / "c", PlainLoad())
        assert (result["step"], result["o"]) == (3, [1, 2])
        assert torch.equal(result["w"], torch.arange(4.0))

    def test_a_frozen_request_takes_no_more_steps(self) -> None:
        request = AsyncRequest(None, (), [])
        request.add_finalize_fn(lambda: None)
        with pytest.raises(RuntimeError, match="frozen"):
            request.freeze().add_finalize_fn(lambda: None)

    def test_preload_replaces_the_second_argument(self) -> None:
        seen: list[tuple[object, ...]] = []

        def run(*args: object, **kwargs: object) -> None:
            seen.append((*args, kwargs))

        request = AsyncRequest(run, (1, None, 3), [], {"k": 4}, lambda: 2)
        request.execute_sync()
        assert seen == [(1, 2, 3, {"k": 4})]


def test_a_checkpoint_is_opened_without_a_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_strategies["load_sharded"], ("plain", 1), PlainLoad())
    full = {
        "w": torch.arange(40.0).reshape(8, 5),
        "scalar": torch.tensor(3),
        "half": torch.arange(6).bfloat16(),
    }
    copied, folder = dc.ShardedTensor.from_rank_offsets, tmp_path / "c"

    def state(comm: Any) -> dict[str, Any]:
        return {
            "w": rows("w", full["w"], comm),
            **{k: copied(k, full[k], replica_id=comm.rank) for k in ("scalar", "half")},
            "o": cell("o", [comm.rank], comm),
            "step": 3,
        }

    save_on(2, state, folder, PlainSave("plain", 1))
    checkpoint = dc.Checkpoint.open(folder)
    assert checkpoint.backend == ("plain", 1)
    assert list(checkpoint) == sorted(full)
    for key, tensor in full.items():
        assert checkpoint[key].shape == tuple(tensor.shape)
        assert checkpoint[key].dtype == tensor.dtype
        assert torch.equal(checkpoint[key][...], tensor)
        assert checkpoint[key].num_bytes == tensor.nbytes
        assert checkpoint[key].location(0) == str(folder)
    assert torch.equal(checkpoint["w"][3:6, ::2], full["w"][3:6, ::2])
    assert torch.equal(checkpoint["w"][-1], full["w"][-1])
    assert {key: dict(cells) for key, cells in checkpoint.objects.items()} == {
        "o": {(0,): [0], (1,): [1]}
    }
    assert checkpoint.common == {"step": 3}
    with pytest.raises(dc.UnsupportedFormatError, match="cannot be removed"):
        dc.remove_sharded_tensors(folder, "w")
    dc.verify_checkpoint(folder)
    next((folder / "shards").glob("*.pt")).write_bytes(b"")
    with pytest.raises(dc.CorruptCheckpointError, match="EOFError"):
        dc.verify_checkpoint(folder)


def test_a_rank_without_shards_is_called_too(tmp_path: Path) -> None:
    """A strategy may be collective: no rank may be left out."""
    called: list[int] = []

    def one(comm: Any) -> None:
        class Save(PlainSave):
            def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
                called.append(comm.rank)
                super().save(sharded_state_dict, checkpoint_dir)

        state = {"w": shard("w", torch.ones(2))} if comm.rank == 1 else {}
        dc.save(state, tmp_path / "c", Save("plain", 1), comm=comm)

    run_ranks(3, one)
    assert sorted(called) == [0, 1, 2]
