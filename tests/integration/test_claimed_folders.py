"""Who may write into a folder, and what is deleted there, on any file system."""

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.comm import Comm, SingleProcess, ThreadComm
from dist_checkpointing.filesystem import LOCK_NAME, FolderLock, local_folder
from dist_checkpointing.format import Attempt, CheckpointingConfig, remove_checkpoint, seal
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import (
    StrategyAction,
    TorchDistSaveShardedStrategy,
    get_default_strategy,
)
from dist_checkpointing.testing import run_ranks
from faults import before_first, failing, freezing, replaced, strange_flock
from scripts import run_fresh
from states import BACKEND, BACKENDS, assert_at_step, assert_holds, cell, flat, rows, shard, trained
from tiers import share

LOCAL_FOLDER = "dist_checkpointing.filesystem.local_folder"


def assert_sound(folder: Path, step: int) -> None:
    dc.verify_checkpoint(folder)
    assert_at_step(folder, step)


@pytest.fixture
def how(request: pytest.FixtureRequest) -> Iterator[None]:
    """``flock`` as on NFS (EBADF for a descriptor that is only read), or not at all."""
    with strange_flock(None if request.param == "EBADF" else getattr(errno, request.param)):
        yield


# File systems.


@pytest.mark.parametrize(
    ("how", "backend"),
    [*zip(["ENOSYS", "EOPNOTSUPP", "ENOLCK", "EBADF"], BACKENDS, strict=True)],
    indirect=["how"],
)
@pytest.mark.usefixtures("how")
def test_saves_overwrites_removals_and_retention_where_flock_is_not_what_it_is_elsewhere(
    tmp_path: Path, backend: Any
) -> None:
    folder = tmp_path / "c"
    dc.save(trained(1), folder, backend)
    dc.save(trained(2), folder, backend, overwrite=True)
    assert_sound(folder, 2)
    dc.remove_sharded_tensors(folder, "optimizer")
    assert "optimizer.m" not in dc.load_plain_tensors(folder)
    assert not (folder / LOCK_NAME).exists()
    manager = dc.CheckpointManager(tmp_path / "run", backend, retention=dc.Retention(keep_last=1))
    for step in (1, 2, 3):
        manager.save(step, trained(step))
    manager.async_save(4, trained(4)).result(60)
    assert manager.steps() == [4]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manager.json", "step-00000004"]
    manager.close()


@pytest.mark.parametrize("how", ["ENOSYS", "EBADF"], indirect=True)
@pytest.mark.usefixtures("how")
def test_a_save_and_a_removal_keep_each_other_out(tmp_path: Path) -> None:
    dc.save(trained(1), tmp_path, "zarr")
    calls: list[Callable[[], Any]] = [
        lambda: dc.save(trained(2), tmp_path, "zarr", overwrite=True),
        lambda: dc.remove_sharded_tensors(tmp_path, "optimizer", comm=SingleProcess()),
        lambda: remove_checkpoint(tmp_path),
    ]
    with FolderLock.acquire(tmp_path):
        for call in calls:
            with pytest.raises(dc.CheckpointExistsError, match=f"process {os.getpid()} on host"):
                call()
    assert_sound(tmp_path, 1)


_REFUSING = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <dlfcn.h>

static int refused(int operation) {
    return operation == F_OFD_SETLK || operation == F_OFD_SETLKW || operation == F_SETLK
        || operation == F_SETLKW;
}

int flock(int file, int operation) { (void)file; (void)operation; errno = ENOSYS; return -1; }

#define DEFINE(name)                                                    \
    int name(int file, int operation, ...) {                            \
        va_list arguments;                                              \
        va_start(arguments, operation);                                 \
        void *argument = va_arg(arguments, void *);                     \
        va_end(arguments);                                              \
        if (refused(operation)) { errno = ENOSYS; return -1; }          \
        int (*real)(int, int, ...) = dlsym(RTLD_NEXT, #name);           \
        return real(file, operation, argument);                         \
    }
DEFINE(fcntl)
DEFINE(fcntl64)
"""
_SCRIPT = """
import sys, torch
from dist_checkpointing import ShardedTensor, load_plain_tensors, remove_sharded_tensors, save
state = {k: ShardedTensor.from_rank_offsets(k, torch.ones(1000, 300)) for k in ("w", "optimizer")}
folder, backend = sys.argv[1:]
for step in range(2):
    save(state | {"step": step}, folder, backend, overwrite=step > 0)
remove_sharded_tensors(folder, "optimizer")
print(sorted(load_plain_tensors(folder)))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_no_library_below_needs_a_lock_of_the_file_system(tmp_path: Path, backend: str) -> None:
    """TensorStore locks files by itself, which Lustre without ``flock`` refuses as well."""
    (tmp_path / "refusing.c").write_text(_REFUSING)
    library = tmp_path / "refusing.so"
    build = f"cc -shared -fPIC -o {library} {tmp_path / 'refusing.c'} -ldl"
    subprocess.run(build.split(), check=True, timeout=60)
    done = run_fresh(
        "-c", _SCRIPT, tmp_path / "c", backend, environment={"LD_PRELOAD": str(library)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "['step', 'w']"
    assert done.stderr.count("no flock") == 1


@pytest.mark.parametrize("meanwhile", ["a save commits", "a removal deletes the folder"])
def test_what_happens_between_the_first_look_and_the_lock(tmp_path: Path, meanwhile: str) -> None:
    def act(folder: Path) -> None:
        if is_commit:
            dc.save(trained(1), folder, "zarr")
        else:
            folder.rmdir()

    is_commit = meanwhile == "a save commits"
    with before_first("dist_checkpointing.filesystem.FolderLock.acquire", act):
        if is_commit:
            with pytest.raises(dc.CheckpointExistsError, match="committed checkpoint"):
                dc.save(trained(2), tmp_path / "c", "zarr")
        else:
            dc.save(trained(1), tmp_path / "c", "zarr")
    assert_sound(tmp_path / "c", 1)


def test_ranks_with_more_threads_than_rank_0_leave_nothing_that_nobody_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_checkpointing.strategies.torch_dist.writer._MIN_FILE_BYTES", 1)
    threads = [1, 4, 30]

    def save_rank(comm: Comm) -> None:
        options = StorageOptions(threads=threads[comm.rank])
        wanted = {str(i): shard(str(i), torch.ones(3), (0, comm.rank, 3)) for i in range(40)}
        dc.save(wanted, tmp_path, TorchDistSaveShardedStrategy(options=options), comm=comm)

    with monkeypatch.context() as patched:
        # As a kill before the commit leaves it.
        patched.setattr(Attempt, "commit", lambda *_: (_ for _ in ()).throw(OSError("no commit")))
        patched.setattr(Attempt, "abandon", Attempt.release)
        with pytest.raises(dc.CheckpointingException, match="no commit"):
            run_ranks(3, save_rank)
    assert (tmp_path / "__1_3.distcp").exists()
    assert (tmp_path / "__2_7.distcp").exists()
    run_ranks(3, save_rank)
    dc.verify_checkpoint(tmp_path)
    assert len(dc.load_plain_tensors(tmp_path)) == 40
    remove_checkpoint(tmp_path)
    assert not tmp_path.exists()


# Leftovers.


@pytest.mark.parametrize("content", [b"", b"{", b'{"zarr_format": 3}', None], ids=repr)
def test_metadata_that_a_killed_save_cut_off_is_not_looked_into(
    tmp_path: Path, content: bytes | None
) -> None:
    def damage(folder: Path) -> None:
        path = folder / "w/.zarray"
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    folder = tmp_path / "c"
    dc.save(trained(1), folder, ("zarr", 1))
    damage(folder)
    dc.save(trained(2), folder, ("zarr", 1), overwrite=True)
    assert_sound(folder, 2)
    (folder / "metadata.json").unlink()
    damage(folder)
    dc.save(trained(3), folder, ("zarr", 1))
    assert_sound(folder, 3)


def test_an_array_of_another_program_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.zarray").write_bytes(b"{")
    dc.save(trained(1), tmp_path, ("zarr", 1))
    assert_sound(tmp_path, 1)
    assert dc.load_tensors_metadata(tmp_path).keys() == {"w", "optimizer.m"}
    dc.remove_sharded_tensors(tmp_path, "o")
    assert dc.load_tensors_metadata(tmp_path).keys() == {"w"}
    assert (tmp_path / "other/.zarray").read_bytes() == b"{"


@BACKEND
def test_temporary_files_of_a_killed_removal_go_with_the_next_change(
    tmp_path: Path, backend: Any
) -> None:
    names = {
        ("zarr", 1): [],
        ("zarr", 2): [".dckpt/index.json", "zarr.json"],
        ("torch_dist", 1): [".metadata"],
        ("tensorstore", 1): [".dckpt/index.json", "manifest.ocdbt"],
    }[backend]
    names += [".dckpt/removal.json", ".dckpt/attempt.json", "common.pt"]
    folder = tmp_path / "c"
    dc.save(trained(1), folder, backend)
    changes: list[Callable[[], Any]] = [
        lambda: dc.remove_sharded_tensors(folder, "optimizer"),
        lambda: dc.remove_sharded_tensors(folder, "nothing begins with this"),
        lambda: dc.save(trained(2), folder, backend, overwrite=True),
        lambda: remove_checkpoint(folder),
    ]
    for change in changes:
        left = [folder / f"{name}.0123abcd.tmp" for name in names]
        for path in left:
            path.write_bytes(b"half")
        change()
        assert not [path for path in left if path.exists()]
    assert not folder.exists()


def test_a_record_that_is_written_anew_is_never_half(tmp_path: Path) -> None:
    """The names in it are all that says which files are ours."""
    attempt = Attempt.begin(tmp_path, ["w", "x"])
    (tmp_path / "w").write_text("ours")
    seen = []

    def look(real: Callable[[int], None], descriptor: int) -> None:
        noted = json.loads((tmp_path / ".dckpt/attempt.json").read_text())
        seen.append(frozenset(noted["creates"]))
        real(descriptor)

    with replaced("os.fsync", look), failing(f"{LOCAL_FOLDER}.remove"):
        attempt.abandon()
    assert seen
    assert all(names >= {"w", "x"} for names in seen)
    Attempt.begin(tmp_path, ["w"]).release()
    assert not (tmp_path / "w").exists()


def test_a_save_whose_lock_was_taken_away_leaves_the_next_one_alone(tmp_path: Path) -> None:
    first = Attempt.begin(tmp_path, ["w", "common.pt"])
    (tmp_path / LOCK_NAME).unlink()
    dc.save(trained(1), tmp_path)
    with pytest.raises(dc.CheckpointExistsError, match="another save has taken over"):
        first.commit(CheckpointingConfig("zarr", 1))
    first.abandon()
    assert_sound(tmp_path, 1)


# Data stays as long as metadata.json may be there.


@BACKEND
@pytest.mark.parametrize("stuck", ["unlink", "fsync_folder"])
def test_what_may_be_committed_is_not_deleted(tmp_path: Path, backend: Any, stuck: str) -> None:
    """The fsync after the rename fails, and then either it cannot be unlinked or not for good."""
    folder = tmp_path / "c"

    def is_renamed(*paths: Path) -> bool:
        return folder in paths and (folder / "metadata.json").exists()

    tried = []

    def is_undone(*paths: Path) -> bool:
        tried.append(paths)
        return folder in paths and (folder / "common.pt").exists() and (folder / "x").exists()

    with ExitStack() as faults:
        if stuck == "unlink":
            is_config = lambda path, **_: path == folder / "metadata.json"  # noqa: E731
            faults.enter_context(failing(f"{LOCAL_FOLDER}.fsync_folder", at=is_renamed))
            faults.enter_context(failing("pathlib.Path.unlink", at=is_config))
        else:
            is_either = lambda *paths: is_renamed(*paths) or is_undone(*paths)  # noqa: E731
            touch = before_first(
                "dist_checkpointing.format.Attempt.abandon", lambda _: (folder / "x").touch()
            )
            faults.enter_context(touch)
            faults.enter_context(failing(f"{LOCAL_FOLDER}.fsync_folder", at=is_either))
        with pytest.raises(dc.RankFailedError, match="Input/output"):
            dc.save(trained(1), folder, backend)
    (folder / "x").unlink(missing_ok=True)
    assert not (folder / LOCK_NAME).exists()
    if stuck == "unlink":
        assert_sound(folder, 1)
        with pytest.raises(dc.CheckpointExistsError, match="committed checkpoint"):
            dc.save(trained(2), folder, backend)
        assert_sound(folder, 1)
    else:
        # A power cut may bring it back: then everything is there.
        assert tried
        assert not dc.check_is_distributed_checkpoint(folder)
        config = {"sharded_backend": backend[0], "sharded_backend_version": backend[1]}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
        assert_sound(folder, 1)


def test_a_checkpoint_whose_commit_cannot_be_taken_back_is_not_removed(tmp_path: Path) -> None:
    dc.save(trained(1), tmp_path, "zarr")
    for name, fails in (
        ("pathlib.Path.unlink", lambda path, **_: path.name == "metadata.json"),
        (f"{LOCAL_FOLDER}.fsync_folder", lambda path: path == tmp_path),
    ):
        with failing(name, at=fails):
            with pytest.raises(OSError, match="Input/output"):
                remove_checkpoint(tmp_path)
            with pytest.raises(dc.RankFailedError, match="Input/output"):
                dc.save(trained(2), tmp_path, "zarr", overwrite=True)
        (tmp_path / "metadata.json").write_text(
            '{"sharded_backend": "zarr", "sharded_backend_version": 2}'
        )
        assert_sound(tmp_path, 1)


# Links.


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "x").mkdir(parents=True)
    for name in ("victim", "x/0", "x/.zarray", "attempt.json", "removal.json"):
        (folder / name).write_text("mine")
    return folder


def assert_untouched(outside: Path) -> None:
    files = {str(p.relative_to(outside)) for p in outside.rglob("*") if p.is_file()}
    assert files == {"victim", "x/0", "x/.zarray", "attempt.json", "removal.json"}
    assert {p.read_text() for p in outside.rglob("*") if p.is_file()} == {"mine"}


def claimed(folder: Path, creates: list[str]) -> Path:
    """A folder as a killed save leaves it, with the names that it wanted to create."""
    (folder / ".dckpt").mkdir(parents=True)
    record = json.dumps({"attempt": "a" * 32, "creates": creates})
    (folder / ".dckpt/attempt.json").write_text(record)
    return folder


def test_a_link_in_the_place_of_the_record_is_replaced(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "c"
    (folder / ".dckpt").mkdir(parents=True)
    (folder / ".dckpt/attempt.json").symlink_to(outside / "victim")
    dc.save(trained(1), folder)
    assert_untouched(outside)
    assert not (folder / ".dckpt/attempt.json").is_symlink()
    assert_sound(folder, 1)


def test_leftovers_behind_a_link_are_not_deleted(tmp_path: Path, outside: Path) -> None:
    names = ["link/x", "link/victim", "link/x/0", "link/nothing/y", "w"]
    folder = claimed(tmp_path / "c", names)
    (folder / "link").symlink_to(outside)
    # A link of ours is deleted, and not what it points to.
    (folder / "w").symlink_to(outside)
    dc.save(trained(1), folder, "zarr")
    assert_untouched(outside)
    assert (folder / "link").is_symlink()
    assert not (folder / "w").is_symlink()
    assert_sound(folder, 1)
    remove_checkpoint(folder)
    assert_untouched(outside)
    assert [path.name for path in folder.iterdir()] == ["link"]


@pytest.mark.parametrize("creates", [["w"], ["link/w"], ["link/w", "link/x"]], ids=str)
def test_nothing_is_written_through_a_link(
    tmp_path: Path, outside: Path, creates: list[str]
) -> None:
    folder = claimed(tmp_path / "c", creates)
    (folder / "link").symlink_to(outside)
    with pytest.raises(dc.CheckpointExistsError, match="is a link"):
        dc.save(trained(1, key="link/new"), folder, ("zarr", 1))
    assert_untouched(outside)


@BACKEND
def test_a_link_in_the_place_of_our_folder_is_refused(
    tmp_path: Path, outside: Path, backend: Any
) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / ".dckpt").symlink_to(outside)
    with pytest.raises(dc.CheckpointExistsError, match=r"\.dckpt"):
        dc.save(trained(1), folder, backend)
    assert_untouched(outside)
    assert [path.name for path in folder.iterdir()] == [".dckpt"]


@pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2)])
def test_a_removal_does_not_follow_links(tmp_path: Path, outside: Path, backend: Any) -> None:
    folder = tmp_path / "c"
    dc.save(trained(1), folder, backend)
    (folder / "link").symlink_to(outside)
    going = {"k": ["link/x"], "l": ["link"]}
    (folder / ".dckpt/removal.json").write_text(json.dumps(going))
    dc.remove_sharded_tensors(folder, "optimizer")
    assert_untouched(outside)
    assert (folder / "link").is_symlink()
    assert "optimizer.m" not in dc.load_plain_tensors(folder)
    (folder / ".dckpt/removal.json").symlink_to(outside / "removal.json")
    dc.remove_sharded_tensors(folder, "w")
    assert_untouched(outside)


def test_data_behind_a_link_is_not_deleted(tmp_path: Path) -> None:
    folder, outside = tmp_path / "c", tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder/file").write_text("mine")
    dc.save(trained(1), folder, "tensorstore")
    (folder / "data/other").symlink_to(outside)
    dc.remove_sharded_tensors(folder, "optimizer")
    assert (outside / "folder/file").read_text() == "mine"


@pytest.mark.parametrize("name", ["..", "../outside/victim", "w/../../outside/victim"])
def test_a_path_that_is_not_below_is_not_deleted(tmp_path: Path, outside: Path, name: str) -> None:
    folder = tmp_path / "c"
    (folder / "w").mkdir(parents=True)
    with pytest.raises(ValueError, match="not below"):
        local_folder.remove(folder / name, folder)
    assert_untouched(outside)


# A rank of an attempt that was given up goes on: as the next one begins, or after its commit.


NO_HOOKS = SaveHooks()


def every_kind_at(step: int, comm: Comm) -> dict[str, Any]:
    """Tensors on a grid, and flattened such that ranks share a chunk; an object."""
    full, cut = torch.arange(8.0) + 100 * step, ((0, 3), (3, 8))[comm.rank]
    return {
        "even": rows("even", full, comm),
        "same": rows("same", torch.ones(8), comm),
        "flat": flat("flat", full.reshape(2, 4), *cut),
        "o": cell("o", [step], comm),
        "step": step,
    }


def save_every_kind(
    step: int, folder: Path, backend: Any, comm: Comm, hooks: SaveHooks = NO_HOOKS
) -> None:
    kind = type(get_default_strategy(StrategyAction.SAVE_SHARDED, *backend))
    options: Any = {"sharded_strategy": kind(options=StorageOptions(threads=1)), "comm": comm}
    if backend[0] != "torch_dist" and step:
        options["base"] = folder.parent / "0"
    save_with_hooks(hooks, every_kind_at(step, comm), folder, **options)


def freeze_rank_1(nth: int, folder: Path, backend: Any, *, wakes_early: bool) -> bool:
    """Save twice; rank 1 of the first save stops before a call, if it makes so many."""
    ranks = ThreadComm.Rendezvous(2, 60)
    with freezing(nth) as frozen, ThreadPoolExecutor(2) as pool:

        def save_rank(rank: int) -> None:
            if rank == 1:
                frozen.threads.add(threading.current_thread())
            save_every_kind(1, folder, backend, ThreadComm(ranks, rank))

        def wake(_: object = None) -> None:
            frozen.go_on.set()
            late.exception(60)

        def save_again(hooks: SaveHooks) -> None:
            run_ranks(2, lambda comm: save_every_kind(2, folder, backend, comm, hooks))

        first, late = (pool.submit(save_rank, rank) for rank in range(2))
        late.add_done_callback(lambda _: frozen.is_seen.set())
        try:
            assert frozen.is_seen.wait(60)
            if late.done():
                first.result(60)
                return False
            ranks.leave(1)
            assert isinstance(first.exception(60), dc.RankFailedError)
            if wakes_early:
                # It may be in the way; but what is committed is right.
                with suppress(FileExistsError, dc.RankFailedError):
                    save_again(SaveHooks(after_claim=wake))
            if not dc.check_is_distributed_checkpoint(folder):
                save_again(NO_HOOKS)
            before = files_in(folder)
        finally:
            wake()
    after = files_in(folder)
    assert {name: after.get(name) for name in before} == before
    return True


@pytest.mark.parametrize("wakes_early", [False, True])
@BACKEND
def test_a_rank_of_an_earlier_attempt_changes_no_byte_of_a_later_one(
    tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch, *, wakes_early: bool
) -> None:
    monkeypatch.setattr(seal, "VISIBLE_SECONDS", 0.05)
    run_ranks(2, lambda comm: save_every_kind(0, tmp_path / "0", backend, comm))
    nth, step = 1, 100 // share(100)
    while freeze_rank_1(nth, tmp_path / str(nth), backend, wakes_early=wakes_early):
        folder, full = tmp_path / str(nth), torch.arange(8.0) + 200
        assert_holds(folder, {"even": full, "flat": full.view(2, 4)})
        assert dc.Checkpoint.open(folder).objects["o"].shape == (2,)
        nth += step
    assert nth > 2
