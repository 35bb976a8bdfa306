"""The rules of a recipe that change shapes: cut, fill up, split, join, turn, stack and unstack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

from dist_checkpointing.errors import Finding
from dist_checkpointing.planning.derived import DerivedTensor, Fill
from dist_checkpointing.planning.recipe_rules import (
    NUMBER,
    Change,
    EachRule,
    Made,
    Matched,
    Misfit,
    Rule,
    Tensors,
    Wanted,
)


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
                raise Misfit(
                    Finding("the number of axes differs", expected=shape, found=tensor.shape)
                )
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
                Finding(
                    f"axis {axis} cannot be cut like that",
                    expected=f"a multiple of {self.groups * sum(sizes)}",
                    found=tensor.shape[axis],
                )
            )
        rows = tensor.cut(axis, [unit * size for size in sizes] * self.groups)
        names = [self.expanded(own.match, name) for name in self.into]
        return [
            (name, DerivedTensor.joined(rows[place :: len(sizes)], axis))
            for place, name in enumerate(names)
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
        for key, match, place in self.matches(tensors, *self.patterns):
            try:
                found = parts.setdefault(self.expanded(match, self.into), {})
            except Misfit as misfit:
                change.findings.append(replace(misfit.finding, key=key))
                continue
            change.taken.append(key)
            if found.setdefault(place, key) != key:
                problem = f"several tensors match {self.patterns[place]!r} for this name"
                change.findings.append(Finding(problem, self.into, found=f"{found[place]}, {key}"))
        for name, found in parts.items():
            try:
                change.made.append((name, self._joined(tensors, found)))
            except Misfit as misfit:
                change.findings.append(replace(misfit.finding, key=name))
        change.count = len(change.taken)
        return change

    def _joined(self, tensors: Tensors, found: Mapping[int, str]) -> DerivedTensor:
        missing = [p for place, p in enumerate(self.patterns) if place not in found]
        if missing:
            problem = f"nothing matches {', '.join(map(repr, missing))}"
            raise Misfit(Finding(problem, found=f"only {', '.join(found.values())}"))
        parts = [tensors[found[place]] for place in range(len(self.patterns))]
        axis = _axis(parts[0], self.axis)
        _require_alike(parts, axis)
        rows = []
        for place, part in enumerate(parts):
            extent, rest = divmod(part.shape[axis], self.groups)
            if rest:
                problem = f"axis {axis} of {found[place]!r} cannot be cut into {self.groups} groups"
                raise Misfit(Finding(problem, found=part.shape))
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
            raise Misfit(Finding("axes must name each axis once", expected=[*every], found=order))
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
            try:
                own = [found[number] for number in range(len(found))]
                _require_alike(own, 0)
                change.made.append((name, DerivedTensor.joined(own, 0)))
            except Misfit as misfit:
                change.findings.append(replace(misfit.finding, key=name))
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
        raise Misfit(Finding(f"it has no axis {axis}", found=tensor.shape))
    return axis % ndim


def _require_alike(tensors: Sequence[DerivedTensor], axis: int) -> None:
    """Refuse to join what differs in more than the extent along the axis."""
    kinds = {(t.dtype.name, *t.shape[:axis], "*", *t.shape[axis + 1 :]) for t in tensors}
    if len(kinds) > 1:
        found = ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in tensors[:4])
        problem = "the tensors to join differ in dtype or shape"
        raise Misfit(Finding(problem, found=found, remedy="Cast or resize them before."))
