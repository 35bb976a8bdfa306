"""The commit protocol of object stores: every point of a kill, races, lies and lost answers."""

import gc
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Barrier, Event, Thread, current_thread, enumerate as all_threads

import pytest

from dist_checkpointing import ObjectPath
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import Holder, Kind, object_store_locks
from dist_checkpointing.filesystem.object_store import StoreUnavailableError
from dist_checkpointing.filesystem.object_store_locks import THREAD, Claim
from dist_checkpointing.format import StoreAttempt, read_commit
from dist_checkpointing.format.removal import remove_from_store
from faults import calls_to_the_store, kill_points, store_down, store_requests, without_waiting
from store_saves import CONFIG, OTHER_CONFIG, PERIOD, begin, loaded, names, put, save


@pytest.fixture
def location() -> ObjectPath:
    return ObjectPath.of(f"memory://{uuid.uuid4().hex}/run/1000")


@pytest.fixture
def folders(location: ObjectPath) -> Iterator[ObjectPath]:
    """New places, one after the other."""
    return (location / str(number) for number in range(10**6))


def test_a_save_is_a_checkpoint_once_it_has_committed(location: ObjectPath) -> None:
    attempt = begin(location)
    put(attempt.folder / "x.bin", b"1")
    assert read_commit(location) is None
    assert attempt.creates == ("x.bin", "metadata.json")
    attempt.commit(CONFIG)
    commit = read_commit(location)
    assert commit is not None
    assert (commit.number, commit.attempt, commit.config) == (1, attempt.id, CONFIG)
    content = location.store.get((location / "metadata.json").key)
    assert json.loads(content) == {
        "sharded_backend": "tensorstore",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert names(location) == [
        ".dckpt/claims/1.json",
        ".dckpt/commits/1.json",
        f"data/{attempt.id}/.dckpt/attempt.json",
        f"data/{attempt.id}/metadata.json",
        f"data/{attempt.id}/x.bin",
        "metadata.json",
    ]


def test_the_four_fields_are_the_last_thing_that_is_written(location: ObjectPath) -> None:
    calls: list[tuple[str, str]] = []
    attempt = begin(location)
    put(attempt.folder / "x.bin", b"1")
    with calls_to_the_store(lambda *call: calls.append(call)):
        attempt.commit(CONFIG)
    assert [key for name, key in calls if name.startswith("put")] == [
        f"{attempt.folder.key}/metadata.json",
        f"{location.key}/.dckpt/commits/1.json",
        f"{location.key}/metadata.json",
    ]


def test_a_checkpoint_is_not_saved_over(location: ObjectPath) -> None:
    first = save(location)
    before = names(location)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        begin(location)
    assert names(location) == before
    commit = read_commit(location)
    assert commit is not None
    assert commit.attempt == first
    assert loaded(location) == first


def test_a_save_in_progress_is_not_saved_over(location: ObjectPath) -> None:
    attempt = begin(location)
    put(attempt.folder / "x.bin", attempt.id.encode())
    with pytest.raises(CheckpointExistsError, match="in use"):
        begin(location)
    attempt.commit(CONFIG)
    assert loaded(location) == attempt.id


def test_an_overwritten_checkpoint_stays_loadable_until_the_commit(location: ObjectPath) -> None:
    first = save(location)
    attempt = begin(location, overwrite=True)
    put(attempt.folder / "x.bin", attempt.id.encode())
    assert loaded(location) == first
    attempt.commit(OTHER_CONFIG)
    assert loaded(location) == attempt.id
    assert location.store.list_folder((location / "data").prefix)[0] == [attempt.id]
    content = location.store.get((location / "metadata.json").key)
    assert json.loads(content)["sharded_backend"] == "zarr"


@pytest.mark.parametrize("end", ["abandon", "release"])
def test_a_failed_save_keeps_nobody_waiting(location: ObjectPath, end: str) -> None:
    attempt = StoreAttempt.begin(location, ["x.bin"])  # its heartbeats are 20 s apart
    put(attempt.folder / "x.bin", attempt.id.encode())
    getattr(attempt, end)()
    left = {name.split("/")[0] for name in names(location)}
    assert left == ({".dckpt"} if end == "abandon" else {".dckpt", "data"})
    assert save(location) == loaded(location)
    assert len(location.store.list_folder((location / "data").prefix)[0]) == 1
    attempt.abandon()  # twice is once
    assert loaded(location) is not None


@pytest.mark.parametrize("next_save", ["same", "overwrite"])
@pytest.mark.parametrize("has_old", [False, True])
def test_a_save_killed_at_any_step(
    folders: Iterator[ObjectPath], has_old: bool, next_save: str
) -> None:
    state: dict[str, ObjectPath | str | None] = {}

    def prepare() -> None:
        state["at"] = folder = next(folders)
        state["old"] = save(folder) if has_old else None

    def work() -> None:
        at = state["at"]
        assert isinstance(at, ObjectPath)
        save(at, OTHER_CONFIG, overwrite=has_old)

    points = []
    for point in kill_points(work, prepare):
        points.append(point)
        at = state["at"]
        assert isinstance(at, ObjectPath)
        seen = loaded(at)
        committed = read_commit(at)
        has_committed = committed is not None and committed.config == OTHER_CONFIG
        if not has_committed:
            assert seen == state["old"], point
        elif not has_old:
            # Readers wait for metadata.json, which the next save puts.
            assert seen in (None, committed.attempt if committed else None), point
        if has_committed and next_save == "same":
            with pytest.raises(CheckpointExistsError):
                save(at)
            assert loaded(at) == (committed.attempt if committed else None), point
        elif has_old and next_save == "same":
            with pytest.raises(CheckpointExistsError):
                save(at)
            assert loaded(at) == state["old"], point
        else:
            again = save(at, overwrite=next_save == "overwrite")
            assert loaded(at) == again, point
            assert at.store.list_folder((at / "data").prefix)[0] == [again], point
    assert any("put" in point and point.endswith("metadata.json") for point in points)
    assert any("put" in point and "commits/" in point for point in points)
    assert any("put" in point and "claims/" in point for point in points)


@pytest.mark.parametrize("then", ["save", "remove"])
def test_a_removal_killed_at_any_step(folders: Iterator[ObjectPath], then: str) -> None:
    state: dict[str, ObjectPath] = {}

    def prepare() -> None:
        state["at"] = at = next(folders)
        attempt = begin(at)
        attempt.abandon()
        save(at)
        save(at, OTHER_CONFIG, overwrite=True)

    def work() -> None:
        remove_from_store(state["at"], PERIOD)

    for point in kill_points(work, prepare):
        at = state["at"]
        seen = loaded(at)  # whole, or not there
        if seen is None and then == "save":
            try:
                again: str | None = save(at)
            except CheckpointExistsError:
                # Only metadata.json was gone: the whole is a checkpoint again.
                again = None
            assert loaded(at) == again or again is None, point
            assert loaded(at) is not None, point
        elif names(at):
            if any("claims/" in name for name in names(at)):
                remove_from_store(at, PERIOD)
            # What stays ends the killed removal, which might only have been stopped.
            assert all(name.startswith(".dckpt/commits/") for name in names(at)), point
            assert read_commit(at) is None, point


def test_a_save_killed_while_it_deletes_old_claims(
    folders: Iterator[ObjectPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store_locks, "_PRUNED_EVERY", 4)
    monkeypatch.setattr(object_store_locks, "_KEPT", 1)
    state: dict[str, ObjectPath] = {}

    def prepare() -> None:
        state["at"] = next(folders)
        for _ in range(3):
            save(state["at"], overwrite=True)

    points: list[str] = []
    for point in kill_points(lambda: save(state["at"], OTHER_CONFIG, overwrite=True), prepare):
        points.append(point)
        at = state["at"]
        assert loaded(at) is not None
        again = save(at, overwrite=True)
        assert loaded(at) == again
        assert at.store.list_folder((at / "data").prefix)[0] == [again], point
        remove_from_store(at, PERIOD)
        assert read_commit(at) is None, point
    assert any(point.startswith("delete") and "claims/1" in point for point in points)


def test_a_removal_leaves_nothing(location: ObjectPath) -> None:
    save(location)
    put(location.parent / "1001/metadata.json", b"of another checkpoint")
    remove_from_store(location)
    assert names(location.parent) == ["1001/metadata.json"]


def test_a_removal_stays_away_from_a_save(location: ObjectPath) -> None:
    save(location)
    attempt = begin(location, overwrite=True)
    with pytest.raises(CheckpointExistsError, match="in use"):
        remove_from_store(location, PERIOD)
    put(attempt.folder / "x.bin", attempt.id.encode())
    attempt.commit(CONFIG)
    assert loaded(location) == attempt.id


def test_what_nobody_claimed_is_not_removed(location: ObjectPath) -> None:
    put(location / "metadata.json", b"{}")
    with pytest.raises(CheckpointingException, match="not deleted"):
        remove_from_store(location)
    with pytest.raises(CheckpointExistsError, match="cannot be overwritten"):
        begin(location, overwrite=True)
    assert names(location) == ["metadata.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_of_torch_dcp_is_not_saved_over(
    location: ObjectPath, *, overwrite: bool
) -> None:
    put(location / ".metadata", b"of DCP")
    put(location / "__0_0.distcp", b"of DCP")
    said = "cannot be overwritten" if overwrite else "already holds a checkpoint"
    with pytest.raises(CheckpointExistsError, match=said):
        begin(location, overwrite=overwrite)
    assert names(location) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("left", ["nothing", "a dead save", "a checkpoint"])
def test_of_eight_savers_exactly_one_commits(location: ObjectPath, left: str) -> None:
    if left == "a dead save":
        begin(location)._claim.stop()
    old = save(location) if left == "a checkpoint" else None
    begun = Barrier(8)

    def race(_: int) -> str | Exception:
        begun.wait()
        try:
            return save(location, overwrite=old is not None)
        except CheckpointingException as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(race, range(8)))
    won = [end for end in ends if isinstance(end, str)]
    lost = [end for end in ends if not isinstance(end, str)]
    assert {type(error) for error in lost} <= {CheckpointExistsError}
    assert loaded(location) in won
    # Overwriting one after the other is allowed; a first save is there once.
    assert len(won) == 1 or old is not None


def test_a_save_that_was_stopped_too_long_loses_and_damages_nothing(location: ObjectPath) -> None:
    stopped = begin(location)
    put(stopped.folder / "x.bin", stopped.id.encode())
    stopped._claim.stop()  # as SIGSTOP does
    saved = save(location)
    put(stopped.folder / "late.bin", b"by a rank that wakes up late")
    with pytest.raises(CheckpointExistsError, match="taken over"):
        stopped.commit(CONFIG)
    assert loaded(location) == saved
    assert save(location, overwrite=True) == loaded(location)
    assert not any(stopped.id in name for name in names(location) if "data" in name)


def test_a_save_that_was_stopped_while_all_was_removed_gives_up(location: ObjectPath) -> None:
    stopped = begin(location)
    stopped._claim.stop()
    remove_from_store(location, PERIOD)
    other = begin(location)  # has the same number
    with pytest.raises(CheckpointExistsError, match="taken over"):
        stopped.commit(CONFIG)
    put(other.folder / "x.bin", other.id.encode())
    other.commit(CONFIG)
    assert loaded(location) == other.id


def test_a_save_is_ended_between_its_last_look_and_its_commit(location: ObjectPath) -> None:
    """The claim is lost after it was found to be the last one."""
    stopped = begin(location)
    put(stopped.folder / "x.bin", stopped.id.encode())
    stopped._claim.stop()
    saved: list[str] = []

    def meanwhile(name: str, key: str) -> None:
        if name.startswith("put") and "commits/1" in key and not saved:
            saved.append("")
            saved[0] = save(location)

    with calls_to_the_store(meanwhile), pytest.raises(CheckpointExistsError, match="taken over"):
        stopped.commit(CONFIG)
    assert loaded(location) == saved[0]


def test_a_removal_that_was_stopped_too_long_spares_what_was_saved_since(
    location: ObjectPath,
) -> None:
    save(location)
    saved: list[str] = []

    def meanwhile(name: str, key: str) -> None:
        if name == "delete" and key.endswith("metadata.json']") and not saved:
            # Another process takes the removal for dead.
            object_store_locks.decide(location, 2, {"ended_by": "another"})
            saved.append("")
            saved[0] = save(location, overwrite=True)

    with calls_to_the_store(meanwhile):
        remove_from_store(location, PERIOD)
    commit = read_commit(location)
    assert commit is not None
    assert commit.attempt == saved[0]
    assert f"data/{saved[0]}/x.bin" in names(location)
    with pytest.raises(CheckpointExistsError):
        save(location)  # puts metadata.json again
    assert loaded(location) == saved[0]


class Stopped:
    """Work of a thread that is stopped before one of its calls to the store, with its heartbeats.

    Args:
        work: what it does.
        last: number of the call.
    """

    def __init__(self, work: Callable[[], object], last: int) -> None:
        self._work, self._calls, self._last = work, count(), last
        self._is_stopped, self._goes_on = Event(), Event()
        self._beating: set[Thread] = set()
        self._has_ended = False
        self.error: Exception | None = None
        self._thread = Thread(target=self._run)

    def hold_beats(self, _name: str, _key: str, go: Callable[[], object]) -> object:
        """Carry out a request of any thread, unless it is a heartbeat of what is stopped."""
        if current_thread() in self._beating:
            self._goes_on.wait()
        return go()

    def _run(self) -> None:
        try:
            with calls_to_the_store(self._before):
                self._work()
        except CheckpointingException as error:
            self.error = error
        self._has_ended = True
        self._is_stopped.set()

    def _before(self, *_: str) -> None:
        if next(self._calls) == self._last:
            self._is_stopped.set()
            self._goes_on.wait()

    def begin(self) -> bool:
        """Run until it is stopped; False if it has come to its end before."""
        self._thread.start()
        self._is_stopped.wait()
        self._beating = {thread for thread in all_threads() if thread.name == THREAD}
        return not self._has_ended

    def go_on(self) -> None:
        """Let it come to its end."""
        self._goes_on.set()
        self._thread.join()


@pytest.mark.parametrize("stopped", ["save", "remove"])
def test_what_was_stopped_at_any_call_spares_a_checkpoint_of_after_a_removal(
    folders: Iterator[ObjectPath], stopped: str
) -> None:
    """Everything was removed and saved again meanwhile, so that numbers of claims begin again."""
    for last in range(100):
        at = next(folders)
        save(at)

        def work(at: ObjectPath = at) -> None:
            if stopped == "save":
                save(at, OTHER_CONFIG, overwrite=True)
            else:
                remove_from_store(at, PERIOD)

        other = Stopped(work, last)
        with store_requests(other.hold_beats):
            if not other.begin():
                other.go_on()
                assert last > 6
                return
            with suppress(CheckpointExistsError):
                remove_from_store(at, PERIOD)
            again = save(at, overwrite=True)
            other.go_on()
        assert other.error is None or isinstance(other.error, CheckpointExistsError)
        commit = read_commit(at)
        if commit is not None and commit.attempt == again:
            data = at / commit.data / "x.bin"
            assert data.store.get(data.key).decode() == again
        else:  # it began after all that
            assert other.error is None, last
            if stopped == "save":
                assert loaded(at) not in (again, None), last
            else:
                assert not [name for name in names(at) if name.startswith("data/")], last
        save(at, overwrite=True)
    pytest.fail("there are more calls than that")


def test_a_process_that_has_ended_is_not_watched(location: ObjectPath) -> None:
    """Its heartbeats are an hour apart: this would not end otherwise."""
    gone = Holder.current(Kind.FILE)._replace(started=1)
    claim = Claim(location, 1, gone, 3600.0)
    put(claim.path, claim.to_json())
    assert save(location) == loaded(location)


def test_a_save_of_this_process_that_could_not_be_ended_is_not_watched(
    location: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin(location)
    with store_down(at=lambda name, _: name.startswith("put"), error=PermissionError):
        with pytest.raises(PermissionError):
            attempt.commit(CONFIG)
        attempt.abandon()
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it is watched"))
    assert save(location) == loaded(location)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"holder": {}, "period": 1}', b'{"period": 1e9}']
)
def test_a_claim_that_cannot_be_read_is_an_error(location: ObjectPath, content: bytes) -> None:
    put(location / ".dckpt/claims/1.json", content)
    with pytest.raises(CorruptCheckpointError, match="a claim cannot be read"):
        begin(location)


@pytest.mark.parametrize("attempt", ["a/../b", 7, None])
def test_a_commit_that_names_no_attempt_is_an_error(location: ObjectPath, attempt: object) -> None:
    outcome = {"attempt": attempt, "config": {"sharded_backend": "x"}}
    put(location / ".dckpt/commits/1.json", json.dumps(outcome).encode())
    with pytest.raises(CorruptCheckpointError, match="a commit cannot be read"):
        read_commit(location)


def test_a_store_that_lies_is_refused_by_name(location: ObjectPath) -> None:
    def overwrites(name: str, _: str, go: Callable[..., object]) -> object:
        return go(mode="overwrite") if name == "put_if_absent" else go()

    with (
        store_requests(overwrites),
        pytest.raises(UnsupportedFormatError, match="has no conditional puts") as caught,
    ):
        begin(location)
    assert caught.value.findings[0].path == location.store.url
    assert names(location) == []


def is_claim(name: str, key: str) -> bool:
    """Whether a request puts an object unless there is one, for good."""
    return name == "put_if_absent" and "probe" not in key


@pytest.mark.parametrize("carries_out", [True, False])
def test_lost_answers_are_looked_up(location: ObjectPath, carries_out: bool) -> None:
    down = store_down(times=2, at=is_claim, carries_out=carries_out, error=StoreUnavailableError)
    with down as keys:
        assert save(location) == loaded(location)
    assert len(keys) >= 2
    assert [name for name in names(location) if "claims" in name] == [".dckpt/claims/1.json"]


@pytest.mark.parametrize("copy", ["", "data/"])
def test_a_commit_is_shown_although_its_last_put_fails_at_first(
    location: ObjectPath, copy: str
) -> None:
    prefix = (location / copy).prefix

    def is_last(name: str, key: str) -> bool:
        return name == "put" and key.endswith("metadata.json") and key.startswith(prefix)

    down = store_down(times=3, at=is_last, error=StoreUnavailableError)
    with without_waiting(), down as keys:
        assert save(location) == loaded(location)
    assert len(keys) > 3


def test_a_store_without_an_answer_is_an_error_with_the_last_one(location: ObjectPath) -> None:
    attempt = begin(location)
    put(attempt.folder / "x.bin", attempt.id.encode())
    with without_waiting(), store_down(times=5, at=is_claim):
        with pytest.raises(CheckpointingException, match="the server is on fire") as caught:
            attempt.commit(CONFIG)
        assert caught.value.findings[0].path == f"{location}/.dckpt/commits/1.json"
        attempt.abandon()
    assert loaded(location) is None
    assert save(location) == loaded(location)


def numbers_of(location: ObjectPath, kind: str) -> list[int]:
    """The numbers of the claims or the commits of a checkpoint."""
    folder = location / f".dckpt/{kind}"
    return sorted(int(name.removesuffix(".json")) for name in names(folder))


def test_of_many_saves_the_last_few_claims_are_kept(location: ObjectPath) -> None:
    stopped = begin(location)  # on another machine: nobody knows that it has ended
    stopped._claim.stop()
    object_store_locks.decide(location, 1, {"ended_by": "another"})
    for _ in range(30):
        last = save(location, overwrite=True)
    for kind in ("claims", "commits"):
        numbers = numbers_of(location, kind)
        assert {1, 29, 30, 31} <= {*numbers}, "it might be given again"
        assert len(numbers) < 13
    with pytest.raises(CheckpointExistsError, match="taken over"):
        stopped.commit(CONFIG)
    assert loaded(location) == last
    remove_from_store(location, PERIOD)
    assert names(location) == [".dckpt/commits/1.json"]


def test_a_forgotten_save_does_not_look_alive(location: ObjectPath) -> None:
    attempt = begin(location)
    thread = attempt._claim._thread
    del attempt
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
