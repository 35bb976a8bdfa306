"""The commit protocol over HTTP: a whole life, a race, and answers that are lost."""

import pytest

from dist_checkpointing.errors import CheckpointExistsError, CheckpointingException
from s3_proxy import LOST_ANSWER, Fault, Proxy
from s3_servers import Server
from store_saves import CONFIG, begin, loaded, put, save


def test_a_commit_without_an_answer_is_named_and_settled_by_the_next_save(
    server: Server, proxy: Proxy
) -> None:
    location = server.place(proxy.url)
    attempt = begin(location)
    put(attempt.folder / "x.bin", attempt.id.encode())
    puts: list[str] = []

    def silent_since_the_commit(method: str, path: str) -> Fault | None:
        if "commits/1" not in path or (method != "PUT" and not puts):
            return None
        puts.append(path)
        return LOST_ANSWER

    proxy.fault = silent_since_the_commit
    with pytest.raises((CheckpointingException, OSError), match="commits/1"):
        attempt.commit(CONFIG)
    attempt.abandon()  # cannot find out either: nothing may be deleted
    proxy.fault = lambda _method, _path: None
    with pytest.raises(CheckpointExistsError):
        save(location)  # rolls on
    assert loaded(location) == attempt.id
