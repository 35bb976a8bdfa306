"""The rules of recipes: rename, drop, keep, cast, missing, resize, split, concat, transpose,
stack; those of ``dckpt convert`` too.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, get_args

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.planning.derived_tensors import DerivedTensor, Fill

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

    def __init__(self, problem: str, **details: object) -> None:
        super().__init__(problem)
        self.finding = Finding(problem, **details)  # type: ignore[arg-type]


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

    @contextmanager
    def noting(self, key: str | None = None) -> Iterator[None]:
        """Note what the body cannot do with a tensor."""
        try:
            yield
        except Misfit as misfit:
            self.findings.append(replace(misfit.finding, key=key))


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
            raise Misfit(f"{text!r} names what is not matched: {error}") from error

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
        change = Change()
        with change.noting():
            matched, names = self.new_names(tensors)
            change.taken, change.count = [*names], len(matched)
            change.made = [(new, tensors[old]) for old, new in names.items() if new is not None]
        return change


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
            with change.noting(key):
                change.made += self.made(Matched(tensors[key], key, match, wanted))
                change.taken.append(key)
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


@dataclass(frozen=True)
class Resize(EachRule):
    """Cuts an axis at its end, or fills it up, such as a vocabulary.

    Without ``size`` it gets the extent that it has in the template, where the tensor must have the
    name that it has here; without a template it stays as it is.

    Example:
        >>> from dist_checkpointing.planning import Resize
        >>> print(Resize("embedding.weight", axis=0, size=32128))
        resize 'embedding.weight', size=32128
    """

    name: ClassVar[str] = "resize"
    pattern: str
    axis: int = 0
    size: int | None = None
    fill: Fill = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_axis(self.axis)
        if self.fill not in get_args(Fill):
            raise self.invalid("fill must be 'zeros' or 'template'")
        if self.size is not None and not _is_count(self.size, 0):
            raise self.invalid("size must be a number of rows")

    def made(self, own: Matched) -> Made:
        tensor, axis, size = own.tensor, _axis(own.tensor, self.axis), self.size
        if size is None:
            shape, _ = (own.wanted or {}).get(own.key, (tensor.shape, None))
            if len(shape) != len(tensor.shape):
                raise Misfit("the number of axes differs", expected=shape, found=tensor.shape)
            size = shape[axis]
        extent = tensor.shape[axis]
        if size <= extent:
            return [(own.key, tensor.narrow(axis, 0, size))]
        shape = (*tensor.shape[:axis], size - extent, *tensor.shape[axis + 1 :])
        more = DerivedTensor.filled(shape, tensor.dtype, self.fill)
        return [(own.key, DerivedTensor.joined([tensor, more], axis))]


@dataclass(frozen=True)
class Split(EachRule):
    """Cuts a tensor along an axis into several.

    The parts are alike, or as large as ``sizes`` in proportion. With ``groups`` the axis consists
    of so many groups, each of which is cut: Megatron's query, key and value lie so.

    Example:
        >>> from dist_checkpointing.planning import Split
        >>> print(Split("{m*}.gate_up.weight", into=["{m}.gate.weight", "{m}.up.weight"]))
        split '{m*}.gate_up.weight', into=['{m}.gate.weight', '{m}.up.weight']
    """

    name: ClassVar[str] = "split"
    pattern: str
    into: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_axis(self.axis)
        self.require_list("into", self.into)
        sizes = _sizes(self)
        self.require_list("sizes", sizes)
        if not self.into or len(sizes) != len(self.into):
            raise self.invalid("into must be a list of names, and sizes as many numbers")
        self.require_texts(*self.into)
        if not all(_is_count(size, 1) for size in (*sizes, self.groups)):
            raise self.invalid("sizes and groups must be positive numbers")

    def made(self, own: Matched) -> Made:
        tensor, axis, sizes = own.tensor, _axis(own.tensor, self.axis), _sizes(self)
        unit, rest = divmod(tensor.shape[axis], self.groups * sum(sizes))
        if rest:
            raise Misfit(
                f"axis {axis} cannot be cut like that",
                expected=f"a multiple of {self.groups * sum(sizes)}",
                found=tensor.shape[axis],
            )
        rows = tensor.cut(axis, [unit * size for size in sizes] * self.groups)
        names = [self.expanded(own.match, name) for name in self.into]
        return [
            (name, DerivedTensor.joined(rows[number :: len(sizes)], axis))
            for number, name in enumerate(names)
        ]


@dataclass(frozen=True)
class Concat(Rule):
    """Joins tensors along an axis, in the order of the patterns.

    Those belong together whose new name is the same. With ``groups`` each is cut into so many
    groups, and the new tensor has the first group of all, then the second of all, and so on.

    Example:
        >>> from dist_checkpointing.planning import Concat
        >>> print(Concat(["{m*}.q.weight", "{m*}.k.weight"], into="{m}.qk.weight"))
        concat ['{m*}.q.weight', '{m*}.k.weight'], into='{m}.qk.weight'
    """

    name: ClassVar[str] = "concat"
    patterns: Sequence[str]
    into: str
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        self.require_axis(self.axis)
        self.require_list("the patterns", self.patterns)
        if len(self.patterns) < 2:
            raise self.invalid("it needs a list of two patterns or more")
        if not _is_count(self.groups, 1):
            raise self.invalid("groups must be a positive number")
        for pattern in self.patterns:
            self.compiled(pattern)
        self.require_texts(self.into)

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:  # noqa: ARG002
        parts: dict[str, dict[int, str]] = {}
        change = Change()
        for key, match, number in self.matches(tensors, *self.patterns):
            with change.noting(key):
                found = parts.setdefault(self.expanded(match, self.into), {})
                change.taken.append(key)
                if found.setdefault(number, key) != key:
                    problem = f"several tensors match {self.patterns[number]!r} for this name"
                    both = f"{found[number]}, {key}"
                    change.findings.append(Finding(problem, self.into, found=both))
        for name, found in parts.items():
            with change.noting(name):
                change.made.append((name, self._joined(tensors, found)))
        change.count = len(change.taken)
        return change

    def _joined(self, tensors: Tensors, found: Mapping[int, str]) -> DerivedTensor:
        missing = [repr(p) for number, p in enumerate(self.patterns) if number not in found]
        if missing:
            problem = f"nothing matches {', '.join(missing)}"
            raise Misfit(problem, found=f"only {', '.join(found.values())}")
        parts = [tensors[found[number]] for number in range(len(self.patterns))]
        axis = _axis(parts[0], self.axis)
        _require_alike(parts, axis)
        rows = []
        for number, part in enumerate(parts):
            extent, rest = divmod(part.shape[axis], self.groups)
            if rest:
                problem = (
                    f"axis {axis} of {found[number]!r} cannot be cut into {self.groups} groups"
                )
                raise Misfit(problem, found=part.shape)
            rows.append(part.cut(axis, [extent] * self.groups))
        return DerivedTensor.joined(
            [part for group in zip(*rows, strict=True) for part in group], axis
        )


@dataclass(frozen=True)
class Transpose(EachRule):
    """Puts the axes of tensors in another order; without ``axes`` it turns them round.

    Example:
        >>> from dist_checkpointing.planning import Transpose
        >>> print(Transpose("{m*}.kernel"))
        transpose '{m*}.kernel'
    """

    name: ClassVar[str] = "transpose"
    pattern: str
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes is not None:
            self.require_list("axes", self.axes)
            if not all(_is_count(axis, 0) for axis in self.axes):
                raise self.invalid("axes must be a list of axes, counted from 0")

    def made(self, own: Matched) -> Made:
        every = range(len(own.tensor.shape))
        order = [*reversed(every)] if self.axes is None else [*self.axes]
        if sorted(order) != [*every]:
            raise Misfit("axes must name each axis once", expected=[*every], found=order)
        return [(own.key, own.tensor.permuted(order))]


@dataclass(frozen=True)
class Stack(EachRule):
    """Puts the tensors of all layers into one, along a new first axis; ``{i}`` is the layer.

    Example:
        >>> from dist_checkpointing.planning import Stack
        >>> print(Stack("layers.{i}.{x*}", into="layers.{x}"))
        stack 'layers.{i}.{x*}', into='layers.{x}'
    """

    name: ClassVar[str] = "stack"
    pattern: str
    into: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_texts(self.into)
        if NUMBER not in self.compiled(self.pattern).groupindex:
            raise self.invalid("the pattern needs {i}, which stands for the number of the layer")

    def made(self, own: Matched) -> Made:
        return [(self.expanded(own.match, self.into), own.tensor.with_axis())]

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:
        change = super().change(tensors, wanted)
        layers: dict[str, dict[int, DerivedTensor]] = {}
        numbers = (int(match[NUMBER]) for _, match, _ in self.matches(change.taken, self.pattern))
        for (name, tensor), number in zip(change.made, numbers, strict=True):
            if layers.setdefault(name, {}).setdefault(number, tensor) is not tensor:
                change.findings.append(Finding(f"layer {number} is there twice", name))
        change.made = []
        for name, found in layers.items():
            missing = sorted({*range(max(found) + 1)} - found.keys())
            if missing:
                listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                problem = f"layers are missing: {listed}"
                change.findings.append(Finding(problem, name, found=f"{len(found)} layers"))
                continue
            with change.noting(name):
                rows = [found[number] for number in range(len(found))]
                _require_alike(rows, 0)
                change.made.append((name, DerivedTensor.joined(rows, 0)))
        return change


@dataclass(frozen=True)
class Unstack(EachRule):
    """Makes a tensor of each row of the first axis; ``{i}`` in the new name is its number.

    Example:
        >>> from dist_checkpointing.planning import Unstack
        >>> print(Unstack("layers.{x*}", into="layers.{i}.{x}"))
        unstack 'layers.{x*}', into='layers.{i}.{x}'
    """

    name: ClassVar[str] = "unstack"
    pattern: str
    into: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_texts(self.into)
        if NUMBER in self.compiled(self.pattern).groupindex or f"{{{NUMBER}}}" not in self.into:
            raise self.invalid(
                "the new name needs {i} for the number of the row; the pattern has none"
            )

    def made(self, own: Matched) -> Made:
        _axis(own.tensor, 0)
        # Expanded part by part, as what is matched may hold {i} itself.
        parts = [self.expanded(own.match, text) for text in self.into.split(f"{{{NUMBER}}}")]
        return [
            (str(number).join(parts), own.tensor.narrow(0, number, 1).without_axis())
            for number in range(own.tensor.shape[0])
        ]


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _sizes(rule: Split) -> Sequence[int]:
    return [1] * len(rule.into) if rule.sizes is None else rule.sizes


def _axis(tensor: DerivedTensor, axis: int) -> int:
    ndim = len(tensor.shape)
    if not (type(axis) is int and -ndim <= axis < ndim):
        raise Misfit(f"it has no axis {axis}", found=tensor.shape)
    return axis % ndim


def _require_alike(tensors: Sequence[DerivedTensor], axis: int) -> None:
    """Refuse to join what differs in more than the extent along the axis."""
    kinds = {(t.dtype.name, *t.shape[:axis], "*", *t.shape[axis + 1 :]) for t in tensors}
    if len(kinds) > 1:
        found = ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in tensors[:4])
        problem = "the tensors to join differ in dtype or shape"
        raise Misfit(problem, found=found, remedy="Cast or resize them before.")
