"""Records are what ``torch.save`` writes, and nothing else passes for one."""

import io
import mmap
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.mapping import as_numpy, tensor_memory
from dist_checkpointing.strategies.torch_archives import BadRecord
from dist_checkpointing.strategies.torch_dist.reader import StoredLayout, find_tensor
from dist_checkpointing.strategies.torch_dist.writer import ALIGNMENT, record_format
from dist_checkpointing.testing import assert_same_bits, random_bits

KINDS = [
    *((row.torch, (2, 3)) for row in tensor_memory.DTYPES),
    *((torch.bfloat16, shape) for shape in [(), (1,), (0, 3), (300, 1, 2), (70_000,)]),
]


def record_of(tensor: torch.Tensor) -> bytes:
    frame, values = record_format(tensor.dtype, tuple(tensor.shape)), as_numpy(tensor).tobytes()
    return frame.head + values + frame.tail(zlib.crc32(values))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def find(record: Any) -> StoredLayout:
    found = find_tensor(record)
    assert found is not None
    return found


@pytest.mark.parametrize(("dtype", "shape"), KINDS, ids=str)
def test_torch_and_zip_tools_read_what_is_framed_here_and_we_read_both(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_bits(shape, dtype)
    own = record_of(tensor)
    assert_same_bits(torch.load(io.BytesIO(own), weights_only=True), tensor, "loaded by torch")
    with zipfile.ZipFile(io.BytesIO(own)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == as_numpy(tensor).tobytes()
    for record in (own, saved(tensor)):
        found = find(record)
        assert found.is_contiguous
        assert (found.dtype, found.shape) == (dtype, shape)
        assert found.start % ALIGNMENT == 0
        assert record[found.start : found.start + tensor.nbytes] == as_numpy(tensor).tobytes()


def test_zip_tools_and_we_find_our_way_in_more_than_4_gib(tmp_path: Path) -> None:
    """The values are a hole in a file: only what lies around them is looked at."""
    shape = (5, 2**30)
    frame = record_format(torch.uint8, shape)
    with (tmp_path / "record").open("w+b") as file:
        file.write(frame.head)
        file.seek(frame.num_bytes, io.SEEK_CUR)
        file.write(frame.tail(0))
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as record:
            found = find(record)
        assert (found.shape, found.start) == (shape, len(frame.head))
        with zipfile.ZipFile(file) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert sizes["archive/data/0"] == 5 * 2**30


# What is none.


def rezipped(record: bytes, **changes: Any) -> bytes:
    """The record with other contents of some entries (None: left out), packed by zipfile."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as source,
        zipfile.ZipFile(buffer, "w") as target,
    ):
        for name in source.namelist():
            content = changes.get(name.partition("/")[2].replace(".", "_"), source.read(name))
            if content is not None:
                target.writestr(name, content)
    return buffer.getvalue()


RECORD = record_of(torch.arange(100.0))
DESCRIBED = zipfile.ZipFile(io.BytesIO(RECORD)).read("archive/data.pkl")
OFFSET_50 = DESCRIBED.replace(b"tq\x05QK\x00", b"tq\x05QK\x32")
assert OFFSET_50 != DESCRIBED


def test_an_archive_packed_by_another_program_is_read() -> None:
    assert find(rezipped(RECORD)).shape == (100,)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (RECORD[:-1], "does not end like"),
        (RECORD[1:], "damaged|directory|ended"),
        (rezipped(RECORD, data_pkl=None), "no data.pkl"),
        (rezipped(RECORD, **{"data/0": None}), "no data/0"),
        (rezipped(RECORD, **{"data/0": b"short"}), "400 bytes with 5 bytes"),
        (rezipped(RECORD, byteorder=b"big"), "little-endian"),
        (rezipped(RECORD, data_pkl=b"\x80\x02]."), "description"),
        (rezipped(RECORD, data_pkl=b"x" * 100_000), "description of 100000 bytes"),
        (rezipped(RECORD, data_pkl=OFFSET_50), "sticks out"),
        (RECORD[:-14] + b"\xff" * 4 + RECORD[-10:], "contradict each other"),
    ],
)
def test_what_is_no_record(record: bytes, problem: str) -> None:
    with pytest.raises(BadRecord, match=problem):
        find_tensor(record)


def test_any_flipped_bit_in_the_frame_is_harmless_or_noticed() -> None:
    start = len(record_format(torch.float32, (100,)).head)
    frame = [*range(start), *range(start + 400, len(RECORD))]
    for position in frame:
        for bit in (0, 5):
            damaged = bytearray(RECORD)
            damaged[position] ^= 1 << bit
            try:
                found = find_tensor(bytes(damaged))
            except BadRecord:
                continue
            if found is None or found.shape != (100,):
                continue  # which is compared with the metadata
            if found.dtype == torch.float32 and found.is_contiguous:
                assert found.start == start, position
