"""Where the checkpoints of a run are kept: one place, or nearer ones in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, Final, get_type_hints

from dist_checkpointing.errors import Finding, UnsupportedFormatError
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
        retention: Which checkpoints are kept here; by default as the manager says.
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
    if not 1 <= len(listed) <= 2:
        findings.append(Finding("a run is kept in one place, or in two", found=len(listed)))
    elif len(listed) == 1 and listed[0].every != 1:
        found = f"{fspath(listed[0].path)}, every={listed[0].every}"
        remedy = "Leave every= out; save as often as it should be written."
        findings.append(Finding("the only place takes each save", found=found, remedy=remedy))
    elif len({str(as_location(place.path).absolute()) for place in listed}) < len(listed):
        findings.append(Finding("two places are one", found=fspath(listed[-1].path)))
    elif listed[-1].copies:
        found = f"{fspath(listed[-1].path)}, copies={listed[-1].copies}"
        findings.append(Finding("copies are kept on disks in front of a store", found=found))
    if findings:
        raise UnsupportedFormatError("a run cannot be kept in these places", findings)
    *nearer, home = listed
    paths = [*(as_local_folder(place.path) for place in nearer), as_location(home.path)]
    return [
        replace(place, path=path.absolute(), retention=place.retention or retention)
        for path, place in zip(paths, listed, strict=True)
    ]
