"""Records are what ``torch.save`` writes, and nothing else passes for one."""

import io
import struct
import zipfile
import zlib
from typing import Any

import pytest
import torch

from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.strategies.torch_archives import BadRecord
from dist_checkpointing.strategies.torch_dist.reader import StoredLayout, find_tensor
from dist_checkpointing.strategies.torch_dist.writer import ALIGNMENT, record_format
from dist_checkpointing.testing import assert_same_bits, random_bits

SHAPES = pytest.mark.parametrize("shape", [(2, 3), (), (1,), (0, 3), (300, 1, 2), (70_000,)])
DTYPES = pytest.mark.parametrize("dtype", [row.torch for row in tensor_memory.DTYPES], ids=str)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def record_of(tensor: torch.Tensor) -> bytes:
    frame, values = record_format(tensor.dtype, tuple(tensor.shape)), bits(tensor)
    return frame.head + values + frame.tail(zlib.crc32(values))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def find(record: bytes) -> StoredLayout | None:
    return find_tensor(record)


@SHAPES
@DTYPES
def test_torch_and_zip_tools_read_what_is_framed_here(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_bits(shape, dtype)
    record = record_of(tensor)
    assert_same_bits(torch.load(io.BytesIO(record), weights_only=True), tensor, "loaded by torch")
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == bits(tensor)


@SHAPES
@DTYPES
def test_values_are_found_in_both(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype)
    for record in (record_of(tensor), saved(tensor)):
        found = find(record)
        assert found is not None
        assert found.is_contiguous
        assert (found.dtype, found.shape) == (dtype, shape)
        assert found.start % ALIGNMENT == 0
        assert record[found.start : found.start + tensor.nbytes] == bits(tensor)


def test_a_view_lies_otherwise_in_its_storage() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    found = find(saved(whole.t()[1:]))
    assert found is not None
    assert (found.shape, found.stride, found.offset) == ((2, 4), (1, 3), 1)
    assert not found.is_contiguous
    rows = find(saved(whole[2:]))
    assert rows is not None
    assert rows.is_contiguous
    first = find(saved(whole))
    assert first is not None
    assert rows.start == first.start + 6 * 4


def test_values_of_more_than_4_gib() -> None:
    """Nothing of that size is made: only what lies around it is looked at."""
    shape = (5, 2**30)
    frame = record_format(torch.uint8, shape)
    tail = frame.tail(0)
    length = len(frame.head) + frame.num_bytes + len(tail)

    class Record:
        def __len__(self) -> int:
            return length

        def __getitem__(self, part: slice) -> bytes:
            if part.stop <= len(frame.head):
                return frame.head[part]
            before = len(frame.head) + frame.num_bytes
            assert part.start >= before, "the values are not read"
            return tail[part.start - before : part.stop - before]

    found = find_tensor(Record())
    assert found is not None
    assert (found.shape, found.start) == (shape, len(frame.head))


class _Sparse(io.RawIOBase):
    """The record of a tensor of more than 4 GiB of zeros, most of which is nowhere."""

    def __init__(self, head: bytes, zeros: int, tail: bytes) -> None:
        self._head, self._zeros, self._tail = head, zeros, tail
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        length = len(self._head) + self._zeros + len(self._tail)
        self._position = offset + (0, self._position, length)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        behind = self._position - len(self._head) - self._zeros
        source, start = (self._tail, behind) if behind >= 0 else (self._head, self._position)
        data = source[start : None if size < 0 else start + size]
        self._position += len(data)
        return data


def test_zip_tools_find_their_way_in_more_than_4_gib() -> None:
    frame = record_format(torch.uint8, (5, 2**30))
    record: Any = _Sparse(frame.head, frame.num_bytes, frame.tail(0))
    with zipfile.ZipFile(record) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert sizes["archive/data/0"] == 5 * 2**30


# What is none.


def rezipped(record: bytes, **changes: Any) -> bytes:
    """The record with other contents of some entries (None: left out), packed by zipfile."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as source,
        zipfile.ZipFile(buffer, "w", changes.pop("compression", zipfile.ZIP_STORED)) as target,
    ):
        for name in source.namelist():
            content = changes.get(name.partition("/")[2].replace(".", "_"), source.read(name))
            if content is not None:
                target.writestr(name, content)
    return buffer.getvalue()


RECORD = record_of(torch.arange(100.0))


def test_an_archive_packed_by_another_program_is_read() -> None:
    found = find(rezipped(RECORD))
    assert found is not None
    assert found.shape == (100,)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b"", "0 bytes"),
        (b"x" * 1000, "does not end like"),
        (RECORD[:-1], "does not end like"),
        (RECORD[1:], "damaged|directory|ended"),
        (rezipped(RECORD, data_pkl=None), "no data.pkl"),
        (rezipped(RECORD, **{"data/0": None}), "no data/0"),
        (rezipped(RECORD, **{"data/0": b"short"}), "400 bytes with 5 bytes"),
        (rezipped(RECORD, byteorder=b"big"), "little-endian"),
        (rezipped(RECORD, data_pkl=b"\x80\x02]."), "description"),
        (rezipped(RECORD, data_pkl=b"x" * 100_000), "description of 100000 bytes"),
        (rezipped(RECORD, compression=zipfile.ZIP_DEFLATED), "compressed"),
    ],
)
def test_what_is_no_record(record: bytes, problem: str) -> None:
    with pytest.raises(BadRecord, match=problem):
        find(record)


def test_a_tensor_that_sticks_out_of_its_storage() -> None:
    described = zipfile.ZipFile(io.BytesIO(RECORD)).read("archive/data.pkl")
    # The storage offset: 0 becomes 50.
    longer = described.replace(b"tq\x05QK\x00", b"tq\x05QK\x32")
    assert longer != described
    with pytest.raises(BadRecord, match="sticks out"):
        find(rezipped(RECORD, data_pkl=longer))


def test_any_flipped_bit_in_the_frame_is_harmless_or_noticed() -> None:
    start = len(record_format(torch.float32, (100,)).head)
    frame = [*range(start), *range(start + 400, len(RECORD))]
    for position in frame:
        for bit in (0, 5):
            damaged = bytearray(RECORD)
            damaged[position] ^= 1 << bit
            try:
                found = find(bytes(damaged))
            except BadRecord:
                continue
            if found is None or found.shape != (100,):
                continue  # which is compared with the metadata
            if found.dtype == torch.float32 and found.is_contiguous:
                assert found.start == start, position


def test_a_directory_that_promises_many_entries_is_not_believed() -> None:
    damaged = bytearray(RECORD)
    struct.pack_into("<2H", damaged, len(damaged) - 14, 65535, 65535)
    with pytest.raises(BadRecord):
        find(bytes(damaged))
