"""shard_state_dict against whole tensors: every rank of a mesh, one after the other, in a process.

torch's "fake" process group lets this process be any rank; the data of each rank is cut out of the
whole tensor without communication.
"""

import collections
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dist_checkpointing as dc
from dist_checkpointing.interop import shard_state_dict, unshard_state_dict
from dist_checkpointing.testing import run_ranks
from simulated_groups import fake_rank
from tiers import examples

pytestmark = pytest.mark.filterwarnings(
    # Said of the rank's device, which a fake group does not have.
    "ignore:.*device.*:UserWarning"
)

Placements = Sequence[Any]


def on_each_rank(mesh_shape: tuple[int, ...], make: Callable[[Any], Any]) -> list[Any]:
    """``make(mesh)`` as each rank of a mesh calls it."""
    world_size = torch.Size(mesh_shape).numel()
    made = []
    for rank in range(world_size):
        with fake_rank(world_size, rank):
            made.append(make(init_device_mesh("cpu", mesh_shape)))
    return made


def sharded(given: list[Any]) -> list[Any]:
    return run_ranks(len(given), lambda comm: shard_state_dict(given[comm.rank], comm=comm))


def states(mesh_shape: tuple[int, ...], make: Callable[[Any], Any]) -> list[Any]:
    return sharded(on_each_rank(mesh_shape, make))


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def cut(tensor: torch.Tensor, mesh: Any, placements: Placements) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def save_all(shards: list[Any], folder: Path) -> None:
    run_ranks(len(shards), lambda comm: dc.save(shards[comm.rank], folder, comm=comm))


def fsdp_over_tp(tensor: torch.Tensor, mesh: Any, axis: int) -> DTensor:
    """What fully_shard makes of a tensor that tensor parallelism has cut along the same axis."""
    (dp, tp), (own_dp, own_tp) = mesh.shape, mesh.get_coordinate()
    local = chunk(chunk(tensor, tp, own_tp, axis), dp, own_dp, axis)
    placements = [_StridedShard(axis, split_factor=tp), Shard(axis)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def chunk(tensor: torch.Tensor, count: int, index: int, axis: int) -> torch.Tensor:
    parts = tensor.chunk(count, axis)
    return parts[index] if index < len(parts) else tensor.narrow(axis, 0, 0)


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Placements]] = {
    "columns": ((4,), (3, 8), [Shard(1)]),
    "uneven, some ranks empty": ((4,), (5, 3), [Shard(0)]),
    "fewer rows than ranks": ((4,), (2, 3), [Shard(0)]),
    "hybrid, uneven": ((2, 3), (7, 2), [Replicate(), Shard(0)]),
    "two axes, uneven": ((2, 3), (5, 7), [Shard(1), Shard(0)]),
    "one axis twice, uneven": ((2, 3), (11, 3), [Shard(0), Shard(0)]),
    "three axes": ((2, 2, 2), (4, 3, 6), [Replicate(), Shard(2), Shard(0)]),
    "all replicated": ((2, 2), (3,), [Replicate(), Replicate()]),
    "scalar": ((2, 2), (), [Replicate(), Replicate()]),
    "empty": ((2,), (0, 3), [Shard(0)]),
    "interleaved rows": ((2,), (8, 3), [_StridedShard(0, split_factor=2)]),
    "interleaved both ways": (
        (2, 2),
        (8, 12),
        [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_placement_saves_the_whole_tensor_and_loads_in_place(
    case: str, tmp_path: Path
) -> None:
    mesh_shape, shape, placements = CASES[case]
    full = whole(*shape)
    save_all(states(mesh_shape, lambda mesh: {"w": cut(full, mesh, placements)}), tmp_path / "c")
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], full)

    expected = on_each_rank(mesh_shape, lambda mesh: cut(full, mesh, placements).to_local())
    given = on_each_rank(
        mesh_shape, lambda mesh: {"w": cut(torch.zeros_like(full), mesh, placements)}
    )
    templates = sharded(given)
    found = run_ranks(
        len(given), lambda comm: dc.load(templates[comm.rank], tmp_path / "c", comm=comm)
    )
    for own, loaded, part in zip(given, found, expected, strict=True):
        memory = own["w"].to_local().data_ptr()
        restored = unshard_state_dict(loaded, own)
        assert restored["w"] is own["w"]
        assert restored["w"].to_local().data_ptr() == memory == loaded["w"].data_ptr()
        assert torch.equal(restored["w"].to_local(), part)

    def as_one_shard(mesh: Any) -> dict[str, dc.ShardedTensor]:
        return {"w": dc.ShardedTensor.from_dtensor("w", cut(full, mesh, placements))}

    if case.startswith("interleaved"):
        with pytest.raises(dc.InvalidShardingError, match=r"not neighbours.*shard_state_dict"):
            on_each_rank(mesh_shape, as_one_shard)
    else:
        save_all(on_each_rank(mesh_shape, as_one_shard), tmp_path / "one")
        assert torch.equal(dc.load_plain_tensors(tmp_path / "one")["w"], full)


def test_a_wrapped_state_travels_between_processes(tmp_path: Path) -> None:
    mesh_shape, shape, placements = CASES["interleaved rows"]
    full = whole(*shape)
    sent = states(mesh_shape, lambda mesh: {"w": cut(full, mesh, placements)})
    save_all(pickle.loads(pickle.dumps(sent)), tmp_path)
    assert torch.equal(dc.load_plain_tensors(tmp_path)["w"], full)


def test_what_is_no_dtensor_of_this_rank_is_refused() -> None:
    with pytest.raises(dc.InvalidShardingError, match="not a DTensor"):
        dc.ShardedTensor.from_dtensor("w", torch.ones(2))  # type: ignore[arg-type]
    with fake_rank(2, 1):
        mesh = DeviceMesh("cpu", [0])
        other = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(dc.InvalidShardingError, match="not in the mesh"):
            dc.ShardedTensor.from_dtensor("w", other)


@examples(25)
@given(
    extent=st.integers(0, 40), dp=st.integers(1, 4), tp=st.integers(1, 4), axis=st.integers(0, 1)
)
# The last rank of dp has nothing of the first half and one row of the second.
@example(extent=9, dp=4, tp=2, axis=0)
def test_fsdp_over_tensor_parallel_on_one_axis(
    tmp_path_factory: pytest.TempPathFactory, extent: int, dp: int, tp: int, axis: int
) -> None:
    """Also where the extent is uneven, and torch's own offsets are not those of the data."""
    full = whole(extent, 3) if axis == 0 else whole(3, extent)
    folder = tmp_path_factory.mktemp("saved")
    save_all(states((dp, tp), lambda mesh: {"w": fsdp_over_tp(full, mesh, axis)}), folder)
    assert torch.equal(dc.load_plain_tensors(folder)["w"], full)


def test_replicas_are_numbered_in_rank_order_and_even_cuts_are_a_grid() -> None:
    found = states((2, 2), lambda mesh: {"w": cut(whole(4, 2), mesh, [Replicate(), Shard(0)])})
    assert [state["w"].replica_id for state in found] == [0, 0, 1, 1]
    assert [state["w"].global_offset for state in found] == [(0, 0), (2, 0)] * 2
    both = states((2, 2), lambda mesh: {"w": cut(whole(4), mesh, [Replicate(), Replicate()])})
    assert [state["w"].replica_id for state in both] == [0, 1, 2, 3]
    plain = states((3,), lambda _: {"w": whole(2)})
    assert [state["w"].replica_id for state in plain] == [0, 1, 2]
    even = states((2, 2), lambda mesh: {"w": fsdp_over_tp(whole(8, 3), mesh, 0)})
    assert [state["w"].axis_fragmentations for state in even] == [(4, 1)] * 4
    uneven = states((4,), lambda mesh: {"w": cut(whole(7, 3), mesh, [Shard(0)])})
    assert [state["w"].axis_fragmentations for state in uneven] == [None] * 4


def test_nesting_keys_and_other_values() -> None:
    step = torch.tensor(3.0)
    state: dict[str, Any] = {
        "model": collections.OrderedDict({"layers.0.weight": whole(2, 2)}),
        "optim": {"state": {0: {"step": step}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]},
        "list": [whole(2), 7, (whole(3), "text")],
        "empty": {},
        "none": None,
    }
    found = shard_state_dict(state)
    assert found["optim"]["param_groups"] is state["optim"]["param_groups"]
    assert (found["empty"], found["none"], found["list"][1]) == ({}, None, 7)
    assert type(found["model"]) is collections.OrderedDict
    leaf = found["optim"]["state"][0]["step"]
    assert isinstance(leaf, dc.ShardedTensor)
    assert (leaf.key, leaf.replica_id, leaf.global_shape) == ("optim.state.0.step", 0, ())
    assert leaf.data is not None
    assert leaf.data.data_ptr() == step.data_ptr()
    assert found["model"]["layers.0.weight"].key == "model.layers.0.weight"
    assert found["list"][0].key == "list.0"
    assert found["list"][2][0].key == "list.2.0"
    assert isinstance(state["list"][0], torch.Tensor), "the given state dict is changed"


def test_partial_sums_and_clashing_names_are_refused_all_at_once() -> None:
    def make(mesh: Any) -> Any:
        partial = DTensor.from_local(whole(3), mesh, [Partial()], run_check=False)
        return {"loss": partial, "a": {"b": whole(1)}, "a.b": whole(2), "grad": [partial]}

    with pytest.raises(dc.InvalidShardingError) as raised:
        states((2,), make)
    assert sorted(str(finding.key) for finding in raised.value.findings) == [
        "a.b",
        "grad.0",
        "loss",
    ]
    text = str(raised.value)
    assert "Partial" in text
    assert "redistribute" in text
    assert "state_dict['a']['b'], state_dict['a.b']" in text


def test_a_local_tensor_that_contradicts_its_placements_is_refused() -> None:
    def make(mesh: Any) -> Any:
        return DTensor.from_local(
            whole(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
        )

    with pytest.raises(dc.InvalidShardingError, match="not what the placements say"):
        states((2,), lambda mesh: {"w": make(mesh)})


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    class Scattered(torch.Tensor):
        def local_shards(self) -> list[torch.Tensor]:
            return []

    tensor = whole(2).as_subclass(Scattered)
    with pytest.raises(dc.InvalidShardingError, match=r"no memory.*found Scattered"):
        shard_state_dict({"w": tensor})


def test_a_rank_outside_of_the_mesh_stores_nothing_and_keeps_its_own(tmp_path: Path) -> None:
    given = []
    for rank in range(3):
        with fake_rank(3, rank):
            mesh = dist.device_mesh.DeviceMesh("cpu", [0, 2])
            given.append({"w": cut(whole(4, 2), mesh, [Shard(0)])})
    found = sharded(given)
    assert isinstance(found[1]["w"], dc.LocalNonpersistentObject)
    save_all(found, tmp_path)
    assert torch.equal(dc.load_plain_tensors(tmp_path)["w"], whole(4, 2))
    loaded = run_ranks(3, lambda comm: dc.load(found[comm.rank], tmp_path, comm=comm))
    assert loaded[1]["w"] is given[1]["w"]


def test_replicas_on_meshes_side_by_side_and_tensors_on_few_ranks(tmp_path: Path) -> None:
    """Each tensor parallel mesh knows only itself; a pipeline stage has tensors of its own."""
    given: list[dict[str, Any]] = []
    for rank in range(4):
        with fake_rank(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
            given.append({"w": cut(whole(4, 2), mesh, [Shard(0)]), f"stage.{rank // 2}": whole(2)})
    found = sharded(given)
    assert [state["w"].replica_id for state in found] == [0, 0, 1, 1]
    assert [state[f"stage.{r // 2}"].replica_id for r, state in enumerate(found)] == [0, 1, 0, 1]
    save_all(found, tmp_path)
    tensors = dc.load_plain_tensors(tmp_path)
    assert tensors.keys() == {"w", "stage.0", "stage.1"}
    assert torch.equal(tensors["w"], whole(4, 2))


def test_all_ranks_hear_of_a_tensor_that_one_of_them_cannot_shard() -> None:
    with fake_rank(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(whole(3), mesh, [Partial()], run_check=False)

    def one(comm: Any) -> str:
        with pytest.raises(dc.InvalidShardingError) as raised:
            shard_state_dict({"w": partial if comm.rank == 1 else whole(3)}, comm=comm)
        assert [finding.ranks for finding in raised.value.findings] == [(1,)]
        return str(raised.value)

    assert len(set(run_ranks(2, one))) == 1
