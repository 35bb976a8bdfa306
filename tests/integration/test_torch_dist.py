"""torch DCP and ("torch_dist", 1), both ways; checkpoints of other versions made from what is
known of them."""

import enum
import json
import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.serialization import get_crc32_options, set_crc32_options

import dist_checkpointing as dc
from damage import files_in, flip, place_of
from dist_checkpointing.comm import Comm
from dist_checkpointing.serialization import preview_removal
from dist_checkpointing.storage import Durability, ReadMode, StorageOptions
from dist_checkpointing.strategies import (
    LocalShardsContainer,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from dist_checkpointing.testing import (
    CUT_SHAPE,
    CUTS,
    assert_same_bits,
    data_of,
    poisoned,
    random_bits,
    run_ranks,
    template,
)
from states import rows, shard as whole, wholes

# DCP warns whoever uses it in one process, also one who says so.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BACKEND = ("torch_dist", 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64)


def by_dcp(folder: Path) -> Any:
    """What torch DCP reads of a checkpoint."""
    return FileSystemReader(folder).read_metadata()


def stored_bytes(folder: Path, key: str | None = None) -> list[bytes]:
    """The bytes of each stored value."""
    return [
        (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        for at, info in by_dcp(folder).storage_data.items()
        if key in (None, at.fqn)
    ]


def flattened_from(folder: Path, key: str) -> tuple[int, ...] | None:
    """The shape that Megatron looks for beside a tensor that was flattened."""
    known: dict[str, tuple[int, ...]] = by_dcp(folder).mcore_data.get(key, {})
    return known.get("nd_reformulated_orig_global_shape")


def dcp_save(state: dict[str, Any], folder: Path, *, flat: bool = False, **options: Any) -> None:
    """Save with plain DCP, in one process; ``flat`` keeps values as they are."""
    planner = DefaultSavePlanner(flatten_state_dict=not flat)
    writer = FileSystemWriter(folder, **options)
    save_by_dcp(state, storage_writer=writer, planner=planner, no_dist=True)


def dcp_load(state: dict[str, Any], folder: Path) -> None:
    load_by_dcp(state, storage_reader=FileSystemReader(folder), no_dist=True)


def empty(key: str, like: torch.Tensor) -> dc.ShardedTensor:
    return whole(key, poisoned(like))


def save_on(world_size: int, folder: Path, state_of: Callable[[int], dict[str, Any]]) -> None:
    run_ranks(world_size, lambda comm: dc.save(state_of(comm.rank), folder, BACKEND, comm=comm))


# DCP writes, we read.

COMPLEX = torch.randn(6, 4, dtype=torch.complex64)
PLAIN: dict[str, torch.Tensor] = {
    **{str(dtype): random_bits(CUT_SHAPE, dtype, i) for i, dtype in enumerate(DTYPES)},
    "transposed": torch.arange(24.0).reshape(4, 6).t(),
    "rows of more": torch.arange(100.0).reshape(10, 10)[3:7],
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.empty(0, 3),
    # DCP stores the other bytes, and a word about them.
    "conjugate": COMPLEX.conj(),
    "negative": torch._neg_view(COMPLEX.imag.contiguous()),
}


def test_what_plain_dcp_writes_is_a_checkpoint(tmp_path: Path) -> None:
    assert PLAIN["conjugate"].is_conj()
    assert PLAIN["negative"].is_neg()
    dcp_save({"model": PLAIN}, tmp_path, thread_count=3)
    assert dc.check_is_distributed_checkpoint(tmp_path)
    assert not (tmp_path / "metadata.json").exists()
    tensors, opened = dc.load_plain_tensors(tmp_path), dc.Checkpoint.open(tmp_path)
    assert tensors.keys() == {f"model.{key}" for key in PLAIN}
    for key, tensor in PLAIN.items():
        values = tensor.resolve_conj().resolve_neg().contiguous()
        assert_same_bits(tensors[f"model.{key}"], values, key)
        if tensor.ndim:
            assert_same_bits(opened[f"model.{key}"][1:3], values[1:3], key)


@pytest.mark.parametrize("mode", ReadMode)
def test_a_tensor_stored_with_other_strides_is_read_in_parts(
    tmp_path: Path, mode: ReadMode
) -> None:
    full = torch.arange(600.0 * 70).reshape(70, 600).t()
    dcp_save({"w": full}, tmp_path)
    strategy = TorchDistLoadShardedStrategy(options=StorageOptions(read_mode=mode, buffer_bytes=64))
    for start in (0, 100, 599):
        part = dc.ShardedTensor.from_offset("w", torch.zeros(1, 7), (600, 70), (start, 13))
        loaded = dc.load({"w": part}, tmp_path, strategy)
        assert_same_bits(loaded["w"], full[start : start + 1, 13:20].contiguous(), str(start))


VALUES: dict[str, Any] = {
    "step": 17,
    "optim": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.95)}], "name": "adam"},
    "nothing": None,
    "rng": [1, 2, 3],
}


def test_enums_as_python_3_11_0_to_3_11_3_pickles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name ``getattr``, which nothing ever calls: a hostile one gets nothing out of it."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    w = torch.arange(6.0)
    dcp_save({"w": w}, tmp_path / "dcp")
    dc.save({"w": whole("w", w)}, tmp_path / "own", "torch_dist")
    for folder in (tmp_path / "dcp", tmp_path / "own"):
        assert b"getattr" in (folder / ".metadata").read_bytes()
        assert torch.equal(dc.load_plain_tensors(folder)["w"], w)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(HostileGetattr()))
    with pytest.raises(dc.CorruptCheckpointError, match="not the metadata of a DCP checkpoint"):
        dc.load_plain_tensors(tmp_path / "dcp")


class HostileGetattr:
    def __reduce__(self) -> Any:
        return getattr, ("text", "upper")


def test_values_of_plain_dcp_are_common_state_nested_as_they_were(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(3), **VALUES}, tmp_path)
    assert dc.load_common_state_dict(tmp_path) == VALUES
    loaded = dc.load({"w": empty("w", torch.ones(3))}, tmp_path, strict="raise_all")
    assert torch.equal(loaded.pop("w"), torch.ones(3))
    assert loaded == VALUES


class Foreign:
    """No plain data."""


def test_a_value_of_plain_dcp_runs_no_code(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(3), "thing": Foreign()}, tmp_path)
    with pytest.raises(dc.UnsupportedFormatError, match="Foreign") as caught:
        dc.load({"w": empty("w", torch.ones(3))}, tmp_path)
    assert "'thing'" in str(caught.value)
    loaded = dc.load({"w": empty("w", torch.ones(3))}, tmp_path, trusted=True)
    assert type(loaded["thing"]).__name__ == "Foreign"


def test_tensors_of_1_d_that_were_flattened_before_megatron_0_9(tmp_path: Path) -> None:
    """They are plain chunks of a 1-D tensor, and load as a range of anything 1-D."""
    full = torch.arange(10.0)
    pieces = [
        dc.ShardedTensor.from_rank_offsets_flat("b", full[a:b], (10,), flattened_range=slice(a, b))
        for a, b in ((0, 4), (4, 10))
    ]
    dcp_save({"b": LocalShardsContainer.from_sh_tens(pieces)}, tmp_path)
    chunks = by_dcp(tmp_path).state_dict_metadata["b"].chunks
    assert [(*c.offsets, *c.sizes) for c in chunks] == [(0, 4), (4, 6)]
    wanted = dc.ShardedTensor.from_rank_offsets_flat(
        "b", torch.zeros(5), (10,), flattened_range=slice(2, 7)
    )
    assert torch.equal(dc.load({"b": wanted}, tmp_path)["b"], full[2:7])


# We write, DCP reads.


def test_plain_dcp_reads_every_cut(tmp_path: Path) -> None:
    cuts = {name: cut for name, cut in CUTS.items() if not name.startswith("flattened")}
    tensors = {
        f"{name} {dtype}": random_bits(CUT_SHAPE, dtype, i)
        for i, dtype in enumerate(DTYPES)
        for name in cuts
    }
    others = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}

    def state_of(rank: int) -> dict[str, Any]:
        shards = {k: cuts[k.split()[0]](k, t, 4)[rank] for k, t in tensors.items()}
        rest = {k: whole(k, t, replica_id=rank) for k, t in others.items()}
        return {**shards, **rest, "step": 5}

    save_on(4, tmp_path, state_of)
    loaded = {key: poisoned(tensor) for key, tensor in (tensors | others).items()}
    dcp_load(loaded, tmp_path)
    for key, tensor in (tensors | others).items():
        assert_same_bits(loaded[key], tensor, key)
    names = {path.name.split("_")[2] for path in tmp_path.glob("*.distcp")}
    assert names <= {str(rank) for rank in range(4)}


def test_objects_are_written_as_megatron_does(tmp_path: Path) -> None:
    cells = [dc.ShardedObject("rng", {"seed": i + 1}, (1, 2), (0, i)) for i in range(2)]
    dc.save({"rng": cells, "w": whole("w", torch.ones(2))}, tmp_path, BACKEND)
    names = sorted(at.fqn for at in by_dcp(tmp_path).storage_data if at.fqn != "w")
    assert names == ["rng/shard_0.0_1.2", "rng/shard_0.1_1.2"]
    (data,) = stored_bytes(tmp_path, names[1])
    assert torch.load(BytesIO(data), weights_only=True) == [{"seed": 2}]


# Flattened tensors.

FLATTENED = ("flattened", "flattened_rows", "flattened_layers")


@pytest.mark.parametrize("name", FLATTENED)
def test_flattened_tensors_are_stored_as_megatron_does(tmp_path: Path, name: str) -> None:
    full = random_bits(CUT_SHAPE, torch.float32)
    for world_size in (1, 4):
        folder = tmp_path / str(world_size)
        cut = CUTS[name]("w", full, world_size)
        save_on(world_size, folder, lambda rank: {"w": cut[rank]})  # noqa: B023
        rows = {"flattened": 1, "flattened_rows": max(1, world_size // 2), "flattened_layers": 8}[
            name
        ]
        size = by_dcp(folder).state_dict_metadata["w"].size
        assert size == (rows, 1, 1, full.numel() // rows)
        assert flattened_from(folder, "w") == CUT_SHAPE
        # What DCP makes of it, it puts together from the pieces in this order.
        loaded = {"w": torch.zeros(size)}
        dcp_load(loaded, folder)
        assert_same_bits(loaded["w"].reshape(CUT_SHAPE), full, "through DCP")


def uneven_flattened(full: torch.Tensor) -> list[dc.ShardedTensor]:
    """Two boxes of different size, the second of them in two ranges."""
    flat = [full[:3].reshape(-1), full[3:].reshape(-1)]
    ranges = [(0, 0, flat[0].numel()), (1, 0, 50), (1, 50, flat[1].numel())]
    return [
        dc.ShardedTensor(
            "w", flat[box][a:b].clone(), full.dtype, ((3, 5)[box], *full.shape[1:]),
            tuple(full.shape), ((0, 3)[box], 0, 0), None, flattened_range=slice(a, b),
        )
        for box, a, b in ranges
    ]  # fmt: skip


def test_flattened_tensors_that_megatron_does_not_know_are_stored_as_boxes(tmp_path: Path) -> None:
    full = random_bits(CUT_SHAPE, torch.bfloat16)
    shards = uneven_flattened(full)
    dc.save({"w": shards}, tmp_path, BACKEND)
    assert by_dcp(tmp_path).state_dict_metadata["w"].size == CUT_SHAPE
    assert flattened_from(tmp_path, "w") is None
    loaded = {"w": poisoned(full)}
    dcp_load(loaded, tmp_path)
    assert_same_bits(loaded["w"], full, "through DCP")
    wanted = {"w": [template(s) for s in shards]}
    for shard, tensor in zip(shards, dc.load(wanted, tmp_path, verify=True)["w"], strict=True):
        assert_same_bits(tensor, data_of(shard), "as it was saved")
    flip(*place_of(tmp_path, full[:1].reshape(-1)[:8]))
    with pytest.raises(dc.CorruptCheckpointError, match="checksum differs"):
        dc.load({"w": empty("w", full)}, tmp_path, verify=True)


# Megatron-Core >= 0.19, whose checkpoints have no common.pt. DCP writes a value as it is, so a list
# of one object is what Megatron writes.


@pytest.fixture
def newest_megatron(tmp_path: Path) -> Path:
    common = {"iteration": 42, "args": {"tp": 2}, "content_metadata": {"v": 1}}
    state = {
        "w": torch.arange(6.0),
        "rng/shard_0_2": [{"rank": 0}],
        "rng/shard_1_2": [{"rank": 1}],
        "common_state/shard_0_1": [common],
    }
    dcp_save(state, tmp_path, flat=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (tmp_path / "metadata.json").write_text(json.dumps(config))
    (tmp_path / "integrity.json").write_text('{"algorithm": "sha256", "files": {}}')
    return tmp_path


def test_the_common_state_is_an_object_inside(newest_megatron: Path) -> None:
    wanted = {
        "w": empty("w", torch.arange(6.0)),
        "rng": [dc.ShardedObject("rng", None, (2,), (i,)) for i in range(2)],
    }
    loaded = dc.load(wanted, newest_megatron, strict="raise_all")
    assert torch.equal(loaded["w"], torch.arange(6.0))
    assert loaded["rng"] == [{"rank": 0}, {"rank": 1}]
    assert (loaded["iteration"], loaded["args"]) == (42, {"tp": 2})
    assert dc.load_content_metadata(newest_megatron) == {"v": 1}
    assert dc.load_sharded_metadata(newest_megatron).keys() == {
        "w", "rng/shard_0_2", "rng/shard_1_2",
    }  # fmt: skip
    # A common.pt would be the one that counts.
    torch.save({"iteration": 1}, newest_megatron / "common.pt")
    assert dc.load_common_state_dict(newest_megatron) == {"iteration": 1}


def test_a_lost_common_pt_of_older_ones_is_an_error(tmp_path: Path) -> None:
    dc.save({"w": whole("w", torch.ones(2)), "step": 3}, tmp_path, BACKEND)
    (tmp_path / "common.pt").unlink()
    with pytest.raises(dc.CorruptCheckpointError, match=r"common\.pt"):
        dc.load({"w": empty("w", torch.ones(2))}, tmp_path)


# What is a checkpoint.


def test_a_folder_of_plain_dcp_is_not_saved_into(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2)}, tmp_path)
    before = files_in(tmp_path)
    for backend in ("torch_dist", "zarr"):
        for overwrite in (False, True):
            with pytest.raises(dc.CheckpointExistsError):
                dc.save({"w": whole("w", torch.zeros(2))}, tmp_path, backend, overwrite=overwrite)
    assert files_in(tmp_path) == before


def test_a_save_that_did_not_end_is_not_taken_for_one_of_plain_dcp(tmp_path: Path) -> None:
    dc.save({"w": whole("w", torch.ones(2))}, tmp_path / "c", BACKEND)
    (tmp_path / "c" / "metadata.json").unlink()
    assert (tmp_path / "c" / ".metadata").exists()
    assert not dc.check_is_distributed_checkpoint(tmp_path / "c")
    with pytest.raises(dc.CheckpointNotFoundError, match="never committed"):
        dc.load_plain_tensors(tmp_path / "c")
    dcp_save({"w": torch.ones(2)}, tmp_path / "megatron")
    torch.save({}, tmp_path / "megatron" / "common.pt")
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.load_plain_tensors(tmp_path / "megatron")


def test_a_tensor_named_like_a_cell_is_refused(tmp_path: Path) -> None:
    state = {
        "o": dc.ShardedObject("rng", 1, (1,), (0,)),
        "t": whole("rng/shard_0_1", torch.ones(2)),
    }
    with pytest.raises(dc.InvalidShardingError, match="name of a cell"):
        dc.save(state, tmp_path / "c", BACKEND)


# Files.


def test_what_stays_after_a_removal_is_still_flattened(tmp_path: Path) -> None:
    full = random_bits(CUT_SHAPE, torch.float32)

    def state_of(rank: int) -> dict[str, Any]:
        return {"w": whole("gone", full) if rank else CUTS["flattened"]("kept", full, 1)[0]}

    save_on(2, tmp_path, state_of)
    dc.remove_sharded_tensors(tmp_path, "gone")
    assert not (tmp_path / "__1_0.distcp").exists(), "nothing else is in it"
    assert_same_bits(dc.load({"w": empty("kept", full)}, tmp_path)["w"], full, "a flattened one")
    assert flattened_from(tmp_path, "kept") == CUT_SHAPE


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_below_a_separation_hint_have_files_of_their_own(
    tmp_path: Path, threads: int
) -> None:
    options = StorageOptions(threads=threads, durability=Durability.PAGE_CACHE)
    strategy = TorchDistSaveShardedStrategy(separation_hint="opt/", options=options)
    full = torch.arange(128.0)
    large = torch.zeros(2**26, dtype=torch.int8)  # 32 MiB a rank, enough for a file

    def one(comm: Comm) -> None:
        state: dict[str, Any] = {k: rows(k, large, comm) for k in ("opt/m", "opt/v")}
        state |= {k: rows(k, full, comm) for k in ("other", "w")}
        state["o"] = dc.ShardedObject("opt/o", "kept", (1,), (0,), replica_id=comm.rank)
        dc.save(state, tmp_path, strategy, comm=comm)

    run_ranks(2, one)
    apart = sorted(path.name for path in tmp_path.glob("opt*"))
    numbers = range(min(threads, 2))
    assert apart == [f"opt%2F__{rank}_{number}.distcp" for rank in (0, 1) for number in numbers]
    before = {path.name for path in tmp_path.iterdir()}
    assert set(preview_removal(tmp_path, "opt/").files) == set(apart)
    dc.remove_sharded_tensors(tmp_path, "opt/")
    assert before - {path.name for path in tmp_path.iterdir()} == set(apart)
    wanted = {"w": empty("w", full), "o": dc.ShardedObject("opt/o", None, (1,), (0,))}
    loaded = dc.load(wanted, tmp_path, verify=True)
    assert loaded["o"] == "kept"
    assert torch.equal(loaded["w"], full)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_crc_is_written_if_torch_save_would(tmp_path: Path, *, enabled: bool) -> None:
    full = torch.arange(1000.0)
    before = get_crc32_options()
    set_crc32_options(enabled)
    try:
        dc.save(wholes({"w": full, "t": full.reshape(10, 100).t()}), tmp_path, BACKEND)
    finally:
        set_crc32_options(before)
    for data in stored_bytes(tmp_path):
        with zipfile.ZipFile(BytesIO(data)) as archive:
            assert (archive.testzip() is None) == enabled
    assert_same_bits(dc.load_plain_tensors(tmp_path)["w"], full, "w")


@pytest.mark.parametrize("mode", ReadMode)
def test_a_small_buffer_is_enough(tmp_path: Path, mode: ReadMode) -> None:
    """For values that have to be copied on their way, in either direction."""
    full = random_bits((300, 400), torch.bfloat16)
    options = StorageOptions(buffer_bytes=1000, read_mode=mode, threads=2)
    tensors = {"strided": full[:, ::2], "transposed": full.t(), "plain": full}
    dc.save(wholes(tensors), tmp_path, TorchDistSaveShardedStrategy(options=options))
    wanted = {}
    for key, tensor in tensors.items():
        into = torch.zeros(200, 400, dtype=full.dtype)[::2, 1::2]
        wanted[key] = dc.ShardedTensor.from_offset(key, into[:, :55], tensor.shape, (7, 9))
    dc.load(wanted, tmp_path, TorchDistLoadShardedStrategy(options=options))
    for key, tensor in tensors.items():
        part = tensor[7:107, 9:64].contiguous()
        assert_same_bits(data_of(wanted[key]).contiguous(), part, key)
