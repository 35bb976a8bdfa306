"""What a conversion changes: which keys it takes, their names, dtypes and cuts. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.geometry import Ints

_CUT = re.compile(r"\s*axis\s*=\s*(\d+)\s*,\s*parts\s*=\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class KeySubstitution:
    """Replaces what a pattern matches in a key."""

    pattern: re.Pattern[str]
    replacement: str

    def apply(self, key: str) -> str:
        """The key by its new name."""
        try:
            return self.pattern.sub(self.replacement, key)
        except (re.error, IndexError) as error:
            raise _bad("rename", f"{self.pattern.pattern}={self.replacement}", error) from error


@dataclass(frozen=True, slots=True)
class CastRule:
    """Converts the floating-point tensors whose key matches."""

    pattern: re.Pattern[str]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Reshard:
    """Cuts the tensors whose key matches: ``parts`` along each of ``axes``."""

    pattern: re.Pattern[str]
    axes: tuple[tuple[int, int], ...]

    def chunk_shape(self, shape: Ints) -> Ints | None:
        """Shape of the parts of a tensor; None if it lacks one of the axes.

        As ``torch.chunk`` cuts: all parts are alike but the last, and there may be fewer of them.
        """
        if any(axis >= len(shape) for axis, _ in self.axes):
            return None
        chunk = [max(extent, 1) for extent in shape]
        for axis, parts in self.axes:
            chunk[axis] = max(1, -(-shape[axis] // parts))
        return tuple(chunk)


@dataclass(frozen=True, slots=True)
class Rules:
    """All that a conversion changes; by default nothing.

    Attributes:
        include: A key is taken if one of these is found in it, or if there are none.
        exclude: A key is left if one of these is found in it.
        renames: Renames, applied one after the other.
        casts: Casts; the first whose pattern is found in the (old) key counts.
        reshards: Reshards; the first whose pattern is found counts.
        lossy: Whether a cast may change values.
        tensors_only: Leave out objects and common state.
    """

    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()
    renames: tuple[KeySubstitution, ...] = ()
    casts: tuple[CastRule, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    lossy: bool = False
    tensors_only: bool = False

    @classmethod
    def parse(
        cls,
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        rename: Iterable[str] = (),
        cast: Iterable[str] = (),
        reshard: Iterable[str] = (),
        lossy: bool = False,
        tensors_only: bool = False,
    ) -> Rules:
        """The rules as texts say them.

        Args:
            include: regular expressions, searched in keys.
            exclude: likewise.
            rename: ``REGEX=REPLACEMENT``; the last ``=`` is the one between them.
            cast: ``DTYPE`` or ``REGEX=DTYPE``.
            reshard: ``axis=0,parts=8`` or ``REGEX:axis=0,parts=8``; more axes follow after ``;``.
            lossy: whether a cast may change values.
            tensors_only: leave out objects and common state.

        Raises:
            CheckpointingException: for a text that says nothing.
        """
        return cls(
            tuple(_pattern("include", text) for text in include),
            tuple(_pattern("exclude", text) for text in exclude),
            tuple(map(_rename, rename)),
            tuple(map(_cast, cast)),
            tuple(map(_reshard, reshard)),
            lossy,
            tensors_only,
        )

    def takes(self, key: str) -> bool:
        """Whether a key is converted."""
        if self.include and not any(pattern.search(key) for pattern in self.include):
            return False
        return not any(pattern.search(key) for pattern in self.exclude)

    def new_name(self, key: str) -> str:
        """What a key is called afterwards."""
        for rename in self.renames:
            key = rename.apply(key)
        return key

    def new_dtype(self, key: str, dtype: DType) -> DType:
        """What dtype a tensor has afterwards."""
        if dtype.name in FLOATING:
            for cast in self.casts:
                if cast.pattern.search(key):
                    return cast.dtype
        return dtype

    def reshard_of(self, key: str) -> Reshard | None:
        """How a tensor is cut afterwards; None for as it is."""
        return next((rule for rule in self.reshards if rule.pattern.search(key)), None)


def _bad(what: str, text: str, error: object) -> CheckpointingException:
    return CheckpointingException(f"{what} {text!r}: {error}")


def _pattern(what: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise _bad(what, text, f"not a regular expression: {error}") from error


def _rename(text: str) -> KeySubstitution:
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise _bad("rename", text, "expected REGEX=REPLACEMENT")
    return KeySubstitution(_pattern("rename", pattern), replacement)


def _cast(text: str) -> CastRule:
    pattern, _, name = text.rpartition("=")
    try:
        dtype = from_name(name.removeprefix("torch."))
    except UnsupportedFormatError as error:
        raise _bad("cast", text, f"{name!r} is not one of {', '.join(sorted(FLOATING))}") from error
    if dtype.name not in FLOATING:
        finding = Finding("only floating-point tensors are cast", found=dtype.name)
        raise CheckpointingException(f"cast {text!r}: not to a floating-point dtype", [finding])
    return CastRule(_pattern("cast", pattern), dtype)


def _reshard(text: str) -> Reshard:
    pattern, _, cuts = text.rpartition(":")
    axes: dict[int, int] = {}
    for cut in cuts.split(";"):
        match = _CUT.fullmatch(cut)
        if match is None or int(match[2]) < 1 or int(match[1]) in axes:
            raise _bad("reshard", text, "expected [REGEX:]axis=0,parts=8[;axis=1,parts=2]")
        axes[int(match[1])] = int(match[2])
    return Reshard(_pattern("reshard", pattern), tuple(sorted(axes.items())))
