"""Checkpoints written by real Megatron-Core releases load exactly, and we write the same bytes.

``tests/golden/NAME.expected.json`` says what each holds.
"""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing import ShardedObject, ShardedTensor, load
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.strategies import read_dcp_metadata
from dist_checkpointing.testing import run_ranks
from samples import GOLDEN, golden_sample
from states import flat, save_on, shard

ZARR_NAMES = ["mc0.12.0_zarr", "mc0.15.3_zarr"]
NAMES = [*ZARR_NAMES, "mc0.15.3_torch_dist"]
FIXTURE = pytest.mark.parametrize("name", NAMES)


@functools.cache
def expected(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.expected.json").read_text())
    return content


def unmarked(value: Any, mark: str = "") -> Any:
    """Tuples and tensors of the common state, which JSON cannot say."""
    if isinstance(value, dict):
        names = [key.partition("(") for key in value]
        return {
            name: unmarked(below, kind.rstrip(")"))
            for (name, _, kind), below in zip(names, value.values(), strict=True)
        }
    if mark == "tuple":
        return tuple(value)
    if mark.endswith(" tensor"):
        return torch.tensor(value, dtype=getattr(torch, mark.removesuffix(" tensor")))
    return value


def assert_common_state(found: Any, name: str) -> None:
    wanted = unmarked(expected(name)["common"])
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value)
        else:
            assert found[key] == value
            assert type(found[key]) is type(value)
    assert type(found["args"]["betas"]) is tuple


def cut(key: str, full: torch.Tensor, rank: int, count: int) -> ShardedTensor:
    """As even a part as there is along the first axis that is long enough."""
    if not full.ndim:
        return shard(key, torch.full_like(full, 7))
    axis = next((a for a, extent in enumerate(full.shape) if extent >= count), 0)
    start, stop = (full.shape[axis] * number // count for number in (rank, rank + 1))
    part = torch.full_like(full.narrow(axis, start, stop - start), 7)
    offset = [start if a == axis else 0 for a in range(full.ndim)]
    return ShardedTensor.from_offset(key, part, full.shape, offset)


def flattened(key: str, full: torch.Tensor, rank: int, count: int) -> ShardedTensor:
    """A part of the flattening of the whole tensor."""
    start, stop = full.numel() * rank // count, full.numel() * (rank + 1) // count
    return flat(key, torch.empty_like(full), start, stop)


def part_of(full: torch.Tensor, leaf: ShardedTensor) -> torch.Tensor:
    box = full[leaf.global_slice()]
    return box if leaf.flattened_range is None else box.reshape(-1)[leaf.flattened_range]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, None) for name in NAMES), (ZARR_NAMES[0], "tensorstore")],
)
@pytest.mark.parametrize(("ranks", "with_data"), [(1, True), (2, False), (3, True)])
def test_every_tensor_loads_exactly_on_any_number_of_ranks(
    name: str, ranks: int, strategy: str | None, *, with_data: bool
) -> None:
    full = golden_sample(name).tensors

    def load_rank(comm: Comm) -> None:
        leaves = [
            make(key, full[key], comm.rank, ranks) for make in (cut, flattened) for key in full
        ]
        given = leaves if with_data else [leaf.without_data() for leaf in leaves]
        loaded: Any = load({"leaves": given}, GOLDEN / name, strategy, comm=comm)
        for leaf, value in zip(given, loaded.pop("leaves"), strict=True):
            assert value.dtype == full[leaf.key].dtype
            assert torch.equal(value, part_of(full[leaf.key], leaf)), leaf
            assert leaf.data is None or value is leaf.data
        assert_common_state(loaded, name)

    run_ranks(ranks, load_rank)


def saved_by_megatron(name: str, rank: int, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict that rank ``rank`` of the two saved, as README of the fixtures tells it."""

    def even(key: str, axis: int) -> ShardedTensor:
        data = values[key].chunk(2, axis)[rank].clone()
        return shard(key, data, (axis, rank, 2))

    def layer(number: int) -> ShardedTensor:
        data = values["layers.w"][number].chunk(2, 0)[rank].clone()
        return shard("layers.w", data, (0, number, 2), (1, rank, 2), prepend_axis_num=1)

    objects = expected(name)["sharded_objects"]
    rng = objects[f"rng_state/shard_0.{rank}_1.2"]
    extra = objects["module.extra_state/shard_0_1"]
    state: dict[str, Any] = {
        "embedding": even("embedding.word", 0),
        "fc": even("fc.weight", 1),
        "half": even("half", 1),
        "ids": even("ids", 0),
        "flags": even("flags", 0),
        "norm": shard("norm.weight", values["norm.weight"].clone(), replica_id=rank),
        "layers": [layer(0), layer(1)],
        "optim": list(pieces(name, rank, values)),
        "rng": ShardedObject("rng_state", rng, (1, 2), (0, rank)),
        "extra": ShardedObject("module.extra_state", extra, (1,), (0,), replica_id=rank),
    }
    if "scalar" in values:
        scalar = values["scalar"].clone()
        state["scalar"] = shard("scalar", scalar, replica_id=rank)
    for key, cuts in expected(name).get("uneven_keys", {}).items():
        whole, (start, stop) = values[key], cuts[rank]
        own = whole[start:stop].clone()
        state[key] = ShardedTensor(
            key, own, own.dtype, tuple(own.shape), tuple(whole.shape), (start,), None
        )
    return state


def pieces(name: str, rank: int, values: dict[str, torch.Tensor]) -> Iterator[ShardedTensor]:
    """Flattened tensors as a distributed optimizer cuts them: rank r has piece r of each chunk."""
    for key, layout in expected(name)["flattened_keys"].items():
        for chunk in range(layout["fragmentation"][0]):
            box = values[key].chunk(layout["fragmentation"][0], 0)[chunk].reshape(-1)
            ranges = layout["pieces_per_chunk"]
            if len(ranges) == 1 and chunk != rank:
                continue  # a chunk is not shared: each rank has its own
            start, stop = ranges[rank % len(ranges)]
            yield ShardedTensor.from_rank_offsets_flat(
                key,
                box[start:stop].clone(),
                tuple(layout["non_flat_local_shape"]),
                (0, chunk, layout["fragmentation"][0]),
                flattened_range=slice(start, stop),
            )


def leaves_of(nest: Any) -> Iterator[ShardedBase]:
    if isinstance(nest, ShardedBase):
        yield nest
    elif isinstance(nest, dict | list):
        for below in nest.values() if isinstance(nest, dict) else nest:
            yield from leaves_of(below)


@FIXTURE
def test_the_state_loads_as_megatron_saved_it_flattened_pieces_and_objects_too(name: str) -> None:
    full = golden_sample(name).tensors
    zeros = {key: torch.zeros_like(value) for key, value in full.items()}

    def load_rank(comm: Comm) -> None:
        template = saved_by_megatron(name, comm.rank, zeros)
        wanted = saved_by_megatron(name, comm.rank, full)
        loaded = load(
            template, GOLDEN / name, comm=comm, validate_access_integrity=True, strict="raise_all"
        )
        assert loaded["rng"] == wanted["rng"].data
        assert loaded["extra"] == wanted["extra"].data
        for given, right in zip(leaves_of(template), leaves_of(wanted), strict=True):
            if isinstance(given, ShardedTensor) and isinstance(right, ShardedTensor):
                assert torch.equal(given.data, right.data), given  # type: ignore[arg-type]
        assert loaded["layers"][1] is template["layers"][1].data
        assert_common_state({k: v for k, v in loaded.items() if k not in template}, name)

    run_ranks(2, load_rank)


@FIXTURE
def test_one_process_reads_everything_and_changes_nothing(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / name, tmp_path / "c")
    if name in ZARR_NAMES:
        assert list(folder.glob("*.sync")), "the fixture has lock folders"
    before = files_in(folder)
    full = golden_sample(name).tensors
    assert dc.check_is_distributed_checkpoint(folder)
    metadata = dc.load_tensors_metadata(folder)
    assert {k: (t.global_shape, t.dtype) for k, t in metadata.items()} == {
        k: (tuple(t.shape), t.dtype) for k, t in full.items()
    }
    everything = dc.load_sharded_metadata(folder)
    assert set(everything) == set(full) | set(expected(name)["sharded_objects"])
    assert everything["rng_state/shard_0.1_1.2"] == ShardedObject("rng_state", None, (1, 2), (0, 1))
    plain = dc.load_plain_tensors(folder)
    for key, value in full.items():
        assert torch.equal(plain.pop(key), value)
    assert_common_state(plain, name)
    assert_common_state(dc.load_common_state_dict(folder), name)
    content = dc.load_content_metadata(folder)
    assert content == expected(name)["common"].get("content_metadata")
    assert files_in(folder) == before


# What we write.


@pytest.mark.parametrize("name", ZARR_NAMES)
def test_we_write_the_same_files(name: str, tmp_path: Path) -> None:
    """But for lock folders of theirs and notes of ours."""
    full, common = golden_sample(name).tensors, unmarked(expected(name)["common"])
    content = common.pop("content_metadata", None)
    save_on(
        2,
        lambda comm: saved_by_megatron(name, comm.rank, full) | common,
        tmp_path,
        ("zarr", 1),
        content_metadata=content,
    )
    ours = {k: v for k, v in files_in(tmp_path).items() if not k.startswith(".dckpt/")}
    theirs = {k: v for k, v in files_in(GOLDEN / name).items() if ".sync/" not in k}
    assert ours.keys() == theirs.keys()
    assert Counter(file.rpartition(".")[2] for file in theirs)["pt"] == 4
    assert len([file for file in theirs if file.endswith(".zarray")]) == 9
    assert len(theirs) == 18 + 9 + 4 + 1
    for file, content_of_theirs in theirs.items():
        if not file.endswith(".pt"):
            assert ours[file] == content_of_theirs, file
            continue
        mine, right = (torch.load(BytesIO(data)) for data in (ours[file], content_of_theirs))
        if file == "common.pt":
            assert list(mine) == list(right)
            assert torch.equal(mine.pop("common_tensor"), right.pop("common_tensor"))
        assert mine == right, file


def test_we_write_the_same_torch_dist_checkpoint(tmp_path: Path) -> None:
    """The same tensors, chunks, objects and ranks, as DCP's metadata describes them."""
    name = "mc0.15.3_torch_dist"
    full, common = golden_sample(name).tensors, unmarked(expected(name)["common"])

    save_on(
        2,
        lambda comm: saved_by_megatron(name, comm.rank, full) | common,
        tmp_path,
        ("torch_dist", 1),
    )
    ours, theirs = read_dcp_metadata(tmp_path), read_dcp_metadata(GOLDEN / name)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        mine = ours.tensors[key]
        assert replace(mine, chunks=()) == replace(tensor, chunks=()), key
        assert sorted(mine.chunks) == sorted(tensor.chunks), key
    assert sorted(ours.values) == sorted(theirs.values)
    assert ours.places.keys() == theirs.places.keys()
    for at, place in theirs.places.items():
        if at[0] not in ("norm.weight", "scalar"):  # which of its replicas is free to choose
            assert ours.places[at].file.split("_")[2] == place.file.split("_")[2], at
    assert (tmp_path / "metadata.json").read_bytes() == (
        GOLDEN / name / "metadata.json"
    ).read_bytes()
