"""Any file of a checkpoint with any bytes changed: the same state, or a documented error."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

import hostile_state
from dist_checkpointing import CheckpointManager
from limited_child import LimitedChild
from tiers import examples

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


@st.composite
def changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few changes to any bytes: bits, bytes, cuts, repeats, and numbers in text."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("bit", "byte", "cut", "drop", "insert", "repeat", "number")),
                st.floats(0, 1, exclude_max=True),
                st.binary(min_size=1, max_size=9),
                st.sampled_from(WORDS),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, where, given_bytes, word in steps:
            data = _changed(data, kind, int(where * len(data)), given_bytes, word)
        return data

    return apply


def _changed(data: bytes, kind: str, at: int, given_bytes: bytes, word: bytes) -> bytes:  # noqa: PLR0911 - one a kind
    if not data:
        return data
    head, tail = data[:at], data[at:]
    match kind:
        case "bit":
            return head + bytes([tail[0] ^ 1 << given_bytes[0] % 8]) + tail[1:]
        case "byte":
            return head + given_bytes[:1] + tail[1:]
        case "cut":
            return head
        case "drop":
            return head + tail[given_bytes[0] % 16 :]
        case "insert":
            return head + given_bytes + tail
        case "repeat":
            return head + tail[: given_bytes[0]] + tail
        case _:
            number = re.compile(rb"\d+").search(data, at)
            return data if number is None else data[: number.start()] + word + data[number.end() :]


@pytest.fixture(scope="module")
def copies(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same once more, to break and mend."""
    return Path(shutil.copytree(originals, tmp_path_factory.mktemp("copies") / "c"))


def places(parent: Path, patterns: tuple[str, ...]) -> list[tuple[Path, Path]]:
    """``(checkpoint, file in it)`` of one kind of file, in all backends."""
    return [
        (parent / name, path)
        for name in hostile_state.BACKENDS
        for pattern in patterns
        for path in sorted((parent / name).glob(pattern))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_it_was_or_refused(kind: str, copies: Path, child: LimitedChild) -> None:
    files = places(copies, KINDS[kind])
    assert files

    @examples(40)
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
