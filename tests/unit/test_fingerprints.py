"""Sums of parts add up to those of the whole, and changes change them."""

import itertools
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from dist_checkpointing.format import Box, Digest, digest_of
from dist_checkpointing.format.checksums import columns_of, digests_at
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.storage.fingerprints import Sums, added, sums_of_tensor
from tiers import examples
from tilings import tilings

Array = npt.NDArray[Any]
MODULUS = 1 << 64
BY_ITEMSIZE = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}


def splitmix64(number: int) -> int:
    """Output of the generator as Steele, Lea and Flood wrote it down."""
    state = (number + 1) * 0x9E3779B97F4A7C15 % MODULUS
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % MODULUS
    return state ^ (state >> 31)


def sums_by_definition(values: Array) -> Sums:
    data = values.tobytes()
    data += b"\0" * (-len(data) % 8)
    first = second = 0
    for number in range(len(data) // 8):
        word = data[8 * number : 8 * number + 8]
        block, place = divmod(number, 1024)
        g1, h1, g2, h2 = (
            splitmix64(4 * counter + stream) | 1
            for stream, counter in enumerate((place, block, place, block))
        )
        first += int.from_bytes(word, "little") * g1 * h1
        second += int.from_bytes(word, "big") * g2 * h2
    return first % MODULUS, second % MODULUS


def sums_of_part(
    values: Array, box: Box, flat_range: tuple[int, int] | None, global_shape: Ints
) -> Sums:
    return sums_of_tensor(torch.from_numpy(values), box, flat_range, global_shape)


def whole(values: Array) -> Sums:
    return sums_of_part(values, Box.whole(values.shape), None, values.shape)


def values_of(shape: Ints, dtype: str, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (3, 5, 7)) for dtype in BY_ITEMSIZE.values()),
        *((dtype, (2300,)) for dtype in ("u1", "i8")),
        *(("i2", shape) for shape in [(), (1,), (7,), (0, 3), (41, 33, 5)]),
    ],
)
def test_sums_are_what_the_definition_says(dtype: str, shape: Ints) -> None:
    """By which any flipped bit, negation or exchange of values changes them."""
    values = values_of(shape, dtype)
    assert whole(values) == sums_by_definition(values)


@examples(75)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    itemsize=st.sampled_from([*BY_ITEMSIZE]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_parts_of_any_cut_add_up(
    shape: Ints, itemsize: int, seed: int, data: st.DataObject
) -> None:
    values = values_of(shape, BY_ITEMSIZE[itemsize], seed)
    rng = random.Random(seed)
    parts = []
    for box in data.draw(tilings(Box.whole(shape))):
        own = values[box.slices()]  # strided
        if rng.random() < 0.5:
            own = own.copy()
        if rng.random() < 0.3 and box.num_elements > 1:
            begin = rng.randrange(1, box.num_elements)
            flat = own.reshape(-1)
            for start, stop in ((0, begin), (begin, box.num_elements)):
                parts.append(sums_of_part(flat[start:stop], box, (start, stop), shape))
        else:
            parts.append(sums_of_part(own, box, None, shape))
    assert added(parts) == whole(values)


@pytest.mark.parametrize("columns", [1, 4, 37, 256, 1001, 3000, 100_000])
def test_columns_of_a_large_tensor_add_up(columns: int) -> None:
    shape = (max(5, 20_000 // columns), 2 * columns + 3)
    cuts = [0, columns, 2 * columns, shape[1]]
    for dtype in ("u1", "i2", "c16"):
        values = values_of(shape, dtype)
        parts = [
            sums_of_part(values[:, a:b].copy(), Box((0, a), (shape[0], b - a)), None, shape)
            for a, b in itertools.pairwise(cuts)
        ]
        assert added(parts) == whole(values)


def test_strided_memory_and_what_is_not_aligned_count_as_their_values() -> None:
    values = values_of((300, 700), "i2")
    assert whole(np.asfortranarray(values)) == whole(values)
    run, box = values.reshape(-1)[1::2], Box((8, 5), (300, 700))
    place: Any = (box, (17, 17 + run.size), (400, 705))
    assert sums_of_part(run, *place) == sums_of_part(run.copy(), *place)
    memory = np.zeros(8 * 5000 + 1, dtype=np.uint8)
    values = memory[1:].view("i8")
    values[:] = values_of((5000,), "i8")
    assert whole(values) == whole(values.copy())


# 128-bit digests: one value, however the bytes are given.


def test_all_ways_give_the_same_digest() -> None:
    """Lower half: xxh3_64 for any number of bytes; upper half: that of xxh3_128."""
    memory = np.random.default_rng(0).integers(0, 256, 2**21, dtype=np.uint8)
    lengths = np.array([0, 1, 8, 239, 240, 241, 242, 1024, 2**20, 2**21 - 3])
    at = digests_at(np.full(len(lengths), memory.ctypes.data), lengths)
    for length, found in zip(lengths.tolist(), at, strict=True):
        data = memory[:length].tobytes()
        blocks = Digest()
        blocks.update(memoryview(data[: length // 3]))
        blocks.update(memoryview(data[length // 3 :]))
        expected = xxhash.xxh3_128_digest(data)[:8] + xxhash.xxh3_64_digest(data)
        assert digest_of(data, length) == blocks.digest() == expected
        assert digest_of(memory[:length], length) == expected
        assert (columns_of([expected])[0] == found).all()
    none = np.empty(0, dtype=np.int64)
    assert digests_at(none, none).shape == (0, 2)
