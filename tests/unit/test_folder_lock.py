"""One lock a folder: with flock, without it, on network file systems, and after a kill."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing.errors import CheckpointExistsError
from dist_checkpointing.filesystem import LOCK_NAME, FolderLock, Holder, Kind
from faults import before_first, failing, replaced, strange_flock

# From Python 3.12 on; the children do nothing that needs another thread.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
NO_FLOCK = [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK]


@pytest.fixture(params=["flock", "file"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    chosen = Kind(request.param)
    with strange_flock(errno.ENOSYS) if chosen is Kind.FILE else nullcontext():
        yield chosen


@pytest.fixture
def no_flock() -> Iterator[None]:
    with strange_flock(errno.ENOSYS):
        yield


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def in_a_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process that then waits to be killed; its process id."""
    ready, done = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            kept = work()
            os.write(done, b"1")
            while os.getppid() == parent:
                time.sleep(0.1)
            del kept
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def put(folder: Path, **changes: Any) -> Holder:
    """Lay down a lock file, as that of this process but for some changes."""
    holder = Holder.current(Kind.FILE)._replace(**changes)
    (folder / LOCK_NAME).write_bytes(holder.to_json())
    return holder


def test_one_at_a_time(tmp_path: Path, kind: Kind) -> None:
    before = num_descriptors()
    with FolderLock.acquire(tmp_path) as lock:
        said = Holder.parsed((tmp_path / LOCK_NAME).read_bytes())
        assert said is not None
        assert (said.kind, said.pid, said.host) == (kind, os.getpid(), os.uname().nodename)
        with pytest.raises(CheckpointExistsError, match=r"another save is writing") as raised:
            FolderLock.acquire(tmp_path)
        assert f"process {os.getpid()} on host {os.uname().nodename}" in str(raised.value)
        seen = [lock.is_held]
    assert [*seen, lock.is_held] == [True, False]
    assert not [*tmp_path.iterdir()]
    FolderLock.acquire(tmp_path).release()
    assert num_descriptors() == before


def test_a_lock_that_nobody_refers_to_is_released(tmp_path: Path, kind: Kind) -> None:
    lock = FolderLock.acquire(tmp_path)
    del lock
    assert not [*tmp_path.iterdir()], kind
    FolderLock.acquire(tmp_path).release()


def test_what_a_forked_process_does_with_it_is_not_its_own(tmp_path: Path, kind: Kind) -> None:
    lock = FolderLock.acquire(tmp_path)
    child = in_a_child(lock.release)
    with pytest.raises(CheckpointExistsError):
        FolderLock.acquire(tmp_path)
    lock.release()
    FolderLock.acquire(tmp_path).release()
    kill(child)
    assert not [*tmp_path.iterdir()], kind


def test_a_file_that_was_deleted_meanwhile_is_not_the_lock(tmp_path: Path) -> None:
    """A process opens it, its holder deletes it and ends, a third one makes a new one."""
    others = []

    def acquire(*_: Any) -> None:
        (tmp_path / LOCK_NAME).unlink()
        others.append(FolderLock.acquire(tmp_path))

    with before_first("fcntl.flock", acquire), pytest.raises(CheckpointExistsError):
        FolderLock.acquire(tmp_path)
    others[0].release()
    FolderLock.acquire(tmp_path).release()


def test_a_stale_handle_is_opened_once_more(tmp_path: Path) -> None:
    before = num_descriptors()
    with failing("fcntl.flock", code=errno.ESTALE, times=1):
        FolderLock.acquire(tmp_path).release()
    assert num_descriptors() == before
    assert not [*tmp_path.iterdir()]


def test_a_lock_that_a_forked_process_keeps_says_so(tmp_path: Path) -> None:
    """A worker of a DataLoader has outlived the process that saved."""
    read, write = os.pipe()

    def lock_and_fork() -> FolderLock:
        lock = FolderLock.acquire(tmp_path)
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        return lock

    kill(in_a_child(lock_and_fork))
    with pytest.raises(CheckpointExistsError, match="a process that it forked has the lock"):
        FolderLock.acquire(tmp_path)
    os.close(write)
    os.close(read)


@pytest.mark.parametrize("name", ["os.unlink", "fcntl.flock", "os.close"])
def test_what_fails_once_the_work_is_done_is_logged(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a save that is committed would be said to have failed."""
    before = num_descriptors()
    lock = FolderLock.acquire(tmp_path)

    def fail(real: Callable[..., object], *arguments: Any, **options: Any) -> None:
        if name == "os.close":
            real(*arguments, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with replaced(name, fail):
        lock.release()
    assert not lock.is_held
    assert num_descriptors() == before
    assert "was not released as it should be" in caplog.text
    FolderLock.acquire(tmp_path).release()


@pytest.mark.parametrize("code", NO_FLOCK, ids=errno.errorcode.get)
def test_without_flock_it_is_said_once(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    with strange_flock(code):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            FolderLock.acquire(tmp_path / name).release()
    assert [text for text in caplog.messages if "no flock" in text] == caplog.messages
    assert len(caplog.messages) == 1


def test_other_errors_of_flock_are_raised(tmp_path: Path) -> None:
    before = num_descriptors()
    with strange_flock(errno.EIO), pytest.raises(OSError, match="Input/output"):
        FolderLock.acquire(tmp_path)
    assert num_descriptors() == before


@pytest.mark.parametrize(
    "changes",
    [{"host": "node17"}, {"boot": "another-boot"}, {"pid_space": "pid:[1]"}, {"boot": ""}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_known_to_be_gone_must_be_deleted_by_hand(
    tmp_path: Path, kind: Kind, changes: dict[str, str]
) -> None:
    gone = in_a_child(lambda: None)
    kill(gone)
    holder = put(tmp_path, pid=gone, **changes)
    with pytest.raises(CheckpointExistsError, match="is being written") as raised:
        FolderLock.acquire(tmp_path)
    text = str(raised.value)
    assert f"process {gone} on host {holder.host}" in text
    assert f"If no such process is left, delete {tmp_path / LOCK_NAME}" in text
    assert (tmp_path / LOCK_NAME).read_bytes() == holder.to_json(), kind
    (tmp_path / LOCK_NAME).unlink()
    FolderLock.acquire(tmp_path).release()


def test_a_later_process_of_the_same_id_is_another_one(tmp_path: Path, kind: Kind) -> None:
    put(tmp_path, started=1)
    FolderLock.acquire(tmp_path).release()
    assert not [*tmp_path.iterdir()], kind


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": -1}', b"[" * 30_000])
def test_a_lock_file_that_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    FolderLock.acquire(tmp_path).release()  # nobody has the flock
    (tmp_path / LOCK_NAME).write_bytes(content)
    with (
        strange_flock(errno.ENOSYS),
        pytest.raises(CheckpointExistsError, match="If no such process is left, delete"),
    ):
        FolderLock.acquire(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"pid": -1}, {"pid": True}, {"pid": "1"}, {"token": "../x"}, {"kind": "x"}, {"host": 1}],
    ids=str,
)
def test_a_strange_holder_is_not_believed(changes: dict[str, Any]) -> None:
    content = json.loads(Holder.current(Kind.FILE).to_json())
    assert Holder.parsed(json.dumps(content).encode()) is not None
    assert Holder.parsed(json.dumps(content | changes).encode()) is None


def test_a_link_is_not_followed(tmp_path: Path, kind: Kind) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "c"
    folder.mkdir()
    victim.write_text("mine")
    (folder / LOCK_NAME).symlink_to(victim)
    with pytest.raises(CheckpointExistsError, match="is a link"):
        FolderLock.acquire(folder)
    assert victim.read_text() == "mine", kind
    (folder / LOCK_NAME).unlink()
    (folder / LOCK_NAME).symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointExistsError, match="is a link"):
        FolderLock.acquire(folder)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EEXIST])
@pytest.mark.usefixtures("no_flock")
def test_file_systems_with_other_links(tmp_path: Path, code: int) -> None:
    """Some have none, and some make one and say that it was there."""

    def strange(link: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if code == errno.EEXIST:
            link(*arguments, **options)
        raise OSError(code, os.strerror(code))

    with replaced("os.link", strange):
        for _ in range(2):
            with FolderLock.acquire(tmp_path):
                with pytest.raises(CheckpointExistsError, match=f"process {os.getpid()}"):
                    FolderLock.acquire(tmp_path)
                assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
            assert not [*tmp_path.iterdir()]
