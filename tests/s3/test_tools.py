"""A run of checkpoints on an S3 server, as a training keeps it and as a person looks at it."""

import re

import pytest

from dist_checkpointing import Checkpoint, CheckpointManager, Retention
from s3_servers import Server
from samples import Run
from store_saves import numbered


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return str(server.place())


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_run_is_kept_and_resumed(url: str, backend: str) -> None:
    with CheckpointManager(url, backend, retention=Retention(keep_last=2)) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, numbered(step))
    again = CheckpointManager(url, backend)
    assert again.steps() == [2, 3]
    assert again.latest_valid() == 3
    assert again.load(numbered(-1))["number"] == 3


def test_an_error_says_what_the_answer_of_the_store_means(url: str, dckpt: Run) -> None:
    elsewhere = url.replace("://checkpoints/", "://no-such-place/")
    told = dckpt("ls", elsewhere)
    assert told.code == 2
    assert re.search("there is no such (bucket|container); the last answer was: .*404", told.err)
    assert "no-such-place" in told.err


def test_a_server_that_is_away_is_named(server: Server) -> None:
    with pytest.raises(OSError, match=r"the server cannot be reached; the last answer was: .*:9/"):
        Checkpoint.open(server.place("http://127.0.0.1:9"))
