"""The path of a checkpoint: on a file system or in an object store, the same on every rank."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.object_path import Location, ObjectPath

# One slash: pathlib removes the second.
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")

_MOST_NAMED: Final = 16


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/x`` or, as a Path, ``s3:/bucket/x``."""
    return isinstance(path, ObjectPath) or _URL.match(os.fspath(path)) is not None


def as_location(path: str | os.PathLike[str]) -> Location:
    """Where a path of a user is: on a mounted file system, without "..", or in an object store.

    Raises:
        UnsupportedFormatError: for a URL of a scheme that is not known.
        CheckpointingException: for a URL that names no bucket, an empty path, and for what is
            no path.
    """
    if isinstance(path, ObjectPath):
        return path
    given: object = path
    if not isinstance(given, str | os.PathLike):
        finding = Finding(
            "a path is a str or an os.PathLike",
            found=f"{type(given).__module__}.{type(given).__qualname__}",
            remedy="The state dict comes first: save(state, path), load(template, path).",
        )
        raise CheckpointingException("not a path of a checkpoint", [finding])
    text = os.fspath(path)
    if not text:
        finding = Finding("the path is empty", remedy="Name a folder; '.' is the current one.")
        raise CheckpointingException("not a path of a checkpoint", [finding])
    return _without_dots(path) if _URL.match(text) is None else ObjectPath.of(text)


def _without_dots(path: str | os.PathLike[str]) -> Path:
    plain = path if isinstance(path, Path) else Path(path)
    # TensorStore refuses paths with "..".
    return plain.resolve() if ".." in os.fspath(path) and ".." in plain.parts else plain


def require_local(path: Location, what: str) -> None:
    """Refuse what works on a mounted file system only.

    Raises:
        UnsupportedFormatError: if the path is in an object store.
    """
    if isinstance(path, ObjectPath):
        finding = Finding(
            f"{what} works on a mounted file system only",
            found=str(path),
            remedy="Use the backend tensorstore, or a folder of a local or a shared disk.",
        )
        raise UnsupportedFormatError("not for an object store", [finding])


def as_local_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint or file of tensors on a mounted file system, without "..".

    A function that takes such a path from a user calls this or ``location``. Without it,
    ``s3://bucket/x`` would be the relative path ``./s3:/bucket/x``.

    Raises:
        UnsupportedFormatError: if the path is a URL.
    """
    match = _URL.match(os.fspath(path))
    if match is None:
        return _without_dots(path)
    finding = Finding(
        f"URLs of scheme {match[1]!r} are not supported",
        expected="a folder of a mounted file system",
        found=os.fspath(path),
        remedy="Save to a local or a shared disk and copy the folder, or mount the object store. "
        "A local folder of this name is reached by its absolute path.",
    )
    raise UnsupportedFormatError("not a local path", [finding])


def check_one_destination(destinations: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks save into the same folder, in the same format.

    Args:
        destinations: absolute path and format of each rank, in rank order.

    Raises:
        CheckpointingException: if they differ.
    """
    ranks: dict[str, list[int]] = {}
    formats: dict[str, list[int]] = {}
    for rank, (name, saved_as) in enumerate(destinations):
        ranks.setdefault(os.path.normpath(name), []).append(rank)
        formats.setdefault(saved_as, []).append(rank)
    if len(formats) > 1:
        findings = [
            Finding(
                "this is the format on some ranks only",
                found=saved_as,
                ranks=tuple(of_format[:_MOST_NAMED]),
                remedy="Pass the same strategy on every rank.",
            )
            for saved_as, of_format in formats.items()
        ]
        raise CheckpointingException("the ranks save in different formats", findings)
    if len(ranks) < 2:
        return
    findings = [
        Finding(
            "this is the folder on some ranks only",
            path=name,
            ranks=tuple(of_name[:_MOST_NAMED]),
            remedy="Give every rank the same path; broadcast a name that holds the time or date.",
        )
        for name, of_name in ranks.items()
    ]
    raise CheckpointingException("the ranks name different folders for one checkpoint", findings)
