"""Where the checkpoints of a run are kept: one place, or nearer ones in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, get_type_hints

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.local_folder import file_system_type
from dist_checkpointing.filesystem.location import as_local_folder, as_location
from dist_checkpointing.format.run_steps import fits
from dist_checkpointing.manager.retention import Retention


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or a URL in which a run keeps checkpoints, one of a list from the nearest on.

    Attributes:
        path: Folder, or URL of an object store.
        every: A step is copied here if it has reached another multiple of this since the last step
            that was. A save goes to the nearest place that takes it, or else to the last one.
        retention: Which checkpoints are kept here; by default as the manager says, and in memory
            (a tmpfs in front of another place) the last two.
        copies: On how many other machines the part of each is kept too, where each machine has a
            disk of its own. They are made behind the training. A machine is named by its host, or
            by the environment variable DIST_CHECKPOINTING_MACHINE.

    Example:
        >>> # Each save goes to the disk, and the first one of each 500 steps into the store.
        >>> places = [Place("/nvme/run"), Place("s3://bucket/run", every=500)]
    """

    path: str | PathLike[str]
    every: int = field(default=1, kw_only=True)
    retention: Retention | None = field(default=None, kw_only=True)
    copies: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not fits(value := getattr(self, name), kind):
                raise TypeError(f"{name} of a Place must be {kind}, not {value!r}")
        for name, least in (("every", 1), ("copies", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    def is_due(self, step: int, last: int | None) -> bool:
        """Whether a step comes here after the ``last`` one that did; None if none did."""
        return last is None or step // self.every > last // self.every


_KINDS: Final = get_type_hints(Place)
Places = str | PathLike[str] | list[Place] | tuple[Place, ...]


def as_places(given: Places, retention: Retention) -> list[Place]:
    """The places of a run with absolute paths, nearest first, each with a retention.

    Raises:
        CheckpointingException: if ``given`` is neither a path nor a list.
        UnsupportedFormatError: if a run cannot be kept in these places.
    """
    if isinstance(given, list | tuple):
        listed: Sequence[Any] = given
    else:
        as_location(given)  # which says what a path is
        listed = [Place(given)]
    if strange := [place for place in listed if not isinstance(place, Place)]:
        raise TypeError(f"places must be a path or a list of Place, not {strange[0]!r}")
    findings = []
    if not listed:
        findings.append(Finding("there must be a place", found="an empty list"))
    elif len(listed) == 1 and listed[0].every != 1:
        found = f"{fspath(listed[0].path)}, every={listed[0].every}"
        remedy = "Leave every= out; save as often as it should be written."
        findings.append(Finding("the only place takes each save", found=found, remedy=remedy))
    elif len({str(as_location(place.path).absolute()) for place in listed}) < len(listed):
        findings.append(Finding("two places are one", found=", ".join(map(str, listed))))
    elif strange := [place for place in [*listed[1:], listed[-1]] if place.copies]:
        found = f"{fspath(strange[0].path)}, copies={strange[0].copies}"
        findings.append(Finding("copies are made where steps come first", found=found))
    if findings:
        raise UnsupportedFormatError("a run cannot be kept in these places", findings)
    *nearer, home = listed
    paths = [as_local_folder(place.path).absolute() for place in nearer]
    kept = [_IN_MEMORY if _is_memory(path) else retention for path in paths]
    pairs = zip(
        listed, [*paths, as_location(home.path).absolute()], [*kept, retention], strict=True
    )
    return [
        replace(place, path=path, retention=place.retention or default)
        for place, path, default in pairs
    ]


_IN_MEMORY: Final = Retention(keep_last=2)


def _is_memory(folder: Path) -> bool:
    """Whether a folder is, or will be, in memory."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return file_system_type(existing) in ("ramfs", "tmpfs")
