"""What picklers write passes the scanner, and every evasion that we thought of does not."""

import io
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

import pytest
import torch
from torch import _utils as torch_names

from dist_checkpointing import CorruptCheckpointError
from dist_checkpointing.strategies.pickle_scanner import (
    BYTES_PER_BYTE,
    LEAST_BYTES,
    MOST_LEVELS,
    VALUE_BYTES,
    BadPickle,
    check_pickle,
)
from dist_checkpointing.strategies.safe_pickle import deserialize, serialize
from dist_checkpointing.strategies.torch_archives import check_torch_file


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_of_a_pickle_without_shared_parts_passes(protocol: int) -> None:
    values = [[i, str(i), (i, {i: [float(i)]}), {i}, frozenset([i]), b"b" * i] for i in range(500)]
    content = pickle.dumps(values, protocol)
    names = check_pickle(content).names
    assert names <= {"builtins.set", "builtins.frozenset", "builtins.bytes", "_codecs.encode"}


def test_what_is_shared_counts_where_it_stands() -> None:
    part = list(range(1000))
    for count, passes in ((5_000, True), (10_000, False)):
        content = pickle.dumps([part] * count, 2)
        most = LEAST_BYTES + BYTES_PER_BYTE * len(content)
        assert passes == (VALUE_BYTES * 1000 * count < most)
        if passes:
            check_pickle(content)
            continue
        with pytest.raises(BadPickle, match="parts of it are shared"):
            check_pickle(content)


def test_levels_are_counted_of_any_container() -> None:
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: frozenset([v])):
        value: Any = 1
        for _ in range(MOST_LEVELS):
            value = wrap(value)
        check_pickle(pickle.dumps(value, 4))
        with pytest.raises(BadPickle, match="levels deep"):
            check_pickle(pickle.dumps(wrap(value), 4))


def test_old_names_are_translated_as_torch_does() -> None:
    # The checks know today's names: a name that torch translates must be one that the scanner does.
    for pair, today in torch_names.NAME_MAPPING.items():
        assert NAME_MAPPING[pair] == today
    for module, name in torch_names.IMPORT_MAPPING.items():
        assert IMPORT_MAPPING[module] == name


def test_a_storage_may_not_be_larger_than_its_entry() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(100)}, buffer)
    content = bytearray(buffer.getvalue())
    check_torch_file(bytes(content))
    at = content.index(b"cpu") + len(b"cpu")
    at = content.index(b"Kd", at)
    content[at : at + 2] = b"Ke"
    with pytest.raises(CorruptCheckpointError, match="storage 0 of 404 bytes, found 400 bytes"):
        deserialize(bytes(content), "it")


def test_the_two_ends_of_an_archive_must_agree() -> None:
    buffer = io.BytesIO()
    torch.save({"w": 1}, buffer)
    content = bytearray(buffer.getvalue())
    at = content.rindex(b"PK\x05\x06") + 10
    (count,) = struct.unpack_from("<H", content, at)
    struct.pack_into("<H", content, at, count - 1)
    with pytest.raises(CorruptCheckpointError, match="contradict"):
        deserialize(bytes(content), "it")


def test_what_a_load_would_refuse_is_warned_of_at_save(caplog: pytest.LogCaptureFixture) -> None:
    value: Any = [1]
    for _ in range(30):
        value = [value, value]
    serialize({"x": value}, "the common state")
    assert "parts of it are shared" in caplog.text
