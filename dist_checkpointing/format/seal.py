"""The seal: what the files of a checkpoint are, written just before the commit.

It names the save, every file with its size, and a digest of each file that is not tensor data. The
data is covered by the tables of checksums, which the seal covers. A file that the seal does not
name is not part of the checkpoint.
"""

from __future__ import annotations

import re
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import xxhash

from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import file_writer, local_folder, location
from dist_checkpointing.filesystem.local_folder import Durability
from dist_checkpointing.filesystem.location import is_seen, when_visible
from dist_checkpointing.filesystem.locks import LOCK_NAME
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import CheckpointingConfig, read_config
from dist_checkpointing.format.file_names import require_file_name
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    REMOVAL_NAME,
    attempt_of,
    is_in_attempt,
    leftovers,
)
from dist_checkpointing.threads import in_threads

SEAL_NAME: Final = ".dckpt/seal.json"
FORMAT: Final = "dist_checkpointing.seal"
FORMAT_MINOR: Final = 0
_UNSEALED_NAMES: Final = frozenset({CONFIG_FNAME, SEAL_NAME, REMOVAL_NAME})
"""Written after the seal. What ``metadata.json`` says stands in the seal itself."""
UNVERIFIED: Final = "Use another checkpoint, or load without verify."
MAX_SEAL_BYTES: Final = 1 << 31
_MAX_DIGESTED_BYTES: Final = 1 << 26
"""A larger file that no rank reported is tensor data of somebody else's strategy."""
_MOST_FINDINGS: Final = 1000
_THREADS: Final = 16
_SHARED_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{32}\.tmp")
_CHECKSUM_BYTES: Final = len('{"checksum":"0123456789abcdef0123456789abcdef",')


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file as it was written; its name is relative to the checkpoint, with ``/``.

    The ``digest`` is the xxh3_128 of the content in hex; None for tensor data, which the tables of
    checksums cover. The ``etag`` is what an object store said of the object that it put.
    """

    name: str
    num_bytes: int
    digest: str | None = None
    etag: str | None = None

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> SealedFile:
        return cls(name, len(data), xxhash.xxh3_128_hexdigest(data))

    @classmethod
    def put(cls, folder: Location, name: str, data: bytes, durability: Durability) -> SealedFile:
        """Write a small file, see ``file_writer.put``."""
        file_writer.put(folder, name, data, durability)
        return cls.of_bytes(name, data)


@dataclass(frozen=True, slots=True)
class Seal:
    """What is known of the files of the checkpoint that the save ``attempt`` wrote.

    ``config`` is what ``metadata.json`` says; ``tables`` are the first and last key in each table
    of checksums. While ``is_open`` tensors are being removed, or a removal was cut off: nothing can
    be said about the files then.
    """

    attempt: str
    config: Mapping[str, Any]
    files: Mapping[str, SealedFile]
    tables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_open: bool = False

    def tables_with(self, keys: Collection[str]) -> list[str]:
        wanted = sorted(keys)
        return [
            name
            for name, (first, last) in self.tables.items()
            if bisect_left(wanted, first) < bisect_right(wanted, last)
        ]

    def to_json(self) -> bytes:
        files = sorted(self.files.values(), key=attrgetter("name"))
        content = {
            "format": FORMAT,
            "format_minor": FORMAT_MINOR,
            "attempt": self.attempt,
            "config": dict(self.config),
            "files": [file.name for file in files],
            "sizes": [file.num_bytes for file in files],
            "digests": [file.digest for file in files],
            "tables": {name: list(keys) for name, keys in self.tables.items()},
            "is_open": self.is_open,
        }
        if any(file.etag for file in files):
            # Readers that do not know it pass over it.
            content["etags"] = [file.etag for file in files]
        body = local_folder.json_text(content).encode()
        return b'{"checksum":"%s",' % xxhash.xxh3_128_hexdigest(body).encode() + body[1:]

    @classmethod
    def from_json(cls, data: bytes, path: str = SEAL_NAME) -> Seal:
        """Read and check the bytes of a seal file; CorruptCheckpointError if they are not one."""
        with local_folder.parsing("the seal of the checkpoint is damaged", path, remedy=UNVERIFIED):
            content = local_folder.parse_json(data)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError("not a seal of dist_checkpointing")
            body = b"{" + data[_CHECKSUM_BYTES:]
            if content.get("checksum") != xxhash.xxh3_128_hexdigest(body):
                raise ValueError("the checksum of the seal differs")
            columns = (content["files"], content["sizes"], content["digests"])
            etags = content.get("etags") or [None] * len(content["files"])
            files = {
                str(name): SealedFile(
                    str(name), int(size), digest and str(digest), etag and str(etag)
                )
                for name, size, digest, etag in zip(*columns, etags, strict=True)
            }
            tables = {str(name): (str(a), str(b)) for name, (a, b) in content["tables"].items()}
            for name in (*files, *tables):
                require_file_name(name)
            config = dict(content["config"])
            return cls(str(content["attempt"]), config, files, tables, bool(content["is_open"]))


def read_seal(folder: Location) -> Seal | None:
    """The seal of a checkpoint; None if it was written without one.

    CorruptCheckpointError if it is damaged, or is lost.
    """
    path = folder / SEAL_NAME
    if not location.is_file(path):
        if SEAL_NAME not in leftovers(folder):
            return None
        # Another machine may have put it there a moment ago, which is not seen here yet.
        is_near = not isinstance(folder, Path) or local_folder.is_local(folder)
        if is_near or not is_seen(lambda: location.is_file(path)):
            finding = Finding("the seal is missing", path=str(path), remedy=UNVERIFIED)
            raise CorruptCheckpointError("the seal of the checkpoint is lost", [finding])
    return Seal.from_json(location.read_bytes(path, MAX_SEAL_BYTES), str(path))


def shared_name(name: str, attempt: str) -> str:
    """What a file that several ranks write is called until ``write_seal`` gives it its name."""
    return f"{name}.{attempt}.tmp"


def known_files(folder: Location) -> Callable[[str], bool]:
    """Whether a file is part of a checkpoint, as far as a seal tells; for who lists folders."""
    try:
        seal = read_seal(folder)
    except CorruptCheckpointError:
        seal = None  # a load without ``verify`` does without it
    return (lambda _: True) if seal is None else seal.files.__contains__


def write_seal(
    folder: Location,
    config: CheckpointingConfig,
    reported: Iterable[SealedFile],
    *,
    attempt: str,
    tables: Mapping[str, tuple[str, str]],
    created: Collection[str] | None,
    durability: Durability,
    is_all_here: bool = True,
) -> None:
    """Check that all files of an attempt are there, and seal it. Called on rank 0, at the end.

    What the ranks ``reported`` must be here in its size, or CheckpointingException; unless
    ``is_all_here``, what they wrote to other disks is believed. Files that several ranks wrote get
    their names. What is found in the files and folders that the save has ``created`` (None: in all)
    and was not reported is sealed too, but not beside what was: it may be of a late rank of an
    earlier save. The name of the seal is durable with the commit.
    """
    # Ranks that write into one file have seen it grow.
    files = {file.name: file for file in sorted(reported, key=attrgetter("num_bytes"))}
    if ATTEMPT_NAME not in files:
        files[ATTEMPT_NAME] = _digested(folder, ATTEMPT_NAME)
    sizes = {file.name: file.num_bytes for file in files.values()}
    # What is written later is not looked for.
    made = None if created is None else {*created} - _UNSEALED_NAMES
    found = location.sizes_in(folder, made, sizes)
    if not is_all_here:
        found = sizes | found
    _require_reported(folder, files, found)
    for name in filterfalse(_is_unsealed, found.keys() - files.keys()):
        is_large, digested = found[name] > _MAX_DIGESTED_BYTES, partial(_digested, folder, name)
        files[name] = SealedFile(name, found[name]) if is_large else when_visible(digested)
    root: Any = folder  # an object store has no such files
    shared = {name: match[1] for name in files if (match := _SHARED_NAME.fullmatch(name))}
    if shared:
        files |= {own: replace(files.pop(name), name=own) for name, own in shared.items()}
        renamed = [(root / name, root / own) for name, own in shared.items()]
        in_threads(lambda p: when_visible(lambda: local_folder.rename_new(*p)), renamed, _THREADS)
        if durability is Durability.FSYNC:
            location.fsync_folders(shared.values(), folder)
    content = Seal(attempt, vars(config), files, tables).to_json()
    file_writer.put(folder, SEAL_NAME, content, durability)


def _require_reported(
    folder: Location, files: Mapping[str, SealedFile], found: Mapping[str, int]
) -> None:
    late: list[tuple[SealedFile, int | None]] = [
        (file, None) for file in files.values() if found.get(file.name) != file.num_bytes
    ]

    def are_seen() -> bool:
        sizes = [(file, location.size_of(folder / file.name)) for file, _ in late]
        late[:] = [(file, size) for file, size in sizes if size != file.num_bytes]
        return not late

    is_seen(are_seen)
    findings = [
        Finding(
            "a rank wrote this file, and rank 0 does not see it as it was written",
            expected=f"{file.num_bytes} bytes",
            found="no such file" if size is None else f"{size} bytes",
            path=str(folder / file.name),
            remedy="Save to a file system that all ranks share, under the same path on every rank.",
        )
        for file, size in late[:_MOST_FINDINGS]
    ]
    CheckpointingException.raise_if(findings, "the checkpoint is not complete where rank 0 is")


def _digested(folder: Location, name: str) -> SealedFile:
    digest, size = xxhash.xxh3_128(), 0
    for data in location.blocks(folder / name):
        digest.update(data)
        size += len(data)
    return SealedFile(name, size, digest.hexdigest())


def check_files(seal: Seal, folder: Location, names: Iterable[str]) -> list[Finding]:
    """What is wrong with some files, by size and digest; empty if they are as they were sealed."""

    def damage(name: str) -> Finding | None:
        sealed, path = seal.files.get(name), str(folder / name)
        if sealed is None:
            return Finding("the seal does not name this file", path=path)
        size = location.size_of(folder / name)
        if size is None:
            return Finding("the file is missing", path=path)
        if size != sealed.num_bytes:
            expected = f"{sealed.num_bytes} bytes"
            return Finding("the file has another size", None, expected, size, path=path)
        digest = None if sealed.digest is None else _digested(folder, name).digest
        if digest != sealed.digest:
            problem = "the file is not what was saved: its digest differs"
            return Finding(problem, None, sealed.digest, digest, path=path)
        return None

    looked_at = [] if seal.is_open else [*names]
    return [*filter(None, in_threads(damage, looked_at, _THREADS))]


def check_config(seal: Seal, folder: Location) -> list[Finding]:
    """Whether the seal is of the last save into the folder, and what that has committed."""
    said: list[tuple[str, Any, Any]] = []
    if not is_in_attempt(folder, seal.attempt):
        said.append((ATTEMPT_NAME, seal.attempt, attempt_of(folder)))
    said.append((CONFIG_FNAME, dict(seal.config), vars(read_config(folder))))
    problem = "the file does not say what the seal says of the save"
    return [
        Finding(problem, expected=sealed, found=found, path=str(folder / name))
        for name, sealed, found in said
        if sealed != found
    ]


def unnamed_files(seal: Seal, folder: Location) -> list[str]:
    """Files that are no part of a checkpoint, because its seal does not name them."""
    names = location.files_below(folder).keys() - seal.files.keys() - {ATTEMPT_NAME}
    return sorted(name for name in names if name.endswith(".tmp") or not _is_unsealed(name))


def _is_unsealed(name: str) -> bool:
    """Whether a file is not part of the checkpoint for good: written later, a lock, or left over.

    What a killed process left half written is named ``.tmp``; the next removal or save deletes it.
    """
    return name in _UNSEALED_NAMES or name.startswith(LOCK_NAME) or name.endswith(".tmp")


@contextmanager
def resealing(folder: Path) -> Iterator[None]:
    """Let the body take tensors out of a sealed checkpoint, and seal what is left.

    While it runs the seal is open, so that a crash in between leaves nothing that looks damaged.
    """
    seal = read_seal(folder)
    if seal is None:
        yield
        return
    before = {name: _identity(folder / name) for name in seal.files}
    # What the seal does not name may be of a removal that was cut off, if there was one.
    unknown = () if seal.is_open else unnamed_files(seal, folder)
    local_folder.write_atomic(folder / SEAL_NAME, replace(seal, is_open=True).to_json())
    yield
    files = {}
    for name, file in seal.files.items():
        now = _identity(folder / name)
        if now is None:
            continue
        # What the removal did not touch keeps its digest: damage must not be sealed as it is. Of a
        # removal that was cut off before nobody knows what it has touched.
        is_touched = now != before[name] or (seal.is_open and file.digest is not None)
        files[name] = _digested(folder, name) if is_touched else file
    created = leftovers(folder) - {CONFIG_FNAME} | {ATTEMPT_NAME}
    made = location.sizes_in(folder, created, {}).keys() - seal.files.keys()
    for name in made.difference(unknown):
        if not _is_unsealed(name):
            files[name] = _digested(folder, name)
    tables = {name: keys for name, keys in seal.tables.items() if name in files}
    sealed = replace(seal, files=files, tables=tables, is_open=False)
    local_folder.write_atomic(folder / SEAL_NAME, sealed.to_json())


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written again; unlike the times of its names."""
    status = local_folder.status_of(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
