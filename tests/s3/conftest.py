"""The server of the tests: moto, or what TEST_STORE names, see ``make test-s3``, ``test-azure``."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

import azurite
import s3_servers
from s3_proxy import Proxy, proxy_before
from s3_servers import Server

# What starts a server, and why it cannot be started here.
Start = Callable[[], AbstractContextManager[Server]]
SERVERS: dict[str, tuple[Start, Callable[[], str | None]]] = {
    "moto": (s3_servers.moto_server, lambda: None),
    "ceph": (s3_servers.ceph_server, s3_servers.missing),
    "azurite": (azurite.azurite_server, azurite.missing),
}


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    start, missing = SERVERS[os.environ.get("TEST_STORE", "moto")]
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with start() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            if name.startswith("AZURE"):  # the options have no fields for them
                patch.setenv(name, value)
        yield running


@pytest.fixture
def speaks_s3() -> None:
    """For a test that looks into requests of S3."""
    if os.environ.get("TEST_STORE") == "azurite":
        pytest.skip("Azure has other requests")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxy_before(server.endpoint) as proxy:
        yield proxy
