"""Azurite, Microsoft's mock of Azure's object store: ``npm install azurite``, on the PATH."""

import base64
import hashlib
import hmac
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from urllib.error import URLError
from urllib.request import Request, urlopen

from dist_checkpointing import ObjectPath, ObjectStoreOptions
from s3_servers import BUCKET, SECONDS, Server, free_port

PROGRAM = "azurite-blob"
ACCOUNT = "devstoreaccount1"
# The account of every Azurite, from its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class Azurite(Server):
    """An Azurite that runs."""

    def place(self, endpoint: str | None = None) -> ObjectPath:
        options = ObjectStoreOptions(
            endpoint=f"{endpoint or self.endpoint}/{ACCOUNT}", max_retries=2, retry_timeout=10.0
        )
        return ObjectPath.of(f"az://{BUCKET}/{uuid.uuid4().hex}/1000", options)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }


def missing() -> str | None:
    """Why there can be no Azurite here; None if there can."""
    return None if shutil.which(PROGRAM) else f"no {PROGRAM}: npm install azurite"


@contextmanager
def azurite_server() -> Iterator[Azurite]:
    """Run Azurite with one container, in memory."""
    port = free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    process = subprocess.Popen([PROGRAM, "--blobPort", str(port), *options])
    server = Azurite(f"http://127.0.0.1:{port}")
    try:
        _make_container(server.endpoint)
        yield server
    finally:
        process.kill()
        process.wait()


def _make_container(endpoint: str) -> None:
    """obstore makes none. The request is signed as Azure's "Shared Key" wants it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{chr(10) * 12}{named}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Type"] = ""
    request = Request(f"{endpoint}/{ACCOUNT}/{BUCKET}?restype=container", headers=headers)
    request.method, request.data = "PUT", None
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            urlopen(request).close()
        except URLError as error:
            if time.monotonic() > deadline or hasattr(error, "code"):
                raise
            time.sleep(0.2)
        else:
            return
