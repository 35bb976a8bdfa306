"""Bases that are damaged, vanish, or cannot be shared with: what is saved is right nevertheless."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from damage import flip
from dist_checkpointing import save
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format import CHECKSUMS_NAME, SEAL_NAME
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.strategies import (
    TensorStoreSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrSaveShardedStrategy,
)
from faults import before_first, without_links
from states import assert_holds, between, num_shared, save_on, wholes

STRATEGIES = (TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy, ZarrSaveShardedStrategy)
REFLINKS = os.environ.get("DIST_CHECKPOINTING_TEST_REFLINKS", "")
SHARING = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.__name__)


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # The last row of an uneven cut does not fill its chunk.
    return {f"layer{i}.w": torch.randn(41, 64, generator=generator) for i in range(4)}


def data_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 9000)
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def digests(base: Path) -> list[Path]:
    return [*(base / CHECKSUMS_NAME).glob("*.upper")]


def become_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere" + path.name))
    path.symlink_to("elsewhere" + path.name)


DAMAGE: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path], object]]] = {
    "cut short": (data_files, lambda path: os.truncate(path, path.stat().st_size - 1)),
    "without files": (data_files, Path.unlink),
    "links for files": (data_files, become_a_link),
    "without seal": (lambda base: [base / SEAL_NAME], Path.unlink),
    "flipped seal": (lambda base: [base / SEAL_NAME], flip),
    "flipped digests": (digests, flip),
    # As saved by an older version, whose seal does not name them.
    "without digests": (digests, Path.unlink),
}
"""Which files of a base are damaged, and how."""


@SHARING
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_the_base_does_not_spread(
    strategy: Any, damage: str, tmp_path: Path, caplog: Any
) -> None:
    tensors = model()
    save(wholes(tensors), tmp_path / "1", strategy())
    files_of, inflict = DAMAGE[damage]
    files = files_of(tmp_path / "1")
    assert files
    for path in files:
        inflict(path)
    save(wholes(tensors), tmp_path / "2", strategy(), base=tmp_path / "1")
    assert num_shared(tmp_path / "2") == 0
    assert_holds(tmp_path / "2", tensors)
    assert "shared" in caplog.text


def test_padded_and_compressed_chunks_are_shared_too(tmp_path: Path) -> None:
    full = torch.arange(5 * 4000.0).reshape(5, 4000)

    def state(comm: Comm) -> dict[str, Any]:
        # The second chunk of each is padded.
        cut = (0, 3) if comm.rank == 0 else (3, 5)
        return {"w": between("w", full, *cut), "v": between("v", full * 2, *cut)}

    for name, strategy in (
        ("plain", TensorStoreSaveShardedStrategy()),
        ("zarr", Zarr3SaveShardedStrategy()),
        ("zstd", Zarr3SaveShardedStrategy(codec="zstd")),
    ):
        first, second = tmp_path / name / "1", tmp_path / name / "2"
        save_on(2, state, first, strategy)
        save_on(2, state, second, strategy, base=first)
        assert num_shared(second) == len(data_files(second)) > 0
        assert_holds(second, {"w": full})


@SHARING
def test_without_links_the_kernel_copies(strategy: Any, tmp_path: Path) -> None:
    tensors = model()
    save(wholes(tensors), tmp_path / "1", strategy())
    with without_links(kernel_copies=True) as copied:
        save(wholes(tensors), tmp_path / "2", strategy(), base=tmp_path / "1")
    assert num_shared(tmp_path / "2") == 0
    assert sum(copied) == sum(tensor.nbytes for tensor in tensors.values())
    assert not list(tmp_path.rglob("*.tmp"))
    shutil.rmtree(tmp_path / "1")
    assert_holds(tmp_path / "2", tensors)


@pytest.mark.skipif(
    not REFLINKS, reason="DIST_CHECKPOINTING_TEST_REFLINKS names no folder on btrfs or xfs"
)
@SHARING
def test_without_links_files_share_their_blocks(strategy: Any) -> None:
    """On a real file system with reflinks: a copy takes no room, and outlives the base."""

    def free_bytes() -> int:
        os.sync()
        room = os.statvfs(REFLINKS)
        return room.f_bfree * room.f_frsize

    tensors = {f"w{number}": torch.randn(1024, 1024) for number in range(8)}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=REFLINKS) as name:
        folder = Path(name)
        save(wholes(tensors), folder / "1", strategy())
        before = free_bytes()
        with without_links(kernel_copies=True):
            save(wholes(tensors), folder / "2", strategy(), base=folder / "1")
        assert before - free_bytes() < num_bytes // 4
        assert num_shared(folder / "2") == 0
        assert len(data_files(folder / "2")) == len(data_files(folder / "1"))
        for path in data_files(folder / "1"):
            path.write_bytes(b"other")  # the copy does not see what is written into the base
        shutil.rmtree(folder / "1")
        assert_holds(folder / "2", tensors)


@SHARING
def test_where_nothing_can_be_shared_all_is_written_and_said_once(
    strategy: Any, tmp_path: Path, caplog: Any
) -> None:
    tensors = model()
    save(wholes(tensors), tmp_path / "1", strategy())
    with without_links(kernel_copies=False):
        save(wholes(tensors), tmp_path / "2", strategy(), base=tmp_path / "1")
    assert_holds(tmp_path / "2", tensors)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert not list(tmp_path.rglob("*.tmp"))


@SHARING
def test_a_base_that_is_deleted_before_it_is_shared(strategy: Any, tmp_path: Path) -> None:
    tensors = model()
    for _ in range(2):
        save(wholes(tensors), tmp_path / "1", strategy())
        save_with_hooks(
            SaveHooks(after_claim=lambda _: shutil.rmtree(tmp_path / "1")),
            wholes(tensors),
            tmp_path / "2",
            sharded_strategy=strategy(),
            base=tmp_path / "1",
            overwrite=True,
        )
        assert_holds(tmp_path / "2", tensors)


@SHARING
def test_a_base_that_is_saved_again_while_it_is_shared(strategy: Any, tmp_path: Path) -> None:
    """Chunk files of zarr have the same names in every save: another one's must not come in."""
    tensors = model()
    others = {key: tensor + 1 for key, tensor in tensors.items()}
    save(wholes(tensors), tmp_path / "1", strategy())

    def save_others(*_: Any) -> None:
        save(wholes(others), tmp_path / "1", strategy(), overwrite=True)

    with before_first("os.link", save_others) as calls:
        save(wholes(tensors), tmp_path / "2", strategy(), base=tmp_path / "1")
    assert calls
    assert_holds(tmp_path / "2", tensors)
    assert_holds(tmp_path / "1", others)


def test_another_file_of_the_name_is_not_taken_for_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    assert local_folder.share_file(tmp_path / "a", tmp_path / "b") == 3
    assert local_folder.share_file(tmp_path / "a", tmp_path / "b") == 3
    assert local_folder.share_file(tmp_path / "gone", tmp_path / "c") is None
    (tmp_path / "link").symlink_to("a")
    assert local_folder.share_file(tmp_path / "link", tmp_path / "d") is None
    assert not (tmp_path / "d").exists()
