"""An S3 server: moto, or with TEST_S3=ceph (``make test-s3``) Ceph."""

import os
from collections.abc import Iterator

import pytest

from s3_proxy import Proxy, proxy_before
from s3_servers import Server, ceph_server, missing, moto_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    is_real = os.environ.get("TEST_S3") == "ceph"
    reason = missing() if is_real else None
    if reason is not None:
        pytest.skip(reason)
    with ceph_server() if is_real else moto_server() as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxy_before(server.endpoint) as proxy:
        yield proxy
