"""S3, GCS and Azure through obstore: paths, options, requests."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial, wraps
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client


logger: logging.Logger = logging.getLogger(__name__)
Buffer = Any
"""Bytes, a memoryview or an array of bytes: contiguous and one-dimensional."""
SCHEMES: Final = frozenset({"s3", "gs", "az", "memory"})
P = ParamSpec("P")
T = TypeVar("T")
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_FIRST_CONTACT_SECONDS: Final = 10.0
"""How long a server is tried that this process has never heard of: its name may be wrong."""
_MOST_KEPT, _MOST_KEPT_BYTES = 32, 1 << 21
_answered: Final[set[tuple[str, str | None]]] = set()
"""URL and endpoint of each store that has carried out a request of this process."""


def check_size(size: int, path: object, max_bytes: int | None) -> None:
    """Refuse, by CorruptCheckpointError, a file too large to be what it should be."""
    if max_bytes is not None and size > max_bytes:
        limit = f"at most {max_bytes} bytes"
        finding = Finding("file is far too large", None, limit, size, path=str(path))
        raise CorruptCheckpointError("refused to read a file", [finding])


@dataclass(frozen=True, slots=True)
class ObjectStoreOptions:
    """How an object store is reached. What is not given here comes from the environment.

    Credentials, region and endpoint are read from the usual variables of each provider, such as
    ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS`` or
    ``AZURE_STORAGE_ACCOUNT_NAME``.

    Attributes:
        endpoint: URL of the server; ``http://`` is allowed if it is given as such.
        region: Region of the bucket.
        access_key_id: With ``secret_access_key``, the credentials of S3.
        secret_access_key: See ``access_key_id``.
        max_retries: Tries after the first one of a request that met 429, 5xx, half an answer or a
            lost connection; None for as many as there is time for.
        retry_timeout: Seconds after which a request is not tried again.
        timeout: Seconds that one try may take.
        connect_timeout: Seconds of them to reach the server.
        parallelism: Requests under way at a time for one rank.
        part_bytes: Size of the parts of an upload and of large reads.

    Example:
        >>> from dist_checkpointing import ObjectStoreOptions
        >>> ObjectStoreOptions(endpoint="http://127.0.0.1:9000").parallelism
        16
    """

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    max_retries: int | None = None
    retry_timeout: float = 180.0
    timeout: float = 60.0
    connect_timeout: float = 5.0
    parallelism: int = 16
    part_bytes: int = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as the store describes it.

    Its ``etag`` changes whenever it is written; None if the store gives none. It was ``modified``
    at this second since 1970 by the clock of the store.
    """

    key: str
    num_bytes: int
    etag: str | None
    modified: float = field(default=0.0, compare=False)


class StoreUnavailableError(OSError):
    """The store gave no answer, half of one, or one that asks to try again."""


def _repeating(
    method: Callable[Concatenate[ObjectStore, P], T],
) -> Callable[Concatenate[ObjectStore, P], T]:
    """A method whose requests may be made twice, see ``ObjectStore.repeated``."""

    @wraps(method)
    def repeated(store: ObjectStore, /, *args: P.args, **options: P.kwargs) -> T:
        return store.repeated(lambda: method(store, *args, **options))

    return repeated


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A bucket. Two of them are equal if they are reached in the same way.

    Every method raises ``FileNotFoundError`` if the object is not there, ``FileExistsError`` if a
    put that must create finds one, ``PermissionError`` if access is denied, and ``OSError`` with
    the key and the last answer of the store for all else; its errno is ENOTSUP for what the store
    does not have. The URL is ``s3://bucket`` or its like.
    """

    url: str
    options: ObjectStoreOptions = ObjectStoreOptions()

    def repeated(self, request: Callable[[], T]) -> T:
        """What a request returns, made again after each StoreUnavailableError while there is time.

        Pauses grow, and are random, so that the ranks do not come back at the same time.
        """
        server = self.url, self.options.endpoint
        begun, waited, tries = time.monotonic(), 0.0, 0
        while True:
            try:
                answer = request()
            except StoreUnavailableError as error:
                limit = self.options.retry_timeout
                if server not in _answered and "status code" not in str(error):
                    limit = min(limit, _FIRST_CONTACT_SECONDS)
                pause = min(_FIRST_PAUSE * 2.0 ** min(tries, 9), _LONGEST_PAUSE)
                pause *= random.uniform(0.5, 1)  # noqa: S311 - jitter
                # What this process slept is counted: it may have been stopped itself.
                passed = max(waited, time.monotonic() - begun)
                if passed + pause > limit or tries == self.options.max_retries:
                    said = f"{error.strerror} ({tries + 1} tries in {passed:.0f} s)"
                    raise OSError(error.errno, said, error.filename) from error
                time.sleep(pause)
                waited, tries = waited + pause, tries + 1
            else:
                _answered.add(server)
                return answer

    def _call(
        self, function: str, key: str, *args: Any, max_retries: int | None = 0, **options: Any
    ) -> Any:
        """What a function of obstore returns; its errors as those of a file system.

        obstore repeats requests itself ``max_retries`` times, but does not read an answer again.
        """
        chosen = self.options, max_retries
        if self.url.startswith("memory:"):  # of the process, however it is reached
            chosen = ObjectStoreOptions(), None
        with self._errors(key):
            client = _client(self.url, *chosen, os.getpid())
            return getattr(importlib.import_module("obstore"), function)(client, *args, **options)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        from obstore import exceptions  # noqa: PLC0415 - an extra

        path = f"{self.url}/{key}"
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise FileExistsError(17, "the object exists", path) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(13, _last_answer(error), path) from error
        except (exceptions.BaseError, FileNotFoundError, NotImplementedError) as error:
            whole, answer = str(error), _last_answer(error)
            if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(whole):
                raise FileNotFoundError(2, "no such object", path) from error
            if isinstance(error, NotImplementedError) or "status code: 501" in whole:
                raise OSError(errno.ENOTSUP, answer, path) from error
            may_pass = isinstance(error, exceptions.GenericError) and not _LASTING.search(whole)
            raise (StoreUnavailableError if may_pass else OSError)(5, answer, path) from error

    @_repeating
    def get_version(self, key: str, max_bytes: int | None = None) -> tuple[bytes, Any]:
        """Like ``get``, and which version of the object that is, as a mode of ``put``."""
        answer = self._call("get", key, key)
        check_size(answer.meta["size"], f"{self.url}/{key}", max_bytes)
        with self._errors(key):
            data = bytes(answer.bytes())
        return data, {k: v for k in ("e_tag", "version") if (v := answer.meta[k])} or "overwrite"

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """The content of an object, which is not read if larger than ``max_bytes``."""
        return self.get_version(key, max_bytes)[0]

    def blocks(self, key: str) -> Iterator[memoryview]:
        answer = self._call("get", key, key, max_retries=self.options.max_retries)
        left = iter(answer.stream(min_chunk_size=self.options.part_bytes))
        while (block := self._next(key, left)) is not None:
            yield memoryview(block)

    def _next(self, key: str, answers: Iterator[Any]) -> Any:
        with self._errors(key):
            return next(answers, None)

    @_repeating
    def get_range(self, key: str, offset: int, num_bytes: int) -> tuple[memoryview, int]:
        """A part of an object, which is shorter where the object ends, and the object's size."""
        answer = self._call("get", key, key, options={"range": (offset, offset + num_bytes)})
        with self._errors(key):
            return memoryview(answer.bytes()), answer.meta["size"]

    @_repeating
    def head(self, key: str) -> ObjectInfo | None:
        try:
            return _info(self._call("head", key, key))
        except FileNotFoundError:
            return None

    def put(self, key: str, data: Buffer, *, mode: Any = "overwrite") -> str | None:
        """Write an object in one request; the ETag that it has then.

        The mode "create" refuses to replace an object, and that of a version another one. They are
        not repeated: after an answer that was lost the object might be that of the first try.
        """
        put = partial(self._put, key, data, mode=mode, use_multipart=False)
        if mode == "overwrite":
            return self.repeated(put)
        try:
            return put()
        except FileExistsError:
            etag = "" if mode == "create" else mode.get("e_tag", "")
            info = self.head(key) if etag.startswith('"') else None
            if info is None or info.etag != etag:
                raise
            # Ceph 16 compares without the quotes in which it gives an ETag.
            return put(mode={**mode, "e_tag": etag.strip('"')})

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> str | None:
        """Write an object of any size, part by part, that is not there; the ETag that it has then.

        The parts are not copied before they are sent. The upload is aborted if one cannot be made.
        """
        num_bytes, is_whole = 0, False

        def sent() -> Iterator[Buffer]:
            nonlocal num_bytes, is_whole
            for part in parts:
                num_bytes += len(part)
                yield part
            is_whole = True

        def put() -> str | None:
            try:
                return self._put(
                    key,
                    sent(),
                    chunk_size=self.options.part_bytes,
                    max_concurrency=max(1, self.options.parallelism // 2),  # two objects at a time
                    max_retries=self.options.max_retries,
                )
            except OSError as error:
                if is_whole:  # if only the last answer was lost, the object is there
                    with suppress(OSError):
                        info = self.head(key)
                        if info is not None and info.num_bytes == num_bytes:
                            return info.etag
                if num_bytes and isinstance(error, StoreUnavailableError):
                    # Not begun anew: parts that have been sent are not kept.
                    raise OSError(error.errno, error.strerror, error.filename) from error
                raise

        return self.repeated(put)

    def _put(self, key: str, data: Any, **options: Any) -> str | None:
        etag: str | None = self._call("put", key, key, data, **options)["e_tag"]
        return etag

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object below a prefix that ends at a ``/``, in order of the keys."""
        pages: Any = None
        last: str | None = None

        def next_page() -> Any:
            nonlocal pages
            # After an error the list begins anew, behind the last key that is known.
            left, pages = pages or self._call("list", prefix, prefix=prefix, offset=last), None
            page, pages = self._next(prefix, left), left
            return page

        while page := self.repeated(next_page):
            last = page[-1]["path"]
            yield from map(_info, page)

    @_repeating
    def list_folder(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        answer = self._call("list_with_delimiter", prefix, prefix=prefix)
        folders = sorted(PurePosixPath(name).name for name in answer["common_prefixes"])
        return folders, sorted(map(_info, answer["objects"]), key=lambda info: info.key)

    @_repeating
    def delete(self, keys: Collection[str]) -> None:
        """Delete objects, many in a request; those that are not there are no error."""
        if not (names := list(keys)):
            return
        try:
            self._call("delete", names[0], names)
        except FileNotFoundError:  # the memory store says it of a key, and stops there
            for key in names:
                with suppress(FileNotFoundError):
                    self._call("delete", key, key)


@dataclass(frozen=True, slots=True)
class KnownStore(ObjectStore):
    """A bucket in which the objects below a prefix are known, of which small ones are read once.

    Attributes:
        prefix: How the keys of the known objects begin.
        infos: All objects below the prefix, by key.
        contents: What has been read, of the first small objects, by key.
    """

    prefix: str = ""
    infos: Mapping[str, ObjectInfo] = field(default_factory=dict, compare=False, repr=False)
    contents: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        if (info := self.infos.get(key)) is None:
            return ObjectStore.get(self, key, max_bytes)
        check_size(info.num_bytes, f"{self.url}/{key}", max_bytes)
        if (content := self.contents.get(key)) is None:
            content = ObjectStore.get(self, key)
            # What speaks of the tensors is read first.
            if info.num_bytes <= _MOST_KEPT_BYTES and len(self.contents) < _MOST_KEPT:
                self.contents[key] = content
        return content

    def blocks(self, key: str) -> Iterator[memoryview]:
        info = self.infos.get(key)
        if info is None or info.num_bytes > _MOST_KEPT_BYTES:
            yield from ObjectStore.blocks(self, key)
        else:  # only small files are compared as a whole
            yield memoryview(self.get(key))

    def get_range(self, key: str, offset: int, num_bytes: int) -> tuple[memoryview, int]:
        if (content := self.contents.get(key)) is not None:
            return memoryview(content)[offset : offset + num_bytes], len(content)
        return ObjectStore.get_range(self, key, offset, num_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        return self.infos.get(key) or ObjectStore.head(self, key)

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        if not prefix.startswith(self.prefix):
            return ObjectStore.list_below(self, prefix)
        return (info for key, info in self.infos.items() if key.startswith(prefix))

    def list_folder(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        if not prefix.startswith(self.prefix):
            return ObjectStore.list_folder(self, prefix)
        found = [(info.key[len(prefix) :].partition("/"), info) for info in self.list_below(prefix)]
        folders = {name for (name, slash, _), _ in found if slash}
        return sorted(folders), [info for (_, slash, _), info in found if not slash]


def listed_once(folder: Location) -> Location:
    """The same folder, as one call reads it that looks at all of it: what is there is listed now.

    Small objects are read once. On a disk it is the folder itself.
    """
    if isinstance(folder, Path) or isinstance(folder.store, KnownStore):
        return folder
    infos = {info.key: info for info in folder.objects()}
    store = KnownStore(folder.store.url, folder.store.options, folder.prefix, infos)
    return replace(folder, store=store)


@cache
def _client(url: str, options: ObjectStoreOptions, max_retries: int | None, process: int) -> Client:
    """A client that the threads of a process share."""
    del process  # a fork has its own: sockets and threads of the parent's do not work in it
    from obstore.store import MemoryStore, from_url  # noqa: PLC0415 - an extra

    if url.startswith("memory://"):
        return MemoryStore()
    names = ("endpoint", "region", "access_key_id", "secret_access_key")
    variables = ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    endpoint = options.endpoint or next(filter(None, map(os.environ.get, variables)), "")
    config: Any = {name: value for name in names if (value := getattr(options, name)) is not None}
    return from_url(
        url,
        config=config,
        client_options={
            "timeout": timedelta(seconds=options.timeout),
            "connect_timeout": timedelta(seconds=options.connect_timeout),
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={
            "max_retries": 10**6 if max_retries is None else max_retries,
            "retry_timeout": timedelta(seconds=options.retry_timeout),
            "backoff": {"max_backoff": timedelta(seconds=_LONGEST_PAUSE), "base": 3},
        },
    )


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"].timestamp())


_NO_CREDENTIALS: Final = (
    "no credentials were found here: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what "
    "the provider of the store reads"
)
_CAUSES: Final = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "169.254.169.254": _NO_CREDENTIALS,
    "/latest/api/token": _NO_CREDENTIALS,  # where a machine of a cloud has some
    "MissingAccount": "the account is not known: set AZURE_STORAGE_ACCOUNT_NAME",
    "ExpiredToken": "the credentials have expired",
    "InvalidAccessKeyId": "the store does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "AuthenticationFailed": "the store does not accept the credentials",
    "AccessDenied": "the credentials do not allow this",
    "error sending request": "the server cannot be reached",
}
"""What stands in an answer of a store, and what that means."""
_NO_BUCKET: Final = re.compile("NoSuchBucket|ContainerNotFound")
_LASTING: Final = re.compile("MissingAccount|InMemory|status code: 4(?!08|29)")
"""In answers that are the same the next time."""


def _last_answer(error: Exception) -> str:
    """The last answer of a store, behind what it means where that is known."""
    whole = str(error)
    answer = whole.split("\n\nDebug source", 1)[0]
    cause = next((cause for sign, cause in _CAUSES.items() if sign in whole), None)
    if cause == _NO_CREDENTIALS:  # no store has answered
        raise CheckpointingException(cause) from None
    return answer if cause is None else f"{cause}; the last answer was: {answer}"


@dataclass(frozen=True, slots=True, order=False)
class ObjectPath:
    """A key of a bucket, wherever a path of a checkpoint is taken.

    It is an ``os.PathLike``, as whatever has ``__fspath__``, by which what can only use files of a
    file system is refused. Deriving from that would make every ``isinstance`` slower.

    Attributes:
        store: The bucket.
        key: Name within it, without a ``/`` at either end; empty for the whole bucket.

    Example:
        >>> from dist_checkpointing import ObjectPath
        >>> str(ObjectPath.of("memory://bucket/run") / "1000" / "metadata.json")
        'memory://bucket/run/1000/metadata.json'
    """

    store: ObjectStore
    key: str

    @classmethod
    def of(cls, url: str, options: ObjectStoreOptions | None = None) -> ObjectPath:
        """The place that a URL names.

        Args:
            url: such as ``s3://bucket/run/1000``; as a ``Path`` it has one slash.
            options: how the store is reached.

        Raises:
            UnsupportedFormatError: if no object store has such URLs, or obstore is not installed.
            CheckpointingException: if it names no bucket, or what no object can be called.
        """
        scheme, _, rest = url.partition(":")
        # pathlib makes one slash of two.
        bucket, _, key = rest.removeprefix("/").removeprefix("/").partition("/")
        if scheme not in SCHEMES:
            finding = Finding(
                f"URLs of scheme {scheme!r} are not supported",
                expected=f"a folder, or a URL of {', '.join(sorted(SCHEMES))}",
                found=url,
                remedy="A local folder of this name is reached by its absolute path.",
            )
            raise UnsupportedFormatError("not a path of a checkpoint", [finding])
        parts = [part for part in key.split("/") if part not in ("", ".")]
        problem = None
        if not bucket:
            problem, found = "the URL names no bucket", url
        elif ".." in parts or any(c < " " or c == "\x7f" for c in key):
            problem, found = "a part of it is .., or holds a control character", repr(url)
        if problem is not None:
            finding = Finding(problem, expected=f"{scheme}://bucket/folder", found=found)
            raise CheckpointingException("not a path of a checkpoint", [finding])
        if importlib.util.find_spec("obstore") is None:
            remedy = "pip install 'dist_checkpointing[object]'"
            finding = Finding("obstore is not installed", path=url, remedy=remedy)
            raise UnsupportedFormatError("object stores need obstore", [finding])
        store = ObjectStore(f"{scheme}://{bucket}", options or ObjectStoreOptions())
        return cls(store, "/".join(parts))

    def __fspath__(self) -> NoReturn:
        finding = Finding(
            "this is in an object store",
            expected="a folder or file of a mounted file system",
            path=str(self),
            remedy="Save to a local or a shared disk, or mount the object store.",
        )
        raise UnsupportedFormatError("not a local path", [finding])

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}"

    def __truediv__(self, name: str | PurePosixPath) -> ObjectPath:
        parts = f"{self.key}/{name}".split("/")
        return ObjectPath(self.store, "/".join(part for part in parts if part not in ("", ".")))

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The folder that it is in."""
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    @property
    def prefix(self) -> str:
        """How the keys of all objects in this folder begin."""
        return f"{self.key}/" if self.key else ""

    def objects(self) -> Iterator[ObjectInfo]:
        """Every object in this folder and below, in order of the keys."""
        return self.store.list_below(self.prefix)

    def absolute(self) -> ObjectPath:
        """Itself: there is no working directory."""
        return self


Location = Path | ObjectPath
"""Where a checkpoint or a file of it is: on a mounted file system or in an object store."""
