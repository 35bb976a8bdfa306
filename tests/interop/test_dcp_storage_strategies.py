"""DCP's own storages as strategies: the conformance suite, and torch reading what they hold."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dist_checkpointing as dc
from dist_checkpointing.interop import DCPStorageLoadStrategy, DCPStorageSaveStrategy
from dist_checkpointing.strategies import StrategyAction, default_strategies
from dist_checkpointing.testing import StrategyConformance, run_ranks
from few_worlds import FewWorlds
from states import between, flat, save_on, shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

writes_files = partial(FileSystemWriter, sync_files=False)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = {
        StrategyAction.SAVE_SHARDED: DCPStorageSaveStrategy(writes_files),
        StrategyAction.LOAD_SHARDED: DCPStorageLoadStrategy(FileSystemReader),
    }
    for action, strategy in strategies.items():
        monkeypatch.setitem(default_strategies[action.value], ("dcp", 1), strategy)


@pytest.mark.usefixtures("registered")
class TestFiles(FewWorlds, StrategyConformance):
    backend = ("dcp", 1)


PAIRS: dict[str, tuple[Any, Any]] = {
    "files": (writes_files, FileSystemReader),
    "a file a tensor": (
        partial(FileSystemWriter, sync_files=False, single_file_per_rank=False),
        FileSystemReader,
    ),
    "threads": (partial(FileSystemWriter, sync_files=False, thread_count=3), FileSystemReader),
    "fsspec": (partial(FsspecWriter, sync_files=False), FsspecReader),
    "safetensors": (
        partial(HuggingFaceStorageWriter, save_distributed=True),
        HuggingFaceStorageReader,
    ),
}

FULL = torch.arange(70.0).reshape(7, 10)
LAYERS = torch.arange(24).reshape(4, 3, 2)


def state(rank: int, world_size: int) -> dict[str, Any]:
    """Uneven rows, prepended layers, a replica, an object, and common state."""
    rows = [0, *(7 * (r + 1) // world_size for r in range(world_size))]
    first, last = rows[rank], rows[rank + 1]
    return {
        "rows": between("rows", FULL, first, last),
        "layers": [
            shard("layers", LAYERS[layer], (0, layer, 4), prepend_axis_num=1)
            for layer in range(rank, 4, world_size)
        ],
        "half": shard("half", FULL[0].to(torch.bfloat16), replica_id=rank),
        "rng": dc.ShardedObject("rng", [rank], (world_size,), (rank,)),
        "step": 9,
    }


def saved_on(world_size: int, folder: Path, writer: Any) -> None:
    strategy = DCPStorageSaveStrategy(writer)
    save_on(world_size, lambda comm: state(comm.rank, world_size), folder, strategy)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_storage_keeps_every_sharding(tmp_path: Path, pair: str) -> None:
    writer, reader = PAIRS[pair]
    saved_on(4, tmp_path, writer)

    def one(comm: Any) -> Any:
        start, stop = (0, 3) if comm.rank == 0 else (3, 10)
        template = {
            "rows": dc.ShardedTensor(
                "rows", None, FULL.dtype, (7, stop - start), (7, 10), (0, start), None
            ),
            "layers": [
                shard("layers", torch.zeros(3, 2, dtype=torch.int64), (0, i, 4), prepend_axis_num=1)
                for i in range(4)
            ],
            "half": shard("half", torch.zeros(10, dtype=torch.bfloat16)),
            "rng": dc.ShardedObject("rng", None, (4,), (2,)),
        }
        return dc.load(template, tmp_path, DCPStorageLoadStrategy(reader), comm=comm)

    found = run_ranks(2, one)
    assert torch.equal(torch.cat([found[0]["rows"], found[1]["rows"]], dim=1), FULL)
    for own in found:
        assert torch.equal(torch.stack(own["layers"]), LAYERS)
        assert torch.equal(own["half"], FULL[0].to(torch.bfloat16))
        assert (own["rng"], own["step"]) == ([2], 9)
    # DCP itself reads the folder.
    wholes = {"rows": torch.zeros(7, 10), "layers": torch.zeros(4, 3, 2, dtype=torch.int64)}
    dcp_load(wholes, storage_reader=reader(str(tmp_path / "dcp")))
    assert torch.equal(wholes["rows"], FULL)
    assert torch.equal(wholes["layers"], LAYERS)


@pytest.mark.parametrize("pair", ["files", "fsspec", "safetensors"])
def test_a_folder_that_dcp_alone_has_written(tmp_path: Path, pair: str) -> None:
    writer, reader = PAIRS[pair]
    written = {"rows": FULL, "half": FULL[0].to(torch.bfloat16)}
    # Safetensors holds nothing but tensors; of the others, those are what is offered.
    dcp_save(
        written if pair == "safetensors" else {**written, "step": 4},
        storage_writer=writer(str(tmp_path)),
    )
    strategy = DCPStorageLoadStrategy(reader)
    assert strategy.load_tensors_metadata(tmp_path).keys() == {"rows", "half"}
    template = {
        "rows": dc.ShardedTensor("rows", None, FULL.dtype, (2, 5), (7, 10), (3, 4), None),
        "half": shard("half", torch.zeros(10, dtype=torch.bfloat16)),
    }
    found = strategy.load(template, tmp_path)
    assert torch.equal(found["rows"], FULL[3:5, 4:9])
    assert torch.equal(found["half"], written["half"])


def test_flattened_ranges_are_stored_as_boxes_that_dcp_reads(tmp_path: Path) -> None:
    cuts = [0, 13, 58, 70]

    def one(comm: Any) -> dict[str, Any]:
        return {"f": flat("f", FULL, *cuts[comm.rank : comm.rank + 2])}

    save_on(3, one, tmp_path, DCPStorageSaveStrategy(writes_files))
    found = {"f": torch.zeros(7, 10)}
    dcp_load(found, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert torch.equal(found["f"], FULL)


def test_a_safetensors_file_cannot_hold_two_parts_of_a_tensor(tmp_path: Path) -> None:
    halves = [shard("w", FULL[:, 5 * i : 5 * i + 5], (1, i, 2)) for i in range(2)]
    strategy = DCPStorageSaveStrategy(PAIRS["safetensors"][0])
    with pytest.raises(dc.InvalidShardingError, match="'w': this rank has several parts"):
        dc.save({"w": halves}, tmp_path, strategy)
    dc.save({"w": halves}, tmp_path, DCPStorageSaveStrategy(writes_files))


def test_the_reader_must_be_passed_or_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_on(1, tmp_path, writes_files)
    text = r"Pass sharded_strategy=DCPStorageLoadStrategy"
    with pytest.raises(dc.StrategyNotFoundError, match=text):
        dc.load_plain_tensors(tmp_path)
    assert dc.load_common_state_dict(tmp_path) == {"step": 9}
    loads = default_strategies[StrategyAction.LOAD_SHARDED.value]
    monkeypatch.setitem(loads, ("dcp", 1), DCPStorageLoadStrategy(FileSystemReader))
    assert torch.equal(dc.load_plain_tensors(tmp_path)["rows"], FULL)


class Lies(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.state_dict_metadata["rows"].chunks[0].offsets = torch.Size((5, 0))  # type: ignore[union-attr]
        return metadata


def test_metadata_that_cannot_be_read_or_believed(tmp_path: Path) -> None:
    saved_on(1, tmp_path, writes_files)
    template = {"rows": shard("rows", torch.zeros(7, 10))}
    with pytest.raises(dc.CorruptCheckpointError, match="'rows' has pieces outside of it"):
        dc.load(template, tmp_path, DCPStorageLoadStrategy(Lies))
    path = tmp_path / "dcp" / ".metadata"
    for damage in (lambda: path.write_bytes(b"garbage"), path.unlink):
        damage()
        text = "FileSystemReader cannot read its metadata"
        with pytest.raises(dc.CorruptCheckpointError, match=text):
            dc.load(template, tmp_path, DCPStorageLoadStrategy(FileSystemReader))
