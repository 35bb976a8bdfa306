"""Whole saves over HTTP: by processes that race or are killed, and on a server that is not well."""

import signal
from itertools import count
from pathlib import Path

import pytest
import torch

from dist_checkpointing import ObjectPath, load, save, verify_checkpoint
from dist_checkpointing.errors import CheckpointExistsError, CheckpointNotFoundError
from real_ranks import processes
from s3_proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy
from s3_servers import Server
from store_saves import numbered

SAVER = Path(__file__).with_name("saver.py")


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """A new place, which processes of this test reach by its URL."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.place()


def number_in(place: ObjectPath) -> int:
    """The number that was saved there, everywhere in the state."""
    loaded = load(numbered(-1), place, verify=True)
    number = loaded["number"]
    assert isinstance(number, int)
    assert torch.equal(loaded["w"], torch.full((64, 64), float(number)))
    return number


def test_of_processes_that_race_exactly_one_commits(place: ObjectPath, tmp_path: Path) -> None:
    go, savers = tmp_path / "go", 6
    commands = [[SAVER, place, number, go] for number in range(savers)]
    with processes(commands) as started:
        go.touch()
        ends = [process.communicate(120)[0].strip() for process in started]
    assert sorted(ends) == ["CheckpointExistsError"] * (savers - 1) + ["committed"]
    assert number_in(place) == ends.index("committed")
    verify_checkpoint(place)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_before_any_request(place: ObjectPath, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    for last in count(1, 3):  # before each of them: test_store_commit.py
        at = place / str(last)
        with processes([[SAVER, at, 1, go, last]]) as started:
            started[0].communicate(120)
            code = started[0].returncode
        try:
            seen: int | None = number_in(at)
        except CheckpointNotFoundError:
            seen = None
        try:
            save(numbered(2), at)  # does not wait for heartbeats: the process is gone
        except CheckpointExistsError:
            assert number_in(at) == 1
        else:
            assert seen is None
            assert number_in(at) == 2
            attempts = at.store.list_folder((at / "data").prefix)[0]
            assert len(attempts) == 1, "what the killed process wrote is still there"
        if code == 0:
            assert last > 15
            return
        assert code == -signal.SIGKILL


FAULTS = [
    Fault(status=500),
    Fault(status=429),
    LOST_ANSWER,
    Fault(status=503),
    Fault(forwards=True, status=500),
    LOST_REQUEST,
    Fault(forwards=True, seconds=0.5),
]


def test_a_server_that_is_not_well(server: Server, proxy: Proxy) -> None:
    """Each so many requests something goes wrong; the repetition of a request then works."""
    requests, wrong, repeated = count(), count(), set[tuple[str, str]]()

    def fault(method: str, path: str) -> Fault | None:
        if "probe" in path or (method, path) in repeated or next(requests) % 3:
            return None
        repeated.add((method, path))
        return FAULTS[next(wrong) % len(FAULTS)]

    proxy.fault = fault
    place = server.place(proxy.url)
    save(numbered(1), place)
    save(numbered(2), place, overwrite=True)
    assert number_in(place) == 2
    assert next(wrong) > len(FAULTS)
    proxy.fault = lambda _method, _path: None
    verify_checkpoint(place)
    assert len(place.store.list_folder((place / "data").prefix)[0]) == 1
