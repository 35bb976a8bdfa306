"""128-bit digests: one value, however the bytes are given."""

from __future__ import annotations

import numpy as np
import xxhash

from dist_checkpointing.format import Digest, digest_of
from dist_checkpointing.format.checksums import columns_of, digest_of_array, digests_at


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
        assert digest_of_array(memory[:length]) == expected
        assert (columns_of([expected])[0] == found).all()


def test_no_runs_have_no_digests() -> None:
    none = np.empty(0, dtype=np.int64)
    assert digests_at(none, none).shape == (0, 2)
