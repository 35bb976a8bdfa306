"""Every mistake a caller can make: a documented class, the same on all ranks, nothing written.

Damaged files are in test_damaged_files.py, failing ranks in test_failing_ranks.py.
"""

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import location
from dist_checkpointing.strategies import (
    TorchCommonLoadStrategy,
    TorchDistCommonLoadStrategy,
    Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrLoadShardedStrategy,
)
from dist_checkpointing.testing import data_of, run_ranks
from simulated_groups import the_one_error
from states import (
    FORMAT,
    between,
    counted_cell as cell,
    counted_rows as rows,
    flat as flat_part,
    save_on,
    shard,
)
from tiers import examples

Format = tuple[str, int]


def box(key: str, start: int, stop: int, total: int, **changes: Any) -> dc.ShardedTensor:
    """Elements ``start .. stop`` of a 1-D tensor, cut as you like."""
    return replace(between(key, torch.ones(total), start, stop), **changes)


# Opening what is no checkpoint.

READERS: list[Callable[[Path], Any]] = [
    lambda folder: dc.load({}, folder),
    dc.Checkpoint.open,
    dc.load_common_state_dict,
    dc.load_tensors_metadata,
    dc.load_sharded_metadata,
    dc.load_plain_tensors,
    dc.load_content_metadata,
    lambda folder: dc.remove_sharded_tensors(folder, "w"),
]


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for version in (1, 2):
        dc.save({"w": rows("w")}, tmp_path / f"half{version}", ("zarr", version))
        (tmp_path / f"half{version}" / "metadata.json").unlink()
    for name, words in (
        ("nowhere", "does not exist"),
        ("other", r"not a distributed checkpoint(.|\n)*metadata\.json"),
        ("file", "file"),
        ("half1", "never committed(.|\n)*Load an older checkpoint"),
        ("half2", "never committed(.|\n)*Load an older checkpoint"),
    ):
        for read in READERS:
            with pytest.raises(dc.CheckpointNotFoundError, match=words) as raised:
                read(tmp_path / name)
            assert isinstance(raised.value, FileNotFoundError)
            assert str(tmp_path / name) in str(raised.value)
        assert not dc.check_is_distributed_checkpoint(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
    error = the_one_error(3, lambda comm: dc.load({}, tmp_path / "nowhere", comm=comm))
    assert type(error) is dc.CheckpointNotFoundError
    assert "ranks 0, 1, 2" in str(error)


def test_a_rank_waits_for_a_checkpoint_that_rank_0_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show a commit a little later."""
    dc.save({"step": 7}, tmp_path / "c")

    def one(comm: Comm) -> Any:
        return dc.load({}, tmp_path / ("late" if comm.rank else "c"), comm=comm)

    threading.Timer(0.5, (tmp_path / "late").symlink_to, [tmp_path / "c"]).start()
    assert run_ranks(3, one) == [{"step": 7}] * 3
    (tmp_path / "late").unlink()
    monkeypatch.setattr(location, "VISIBLE_SECONDS", 0.1)
    error = the_one_error(3, one)
    assert type(error) is dc.CheckpointNotFoundError
    assert "rank 0 sees a checkpoint here, and this rank does not" in str(error)
    assert [finding.ranks for finding in error.findings] == [(1, 2)]


# Backends and versions.


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("nonsense", ["nonsense", "zarr 1", "zarr 2", "save_sharded", "expected one of: "]),
        (("zarr", 99), ["zarr 99", "no such backend and version; expected one of: "]),
        ("tensor_store", ["no such backend and version; did you mean 'tensorstore'"]),
        ("Zarr", ["did you mean 'zarr'"]),
        (("torchdist", 1), ["did you mean 'torch_dist'"]),
    ],
)
def test_an_unknown_backend_or_version_lists_those_there_are_or_near_ones(
    tmp_path: Path, wanted: Any, words: list[str]
) -> None:
    state = {"w": rows("w")}
    error = the_one_error(2, lambda comm: dc.save(state, tmp_path / "c", wanted, comm=comm))
    assert type(error) is dc.StrategyNotFoundError
    assert isinstance(error, LookupError)
    assert all(word in str(error) for word in words), error
    assert not (tmp_path / "c").exists()
    dc.save(state, tmp_path / "c")
    with pytest.raises(dc.StrategyNotFoundError, match=re.escape(words[-1])):
        dc.load_tensors_metadata(tmp_path / "c", wanted)


@pytest.mark.parametrize("field", ["sharded_backend", "common_backend"])
def test_a_checkpoint_of_an_unknown_backend_or_version_is_not_read(
    tmp_path: Path, field: str
) -> None:
    dc.save({"w": rows("w")}, tmp_path)
    config = json.loads((tmp_path / "metadata.json").read_text())
    for name, version in (("nonsense", 1), (config[field], 99), (config[field], 0)):
        changed = config | {field: name, f"{field}_version": version}
        (tmp_path / "metadata.json").write_text(json.dumps(changed))
        error = the_one_error(2, lambda comm: dc.load({"w": rows("w")}, tmp_path, comm=comm))
        assert type(error) is dc.StrategyNotFoundError
        assert f"{name} {version}" in str(error)
        assert dc.check_is_distributed_checkpoint(tmp_path)


@FORMAT
def test_a_strategy_for_another_version_is_refused_and_a_name_alone_means_that_of_the_checkpoint(
    tmp_path: Path, file_format: Format
) -> None:
    dc.save({"w": rows("w"), "step": 1}, tmp_path, file_format)
    template = {"w": rows("w").without_data()}
    other = (Zarr3LoadShardedStrategy, ZarrLoadShardedStrategy)[file_format[1] - 1]
    asked: Any
    for asked in (("zarr", 3 - file_format[1]), other()):
        error = the_one_error(2, lambda comm: dc.load(template, tmp_path, asked, comm=comm))  # noqa: B023
        assert type(error) is dc.UnsupportedFormatError
        assert "version" in str(error)
        assert f"found {file_format[1]}" in str(error)
        assert "Leave sharded_strategy out" in str(error)
    # Another backend's name means its newest version, which reads this one here.
    for name in ("zarr", "tensorstore"):
        assert torch.equal(dc.load(template, tmp_path, name, "torch")["w"], data_of(rows("w")))
    assert dc.load_tensors_metadata(tmp_path, "zarr").keys() == {"w"}
    assert dc.load_sharded_metadata(tmp_path, "zarr", "torch").keys() == {"w"}


def test_a_common_strategy_for_another_backend_is_refused(tmp_path: Path) -> None:
    dc.save({"w": rows("w"), "step": 1}, tmp_path)
    template, asked = {"w": rows("w")}, TorchDistCommonLoadStrategy()
    error = the_one_error(
        2,
        lambda comm: dc.load(template, tmp_path, common_strategy=asked, comm=comm),
        dc.UnsupportedFormatError,
    )
    assert "expected one of ['torch_dist']; found torch;" in str(error)
    assert "Leave common_strategy out" in str(error)
    for strategy in (asked, TorchCommonLoadStrategy()):
        with pytest.raises(dc.UnsupportedFormatError, match=r"expected one of \[1\]; found 2"):
            strategy.check_version_compatibility(2)


def test_a_writer_refuses_another_backend_version_and_codec() -> None:
    with pytest.raises(dc.UnsupportedFormatError, match="writes"):
        Zarr3SaveShardedStrategy("zarr", 1)
    with pytest.raises(dc.UnsupportedFormatError, match="unknown codec"):
        Zarr3SaveShardedStrategy(codec="lzma")


# Template and checkpoint differ.


@pytest.mark.parametrize("backend", ["tensorstore", "torch_dist", ("zarr", 1), ("zarr", 2)])
def test_an_object_in_another_grid_says_which_grid_is_stored(tmp_path: Path, backend: Any) -> None:
    cells = {str(i): dc.ShardedObject("rng", i, (2, 3), divmod(i, 3)) for i in range(6)}
    dc.save(dict(cells), tmp_path, backend)
    for grid, place in (((3, 3), (1, 1)), ((6,), (0,)), ((2, 2), (0, 1))):
        template: Any = {"rng": dc.ShardedObject("rng", None, grid, place)}
        error = the_one_error(
            2,
            lambda comm: dc.load(template, tmp_path, comm=comm),  # noqa: B023
            dc.StateMismatchError,
        )
        (finding,) = error.findings
        assert finding.problem == "the grid of the sharded object differs"
        assert finding.key == template["rng"].unique_key
        assert (finding.expected, finding.found) == (grid, (2, 3))
    for key in ("rngs", "rng.1"):
        template = {"rng": dc.ShardedObject(key, None, (2,), (0,))}
        with pytest.raises(dc.StateMismatchError, match="not in the checkpoint"):
            dc.load(template, tmp_path)


def test_an_object_of_an_older_writer_in_another_grid_says_which_grid_is_stored(
    tmp_path: Path,
) -> None:
    cells = [dc.ShardedObject("rng", i, (2, 3), divmod(i, 3)) for i in range(6)]
    dc.save({str(i): cell for i, cell in enumerate(cells)}, tmp_path, ("zarr", 2))
    for path in (tmp_path / "rng").iterdir():  # they took the last extent for a file suffix
        path.rename(path.with_name(path.name.replace("_2.3.pt", "_2.pt")))
    (tmp_path / ".dckpt/seal.json").unlink()  # which names files of today
    loaded = dc.load({"all": [cell.without_data() for cell in cells]}, tmp_path)
    assert loaded["all"] == list(range(6))
    for grid in ((2, 2), (3, 3)):
        template = {"rng": dc.ShardedObject("rng", None, grid, (0, 1))}
        with pytest.raises(dc.StateMismatchError, match=r"grid .* differs; .*found \(2, 3\)"):
            dc.load(template, tmp_path)


def test_everything_that_does_not_fit_is_reported_at_once(tmp_path: Path) -> None:
    keys = ("shape", "axes", "dtype", "good")
    save_on(2, lambda comm: {k: rows(k, comm.rank, 2) for k in keys}, tmp_path)

    def load_rank(comm: Comm) -> None:
        template: dict[str, Any] = {"good": shard("good", torch.full((4, 3), -1.0))}
        if comm.rank == 1:
            template |= {
                "shape": shard("shape", torch.empty(4, 5)),
                "axes": shard("axes", torch.empty(12)),
                "dtype": shard("dtype", torch.empty(4, 3).half()),
                "deep": [{"down": shard("shapes", torch.empty(1))}],
            }
        dc.load(template, tmp_path, comm=comm)

    error = the_one_error(3, load_rank, dc.StateMismatchError)
    for words in (
        "'shape': global shape differs; expected (4, 5); found (4, 3); rank 1",
        "'axes': global shape differs; expected (12,); found (4, 3); rank 1",
        "'dtype': dtype differs; expected torch.float16; found torch.float32; rank 1",
        "'shapes': not in the checkpoint",
        "did you mean 'shape' or",
        "state_dict['deep'][0]['down']",
        "cast=",
        "strict=",
    ):
        assert words in str(error)
    assert "'good'" not in str(error)
    objects = {"o": cell("o", 2, 3), "a": cell("a")}
    error = the_one_error(
        3, lambda comm: dc.load(objects, tmp_path, comm=comm), dc.StateMismatchError
    )
    assert all(name in str(error) for name in ("o/shard_2_3", "a/shard_0_1"))


@pytest.mark.parametrize(
    ("saved", "template", "where"),
    [
        ({"a": {"b": 5}}, {"a": {"b": rows("w")}}, "state_dict['a']['b']"),
        ({"a": torch.zeros(100)}, {"a": rows("w")}, "state_dict['a']"),
        ({"a": {"b": 5}}, {"a": [rows("w")]}, "state_dict['a']"),
        ({"a": [1, 2, 3]}, {"a": [rows("w"), 1]}, "state_dict['a']"),
        ({1: {(2, "x"): [1, 2]}}, {1: {(2, "x"): [1, rows("w")]}}, "state_dict[1][(2, 'x')][1]"),
    ],
)
def test_a_template_nested_otherwise_than_the_common_state_is_a_mismatch(
    tmp_path: Path, saved: Any, template: Any, where: str
) -> None:
    dc.save({**saved, "w": rows("w")}, tmp_path)
    with pytest.raises(dc.StateMismatchError, match="nested differently") as raised:
        dc.load(template, tmp_path)
    (finding,) = raised.value.findings
    assert f"{where} " in str(raised.value)
    assert len(str(raised.value)) < 500  # which prints no values of tensors
    assert finding.expected
    assert finding.found
    assert finding.remedy


# A state dict that cannot be saved: no rank writes anything.

BadState = Callable[[int], dict[str, Any]]

BITS: dict[str, Any] = {"data": torch.empty(1, dtype=torch.bits8), "dtype": torch.bits8}
INTS: dict[str, Any] = {"data": torch.ones(1, dtype=torch.int8), "dtype": torch.int8}

BAD_STATES: dict[str, tuple[BadState, list[str]]] = {
    "a gap": (
        lambda rank: {"w": rows("w", rank, 3)} if rank < 2 else {},
        ["'w'", "(4, 0) .. (6, 3)", "no shard holds", "replica_id 0"],
    ),
    "no main replica": (
        lambda rank: {"w": rows("w", 0, 1, replica_id=rank + 1)},
        ["'w'", "no rank writes it", "ranks 0, 1, 2", "replica_id 0"],
    ),
    "data is None": (
        lambda rank: {"deep": [rows("w", rank, 3, data=None if rank == 1 else torch.ones(2, 3))]},
        ["'w'", "is None", "state_dict['deep'][0]", "rank 1"],
    ),
    "a dtype no format holds": (
        lambda rank: {"w": box("w", rank, rank + 1, 3, **BITS)},
        ["'w'", "torch.bits8", "float32", "ShardedObject"],
    ),
    "flattened ranges with a gap": (
        lambda rank: {"w": flat([(0, 2), (2, 4), (5, 6)][rank])},
        ["'w'", "gap", "4:5", "ranks 1, 2"],
    ),
    "flattened ranges that overlap": (
        lambda rank: {"w": flat([(0, 3), (2, 4), (4, 6)][rank])},
        ["'w'", "overlap", "2:3", "ranks 0, 1"],
    ),
    "an object cell too few": (
        lambda rank: {"o": cell("o", rank, 4)},
        ["'o'", "no ShardedObject holds", "(3,) .. (4,)"],
    ),
    "an object cell twice": (
        lambda rank: {"o": cell("o", min(rank, 1), 2)},
        ["'o'", "2 ShardedObjects hold this part", "ranks 1, 2"],
    ),
    "shapes and dtypes that differ between ranks, beside a gap": (
        lambda rank: {
            "w": [box("shape", rank, rank + 1, 3 + rank // 2), box("gap", rank, rank + 1, 4)],
            "v": box("dtype", rank, rank + 1, 3, **(INTS if rank == 1 else {})),
        },
        ["'shape': the global shape", "'dtype': the dtype", "found int8; rank 1", "'gap': no"],
    ),
    "a tensor on one rank and an object on another": (
        lambda rank: {"x": cell("both") if rank == 1 else rows("both", replica_id=rank)},
        ["'both'", "ShardedTensor", "ShardedObject", "Rename", "rank 1"],
    ),
    "a factory that builds something else": (
        lambda rank: {
            "f": dc.ShardedTensorFactory("f", torch.ones(2), lambda *_: {"x": 5}, lambda x: x)
            if rank == 1
            else None
        },
        ["'f'", "build_fn", "state_dict['f']", "int", "rank 1"],
    ),
}  # fmt: skip


def flat(piece: tuple[int, int]) -> dc.ShardedTensor:
    """A piece of the flattening of a (2, 3) tensor."""
    return flat_part("w", torch.ones(2, 3), *piece)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that must stay what it is."""
    folder = tmp_path_factory.mktemp("good") / "c"
    save_on(3, lambda comm: {"w": rows("w", comm.rank, 3)}, folder)
    return folder


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_dict_is_refused_by_all_ranks_before_anything_is_written(
    tmp_path: Path, good: Path, name: str
) -> None:
    before = files_in(good)
    make, words = BAD_STATES[name]
    for file_format, folder in ((("zarr", 1), tmp_path / "c"), (("zarr", 2), good)):

        def save_rank(comm: Comm, place: Any = (folder, file_format)) -> None:
            dc.save(make(comm.rank), *place, comm=comm, overwrite=place[0] == good)

        error = the_one_error(3, save_rank, dc.InvalidShardingError)
        assert isinstance(error, ValueError)
        for word in words:
            assert word in str(error), f"{word!r} is missing in:\n{error}"
    assert not (tmp_path / "c").exists()
    assert files_in(good) == before


# Keys.

NO_PATHS = [
    "..", "../x", "a/../b", "a/..", "/", "/absolute", "a//b", "a/", ".", "./a", "a/./b",
    "metadata.json", "common.pt", "zarr.json", ".dckpt", ".dckpt/index.json", "metadata.json/x",
    "locks.sync", "locks.sync/x", "x" * 256, "a/" + "ü" * 128, "nul\0",
]  # fmt: skip


def refuses(folder: Path, leaf: Any, file_format: Format) -> dc.CheckpointingException:
    """The error of a save of ``leaf``, having checked that nothing was written anywhere."""
    outside = files_in(folder.parent)
    error = the_one_error(
        2, lambda comm: dc.save({"x": leaf(comm.rank)}, folder, file_format, comm=comm)
    )
    assert files_in(folder.parent) == outside
    assert not dc.check_is_distributed_checkpoint(folder)
    return error


@pytest.mark.parametrize("key", NO_PATHS)
def test_a_key_that_is_no_plain_relative_path_is_refused(tmp_path: Path, key: str) -> None:
    """Of a tensor in zarr 1, and of an object in every format and in a template."""
    cases: list[tuple[Any, Format]] = [
        (rows, ("zarr", 1)),
        (cell, ("zarr", 1)),
        (cell, ("zarr", 2)),
    ]
    for kind, file_format in cases:
        error = refuses(tmp_path / "in" / "c", lambda rank: kind(key, rank, 2), file_format)  # noqa: B023
        assert type(error) is dc.InvalidShardingError
        assert repr(key) in str(error)
        assert "Rename the key" in str(error) or kind is cell
    (tmp_path / "in" / "x").mkdir(parents=True, exist_ok=True)
    torch.save("outside", tmp_path / "in" / "x" / "shard_0_1.pt")
    for file_format in (("zarr", 1), ("zarr", 2)):
        dc.save({}, tmp_path / "in" / "c", file_format, overwrite=True)
        with pytest.raises((dc.InvalidShardingError, dc.StateMismatchError)) as raised:
            dc.load({"x": cell(key)}, tmp_path / "in" / "c")
        assert repr(key) in str(raised.value)


@pytest.mark.parametrize("key", ["", None, 5, ("a", "b"), b"bytes", "\ud800 lone surrogate"])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, key: Any) -> None:
    error = refuses(tmp_path / "in" / "c", lambda rank: cell(key, rank, 2), ("zarr", 2))
    assert type(error) is dc.InvalidShardingError


@examples(20)
@given(
    keys=st.lists(
        st.sampled_from([*NO_PATHS, "\n", "*?[x]", "x" * 5000, "😀" * 100, "a%2Fb", "zarr.json/c"])
        | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)
        | st.text("./~%c0é", min_size=1, max_size=4),
        min_size=1,
        max_size=6,
        unique=True,
    )
)
def test_zarr_2_keeps_any_keys_apart(keys: list[str]) -> None:
    state = {f"{i}": shard(key, torch.tensor([i])) for i, key in enumerate(keys)}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "c"
        dc.save(state, folder, ("zarr", 2))
        assert [path.name for path in Path(parent).iterdir()] == ["c"]
        plain = dc.load_plain_tensors(folder)
        assert {key: value.item() for key, value in plain.items()} == {
            key: i for i, key in enumerate(keys)
        }
        (folder / ".dckpt" / "index.json").unlink()
        assert set(dc.load_tensors_metadata(folder)) == set(keys)


def test_keys_that_want_the_same_file_are_refused(tmp_path: Path) -> None:
    """In zarr 1 a folder that is a chunk of another tensor; else a tensor and an object."""
    for keys in (("w", "w/0"), ("w", "w/0.1"), ("w", "w/12/x"), ("a/b", "a/b/3")):
        with pytest.raises(dc.InvalidShardingError, match="chunk file of") as raised:
            dc.save({key: rows(key) for key in keys}, tmp_path / "c", ("zarr", 1))
        assert repr(keys[1]) in str(raised.value)
    state = {"t": rows("a b"), "o": cell("a%20b")}
    with pytest.raises(dc.InvalidShardingError, match="same file"):
        dc.save(state, tmp_path / "c", ("zarr", 2))
    assert not (tmp_path / "c").exists()


# What is in the way.


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 2)])
def test_overwrite_replaces_all_of_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, first: int, second: int
) -> None:
    state = {"w": rows("w"), "v": box("v", 0, 4, 4), "o": [cell("o"), cell("model/x")], "step": 1}
    (tmp_path / "model").mkdir()
    notes = [tmp_path / "notes.txt", tmp_path / "model" / "notes.txt"]
    for note in notes:
        note.write_text("mine")
    dc.save(state, tmp_path, ("zarr", first))
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True") as raised:
        dc.save(state, tmp_path, ("zarr", second))
    assert type(raised.value) is dc.CheckpointExistsError
    assert str(tmp_path) in str(raised.value)
    assert files_in(tmp_path) == before
    new = {"w": box("w", 0, 2, 2), "u": rows("u"), "step": 2}
    save_on(2, lambda c: {} if c.rank else new, tmp_path, ("zarr", second), overwrite=True)
    assert set(dc.load_sharded_metadata(tmp_path)) == {"w", "u"}
    assert dc.load_common_state_dict(tmp_path) == {"step": 2}
    assert dc.load_plain_tensors(tmp_path)["w"].tolist() == [1, 1]
    assert not (tmp_path / "v").exists()
    assert not (tmp_path / "o").exists()
    assert [note.read_text() for note in notes] == ["mine", "mine"]


@FORMAT
def test_a_checkpoint_of_another_program_is_not_overwritten(
    tmp_path: Path, file_format: Format
) -> None:
    dc.save({"w": rows("w")}, tmp_path, ("zarr", 1))
    shutil.rmtree(tmp_path / ".dckpt")
    before = files_in(tmp_path)
    with pytest.raises(dc.CheckpointExistsError, match="another program"):
        dc.save({"w": rows("w")}, tmp_path, file_format, overwrite=True)
    assert files_in(tmp_path) == before


@FORMAT
@pytest.mark.parametrize("in_the_way", ["w/data.bin", "common.pt", "w", "o/shard_0_1.pt"])
def test_files_of_somebody_else_in_the_way_are_refused_and_kept(
    tmp_path: Path, file_format: Format, in_the_way: str
) -> None:
    path = tmp_path / "c" / in_the_way
    path.parent.mkdir(parents=True)
    path.write_text("mine")

    def save_rank(comm: Comm) -> None:
        state = {"w": rows("w", comm.rank, 2), "o": cell("o", comm.rank, 2)}
        dc.save(state, tmp_path / "c", file_format, comm=comm)

    error = the_one_error(2, save_rank, dc.CheckpointExistsError)
    assert str(tmp_path / "c" / Path(in_the_way).parts[0]) in str(error)
    assert path.read_text() == "mine"
    assert {name for name in files_in(tmp_path / "c") if not name.startswith(".dckpt")} == {
        in_the_way
    }
