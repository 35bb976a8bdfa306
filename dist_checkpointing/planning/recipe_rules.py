"""The rules of recipes: rename, drop, keep, cast, missing, resize, split, concat, transpose,
stack; those of ``dckpt convert`` too.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.dtypes import FLOATING, DType, from_name
from dist_checkpointing.format.file_names import NUMBER, PLACEHOLDER, key_pattern
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.planning.derived_tensors import DerivedTensor, Fill, with_extent

Tensors = Mapping[str, DerivedTensor]

Wanted = Mapping[str, tuple[Ints, DType]]
"""Global shape and dtype of the tensors of a template, by key."""

Made = list[tuple[str, Any]]
"""New tensors, or stored keys of sharded objects, with their keys."""

RULES: dict[str, Callable[..., Rule]] = {}
"""The rules by the names that they have in files."""


class Misfit(Exception):
    """What a rule cannot do with the tensors that it matches."""

    def __init__(self, problem: str, **details: Any) -> None:
        super().__init__(problem)
        self.finding: Finding = Finding(problem, **details)


@dataclass(slots=True)
class Change:
    """What a rule does to the tensors of a checkpoint.

    ``made`` takes the place of the tensors ``taken``; ``count`` is the number of those that the
    rule matches.
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
    r"""One step of a recipe. A pattern, see ``key_pattern``, must match the whole key.

    New names take its placeholders as ``{i}`` and ``{name}``, and groups of a regular expression as
    ``\g<name>``, or ``\1`` (placeholders count too).
    """

    name: ClassVar[str]
    is_for_names: ClassVar[bool] = False
    """Whether it changes nothing but names. It is applied to sharded objects too."""

    def __init_subclass__(cls, name: str = "") -> None:
        if name:
            cls.name = name
            RULES[name] = cls

    def __post_init__(self) -> None:
        for own in fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, own.name), str(own.type)
            if value is None and kind.endswith("None"):
                continue
            texts = texts_of(value)
            if "Sequence" in kind and not (isinstance(value, str) and kind.startswith("str")):
                what = "the patterns" if own.name == "patterns" else own.name
                self.require(texts is value, f"{what} must be a list, not {value!r}")
            is_axis = own.name != "axis" or type(value) is int
            self.require(is_axis, f"axis must be a whole number, not {value!r}")
            for text in texts if "str" in kind and own.name != "dtype" else ():
                problem = f"a pattern or a name must be a text, not {text!r}"
                self.require(isinstance(text, str) and text, problem)
                if own.name.startswith("pattern"):
                    self.compiled(text)
        self.check()

    def check(self) -> None:  # noqa: B027 - most rules need no more than patterns
        """Refuse values that do not fit each other, by ``require``."""

    @abstractmethod
    def change(self, tensors: Mapping[str, Any], wanted: Wanted | None) -> Change:
        """What the rule does to the tensors; ``wanted`` is None if there is no template."""

    def __str__(self) -> str:
        first, *others = fields(self)  # type: ignore[arg-type]
        given = [(own.name, getattr(self, own.name), own.default) for own in others]
        texts = [f"{key}={value!r}" for key, value, default in given if value != default]
        return ", ".join([f"{self.name} {getattr(self, first.name)!r}", *texts])

    def require(self, is_valid: object, problem: str) -> None:
        if not is_valid:
            raise CheckpointingException(f"the rule `{self}` is invalid", [Finding(problem)])

    def compiled(self, text: str) -> re.Pattern[str]:
        try:
            return key_pattern(text)
        except ValueError as error:
            self.require(False, str(error))
            raise

    def expanded(self, match: re.Match[str], text: str) -> str:
        try:
            return match.expand(PLACEHOLDER.sub(r"\\g<\1>", text))
        except (re.error, IndexError) as error:
            raise Misfit(f"{text!r} names what is not matched: {error}") from error

    def matches(self, keys: Iterable[str]) -> Iterator[tuple[str, re.Match[str], int]]:
        """Each key that a pattern matches, and the position of the first that does."""
        patterns = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        compiled = [self.compiled(pattern) for pattern in texts_of(patterns)]
        for key in keys:
            for number, pattern in enumerate(compiled):
                match = pattern.fullmatch(key)
                if match is not None:
                    yield key, match, number
                    break


class Matched(NamedTuple):
    """A tensor whose key a rule matches, and what a template wants, if there is one.

    For the name of a sharded object ``tensor`` is the stored key.
    """

    key: str
    tensor: Any
    match: re.Match[str]
    wanted: Wanted | None


class EachRule(Rule):
    """A rule that makes tensors of one tensor at a time."""

    @abstractmethod
    def made(self, own: Matched) -> Made:
        """What it makes of a tensor."""

    def change(self, tensors: Mapping[str, Any], wanted: Wanted | None) -> Change:
        change = Change()
        for key, match, _ in self.matches(tensors):
            with change.noting(None if self.is_for_names else key):
                change.made += self.made(Matched(key, tensors[key], match, wanted))
                change.taken.append(key)
        change.count = len(change.taken)
        if self.is_for_names:  # what is wrong with one new name is wrong with all
            del change.findings[1:]
        return change


class JoinRule(Rule):
    """A rule that joins tensors into one: those whose new names are the same.

    ``matches`` gives the number of the part of the new tensor that each is.
    """

    into: str

    @abstractmethod
    def repeated(self, number: int) -> str:
        """What to say of two tensors that are the same part."""

    @abstractmethod
    def joined(self, parts: Mapping[int, DerivedTensor], keys: Mapping[int, str]) -> DerivedTensor:
        """The new tensor, of parts by their numbers."""

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:  # noqa: ARG002
        change = Change()
        keys: dict[str, dict[int, str]] = {}
        for key, match, number in self.matches(tensors):
            with change.noting(key):
                name = self.expanded(match, self.into)
                found = keys.setdefault(name, {})
                change.taken.append(key)
                if found.setdefault(number, key) != key:
                    both = f"{found[number]}, {key}"
                    change.findings.append(Finding(self.repeated(number), name, found=both))
        for name, found in keys.items():
            with change.noting(name):
                parts = {number: tensors[key] for number, key in found.items()}
                change.made.append((name, self.joined(parts, found)))
        change.count = len(change.taken)
        return change


@dataclass(frozen=True)
class Rename(EachRule, name="rename"):
    """Gives tensors and sharded objects another name.

    Example:
        >>> from dist_checkpointing.planning import Rename
        >>> print(Rename("model.layers.{i}.{x*}", to="blocks.{i}.{x}"))
        rename 'model.layers.{i}.{x*}', to='blocks.{i}.{x}'
    """

    is_for_names = True
    pattern: str
    to: str

    def made(self, own: Matched) -> Made:
        return [(self.expanded(own.match, self.to), own.tensor)]


@dataclass(frozen=True)
class Drop(EachRule, name="drop"):
    """Leaves out the tensors and sharded objects that any of its patterns matches.

    Example:
        >>> from dist_checkpointing.planning import Drop
        >>> print(Drop(["lm_head.weight", "{x*}.inv_freq"]))
        drop ['lm_head.weight', '{x*}.inv_freq']
    """

    is_for_names = True
    patterns: str | Sequence[str]

    def made(self, own: Matched) -> Made:  # noqa: ARG002
        return []


@dataclass(frozen=True)
class Keep(Drop, name="keep"):
    """Leaves out all tensors and sharded objects that none of its patterns matches.

    Example:
        >>> from dist_checkpointing.planning import Keep
        >>> print(Keep("model.{x*}"))
        keep 'model.{x*}'
    """

    def check(self) -> None:
        self.require(self.patterns, "it keeps nothing")

    def change(self, tensors: Mapping[str, Any], wanted: Wanted | None) -> Change:  # noqa: ARG002
        kept = {key for key, *_ in self.matches(tensors)}
        return Change([key for key in tensors if key not in kept], count=len(kept))


@dataclass(frozen=True)
class CastTo(EachRule, name="cast"):
    """Gives floating-point tensors another dtype. Values are converted once, as they are read.

    Example:
        >>> from dist_checkpointing.planning import CastTo
        >>> print(CastTo("model.{x*}", "float32"))
        cast 'model.{x*}', dtype='float32'
    """

    pattern: str
    dtype: str

    def check(self) -> None:
        known = ", ".join(sorted(FLOATING))
        self.require(self._dtype_name in FLOATING, f"{self.dtype!r} is not one of {known}")

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def made(self, own: Matched) -> Made:
        if own.tensor.dtype.name not in FLOATING:
            return [(own.key, own.tensor)]
        return [(own.key, replace(own.tensor, dtype=from_name(self._dtype_name)))]


@dataclass(frozen=True)
class Missing(Rule, name="missing"):
    """What the tensors get that the template wants and that are not there at the end.

    ``"template"`` leaves them as they are in the template, ``"error"`` refuses. The first rule that
    matches counts; without one it is an error.

    Example:
        >>> from dist_checkpointing.planning import Missing
        >>> print(Missing("adapter.{x*}", fill="template"))
        missing 'adapter.{x*}', fill='template'
    """

    pattern: str
    fill: Fill | Literal["error"] = "zeros"

    def check(self) -> None:
        problem = "fill must be 'zeros', 'template' or 'error'"
        self.require(self.fill in (*get_args(Fill), "error"), problem)

    def change(self, tensors: Tensors, wanted: Wanted | None) -> Change:  # noqa: ARG002
        return Change()


def texts_of(value: Any) -> Sequence[Any]:
    """The patterns of a rule, which may be one text."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


@dataclass(frozen=True)
class Resize(EachRule, name="resize"):
    """Cuts an axis at its end, or fills it up, such as a vocabulary.

    Without ``size`` it gets the extent that it has in the template, where the tensor must have the
    name that it has here; without a template it stays as it is.

    Example:
        >>> from dist_checkpointing.planning import Resize
        >>> print(Resize("embedding.weight", axis=0, size=32128))
        resize 'embedding.weight', size=32128
    """

    pattern: str
    axis: int = 0
    size: int | None = None
    fill: Fill = "zeros"

    def check(self) -> None:
        self.require(self.fill in get_args(Fill), "fill must be 'zeros' or 'template'")
        self.require(self.size is None or are_counts(0, self.size), "size must be a number of rows")

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
        shape = with_extent(tensor.shape, axis, size - extent)
        more = DerivedTensor.filled(shape, tensor.dtype, self.fill)
        return [(own.key, DerivedTensor.joined([tensor, more], axis))]


@dataclass(frozen=True)
class Split(EachRule, name="split"):
    """Cuts a tensor along an axis into several.

    The parts are alike, or as large as ``sizes`` in proportion. With ``groups`` the axis consists
    of so many groups, each of which is cut: Megatron's query, key and value lie so.

    Example:
        >>> from dist_checkpointing.planning import Split
        >>> print(Split("{m*}.gate_up.weight", into=["{m}.gate.weight", "{m}.up.weight"]))
        split '{m*}.gate_up.weight', into=['{m}.gate.weight', '{m}.up.weight']
    """

    pattern: str
    into: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None
    groups: int = 1

    def check(self) -> None:
        sizes = self._sizes
        problem = "into must be a list of names, and sizes as many numbers"
        self.require(self.into and len(sizes) == len(self.into), problem)
        are_positive = are_counts(1, *sizes, self.groups)
        self.require(are_positive, "sizes and groups must be positive numbers")

    @property
    def _sizes(self) -> Sequence[int]:
        return [1] * len(self.into) if self.sizes is None else self.sizes

    def made(self, own: Matched) -> Made:
        tensor, axis, sizes = own.tensor, _axis(own.tensor, self.axis), self._sizes
        unit, rest = divmod(tensor.shape[axis], self.groups * sum(sizes))
        if rest:
            raise Misfit(
                f"axis {axis} cannot be split like that",
                expected=f"a multiple of {self.groups * sum(sizes)}",
                found=tensor.shape[axis],
            )
        rows = tensor.cut(axis, [unit * size for size in sizes] * self.groups)
        return [
            (self.expanded(own.match, name), DerivedTensor.joined(rows[part :: len(sizes)], axis))
            for part, name in enumerate(self.into)
        ]


@dataclass(frozen=True)
class Concat(JoinRule, name="concat"):
    """Joins tensors along an axis, in the order of the patterns.

    Those belong together whose new name is the same. With ``groups`` each is cut into so many
    groups, and the new tensor has the first group of all, then the second of all, and so on.

    Example:
        >>> from dist_checkpointing.planning import Concat
        >>> print(Concat(["{m*}.q.weight", "{m*}.k.weight"], into="{m}.qk.weight"))
        concat ['{m*}.q.weight', '{m*}.k.weight'], into='{m}.qk.weight'
    """

    patterns: Sequence[str]
    into: str
    axis: int = 0
    groups: int = 1

    def check(self) -> None:
        self.require(len(self.patterns) > 1, "it needs a list of two patterns or more")
        self.require(are_counts(1, self.groups), "groups must be a positive number")

    def repeated(self, number: int) -> str:
        return f"several tensors match {self.patterns[number]!r} for this name"

    def joined(self, parts: Mapping[int, DerivedTensor], keys: Mapping[int, str]) -> DerivedTensor:
        missing = [repr(p) for number, p in enumerate(self.patterns) if number not in parts]
        if missing:
            problem = f"nothing matches {', '.join(missing)}"
            raise Misfit(problem, found=f"only {', '.join(keys.values())}")
        tensors = [parts[number] for number in range(len(parts))]
        axis = _axis(tensors[0], self.axis)
        _require_alike(tensors, axis)
        rows: list[DerivedTensor] = []
        for number, tensor in enumerate(tensors):
            extent, rest = divmod(tensor.shape[axis], self.groups)
            if rest:
                what = f"axis {axis} of {keys[number]!r}"
                problem = f"{what} cannot be split into {self.groups} groups"
                raise Misfit(problem, found=tensor.shape)
            rows += tensor.cut(axis, [extent] * self.groups)
        groups = [rows[group :: self.groups] for group in range(self.groups)]
        return DerivedTensor.joined([*chain.from_iterable(groups)], axis)


@dataclass(frozen=True)
class Transpose(EachRule, name="transpose"):
    """Puts the axes of tensors in another order; without ``axes`` it turns them round.

    Example:
        >>> from dist_checkpointing.planning import Transpose
        >>> print(Transpose("{m*}.kernel"))
        transpose '{m*}.kernel'
    """

    pattern: str
    axes: Sequence[int] | None = None

    def check(self) -> None:
        are_axes = are_counts(0, *(self.axes or ()))
        self.require(are_axes, "axes must be a list of axes, counted from 0")

    def made(self, own: Matched) -> Made:
        every = range(len(own.tensor.shape))
        order = [*reversed(every)] if self.axes is None else [*self.axes]
        if sorted(order) != [*every]:
            raise Misfit("axes must name each axis once", expected=[*every], found=order)
        return [(own.key, own.tensor.permuted(order))]


@dataclass(frozen=True)
class Stack(JoinRule, name="stack"):
    """Puts the tensors of all layers into one, along a new first axis; ``{i}`` is the layer.

    Example:
        >>> from dist_checkpointing.planning import Stack
        >>> print(Stack("layers.{i}.{x*}", into="layers.{x}"))
        stack 'layers.{i}.{x*}', into='layers.{x}'
    """

    pattern: str
    into: str

    def check(self) -> None:
        has_number = NUMBER in self.compiled(self.pattern).groupindex
        self.require(has_number, "the pattern needs {i}, which stands for the number of the layer")

    def matches(self, keys: Iterable[str]) -> Iterator[tuple[str, re.Match[str], int]]:
        for key, match, _ in super().matches(keys):
            yield key, match, int(match[NUMBER])

    def repeated(self, number: int) -> str:
        return f"layer {number} is there twice"

    def joined(self, parts: Mapping[int, DerivedTensor], keys: Mapping[int, str]) -> DerivedTensor:
        missing = sorted({*range(max(parts) + 1)} - parts.keys())
        if missing:
            listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise Misfit(f"layers are missing: {listed}", found=f"layers {sorted(keys)}")
        ordered = [part for _, part in sorted(parts.items())]
        layers = [part.permuted([None, *range(len(part.shape))]) for part in ordered]
        _require_alike(layers, 0)
        return DerivedTensor.joined(layers, 0)


@dataclass(frozen=True)
class Unstack(EachRule, name="unstack"):
    """Makes a tensor of each row of the first axis; ``{i}`` in the new name is its number.

    Example:
        >>> from dist_checkpointing.planning import Unstack
        >>> print(Unstack("layers.{x*}", into="layers.{i}.{x}"))
        unstack 'layers.{x*}', into='layers.{i}.{x}'
    """

    pattern: str
    into: str

    def check(self) -> None:
        is_new = NUMBER not in self.compiled(self.pattern).groupindex
        problem = "the new name needs {i} for the number of the row; the pattern has none"
        self.require(is_new and f"{{{NUMBER}}}" in self.into, problem)

    def made(self, own: Matched) -> Made:
        tensor, _ = own.tensor, _axis(own.tensor, 0)
        # Expanded part by part, as what is matched may hold {i} itself.
        parts = [self.expanded(own.match, text) for text in self.into.split(f"{{{NUMBER}}}")]
        others = range(1, len(tensor.shape))
        return [
            (str(number).join(parts), tensor.narrow(0, number, 1).permuted(others))
            for number in range(tensor.shape[0])
        ]


def are_counts(least: int, *values: object) -> bool:
    """Whether they are whole numbers, none of them below the least."""
    return all(type(value) is int and value >= least for value in values)


def _axis(tensor: DerivedTensor, axis: int) -> int:
    ndim = len(tensor.shape)
    if not -ndim <= axis < ndim:
        raise Misfit(f"it has no axis {axis}", found=tensor.shape)
    return axis % ndim


def _require_alike(tensors: Sequence[DerivedTensor], axis: int) -> None:
    """Refuse to join what differs in more than the extent along the axis."""
    kinds = {(t.dtype.name, *t.shape[:axis], "*", *t.shape[axis + 1 :]) for t in tensors}
    if len(kinds) > 1:
        found = ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in tensors[:4])
        problem = "the tensors to join differ in dtype or shape"
        raise Misfit(problem, found=found, remedy="Cast or resize them before.")
