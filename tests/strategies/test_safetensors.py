"""("safetensors", 1): folders that Hugging Face reads, written and read by the ranks."""

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import SafetensorsSaveShardedStrategy
from dist_checkpointing.strategies.safetensors.model_files import DTYPE_NAMES
from dist_checkpointing.testing import Failures, StorageProtocol, assert_same_bits, run_ranks
from faults import killed
from few_worlds import FewWorlds
from states import ALONE, between, blanks, flat, rows, shard, wholes
from stores import new_url, put
from tiers import examples

INDEX = "model.safetensors.index.json"


class TestSafetensors(FewWorlds, StorageProtocol, Failures):
    backend = ("safetensors", 1)
    dtypes: ClassVar = tuple(getattr(torch, name) for name in DTYPE_NAMES.values())
    # There is no metadata.json, and a number is no text.
    test_unknown_backend_or_version: Any = None
    test_nothing_to_save: Any = None


def saver(**options: Any) -> SafetensorsSaveShardedStrategy:
    return SafetensorsSaveShardedStrategy(**options)


def read_by_others(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as the index says where they are."""
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(names.values())):
        tensors = load_file(folder / name)
        assert tensors.keys() == {key for key, own in names.items() if own == name}
        found |= tensors
    return found


def require_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same_bits(found[key], tensor, key)


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(16, 9, generator=generator),
        "columns": torch.randn(7, 16, generator=generator).bfloat16(),
        "uneven": torch.arange(30.0, dtype=torch.float64).reshape(10, 3),
        "flat": torch.arange(35, dtype=torch.int8).reshape(5, 7),
        "copied": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
    }


def part_of(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, Any]:
    rank, size = comm.rank, comm.world_size
    cuts = [0, *(1 + 2 * r for r in range(1, size)), 10]
    ends = [35 * r // size for r in range(size + 1)]
    return {
        "rows": rows("rows", full["rows"], comm),
        "columns": rows("columns", full["columns"], comm, axis=1),
        "uneven": between("uneven", full["uneven"], cuts[rank], cuts[rank + 1]),
        "flat": flat("flat", full["flat"], ends[rank], ends[rank + 1]),
        "copied": shard("copied", full["copied"], replica_id=rank),
        "nothing": shard("nothing", full["nothing"], replica_id=rank),
    }


@examples(30)
@given(
    world_size=st.sampled_from([1, 2, 4]),
    max_file_bytes=st.sampled_from([1, 100, 1000, 10**9]),
    threads=st.sampled_from([1, 3]),
)
def test_others_read_what_any_ranks_have_saved(
    tmp_path_factory: pytest.TempPathFactory, world_size: int, max_file_bytes: int, threads: int
) -> None:
    full, folder = model(), tmp_path_factory.mktemp("model")
    options = StorageOptions(threads=threads, data_file_bytes=max_file_bytes)
    strategy = saver(options=options)
    extra = {"note": "a text", "step": 3}
    run_ranks(world_size, lambda c: dc.save(part_of(full, c) | extra, folder, strategy, comm=c))
    require_equal(read_by_others(folder), full)
    files = sorted(path.name for path in folder.iterdir() if path.name != INDEX)
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, 1 + count)]
    for name in files:
        with safe_open(folder / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "note": "a text"}
    loaded = dc.load_plain_tensors(folder)
    assert loaded.pop("note") == "a text"
    require_equal(loaded, full)
    parts = run_ranks(
        2, lambda c: dc.load({"t": rows("rows", full["rows"] * 0, c, 0)}, folder, comm=c)
    )
    assert torch.equal(torch.cat([part["t"] for part in parts]), full["rows"])


def test_what_others_have_written(tmp_path: Path) -> None:
    """A folder without an index, one with an index, one file, in any cut."""
    full = {key: value for key, value in model().items() if key != "nothing"}
    some, others = dict([*full.items()][:2]), dict([*full.items()][2:])
    save_file(some, tmp_path / "a.safetensors", {"format": "pt", "by": "them"})
    save_file(others, tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text("{}")
    loaded = dc.load_plain_tensors(tmp_path)
    assert loaded.pop("hugging_face") == {"config.json": b"{}"}
    assert loaded.pop("by") == "them"
    require_equal(loaded, full)
    require_equal(dc.load(blanks(others), tmp_path / "b.safetensors"), others)
    index = {"weight_map": dict.fromkeys(others, "b.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert [*dc.Checkpoint.open(tmp_path)] == sorted(others)
    assert torch.equal(dc.Checkpoint.open(tmp_path)["flat"][1:4, 2], full["flat"][1:4, 2])


def test_a_cast_and_files_of_the_model(tmp_path: Path) -> None:
    full = model()
    strategy = saver(dtype=torch.bfloat16, extra_files={"config.json": b"{}"})
    run_ranks(2, lambda comm: dc.save(part_of(full, comm), tmp_path, strategy, comm=comm))
    assert (tmp_path / "config.json").read_bytes() == b"{}"
    cast = {k: v.bfloat16() if v.is_floating_point() else v for k, v in full.items()}
    require_equal(read_by_others(tmp_path), cast)


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ({"o": dc.ShardedObject("o", 1, (1,), (0,))}, "'o': the format holds tensors only"),
        ({"plain": torch.ones(2)}, "shard_state_dict"),
        ({"x": shard("x", torch.ones(2, dtype=torch.complex128))}, "no such dtype"),
        ({"x": shard("__metadata__", torch.ones(2))}, "__metadata__"),
    ],
)
def test_what_is_no_part_of_a_model(tmp_path: Path, leaves: Any, words: str) -> None:
    state = wholes({"w": torch.ones(2)})
    with pytest.raises(dc.UnsupportedFormatError, match=words):
        dc.save(state | leaves, tmp_path / "m", "safetensors")
    with pytest.raises(dc.UnsupportedFormatError, match="no name of a file beside a model"):
        dc.save(state, tmp_path / "m", saver(extra_files={"../x": b""}))
    assert not list(tmp_path.iterdir())
    # Of a state that another has made, names that lead elsewhere are passed over.
    names = ["../x.json", "/tmp/x.json", "a/b.json", ".x.json", "x.py", "m.index.json", "x.json"]
    files = {"hugging_face": dict.fromkeys(names, b"")}
    dc.save(state | files, tmp_path / "m", "safetensors")
    assert [*tmp_path.iterdir()] == [tmp_path / "m"]
    model = {"model-00001-of-00001.safetensors", INDEX}
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"x.json"} | model


def test_the_optimizer_is_saved_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save(wholes({"optimizer.m": torch.ones(2), "w": torch.ones(2)}), tmp_path, "safetensors")
    assert "state of an optimizer, such as 'optimizer.m'" in caplog.text


def test_a_model_in_an_object_store(tmp_path: Path) -> None:
    """A folder that was copied there, its index, one of its files; and no save into a store yet."""
    full, url = model(), new_url()
    options = StorageOptions(data_file_bytes=400)
    strategy = saver(options=options, extra_files={"config.json": b"{}"})
    run_ranks(2, lambda comm: dc.save(part_of(full, comm), tmp_path, strategy, comm=comm))
    for path in tmp_path.iterdir():
        put(url, path.name, path.read_bytes())
    empty = {key: torch.zeros_like(value) for key, value in full.items()}

    def load(comm: Comm) -> dict[str, Any]:
        return dc.load(part_of(empty, comm), url, comm=comm)

    columns = [part["columns"] for part in run_ranks(4, load)]
    assert torch.equal(torch.cat(columns, dim=1), full["columns"])
    for place in (url, f"{url}/{INDEX}"):
        found = dc.load_plain_tensors(place)
        assert found.pop("hugging_face") == {"config.json": b"{}"}
        require_equal(found, full)
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    one = dc.Checkpoint.open(f"{url}/{names['rows']}")
    assert torch.equal(one["rows"][3:5, 2], full["rows"][3:5, 2])
    with pytest.raises(dc.UnsupportedFormatError, match="Use the backend tensorstore"):
        dc.save(wholes(full), new_url(), "safetensors")


@pytest.mark.parametrize("file_format", ["safetensors", "torch_file"])
def test_a_verified_load_says_that_there_are_no_checksums(
    tmp_path: Path, file_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    full = torch.arange(24.0).reshape(4, 6)
    path = tmp_path / "model"
    dc.save(wholes({"w": full}), path, file_format)

    def loaded(comm: Comm) -> Any:
        state = {"w": rows("w", torch.zeros(4, 6), comm)}
        return dc.load(state, path, comm=comm, verify=True)["w"]

    assert torch.equal(torch.cat(run_ranks(2, loaded)), full)
    (record,) = caplog.records
    assert "its format has no checksums: sizes and headers of its files" in record.message
    # Bytes that are missing are found, whatever is wanted.
    data = path if path.is_file() else min(path.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(dc.CorruptCheckpointError):
        dc.load(blanks({"w": full}), path, verify=True)


def test_an_index_that_lies(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    for weight_map, words in (
        ({"w": "y.safetensors"}, "missing"),
        ({"v": "x.safetensors"}, "not in the file"),
        ({"w": "../x.safetensors"}, "outside its folder"),
        ([], "index cannot be read"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(dc.CorruptCheckpointError, match=words):
            dc.load(blanks({"w": torch.ones(2)}), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mkdir", "link", "replace", "unlink", "ftruncate", "pwrite"])
def test_a_kill_before_any_call_leaves_no_model_or_a_whole_one(tmp_path: Path, name: str) -> None:
    """Of those that change what is on the disk: between two of them nothing else happens to it."""
    full, statuses = model(), list[int]()
    state = part_of(full, ALONE)
    while 0 not in statuses:
        folder = tmp_path / str(len(statuses))
        child = os.fork()
        if child == 0:
            with killed(f"os.{name}", len(statuses) + 1):
                dc.save(state, folder, saver(options=StorageOptions(data_file_bytes=800)))
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
        if (folder / INDEX).exists():
            require_equal(read_by_others(folder), full)
            with pytest.raises(dc.CheckpointExistsError):
                dc.save(state, folder, "safetensors")
        else:
            assert not dc.check_is_distributed_checkpoint(folder)
            assert not (folder / "model.safetensors").exists()
            dc.save(state, folder, "safetensors")
            left = {path.name for path in folder.iterdir()}
            assert left == {"model-00001-of-00001.safetensors", INDEX}
        require_equal(dc.load(blanks(full), folder), full)
    assert len(statuses) > 1
