"""The caller's state dict is read, never changed; what load returns is nested like it."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.testing import run_ranks
from states import FORMAT, save_on


class Moments(NamedTuple):
    average: Any
    variance: Any


class Registry(dict[Any, Any]):
    """A dict of a class of its own, with an attribute."""

    owner = "nobody"


def shard(key: str, data: torch.Tensor | None, rank: int = 0, count: int = 1) -> dc.ShardedTensor:
    """Part ``rank`` of ``count`` along the first axis; ``data`` None only describes."""
    shape = torch.empty(2, 3) if data is None else data
    made = dc.ShardedTensor.from_rank_offsets(key, shape, (0, rank, count))
    return made.without_data() if data is None else made


def fused(key: str, data: torch.Tensor) -> dc.ShardedTensorFactory:
    """Saved as two tensors, used as one."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        del flattened_range
        gate, up = data.chunk(2)
        return {
            "gate": dc.ShardedTensor.from_rank_offsets(f"{key}.gate", gate, replica_id=replica_id),
            "up": [dc.ShardedTensor.from_rank_offsets(f"{key}.up", up, replica_id=replica_id)],
        }

    return dc.ShardedTensorFactory(
        key, data, build, lambda parts: torch.cat([parts["gate"], parts["up"][0]])
    )


def everything(rank: int, count: int, *, fill: float | None = None) -> dict[Any, Any]:
    """A state dict with one of everything; ``fill`` makes it a template of other values."""

    def values(*shape: int) -> torch.Tensor:
        if fill is not None:
            return torch.full(shape, fill)
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * rank

    shared = values(2, 3)
    registry = Registry(weight=shard("registry.weight", values(2, 3), rank, count))
    registry.owner = "test"
    counts: defaultdict[str, Any] = defaultdict(list)
    counts["average"] = shard("counts.average", values(2), rank, count)
    return {
        "model": OrderedDict(
            weight=shard("weight", values(2, 3), rank, count),
            bias=shard("bias", values(3, 2).t(), rank, count),
            parameter=shard("parameter", torch.nn.Parameter(values(2, 3)), rank, count),
            frozen=shard(
                "frozen", torch.nn.Parameter(values(2), requires_grad=False), rank, count
            ),
        ),
        "plain": OrderedDict([("b", 1), ("a", 2)]),
        "only sharded": [
            shard("list.0", values(2), rank, count),
            shard("list.1", shared, rank, count),
        ],
        "mixed": [
            shard("mixed.0", shared, rank, count),
            1,
            None,
            "two",
            shard("mixed.4", values(1), rank, count),
        ],
        "tuple": ("step", shard("tuple.1", values(2, 3), rank, count), [0.5]),
        "plain tuple": (0.9, (0.95, [1])),
        "moments": Moments(shard("moments.average", values(2), rank, count), "no variance"),
        "empty": {"dict": {}, "list": [], "tuple": (), "ordered": OrderedDict(), "in": [[], {}]},
        "empty beside a shard": {"w": shard("beside", values(2), rank, count), "e": {}, "l": []},
        1: shard("key.int", values(2), rank, count),
        "1": shard("key.str", values(2), rank, count),
        2: "int two",
        "2": "str two",
        ("a", 3): "tuple key",
        None: shard("key.none", values(2), rank, count),
        "fused": fused("fused", torch.nn.Parameter(values(4, 2))) if rank == 0 else "no factory",
        "factories": [fused("fused.list", values(2, 2)), "between"] if rank == 0 else [None, "x"],
        "local": {"timer": dc.LocalNonpersistentObject(["local", rank]), "kept": True},
        "locals": [dc.LocalNonpersistentObject(rank), "between", dc.LocalNonpersistentObject(None)],
        "rng": dc.ShardedObject("rng", {"seed": rank, "fill": fill}, (count,), (rank,)),
        "rngs": [dc.ShardedObject("rng.list", (rank, "state"), (count,), (rank,)), 7],
        "registry": registry,
        "counts": counts,
        "tensor": torch.arange(3),
        "shape": torch.Size([2, 3]),
        "same list twice": [shared_list := [1, 2], shared_list],
        "flat": dc.ShardedTensor.from_rank_offsets_flat(
            "flat", values(5), (5,), (0, rank, count), flattened_range=slice(0, 5)
        ),
        "prepended": dc.ShardedTensor.from_rank_offsets(
            "prepended", values(2), (0, rank, count), prepend_axis_num=1
        ),
        "replica": dc.ShardedTensor.from_rank_offsets("replica", torch.ones(3), replica_id=rank),
    }  # fmt: skip


def picture(value: Any, *, contents: bool) -> Any:
    """All there is to know about a nest: types, identities, attributes, order, and contents."""
    if isinstance(value, ShardedBase):
        attributes = [
            (f.name, id(getattr(value, f.name)), picture(getattr(value, f.name), contents=contents))
            for f in fields(value)  # type: ignore[arg-type]
        ]
        return type(value), id(value), attributes, sorted(vars(value))
    if isinstance(value, dc.LocalNonpersistentObject):
        return type(value), id(value), picture(value.obj, contents=contents)
    if isinstance(value, torch.Tensor):
        seen = value.detach().clone() if contents else None
        return (
            type(value),
            id(value),
            value.data_ptr(),
            value.stride(),
            value.shape,
            value.dtype,
            value.requires_grad,
            None if seen is None else seen.tolist(),
        )
    if isinstance(value, dict):
        items = [
            (picture(key, contents=contents), picture(below, contents=contents))
            for key, below in value.items()
        ]
        return type(value), id(value), items, getattr(value, "owner", None)
    if isinstance(value, list | tuple):
        return type(value), id(value), [picture(below, contents=contents) for below in value]
    return type(value), id(value), repr(value)


@contextmanager
def unchanged(nest: Any, *, contents: bool = True) -> Iterator[None]:
    """The body leaves all of it as it is; without ``contents``, all but values of tensors."""
    before = picture(nest, contents=contents)
    yield
    assert picture(nest, contents=contents) == before


def save_everything(folder: Path) -> None:
    save_on(2, lambda comm: everything(comm.rank, 2), folder)


@FORMAT
@pytest.mark.parametrize("count", [1, 2])
def test_save_leaves_the_state_dict_as_it_was(
    tmp_path: Path, file_format: tuple[str, int], count: int
) -> None:
    def save_rank(comm: Comm) -> None:
        state = everything(comm.rank, count)
        with unchanged(state):
            dc.save(state, tmp_path / "c", file_format, comm=comm, content_metadata={"version": 1})

    run_ranks(count, save_rank)


def test_a_failing_save_leaves_the_state_dict_as_it_was(tmp_path: Path) -> None:
    save_everything(tmp_path / "c")

    def save_rank(comm: Comm) -> None:
        state = everything(comm.rank, 2)
        with unchanged(state), pytest.raises(dc.CheckpointExistsError):
            dc.save(state, tmp_path / "c", comm=comm)
        state["gap"] = shard("gap", torch.ones(2), 0, 2)
        with unchanged(state), pytest.raises(dc.InvalidShardingError):
            dc.save(state, tmp_path / "d", comm=comm)

    run_ranks(2, save_rank)


@pytest.mark.parametrize("with_data", [True, False])
def test_load_leaves_the_template_as_it_was_but_for_the_values_in_given_tensors(
    tmp_path: Path, *, with_data: bool
) -> None:
    save_everything(tmp_path / "c")

    def load_rank(comm: Comm) -> None:
        template = everything(comm.rank, 2, fill=-1.0)
        if not with_data:
            strip(template)
        with unchanged(template, contents=False):
            dc.load(template, tmp_path / "c", comm=comm)

    run_ranks(2, load_rank)


def strip(container: Any) -> None:
    """Take the data out of all ShardedTensors, in place."""
    for below in container.values() if isinstance(container, dict) else container:
        if isinstance(below, dc.ShardedTensor):
            below.data = None
        elif isinstance(below, dict | list | tuple):
            strip(below)


def test_a_failing_load_leaves_the_template_and_its_tensors_as_they_were(tmp_path: Path) -> None:
    save_everything(tmp_path / "c")

    def load_rank(comm: Comm) -> None:
        template = everything(comm.rank, 2, fill=-1.0)
        if comm.rank == 1:
            template["extra"] = shard("not in the checkpoint", torch.zeros(1))
        error = pytest.raises(dc.StateMismatchError, match="not in the checkpoint")
        with unchanged(template), error:
            dc.load(template, tmp_path / "c", comm=comm)

    run_ranks(2, load_rank)


def test_a_load_that_is_refused_does_not_clear_the_tensors_of_other_ranks(tmp_path: Path) -> None:
    """A leaf with allow_shape_mismatch is zeroed before it is filled: not before all agree."""
    dc.save({"w": shard("w", torch.ones(2, 3))}, tmp_path / "c")

    def load_rank(comm: Comm) -> torch.Tensor:
        weight = torch.full((4, 3), 5.0)
        template: dict[str, Any] = {
            "w": dc.ShardedTensor.from_rank_offsets("w", weight, allow_shape_mismatch=True)
        }
        if comm.rank == 1:
            template["extra"] = shard("not in the checkpoint", torch.zeros(1))
        with pytest.raises(dc.StateMismatchError, match="not in the checkpoint"):
            dc.load(template, tmp_path / "c", comm=comm)
        return weight

    for weight in run_ranks(2, load_rank):
        assert torch.equal(weight, torch.full((4, 3), 5.0))


def assert_loaded(got: Any, template: Any, original: Any, place: str) -> None:
    """``got`` is nested like ``template``, with the values of ``original``."""
    if isinstance(template, dc.LocalNonpersistentObject):
        assert got is template.obj, place
    elif isinstance(template, dc.ShardedObject):
        assert got == original.data, place
    elif isinstance(template, dc.ShardedTensor | dc.ShardedTensorFactory):
        assert torch.equal(got, original.data), place
        if isinstance(template, dc.ShardedTensor) and template.data is not None:
            assert got is template.data, place
    elif isinstance(template, dict | list | tuple) and not isinstance(template, torch.Size):
        assert type(got) is type(template), place
        keys = list(template) if isinstance(template, dict) else range(len(template))
        assert list(got if isinstance(got, dict) else range(len(got))) == list(keys), place
        for key in keys:
            assert_loaded(got[key], template[key], original[key], f"{place}[{key!r}]")
    elif isinstance(template, torch.Tensor):
        assert torch.equal(got, original), place
    else:
        assert got == original, place
        assert type(got) is type(original), place


@FORMAT
@pytest.mark.parametrize("with_data", [True, False])
def test_load_returns_the_same_nesting_with_the_given_tensors_filled(
    tmp_path: Path, file_format: tuple[str, int], *, with_data: bool
) -> None:
    folder = tmp_path / "c"

    state_of = [everything(rank, 2) for rank in range(2)]
    run_ranks(2, lambda comm: dc.save(state_of[comm.rank], folder, file_format, comm=comm))

    def load_rank(comm: Comm) -> None:
        template = everything(comm.rank, 2, fill=-1.0)
        original = copy.copy(state_of[comm.rank])
        if comm.rank == 1:  # common state is that of rank 0
            del template["fused"], original["fused"], template["factories"], original["factories"]
        if not with_data:
            strip(template)
        loaded: Any = dc.load(template, folder, comm=comm)
        extra = {key: loaded.pop(key) for key in list(loaded) if key not in template}
        assert extra == ({"factories": [None, "between"]} if comm.rank == 1 else {})
        assert_loaded(loaded, template, original, "state_dict")
        assert loaded["registry"].owner == "test"
        assert loaded["counts"].default_factory is list

    run_ranks(2, load_rank)


def test_a_parameter_is_filled_in_place_and_returned_as_itself(tmp_path: Path) -> None:
    dc.save({"w": shard("w", torch.arange(6.0).reshape(2, 3))}, tmp_path / "c")
    layer = torch.nn.Linear(3, 2, bias=False)
    assert layer.weight.requires_grad
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    loaded: Any = dc.load({"w": shard("w", layer.weight)}, tmp_path / "c")
    assert loaded["w"] is layer.weight
    assert isinstance(loaded["w"], torch.nn.Parameter)
    assert layer.weight.requires_grad
    assert layer.weight.grad_fn is None
    assert torch.equal(layer.weight, torch.arange(6.0).reshape(2, 3))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, torch.arange(6.0).reshape(2, 3) - 0.5)


def test_the_common_state_of_the_checkpoint_wins(tmp_path: Path) -> None:
    nested = {"a": 1, "w": shard("w", torch.ones(2))}
    dc.save({"step": 7, "only saved": [1], "nested": nested}, tmp_path / "c")
    template = {
        "step": -1,
        "only wanted": "ignored",
        "nested": {"a": -1, "b": "ignored", "w": shard("w", torch.empty(2))},
    }
    loaded: Any = dc.load(template, tmp_path / "c")
    assert torch.equal(loaded["nested"].pop("w"), torch.ones(2))
    assert loaded == {"step": 7, "only saved": [1], "nested": {"a": 1}}
    assert template["only wanted"] == "ignored"


def test_a_template_without_the_common_state_gets_all_of_it(tmp_path: Path) -> None:
    state = {"a": {"b": [shard("w", torch.ones(2)), 5, {"c": 6}]}, "d": 7}
    dc.save(state, tmp_path / "c")
    assert dc.load_common_state_dict(tmp_path / "c") == {"a": {"b": [None, 5, {"c": 6}]}, "d": 7}
    loaded: Any = dc.load({"w": shard("w", torch.empty(2))}, tmp_path / "c")
    assert torch.equal(loaded.pop("w"), torch.ones(2))
    assert loaded == {"a": {"b": [None, 5, {"c": 6}]}, "d": 7}
    assert dc.load({}, tmp_path / "c") == loaded


def test_one_tensor_at_two_places_is_filled_at_both(tmp_path: Path) -> None:
    """Tied weights: two leaves with one key, and one leaf at two places."""
    leaf = shard("tied", torch.arange(4.0))
    other = dc.ShardedTensor.from_rank_offsets("tied", torch.arange(4.0), replica_id=1)
    dc.save({"a": leaf, "b": other}, tmp_path / "c")
    template = shard("tied", torch.empty(4))
    apart = shard("tied", torch.empty(4))
    loaded: Any = dc.load({"a": template, "b": template, "c": [apart]}, tmp_path / "c")
    assert loaded["a"] is loaded["b"] is template.data
    assert loaded["c"][0] is apart.data
    assert template.data is not None
    assert apart.data is not None
    assert template.data.tolist() == apart.data.tolist() == [0, 1, 2, 3]


def test_one_object_asked_for_twice_is_loaded_twice(tmp_path: Path) -> None:
    dc.save({"o": dc.ShardedObject("o", {"a": [1]}, (1,), (0,))}, tmp_path / "c")
    template = dc.ShardedObject("o", None, (1,), (0,))
    loaded: Any = dc.load({"x": template, "y": [template]}, tmp_path / "c")
    assert loaded["x"] == loaded["y"][0] == {"a": [1]}
    assert template.data is None


@pytest.mark.parametrize("empty", [{}, [], (), OrderedDict()], ids=["{}", "[]", "()", "ordered"])
def test_empty_containers_survive(tmp_path: Path, empty: Any) -> None:
    state = {"e": empty, "n": {"e": empty, "w": shard("w", torch.ones(1))}, "l": [empty, 1]}
    dc.save(state, tmp_path / "c")
    template = {"n": {"w": shard("w", torch.empty(1))}}
    loaded: Any = dc.load(template, tmp_path / "c")
    for found in (loaded["e"], loaded["n"]["e"], loaded["l"][0]):
        assert found == empty
        assert type(found) is type(empty)
