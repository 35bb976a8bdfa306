"""The rules of a recipe: each makes tensors of other tensors, known by patterns of their keys."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, get_args

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.planning.derived import DerivedTensor, Fill

Tensors = Mapping[str, DerivedTensor]
Wanted = Mapping[str, tuple[Ints, DType]]
"""Global shape and dtype of the tensors of a template, by key."""

Made = list[tuple[str, DerivedTensor]]
"""New tensors with their keys."""

_SPECIAL = frozenset(r"\[](){}*+?^$|")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
NUMBER = "i"
"""Name of the placeholder that stands for a number."""


class Misfit(Exception):
    """What a rule cannot do with the tensors that it matches."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(slots=True)
class Change:
    """What a rule does to the tensors of a checkpoint.

    Attributes:
        taken: Keys of the tensors that are no longer there.
        made: Tensors that it makes of them, by key.
        findings: What it cannot do.
        count: Number of tensors that it matches.
    """

    taken: list[str] = field(default_factory=list)
    made: Made = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    count: int = 0


class Rule(ABC):
    r"""One step of a recipe. A pattern must match the whole key.

    A pattern is a key (if dots are its only special characters), or a regular expression. In both,
    ``{i}`` stands for a number, any other ``{name}`` for a text without a dot, and ``{name*}`` for
    any text. New names take them as ``{i}`` and ``{name}``, and groups of a regular expression as
    ``\g<name>``, or ``\1`` (placeholders count too).
    """

    name: ClassVar[str]

    @abstractmethod
    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:
        """What the rule does to the tensors; ``wanted`` is None if there is no template."""

    def __str__(self) -> str:
        first, *others = fields(self)  # type: ignore[arg-type]
        given = [(own.name, getattr(self, own.name), own.default) for own in others]
        texts = [f"{key}={value!r}" for key, value, default in given if value != default]
        return ", ".join([f"{self.name} {getattr(self, first.name)!r}", *texts])

    def invalid(self, problem: str) -> CheckpointingException:
        return CheckpointingException(f"the rule `{self}` is invalid", [Finding(problem)])

    def require_texts(self, *values: object) -> None:
        for value in values:
            if not (isinstance(value, str) and value):
                raise self.invalid(f"a pattern or a name must be a text, not {value!r}")

    def require_list(self, what: str, values: object) -> None:
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise self.invalid(f"{what} must be a list, not {values!r}")

    def require_axis(self, axis: object) -> None:
        if type(axis) is not int:
            raise self.invalid(f"axis must be a whole number, not {axis!r}")

    def compiled(self, text: str) -> re.Pattern[str]:
        self.require_texts(text)
        is_exact = not _SPECIAL.intersection(_PLACEHOLDER.sub("", text))
        expression, begin, seen = "", 0, set[str]()
        for found in (*_PLACEHOLDER.finditer(text), None):
            plain = text[begin : found.start() if found else None]
            expression += re.escape(plain) if is_exact else plain
            if found is not None:
                name, begin = found[1], found.end()
                kind = "[0-9]+" if name == NUMBER else ".+" if found[2] else "[^.]+"
                expression += f"(?P={name})" if name in seen else f"(?P<{name}>{kind})"
                seen.add(name)
        try:
            return re.compile(expression)
        except re.error as error:
            raise self.invalid(f"{text!r} is not a regular expression: {error}") from error

    def expanded(self, match: re.Match[str], text: str) -> str:
        try:
            return match.expand(_PLACEHOLDER.sub(r"\\g<\1>", text))
        except (re.error, IndexError) as error:
            raise Misfit(Finding(f"{text!r} names what is not matched: {error}")) from error

    def matches(
        self, tensors: Iterable[str], *patterns: str
    ) -> Iterator[tuple[str, re.Match[str], int]]:
        """Each key that a pattern matches, and the position of the first that does."""
        compiled = [self.compiled(pattern) for pattern in patterns]
        for key in tensors:
            for place, pattern in enumerate(compiled):
                match = pattern.fullmatch(key)
                if match is not None:
                    yield key, match, place
                    break


class NameRule(Rule):
    """A rule that only changes names. It is applied to sharded objects too."""

    @abstractmethod
    def new_names(self, keys: Iterable[str]) -> tuple[list[str], dict[str, str | None]]:
        """The keys that it matches, and the new names of those that it changes; None drops one."""

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:  # noqa: ARG002
        try:
            matched, names = self.new_names(tensors)
        except Misfit as misfit:
            return Change(findings=[misfit.finding])
        made = [(new, tensors[old]) for old, new in names.items() if new is not None]
        return Change([*names], made, count=len(matched))


@dataclass(frozen=True, slots=True)
class Matched:
    """A tensor whose key a rule matches.

    Attributes:
        tensor: The tensor.
        key: Its key.
        match: Match of the pattern.
        wanted: What the template wants; None if there is no template.
    """

    tensor: DerivedTensor
    key: str
    match: re.Match[str]
    wanted: Wanted | None


class EachRule(Rule):
    """A rule that makes tensors of one tensor at a time."""

    pattern: str

    def __post_init__(self) -> None:
        self.compiled(self.pattern)

    @abstractmethod
    def made(self, own: Matched) -> Made:
        """What it makes of a tensor."""

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:
        change = Change()
        for key, match, _ in self.matches(tensors, self.pattern):
            try:
                made = self.made(Matched(tensors[key], key, match, wanted))
            except Misfit as misfit:
                change.findings.append(replace(misfit.finding, key=key))
                continue
            change.taken.append(key)
            change.made += made
        change.count = len(change.taken)
        return change


@dataclass(frozen=True)
class Rename(NameRule):
    """Gives tensors and sharded objects another name.

    Example:
        >>> from dist_checkpointing.planning import Rename
        >>> print(Rename("model.layers.{i}.{x*}", to="blocks.{i}.{x}"))
        rename 'model.layers.{i}.{x*}', to='blocks.{i}.{x}'
    """

    name: ClassVar[str] = "rename"
    pattern: str
    to: str

    def __post_init__(self) -> None:
        self.compiled(self.pattern)
        self.require_texts(self.to)

    def new_names(self, keys: Iterable[str]) -> tuple[list[str], dict[str, str | None]]:
        found = self.matches(keys, self.pattern)
        names: dict[str, str | None] = {key: self.expanded(own, self.to) for key, own, _ in found}
        return [*names], names


@dataclass(frozen=True)
class Drop(NameRule):
    """Leaves out the tensors and sharded objects that any of its patterns matches.

    Example:
        >>> from dist_checkpointing.planning import Drop
        >>> print(Drop(["lm_head.weight", "{x*}.inv_freq"]))
        drop ['lm_head.weight', '{x*}.inv_freq']
    """

    name: ClassVar[str] = "drop"
    patterns: str | Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, str):
            self.require_list("the patterns", self.patterns)
        for pattern in _texts(self.patterns):
            self.compiled(pattern)

    def new_names(self, keys: Iterable[str]) -> tuple[list[str], dict[str, str | None]]:
        matched = [key for key, *_ in self.matches(keys, *_texts(self.patterns))]
        return matched, dict.fromkeys(matched)


@dataclass(frozen=True)
class Keep(Drop):
    """Leaves out all tensors and sharded objects that none of its patterns matches.

    Example:
        >>> from dist_checkpointing.planning import Keep
        >>> print(Keep("model.{x*}"))
        keep 'model.{x*}'
    """

    name: ClassVar[str] = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patterns:
            raise self.invalid("it keeps nothing")

    def new_names(self, keys: Iterable[str]) -> tuple[list[str], dict[str, str | None]]:
        every = list(keys)
        matched, _ = super().new_names(every)
        kept = set(matched)
        return matched, dict.fromkeys(key for key in every if key not in kept)


@dataclass(frozen=True)
class CastTo(EachRule):
    """Gives floating-point tensors another dtype. Values are converted once, as they are read.

    Example:
        >>> from dist_checkpointing.planning import CastTo
        >>> print(CastTo("model.{x*}", "float32"))
        cast 'model.{x*}', dtype='float32'
    """

    name: ClassVar[str] = "cast"
    pattern: str
    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._dtype is None:
            raise self.invalid(f"{self.dtype!r} is not one of {', '.join(sorted(FLOATING))}")

    @property
    def _dtype(self) -> DType | None:
        name = str(self.dtype).removeprefix("torch.")
        try:
            return from_name(name) if name in FLOATING else None
        except UnsupportedFormatError:
            return None

    def made(self, own: Matched) -> Made:
        assert self._dtype is not None
        is_floating = own.tensor.dtype.name in FLOATING
        return [(own.key, replace(own.tensor, dtype=self._dtype) if is_floating else own.tensor)]


@dataclass(frozen=True)
class Missing(Rule):
    """What the tensors get that the template wants and that are not there at the end.

    ``"template"`` leaves them as they are in the template, ``"error"`` refuses. The first rule that
    matches counts; without one it is an error.

    Example:
        >>> from dist_checkpointing.planning import Missing
        >>> print(Missing("adapter.{x*}", fill="template"))
        missing 'adapter.{x*}', fill='template'
    """

    name: ClassVar[str] = "missing"
    pattern: str
    fill: Fill | Literal["error"] = "zeros"

    def __post_init__(self) -> None:
        self.compiled(self.pattern)
        if self.fill not in (*get_args(Fill), "error"):
            raise self.invalid("fill must be 'zeros', 'template' or 'error'")

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:  # noqa: ARG002
        return Change()

    def applies_to(self, key: str) -> bool:
        """Whether it says what a key gets."""
        return self.compiled(self.pattern).fullmatch(key) is not None


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
