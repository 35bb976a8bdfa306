"""Files made to hang, to fill the memory or to end the process, and files with any bytes changed.

They are refused by name, or read as they were; nothing else happens.
"""

import copy
import functools
import json
import operator
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numcodecs
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

import hostile_pickles
import hostile_state
from damage import sealed
from dist_checkpointing import CheckpointManager, load, save
from dist_checkpointing.format import INDEX_NAME
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from limited_child import LimitedChild
from tiers import examples, share


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good checkpoint of each backend, in a folder of its name."""
    return hostile_state.save_each(tmp_path_factory.mktemp("originals"))


@pytest.fixture(scope="module")
def child(originals: Path) -> Iterator[LimitedChild]:
    """A process with little memory that reads what it is told to."""
    warm_up = [{"do": "checkpoint", "path": str(path)} for path in sorted(originals.iterdir())]
    with LimitedChild(warm_up) as started:
        yield started


class Victim:
    """A copy of a checkpoint whose files are replaced one at a time."""

    def __init__(self, original: Path, folder: Path, child: LimitedChild) -> None:
        self.folder = Path(shutil.copytree(original, folder))
        self._child = child

    def outcomes(self, name: str, content: bytes) -> list[str]:
        """What loading, reading and examining it ends with when one file holds this."""
        path = self.folder / name
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            return self.outcomes_now()
        finally:
            path.write_bytes(before)

    def outcomes_now(self) -> list[str]:
        """What loading, reading and examining it ends with as it is."""
        return self._child.outcomes({"do": "checkpoint", "path": str(self.folder)})

    def verified(self) -> tuple[str, str]:
        """Exit code and output of ``dckpt verify``."""
        request = {"do": "dckpt", "arguments": ["verify", str(self.folder)]}
        code, text = self._child.outcomes(request)
        return code, text


@pytest.fixture
def victim(originals: Path, backend: str, tmp_path: Path, child: LimitedChild) -> Victim:
    return Victim(originals / backend, tmp_path / "c", child)


def refusals(outcomes: list[str]) -> list[str]:
    """The steps that did not end well; all of them with a documented error."""
    assert not any(text.startswith(("raw", "the process")) for text in outcomes), outcomes
    return [text for text in outcomes if text not in ("equal", "different")]


# What has no end.


@pytest.mark.parametrize("backend", ["tensorstore", "zarr 1", "zarr 2"])
@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "sparse"])
def test_a_file_without_an_end_is_not_read(victim: Victim, tmp_path: Path, place: str) -> None:
    for path in sorted(path for path in victim.folder.rglob("*") if path.is_file()):
        path.rename(tmp_path / "whole")
        if place == "pipe":
            os.mkfifo(path)
        elif place == "sparse":
            path.touch()
            os.truncate(path, 1 << 36)
        else:
            path.symlink_to(place)
        refusals(victim.outcomes_now())
        (tmp_path / "whole").replace(path)


# Pickles.


def some(files: dict[str, bytes], step: int = 1, first: int = 0) -> list[tuple[str, bytes]]:
    """Every so many of them; fewer in the quick tier."""
    found = list(files.items())[first::step]
    return found[:: len(found) // share(len(found))]


@pytest.mark.parametrize("backend", ["zarr 2"])
@pytest.mark.parametrize(("file", "first"), [("common.pt", 0), ("object/shard_0_1.pt", 1)])
def test_no_pickle_of_common_state_or_objects_hangs_or_kills(
    victim: Victim, file: str, first: int
) -> None:
    # The same code reads both: half of them is tried in each.
    for name, content in some(hostile_pickles.torch_files(), 2, first):
        found = refusals(victim.outcomes(file, content))
        assert found, name
        assert all(
            text.startswith(("CorruptCheckpointError", "UnsupportedFormatError"))
            and str(victim.folder / file) in text
            for text in found
        ), (name, found)


@pytest.mark.parametrize("backend", ["torch_dist"])
def test_no_pickle_of_dcp_metadata_hangs_or_kills(victim: Victim) -> None:
    for name, content in some(hostile_pickles.DCP_PICKLES):
        found = refusals(victim.outcomes(".metadata", content))
        assert found, name
        assert all(text.startswith("CorruptCheckpointError") for text in found), (name, found)
        assert all(str(victim.folder / ".metadata") in text for text in found), (name, found)


def test_torch_files_to_convert_are_looked_through_as_well(
    child: LimitedChild, tmp_path: Path
) -> None:
    for name, content in some(hostile_pickles.torch_files(), 3):
        path = tmp_path / "x.pt"
        path.write_bytes(content)
        outcomes = child.outcomes({"do": "torch file", "path": str(path)})
        assert refusals(outcomes), name


# Tables.

HUGE: Final = (1 << 30, 1 << 40, (1 << 62) - 1, 1 << 63, 1 << 70)


def require_key(outcomes: list[str], key: str, file: str) -> None:
    found = refusals(outcomes)
    corrupt = [text for text in found if text.startswith("CorruptCheckpointError")]
    assert corrupt, outcomes
    assert any(f"'{key}'" in text and file in text for text in corrupt), outcomes


@pytest.mark.parametrize("backend", ["zarr 2", "tensorstore"])
def test_an_index_cannot_ask_for_more_than_there_is(victim: Victim) -> None:
    content = json.loads((victim.folder / INDEX_NAME).read_bytes())
    grid, uneven = (content["keys"].index(key) for key in ("grid", "uneven"))
    for extent in HUGE:
        for places, key in (
            ([("objects", "rng")], "rng"),
            ([("global_shapes", grid, 0)], "grid"),
            ([("global_shapes", grid, 0), ("chunk_shapes", grid, 0)], "grid"),
            ([("global_shapes", uneven, 0), ("pieces", "uneven", "shapes", 0, 0)], None),
        ):
            changed = copy.deepcopy(content)
            for *steps, last in places:
                value = [extent] if last == "rng" else extent
                functools.reduce(operator.getitem, steps, changed)[last] = value
            outcomes = victim.outcomes(INDEX_NAME, sealed(changed))  # whose checksum fits
            assert refusals(outcomes)
            if key is not None:
                require_key(outcomes, key, "index.json")


@pytest.mark.parametrize("backend", ["zarr 1"])
def test_a_zarray_cannot_ask_for_more_than_there_is(victim: Victim) -> None:
    file = "grid/.zarray"
    content = json.loads((victim.folder / file).read_bytes())
    many_axes = ([4, 40, *[17] * 20], [1] * 22)
    asked = [many_axes, ([1 << 30, 1], [1, 1]), ([1] * 65, [1] * 65)]
    for extent in HUGE:
        asked += [([extent, 40], [1, 40]), ([4, extent], [4, extent]), ([4, 40], [extent, extent])]
    for shape, chunks in [*asked, ([HUGE[0]], [HUGE[0]])]:
        changed = json.dumps(content | {"shape": shape, "chunks": chunks}).encode()
        # A chunk that is too large for its file may be found there.
        require_key(victim.outcomes(file, changed), "grid", "grid/")
    for (shape, chunks), words in zip(
        asked[1:3], ("it would not fit", "at most 64 axes"), strict=True
    ):
        (victim.folder / file).write_text(json.dumps(content | {"shape": shape, "chunks": chunks}))
        code, text = victim.verified()
        assert code == "1", text
        assert "'grid'" in text
        assert words in text
        assert "Aborted" not in text


@pytest.mark.parametrize("backend", ["zarr 2"])
def test_consolidated_metadata_cannot_ask_for_more_than_there_is(victim: Victim) -> None:
    (victim.folder / INDEX_NAME).unlink()
    content = json.loads((victim.folder / "zarr.json").read_bytes())
    for extent in HUGE:
        content["consolidated_metadata"]["metadata"]["grid"]["shape"][0] = extent
        outcomes = victim.outcomes("zarr.json", json.dumps(content).encode())
        require_key(outcomes, "grid", "zarr.json")


@pytest.mark.parametrize("backend", ["zarr 1", "zarr 2"])
def test_the_name_of_an_object_cannot_ask_for_more_cells_than_there_are(victim: Victim) -> None:
    shutil.rmtree(victim.folder / ".dckpt")  # a seal does not name them, and they are not read
    for name in ("shard_0_30000000.pt", f"shard_0_{1 << 70}.pt", "shard_0.0_65536.65536.pt"):
        path = victim.folder / "rng" / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(victim.folder / "object" / "shard_0_1.pt", path)
        found = refusals(victim.outcomes("common.pt", (victim.folder / "common.pt").read_bytes()))
        assert any("CorruptCheckpointError" in text for text in found) or not found
        code, text = victim.verified()
        assert code == "1", text
        assert "'rng'" in text
        path.unlink()


def test_a_safetensors_header_cannot_ask_for_more_than_there_is(
    child: LimitedChild, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"

    def refused(num_bytes: int = 4, **rows: tuple[list[int], list[int]]) -> bool:
        names = ("dtype", "shape", "data_offsets")
        content = {k: dict(zip(names, ("F32", *row), strict=True)) for k, row in rows.items()}
        header = json.dumps(content).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
        outcomes = child.outcomes({"do": "safetensors", "path": str(path)})
        return refusals(outcomes)[0].startswith("CorruptCheckpointError")

    for extent in HUGE:
        for shape, offsets in (([extent], [0, 4]), ([1], [0, extent]), ([extent, 0], [0, 0])):
            assert refused(x=(shape, offsets))
        path.write_bytes(struct.pack("<Q", extent & ((1 << 63) - 1) | 1 << 62) + b"{}")
        assert refusals(child.outcomes({"do": "safetensors", "path": str(path)}))
    assert refused(x=([1], [0, 4]), y=([1], [0, 4])), "they overlap"
    assert refused(8, x=([1], [4, 8])), "something is before them"


# Chunks.


@pytest.mark.parametrize("codec", ["zstd", "gzip", "blosc"])
def test_a_chunk_never_unpacks_to_more_than_it_is(
    child: LimitedChild, tmp_path: Path, codec: str
) -> None:
    save(hostile_state.state(), tmp_path / "c", Zarr3SaveShardedStrategy(codec=codec))
    level = {"cname": "zstd", "clevel": 5} if codec == "blosc" else {"level": 5}
    encoder = numcodecs.get_codec({"id": codec} | level)
    bomb = bytes(encoder.encode(np.zeros(300 << 20, dtype=np.uint8)))
    assert len(bomb) < 1 << 20
    (tmp_path / "c" / "grid" / "c.0.0").write_bytes(bomb)
    outcomes = child.outcomes({"do": "checkpoint", "path": str(tmp_path / "c")})
    found = refusals(outcomes)
    assert found
    assert all("'grid'" in text and "c.0.0" in text for text in found), found


# What is large and honest.


def test_a_large_common_state_is_read(tmp_path: Path) -> None:
    shared = {"betas": (0.9, 0.95), "eps": 1e-8}
    deep: Any = 1
    for _ in range(60):
        deep = {"below": [deep]}
    state = {
        "history": [float(i) for i in range(100_000)],
        "by name": {f"parameter.{i}": i for i in range(50_000)},
        "groups": [shared] * 2_000,
        "deep": deep,
        "rng": torch.get_rng_state(),
    }
    save(state, tmp_path / "c")
    loaded = load({}, tmp_path / "c")
    assert torch.equal(loaded.pop("rng"), state.pop("rng"))
    assert loaded == state


# Any bytes changed.

KINDS: Final = {
    "config": ("metadata.json",),
    "attempt": (".dckpt/attempt.json",),
    "common state": ("common.pt",),
    "object": ("object/shard_0_1.pt",),
    "index": (".dckpt/index.json",),
    "zarr 2 array": ("grid/.zarray", "uneven/.zarray"),
    "zarr 3 nodes": ("zarr.json",),
    "chunk": ("grid/*0.0", "uneven/piece.0/c.0", "data/*/*", "*.distcp"),
    "database": ("manifest.ocdbt", "d/*"),
    "DCP metadata": (".metadata",),
}
"""What is read, and where it lies in a checkpoint of any backend."""

WORDS: Final = tuple(
    str(word).encode()
    for word in (
        0, -1, 1 << 30, 1 << 40, (1 << 62) - 1, 1 << 63, 10**30, "1e5", "1e400", "NaN", "true",
        "null", '"x"', "[]", "{}", '""', "[" * 2000,
    )
)  # fmt: skip


VALUE: Final = re.compile(rb'[-\d.]+|true|null|"[^"]*"|\[[^][]*\]|\{[^{}]*\}')


@st.composite
def changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few changes to any bytes: bits, cuts, insertions, repeats, and values in JSON."""
    steps = draw(
        st.lists(
            st.tuples(
                st.floats(0, 1, exclude_max=True),
                st.sampled_from(("bit", "bytes", "end", "value", "value")),
                # What takes their place; None: the same twice.
                st.binary(max_size=9) | st.sampled_from(WORDS) | st.none(),
                st.integers(0, 16),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for where, kind, new, size in steps:
            start = int(where * len(data))
            stop = len(data) if kind == "end" else start + size
            if kind == "value" and (value := VALUE.search(data, start)):
                start, stop = value.span()
            old = data[start:stop]
            other = 2 * old if new is None else new
            if kind == "bit" and old:
                other = bytes([old[0] ^ 1 << size % 8]) + old[1:]
            data = data[:start] + other + data[stop:]
        return data

    return apply


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_it_was_or_refused(
    kind: str, originals: Path, child: LimitedChild, tmp_path: Path
) -> None:
    if kind == "zarr 3 nodes":  # which are read where there is no index
        originals = Path(shutil.copytree(originals, tmp_path / "originals"))
        for index in originals.glob(f"*/{INDEX_NAME}"):
            index.unlink()
    found = [sorted(originals.glob(f"*/{pattern}")) for pattern in KINDS[kind]]
    files = [
        (originals / path.relative_to(originals).parts[0], path) for own in found for path in own
    ]
    assert files

    @examples(25)
    @given(st.integers(0, len(files) - 1), changes())
    def check(number: int, change: Callable[[bytes], bytes]) -> None:
        checkpoint, path = files[number]
        before = path.read_bytes()
        path.write_bytes(change(before))
        try:
            outcomes = child.outcomes({"do": "checkpoint", "path": str(checkpoint)})
        finally:
            path.write_bytes(before)
        wrong = [text for text in outcomes if text.startswith(("raw", "the process"))]
        assert not wrong, (path, wrong)
        if kind in ("index", "DCP metadata"):
            # Both have a checksum or are held against the data: nothing else is read in silence.
            assert "different" not in outcomes, (path, outcomes)

    check()


@pytest.fixture(scope="module")
def single_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files beside checkpoints: of tensors alone, of torch, and the record of a run."""
    folder = tmp_path_factory.mktemp("files")
    tensors = {"a": torch.zeros(3, 4), "b": torch.tensor(data=False)}
    safetensors.torch.save_file(tensors, folder / "x.safetensors", {"made by": "us"})
    torch.save({"w": torch.arange(6.0), "same": [torch.zeros(2, 3)], "step": 7}, folder / "x.pt")
    with CheckpointManager(folder / "run", ("zarr", 2)) as manager:
        for step in (1, 2):
            manager.save(step, hostile_state.state())
        manager.verify(1)
    record = folder / "run" / "manager.json"
    return {"safetensors": folder / "x.safetensors", "torch file": folder / "x.pt", "run": record}


@pytest.mark.parametrize("kind", ["safetensors", "torch file", "run"])
def test_a_single_file_is_read_or_refused(
    kind: str, single_files: dict[str, Path], child: LimitedChild
) -> None:
    path = single_files[kind]
    before = path.read_bytes()
    asked = {"do": "manager", "path": str(path.parent)} if kind == "run" else {"path": str(path)}

    @examples(40)
    @given(changes())
    def check(change: Callable[[bytes], bytes]) -> None:
        path.write_bytes(change(before))
        outcomes = child.outcomes({"do": kind, **asked})
        assert not outcomes[0].startswith(("raw", "the process")), outcomes
        if kind == "safetensors":
            assert outcomes[0].startswith(
                ("equal", "CorruptCheckpointError", "UnsupportedFormatError")
            ), outcomes

    check()
