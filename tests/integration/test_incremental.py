"""Saves that share what has not changed with a base: every checkpoint is whole by itself."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import Checksum, Durability, StorageOptions
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy
from dist_checkpointing.testing import assert_same_bits
from simulated_groups import TinyChunks
from states import (
    assert_holds,
    between,
    blanks,
    cell,
    every_kind,
    num_shared,
    rows,
    save_on,
    shard,
    wholes,
)
from tiers import examples

SHARING = pytest.mark.parametrize(
    "backend", [("tensorstore", 1), ("zarr", 2), ("zarr", 1)], ids=lambda b: f"{b[0]}{b[1]}"
)

ROW_BLOCKS = pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 2)], ids=str)


def model(seed: int = 0, count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}.w": torch.randn(40, 64, generator=generator) for i in range(count)}


def data_names(folder: Path) -> set[str]:
    chunk = re.compile(r"data/.*|(?!\.).*/(c(\.\d+)*|\d+(\.\d+)*)")
    return {name for name in files_in(folder) if chunk.fullmatch(name)}


def shared_names(folder: Path) -> set[str]:
    """Files of a checkpoint that have another name elsewhere."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix() for p in files if p.stat().st_nlink > 1}


def own_bytes(folder: Path) -> int:
    """Bytes of the data files of a checkpoint that have no other name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    skipped = (".dckpt", "d")
    return sum(
        path.stat().st_size
        for path in files
        if path.stat().st_nlink == 1 and path.relative_to(folder).parts[0] not in skipped
    )


@SHARING
def test_only_what_changed_is_written(backend: Any, tmp_path: Path) -> None:
    tensors = model()
    dc.save(wholes(tensors), tmp_path / "1", backend)
    changed = {**tensors, "layer3.w": tensors["layer3.w"] + 1}
    dc.save(wholes(changed), tmp_path / "2", backend, base=tmp_path / "1")
    assert shared_names(tmp_path / "2")
    # One tensor, and what describes the checkpoint.
    assert own_bytes(tmp_path / "2") < changed["layer3.w"].nbytes + 9000
    assert_holds(tmp_path / "1", tensors)
    assert_holds(tmp_path / "2", changed)
    # Other libraries open it alone.
    shutil.rmtree(tmp_path / "1")
    for key, tensor in changed.items():
        if backend[0] == "zarr":
            found: Any = zarr.open_array(tmp_path / "2" / key, mode="r")[...]
        else:
            base = {"driver": "ocdbt", "base": f"file://{tmp_path}/2/", "path": f"{key}/"}
            array = ts.open({"driver": "zarr3", "kvstore": base}).result()
            found = array.read().result()
        assert np.array_equal(np.asarray(found), tensor.numpy())


@SHARING
def test_every_kind_of_part_is_shared(backend: Any, tmp_path: Path) -> None:
    full = torch.arange(7 * 9.0).reshape(7, 9)

    def state(comm: Comm) -> dict[str, Any]:
        kinds = {} if backend == ("zarr", 1) else every_kind()
        return {
            "kinds": kinds if comm.rank == 0 else {},
            "bools": shard("bools", full > 3, replica_id=comm.rank),
            "halves": rows("halves", torch.arange(12).reshape(6, 2).half(), comm),
            "columns": rows("columns", full.t().contiguous()[:, :6], comm, 1),
            "object": cell("object", {"rank": comm.rank}, comm),
            "scalar": shard("scalar", torch.tensor(4.5), replica_id=comm.rank),
        }

    first, second = tmp_path / "1", tmp_path / "2"
    save_on(3, state, first, backend)
    save_on(3, state, second, backend, base=first)
    before, after = files_in(first), files_in(second)
    data = data_names(first)
    assert data
    assert shared_names(second) == data
    assert {name: after[name] for name in data} == {name: before[name] for name in data}
    shutil.rmtree(first)
    dc.verify_checkpoint(second)
    expected = dc.load_plain_tensors(second)
    assert_same_bits(expected["halves"], torch.arange(12).reshape(6, 2).half(), "halves")


def sharded(tensors: Mapping[str, torch.Tensor]) -> Callable[[Comm], dict[str, Any]]:
    return lambda comm: {key: rows(key, tensor, comm) for key, tensor in tensors.items()}


@SHARING
def test_a_layout_with_some_of_the_same_boxes(backend: Any, tmp_path: Path) -> None:
    """What all ranks hold whole has the same box whatever their number is."""
    tensors = model()

    def state(comm: Comm) -> dict[str, Any]:
        copies = {key: shard(key, t, replica_id=comm.rank) for key, t in tensors.items()}
        return {**copies, "part": rows("part", torch.arange(80.0).reshape(8, 10), comm)}

    first, second = tmp_path / "1", tmp_path / "2"
    save_on(4, state, first, backend)
    save_on(2, state, second, backend, base=first)
    assert own_bytes(second) < 12000
    assert_holds(second, {**tensors, "part": torch.arange(80.0).reshape(8, 10)})


@ROW_BLOCKS
def test_smaller_chunks_than_those_of_the_base_are_written_once(
    backend: Any, tmp_path: Path
) -> None:
    tensors = model()
    first, second, third = (tmp_path / name for name in "123")
    save_on(4, sharded(tensors), first, backend)
    save_on(8, sharded(tensors), second, backend, base=first)
    save_on(8, sharded(tensors), third, backend, base=second)
    assert shared_names(third) == data_names(third) == data_names(second)
    assert not shared_names(first)
    shutil.rmtree(first)
    shutil.rmtree(second)
    assert_holds(third, tensors)


@ROW_BLOCKS
def test_larger_chunks_are_cut_like_those_of_the_base(backend: Any, tmp_path: Path) -> None:
    """Of rows, of columns, and with a last chunk that sticks out of its tensor."""
    tensors = {**model(), "columns": torch.randn(30, 64), "whole": torch.randn(70, 10)}

    def state(comm: Comm) -> dict[str, Any]:
        own = sharded(tensors)(comm)
        own["columns"] = rows("columns", tensors["columns"], comm, 1)
        # 70 rows of 4 ranks are chunks of 18 rows, the last of which has 16.
        own["whole"] = shard("whole", tensors["whole"].clone(), replica_id=comm.rank)
        if comm.world_size == 4:
            start = 18 * comm.rank
            own["whole"] = between("whole", tensors["whole"], start, min(start + 18, 70))
        return own

    folders = [tmp_path / name for name in "123"]
    save_on(4, state, folders[0], backend)
    for folder, base, changed in zip(folders[1:], folders, (0, 1), strict=False):
        tensors["layer3.w"] = tensors["layer3.w"].clone()
        tensors["layer3.w"][39, 63] += changed
        save_on(2, state, folder, backend, base=base)
        described = sum(path.stat().st_size for path in folder.rglob("zarr.json"))
        assert own_bytes(folder) - described < changed * tensors["layer3.w"].nbytes // 4 + 2500
        shutil.rmtree(base)
        assert_holds(folder, tensors)
        for key, found in dc.load(blanks(tensors), folder, verify=True).items():
            assert_same_bits(found, tensors[key], key)


def test_chunks_of_the_base_that_are_far_too_small_are_not_taken(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(520, 4)}
    dc.save(wholes(tensors), tmp_path / "1", TinyChunks())
    assert dc.Checkpoint.open(tmp_path / "1").index.chunk_shape("w") == (4, 4)
    dc.save(wholes(tensors), tmp_path / "2", ("zarr", 2), base=tmp_path / "1")
    assert dc.Checkpoint.open(tmp_path / "2").index.chunk_shape("w") == (520, 4)
    assert_holds(tmp_path / "2", tensors)


def test_what_does_not_change_gets_files_of_its_own(tmp_path: Path) -> None:
    """A frozen third is written with the rest, once more by itself, and then never again."""
    tensors = model(count=9)
    for name in "1234":
        for i in range(3, 9):
            tensors[f"layer{i}.w"] = tensors[f"layer{i}.w"] + 1
        base = tmp_path / str(int(name) - 1) if name > "1" else None
        dc.save(wholes(tensors), tmp_path / name, base=base)
    state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert not shared_names(tmp_path / "1")
    assert shared_names(tmp_path / "2") == shared_names(tmp_path / "4")
    assert own_bytes(tmp_path / "4") < state_bytes * 2 / 3 + 4000
    assert_holds(tmp_path / "4", tensors)


def test_a_file_that_all_ranks_together_hardly_use(tmp_path: Path) -> None:
    """A rank sees only its own part of a file: the last word is with the one who sees all."""
    tensors = model(count=10)
    first, second = tmp_path / "1", tmp_path / "2"
    dc.save(wholes(tensors), first)
    left = {"layer0.w": tensors["layer0.w"], "layer1.w": tensors["layer1.w"]}

    def state(comm: Comm) -> dict[str, Any]:
        return {k: shard(k, t, replica_id=comm.rank) for k, t in left.items()}

    save_on(2, state, second, base=first)
    assert not shared_names(second)
    copied = list((second / "data" / "model").iterdir())
    assert [path.name.partition("-")[0] for path in copied] == ["used"]
    assert copied[0].stat().st_size == sum(tensor.nbytes for tensor in left.values())
    shutil.rmtree(first)
    assert_holds(second, left)


@SHARING
def test_a_removal_leaves_other_checkpoints_alone(backend: Any, tmp_path: Path) -> None:
    tensors = {
        **model(count=3),
        "optimizer.m": torch.arange(5000.0),
        "optimizer.v": torch.ones(900),
    }
    for name, base in (("1", None), ("2", tmp_path / "1"), ("3", tmp_path / "2")):
        dc.save(wholes(tensors), tmp_path / name, backend, base=base)
    dc.remove_sharded_tensors(tmp_path / "2", "optimizer.")
    dc.remove_sharded_tensors(tmp_path / "3", "layer1.")
    assert_holds(tmp_path / "1", tensors)
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith("layer")}
    assert_holds(tmp_path / "2", kept)
    assert set(dc.Checkpoint.open(tmp_path / "2").index) == set(kept)
    # What is left of it may still be a base, and what shares files may be deleted in any order.
    dc.save(wholes(tensors), tmp_path / "4", backend, base=tmp_path / "2")
    for gone, others in (("2", "14"), ("1", "4")):
        shutil.rmtree(tmp_path / gone)
        for name in others:
            assert_holds(tmp_path / name, tensors)


@SHARING
def test_overwriting_in_place(backend: Any, tmp_path: Path) -> None:
    tensors = model()
    dc.save(wholes(tensors), tmp_path / "1", backend)
    dc.save(wholes(tensors), tmp_path / "2", backend, base=tmp_path / "1")
    changed = {**tensors, "layer3.w": tensors["layer3.w"] + 1}
    dc.save(wholes(changed), tmp_path / "1", backend, base=tmp_path / "2", overwrite=True)
    assert_holds(tmp_path / "1", changed)
    assert_holds(tmp_path / "2", tensors)


@SHARING
def test_a_manager_shares_with_its_latest_checkpoint(backend: Any, tmp_path: Path) -> None:
    tensors = model()
    manager = dc.CheckpointManager(
        tmp_path, backend, retention=dc.Retention(keep_last=2), incremental=True
    )
    for step in range(1, 6):
        tensors["layer3.w"] = tensors["layer3.w"] + 1
        if step % 2:
            manager.save(step, wholes(tensors))
        else:
            manager.async_save(step, wholes(tensors)).result()
        if step > 1:
            assert own_bytes(manager.folder(step)) < tensors["layer3.w"].nbytes + 9000
    assert manager.steps() == [4, 5]
    assert manager.latest_valid() == 5
    loaded = manager.load(blanks(tensors))
    for key, tensor in tensors.items():
        assert_same_bits(loaded[key], tensor, key)
    manager.close()


def test_a_manager_does_not_share_with_what_is_damaged(tmp_path: Path) -> None:
    tensors = model()
    manager = dc.CheckpointManager(tmp_path, ("zarr", 2), incremental=True)
    for step in (1, 2):
        manager.save(step, wholes(tensors))
    chunk = manager.folder(2) / "layer0.w" / "c.0.0"
    chunk.unlink()
    chunk.write_bytes(bytes(tensors["layer0.w"].nbytes))
    assert manager.latest_valid() == 1
    manager.save(3, wholes(tensors))
    assert (manager.folder(3) / "layer0.w" / "c.0.0").samefile(
        manager.folder(1) / "layer0.w" / "c.0.0"
    )
    assert manager.latest_valid() == 3
    manager.close()


def test_what_cannot_be_a_base_is_refused(tmp_path: Path) -> None:
    state = wholes(model())
    dc.save(state, tmp_path / "1")
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.save(state, tmp_path / "2", base=tmp_path / "none")
    with pytest.raises(dc.CheckpointingException, match="its own base"):
        dc.save(state, tmp_path / "1", base=tmp_path / "x" / ".." / "1", overwrite=True)
    with pytest.raises(dc.UnsupportedFormatError, match="torch_dist 1"):
        dc.save(state, tmp_path / "2", "torch_dist", base=tmp_path / "1")
    with pytest.raises(dc.UnsupportedFormatError, match="torch_dist 1"):
        dc.CheckpointManager(tmp_path / "run", "torch_dist", incremental=True)
    unchecked = TensorStoreSaveShardedStrategy(options=StorageOptions(checksum=Checksum.NONE))
    with pytest.raises(dc.UnsupportedFormatError, match="digests"):
        dc.save(state, tmp_path / "2", unchecked, base=tmp_path / "1")
    assert not (tmp_path / "2").exists()
    assert_holds(tmp_path / "1", model())


def test_a_base_of_another_format_is_not_used(tmp_path: Path) -> None:
    tensors = model()
    dc.save(wholes(tensors), tmp_path / "1", ("zarr", 2))
    for name, strategy in (("2", "tensorstore"), ("3", Zarr3SaveShardedStrategy(codec="zstd"))):
        dc.save(wholes(tensors), tmp_path / name, strategy, base=tmp_path / "1")
        assert not shared_names(tmp_path / name)
        assert_holds(tmp_path / name, tensors)


# What is hashed and summed in a save with a base is what a full save hashes and sums.


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 2)])
def test_fingerprints_are_those_of_a_full_save(backend: Any, tmp_path: Path) -> None:
    tensors = {
        **{f"layer{i}.w": torch.randn(40, 64) for i in range(8)},
        "large": torch.randn(600, 500),
        "frozen": torch.randn(600, 500),
    }
    dc.save(wholes(tensors), tmp_path / "1", backend)
    tensors["layer3.w"] += 1
    tensors["large"][-1, -1] += 1  # which is seen only when all of it is hashed
    dc.save(wholes(tensors), tmp_path / "2", backend, base=tmp_path / "1", fingerprints=True)
    assert num_shared(tmp_path / "2")
    opened = dc.Checkpoint.open(tmp_path / "2")
    assert {key: opened.fingerprint(key) for key in tensors} == dc.fingerprint(wholes(tensors))
    dc.verify_checkpoint(tmp_path / "2")


def test_small_values_beside_shared_ones(tmp_path: Path) -> None:
    """Digests made for the comparison, and those made on writing, are those of a full save."""
    sizes = (0, 1, 3, 30, 60, 61, 100, 3000)
    tensors = {f"w{i}.{size}": torch.randn(size) for size in sizes for i in range(20)}
    dc.save(wholes(tensors), tmp_path / "1")
    changed = {key: tensor + (key[1:3] == "7.") for key, tensor in tensors.items()}
    dc.save(wholes(changed), tmp_path / "2", base=tmp_path / "1")
    dc.save(wholes(changed), tmp_path / "full")
    assert num_shared(tmp_path / "2")
    dc.verify_checkpoint(tmp_path / "2")
    for end in ("bin", "upper"):
        name = f".dckpt/checksums/00000.{end}"
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()


# How much of a disk a run of incremental saves takes, whatever changes.


def is_data(path: Path) -> bool:
    return path.is_file() and (path.parts[-3] == "data" or path.name.startswith("c."))


def data_bytes(folders: Iterable[Path]) -> int:
    """Bytes of the values in some checkpoints; what they share counts once."""
    found = [path.stat() for folder in folders for path in folder.rglob("*") if is_data(path)]
    return sum({status.st_ino: status.st_size for status in found}.values())


@given(
    strategy=st.sampled_from([TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy]),
    sizes=st.lists(st.sampled_from([8, 80, 800, 8000]), min_size=10, max_size=10),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 9)), st.booleans()), min_size=1, max_size=7),
    worlds=st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 2), (2, 4)]),
    file_bytes=st.sampled_from([10_000, 2**30]),
)
@examples(15)
def test_at_most_the_state_and_twice_what_changed(
    strategy: Any,
    sizes: list[int],
    steps: list[tuple[set[int], bool]],
    worlds: tuple[int, int],
    file_bytes: int,
) -> None:
    """Ranks are as many as the first of ``worlds`` says up to the middle, then the second."""
    options = StorageOptions(
        threads=1, durability=Durability.PAGE_CACHE, data_file_bytes=file_bytes
    )
    tensors = {f"w{i}": torch.arange(8 * float(n)).reshape(8, n) for i, n in enumerate(sizes)}
    state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    written = state_bytes
    with tempfile.TemporaryDirectory() as name:
        root, kept = Path(name), dict[Path, dict[str, torch.Tensor]]()
        base: Path | None = None
        for number, (changes, is_deleted) in enumerate([(set[int](), False), *steps]):
            world = worlds[number > len(steps) // 2]
            changed = set(changes)
            if world != worlds[number - 1 > len(steps) // 2] and number:
                # Other chunks: all of them may be written again.
                changed = set(range(len(sizes)))
            written += 2 * sum(tensors[f"w{i}"].nbytes for i in changed) if number else 0
            for i in changes:
                tensors[f"w{i}"] = tensors[f"w{i}"] + 1
            folder = root / str(number)
            save_on(world, sharded(tensors), folder, strategy(options=options), base=base)
            assert data_bytes([folder]) <= 2 * state_bytes
            if is_deleted and base is not None:
                shutil.rmtree(base)
                kept.pop(base)
            kept[folder], base = dict(tensors), folder
            assert data_bytes(kept) <= written
        for folder, expected in kept.items():
            assert_holds(folder, expected)
