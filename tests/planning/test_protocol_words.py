"""Plans, items and metadata in the words of the protocols, and what is said of wrong ones."""

import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp, planner as dcp_planner

import dist_checkpointing as dc
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, Window
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import (
    BalancedSavePlanner,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WholeShardLayout,
    WriteItem,
    WriteItemType,
    user_planner,
)
from dist_checkpointing.strategies import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    ZarrSaveShardedStrategy,
)
from states import cell, shard

FULL = torch.arange(24.0).reshape(4, 6)
WHERE = MetadataIndex("w", (2, 0))
DATA = TensorWriteData(Box((2, 0), (2, 6)), "float32", (4, 6))
ITEM = WriteItem(WHERE, WriteItemType.TENSOR, DATA)
IN_DCP: Any = (
    dcp.ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((2, 6))),
    dcp.TensorProperties(dtype=torch.float32),
    torch.Size((4, 6)),
)


@dataclass
class Part:
    chunk: Any
    properties: Any
    size: Any


@pytest.mark.parametrize(
    "given",
    [
        {"chunk": {"offsets": [2, 0], "sizes": [2, 6]}, "properties": "float32", "size": [4, 6]},
        Part(Box((2, 0), (2, 6)), {"dtype": "torch.float32"}, torch.Size((4, 6))),
        dcp_planner.TensorWriteData(*IN_DCP),
        TensorWriteData(*IN_DCP),
        DATA,
    ],
    ids=["dict", "object", "torch", "ours by their names", "ours"],
)
def test_tensor_data_of_a_dict_or_an_object(given: Any) -> None:
    item = WriteItem(WHERE, WriteItemType.TENSOR, bytes_io_data=None, tensor_data=given)
    data = item.tensor_data
    assert data == DATA
    assert item.tensor_storage_size() == 48
    assert (data.chunk.offsets, data.chunk.sizes) == ((2, 0), (2, 6))
    assert data["properties"].dtype == data.properties.dtype == "float32"
    assert data["size"] == (4, 6)
    assert SavePlan([item]).items == [item]


CHUNK = {"offsets": (0,), "sizes": (4,)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunk": CHUNK, "size": (4,)}, "'w': it has no properties; expected chunk (offsets"),
        ({"chunk": 3, "properties": "int8", "size": (4,)}, "'w': it has no offsets"),
        ({"chunk": CHUNK, "properties": {}, "size": (4,)}, "'w': it has no dtype"),
        ({"chunk": CHUNK, "properties": "int8", "size": 4}, "'w': not a shape or an offset"),
        (
            {"chunk": CHUNK, "properties": "int8", "size": (4, 4)},
            "'w': chunk and size have different numbers of axes; expected 2 offsets and sizes",
        ),
        (7, "'w': it has no chunk"),
        (None, "'w': a tensor needs it, and bytes have none; expected tensor_data"),
    ],
)
def test_tensor_data_that_is_not_usable(given: Any, said: str) -> None:
    with pytest.raises(dc.CheckpointingException) as raised:
        WriteItem(MetadataIndex("w", (0,)), WriteItemType.TENSOR, tensor_data=given)
    assert said in str(raised.value)
    with pytest.raises(
        dc.InvalidShardingError, match="'w': a tensor needs it, and bytes have none"
    ):
        WriteItem(WHERE, WriteItemType.BYTE_IO, tensor_data=DATA)


def test_a_dtype_that_is_not_known_has_a_size_and_is_not_saved() -> None:
    def item(dtype: str) -> WriteItem:
        given: Any = {"chunk": CHUNK, "properties": {"dtype": dtype}, "size": (4,)}
        return WriteItem(MetadataIndex("w", (0,)), WriteItemType.TENSOR, given)

    sizes = {"float33": 16, "Float64": 32, "torch.bfloat16": 8, "mindspore.int8": 4}
    assert {dtype: item(dtype).tensor_storage_size() for dtype in sizes} == sizes
    with pytest.raises(dc.InvalidShardingError, match="'w': this dtype cannot be stored"):
        SavePlan([item("float33")])


def test_plans_may_be_changed() -> None:
    reads = [ReadItem(LoadItemType.TENSOR, WHERE, (0, 0), WHERE, (0, n), (2, 3)) for n in (1, 2)]
    pairs: Any = [(SavePlan, [ITEM, replace(ITEM, index=MetadataIndex("v", (2, 0)))])]
    for kind, (one, two) in (*pairs, (LoadPlan, reads)):
        plan = kind([one])
        plan.storage_data = plan.planner_data = "x"
        plan.items.append(two)
        assert len(plan.table) == len(plan.with_items(plan.items).table) == 2
        assert replace(plan).items == plan.items == [one, two]
        other = replace(plan, items=[two])
        assert (other.items, other.storage_data) == ([two], "x")
        plan.items[0] = two
        plan.items.pop()
        assert replace(pickle.loads(pickle.dumps(plan))).items == [two]


# --- what is read ---------------------------------------------------------------------------------

FLOAT = tensor_memory.from_torch(torch.float32)
INDEX = Index.of(
    [
        StoredTensor("grid", FLOAT, (4, 6), (3, 6)),
        StoredTensor(
            "pieces",
            FLOAT,
            (4, 6),
            None,
            Pieces.of(2, [(Box((0, 0), (1, 6)), None), (Box((1, 0), (3, 6)), None)]),
        ),
    ],
    {"o": (1,)},
)


def item(key: str, chunk: Any, offsets: Any, shape: Any, **changes: Any) -> ReadItem:
    place = MetadataIndex(key, (0,) * len(shape))
    fields: dict[str, Any] = {"dest_index": place, "dest_offsets": (0,) * len(shape)}
    fields |= {"storage_index": MetadataIndex(key, chunk), "storage_offsets": offsets}
    return ReadItem(**{"type": LoadItemType.TENSOR, **fields, "lengths": shape, **changes})


LEAVES = [shard(key, torch.zeros(4, 6)) for key in ("pieces", "grid")]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (item("no", (0, 0), (0, 0), (1, 6)), "'no': not in the checkpoint"),
        (item("grid", (1, 0), (0, 0), (1, 6)), "expected a multiple of (3, 6) in (4, 6); found"),
        (item("grid", (9, 0), (0, 0), (1, 6)), "'grid': no stored chunk begins here"),
        (item("pieces", (2, 0), (0, 0), (1, 6)), "expected one of [(0, 0), (1, 0)]; found (2, 0)"),
        (item("grid", (3, 0), (0, 0), (9, 6)), "is not inside the stored chunk; expected inside"),
        (item("grid", (0, 0), (0,), (3,)), "is not inside the stored chunk"),
        (
            item("grid", (0, 0), (0, 0), (3, 6), dest_offsets=(2, 0)),
            "'grid': the box of a ReadItem is not inside the shard to fill",
        ),
    ],
)
def test_items_that_read_what_is_not_there(read: ReadItem, said: str) -> None:
    with pytest.raises(dc.StateMismatchError) as raised:
        user_planner.placed(LoadPlan([read, item("nor this", (0,), (0,), (1,))]), INDEX, LEAVES)
    assert said in str(raised.value)
    assert "'nor this': not in the checkpoint" in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": None},
        {"storage_offsets": None},
        {"dest_offsets": (0,)},
        {"storage_index": None},
        {"lengths": ("a", "b")},
    ],
)
def test_items_that_say_too_little(changes: Any) -> None:
    with pytest.raises(dc.InvalidShardingError, match="'grid': a ReadItem lacks a usable"):
        item("grid", (0, 0), (0, 0), (1, 6), **changes)


def test_items_of_a_users_own_kind_are_kept() -> None:
    """A plan gives back the very items that it was made of, and reads what they say."""

    class Marked(ReadItem):
        """An item with more to it."""

    window = Window(2, (3, 4), Box((1, 0), (1, 4)))
    own = Marked(LoadItemType.TENSOR, MetadataIndex("w"), window, WHERE, window)
    plan = LoadPlan([own]).with_items([own, own])
    assert plan.items == [own, own]
    assert all(type(read) is Marked for read in plan.items)
    assert plan.table.num_elements.sum() == 8


# --- metadata -------------------------------------------------------------------------------------


def test_metadata_is_an_index_in_other_words() -> None:
    chunks = [
        dcp.ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 6))) for start in (0, 2)
    ]
    properties = dcp.TensorProperties(dtype=torch.bfloat16)
    described: dict[str, Any] = {
        "w": dcp.TensorStorageMetadata(properties, torch.Size((4, 6)), chunks),
        "none": dcp.TensorStorageMetadata(properties, torch.Size((0, 6)), []),
        "o": dcp.BytesStorageMetadata(),
    }
    metadata = Metadata(described, "p", "s", "m", "2.0")
    assert (metadata["w"].chunk_shape, metadata["w"].dtype.torch) == ((2, 6), torch.bfloat16)
    assert metadata["none"].global_shape == (0, 6)
    assert metadata.objects == {"o": (1,)}
    metadata.storage_data = {"w": "somewhere"}
    again = pickle.loads(pickle.dumps(metadata))
    assert isinstance(again, Metadata)
    for one in (again, replace(metadata), Metadata.from_index(metadata)):
        assert one.state_dict_metadata["w"] == described["w"]
        assert one.state_dict_metadata.keys() == described.keys()
    extras = (again.planner_data, again.storage_data, again.storage_meta, again.version)
    assert extras == ("p", {"w": "somewhere"}, "m", "2.0")
    # Chunks that make no grid, of a tensor that is described by a dict.
    uneven = [{"offsets": (0,), "sizes": (1,)}, {"offsets": (1,), "sizes": (3,)}]
    tensor = {"properties": {"dtype": torch.int8}, "size": (4,), "chunks": uneven}
    pieces = Metadata({"w": tensor})["w"].pieces
    assert pieces is not None
    assert [box for box, _ in pieces] == [Box((0,), (1,)), Box((1,), (3,))]


# --- planners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [DefaultSavePlanner(), BalancedSavePlanner()])
def test_configure_planner_takes_what_the_protocol_has(planner: DefaultSavePlanner) -> None:
    planner.configure_planner({}, True, 0, True, False)
    with pytest.raises(dc.CheckpointingException, match="use BalancedSavePlanner"):
        planner.configure_planner({}, save_to_minimum_rank=True)


def test_a_planner_need_not_know_the_layout(tmp_path: Path) -> None:
    """What the storage asks for holds all the same: Megatron's zarr has one chunk a shard."""

    class Named(DefaultSavePlanner):
        def configure_planner(self, state_dict: Any, is_coordinator: Any, rank: Any) -> None:
            super().configure_planner(state_dict, is_coordinator=is_coordinator, rank=rank)

    planner = Named()
    data = torch.arange(9 << 20, dtype=torch.int32).reshape(9, -1)  # more than a chunk otherwise
    dc.save({"w": shard("w", data)}, tmp_path / "c", ZarrSaveShardedStrategy(planner=planner))
    assert isinstance(planner.layout, WholeShardLayout)
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], data)


def test_items_without_a_hint_find_their_leaf(tmp_path: Path) -> None:
    class Forgets(DefaultSavePlanner):
        def build_local_plan(self) -> SavePlan:
            plan = super().build_local_plan()
            return SavePlan(replace(i, index=replace(i.index, index=None)) for i in plan.items)

    halves = [shard("b", FULL.chunk(2)[half], (0, half, 2)) for half in (1, 0)]
    cells = [dc.ShardedObject("o", number, (2,), (number,)) for number in (1, 0)]
    strategy = TensorStoreSaveShardedStrategy(planner=Forgets())
    dc.save({"b": halves, "o": cells}, tmp_path / "c", strategy)
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["b"], FULL)
    assert dc.load({"o": [cell.without_data() for cell in cells]}, tmp_path / "c")["o"] == [1, 0]


def test_an_item_that_nobody_holds() -> None:
    planner = DefaultSavePlanner()
    planner.configure_planner({("w",): shard("w", FULL)})  # type: ignore[dict-item]
    with pytest.raises(dc.InvalidShardingError, match="'v': no leaf of this rank holds this item"):
        planner.get_data(WriteItem(MetadataIndex("v", (2, 0)), WriteItemType.TENSOR, DATA))


@pytest.mark.parametrize(
    ("plans", "metadata", "said"),
    [
        ([], Metadata(), "expected 1; found"),
        ([SavePlan(), SavePlan()], Metadata(), "expected 1; found"),
        (None, None, "expected Metadata or Index; found NoneType"),
    ],
)
def test_a_global_plan_is_checked(tmp_path: Path, plans: Any, metadata: Any, said: str) -> None:
    class Wrong(DefaultSavePlanner):
        def build_global_plan(self, all_plans: Any) -> Any:
            return all_plans if plans is None else plans, metadata

    strategy = TensorStoreSaveShardedStrategy(planner=Wrong())
    with pytest.raises(dc.CheckpointingException, match=said):
        dc.save({"w": shard("w", FULL)}, tmp_path / "c", strategy)


class TakesBytes(DefaultLoadPlanner):
    def apply_bytes(self, item: ReadItem, value: bytes) -> None:
        assert type(value) is bytes
        own = value if value.startswith(b"own") else torch.load(io.BytesIO(value))
        super().apply_bytes(item, ["bytes", own])


class TakesStreams(DefaultLoadPlanner):
    def apply_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        super().apply_bytes(item, ["stream", torch.load(value)])


class LoadsBytes(DefaultLoadPlanner):
    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        super().apply_bytes(item, ["load", torch.load(value)])


class TakesObjects(DefaultLoadPlanner):
    def apply_bytes(self, item: ReadItem, value: object) -> None:
        super().apply_bytes(item, ["object", value])


OWN_BYTES = {"bytes": TakesBytes, "stream": TakesStreams, "load": LoadsBytes}


@pytest.mark.parametrize(("found", "planner"), [*OWN_BYTES.items(), ("object", TakesObjects)])
def test_bytes_for_those_that_ask_for_them(tmp_path: Path, planner: Any, found: str) -> None:
    # A planner that has saved bytes of its own gets them back as they were.
    for number, value in enumerate(({"a": 1}, b"own")):
        dc.save({"o": cell("o", value)}, tmp_path / str(number))
        strategy = TensorStoreLoadShardedStrategy(planner=planner())
        assert dc.load({"o": cell("o", None)}, tmp_path / str(number), strategy) == {
            "o": [found, value]
        }


def test_bytes_are_not_unpickled_without_trust() -> None:
    planner, leaf = DefaultLoadPlanner(), cell("o", None)
    planner.configure_planner({("o",): leaf}, Metadata())
    where = MetadataIndex("o", (0,), 0)
    read = ReadItem(LoadItemType.BYTE_IO, where, storage_index=where)
    stream = io.BytesIO()
    torch.save(Part(1, 2, 3), stream)
    stream.seek(0)
    with pytest.raises(dc.CheckpointingException, match="'o': cannot be unpickled without trust"):
        planner.load_bytes(read, stream)
    assert leaf.data is None
