"""A planner, a writer and a reader written with nothing but the names of the known protocols.

They are what somebody writes who has read how torch DCP's storages and planners work, and nothing
about this library but how a planner, a writer or a reader is passed to it.
"""

import io
import pickle
from abc import ABCMeta, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.storage import StorageReader, StorageWriter, WriteResult
from dist_checkpointing.strategies import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
from dist_checkpointing.strategies.tensorstore.writer import TensorStoreWriter
from dist_checkpointing.testing import run_ranks
from states import BACKEND, assert_holds, between, rows, shard, wholes

FULL = torch.arange(48.0).reshape(8, 6)
KEYS = ("rows", "uneven", "whole")


# --- the writer and the reader --------------------------------------------------------------------


class Writer(StorageWriter):
    """A file a rank, with the values by their indices."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id == self.path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        StorageWriter.set_up_storage_writer(self, is_coordinator, *args, **kwargs)
        self.is_coordinator, self.rank = is_coordinator, kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert plan.storage_data is None
        plan.storage_data = self.rank
        return plan

    def prepare_global_plan(self, plans: Any) -> list[SavePlan]:
        assert self.is_coordinator
        for rank, plan in enumerate(plans):
            assert plan.storage_data == rank
            plan.storage_data = f"__{rank}_0.bin"
        return plans  # type: ignore[no-any-return]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        values, results, name = {}, [], str(plan.storage_data)
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                data = data.getvalue()
            else:
                assert item.tensor_data is not None
                assert tuple(data.shape) == item.tensor_data.chunk.sizes
                data = data.clone()
            values[item.index.fqn, item.index.offset] = data
            results.append(WriteResult(item.index, 1, name))
        (self.path / name).write_bytes(pickle.dumps(values))
        return done(results[::-1])

    def finish(self, metadata: Metadata, results: Any) -> None:
        assert self.is_coordinator
        assert [type(of_rank) for of_rank in results] == [list] * len(results)
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))


class Reader(StorageReader):
    def __init__(self, path: Any) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id == self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        metadata = pickle.loads((self.path / ".metadata").read_bytes())
        assert isinstance(metadata, Metadata)
        self.storage_data = metadata.storage_data
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        StorageReader.set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs)
        assert is_coordinator == (kwargs["rank"] == 0)
        assert self.storage_data.keys() == metadata.storage_data.keys()  # every rank has read it

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for item in plan.items:
            index = item.storage_index
            stored = pickle.loads((self.path / self.storage_data[index]).read_bytes())
            value = stored[index.fqn, index.offset]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(value))
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(part(value, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        return done(None)


def done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


def part(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]


class Save(PlannedSaveStrategy):
    writer_type, writes = Writer, ("bins", 1)
    can_handle_sharded_objects = True


class Load(PlannedLoadStrategy):
    reader_type, reads = Reader, frozenset({("bins", 1)})
    can_handle_sharded_objects = True


# --- the planners ---------------------------------------------------------------------------------


class Chunk:
    def __init__(self, offsets: Any, sizes: Any) -> None:
        self.offsets, self.sizes = torch.Size(offsets), torch.Size(sizes)


class OwnSavePlanner(SavePlanner):
    """Every rank names all that it has; of copies the lowest rank writes its own."""

    def configure_planner(self, state_dict: Any, **kwargs: Any) -> None:
        leaves = [leaf for leaf in state_dict.values() if isinstance(leaf, SHARDED)]
        self.leaves = {leaf.key: leaf for leaf in leaves}
        self.is_coordinator, self.rank = kwargs["is_coordinator"], kwargs["rank"]
        assert kwargs["remove_redundancy"]
        assert not kwargs["save_to_minimum_rank"]

    def build_local_plan(self) -> SavePlan:
        items = []
        for fqn, leaf in self.leaves.items():
            if isinstance(leaf, dc.ShardedObject):
                index = MetadataIndex(fqn)
                items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=object()))
                continue
            data: Any = {
                "chunk": Chunk(leaf.global_offset, leaf.local_shape),
                "properties": {"dtype": "torch.float32"},
                "size": torch.Size(leaf.global_shape),
            }
            index = MetadataIndex(fqn, torch.Size(leaf.global_offset))
            items.append(WriteItem(index=index, type=WriteItemType.TENSOR, tensor_data=data))
        return SavePlan(items, planner_data=self.rank)

    def build_global_plan(self, all_plans: Any) -> Any:
        assert [plan.planner_data for plan in all_plans] == [*range(len(all_plans))]
        seen: set[Any] = set()
        plans: list[SavePlan] = []
        for plan in all_plans:
            own = [item for item in plan.items if (item.index.fqn, item.index.offset) not in seen]
            seen |= {(item.index.fqn, item.index.offset) for item in own}
            plans.append(SavePlan(own))
        return plans, Metadata(state_dict_metadata={}, planner_data="of the user")

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return SavePlan(list(plan.items))

    def get_data(self, item: WriteItem) -> Any:
        assert item.index.index is None
        return self.leaves[item.index.fqn].data


SHARDED = (dc.ShardedTensor, dc.ShardedObject)


class OwnLoadPlanner(LoadPlanner):
    """Looks for the stored chunks that meet each shard."""

    def configure_planner(
        self, state_dict: Any, metadata: Metadata, is_coordinator: bool, rank: int
    ) -> None:
        assert is_coordinator == (rank == 0)
        self.state_dict = {leaf.key: leaf for leaf in state_dict.values()}
        self.metadata = metadata
        # Also of what other ranks ask for.
        assert metadata.state_dict_metadata.keys() >= {*KEYS}

    def build_local_plan(self) -> LoadPlan:
        items = []
        for fqn, leaf in self.state_dict.items():
            if isinstance(leaf, dc.ShardedObject):
                index = MetadataIndex(fqn)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, (0,), index, (0,), (0,)))
                continue
            stored = self.metadata.state_dict_metadata[fqn]
            assert stored.size == torch.Size(leaf.global_shape)
            own = torch.tensor([leaf.global_offset, leaf.local_shape])
            for chunk in stored.chunks:
                other = torch.tensor([chunk.offsets, chunk.sizes])
                begin = torch.maximum(own[0], other[0])
                lengths = torch.minimum(own.sum(0), other.sum(0)) - begin
                if (lengths > 0).all():
                    item = ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(fqn, leaf.global_offset),
                        dest_offsets=(begin - own[0]).tolist(),
                        storage_index=MetadataIndex(fqn, chunk.offsets),
                        storage_offsets=(begin - other[0]).tolist(),
                        lengths=lengths.tolist(),
                    )
                    items.append(item)
        return LoadPlan(items)

    def build_global_plan(self, all_plans: Any) -> Any:
        return [LoadPlan(plan.items, planner_data="global") for plan in all_plans]

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        assert plan.planner_data == "global"
        return plan

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return part(self.state_dict[item.dest_index.fqn].data, item.dest_offsets, item.lengths)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        target = self.acquire_tensor(item)
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor)

    def apply_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[item.dest_index.fqn].data = torch.load(value, weights_only=True)


# --- what they do together ------------------------------------------------------------------------


def state_of(comm: Comm) -> dict[str, Any]:
    half = slice(0, 3) if comm.rank == 0 else slice(3, 8)
    return {
        "rows": rows("rows", FULL, comm),
        "uneven": between("uneven", FULL, half.start, half.stop),
        "whole": shard("whole", FULL, replica_id=comm.rank),
        "rng": dc.ShardedObject("rng", {"seed": [1, 2]}, (1,), (0,), replica_id=comm.rank),
        "step": 7,
    }


def check_template(comm: Comm, folder: Path, strategy: Any, **options: Any) -> None:
    columns = FULL.chunk(comm.world_size, 1)[comm.rank]
    keys = [key for number, key in enumerate(KEYS) if number != comm.rank % 3]
    template = {key: rows(key, torch.zeros(8, 6), comm, axis=1) for key in keys}
    template["rng"] = dc.ShardedObject("rng", None, (1,), (0,))  # type: ignore[assignment]
    found: Any = dc.load(template, folder, strategy, comm=comm, **options)
    for key in keys:
        assert torch.equal(found[key], columns), key
    assert found["rng"] == {"seed": [1, 2]}
    assert found["step"] == 7


@pytest.mark.parametrize("how", ["save", "async", "request"])
def test_own_writer_and_reader(tmp_path: Path, how: str) -> None:
    def save_one(comm: Comm) -> None:
        strategy = Save(planner=None if how == "save" else OwnSavePlanner())
        state = state_of(comm)
        if how == "save":
            cache = dc.PlanCache()
            for name in ("d", "c"):
                dc.save(state, tmp_path / name, strategy, comm=comm, plan_cache=cache)
        elif how == "async":
            dc.async_save(state, tmp_path / "c", strategy, comm=comm).result()
        else:
            request = dc.save(state, tmp_path / "c", strategy, comm=comm, async_sharded_save=True)
            assert request is not None
            request.execute()
            request.finalize(comm)

    run_ranks(2, save_one)
    run_ranks(1, lambda comm: check_template(comm, tmp_path / "c", Load(planner=OwnLoadPlanner())))
    run_ranks(3, lambda comm: check_template(comm, tmp_path / "c", Load()))


def pasted(own: type, protocol: str) -> Any:
    """The same class, derived from an abstract class of the protocol instead of ours."""
    names = protocol.split()
    abstract = {name: abstractmethod(lambda *_, **__: None) for name in names}
    methods = {name: vars(own)[name] for name in (*names, "__init__") if name in vars(own)}
    return ABCMeta(own.__name__, (ABCMeta("Protocol", (), abstract),), methods)


PREPARE = "prepare_local_plan prepare_global_plan"
PLAN = "configure_planner build_local_plan build_global_plan finalize_plan"


class PastedSave(Save):
    writer_type = pasted(Writer, f"set_up_storage_writer {PREPARE} write_data finish")


class PastedLoad(Load):
    reader_type = pasted(Reader, "read_metadata set_up_storage_reader read_data")


def test_classes_that_derive_from_the_protocol_itself(tmp_path: Path) -> None:
    own_save = pasted(OwnSavePlanner, f"{PLAN} get_data")
    own_load = pasted(OwnLoadPlanner, f"{PLAN} acquire_tensor apply_tensor apply_bytes")

    def one(comm: Comm) -> None:
        for number, (saving, loading) in enumerate(((None, own_load), (own_save, None))):
            folder = tmp_path / str(number)
            strategy = PastedSave()
            strategy.planner = saving and saving()
            dc.save(state_of(comm), folder, strategy, comm=comm)
            check_template(comm, folder, PastedLoad(planner=loading and loading()))

    run_ranks(2, one)
    with pytest.raises(
        dc.CheckpointingException, match=r"be a SavePlanner[^|]*abstract.* get_data"
    ):
        dc.save({}, tmp_path / "c", PastedSave(planner=type("Half", (), {})()))


def test_a_pasted_reader_is_asked_for_the_metadata_before_every_read(tmp_path: Path) -> None:
    """Also by what reads more than once: the values that no fingerprint is kept of, and slices."""

    def one(comm: Comm) -> None:
        dc.save(state_of(comm), tmp_path / "c", PastedSave(), comm=comm)
        check_template(comm, tmp_path / "c", PastedLoad(), verify="restored")

    run_ranks(2, one)
    register_default_strategy(StrategyAction.LOAD_SHARDED, *Save.writes, PastedLoad())
    try:
        opened = dc.Checkpoint.open(tmp_path / "c")
        for _ in range(2):
            assert torch.equal(opened["rows"][2:5], FULL[2:5])
    finally:
        del default_strategies["load_sharded"][Save.writes]


@BACKEND
def test_own_planners_with_every_backend(tmp_path: Path, backend: tuple[str, int]) -> None:
    saver = type(get_default_strategy(StrategyAction.SAVE_SHARDED, *backend))
    loader = type(get_default_strategy(StrategyAction.LOAD_SHARDED, *backend))

    def one(comm: Comm) -> None:
        dc.save(state_of(comm), tmp_path / "c", saver(planner=OwnSavePlanner()), comm=comm)
        check_template(comm, tmp_path / "c", loader(planner=OwnLoadPlanner()))
        check_template(comm, tmp_path / "c", None)

    run_ranks(2, one)


class LargestFirst(TensorStoreWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        plan.items.sort(key=lambda item: -(item.tensor_storage_size() or 0))
        return super().write_data(plan, planner)


class LargestFirstStrategy(TensorStoreSaveShardedStrategy):
    writer_type = LargestFirst


@pytest.mark.parametrize("fingerprints", [False, True])
def test_a_writer_may_sort_the_items_of_a_plan(tmp_path: Path, fingerprints: bool) -> None:
    full = {key: torch.full((size,), float(size)) for key, size in (("a", 2), ("b", 5), ("c", 3))}
    options: Any = {"fingerprints": fingerprints}
    dc.save(wholes(full), tmp_path / "0", LargestFirstStrategy(), **options)
    dc.async_save(wholes(full), tmp_path / "1", LargestFirstStrategy(), **options).wait()
    for name in "01":
        assert_holds(tmp_path / name, full)
