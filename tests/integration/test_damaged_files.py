"""Files that are missing, cut off, too long or full of nonsense: a clear error, never zeros."""

import copy
import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import flip, sealed
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import cell, every_kind

FORMATS: dict[str, Any] = {
    "zarr 1": ZarrSaveShardedStrategy,
    "zarr 2": Zarr3SaveShardedStrategy,
    "zarr 2 zstd": functools.partial(Zarr3SaveShardedStrategy, codec="zstd"),
    "zarr 2 gzip": functools.partial(Zarr3SaveShardedStrategy, codec="gzip"),
    "zarr 2 blosc": functools.partial(Zarr3SaveShardedStrategy, codec="blosc"),
}
DOCUMENTED = (
    dc.CorruptCheckpointError,
    dc.UnsupportedFormatError,
    dc.StateMismatchError,
    dc.StrategyNotFoundError,
)
COMPRESSED = ("zarr 2 zstd", "zarr 2 gzip", "zarr 2 blosc")
FORMAT = pytest.mark.parametrize("file_format", FORMATS)
ZARR_1, ZARR_2 = (pytest.mark.parametrize("file_format", [name]) for name in ("zarr 1", "zarr 2"))
PLAIN_FORMAT = pytest.mark.parametrize("file_format", ["zarr 1", "zarr 2"])


def state(fill: float | None = None) -> dict[str, Any]:
    return {**every_kind(fill), "object": cell("object", {"a": [1]}), "step": 7}


def parts_of(state: dict[str, Any]) -> dict[str, list[Any]]:
    """Values of all parts of each tensor."""
    leaves = {key: leaf if isinstance(leaf, list) else [leaf] for key, leaf in state.items()}
    return {k: [x.data.tolist() for x in own] for k, own in leaves.items() if k in every_kind()}


def check_loads(folder: Path, template: dict[str, Any] | None = None) -> None:
    """What is asked for, by default everything, is what was saved."""
    template = state(-1.0) if template is None else template
    dc.load(template, folder)
    assert parts_of(template) == parts_of({key: state()[key] for key in template})


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good checkpoint of each format."""
    parent = tmp_path_factory.mktemp("originals")
    for name, strategy in FORMATS.items():
        dc.save(state(), parent / name, strategy())
        check_loads(parent / name)
    return {name: parent / name for name in FORMATS}


@pytest.fixture
def damaged(originals: dict[str, Path], file_format: str, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(originals[file_format], tmp_path / "c"))


def chunk_files(folder: Path) -> list[Path]:
    described = {"zarr.json", ".zarray", "metadata.json"}
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and ".dckpt" not in path.parts
        and path.name not in described
        and path.suffix not in (".pt", ".json")
    ]


# Chunks.

DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte too long": lambda path: path.write_bytes(path.read_bytes() + b"\1"),
    "twice as long": lambda path: path.write_bytes(2 * path.read_bytes()),
}
NONSENSE: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "ones": lambda path: path.write_bytes(b"\xff" * 40),
    "text": lambda path: path.write_bytes(b"{}"),
}
"""Of the right length or not, a compressed chunk with such bytes cannot be decoded."""


@FORMAT
def test_a_damaged_chunk_is_an_error_that_names_key_and_file(
    originals: dict[str, Path], damaged: Path, file_format: str
) -> None:
    chunks = chunk_files(damaged)
    assert {path.relative_to(damaged).parts[0] for path in chunks} == set(every_kind())
    damages = {**DAMAGES, **(NONSENSE if file_format in COMPRESSED else {})}
    for path, damage in itertools.product(chunks, damages.values()):
        damage(path)
        name = path.relative_to(damaged)
        with pytest.raises(dc.CorruptCheckpointError, match=re.escape(str(path))):
            dc.load(state(-1.0), damaged)
        # Who reads something else does not mind.
        others = every_kind().keys() - {name.parts[0]}
        check_loads(damaged, {key: state(-1.0)[key] for key in others})
        shutil.copy(originals[file_format] / name, path)
    check_loads(damaged)


# Pickles.


@PLAIN_FORMAT
@pytest.mark.parametrize("name", ["common.pt", "object/shard_0_1.pt"])
def test_a_damaged_pickle_is_an_error_that_names_the_file(damaged: Path, name: str) -> None:
    for damage in ("cut in half", "a byte short", "empty", "missing"):
        (damaged / name).touch()
        DAMAGES[damage](damaged / name)
        named = re.escape(str(damaged / name))
        with pytest.raises((dc.CorruptCheckpointError, dc.StateMismatchError), match=named):
            dc.load(state(-1.0), damaged)


@PLAIN_FORMAT
def test_common_state_that_is_no_dict_is_damaged(damaged: Path) -> None:
    torch.save([1, 2], damaged / "common.pt")
    with pytest.raises(dc.CorruptCheckpointError, match=r"common\.pt"):
        dc.load_common_state_dict(damaged)


# JSON.

NO_JSON = [
    b"",
    b"{",
    b"\0\0\0\0",
    b"\xff\xfe\xfa",
    b"nonsense",
    b'{"a": 1',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 10_000,
]
NOT_OURS = [b"[]", b"null", b"{}", b"5", b'"text"', b"[{}]", b"NaN"]
JSON_FILE = pytest.mark.parametrize(
    ("file_format", "name"),
    [
        ("zarr 1", "metadata.json"),
        ("zarr 2", "metadata.json"),
        ("zarr 2", ".dckpt/index.json"),
        ("zarr 2", "zarr.json"),
        ("zarr 1", "grid/.zarray"),
    ],
)


@pytest.fixture
def json_file(damaged: Path, name: str) -> Path:
    """A file that the next load needs."""
    if name == "zarr.json":
        (damaged / ".dckpt" / "index.json").unlink()
    return damaged / name


def readers(folder: Path) -> Iterator[Callable[[], Any]]:
    yield lambda: dc.load_tensors_metadata(folder)
    yield lambda: len(dc.Checkpoint.open(folder))
    yield lambda: dc.load(state(-1.0), folder)
    yield lambda: run_ranks(2, lambda comm: dc.load(state(-1.0), folder, comm=comm))


@JSON_FILE
def test_what_is_no_json_of_ours_is_damaged(damaged: Path, json_file: Path, name: str) -> None:
    """Nonsense, JSON of something else, cut off anywhere, or too large to be even read."""
    content = json_file.read_bytes()
    for wrong in NO_JSON + NOT_OURS:
        json_file.write_bytes(wrong)
        for read in readers(damaged):
            with pytest.raises(dc.CorruptCheckpointError, match=re.escape(str(json_file))):
                read()
        assert dc.check_is_distributed_checkpoint(damaged) == (name != "metadata.json")
    for length in [*range(0, len(content), max(1, len(content) // 40)), len(content) - 1]:
        json_file.write_bytes(content[:length])
        with pytest.raises(dc.CorruptCheckpointError):
            dc.load(state(-1.0), damaged)
    os.truncate(json_file, 1 << 33)
    with pytest.raises(dc.CorruptCheckpointError, match="far too large"):
        dc.load(state(-1.0), damaged)


WRONG_VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, "text", "", [], {}, [[]], [-1], ["x"]]


def as_file(name: str, content: Any) -> bytes:
    """``content`` as the bytes of the file; the index carries its own checksum."""
    is_index = name.endswith("index.json") and isinstance(content, dict)
    return sealed(content) if is_index else json.dumps(content).encode()


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values in a nest; of a list the first and the last are enough."""
    yield path
    if isinstance(value, dict | list):
        steps = value if isinstance(value, dict) else {*range(len(value))} & {0, len(value) - 1}
        for step in steps:
            yield from places_in(value[step], (*path, step))


def with_value(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.deepcopy(content)
    functools.reduce(lambda below, step: below[step], place[:-1], changed)[place[-1]] = value
    return changed


@JSON_FILE
def test_any_wrong_value_anywhere_in_json_is_harmless_or_a_documented_error(
    damaged: Path, json_file: Path, name: str
) -> None:
    content, keys = json.loads(json_file.read_bytes()), ("grid", "uneven", "flat")
    if name == "zarr.json":  # one of each kind is enough
        nodes = content["consolidated_metadata"]["metadata"]
        for path in nodes.keys() - {*keys, "uneven/piece.0"}:
            del nodes[path]
    for place, value in itertools.product(places_in(content), WRONG_VALUES):
        json_file.write_bytes(as_file(name, with_value(content, place, value)))
        with suppress(*DOCUMENTED):
            dc.load_tensors_metadata(damaged)
            check_loads(damaged, {key: state(-1.0)[key] for key in keys})


@JSON_FILE
def test_extra_fields_in_json_are_ignored(damaged: Path, json_file: Path) -> None:
    content = json.loads(json_file.read_bytes()) | {"of tomorrow": [1, {"x": None}]}
    json_file.write_text(json.dumps(content))
    if json_file.name == "index.json":  # it carries its own checksum: any change is damage
        with pytest.raises(dc.CorruptCheckpointError, match="checksum"):
            check_loads(damaged)
    else:
        check_loads(damaged)


@PLAIN_FORMAT
def test_metadata_with_only_its_first_fields_is_enough(damaged: Path, file_format: str) -> None:
    """Newer Megatron releases write two fields, hand-written checkpoints one."""
    first = {"sharded_backend": "zarr", "sharded_backend_version": int(file_format[-1])}
    (damaged / "metadata.json").write_text(json.dumps(first))
    check_loads(damaged)
    if file_format == "zarr 1":
        (damaged / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        check_loads(damaged)


@ZARR_2
def test_an_index_that_changed_or_is_of_another_program_or_lost(damaged: Path) -> None:
    """Without it the consolidated metadata of Zarr will do, and without both nothing does."""
    path = damaged / ".dckpt" / "index.json"
    for position in range(path.stat().st_size):
        flip(path, position)
        with pytest.raises(dc.CorruptCheckpointError, match="index"):
            dc.load_tensors_metadata(damaged)
        flip(path, position)
    check_loads(damaged)
    path.write_bytes(as_file(path.name, json.loads(path.read_text()) | {"format": "other"}))
    with pytest.raises(dc.CorruptCheckpointError, match="not an index"):
        dc.load_tensors_metadata(damaged)
    path.unlink()
    check_loads(damaged)
    (damaged / "zarr.json").unlink()
    with pytest.raises(dc.CorruptCheckpointError, match="cannot be rebuilt"):
        dc.load_tensors_metadata(damaged)


# Arrays of other programs.


@ZARR_1
def test_a_zarr_v2_array_that_megatron_never_writes_is_not_supported(damaged: Path) -> None:
    path = damaged / "grid" / ".zarray"
    content = json.loads(path.read_text())
    for field, value in (
        ("zarr_format", 3),
        ("compressor", {"id": "blosc"}),
        ("filters", [{"id": "delta"}]),
        ("order", "F"),
        ("dimension_separator", "/"),
        ("dtype", ">f4"),
        ("dtype", "<U5"),
    ):
        path.write_text(json.dumps(content | {field: value}))
        with pytest.raises(dc.UnsupportedFormatError, match=field) as raised:
            dc.load(state(-1.0), damaged)
        assert "'grid'" in str(raised.value)
        assert str(path) in str(raised.value)
