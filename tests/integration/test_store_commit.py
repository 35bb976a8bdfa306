"""The commit protocol over HTTP, against moto; ``tests/s3`` has the same against a real server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from dist_checkpointing.errors import CheckpointExistsError, CheckpointingException
from dist_checkpointing.filesystem.object_path import ObjectPath
from dist_checkpointing.filesystem.object_store import ObjectStoreOptions
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.store_commit import StoreAttempt, read_commit, remove_from_store
from s3_proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy, proxy_before

CONFIG = CheckpointingConfig("tensorstore")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    bucket = Request(f"{url}/checkpoints", method="PUT")
    urlopen(bucket).close()
    yield url
    server.stop()


@pytest.fixture
def proxy(endpoint: str) -> Iterator[Proxy]:
    with proxy_before(endpoint) as proxy:
        yield proxy


def place(endpoint: str, name: str) -> ObjectPath:
    options = ObjectStoreOptions(
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="testing",
        secret_access_key="testingtesting",
        max_retries=2,
        retry_timeout=10.0,
    )
    return ObjectPath.of(f"s3://checkpoints/{name}", options)


def save(location: ObjectPath, *, overwrite: bool = False) -> str:
    attempt = StoreAttempt.begin(location, ["x"], overwrite=overwrite, period=1.0)
    path = attempt.folder / "x"
    path.store.put(path.key, attempt.id.encode())
    attempt.commit(CONFIG)
    return attempt.id


def loaded(location: ObjectPath) -> str:
    assert json.loads(location.store.get((location / "metadata.json").key))
    commit = read_commit(location)
    assert commit is not None
    found = commit.folder(location) / "x"
    assert found.store.get(found.key).decode() == commit.attempt
    return commit.attempt


def test_a_checkpoint_lives_and_ends(endpoint: str) -> None:
    location = place(endpoint, "life")
    first = save(location)
    with pytest.raises(CheckpointExistsError):
        save(location)
    assert loaded(location) == first
    second = save(location, overwrite=True)
    assert loaded(location) == second
    assert location.store.list_folder((location / "data").prefix)[0] == [second]
    remove_from_store(location)
    assert list(location.store.list_below(location.prefix)) == []


def test_of_eight_savers_exactly_one_commits(endpoint: str) -> None:
    location = place(endpoint, "race")
    at_once = Barrier(8)

    def race(_: int) -> str:
        at_once.wait()
        try:
            return save(location)
        except CheckpointExistsError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        won = [attempt for attempt in pool.map(race, range(8)) if attempt]
    assert [loaded(location)] == won


@pytest.mark.parametrize(
    "fault",
    [LOST_ANSWER, LOST_REQUEST, Fault(forwards=True, status=500), Fault(status=429)],
    ids=["answer", "request", "500-after-it-worked", "429"],
)
def test_lost_answers_do_not_end_a_save(proxy: Proxy, fault: Fault) -> None:
    name = f"lost-{fault.forwards}-{fault.status}"
    faults: dict[str, int] = {}

    def first_put(method: str, path: str) -> Fault | None:
        if method != "PUT" or "probe" in path:
            return None
        faults[path] = faults.get(path, 0) + 1
        return fault if faults[path] == 1 else None

    proxy.fault = first_put
    location = place(proxy.url, name)
    assert save(location) == loaded(location)
    kinds = {path.rpartition("/")[0].rpartition("/")[2] for path in faults}
    assert {"claims", "commits", "beats"} <= kinds
    assert all(times > 1 for path, times in faults.items() if "commits" in path)


def test_a_commit_without_an_answer_is_named_and_settled_by_the_next_save(proxy: Proxy) -> None:
    location = place(proxy.url, "no-answer")
    attempt = StoreAttempt.begin(location, ["x"], period=1.0)
    path = attempt.folder / "x"
    path.store.put(path.key, attempt.id.encode())
    proxy.fault = lambda _, path: LOST_ANSWER if "commits/1" in path else None
    with pytest.raises((CheckpointingException, OSError), match="commits/1"):
        attempt.commit(CONFIG)
    attempt.abandon()  # cannot find out either: nothing may be deleted
    proxy.fault = lambda _method, _path: None
    with pytest.raises(CheckpointExistsError):
        save(location)  # rolls on
    assert loaded(location) == attempt.id
