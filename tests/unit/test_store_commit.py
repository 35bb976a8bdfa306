"""What a save into an object store puts there, and whom it refuses.

Kills, races and lost answers: tests/models and tests/simulation.
"""

import gc
import json
import threading
import uuid
from collections.abc import Callable

import pytest

import dist_checkpointing as dc
from dist_checkpointing.filesystem import Holder, Kind
from dist_checkpointing.filesystem.object_store_locks import Claim
from dist_checkpointing.format import StoreAttempt, read_commit
from dist_checkpointing.format.removal import remove_from_store
from faults import store_down, store_requests, without_waiting
from store_saves import CONFIG, PERIOD, begin, loaded, names, put, save


@pytest.fixture
def location() -> dc.ObjectPath:
    return dc.ObjectPath.of(f"memory://{uuid.uuid4().hex}/run/1000")


def test_a_save_is_a_checkpoint_once_it_has_committed(location: dc.ObjectPath) -> None:
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


@pytest.mark.parametrize("end", ["abandon", "release"])
def test_a_failed_save_keeps_nobody_waiting(location: dc.ObjectPath, end: str) -> None:
    attempt = StoreAttempt.begin(location, ["x.bin"])  # its heartbeats are 20 s apart
    put(attempt.folder / "x.bin", attempt.id.encode())
    getattr(attempt, end)()
    left = {name.split("/")[0] for name in names(location)}
    assert left == ({".dckpt"} if end == "abandon" else {".dckpt", "data"})
    assert save(location) == loaded(location)
    assert len(location.store.list_folder((location / "data").prefix)[0]) == 1
    attempt.abandon()  # twice is once
    assert loaded(location) is not None


def test_a_removal_leaves_nothing(location: dc.ObjectPath) -> None:
    save(location)
    put(location.parent / "1001/metadata.json", b"of another checkpoint")
    remove_from_store(location)
    assert names(location.parent) == ["1001/metadata.json"]


def test_a_removal_stays_away_from_a_save(location: dc.ObjectPath) -> None:
    save(location)
    attempt = begin(location, overwrite=True)
    with pytest.raises(dc.CheckpointExistsError, match="in use"):
        remove_from_store(location, PERIOD)
    put(attempt.folder / "x.bin", attempt.id.encode())
    attempt.commit(CONFIG)
    assert loaded(location) == attempt.id


def test_what_nobody_claimed_is_not_removed(location: dc.ObjectPath) -> None:
    put(location / "metadata.json", b"{}")
    with pytest.raises(dc.CheckpointingException, match="not deleted"):
        remove_from_store(location)
    with pytest.raises(dc.CheckpointExistsError, match="cannot be overwritten"):
        begin(location, overwrite=True)
    assert names(location) == ["metadata.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_of_torch_dcp_is_not_saved_over(
    location: dc.ObjectPath, *, overwrite: bool
) -> None:
    put(location / ".metadata", b"of DCP")
    put(location / "__0_0.distcp", b"of DCP")
    said = "cannot be overwritten" if overwrite else "already holds a checkpoint"
    with pytest.raises(dc.CheckpointExistsError, match=said):
        begin(location, overwrite=overwrite)
    assert names(location) == [".metadata", "__0_0.distcp"]


def test_a_process_that_has_ended_is_not_watched(location: dc.ObjectPath) -> None:
    """Its heartbeats are an hour apart: this would not end otherwise."""
    gone = Holder.current(Kind.FILE)._replace(started=1)
    claim = Claim(location, 1, gone, 3600.0)
    put(claim.path, claim.to_json())
    assert save(location) == loaded(location)


def test_a_save_of_this_process_that_could_not_be_ended_is_not_watched(
    location: dc.ObjectPath, monkeypatch: pytest.MonkeyPatch
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
def test_a_claim_that_cannot_be_read_is_an_error(location: dc.ObjectPath, content: bytes) -> None:
    put(location / ".dckpt/claims/1.json", content)
    with pytest.raises(dc.CorruptCheckpointError, match="a claim cannot be read"):
        begin(location)


@pytest.mark.parametrize("attempt", ["a/../b", 7, None])
def test_a_commit_that_names_no_attempt_is_an_error(
    location: dc.ObjectPath, attempt: object
) -> None:
    outcome = {"attempt": attempt, "config": {"sharded_backend": "x"}}
    put(location / ".dckpt/commits/1.json", json.dumps(outcome).encode())
    with pytest.raises(dc.CorruptCheckpointError, match="a commit cannot be read"):
        read_commit(location)


def test_a_store_that_lies_is_refused_by_name(location: dc.ObjectPath) -> None:
    def overwrites(name: str, _: str, go: Callable[..., object]) -> object:
        return go(mode="overwrite") if name == "put_if_absent" else go()

    with (
        store_requests(overwrites),
        pytest.raises(dc.UnsupportedFormatError, match="has no conditional puts") as caught,
    ):
        begin(location)
    assert caught.value.findings[0].path == location.store.url
    assert names(location) == []


def test_a_store_without_an_answer_is_an_error_with_the_last_one(location: dc.ObjectPath) -> None:
    attempt = begin(location)
    put(attempt.folder / "x.bin", attempt.id.encode())
    with without_waiting(), store_down(times=5, at=lambda name, _: name == "put_if_absent"):
        with pytest.raises(dc.CheckpointingException, match="the server is on fire") as caught:
            attempt.commit(CONFIG)
        assert caught.value.findings[0].path == f"{location}/.dckpt/commits/1.json"
        attempt.abandon()
    assert loaded(location) is None
    assert save(location) == loaded(location)


def test_of_many_saves_the_last_few_claims_are_kept(location: dc.ObjectPath) -> None:
    for _ in range(30):
        last = save(location, overwrite=True)
    for kind in ("claims", "commits"):
        kept = names(location / f".dckpt/{kind}")
        numbers = {int(name.removesuffix(".json")) for name in kept}
        assert {28, 29, 30} <= numbers
        assert len(numbers) < 13
    assert loaded(location) == last
    remove_from_store(location, PERIOD)
    assert names(location) == []


def test_a_forgotten_save_does_not_look_alive(location: dc.ObjectPath) -> None:
    before = {*threading.enumerate()}
    attempt = begin(location)
    (beats,) = {*threading.enumerate()} - before
    del attempt
    gc.collect()
    beats.join(60)
    assert not beats.is_alive()
