"""An object store in memory with the rules of S3: what it does with requests, and loses of them.

It stands in for the functions of obstore, so the code that makes requests is the real one.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dist_checkpointing.testing.simulation.world import World

_PAGE: Final = 5
"""Objects in a page of a list; S3 has 1,000."""
_TIMEOUT_SECONDS: Final = 60.0
_BEGINNING: Final = dt.datetime(2023, 11, 14, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified: dt.datetime


class _Answer:
    """What ``obstore.get`` returns."""

    def __init__(self, meta: dict[str, Any], data: bytes) -> None:
        self.meta, self._data = meta, data

    def stream(self, min_chunk_size: int) -> Iterator[bytes]:
        for start in range(0, len(self._data), min_chunk_size):
            yield self._data[start : start + min_chunk_size]

    def bytes(self) -> Any:
        return self._data


@dataclass(frozen=True, slots=True)
class _Client:
    """Stands in for a store of obstore."""

    url: str


class SimulatedStore:
    """All buckets of a world.

    Attributes:
        losses: How likely a request, or its answer, is lost, from 0 to 1.
        late_seconds: How long after its process has given up a lost request may still be done.
        is_bare: Whether ETags are compared without the quotes in which they are given.
    """

    def __init__(self, world: World) -> None:
        self.losses: float = 0.0
        self.late_seconds: float = 0.0
        self.is_bare: bool = False
        self._world = world
        self._buckets: dict[str, dict[str, _Object]] = {}

    def etags(self, url: str) -> dict[str, str]:
        """The ETags of the objects of a bucket, such as ``s3://bucket``, by their keys."""
        return {key: stored.etag for key, stored in self._of(_Client(url)).items()}

    def sizes(self, part: str) -> dict[str, int]:
        """The size of each object whose ``bucket/key`` has such a part, by its URL."""
        urls = {
            f"{url}/{key}": o
            for url, objects in self._buckets.items()
            for key, o in objects.items()
        }
        return {url: len(stored.data) for url, stored in urls.items() if part in url}

    def flip(self, url: str, position: int, bit: int) -> None:
        """Flip a bit of an object, which nothing tells."""
        scheme, _, path = url.partition("://")
        bucket, _, key = path.partition("/")
        objects = self._buckets[f"{scheme}://{bucket}"]
        data = bytearray(objects[key].data)
        data[position] ^= 1 << bit
        objects[key] = replace(objects[key], data=bytes(data))

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that stand in, by the names of those that they stand in for."""
        import obstore  # noqa: PLC0415 - an extra
        from obstore import store  # noqa: PLC0415

        def routed(name: str) -> Callable[..., Any]:
            real, own = getattr(obstore, name), getattr(self, f"_{name}")

            def call(client: Any, *args: Any, **options: Any) -> Any:
                chosen = own if isinstance(client, _Client) else real
                return chosen(client, *args, **options)

            return call

        real_client = store.from_url

        def from_url(url: str, **options: Any) -> Any:
            is_outside = self._world.scheduler.task is None
            return real_client(url, **options) if is_outside else _Client(url)

        names = ("get", "put", "head", "delete", "list", "list_with_delimiter")
        return {f"obstore.{name}": routed(name) for name in names} | {
            "obstore.store.from_url": from_url
        }

    def _of(self, client: _Client) -> dict[str, _Object]:
        return self._buckets.setdefault(client.url, {})

    def _request(self, name: str, client: _Client, key: str, work: Callable[[], Any]) -> Any:
        """Carry out a request, or lose it or its answer, or carry it out late."""
        world = self._world
        world.before(name, f"{client.url}/{key}")
        dice = world.scheduler.random
        if dice.random() >= self.losses:
            return work()
        from obstore.exceptions import GenericError  # noqa: PLC0415 - an extra

        how = dice.choice(["busy", "lost", "answer lost", "late"])
        world.note(name, f"{client.url}/{key}", how)
        if how == "busy":
            raise GenericError("Server returned non-2xx status code: 503 Slow Down")
        if how == "answer lost":
            work()
        elif how == "late" and self.late_seconds:
            self._carry_out_late(work)
        world.scheduler.wait(lambda: False, dice.choice([0.1, _TIMEOUT_SECONDS]))
        raise GenericError("error sending request: the connection was closed")

    def _carry_out_late(self, work: Callable[[], Any]) -> None:
        """The request is under way still, whatever becomes of its process."""
        seconds = self._world.scheduler.random.uniform(0, self.late_seconds)

        def deliver() -> None:
            self._world.scheduler.wait(lambda: False, seconds)
            try:
                work()
            except Exception:  # noqa: BLE001 - nobody gets the answer
                return

        self._world.scheduler.spawn(deliver, "request", self._world.network)

    def _get(self, client: _Client, key: str, *, options: dict[str, Any] | None = None) -> _Answer:
        def work() -> _Answer:
            stored = self._found(client, key)
            begin, end = (options or {}).get("range", (0, len(stored.data)))
            return _Answer(_meta(key, stored), stored.data[begin:end])

        answer: _Answer = self._request("get", client, key, work)
        return answer

    def _head(self, client: _Client, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self._request(
            "head", client, key, lambda: _meta(key, self._found(client, key))
        )
        return found

    def _put(
        self, client: _Client, key: str, data: Any, *, mode: Any = "overwrite", **_: Any
    ) -> dict[str, Any]:
        from obstore import exceptions  # noqa: PLC0415 - an extra

        content = bytearray()
        # Of an upload in parts nothing is seen before the last one; obstore sends lost ones again.
        for part in [data] if isinstance(data, bytes | bytearray | memoryview) else data:
            if part is not data:
                self._world.before("put part", f"{client.url}/{key}")
            content += part

        def work() -> dict[str, Any]:
            objects = self._of(client)
            if mode == "create" and key in objects:
                raise exceptions.AlreadyExistsError(f"{key} already exists")
            if isinstance(mode, dict) and mode["e_tag"] != self._compared(client, key):
                raise exceptions.PreconditionError(f"{key} has another ETag")
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            seconds = dt.timedelta(seconds=int(self._world.scheduler.now))
            objects[key] = _Object(bytes(content), f'"{digest}"', _BEGINNING + seconds)
            return {"e_tag": objects[key].etag, "version": None}

        name = "put if absent" if mode == "create" else "put"
        answer: dict[str, Any] = self._request(name, client, key, work)
        return answer

    def _compared(self, client: _Client, key: str) -> str:
        """What the ETag of an object is compared as."""
        etag = self._found(client, key).etag
        return etag.strip('"') if self.is_bare else etag

    def _delete(self, client: _Client, paths: str | Sequence[str]) -> None:
        keys = [paths] if isinstance(paths, str) else list(paths)

        def work() -> None:
            for key in keys:
                self._of(client).pop(key, None)

        self._request("delete", client, ", ".join(keys), work)

    def _list(
        self, client: _Client, *, prefix: str = "", offset: str | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        last = offset or ""

        def work() -> list[dict[str, Any]]:
            found = sorted(self._of(client).items())
            below = [_meta(key, stored) for key, stored in found if key.startswith(prefix)]
            return [meta for meta in below if meta["path"] > last][:_PAGE]

        while page := self._request("list", client, prefix, work):
            last = page[-1]["path"]
            yield page

    def _list_with_delimiter(self, client: _Client, *, prefix: str = "") -> dict[str, Any]:
        def work() -> dict[str, Any]:
            below = [item for item in self._of(client).items() if item[0].startswith(prefix)]
            rests = {key: key.removeprefix(prefix).partition("/") for key, _ in below}
            folders = {f"{prefix}{first}" for first, slash, _ in rests.values() if slash}
            objects = [_meta(key, stored) for key, stored in below if not rests[key][1]]
            return {"common_prefixes": sorted(folders), "objects": objects}

        answer: dict[str, Any] = self._request("list", client, prefix, work)
        return answer

    def _found(self, client: _Client, key: str) -> _Object:
        stored = self._of(client).get(key)
        if stored is None:
            raise FileNotFoundError(f"Object at location {key} not found")
        return stored


def _meta(key: str, stored: _Object) -> dict[str, Any]:
    return {
        "path": key,
        "size": len(stored.data),
        "e_tag": stored.etag,
        "last_modified": stored.modified,
        "version": None,
    }
