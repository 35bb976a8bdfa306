"""``dckpt ls --follow`` beside a save that is going on in another thread or process."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import CheckpointManager, save
from dist_checkpointing.filesystem import FolderLock, ObjectPath, holder_of
from dist_checkpointing.tools import ls as following
from faults import commits_waiting
from samples import Finished, Run
from scripts import ForkedScript
from states import at_step
from stores import new_url


def while_saving(work: Callable[[], object], folder: Any) -> threading.Thread:
    def is_claimed() -> Any:
        if isinstance(folder, Path):
            return holder_of(folder) is not None  # the lock is there before it names its holder
        claims = folder / ".dckpt/claims"
        return claims.store.list_folder(claims.prefix)[1] != []

    thread = threading.Thread(target=work)
    thread.start()
    while not is_claimed():
        assert thread.is_alive()
    return thread


def after(looks: int, then: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call something when the command has looked so many times."""
    count = iter(range(looks))

    def pause() -> None:
        time.sleep(0.01)
        if next(count, None) is None:
            then()

    monkeypatch.setattr(following, "_pause", pause)


def follow_a_save(
    folder: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch, *options: str
) -> Finished:
    may_commit = threading.Event()
    with commits_waiting(may_commit):
        thread = while_saving(lambda: save(at_step(1), folder), folder)

        def commit() -> None:
            may_commit.set()
            thread.join()  # the claim of the folder goes after the commit

        after(3, commit, monkeypatch)
        finished = dckpt("ls", folder, "--follow", *options)
    assert (finished.code, finished.err) == (0, "")
    return finished


def test_a_save_to_its_end(tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = follow_a_save(tmp_path / "c", dckpt, monkeypatch)
    begun, ended = finished.out.splitlines()
    assert begun == f"c: being saved by process {os.getpid()} on {os.uname().nodename}"
    assert ended.startswith("c: whole, ")
    assert ", saved in " in ended
    folder = tmp_path / "json" / "c"
    found = follow_a_save(folder, dckpt, monkeypatch, "--json").json
    assert (found["step"], found["state"], found["path"]) == ("c", "whole", str(folder))
    assert found["num_bytes"] == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert found["seconds"] > 0


@pytest.mark.parametrize("place", ["disk", "store"])
def test_the_saves_of_a_run_until_ctrl_c(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    root: Any = tmp_path / "run" if place == "disk" else ObjectPath.of(new_url())
    with CheckpointManager(root) as manager:
        manager.save(1, at_step(1))

    def train() -> None:
        with CheckpointManager(root) as manager:
            manager.save(2, at_step(2))

    may_commit = threading.Event()
    with commits_waiting(may_commit):
        thread = while_saving(train, root / "step-00000002")

        calls = iter(range(4))

        def then() -> None:
            may_commit.set()
            thread.join()
            call = next(calls)
            if call == 1:
                save(at_step(3), root / "step-00000003")  # begins and ends between two looks
            elif call == 3:
                raise KeyboardInterrupt

        after(3, then, monkeypatch)
        finished = dckpt("ls", root, "--follow")
    assert (finished.code, finished.err) == (130, "")
    assert finished.out.startswith(f"{root}\nSTEP ")
    title, begun, second, third = finished.out.splitlines()[-4:]
    assert title == f"{root}: waiting for saves; Ctrl-C ends"
    assert begun.startswith(f"2: being saved by process {os.getpid()} on ")
    assert ", about " in begun
    assert second.startswith("2: whole, ")
    assert third.startswith("3: whole, ")
    assert dckpt("ls", f"{root}@2", "--follow").out.startswith("step-00000002: whole, ")


def test_a_save_that_is_killed(tmp_path: Path, dckpt: Run) -> None:
    folder, written = tmp_path / "c", tmp_path / "written"
    code = f"""
import os, time
from pathlib import Path
from dist_checkpointing import save
from faults import replaced
from states import at_step

def wait(real, source, target):
    if target.endswith("/metadata.json"):
        Path({str(written)!r}).write_text(str(os.getpid()))
        time.sleep(60)
    real(source, target)

with replaced("os.replace", wait):
    save(at_step(1), {str(folder)!r})
"""
    script = ForkedScript(["-c", code])
    while not (written.exists() and written.read_text()):
        assert script.returncode is None, script.communicate()
    killer = threading.Timer(0.3, script.kill)
    killer.start()
    finished = dckpt("ls", folder, "--follow")
    killer.join()
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    begun, ended = finished.out.splitlines()
    assert finished.code == 1
    assert begun.startswith(f"c: being saved by process {written.read_text()} on ")
    assert ended == "c: unfinished: its save has ended"


def test_a_step_that_is_deleted_meanwhile(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"

    def follow(*options: str) -> str:
        folder.mkdir()
        (folder / "x").touch()
        lock = FolderLock.acquire(folder)

        def delete() -> None:
            lock.release()
            shutil.rmtree(folder)

        after(2, delete, monkeypatch)
        finished = dckpt("ls", folder, "--follow", *options, code=1)
        return finished.out

    assert follow().splitlines()[-1] == "c: deleted"
    assert json.loads(follow("--json"))["state"] == "deleted"


@pytest.mark.parametrize("name", ["run", "c"])
def test_it_waits_for_what_is_not_there_yet(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = iter(range(2))

    def then() -> None:
        if next(calls):
            raise KeyboardInterrupt
        save(at_step(1), tmp_path / "run" / "step-00000001" if name == "run" else tmp_path / "c")

    after(2, then, monkeypatch)
    finished = dckpt("ls", tmp_path / name, "--follow")
    assert (finished.code, finished.err) == (130 if name == "run" else 0, "")
    title, ended = finished.out.splitlines()
    assert title == f"{tmp_path / name}: waiting for saves; Ctrl-C ends"
    assert ended.startswith("1: whole, " if name == "run" else "c: whole, ")
