"""Other tools open what we write: zarr-python and TensorStore, both formats, every dtype."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import DTYPES, DType, as_numpy
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import random_bits, run_ranks
from states import between, flat, rows, save_on, shard, wholes
from stores import copied_up, new_url, put

EXTENDED = [row for row in DTYPES if row.numpy.isbuiltin != 1]
Format = tuple[str, int]


def bits(values: Any) -> bytes:
    if isinstance(values, torch.Tensor):
        values = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    copied: bytes = np.ascontiguousarray(values).tobytes()
    return copied


def opened(path: Path) -> Any:
    array = zarr.open(str(path), mode="r")
    assert isinstance(array, zarr.Array)
    return array


def quarters(key: str, full: torch.Tensor, rank: int) -> list[dc.ShardedTensor]:
    """What one of two ranks has of a (6, 4) tensor in four chunks."""
    parts = full.chunk(2)[rank].chunk(2, 1)
    return [shard(key, part, (0, rank, 2), (1, i, 2)) for i, part in enumerate(parts)]


# zarr-python.


@pytest.mark.parametrize(
    ("version", "codec"), [(1, None), (2, None), (2, "zstd"), (2, "gzip"), (2, "blosc")]
)
def test_zarr_and_tensorstore_read_every_dtype_bit_by_bit(
    tmp_path: Path, version: int, codec: str | None
) -> None:
    file_format = ("zarr", version)
    strategy = Zarr3SaveShardedStrategy(codec=codec) if version == 2 else file_format
    matrices = {row.name: random_bits((6, 4), row.torch) for row in DTYPES}
    scalars = {row.name: random_bits((), row.torch) for row in DTYPES}

    def state(comm: Comm) -> dict[str, Any]:
        leaves = {name: quarters(name, full, comm.rank) for name, full in matrices.items()}
        if comm.rank == 0:
            leaves["scalars"] = [shard(f"{n} scalar", value) for n, value in scalars.items()]
            empty = [shard(f"{row.name} empty", random_bits((0, 3), row.torch)) for row in DTYPES]
            leaves["empty"] = empty
            leaves["repetitive"] = [shard("repetitive", torch.ones(1000))]
        return leaves

    save_on(2, state, tmp_path, strategy)
    space = "%20" if version == 2 else " "
    for row in DTYPES:
        full, scalar = matrices[row.name], scalars[row.name]
        array = opened(tmp_path / row.name)
        assert array.dtype == row.numpy
        assert (array.shape, array.chunks) == ((6, 4), (3, 2))
        assert array.metadata.zarr_format == 1 + version
        names = [type(compressor).__name__ for compressor in array.compressors]
        assert names == ([] if codec is None else [f"{codec.capitalize()}Codec"])
        assert bits(array[...]) == bits(full)
        assert bits(array[1:5, 1:3]) == bits(full[1:5, 1:3])
        assert array.attrs.asdict() == {}
        array = opened(tmp_path / f"{row.name}{space}scalar")
        assert (array.shape, bits(array[...])) == ((), bits(scalar))
        array = opened(tmp_path / f"{row.name}{space}empty")
        assert (array.shape, array.dtype) == ((0, 3), row.numpy)
        if row in KNOWN_TO_TENSORSTORE:
            store = open_tensorstore(tmp_path / row.name, file_format, open=True)
            assert store.dtype.name == row.name
            assert store.chunk_layout.read_chunk.shape == (3, 2)
            assert bits(store.read().result()) == bits(full)
            store = open_tensorstore(tmp_path / f"{row.name}{space}scalar", file_format)
            assert bits(store.read().result()) == bits(scalar)
    size = (tmp_path / "repetitive" / ("c.0" if version == 2 else "0")).stat().st_size
    assert size == 4000 if codec is None else size < 400
    assert bits(opened(tmp_path / "repetitive")[...]) == bits(torch.ones(1000))


def test_the_group_of_zarr_2_lists_all_arrays_from_consolidated_metadata(tmp_path: Path) -> None:
    full = {
        "decoder.weight": torch.ones(2, 3).bfloat16(),
        "optimizer/state/ü": torch.arange(4),
        "8 bits": torch.ones(3).to(torch.float8_e4m3fn),
    }
    names = ["decoder.weight", "optimizer%2Fstate%2F%C3%BC", "8%20bits"]
    state = {**wholes(full), "o": dc.ShardedObject("rng", 5, (1,), (0,)), "step": 1}
    dc.save(state, tmp_path, ("zarr", 2))
    alone: Any = zarr.open_group(str(tmp_path), mode="r", use_consolidated=False)
    assert bits(alone["decoder.weight"][...]) == bits(full["decoder.weight"])
    groups: list[zarr.Group] = [
        zarr.open_group(str(tmp_path), mode="r"),
        zarr.open_consolidated(str(tmp_path), mode="r"),
        zarr.open_group(str(tmp_path), mode="r", use_consolidated=True),
    ]
    for group in groups:
        assert group.metadata.consolidated_metadata is not None
        arrays: Any = dict(group.members())
        assert {name: bits(array[...]) for name, array in arrays.items()} == {
            name: bits(tensor) for name, tensor in zip(names, full.values(), strict=True)
        }
    dc.remove_sharded_tensors(tmp_path, "optimizer/")
    (tmp_path / ".dckpt" / "index.json").unlink()
    assert set(zarr.open_group(str(tmp_path), mode="r").keys()) == {names[0], names[2]}
    assert set(dc.load_tensors_metadata(tmp_path)) == {"decoder.weight", "8 bits"}


def uneven(key: str, rank: int) -> dc.ShardedTensor:
    """Three rows on rank 0, seven on rank 1."""
    return between(key, UNEVEN, *((0, 3), (3, 10))[rank])


def flattened(key: str, rank: int) -> dc.ShardedTensor:
    """Five elements of the flattening on rank 0, seven on rank 1."""
    return flat(key, FLAT, *((0, 5), (5, 12))[rank])


UNEVEN = torch.arange(20).reshape(10, 2).bfloat16()
FLAT = torch.arange(12.0).reshape(3, 4)


def test_uneven_and_flattened_keys(tmp_path: Path) -> None:
    """Groups of pieces; in format 1 arrays, as Megatron writes them: test_megatron_fixtures.py."""

    def state(comm: Comm) -> dict[str, Any]:
        return {"f": flattened("f", comm.rank), "u": uneven("u", comm.rank)}

    save_on(2, state, tmp_path, ("zarr", 2))
    flat, group = (zarr.open_group(str(tmp_path / key), mode="r") for key in "fu")
    assert {key: bits(array[...]) for key, array in group.arrays()} == {
        "piece.0.0": bits(UNEVEN[:3]),
        "piece.3.0": bits(UNEVEN[3:]),
    }
    assert {key: bits(array[...]) for key, array in flat.arrays()} == {
        "piece.0.0-0": bits(FLAT.reshape(-1)[:5]),
        "piece.0.0-5": bits(FLAT.reshape(-1)[5:]),
    }
    ours: Any = group.attrs["dist_checkpointing"]
    assert (ours["global_shape"], ours["data_type"]) == ([10, 2], "bfloat16")
    assert (ours["offsets"], ours["shapes"]) == ([[0, 0], [3, 0]], [[3, 2], [7, 2]])
    described: Any = flat.attrs["dist_checkpointing"]
    assert described["flat"] == [[0, 5], [5, 12]]


# TensorStore.


def open_tensorstore(path: Path, file_format: Format, **spec: Any) -> Any:
    driver = {1: "zarr", 2: "zarr3"}[file_format[1]]
    kvstore = {"driver": "file", "path": f"{path}/"}
    return tensorstore.open({"driver": driver, "kvstore": kvstore, **spec}).result()


# TensorStore 0.1.86 has no float8_e8m0fnu.
KNOWN_TO_TENSORSTORE = [row for row in DTYPES if row.name != "float8_e8m0fnu"]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", EXTENDED, ids=[row.name for row in EXTENDED])
def test_zarr_and_tensorstore_agree_on_arrays_of_our_dtypes(
    tmp_path: Path, dtype: DType, zarr_format: Any
) -> None:
    full = random_bits((3, 4), dtype.torch)
    for fill in (0.0, 1.0, float("inf"), float("nan")):
        fill_value = None if zarr_format == 2 else dtype.numpy.type(fill)
        folder = tmp_path / str(fill)
        array = zarr.create_array(
            str(folder), shape=(6, 4), chunks=(3, 2), dtype=dtype.numpy, zarr_format=zarr_format,
            fill_value=fill_value, compressors=None, config={"write_empty_chunks": True},
        )  # fmt: skip
        array[:3] = as_numpy(full)
        again = opened(folder)
        assert bits(again[:3]) == bits(full)
        if zarr_format == 2:
            assert json.loads((folder / ".zarray").read_text())["dtype"] == dtype.zarr_v2
        else:
            assert bits(again.fill_value) == bits(fill_value)
        if dtype not in KNOWN_TO_TENSORSTORE:
            continue
        store = open_tensorstore(folder, ("zarr", zarr_format - 1), open=True)
        assert store.dtype.name == dtype.name
        assert bits(store[:3].read().result()) == bits(full)
        if zarr_format == 3:
            rest = store[3:].read().result().astype(np.float32)
            assert np.array_equal(rest, np.full((3, 4), fill_value, np.float32), equal_nan=True)


# Our index, rebuilt.


def all_kinds(rank: int) -> dict[str, Any]:
    def even(key: str, data: torch.Tensor) -> dc.ShardedTensor:
        return shard(key, data + rank, (0, rank, 2))

    return {
        "even": even("even", torch.arange(6).reshape(2, 3)),
        "bf16": even("bf16", torch.arange(6).reshape(2, 3).bfloat16()),
        "slash": even("a/b/c", torch.ones(2)),
        "long": even("x" * 300, torch.zeros(2)),
        "long too": even("x" * 301, torch.ones(2)),
        "percent": even("100%~.", torch.full((2,), 5.0)),
        "uneven": uneven("uneven", rank),
        "long uneven": uneven("/" * 200, rank),
        "flat": flattened("flat", rank),
        "scalar": shard("scalar", torch.tensor(2.5), replica_id=rank),
        "empty": shard("empty", torch.empty(0, 3), replica_id=rank),
        "object": dc.ShardedObject("object", rank, (2,), (rank,)),
    }


@pytest.mark.parametrize(
    ("codec", "lost"),
    [
        *((codec, ".dckpt") for codec in (None, "blosc", "tensorstore")),
        *((codec, ".dckpt/index.json") for codec in ("zstd", "tensorstore")),
    ],
)
def test_without_its_index_a_checkpoint_loads_the_same(
    tmp_path: Path, codec: str | None, lost: str
) -> None:
    is_zarr = codec != "tensorstore"
    strategy = Zarr3SaveShardedStrategy(codec=codec) if is_zarr else "tensorstore"
    save_on(2, lambda comm: all_kinds(comm.rank), tmp_path, strategy)
    metadata = dc.load_sharded_metadata(tmp_path)
    plain = {key: bits(value) for key, value in dc.load_plain_tensors(tmp_path).items()}
    if lost == ".dckpt":
        shutil.rmtree(tmp_path / lost)
    else:
        (tmp_path / lost).unlink()
        with pytest.raises(dc.CorruptCheckpointError, match=r"index\.json"):
            dc.verify_checkpoint(tmp_path)
    for place in (tmp_path, copied_up(tmp_path, new_url())):
        assert dc.load_sharded_metadata(place) == metadata
        assert {k: bits(v) for k, v in dc.load_plain_tensors(place).items()} == plain

    def load_rank(comm: Comm) -> None:
        wanted = all_kinds(1 - comm.rank)
        template = {name: leaf.without_data() for name, leaf in wanted.items()}
        for name, value in dc.load(template, tmp_path, comm=comm).items():
            right = wanted[name].data
            assert value == right if name == "object" else bits(value) == bits(right)

    run_ranks(2, load_rank)


# Databases of other programs.


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


PACKED = [codec("bytes", endian="big"), codec("gzip", level=5), {"name": "crc32c"}]
CODECS: dict[str, Any] = {
    "model/plain": [codec("bytes", endian="little")],
    "turned": [codec("transpose", order=[1, 0]), *PACKED],
    "sharded": [codec("sharding_indexed", chunk_shape=[2, 2], codecs=PACKED)],
}
FILLED = torch.full((6, 5), 7.0)
FILLED[4:, 1:] = torch.arange(8.0).reshape(2, 4)
"""The first chunks are the fill value, which is not stored."""


def write_by_tensorstore(folder: Path, kind: str) -> None:
    for name, codecs in CODECS.items():
        place: Any = f"file://{folder}/{name}/"
        if kind == "ocdbt":
            place = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        grid = codec("regular", chunk_shape=[4, 4])
        described = {"shape": [6, 5], "data_type": "float32", "fill_value": 7, "chunk_grid": grid}
        if name == "turned":
            described["chunk_key_encoding"] = codec("v2", separator="/")
        spec = {"driver": "zarr3", "kvstore": place, "metadata": described | {"codecs": codecs}}
        tensorstore.open(spec, create=True).result().write(FILLED.numpy()).result()


def write_by_zarr(folder: Path) -> None:
    group, config = zarr.create_group(str(folder)), {"write_empty_chunks": False}
    options: Any = {"chunks": (4, 4), "dtype": "float32", "fill_value": 7, "config": config}
    for name in CODECS:
        group.create_array(name, shape=(6, 5), **options)[...] = FILLED.numpy()
    group.create_array("names", shape=(3,), dtype=str)  # is left out


@pytest.mark.parametrize("is_in_store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("kind", ["ocdbt", "folders", "zarr-python"])
def test_a_database_of_another_program_is_read(
    tmp_path: Path, kind: str, *, is_in_store: bool
) -> None:
    folder: Any = tmp_path / "db"
    write_by_zarr(folder) if kind == "zarr-python" else write_by_tensorstore(folder, kind)
    if is_in_store:
        store = dc.ObjectPath.of(new_url())
        for name, content in files_in(folder).items():
            put(store, name, content)
        folder = store
    opened = dc.Checkpoint.open(folder)
    assert set(opened) == set(CODECS)
    for key in CODECS:
        assert torch.equal(opened[key][...], FILLED), key
        assert torch.equal(opened[key][3:5, 1], FILLED[3:5, 1]), key
    assert opened.common == {}
    is_read_whole = is_in_store or kind == "zarr-python"
    assert opened["sharded"].chunk_shape == ((4, 4) if is_read_whole else (2, 2))
    dc.verify_checkpoint(folder)

    def load_rank(comm: Comm) -> None:
        template = {key: rows(key, torch.zeros(6, 5), comm) for key in CODECS}
        template["flat"] = flat("turned", torch.zeros(6, 5), 15 * comm.rank, 15 * comm.rank + 15)
        loaded = dc.load(template, folder, comm=comm)
        for key in CODECS:
            assert torch.equal(loaded[key], FILLED.chunk(2)[comm.rank])
        assert torch.equal(loaded["flat"], FILLED.reshape(2, -1)[comm.rank])

    run_ranks(2, load_rank)
    if kind != "ocdbt":
        assert dc.Checkpoint.open(folder / "turned")["turned"][5, 3].item() == 6.0


@pytest.mark.parametrize("kind", ["ocdbt", "folders"])
def test_a_damaged_database_of_another_program(tmp_path: Path, kind: str) -> None:
    write_by_tensorstore(tmp_path, kind)
    refused, files = 0, [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            found = dc.load_plain_tensors(tmp_path)
        except dc.CheckpointingException:
            refused += 1
        else:  # of an older version of the database
            assert all(torch.equal(found[key], FILLED) for key in CODECS)
        path.write_bytes(whole)
    assert refused == len(files) if kind == "folders" else refused > 1


def test_half_of_a_copy_of_a_checkpoint_is_not_taken_for_a_database(tmp_path: Path) -> None:
    state = {"w": shard("w", torch.ones(4)), "step": 1}
    dc.save(state, tmp_path / "other", ("tensorstore", 1))
    shutil.rmtree(tmp_path / "other" / ".dckpt")
    for name in ("metadata.json", "common.pt"):
        (tmp_path / "other" / name).unlink()
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.load(state, tmp_path / "other")
    tmp_path /= "c"
    dc.save({"w": shard("w", torch.ones(4))}, tmp_path, ("zarr", 2))
    (tmp_path / "w" / "c.0").unlink()
    shutil.rmtree(tmp_path / ".dckpt")
    for name in ("metadata.json", "common.pt", "zarr.json"):
        (tmp_path / name).unlink()
        with pytest.raises(dc.CheckpointNotFoundError):
            dc.Checkpoint.open(tmp_path)
