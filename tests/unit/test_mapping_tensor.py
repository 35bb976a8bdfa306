import copy
import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CheckpointingException, InvalidShardingError
from dist_checkpointing.mapping import ReplicaId, ShardedTensor, is_main_replica
from tiers import examples


def shard(**changes: Any) -> ShardedTensor:
    """The second of two rows of blocks of a (4, 6) tensor, unless changed."""
    values: dict[str, Any] = {
        "key": "w",
        "data": torch.arange(12.0).reshape(2, 6),
        "dtype": torch.float32,
        "local_shape": (2, 6),
        "global_shape": (4, 6),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    return ShardedTensor(**(values | changes))


def flat_shard(**changes: Any) -> ShardedTensor:
    """SPEC's example: elements 5 .. 10 of a local (3, 4)."""
    values: dict[str, Any] = {
        "data": torch.arange(5.0, 10.0),
        "local_shape": (3, 4),
        "global_shape": (6, 4),
        "global_offset": (3, 0),
        "flattened_range": slice(5, 10),
    }
    return shard(**(values | changes))


def stacked_shard(**changes: Any) -> ShardedTensor:
    """The same block in layer 5 of 7."""
    values: dict[str, Any] = {
        "global_shape": (7, 4, 6),
        "global_offset": (5, 2, 0),
        "axis_fragmentations": (7, 2, 1),
        "prepend_axis_num": 1,
    }
    return shard(**(values | changes))


@pytest.mark.parametrize(
    ("replica_id", "is_main"),
    [
        *((main, True) for main in (0, False, (0,), (0, 0, 0), (), [], [0, 0])),
        *((other, False) for other in (1, -1, True, (1,), (0, 1), (0, 0, 2), [0, 1])),
    ],
)
def test_main_replicas(replica_id: ReplicaId, *, is_main: bool) -> None:
    assert is_main_replica(replica_id) == is_main


def test_fields_defaults_and_what_peers_look_for_in_the_text() -> None:
    assert " ".join(field.name for field in fields(ShardedTensor)) == (
        "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id "
        "prepend_axis_num allow_shape_mismatch flattened_range"
    )
    tensor = ShardedTensor("a", torch.zeros(2), torch.float32, (2,), (4,), (2,), (2,))
    assert repr(tensor) == (
        "ShardedTensor(key='a', dtype=torch.float32, local_shape=(2,), global_shape=(4,), "
        "global_offset=(2,), axis_fragmentations=(2,), replica_id=0, prepend_axis_num=0, "
        "allow_shape_mismatch=False, flattened_range=None)"
    )
    assert tensor.allow_shape_mismatch is False


def test_it_can_be_copied_and_pickled() -> None:
    tensor = flat_shard(replica_id=(0, 3), data=None)
    assert pickle.loads(pickle.dumps(tensor)) == tensor
    assert copy.deepcopy(tensor) == tensor


class TestRules:
    def test_scalars(self) -> None:
        tensor = ShardedTensor("s", torch.tensor(1.0), torch.float32, (), (), (), ())
        assert tensor.global_slice() == ()
        assert tensor.local_chunk_offset_in_global() == ()
        assert tensor.max_allowed_chunks() == ()
        assert tensor.box.num_elements == 1
        stacked = ShardedTensor(
            "s", torch.tensor(1.0), torch.float32, (), (3,), (2,), (3,), prepend_axis_num=1
        )
        assert stacked.global_slice() == (2,)


class TestPlaces:
    def test_chunk_offset_of_an_uneven_cut_is_not_invented(self) -> None:
        tensor = shard(axis_fragmentations=None, global_offset=(1, 0))
        assert not tensor.has_regular_grid
        with pytest.raises(CheckpointingException):
            tensor.local_chunk_offset_in_global()

    def test_max_allowed_chunks(self) -> None:
        assert shard().max_allowed_chunks() == (2, 6)
        uneven = shard(global_shape=(5, 6), data=None)
        with pytest.raises(InvalidShardingError, match="'w'"):
            uneven.max_allowed_chunks()
        uneven.allow_shape_mismatch = True
        assert uneven.max_allowed_chunks() == (2, 6)
        shard(global_shape=(3, 6), allow_shape_mismatch=True)  # padding sticks out

    @examples(100)
    @given(st.data())
    def test_coordinates_are_those_of_numpy(self, data: st.DataObject) -> None:
        local = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        prepended = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
        counts = tuple(data.draw(st.integers(1, 3)) for _ in local)
        place = tuple(data.draw(st.integers(0, n - 1)) for n in (*prepended, *counts))
        shape = prepended + tuple(n * e for n, e in zip(counts, local, strict=True))
        offset = place[: len(prepended)] + tuple(
            p * e for p, e in zip(place[len(prepended) :], local, strict=True)
        )
        size = math.prod(local)
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        tensor = ShardedTensor(
            "w",
            None,
            torch.float32,
            local,
            shape,
            offset,
            prepended + counts,
            prepend_axis_num=len(prepended),
            flattened_range=slice(start, stop),
        )
        cell = (
            p if extent else 0 for p, extent in zip(place[len(prepended) :], local, strict=True)
        )
        assert tensor.local_chunk_offset_in_global() == (*place[: len(prepended)], *cell)
        local_numbers = np.arange(size).reshape(local)
        seen = tensor.local_coordinates()
        assert len(seen) == len(local)
        assert local_numbers[seen].tolist() == list(range(start, stop))

        numbers = np.arange(math.prod(shape)).reshape(shape)
        whole = numbers[tensor.global_slice()]
        at = tensor.global_coordinates()
        assert len(at) == len(shape)
        assert numbers[at].tolist() == whole.ravel()[start:stop].tolist()

    def test_only_flattened_shards_have_coordinates(self) -> None:
        for method in ("local_coordinates", "global_coordinates"):
            with pytest.raises(CheckpointingException):
                getattr(shard(), method)()


def test_without_data_is_a_copy() -> None:
    tensor = flat_shard(replica_id=(0, 1))
    empty = tensor.without_data()
    assert empty.data is None
    assert tensor.data is not None
    tensor.data = None
    assert empty == tensor


def test_init_data_allocates_what_is_missing() -> None:
    tensor, flat = shard(data=None, dtype=torch.bfloat16), flat_shard(data=None)
    tensor.init_data("cpu", torch.zeros)
    flat.init_data(torch.device("meta"))
    assert tensor.data is not None
    assert flat.data is not None
    assert (tensor.data.dtype, tensor.data.shape) == (torch.bfloat16, (2, 6))
    assert not tensor.data.any()
    assert (flat.data.shape, flat.data.device.type) == ((5,), "meta")
    for made in (tensor, flat):
        made.validate_metadata_integrity()
    before = tensor.data
    tensor.init_data("meta")
    assert tensor.data is before


class TestNarrow:
    def test_a_whole_shard_keeps_its_memory(self) -> None:
        tensor = shard()
        (narrowed,) = tensor.narrow(1, 2, 3)
        assert tensor.data is not None
        assert narrowed.data is not None
        narrowed.data[0, 0] = 99
        assert torch.equal(narrowed.data, tensor.data[:, 2:5])
        assert narrowed.without_data() == shard(data=None, local_shape=(2, 3), global_shape=(4, 3))

    def test_dim_counts_local_axes_and_may_be_negative(self) -> None:
        stacked = stacked_shard()
        (first,) = stacked.narrow(0, 0, 1)
        assert tuple(first.global_shape) == (7, 2, 6)
        assert tuple(first.global_offset) == (5, 1, 0)
        (last,) = stacked.narrow(-1, 0, 2)
        assert tuple(last.global_shape) == (7, 4, 2)
        (empty,) = flat_shard(data=None).narrow(0, 2, 1)
        assert (empty.data, empty.flattened_range) == (None, slice(0, 2))

    def test_a_flattened_shard_has_only_rows(self) -> None:
        for dim in (1, -1):
            with pytest.raises(CheckpointingException, match="is not one range") as raised:
                flat_shard().narrow(dim, 0, 1)
            assert "expected axis 0; found axis 1. Narrow" in str(raised.value)

    def test_an_uneven_axis_cannot_be_narrowed(self) -> None:
        with pytest.raises(CheckpointingException):
            shard(axis_fragmentations=None, global_offset=(1, 0)).narrow(0, 0, 1)
        with pytest.raises(CheckpointingException):
            shard(global_shape=(5, 6)).narrow(0, 0, 1)
        with pytest.raises(CheckpointingException):
            shard(data=None, local_shape=(0, 6)).narrow(0, 0, 0)

    @pytest.mark.parametrize(
        ("dim", "start", "length"),
        [(2, 0, 1), (5, 0, 1), (-3, 0, 1), (0, 1, 2), (0, 0, 3), (0, -1, 1), (0, 2, 1), (0, 0, -1)],
    )
    @pytest.mark.parametrize("flat", [None, slice(0, 12)])
    def test_what_does_not_exist_is_an_error_even_without_data(
        self, dim: int, start: int, length: int, flat: slice | None
    ) -> None:
        tensor = shard(data=None, flattened_range=flat)
        with pytest.raises((CheckpointingException, IndexError)):
            tensor.narrow(dim, start, length)

    @examples(100)
    @given(st.data())
    def test_flattened_narrowing_selects_what_numpy_selects(self, data: st.DataObject) -> None:
        local = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        size, row = math.prod(local), math.prod(local[1:])
        begin = data.draw(st.integers(0, size))
        end = data.draw(st.integers(begin, size))
        start = data.draw(st.integers(0, local[0] - 1))
        length = data.draw(st.integers(1, local[0] - start))
        values = torch.arange(float(size))
        tensor = ShardedTensor.from_rank_offsets_flat(
            "w", values[begin:end], local, (0, 1, 2), flattened_range=slice(begin, end)
        )
        found = tensor.narrow(0, start, length)
        rows = range(start * row, (start + length) * row)
        expected = [n for n in range(begin, end) if n in rows]
        if not expected:
            assert found == []
            return
        (narrowed,) = found
        assert narrowed.data is not None
        assert narrowed.data.tolist() == expected
        block = values.reshape(local)[start : start + length].reshape(-1)
        assert narrowed.flattened_range is not None
        assert block[narrowed.flattened_range].tolist() == expected
        assert tuple(narrowed.local_shape) == (length, *local[1:])
        assert narrowed.global_shape[0] == 2 * length
        assert narrowed.global_offset[0] == length


class TestFromRankOffsets:
    def test_prepended_axes(self) -> None:
        tensor = ShardedTensor.from_rank_offsets(
            "w", torch.zeros(2, 3), (0, 5, 8), (2, 1, 2), prepend_axis_num=1
        )
        assert (tensor.global_shape, tensor.global_offset) == ((8, 2, 6), (5, 0, 3))
        assert (tensor.axis_fragmentations, tensor.prepend_axis_num) == ((8, 1, 2), 1)
        with pytest.raises(CheckpointingException):
            ShardedTensor.from_rank_offsets("w", torch.zeros(2), (2, 0, 2), prepend_axis_num=1)

    @pytest.mark.parametrize(
        "rank_offsets",
        [
            *([offsets] for offsets in [(-1, 0, 1), (0, -1, 2), (0, 0, 0), (0, 0, -1), (2, 0, 1)]),
            [(0, 4, 4)],
            [(0, 0, 2), (0, 1, 2)],
            [(1, 0, 2), (1, 0, 2)],
        ],
    )
    def test_impossible_positions(self, rank_offsets: list[tuple[int, int, int]]) -> None:
        with pytest.raises(CheckpointingException, match="Invalid rank offsets") as caught:
            ShardedTensor.from_rank_offsets("my.key", torch.zeros(2, 3), *rank_offsets)
        assert "for key my.key" in str(caught.value)
        said = "position 4 is outside axis 0, split" in str(caught.value)
        assert said == (rank_offsets == [(0, 4, 4)])

    def test_a_flat_range_is_a_value_error_of_its_own_kind(self) -> None:
        flat: Any = slice(0, 2)
        with pytest.raises(ValueError, match="from_rank_offsets_flat"):
            ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=flat)


class TestFromRankOffsetsFlat:
    @pytest.mark.parametrize(("length", "flat"), [(5, None), (4, slice(5, 10))])
    def test_what_does_not_fit(self, length: int, flat: slice | None) -> None:
        data = torch.zeros(length)
        with pytest.raises(CheckpointingException, match="'w'"):
            ShardedTensor.from_rank_offsets_flat("w", data, (3, 4), flattened_range=flat)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_its_key(layout: torch.layout) -> None:
    data = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    with pytest.raises(InvalidShardingError, match=r"'w': .*nested tensor"):
        ShardedTensor.from_rank_offsets("w", data)
    with pytest.raises(InvalidShardingError, match=r"'w': .*nested tensor"):
        ShardedTensor("w", data, data.dtype, (3,), (3,), (0,), (1,))
