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


def shard(key: str, data: torch.Tensor, rank: int = 0, count: int = 1) -> dc.ShardedTensor:
    """Part ``rank`` of ``count`` along the first axis."""
    return dc.ShardedTensor.from_rank_offsets(key, data, (0, rank, count))


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
    own: Any = None
    below: list[Any] = []
    if isinstance(value, ShardedBase):
        own = sorted(vars(value))
        below = [getattr(value, field.name) for field in fields(value)]  # type: ignore[arg-type]
    elif isinstance(value, dc.LocalNonpersistentObject):
        below = [value.obj]
    elif isinstance(value, torch.Tensor):
        seen = value.tolist() if contents else None
        own = value.data_ptr(), value.stride(), value.shape, value.dtype, value.requires_grad, seen
    elif isinstance(value, dict):
        own = getattr(value, "owner", None)
        below = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        below = [*value]
    else:
        own = repr(value)
    return type(value), id(value), own, [picture(each, contents=contents) for each in below]


@contextmanager
def unchanged(nest: Any, *, contents: bool = True) -> Iterator[None]:
    """The body leaves all of it as it is; without ``contents``, all but values of tensors."""
    before = picture(nest, contents=contents)
    yield
    assert picture(nest, contents=contents) == before


def test_saves_leave_the_state_dict_as_it_was(tmp_path: Path) -> None:
    """Also those that fail."""

    def save_rank(comm: Comm) -> None:
        state = everything(comm.rank, 2)
        with unchanged(state):
            dc.save(state, tmp_path / "c", comm=comm, content_metadata={"version": 1})
        with unchanged(state), pytest.raises(dc.CheckpointExistsError):
            dc.save(state, tmp_path / "c", comm=comm)
        state["gap"] = shard("gap", torch.ones(2), 0, 2)
        with unchanged(state), pytest.raises(dc.InvalidShardingError):
            dc.save(state, tmp_path / "d", comm=comm)

    run_ranks(2, save_rank)


def strip(container: Any) -> None:
    """Take the data out of all ShardedTensors, in place."""
    for below in container.values() if isinstance(container, dict) else container:
        if isinstance(below, dc.ShardedTensor):
            below.data = None
        elif isinstance(below, dict | list | tuple):
            strip(below)


def test_a_load_that_is_refused_changes_no_tensor_of_any_rank(tmp_path: Path) -> None:
    """A leaf with allow_shape_mismatch is zeroed before it is filled: not before all agree."""
    save_on(2, lambda comm: everything(comm.rank, 2), tmp_path / "c")

    def load_rank(comm: Comm) -> None:
        template = everything(comm.rank, 2, fill=-1.0)
        template["cut"] = dc.ShardedTensor.from_rank_offsets(
            "weight", torch.full((5, 3), 5.0), allow_shape_mismatch=True
        )
        if comm.rank == 1:
            template["extra"] = shard("not in the checkpoint", torch.zeros(1))
        error = pytest.raises(dc.StateMismatchError, match="not in the checkpoint")
        with unchanged(template), error:
            dc.load(template, tmp_path / "c", comm=comm)

    run_ranks(2, load_rank)


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
    """And leaves the template as it was, but for the values in given tensors."""
    folder = tmp_path / "c"
    state_of = [everything(rank, 2) for rank in range(2)]
    save_on(2, lambda comm: state_of[comm.rank], folder, file_format)

    def load_rank(comm: Comm) -> None:
        template = everything(comm.rank, 2, fill=-1.0)
        original = copy.copy(state_of[comm.rank])
        if comm.rank == 1:  # common state is that of rank 0
            del template["fused"], original["fused"], template["factories"], original["factories"]
        if not with_data:
            strip(template)
        with unchanged(template, contents=False):
            loaded: Any = dc.load(template, folder, comm=comm)
        extra = {key: loaded.pop(key) for key in list(loaded) if key not in template}
        assert extra == ({"factories": [None, "between"]} if comm.rank == 1 else {})
        assert_loaded(loaded, template, original, "state_dict")
        assert loaded["registry"].owner == "test"
        assert loaded["counts"].default_factory is list

    run_ranks(2, load_rank)


def test_the_common_state_of_the_checkpoint_wins(tmp_path: Path) -> None:
    nested = {"a": 1, "e": OrderedDict(), "w": shard("w", torch.ones(2))}
    dc.save({"step": 7, "only saved": [1, ()], "nested": nested}, tmp_path / "c")
    template = {
        "step": -1,
        "only wanted": "ignored",
        "nested": {"a": -1, "b": "ignored", "w": shard("w", torch.empty(2))},
    }
    loaded: Any = dc.load(template, tmp_path / "c")
    assert torch.equal(loaded["nested"].pop("w"), torch.ones(2))
    assert loaded == {"step": 7, "only saved": [1, ()], "nested": {"a": 1, "e": OrderedDict()}}
    assert type(loaded["nested"]["e"]) is OrderedDict
    assert template["only wanted"] == "ignored"


def test_one_leaf_at_two_places_is_filled_at_both(tmp_path: Path) -> None:
    """Tied weights: two leaves with one key, and one leaf at two places; and objects."""
    values, cell = torch.arange(4.0), dc.ShardedObject("o", {"a": [1]}, (1,), (0,))
    other = dc.ShardedTensor.from_rank_offsets("tied", values, replica_id=1)
    dc.save({"a": shard("tied", values), "b": other, "o": cell}, tmp_path / "c")
    one, apart = shard("tied", torch.empty(4)), shard("tied", torch.empty(4))
    asked = dc.ShardedObject("o", None, (1,), (0,))
    template = {"a": one, "b": one, "c": [apart], "x": asked, "y": [asked]}
    loaded: Any = dc.load(template, tmp_path / "c")
    assert loaded["a"] is loaded["b"] is one.data
    assert loaded["c"][0] is apart.data
    assert all(torch.equal(found, values) for found in (loaded["a"], *loaded["c"]))
    assert loaded["x"] == loaded["y"][0] == {"a": [1]}
    assert asked.data is None
