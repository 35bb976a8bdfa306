"""("torch_dist", 1) with files that are missing, cut off, hostile or full of nonsense."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from hostile_pickles import archive
from states import cell, flat, rows, save_on, shard

BACKEND = ("torch_dist", 1)
FULL = {
    "rows": torch.arange(1.0, 41.0).reshape(10, 4),
    "bits": torch.arange(1, 65).bfloat16(),
    "flat": torch.arange(1.0, 31.0).reshape(5, 6),
}


def state(comm: Comm) -> dict[str, Any]:
    return {
        "rows": rows("rows", FULL["rows"], comm),
        "bits": shard("bits", FULL["bits"], replica_id=comm.rank),
        "flat": flat("flat", FULL["flat"], *((0, 13), (13, 30))[comm.rank]),
        "object": cell("object", {"a": [comm.rank]}, comm),
    }


def wanted() -> dict[str, Any]:
    tensors = {k: shard(k, torch.zeros_like(t)) for k, t in FULL.items()}
    cells = [dc.ShardedObject("object", None, (2,), (rank,)) for rank in range(2)]
    return {**tensors, "object": cells}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "c"
    save_on(2, state, folder, BACKEND)
    check_loads(folder)
    return folder


@pytest.fixture
def damaged(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "c"))


def check_loads(folder: Path) -> None:
    loaded = dc.load(wanted(), folder)
    for key, full in FULL.items():
        assert torch.equal(loaded[key], full)
    assert loaded["object"] == [{"a": [0]}, {"a": [1]}]


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what ``.metadata`` says, by DCP's own classes."""
    path = folder / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


def info_of(content: Any, key: str) -> Any:
    return next(info for at, info in content.storage_data.items() if at.fqn == key)


# .metadata


def test_metadata_is_missing(damaged: Path) -> None:
    (damaged / ".metadata").unlink()
    for read in (dc.load_plain_tensors, dc.load_sharded_metadata):
        with pytest.raises(dc.CorruptCheckpointError, match="no metadata") as caught:
            read(damaged)
        assert caught.value.findings[0].path == str(damaged / ".metadata")
    shutil.rmtree(damaged / ".dckpt")
    (damaged / "metadata.json").unlink()
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.load_plain_tensors(damaged)


class _Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def test_foreign_classes_are_named_and_nothing_runs(damaged: Path, tmp_path: Path) -> None:
    trace, good = tmp_path / "trace", (damaged / ".metadata").read_bytes()
    for place in ("planner_data", "storage_meta", "mcore_data", "version"):
        (damaged / ".metadata").write_bytes(good)
        things = {"x": _Runs(f"touch {trace}"), "y": [io.BytesIO, zipfile.ZipFile]}
        rewrite(damaged, lambda content: setattr(content, place, things))  # noqa: B023
        for trusted in (False, True):
            with pytest.raises(dc.UnsupportedFormatError, match="refused to unpickle") as caught:
                dc.load(wanted(), damaged, trusted=trusted)
            for words in ("_io.BytesIO", "posix.system", "zipfile.ZipFile", damaged / ".metadata"):
                assert str(words) in str(caught.value)
    assert not trace.exists()


def test_a_pickle_cannot_change_a_class(damaged: Path) -> None:
    """By the instruction that fills an object, applied to the class itself."""
    before = dict(vars(dcp_metadata.Metadata))
    evil = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x07\x00\x00\x00versionX\x04\x00\x00\x00evils\x86b."
    )
    (damaged / ".metadata").write_bytes(evil)
    with pytest.raises(dc.CorruptCheckpointError):
        dc.load_plain_tensors(damaged)
    assert dict(vars(dcp_metadata.Metadata)) == before


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "", "a/../../b"])
def test_files_outside_of_the_checkpoint_are_refused(damaged: Path, name: str) -> None:
    rewrite(damaged, lambda content: setattr(info_of(content, "bits"), "relative_path", name))
    with pytest.raises(dc.CorruptCheckpointError, match="no file of a checkpoint"):
        dc.load(wanted(), damaged)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("position", [1 << 60, -1])
def test_positions_in_lists_that_nobody_had(tmp_path: Path, position: int) -> None:
    dcp_save({"w": torch.ones(2), "values": [{"a": 1}, {"a": 2}]}, checkpoint_id=tmp_path)
    path = ("values", position, "a")
    rewrite(tmp_path, lambda content: content.planner_data.update({"values.1.a": path}))
    if position < 0:  # which is no path: the value keeps its name
        assert dc.load_common_state_dict(tmp_path) == {"values": [{"a": 1}], "values.1.a": 2}
    else:
        with pytest.raises(dc.CorruptCheckpointError, match=str((1 << 60) + 1)):
            dc.load_common_state_dict(tmp_path)


CONTRADICTIONS: dict[str, Callable[[Any], object]] = {
    "nothing stored": lambda c: setattr(
        c, "storage_data", {at: info for at, info in c.storage_data.items() if at.fqn != "bits"}
    ),
    "outside": lambda c: setattr(
        c.state_dict_metadata["rows"].chunks[0], "offsets", torch.Size([7, 0])
    ),
    "negative": lambda c: setattr(info_of(c, "bits"), "offset", -5),
    "endless": lambda c: setattr(info_of(c, "bits"), "length", 1 << 61),
    "no int": lambda c: setattr(c.state_dict_metadata["bits"], "size", (True,)),
    "no dtype": lambda c: setattr(c.state_dict_metadata["bits"].properties, "dtype", torch.strided),
    "flattened from another shape": lambda c: c.mcore_data.update(
        flat={"nd_reformulated_orig_global_shape": (5, 7)}
    ),
    "no fields": lambda c: c.state_dict_metadata.update(
        bits=object.__new__(dcp_metadata.TensorStorageMetadata)
    ),
    "a lost cell": lambda c: c.state_dict_metadata.pop("object/shard_0_2"),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_metadata_that_contradicts_itself(damaged: Path, change: Callable[[Any], object]) -> None:
    rewrite(damaged, change)
    with pytest.raises(dc.CorruptCheckpointError):
        dc.load(wanted(), damaged)


def test_a_dtype_and_an_encoding_that_are_not_read(damaged: Path) -> None:
    def describe(dtype: torch.dtype, *encodings: str) -> None:
        def change(content: Any) -> None:
            content.state_dict_metadata["bits"].properties.dtype = dtype
            index = dcp_metadata.MetadataIndex("bits", [0])
            content.storage_data[index] = _StorageInfo("__0_0.distcp", 0, 9, [*encodings])

        rewrite(damaged, change)

    for given, word in (
        ((torch.quint8,), "quint8"),
        ((torch.bfloat16, "stream.zstd"), "stream.zstd"),
    ):
        describe(*given)
        with pytest.raises(dc.UnsupportedFormatError, match=word):
            dc.load(wanted(), damaged)


# .distcp


def test_files_that_were_cut_off(damaged: Path) -> None:
    path = damaged / "__0_0.distcp"
    good = path.read_bytes()
    for keep in (0, 1, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:keep])
        with pytest.raises(dc.CorruptCheckpointError, match="ends before it") as caught:
            dc.load(wanted(), damaged)
        assert str(path) in str(caught.value)
        assert caught.value.findings[0].key in (*FULL, "object")


def put(folder: Path, key: str, record: bytes) -> None:
    """Store another record in place of that of a tensor with one chunk."""
    (folder / "other.distcp").write_bytes(record)

    def change(content: Any) -> None:
        info = info_of(content, key)
        info.relative_path, info.offset, info.length = "other.distcp", 0, len(record)

    rewrite(folder, change)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def compressed(record: bytes) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as source,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b"", "0 bytes"),
        (b"\0" * 1000, "does not end like"),
        (saved(FULL["bits"].float()), r"expected torch\.bfloat16"),
        (saved(FULL["bits"][:-1].clone()), r"expected torch\.bfloat16 of shape \(64,\)"),
        (saved(FULL["bits"].reshape(8, 8)), r"found torch\.bfloat16 of shape \(8, 8\)"),
        (saved(torch.nn.Parameter(torch.ones(3))), r"found torch\.float32 of shape \(3,\)"),
        (saved(["no tensor"]), "expected a plain tensor|description"),
        (saved(torch.ones(64).bfloat16().to_sparse()), "expected a plain tensor"),
        (compressed(saved(FULL["bits"])), "compressed"),
        (archive(b"\x80\x04K\x01K\x02\x93."), "the name of a class is not a text"),
    ],
)
def test_records_of_something_else(damaged: Path, record: bytes, problem: str) -> None:
    put(damaged, "bits", record)
    with pytest.raises(dc.CorruptCheckpointError, match=problem) as caught:
        dc.load(wanted(), damaged)
    assert "other.distcp" in str(caught.value)


def test_a_parameter_is_a_tensor_too(damaged: Path) -> None:
    put(damaged, "bits", saved(torch.nn.Parameter(FULL["bits"])))
    check_loads(damaged)


NO_STORAGE = archive(b"\x80\x02(" + 4 * b"X\1\0\0\0x" + b"K\1tQ.")


@pytest.mark.parametrize("record", [saved({"a": [0]}), saved([]), b"nonsense", NO_STORAGE])
def test_objects_of_something_else(damaged: Path, record: bytes) -> None:
    put(damaged, "object/shard_0_2", record)
    with pytest.raises(dc.CorruptCheckpointError, match=r"other\.distcp"):
        dc.load(wanted(), damaged)
