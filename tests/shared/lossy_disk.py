"""A disk that loses, at a power cut, everything that nobody waited for."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class LossyDisk:
    """What a power cut would leave of a folder, at each step of the programs that write into it.

    A folder keeps the names that it had when it was last synced, and a file the content. A name may
    get to the disk earlier, a content too; the file system decides.

    Args:
        root: the folder, with which the disk begins. All that is in it is safe.
        monkeypatch: replaces ``os.fsync``, ``os.replace`` and ``os.link``.
        at_step: called before each of them and at the end of ``watch``.

    Attributes:
        synced: What was synced, in order, by its path.
        in_vain: What was synced though nothing in it had changed.
    """

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        at_step: Callable[["LossyDisk"], None] = lambda _: None,
    ) -> None:
        self.synced: list[str] = []
        self.in_vain: list[str] = []
        self._root, self._at_step = root, at_step
        self._kept: dict[int, bytes | dict[str, int]] = {}
        self._opened: list[int] = []
        self._lock = threading.RLock()
        for path in (root, *root.rglob("*")):
            # A file that is open keeps its number, which no other file gets then.
            self._opened.append(os.open(path, os.O_RDONLY))
            self._kept[self._opened[-1]] = b""
        self._kept = {os.fstat(fd).st_ino: self._content(fd) for fd in self._opened}
        real = os.fsync

        def fsync(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if not path.is_relative_to(root):
                real(fd)
                return
            with self._lock:
                at_step(self)
                self._opened.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
                content, number = self._content(self._opened[-1]), os.fstat(fd).st_ino
                name = path.relative_to(root).as_posix()
                self.synced.append(name)
                if self._kept.get(number) == content:
                    self.in_vain.append(name)
                self._kept[number] = content

        monkeypatch.setattr(os, "fsync", fsync)
        for name in ("replace", "link"):
            monkeypatch.setattr(os, name, self._stepping(getattr(os, name)))

    def _stepping(self, call: Callable[..., None]) -> Callable[..., None]:
        def stepping(source: Any, target: Any, **options: Any) -> None:
            if not Path(target).is_relative_to(self._root):
                call(source, target, **options)
                return
            with self._lock:
                self._at_step(self)
                call(source, target, **options)

        return stepping

    @staticmethod
    def _content(fd: int) -> bytes | dict[str, int]:
        try:
            return {entry.name: entry.inode() for entry in os.scandir(fd)}
        except NotADirectoryError:
            return Path(f"/proc/self/fd/{fd}").read_bytes()

    def _now(self) -> dict[int, tuple[Path, dict[str, int] | None]]:
        """Path of each file and folder that is there, and the names in a folder, by its number."""
        found: dict[int, tuple[Path, dict[str, int] | None]] = {}
        for path in (self._root, *self._root.rglob("*")):
            names = {e.name: e.inode() for e in os.scandir(path)} if path.is_dir() else None
            found[path.stat().st_ino] = path, names
        return found

    def after_power_cuts(self, parent: Path) -> Iterator[Path]:
        """What may be there after a power cut at this moment: folders below ``parent``.

        One without anything that was not waited for; one with all names; one with the names of each
        folder that has changed, but not those of others; one with all contents too.
        """
        now = self._now()
        names = {number: own for number, (_, own) in now.items() if own is not None}
        changed = [number for number, own in names.items() if self._kept.get(number) != own]
        contents = {number: path.read_bytes() for number, (path, own) in now.items() if own is None}
        early: list[dict[int, Any]] = [{}, names, {**names, **contents}]
        early += [{number: names[number]} for number in changed]
        seen: list[Any] = []
        for some in early:
            tree = self._tree(self._root.stat().st_ino, {**self._kept, **some}, now)
            if tree not in seen:
                seen.append(tree)
                folder = parent / f"cut{len(seen)}"
                _write(tree, folder)
                yield folder

    def _tree(self, number: int, disk: dict[int, Any], now: dict[int, Any]) -> Any:
        # Of what was never synced nothing is there but the name.
        is_folder = number in now and now[number][1] is not None
        content = disk.get(number, {} if is_folder else b"")
        if isinstance(content, bytes):
            return content
        return {name: self._tree(below, disk, now) for name, below in content.items()}

    def close(self) -> None:
        """Let go of the files."""
        for fd in self._opened:
            os.close(fd)


def _write(tree: Any, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, below in tree.items():
        _write(below, path / name)
