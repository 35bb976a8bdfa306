"""A file system in memory: what of it is on the disk, and what each machine sees of it.

A machine sees at once what it has done itself, and maybe later what another one has. Names and
contents that were not synced may be lost when a machine loses its power, each by itself. The bytes
of a file are those of a real descriptor, so all that reads, writes and maps files works on them.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_BLOCK: Final = 512
_FIRST_SECOND: Final = 1_700_000_000


class Look(Enum):
    """How a name is looked up; network file systems answer each from another cache."""

    NOW = "now"
    """As the server knows it: what changes names does."""

    OPEN = "open"
    """A file that is there is the newest one; that it is not there may be old."""

    STATUS = "status"
    LIST = "list"


@dataclass(slots=True, eq=False)
class Change:
    """Names that one call has given or taken, in one folder or two; all of them last, or none."""

    machine: str
    is_kept: bool | None = None


@dataclass(slots=True, eq=False)
class _Late:
    """What a name was before it was changed, for machines that do not know it yet."""

    old: Inode | None
    machine: str
    seen_at: dict[tuple[str, Look], float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Inode:
    """A file or folder.

    Attributes:
        descriptor: Of the bytes of a file; None for a folder.
        names: What is in a folder.
        links: How many names it has.
        saved: Bytes, or names, that are on the disk.
        changes: Of a folder, what was changed since it was synced: name, and what has it.
        late: What other machines may still see in a folder.
        watchers: Machines that have looked for a name in a folder, or have listed it (``""``); the
            others have nothing to remember.
        writers: Machines that have opened a file for writing.
        is_dropped: Whether a sync has failed: the next one says that all is well.
        lock: The open file that has its ``flock``.
        modified: Nanoseconds since 1970; ``changed`` likewise.
    """

    number: int
    descriptor: int | None
    names: dict[str, Inode] = field(default_factory=dict)
    links: int = 0
    saved: bytes = b""
    saved_names: dict[str, Inode] = field(default_factory=dict)
    changes: list[tuple[str, Inode | None, Change]] = field(default_factory=list)
    late: dict[str, _Late] = field(default_factory=dict)
    watchers: set[tuple[str, str]] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    is_dropped: bool = False
    lock: object = None
    modified: int = 0
    changed: int = 0

    @property
    def is_folder(self) -> bool:
        return self.descriptor is None

    @property
    def content(self) -> bytes:
        assert self.descriptor is not None
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    @content.setter
    def content(self, data: bytes) -> None:
        assert self.descriptor is not None
        os.ftruncate(self.descriptor, len(data))
        os.pwrite(self.descriptor, data, 0)


class Disk:
    """One file system.

    Attributes:
        device: Its number.
        late_seconds: How long another machine may not see a change; 0 if it always does.
        has_flock: Whether files can be locked.
    """

    def __init__(self, device: int, dice: random.Random, late_seconds: float = 0.0) -> None:
        self.device: int = device
        self.late_seconds: float = late_seconds
        self.has_flock = True
        self.now: float = 0.0
        self._dice = dice
        self._inodes: list[Inode] = []
        self.root: Inode = self._new(is_folder=True)
        self.root.links = 1
        self.make("", self.root, "lost+found", is_folder=True)
        self.sync("", self.root)

    def close(self) -> None:
        for inode in self._inodes:
            if inode.descriptor is not None:
                os.close(inode.descriptor)
        self._inodes = []

    def find(self, machine: str, parts: Sequence[str], look: Look, start: Inode) -> Inode:
        """What a machine finds at a path; FileNotFoundError or NotADirectoryError."""
        inode = start
        for part in parts:
            if not inode.is_folder:
                raise _error(errno.ENOTDIR, parts)
            if self.late_seconds:
                below = self._seen(machine, inode, part, look)
            else:
                below = inode.names.get(part)
            if below is None:
                raise _error(errno.ENOENT, parts)
            inode = below
        return inode

    def _seen(self, machine: str, folder: Inode, name: str, look: Look) -> Inode | None:
        found, late = folder.names.get(name), folder.late.get(name)
        folder.watchers.add((machine, "" if look is Look.LIST else name))
        if late is None or not self._is_hidden(machine, late, look):
            return found
        # Of a name that this machine believes to be there, the newest file is opened.
        if look is Look.NOW or (look is Look.OPEN and late.old is not None):
            return self.named(machine, folder, name)
        return late.old

    def named(self, machine: str, folder: Inode, name: str) -> Inode | None:
        """What has a name; the machine knows it from now on, because the server has answered."""
        if name in folder.late:
            for kind in (Look.LIST, Look.STATUS):
                folder.late[name].seen_at.pop((machine, kind), None)
        return folder.names.get(name)

    def listed(self, machine: str, folder: Inode) -> dict[str, Inode]:
        """What a machine sees in a folder."""
        folder.watchers.add((machine, ""))
        found = {name: self._seen(machine, folder, name, Look.LIST) for name in folder.names}
        for name in folder.late:
            found[name] = self._seen(machine, folder, name, Look.LIST)
        return {name: inode for name, inode in sorted(found.items()) if inode is not None}

    def _is_hidden(self, machine: str, late: _Late, look: Look) -> bool:
        if machine == late.machine:
            return False
        kind = Look.LIST if look is Look.LIST else Look.STATUS
        return self.now < late.seen_at.get((machine, kind), 0.0)

    def make(self, machine: str, folder: Inode, name: str, *, is_folder: bool) -> Inode:
        """Create a file or folder that must not be there."""
        if self.named(machine, folder, name) is not None:
            raise _error(errno.EEXIST, [name])
        inode = self._new(is_folder=is_folder)
        self.change(machine, [(folder, name, inode)])
        return inode

    def change(self, machine: str, names: Sequence[tuple[Inode, str, Inode | None]]) -> None:
        """Give names to files or folders, or take them, all at once."""
        change = Change(machine)
        for folder, name, inode in names:
            old = folder.names.pop(name, None)
            if old is not None:
                old.links -= 1
                old.changed = self.nanoseconds
            if inode is not None:
                folder.names[name] = inode
                inode.links += 1
                inode.changed = self.nanoseconds
            folder.changes.append((name, inode, change))
            folder.modified = folder.changed = self.nanoseconds
            self._note_late(machine, folder, name, old)

    def _note_late(self, machine: str, folder: Inode, name: str, old: Inode | None) -> None:
        if not self.late_seconds:
            return
        before = folder.late.get(name)
        late = _Late(old, machine)
        for other, watched in sorted(folder.watchers):
            if other == machine or watched not in ("", name):
                continue
            if before is not None and self._is_hidden(other, before, Look.STATUS):
                late.old = before.old
            if self._dice.random() < 0.5:
                look = Look.STATUS if watched else Look.LIST
                late.seen_at[other, look] = self.now + self._dice.random() * self.late_seconds
        if late.seen_at:
            folder.late[name] = late
        else:
            folder.late.pop(name, None)

    def sync(self, machine: str, inode: Inode, *, fails: bool = False) -> None:
        """Put the bytes that a machine has written, or the names in a folder, on the disk."""
        if inode.is_folder:
            if not fails:
                inode.saved_names, inode.changes = dict(inode.names), []
        elif fails:
            inode.is_dropped = True
        elif not inode.is_dropped and (machine in inode.writers or not inode.writers):
            inode.saved = inode.content

    def lose_power(self, machines: Collection[str]) -> None:
        """Lose some of what these machines have not synced."""
        mode = self._dice.choice(["all", "none", "each", "each"])

        def is_kept() -> bool:
            return mode == "none" or (mode == "each" and self._dice.random() < 0.5)

        for inode in self._inodes:
            if inode.is_folder:
                kept = []
                for name, below, change in inode.changes:
                    if change.is_kept is None:
                        change.is_kept = change.machine not in machines or is_kept()
                    if change.is_kept:
                        kept.append((name, below, change))
                if len(kept) < len(inode.changes):
                    inode.names = dict(inode.saved_names)
                    for name, below, _ in kept:
                        inode.names.pop(name, None)
                        if below is not None:
                            inode.names[name] = below
                inode.saved_names, inode.changes, inode.late = dict(inode.names), [], {}
            elif inode.writers & {*machines} and (content := inode.content) != inode.saved:
                if inode.is_dropped or not is_kept():
                    content = inode.saved
                elif self._dice.random() < 0.5:
                    content = self._torn(content, inode.saved)
                inode.content = inode.saved = content
            inode.is_dropped = False
        self._count_links()

    def _torn(self, new: bytes, old: bytes) -> bytes:
        """Blocks of a file of which some are on the disk."""
        old = old.ljust(len(new), b"\0")
        starts = range(0, len(new), _BLOCK)
        return b"".join(self._dice.choice((new, old))[s : s + _BLOCK] for s in starts)[: len(new)]

    def _count_links(self) -> None:
        for inode in self._inodes:
            inode.links = 0
        self.root.links = 1
        for inode in self._inodes:
            for below in inode.names.values():
                below.links += 1

    def remove(self, is_due: Callable[[str], bool]) -> None:
        """Delete files by their names, as people do."""
        for inode in self._inodes:
            for name in filter(is_due, [*inode.names]):
                self.change("", [(inode, name, None)])

    def tree(self) -> Iterator[tuple[str, Inode]]:
        """Everything that is there, by its path."""
        left = [("", self.root)]
        while left:
            path, folder = left.pop()
            for name, inode in sorted(folder.names.items()):
                yield f"{path}/{name}", inode
                if inode.is_folder:
                    left.append((f"{path}/{name}", inode))

    @property
    def nanoseconds(self) -> int:
        return int((_FIRST_SECOND + self.now) * 1e9)

    def status(self, inode: Inode) -> os.stat_result:
        size = 0 if inode.descriptor is None else os.fstat(inode.descriptor).st_size
        kind = stat.S_IFDIR | 0o755 if inode.is_folder else stat.S_IFREG | 0o644
        seconds = (inode.modified // 10**9, inode.modified // 10**9, inode.changed // 10**9)
        values = (kind, inode.number, self.device, inode.links, 0, 0, size, *seconds)
        more = {
            "st_mtime": inode.modified / 1e9,
            "st_mtime_ns": inode.modified,
            "st_ctime_ns": inode.changed,
            "st_blocks": -(-size // 512),
            "st_blksize": 4096,
        }
        return os.stat_result(values, more)

    def _new(self, *, is_folder: bool) -> Inode:
        descriptor = None if is_folder else os.memfd_create("file", os.MFD_CLOEXEC)
        inode = Inode(len(self._inodes) + 2, descriptor)
        inode.modified = inode.changed = self.nanoseconds
        self._inodes.append(inode)
        return inode


def _error(code: int, parts: Sequence[str]) -> OSError:
    return OSError(code, os.strerror(code), "/".join(parts))
