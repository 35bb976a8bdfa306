"""A plan is used again when nothing has changed, and never when anything has."""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import between, shard

WORLD = 3
State = dict[str, Any]


def state(rank: int, step: int = 0) -> State:
    def rows(key: str, count: int) -> dc.ShardedTensor:
        return shard(key, torch.full((count, 4), float(10 * step + rank)), (0, rank, WORLD))

    return {
        "a": rows("a", 2),
        "b": rows("b", 5),
        "norm": shard("norm", torch.full((3,), float(step)), replica_id=rank),
        "rng": dc.ShardedObject("rng", step, (WORLD,), (rank,)),
    }


def add(own: State, _rank: int) -> None:
    own["new"] = shard("new", torch.ones(2))


def drop(own: State, _rank: int) -> None:
    del own["rng"]  # its cell is then missing: an error that a stale plan would hide


def give_to_another(own: State, rank: int) -> None:
    own["norm"].replica_id = 0 if rank == 1 else 7


def reorder(own: State, _rank: int) -> None:
    own["a"] = own.pop("a")


def save_all(
    folder: Path,
    make: Callable[[int], State],
    caches: Sequence[dc.PlanCache | None],
    backend: str = "tensorstore",
) -> None:
    def save_rank(comm: Comm) -> None:
        dc.save(make(comm.rank), folder, backend, comm=comm, plan_cache=caches[comm.rank])

    run_ranks(len(caches), save_rank)


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    planned: list[int] = []
    build = DefaultSavePlanner.build_local_plan

    def counted(self: DefaultSavePlanner) -> SavePlan:
        planned.append(1)
        return build(self)

    monkeypatch.setattr(DefaultSavePlanner, "build_local_plan", counted)
    return planned


@pytest.mark.parametrize("backend", ["tensorstore", "torch_dist"])
def test_new_values_are_saved_with_the_old_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    planned = count_plans(monkeypatch)
    caches = [dc.PlanCache() for _ in range(WORLD)]
    for step in range(3):
        save_all(tmp_path / str(step), partial(state, step=step), caches, backend)
        assert len(planned) == WORLD  # the first save only
        loaded = dc.load_plain_tensors(tmp_path / str(step))
        for rank in range(WORLD):
            assert (loaded["b"][5 * rank : 5 * rank + 5] == 10 * step + rank).all()
        assert (loaded["norm"] == step).all()


Change = Callable[[State, int], None]


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        (add, 2),
        (drop, 1),
        (give_to_another, 0),
        (give_to_another, 1),
        (reorder, 1),
    ],
)
def test_any_change_on_any_one_rank_is_noticed(tmp_path: Path, change: Change, rank: int) -> None:
    """What a save does with a cache from before the change, it does without one."""

    def outcome(folder: Path, caches: Sequence[dc.PlanCache | None]) -> Any:
        def changed(own_rank: int) -> State:
            own = state(own_rank, 1)
            if own_rank == rank:
                change(own, rank)
            return own

        try:
            save_all(folder, changed, caches)
        except Exception as error:  # noqa: BLE001 - to be compared with the other one
            return type(error), str(error).replace(str(folder), "")
        tensors = dc.load_plain_tensors(folder)
        return {key: value.tolist() for key, value in tensors.items()}

    caches = [dc.PlanCache() for _ in range(WORLD)]
    save_all(tmp_path / "first", state, caches)
    assert outcome(tmp_path / "cached", caches) == outcome(tmp_path / "fresh", [None] * WORLD)


FIELDS: dict[type[dc.ShardedTensor | dc.ShardedObject], dict[str, Any]] = {
    dc.ShardedTensor: {
        "key": "b",
        "data": torch.ones(2, 4, dtype=torch.float64),
        "dtype": torch.float64,
        "local_shape": (1, 4),
        "global_shape": (8, 4),
        "global_offset": (2, 0),
        "axis_fragmentations": None,
        "replica_id": 1,
        "prepend_axis_num": 1,
        "allow_shape_mismatch": True,
        "flattened_range": slice(0, 4),
    },
    dc.ShardedObject: {"key": "b", "global_shape": (3,), "global_offset": (1,), "replica_id": 1},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FIELDS.items() for name in names]
)
def test_every_field_of_a_leaf_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str
) -> None:
    assert {field.name for field in fields(kind)} - FIELDS[kind].keys() <= {"data"}
    if kind is dc.ShardedTensor:
        leaves: list[Any] = [shard("a", torch.ones(2, 4), (0, i, 2)) for i in range(2)]
    else:
        leaves = [dc.ShardedObject("a", i, (2,), (i,)) for i in range(2)]
    planned = count_plans(monkeypatch)
    cache = dc.PlanCache()

    for number in range(3):
        if number == 2:
            setattr(leaves[0], name, FIELDS[kind][name])
        with suppress(dc.InvalidShardingError):
            dc.save({"leaves": leaves}, tmp_path / str(number), plan_cache=cache)
        assert len(planned) == 1 + (number == 2)


def test_a_list_that_is_changed_in_place_is_noticed(tmp_path: Path) -> None:
    cache, full = dc.PlanCache(), torch.tensor([1.0, 1, 0, 0])
    own, other = between("a", full, 0, 2), between("a", full, 2, 4)
    own.global_offset = [0]  # type: ignore[assignment]  # the constructor makes tuples
    dc.save({"x": own, "y": other}, tmp_path / "1", plan_cache=cache)
    own.global_offset[0], other.global_offset = 2, (0,)  # type: ignore[index]
    dc.save({"x": own, "y": other}, tmp_path / "2", plan_cache=cache)
    assert dc.load_plain_tensors(tmp_path / "1")["a"].tolist() == [1, 1, 0, 0]
    assert dc.load_plain_tensors(tmp_path / "2")["a"].tolist() == [0, 0, 1, 1]


def test_caches_that_do_not_belong_together_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [[dc.PlanCache() for _ in range(2)] for _ in range(2)]

    def whole(rank: int, writer: int) -> State:
        return {"w": shard("w", torch.full((4,), float(rank)), replica_id=abs(rank - writer))}

    for writer in range(2):
        save_all(tmp_path / f"of {writer}", partial(whole, writer=writer), caches[writer])
    planned = count_plans(monkeypatch)
    # Rank 0 is as in the first save, where it wrote; so is rank 1 as in the second: both write.
    with pytest.raises(dc.InvalidShardingError, match="w"):
        save_all(tmp_path / "mixed", lambda rank: whole(rank, rank), [caches[0][0], caches[1][1]])
    assert len(planned) == 2


def test_ranks_without_a_cache_and_ranks_with_one_save_together(tmp_path: Path) -> None:
    caches = [dc.PlanCache(), None, None]
    for step in range(2):
        save_all(tmp_path / str(step), partial(state, step=step), caches)
    assert (dc.load_plain_tensors(tmp_path / "1")["norm"] == 1).all()


def test_a_planner_of_the_user_plans_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(DefaultSavePlanner):
        """One of a user."""

    planned, cache = count_plans(monkeypatch), dc.PlanCache()
    strategy = TensorStoreSaveShardedStrategy(planner=Own())
    for step in range(2):
        leaf = shard("w", torch.ones(2))
        dc.save({"w": leaf}, tmp_path / str(step), strategy, plan_cache=cache)
    assert len(planned) == 2


def test_a_cache_keeps_no_values_alive(tmp_path: Path) -> None:
    cache = dc.PlanCache()
    data = torch.ones(4)
    seen = weakref.ref(data)
    dc.save({"w": shard("w", data)}, tmp_path, plan_cache=cache)
    del data
    gc.collect()
    assert seen() is None
