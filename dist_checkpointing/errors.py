"""The tree of exceptions, findings in them, and words that messages share: "did you mean".

::

    CheckpointingException
    ├── InvalidShardingError (ValueError)        the state dict is wrapped wrongly: fix the call
    ├── StateMismatchError                       template and checkpoint differ: fix the template
    ├── CheckpointNotFoundError (FileNotFoundError)   nothing is committed here
    ├── CheckpointExistsError (FileExistsError)  something is here already: nothing was touched
    ├── CorruptCheckpointError                   committed, but damaged: restore it or use another
    ├── UnsupportedFormatError                   valid, but this library cannot read or write it
    ├── StrategyNotFoundError (LookupError)      unknown backend or version
    └── RankFailedError                          an I/O error, a bug or a dead process on some rank

Every error has ``findings``: everything that is wrong, where, on which ranks and what to do.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

_MAX_PRINTED_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        problem: The problem, as a clause.
        key: Key of the tensor or object.
        expected: The expected value.
        found: The value found instead.
        ranks: The ranks that have the problem.
        path: Path of the file or folder.
        remedy: What the user can do about it, as sentences.
    """

    problem: str
    key: str | None = None
    expected: object = None
    found: object = None
    ranks: tuple[int, ...] = ()
    path: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.key!r}: {self.problem}" if self.key is not None else self.problem]
        values = {"expected": self.expected, "found": self.found, "file": self.path}
        parts += [f"{name} {value}" for name, value in values.items() if value is not None]
        if self.ranks:
            parts.append(ranks_text(self.ranks, len(self.ranks)))
        text = "; ".join(parts)
        if self.remedy is None:
            return text
        return f"{text}{'' if text.endswith('?') else '.'} {self.remedy}"


def ranks_text(ranks: Sequence[int], most: int) -> str:
    """``rank 0``, or ``ranks 0, 1 and 6 more`` where more than ``most`` would be named."""
    named = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


class CheckpointingException(Exception):
    """Root of all errors that this library raises on purpose.

    Args:
        message: what failed, as one sentence.
        findings: everything that is wrong; printed below the message.

    Attributes:
        names_global_ranks: Whether the ranks in the findings are ranks in the world, and not in the
            group that raised the error.

    Example:
        >>> from dist_checkpointing import CheckpointingException
        >>> try:
        ...     load({}, "ckpt/1000")
        ... except CheckpointingException as error:
        ...     print(type(error).__name__, error.findings[0].path)
        CheckpointNotFoundError ...ckpt/1000
    """

    names_global_ranks: bool = False

    def __init__(self, message: str = "", findings: Iterable[Finding] = ()) -> None:
        self.message = message
        self.findings: tuple[Finding, ...] = tuple(findings)
        # Some subclasses are OSErrors too, which take a second argument for the text of an errno.
        super().__init__(message)
        self.args: tuple[Any, ...] = (message, self.findings)

    @classmethod
    def raise_if(cls, findings: Collection[Finding], message: str) -> None:
        """Raise this error if there are findings."""
        if findings:
            raise cls(message, findings)

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  - {finding}" for finding in self.findings[:_MAX_PRINTED_FINDINGS]]
        hidden = len(self.findings) - _MAX_PRINTED_FINDINGS
        if hidden > 0:
            lines.append(f"  - and {hidden} more (see the error's .findings)")
        return "\n".join(lines)


class InvalidShardingError(CheckpointingException, ValueError):
    """The sharded state dict is wrong in itself: shapes, offsets, gaps, overlaps, names."""


class StateMismatchError(CheckpointingException):
    """The template asks for something else than the checkpoint holds."""


class CheckpointNotFoundError(CheckpointingException, FileNotFoundError):
    """The given folder holds no committed checkpoint."""


class CheckpointExistsError(CheckpointingException, FileExistsError):
    """The folder is taken: by a committed checkpoint, a save in progress or files of others."""


class CorruptCheckpointError(CheckpointingException):
    """A committed checkpoint is damaged: something is missing, or contradicts its own records."""


class UnsupportedFormatError(CheckpointingException):
    """A format, codec, dtype or pickled class that this library does not handle."""


class StrategyNotFoundError(CheckpointingException, LookupError):
    """No strategy is registered for an (action, backend, version)."""


class RankFailedError(CheckpointingException):
    """A step failed on some ranks; every rank raises the same error.

    Args:
        message: the step that failed.
        findings: one finding for each failed rank.
        tracebacks: the traceback of each rank that sent one, as text.
    """

    def __init__(
        self,
        message: str = "",
        findings: Iterable[Finding] = (),
        tracebacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, findings)
        self.tracebacks: dict[int, str] = dict(tracebacks or {})
        self.args: tuple[Any, ...] = (message, self.findings, self.tracebacks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that failed."""
        return tuple(sorted({rank for finding in self.findings for rank in finding.ranks}))

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The failed ranks that sent no error: they are dead, hung, or still at work."""
        return tuple(rank for rank in self.ranks if rank not in self.tracebacks)

    def __str__(self) -> str:
        text = super().__str__()
        for rank, traceback in sorted(self.tracebacks.items())[:3]:
            text += f"\n\nTraceback on rank {rank}:\n{traceback.rstrip()}"
        return text


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, where those that differ only in their ranks become one."""
    equal: dict[str, list[Finding]] = {}
    for finding in findings:
        # By text: ``expected`` and ``found`` may be lists, which have no hash.
        equal.setdefault(repr(replace(finding, ranks=())), []).append(finding)
    return tuple(
        replace(same[0], ranks=tuple(sorted({rank for f in same for rank in f.ranks})))
        for same in equal.values()
    )


_MOST_COMPARED = 500


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that are most like ``name``, best first; none if none is like it."""
    names = list(known)
    if len(names) > _MOST_COMPARED:
        # difflib takes seconds for 100,000 names: first those that begin or end alike.
        names = heapq.nsmallest(_MOST_COMPARED, names, key=lambda other: _distance(name, other))
    folded: dict[str, str] = {}
    for other in names:
        folded.setdefault(other.casefold(), other)
    wanted = name.casefold()
    near = difflib.get_close_matches(wanted, folded, n=count, cutoff=0.6)
    inside = sorted((other for other in folded if wanted and wanted in other), key=len)
    chosen = list(dict.fromkeys([*near, *inside]))[:count]
    return [folded[other] for other in chosen]


def counted(number: int, word: str) -> str:
    """``1 tensor``, ``1,234 tensors``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def hint(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or nothing if there is nothing like it."""
    near = near_names(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _distance(name: str, other: str) -> int:
    if name in other:
        return len(other) - len(name) - 1000
    pairs = (name, other), (name[::-1], other[::-1])
    same = sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 - of characters
    return abs(len(other) - len(name)) - 2 * same
