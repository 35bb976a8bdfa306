"""dcp.save and dcp.load through DCPWriter and DCPReader, in one process."""

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
    load as dcp_load,
)
from torch.distributed.checkpoint.state_dict_saver import (
    async_save as dcp_async_save,
    save as dcp_save,
)

import dist_checkpointing as dc
from dist_checkpointing.format import leftovers, read_index
from dist_checkpointing.interop import DCPReader, DCPWriter, shard_state_dict
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning import DefaultSavePlanner as OurSavePlanner, RowBlockLayout
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy, TensorStoreWriter
from dist_checkpointing.testing import assert_same_bits
from states import between, bits, flat, shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]

BACKENDS = [("tensorstore", 1), ("zarr", 2), ("zarr", 1)]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: f"{b[0]}-{b[1]}")


@pytest.fixture(autouse=True)
def no_plans_from_another_test() -> None:
    for name in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(SavePlanner, name).clear()


def state(first: int = 1) -> dict[str, Any]:
    numbers = torch.arange(first, first + 24)
    return {
        "model": {
            "layers.0.weight": numbers.reshape(6, 4).float(),
            "layers.0.bias": numbers[:6].to(torch.bfloat16),
            "scale": torch.tensor(float(first)),
            "none of it": torch.empty(0, 3),
        },
        "optim": {
            "state": {"layers.0.weight": {"exp_avg": numbers.reshape(6, 4).double(), "step": 3}},
            "param_groups": [{"lr": 0.25, "betas": (0.9, 0.95), "params": ["layers.0.weight"]}],
        },
        "mixed": [numbers[:3] * 1, first, "text", {"deep": numbers[3:5] * 1, "n": None}],
        "step": first,
        "scalars": [1, 2.5, "three"],
    }


def empty_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: empty_like(child) for key, child in value.items()}
    if isinstance(value, list):
        return [empty_like(child) for child in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def save_through(folder: Path, given: dict[str, Any], backend: Any = "tensorstore") -> None:
    dcp_save(given, storage_writer=DCPWriter(folder, backend))


def read_back(folder: Path, expected: dict[str, Any], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = empty_like(expected)
    dcp_load(found, storage_reader=DCPReader(folder), **options)
    return found


@backends
def test_a_save_of_dcp_is_an_ordinary_checkpoint(tmp_path: Path, backend: tuple[str, int]) -> None:
    folder = tmp_path / "of dcp"
    save_through(folder, state(), backend)
    assert bits(read_back(folder, state())) == bits(state())
    assert bits(read_back(folder, state(), no_dist=True)) == bits(state())
    assert dc.check_is_distributed_checkpoint(folder)
    config = json.loads((folder / "metadata.json").read_text())
    assert (config["sharded_backend"], config["sharded_backend_version"]) == backend
    template = shard_state_dict(empty_like(state()))
    assert bits(dc.load(template, folder, verify=True)) == bits(state())
    tensors = dc.load_plain_tensors(folder)
    assert torch.equal(tensors["model.layers.0.weight"], state()["model"]["layers.0.weight"])
    if backend != ("zarr", 1):
        index = read_index(folder)
        assert index is not None
        assert index["model.layers.0.bias"].dtype.name == "bfloat16"
    dc.save(shard_state_dict(state()), tmp_path / "ours", backend)
    assert bits(read_back(tmp_path / "ours", state())) == bits(state())


@backends  # some leave objects to the common strategy
def test_sharded_objects_have_their_unique_keys(tmp_path: Path, backend: tuple[str, int]) -> None:
    objects = [dc.ShardedObject("rng", {"seed": cell}, (2,), (cell,)) for cell in range(2)]
    dc.save({"a": objects, "w": shard("w", torch.ones(3))}, tmp_path, backend)
    found: dict[str, Any] = {"rng/shard_1_2": None, "rng/shard_0_2": None, "w": torch.zeros(3)}
    dcp_load(found, storage_reader=DCPReader(tmp_path))
    assert [found[f"rng/shard_{cell}_2"] for cell in range(2)] == [{"seed": 0}, {"seed": 1}]
    assert torch.equal(found["w"], torch.ones(3))


def test_parts_of_any_cut_are_read_as_one_tensor(tmp_path: Path) -> None:
    """Grids with a smaller last chunk, pieces, and flattened ranges: DCP sees one chunk."""
    full = torch.arange(70).reshape(7, 10)
    uneven = [between("u", full, a, b) for a, b in ((0, 1), (1, 6), (6, 7))]
    flattened = [flat("f", full, a, b) for a, b in ((0, 13), (13, 58), (58, 70))]
    dc.save({"u": uneven, "f": flattened}, tmp_path)
    found = {"u": torch.zeros_like(full), "f": torch.zeros_like(full)}
    dcp_load(found, storage_reader=DCPReader(tmp_path))
    assert torch.equal(found["u"], full)
    assert torch.equal(found["f"], full)


def test_every_dtype_and_views_and_strided_tensors(tmp_path: Path) -> None:
    names = [row.name for row in DTYPES if row.name != "float8_e8m0fnu"]  # it has no zero
    given = {name: torch.arange(6).to(getattr(torch, name)) for name in names}
    base = torch.arange(60.0).reshape(6, 10)
    given |= {"t": base.t(), "view": base[1:4, ::2], "parameter": torch.nn.Parameter(base[0])}
    save_through(tmp_path, given)
    found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in given.items()}
    dcp_load(found, storage_reader=DCPReader(tmp_path))
    for name, value in given.items():
        assert_same_bits(found[name], value.detach(), name)


class _SmallChunks(TensorStoreWriter):
    layout = RowBlockLayout(max_chunk_bytes=64)


class _SmallChunksStrategy(TensorStoreSaveShardedStrategy):
    writer_type = _SmallChunks


def test_a_tensor_is_resolved_once_however_many_chunks_it_has(tmp_path: Path) -> None:
    class Counting(DefaultSavePlanner):
        calls = 0

        def resolve_data(self, write_item: Any) -> Any:
            Counting.calls += 1
            return super().resolve_data(write_item)

    full = torch.arange(1000.0).reshape(100, 10)
    writer = DCPWriter(tmp_path, _SmallChunksStrategy())
    dcp_save({"w": full}, storage_writer=writer, planner=Counting())
    index = read_index(tmp_path)
    assert index is not None
    assert index["w"].chunk_shape == (1, 10)
    assert Counting.calls == 1
    assert bits(read_back(tmp_path, {"w": full})) == bits({"w": full})


def test_without_flattening_nested_values_are_one_item(tmp_path: Path) -> None:
    given = {"w": torch.ones(2), "nested": {"a": torch.arange(3), "b": [1, {"c": "d"}]}, "n": 4}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(given, storage_writer=DCPWriter(tmp_path), planner=planner)
    found: dict[str, Any] = {"w": torch.zeros(2), "nested": None, "n": None}
    reading = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load(found, storage_reader=DCPReader(tmp_path), planner=reading)
    assert bits(found) == bits(given)
    common = {"nested": given["nested"], "n": 4}
    assert bits(dc.load_common_state_dict(tmp_path)) == bits(common)


def test_templates_that_differ(tmp_path: Path) -> None:
    save_through(tmp_path, {"w": torch.arange(4.0), "step": 3})
    reader = DCPReader(tmp_path)
    wanted = {"w": torch.zeros(4), "other": torch.full((2,), 7.0)}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: other"):
        dcp_load(wanted, storage_reader=reader)
    partial_load = DefaultLoadPlanner(allow_partial_load=True)
    dcp_load(wanted, storage_reader=reader, planner=partial_load)
    assert wanted["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert wanted["other"].tolist() == [7.0, 7.0]
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp_load({"w": torch.zeros(5)}, storage_reader=reader)
    found = {"w": torch.zeros(4, dtype=torch.float64)}
    dcp_load(found, storage_reader=reader)
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_state_dict_is_built_from_nothing(tmp_path: Path) -> None:
    save_through(tmp_path, state())
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(found, DCPReader(tmp_path), no_dist=True, planner=planner)
    assert bits(found) == bits(state())
    whole, scale = state(), {"model": {"scale": torch.tensor(1.0)}}
    groups = {"optim": {"param_groups": whole["optim"]["param_groups"]}}
    some: Any
    for some, expected in (
        ({"model"}, {"model": whole["model"]}),
        ({"step", "optim.param_groups"}, {"step": 1, **groups}),
        ("model.scale", scale),
        (None, whole),
    ):
        found = _load_state_dict_from_keys(some, storage_reader=DCPReader(tmp_path))
        assert bits(found) == bits(expected)


@pytest.mark.parametrize("sync_files", [True, False])
def test_options_of_file_system_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_files: bool
) -> None:
    fsync, synced = os.fsync, list[None]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(fsync(file)))
    options: Any = {"single_file_per_rank": False, "per_thread_copy_ahead": 1, "thread_count": 1}
    writer = DCPWriter(tmp_path, sync_files=sync_files, **options)
    assert dcp_save(state(), storage_writer=writer).version == "1.0.0"
    assert bool(synced) is sync_files
    assert bits(read_back(tmp_path, state())) == bits(state())
    with pytest.raises(dc.UnsupportedFormatError, match=r"Zarr3SaveShardedStrategy\(codec="):
        DCPWriter(tmp_path, _extensions=[object()])


def test_staged_copies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        writer: Any = DCPWriter(tmp_path, cache_staged_state_dict=True, overwrite=True)
    pickle.dumps(writer)  # for a save in another process
    copies = []
    for first in (1, 2):
        given = state(first)
        future: Any = dcp_async_save(given, storage_writer=writer)
        given["model"]["layers.0.weight"].zero_()
        future.result()
        assert bits(read_back(tmp_path, state(first))) == bits(state(first))
        copies.append(writer.stage(given)["model"]["scale"])
    assert copies[0] is copies[1]


def test_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    writer = DCPWriter(tmp_path / "nowhere")
    for step in range(2):
        dcp_save(state(step), checkpoint_id=tmp_path / str(step), storage_writer=writer)
    assert not (tmp_path / "nowhere").exists()
    reader = DCPReader(tmp_path / "0")
    for step in (1, 0):
        found = empty_like(state())
        dcp_load(found, checkpoint_id=tmp_path / str(step), storage_reader=reader)
        assert bits(found) == bits(state(step))
    assert reader.validate_checkpoint_id(tmp_path / "0")
    assert not reader.validate_checkpoint_id(tmp_path / "2")
    assert writer.validate_checkpoint_id("anywhere")
    assert not writer.validate_checkpoint_id("s3://bucket/folder")


def test_plan_caching(tmp_path: Path) -> None:
    """The plans are sent once; what changes is noticed; every save has its own values."""
    plans: list[bool] = []

    class Watched(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            plans.append(new_plan.usable)
            return super().finish_plan(new_plan)

    def more(first: int) -> dict[str, Any]:
        return state(first) | {"more": torch.full((3,), float(first)), "late": [first]}

    given = [state(1), state(2), state(3), more(4), more(5)]
    for step, expected in enumerate(given):
        writer = DCPWriter(tmp_path / str(step))
        dcp_save(expected, storage_writer=writer, planner=Watched(enable_plan_caching=True))
    assert plans == [True, False, False, True, False]
    for step, expected in enumerate(given):
        assert bits(read_back(tmp_path / str(step), expected)) == bits(expected)


caching = partial(DefaultSavePlanner, enable_plan_caching=True)


def test_a_plan_that_was_cached_for_another_storage_is_refused(tmp_path: Path) -> None:
    dcp_save(state(), checkpoint_id=tmp_path / "files", planner=caching())
    writer = DCPWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="cached by a save into another storage"):
        dcp_save(state(), storage_writer=writer, planner=caching())
    assert not dc.check_is_distributed_checkpoint(tmp_path / "a")
    # The same writer clears away what it has begun.
    dcp_save(state(), storage_writer=writer)
    assert bits(read_back(tmp_path / "a", state())) == bits(state())


def test_a_cache_that_is_out_of_date_is_noticed(tmp_path: Path) -> None:
    """torch keeps the coordinator's plan although the save failed, and then writes older ones."""

    class Fails(DCPWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            raise OSError(f"no space for {len(plans)} plans")

    dcp_save(state(), storage_writer=DCPWriter(tmp_path / "0"), planner=caching())
    more = state() | {"more": torch.ones(3)}
    with pytest.raises(CheckpointException, match="no space"):
        dcp_save(more, storage_writer=Fails(tmp_path / "1"), planner=caching())
    with pytest.raises(CheckpointException, match=r"'more': was not written by any rank"):
        dcp_save(more, storage_writer=DCPWriter(tmp_path / "2"), planner=caching())
    assert not dc.check_is_distributed_checkpoint(tmp_path / "2")


def test_the_files_of_all_ranks_are_announced(tmp_path: Path) -> None:
    writer = DCPWriter(tmp_path, "torch_dist")
    writer.set_up_storage_writer(is_coordinator=True)
    writer.prepare_global_plan([SavePlan([]), SavePlan([])])
    assert {"__0_0.distcp", "__1_0.distcp"} <= leftovers.leftovers(tmp_path)
    writer.reset()


def test_a_committed_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    save_through(tmp_path, state(1))
    with pytest.raises(CheckpointException, match="already holds a checkpoint") as raised:
        save_through(tmp_path, state(2))
    assert isinstance(raised.value.failures[0][0], dc.CheckpointExistsError)
    assert "already exists" in str(raised.value)  # the words of torch
    assert bits(read_back(tmp_path, state())) == bits(state(1))
    dcp_save({"w": torch.ones(1)}, storage_writer=DCPWriter(tmp_path, overwrite=True))
    assert dc.load_plain_tensors(tmp_path).keys() == {"w"}
    assert dc.load_common_state_dict(tmp_path) == {}


class Halving(DefaultSavePlanner):
    """Converts its data to float16."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        assert isinstance(data, torch.Tensor)
        return data.half()


def planning(base: type[DefaultSavePlanner], **changes: Any) -> DefaultSavePlanner:
    """A planner that thinks otherwise of its tensors in its plan."""

    class Planner(base):  # type: ignore[valid-type,misc]
        def create_local_plan(self) -> SavePlan:
            plan: SavePlan = super().create_local_plan()
            items = []
            for item in plan.items:
                assert isinstance(item.tensor_data, TensorWriteData)
                items.append(replace(item, tensor_data=replace(item.tensor_data, **changes)))
            return replace(plan, items=items)

    return Planner()


def test_data_must_be_what_its_plan_says(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0)}
    with pytest.raises(CheckpointException, match=r"'w': the planner's data is not what its plan"):
        dcp_save(state, storage_writer=DCPWriter(tmp_path / "a"), planner=Halving())
    half = planning(Halving, properties=TensorProperties(dtype=torch.float16))
    dcp_save(state, storage_writer=DCPWriter(tmp_path / "b"), planner=half)
    assert dc.load_plain_tensors(tmp_path / "b")["w"].dtype == torch.float16
    # Gaps are refused before anything is touched.
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    gap = planning(DefaultSavePlanner, chunk=chunk)
    with pytest.raises(CheckpointException, match=r"no shard holds this part.*\(2,\) .. \(4,\)"):
        dcp_save(state, storage_writer=DCPWriter(tmp_path / "c"), planner=gap)
    assert not (tmp_path / "c").exists()


def test_bytes_of_a_planner_s_own_format_come_back_as_they_were(tmp_path: Path) -> None:
    class Json(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            value = self.lookup_object(write_item.index)
            return io.BytesIO(json.dumps(value).encode())

    seen: dict[str, bytes] = {}

    class Reads(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen[read_item.dest_index.fqn] = value.read()

    dcp_save({"a": {"b": [1, 2]}}, storage_writer=DCPWriter(tmp_path), planner=Json())
    dcp_load({"a": {"b": None}}, storage_reader=DCPReader(tmp_path), planner=Reads())
    assert seen == {"a.b": b"[1, 2]"}
    assert dc.load_common_state_dict(tmp_path) == {"a": {"b": b"[1, 2]"}}


class Custom:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    def __hash__(self) -> int:
        return 0


def test_objects_are_only_unpickled_if_they_are_trusted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="load would refuse") as raised:
        save_through(tmp_path, {"object": Custom()})
    assert "state_dict['object']" in str(raised.value)
    assert not dc.check_is_distributed_checkpoint(tmp_path)
    dcp_save({"object": Custom()}, storage_writer=DCPWriter(tmp_path, trusted=True))
    found: dict[str, Any] = {"object": None}
    with pytest.raises(CheckpointException, match="refused to unpickle"):
        dcp_load(found, storage_reader=DCPReader(tmp_path))
    dcp_load(found, storage_reader=DCPReader(tmp_path, trusted=True))
    assert found["object"] == Custom()


def test_what_cannot_be_driven_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dc.StrategyNotFoundError):
        DCPWriter(tmp_path, "nonsense")
    with pytest.raises(dc.UnsupportedFormatError):
        DCPWriter(tmp_path, TensorStoreSaveShardedStrategy(planner=OurSavePlanner()))
    with pytest.raises(dc.UnsupportedFormatError, match="one commit"):
        dcp_save(state(), storage_writer=DCPWriter(tmp_path), use_collectives=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(format="other"),
        lambda content: content.pop("paths"),
        lambda content: content["paths"].update(step=[]),
        lambda content: content["paths"].update(step=["no", "such", "place"]),
        lambda content: content["paths"].update(step=[["x"]]),
        lambda content: content.update(values=["never heard of"]),
        lambda content: content.update(raw=["model.scale"]),
        lambda content: content.update(raw=["step"]),  # which is no bytes
        lambda content: content.update(values=7),
    ],
)
def test_damaged_names(tmp_path: Path, damage: Callable[[Any], Any]) -> None:
    save_through(tmp_path, state())
    path = tmp_path / ".dckpt" / "dcp.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointException, match=r"names cannot be read|contradicts itself"):
        read_back(tmp_path, state())
    # Our own load needs no such file.
    assert bits(dc.load(shard_state_dict(empty_like(state())), tmp_path)) == bits(state())


@pytest.mark.parametrize(
    "clash", [{"a.b": 1, "a": {"b": 2}}, {"a": {"b": 1}, "w": shard("a.b", torch.ones(2))}]
)
def test_two_things_of_one_name_are_refused(tmp_path: Path, clash: dict[str, Any]) -> None:
    """Which of them DCP would be given, nobody could say."""
    dc.save(clash, tmp_path)
    with pytest.raises(dc.UnsupportedFormatError, match=r"'a\.b'"):
        DCPReader(tmp_path).read_metadata()
