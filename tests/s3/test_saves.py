"""Whole saves over HTTP: by processes that race or are killed, and on a server that is not well."""

import signal
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.filesystem import ObjectStoreOptions
from dist_checkpointing.format import remove_checkpoint
from faults import without_waiting
from real_ranks import processes
from s3_proxy import HALF_ANSWER, LOST_ANSWER, LOST_REQUEST, Fault, Proxy
from s3_servers import Server, free_port
from store_saves import numbered

SAVER = Path(__file__).with_name("saver.py")


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> dc.ObjectPath:
    """A new place, which processes of this test reach by its URL."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.place()


def number_in(place: dc.ObjectPath) -> int:
    """The number that was saved there, everywhere in the state."""
    loaded = dc.load(numbered(-1), place, verify=True)
    number = loaded["number"]
    assert isinstance(number, int)
    assert torch.equal(loaded["w"], torch.full((64, 64), float(number)))
    return number


def test_of_processes_that_race_exactly_one_commits(place: dc.ObjectPath, tmp_path: Path) -> None:
    go, savers = tmp_path / "go", 6
    commands = [[SAVER, place, number, go] for number in range(savers)]
    with processes(commands) as started:
        go.touch()
        ends = [process.communicate(120)[0].strip() for process in started]
    assert sorted(ends) == ["CheckpointExistsError"] * (savers - 1) + ["committed"]
    assert number_in(place) == ends.index("committed")
    dc.verify_checkpoint(place)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_before_any_request(place: dc.ObjectPath, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    for last in count(1, 3):  # before each of them: tests/simulation
        at = place / str(last)
        with processes([[SAVER, at, 1, go, last]]) as started:
            started[0].communicate(120)
            code = started[0].returncode
        try:
            seen: int | None = number_in(at)
        except dc.CheckpointNotFoundError:
            seen = None
        try:
            dc.save(numbered(2), at)  # does not wait for heartbeats: the process is gone
        except dc.CheckpointExistsError:
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
        if (method, path) in repeated or next(requests) % 3:
            return None
        repeated.add((method, path))
        return FAULTS[next(wrong) % len(FAULTS)]

    proxy.fault = fault
    place = server.place(proxy.url)
    dc.save(numbered(1), place)
    dc.save(numbered(2), place, overwrite=True)
    assert number_in(place) == 2
    assert next(wrong) > len(FAULTS)
    proxy.fault = lambda _method, _path: None
    dc.verify_checkpoint(place)
    assert len(place.store.list_folder((place / "data").prefix)[0]) == 1


def default_retries(place: dc.ObjectPath) -> dc.ObjectPath:
    """The same place, with as many tries as a user's."""
    defaults = ObjectStoreOptions()
    options = replace(
        place.store.options, max_retries=defaults.max_retries, retry_timeout=defaults.retry_timeout
    )
    return replace(place, store=replace(place.store, options=options))


def test_a_server_that_is_down_for_a_while(server: Server, proxy: Proxy) -> None:
    """Some requests are answered at the twelfth try."""
    tries = Counter[tuple[str, str]]()

    def fault(method: str, path: str) -> Fault | None:
        tries[method, path] += 1
        is_down = any(part in path for part in ("claims/", "/index.json", "metadata.json"))
        return Fault(status=503) if is_down and tries[method, path] < 12 else None

    proxy.fault = fault
    place = default_retries(server.place(proxy.url))
    with without_waiting():
        dc.save(numbered(1), place)
        assert number_in(place) == 1


def test_a_server_that_stays_down_is_given_up(server: Server, proxy: Proxy) -> None:
    place = default_retries(server.place(proxy.url))
    proxy.fault = lambda _method, _path: Fault(status=503)
    with (
        without_waiting(),
        pytest.raises(dc.CheckpointingException, match=r"503.* tries in 1[78]\d s"),
    ):
        dc.save(numbered(1), place)


def test_a_server_that_never_answers_is_given_up(server: Server, proxy: Proxy) -> None:
    place = default_retries(server.place(proxy.url))
    proxy.fault = lambda _method, _path: Fault(seconds=2.0)
    options = replace(place.store.options, timeout=0.1, retry_timeout=0.5)
    place = replace(place, store=replace(place.store, options=options))
    with pytest.raises(dc.CheckpointingException, match=r"tries in \d s"):
        dc.save(numbered(1), place)


@pytest.mark.usefixtures("speaks_s3")
@pytest.mark.parametrize("backend", ["tensorstore", "zarr"])
def test_answers_that_are_cut_off(server: Server, proxy: Proxy, backend: str) -> None:
    """The first one to each request that returns more than headers."""
    seen = set[tuple[str, str]]()

    def fault(method: str, path: str) -> Fault | None:
        is_first = (method, path) not in seen
        seen.add((method, path))
        return HALF_ANSWER if is_first and method in ("GET", "POST") else None

    proxy.fault = fault
    place = server.place(proxy.url)
    dc.save(numbered(1), place, backend)
    dc.save(numbered(2), place, backend, overwrite=True)
    assert number_in(place) == 2
    remove_checkpoint(place)
    assert [*place.store.list_below(place.prefix)] == []
    assert any(method == "POST" and "delete" in path for method, path in seen)


@pytest.mark.usefixtures("speaks_s3")
@pytest.mark.parametrize("request_of", ["uploads=", "uploadId="], ids=["begin", "end"])
def test_half_an_answer_to_the_begin_or_the_end_of_an_upload_in_parts(
    server: Server, proxy: Proxy, request_of: str
) -> None:
    cut: list[str] = []

    def fault(method: str, path: str) -> Fault | None:
        if method != "POST" or request_of not in path or cut:
            return None
        cut.append(path)
        return HALF_ANSWER

    proxy.fault = fault
    place = server.place(proxy.url)
    options = replace(place.store.options, part_bytes=5 * 2**20)
    place = replace(place, store=replace(place.store, options=options))
    tensor = torch.arange(3.0 * 2**20)
    dc.save({"w": dc.ShardedTensor.from_rank_offsets("w", tensor)}, place)
    assert cut
    template = {"w": dc.ShardedTensor.from_rank_offsets("w", torch.zeros_like(tensor))}
    assert torch.equal(dc.load(template, place, verify=True)["w"], tensor)


def test_a_store_without_conditional_puts_is_refused_at_once(server: Server, proxy: Proxy) -> None:
    proxy.fault = lambda method, _path: Fault(status=501) if method == "PUT" else None
    with pytest.raises(dc.UnsupportedFormatError, match="has no conditional puts"):
        dc.save(numbered(1), default_retries(server.place(proxy.url)))
    assert [method for method, _ in proxy.requests].count("PUT") == 1
    assert not any(method == "POST" for method, _ in proxy.requests)


@pytest.mark.usefixtures("speaks_s3")
def test_a_bucket_that_is_missing_is_named_by_save_and_load(server: Server) -> None:
    place = dc.ObjectPath.of("s3://no-such-bucket/run", server.place().store.options)
    for work in (lambda: dc.save(numbered(1), place), lambda: dc.load({}, place)):
        with pytest.raises((dc.CheckpointingException, OSError), match="there is no such bucket"):
            work()


def test_a_server_that_is_not_there(server: Server) -> None:
    """It is given up soon, and what is said is what failed first."""
    place = default_retries(server.place(f"http://127.0.0.1:{free_port()}"))
    gives_up = pytest.raises(
        dc.CheckpointingException, match=r"cannot be reached.*tries in ([5-9]|10) s"
    )
    with without_waiting(), gives_up:
        dc.save(numbered(1), place)
