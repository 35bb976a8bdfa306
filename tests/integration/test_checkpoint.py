"""Checkpoint.open: every backend as a lazy mapping, with the plain full tensors as the oracle."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.checkpoint import partial_reads
from dist_checkpointing.comm import default_comm
from dist_checkpointing.format import Box
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import assert_same_bits
from samples import Sample, Samples
from states import BACKEND, between, cell, shard
from tiers import examples


def test_it_is_a_mapping_of_what_was_saved(any_sample: Sample) -> None:
    checkpoint = dc.Checkpoint.open(any_sample.folder)
    assert set(checkpoint) == set(checkpoint.keys()) == set(any_sample.tensors)
    assert len(checkpoint) == len(any_sample.tensors)
    assert sorted(checkpoint._ipython_key_completions_()) == sorted(checkpoint)
    assert checkpoint.is_committed
    for key, full in any_sample.tensors.items():
        handle = checkpoint[key]
        assert handle.key == key
        assert handle.shape == tuple(full.shape)
        assert handle.dtype == full.dtype
        assert f"torch.{handle.dtype_name}" == str(full.dtype)
        assert handle.num_bytes == full.nbytes
        assert_same_bits(handle[...], full, key)
        assert_same_bits(handle[()], full, key)


def test_chunks_make_up_each_tensor_once(any_sample: Sample) -> None:
    for key, handle in dc.Checkpoint.open(any_sample.folder).items():
        seen = torch.zeros(handle.shape, dtype=torch.int32)
        for number, chunk in enumerate(handle.chunks):
            part = seen[chunk.box.slices()]
            if chunk.flat_range is None:
                part += 1
                count = part.numel()
            else:
                start, stop = chunk.flat_range
                for place in range(start, stop):
                    part[
                        tuple(int(i) for i in torch.unravel_index(torch.tensor(place), part.shape))
                    ] += 1
                count = chunk.flat_range[1] - chunk.flat_range[0]
            assert chunk.num_bytes == count * handle.dtype.itemsize
            location = handle.location(number)
            assert str(any_sample.folder) in location
            # Very small values lie in the nodes of the tensorstore backend's database.
            assert Path(location.split(", ")[0].removesuffix(" (OCDBT)")).exists(), location
        assert (seen == 1).all(), key
        assert handle.num_chunks == len(handle.chunks)


@st.composite
def part_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Something that may stand between the brackets of a tensor of this shape."""
    parts: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        place = st.none() | st.integers(-extent - 2, extent + 2)
        slices = st.builds(slice, place, place, st.none() | st.integers(1, extent + 2))
        ints = st.integers(-extent, extent - 1) if extent else st.nothing()
        parts.append(draw(slices | ints))
    if draw(st.booleans()):
        behind = draw(st.integers(0, len(parts)))
        # What stands behind the dots counts from the last axis.
        tail = [slice(None)] * len(parts[behind:])
        parts = [*parts[:behind], ..., *tail]
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


@examples(60)
@given(data=st.data())
def test_a_slice_is_that_of_the_plain_tensor(any_sample: Sample, data: st.DataObject) -> None:
    checkpoint = dc.Checkpoint.open(any_sample.folder)
    key = data.draw(st.sampled_from(sorted(any_sample.tensors)))
    full = any_sample.tensors[key]
    slices = data.draw(part_of(tuple(full.shape)))
    assert_same_bits(checkpoint[key][slices], full[slices], f"{key}{slices}")


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ((0, 0, 0), "3 indices for shape"),
        ((..., ...), "more than one"),
        (16, "there is no 16"),
        (slice(None, None, -1), "step of -1"),
        (slice(None, None, 0), "axis 0"),
        (slice("a", None), "axis 0"),
        ([0, 1], "not list"),
        (True, "not bool"),
    ],
)
def test_a_bad_slice_is_an_index_error(samples: Samples, slices: Any, message: str) -> None:
    handle = dc.Checkpoint.open(samples("tensorstore").folder)["decoder.weight"]
    with pytest.raises(IndexError, match=message) as raised:
        _ = handle[slices]
    assert "'decoder.weight'" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_is_an_array(tmp_path: Path, dtype: torch.dtype) -> None:
    rows, scalar = torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype)
    dc.save({"w": shard("w", rows), "s": shard("s", scalar)}, tmp_path)
    opened = dc.Checkpoint.open(tmp_path)
    handle = opened["w"]
    assert (handle.ndim, len(handle), handle.numel(), bool(handle)) == (2, 2, 6, True)
    for made in (handle.read(), torch.as_tensor(handle), torch.asarray(handle)):
        assert_same_bits(made, rows, "rows")
    assert_same_bits(torch.as_tensor(opened["s"]), scalar, "scalar")
    array = np.asarray(handle)
    assert array.dtype == handle.stored.dtype.numpy
    assert array.tolist() == rows.tolist()
    assert np.asarray(handle, np.float64).dtype == np.float64
    assert handle.read(device="meta").device.type == "meta"
    rows_read = [row.tolist() for row in handle]  # type: ignore[attr-defined]
    assert rows_read == handle.read().tolist()
    with pytest.raises(TypeError, match="'s' has no axes"):
        len(opened["s"])
    with pytest.raises(ValueError, match="without being read"):
        np.array(handle, copy=False)


def test_a_box_outside_is_no_rubbish_but_an_error(samples: Samples) -> None:
    checkpoint = dc.Checkpoint.open(samples("zarr-2").folder)
    for box in (
        Box((0, 0), (17, 12)),
        Box((16, 0), (1, 1)),
        Box((-1, 0), (1, 1)),
        Box((0, 0), (-1, 1)),
        Box((0,), (1,)),
        Box((0, 0), (1,)),
    ):
        with pytest.raises(IndexError, match=r"decoder\.weight"):
            checkpoint.read([("decoder.weight", box)])


# What is read.


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much every read of a part of a file has got."""
    counts: list[int] = []
    for name in ("preadv", "pread"):
        own = getattr(os, name)

        def read(*arguments: Any, own: Any = own) -> Any:
            got = own(*arguments)
            counts.append(got if isinstance(got, int) else len(got))
            return got

        monkeypatch.setattr(os, name, read)
    return counts


@BACKEND
def test_only_what_is_wanted_is_read(tmp_path: Path, bytes_read: list[int], backend: Any) -> None:
    full = torch.randn(64, 8192)
    dc.save({"w": shard("w", full)}, tmp_path / "c", backend)
    handle = dc.Checkpoint.open(tmp_path / "c")["w"]
    wanted: list[tuple[Any, int]] = [
        (slice(3, 5), 2),
        (40, 1),
        (slice(None, None, 32), 2),
        (slice(10, 10), 0),
        ((slice(3, 60, 20), slice(None, None, 3)), 3),
        ((slice(60, 64, 3), -1), 2),
        ((slice(4, 5), slice(0, 8192, 8191)), 1),
    ]
    for slices, num_rows in wanted:
        bytes_read.clear()
        part = handle[slices]
        # A few pages for what says where the data lies, and one for each row.
        assert sum(bytes_read) <= num_rows * 8192 * 4 + (4 + num_rows) * 4096
        assert torch.equal(part, full[slices])
        # What was read around it is not kept.
        assert part.untyped_storage().nbytes() == part.nbytes


def test_compressed_chunks_that_are_not_wanted_may_be_gone(tmp_path: Path) -> None:
    rows = [shard("w", torch.full((2, 3), i), (0, i, 4)) for i in range(4)]
    dc.save({"rows": rows}, tmp_path / "c", Zarr3SaveShardedStrategy(codec="zstd"))
    for number in (0, 1, 3):
        (tmp_path / "c" / "w" / f"c.{number}.0").unlink()
    handle = dc.Checkpoint.open(tmp_path / "c")["w"]
    assert torch.equal(handle[4:6, 1:], torch.full((2, 2), 2))
    with pytest.raises(dc.CorruptCheckpointError, match="chunk is missing"):
        _ = handle[3:6]


# Objects, common state, metadata.


def test_objects_common_state_and_what_it_is(sample: Sample) -> None:
    from dist_checkpointing import load_common_state_dict

    checkpoint = dc.Checkpoint.open(sample.folder)
    assert set(checkpoint.objects) == {"rng"}
    handle = checkpoint.objects["rng"]
    assert (handle.shape, len(handle), list(handle)) == ((2,), 2, [(0,), (1,)])
    assert dict(handle) == sample.objects["rng"]
    assert handle[1] == handle[(1,)] == handle[[1]] == {"seed": [1, 5]}
    assert (1,) in handle
    assert (2,) not in handle
    for place in (2, -1, (0, 0)):
        with pytest.raises(KeyError, match="no cell"):
            _ = handle[place]
    assert checkpoint.common == load_common_state_dict(sample.folder)
    assert checkpoint.common["iteration"] == 1000
    assert checkpoint.common["args"].betas == (0.9, 0.95)
    assert checkpoint.metadata == {"made_by": "a test"}
    name, _, version = sample.name.removesuffix("-zstd").partition("-")
    assert checkpoint.backend == (name, int(version or 1))
    assert checkpoint.common_backend == ("torch", 1)
    assert checkpoint.path == dc.Checkpoint.open(str(sample.folder)).path == sample.folder
    assert repr(checkpoint).endswith("9 tensors>")
    assert repr(checkpoint["flat"]) == "<'flat': float32[6, 10], 240 bytes>"
    assert repr(handle) == "<'rng': object[2]>"


def test_looking_is_not_collective(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of a training may look by itself: whoever asked for the other ranks would fail."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(TypeError):
        default_comm()
    checkpoint = dc.Checkpoint.open(sample.folder)
    for handle in checkpoint.values():
        assert handle[...].shape == handle.shape
    assert all(len(list(cells.values())) == len(cells) for cells in checkpoint.objects.values())
    assert checkpoint.objects
    assert checkpoint.common
    dc.verify_checkpoint(sample.folder)


# What is not there, or not any more.


def test_a_key_that_is_not_there_has_near_names(any_sample: Sample) -> None:
    checkpoint = dc.Checkpoint.open(any_sample.folder)
    key = max(any_sample.tensors, key=len)
    assert "nothing like it" not in checkpoint
    with pytest.raises(KeyError, match="did you mean") as raised:
        _ = checkpoint[f"{key[:-1]}x"]
    assert repr(key) in str(raised.value.args[0])
    with pytest.raises(KeyError, match=r"holds no tensor 'zzzzzzzz'\W*$"):
        _ = checkpoint["zzzzzzzz"]
    with pytest.raises(KeyError, match="did you mean"):
        checkpoint.read([(f"{key[:-1]}x", Box((), ()))])


@pytest.mark.parametrize("name", ["tensorstore", "zarr-2", "zarr-1", "torch_dist"])
def test_a_checkpoint_that_was_deleted(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    checkpoint = dc.Checkpoint.open(sample.folder)
    handle = checkpoint["decoder.weight"]
    cells = checkpoint.objects["rng"]
    shutil.rmtree(sample.folder)
    assert not checkpoint.is_committed
    with pytest.raises(dc.CorruptCheckpointError, match="not the checkpoint that was opened"):
        _ = handle[0]
    with pytest.raises((dc.CorruptCheckpointError, dc.CheckpointNotFoundError)):
        _ = checkpoint.common
    with pytest.raises(dc.CorruptCheckpointError, match="not the checkpoint that was opened"):
        _ = cells[0]


def test_a_checkpoint_that_was_overwritten(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {"w": shard("w", torch.full((4,), fill)), "o": cell("o", fill)}

    dc.save(state(1.0), tmp_path / "c")
    checkpoint, late = dc.Checkpoint.open(tmp_path / "c"), dc.Checkpoint.open(tmp_path / "c")
    handle, cells = checkpoint["w"], checkpoint.objects["o"]
    assert torch.equal(handle[:], torch.ones(4))
    dc.save(state(2.0), tmp_path / "c", overwrite=True)
    assert not checkpoint.is_committed
    for read in (lambda: handle[:], lambda: cells[0], lambda: late.index, lambda: late.common):
        with pytest.raises(dc.CorruptCheckpointError, match="not the checkpoint that was opened"):
            read()
    assert torch.equal(dc.Checkpoint.open(tmp_path / "c")["w"][:], torch.full((4,), 2.0))


# What it takes.


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 1), ("zarr", 2), "torch_dist"])
def test_a_slice_in_one_chunk_takes_no_plan(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.randn(5, 64)
    # The second chunk is cut at the edge.
    dc.save({"w": [between("w", full, 0, 3), between("w", full, 3, 5)]}, tmp_path, backend)
    handle = dc.Checkpoint.open(tmp_path)["w"]
    with monkeypatch.context() as patched:
        patched.setattr(partial_reads, "read", None)
        for place in (slice(0, 3), slice(3, 5), 4, (slice(0, 2), slice(7, 9)), (4, 63)):
            assert_same_bits(handle[place], full[place], "w")
        assert_same_bits(handle[0, 5:50:7], full[0, 5:50:7], "a run of a row")
    assert_same_bits(handle[1:5], full[1:5], "w")
    found = (tmp_path.rglob(name) for name in ("1.0", "c.1.0", "*.distcp", "data/model/*"))
    (path,) = (path for paths in found for path in paths)
    os.truncate(path, path.stat().st_size + (1 if backend[0] == "zarr" else -1))
    with pytest.raises(dc.CorruptCheckpointError):
        handle[3:5]
