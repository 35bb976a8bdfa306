"""How a model would be cut on so many ranks, guessed from names and from how it was saved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, StoredTensor

_COLUMN_PARALLEL = (
    "word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|query_key_value|"
    "dense_h_to_4h|embed_tokens|lm_head|q_proj|k_proj|v_proj|gate_proj|up_proj"
)
_ROW_PARALLEL = "linear_proj|linear_fc2|dense_4h_to_h|o_proj|down_proj"


Stored = Literal["stored"]
AS_STORED: Final[Stored] = "stored"


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Which axis the tensors of some keys are cut along.

    Attributes:
        pattern: Pattern that is searched for in the key.
        axis: Axis, counted from the end if negative, so that stacked layers do not matter; None to
            leave the tensors whole; ``AS_STORED`` for the axis along which each was cut when it
            was saved.
    """

    pattern: re.Pattern[str]
    axis: int | Stored | None


MEGATRON_RULES = (
    AxisRule(re.compile(rf"(^|\.)({_COLUMN_PARALLEL})\.weight\d*$"), -2),
    AxisRule(re.compile(rf"(^|\.)({_COLUMN_PARALLEL})\.bias\d*$"), -1),
    AxisRule(re.compile(rf"(^|\.)({_ROW_PARALLEL})\.weight\d*$"), -1),
)
"""The layers of Megatron-Core, and of the usual Hugging Face models, by name."""


class Reason(Enum):
    """Why a tensor is cut, or is not."""

    RULE = "a rule matches"
    ASKED = "a rule says so"
    STORED = "as it was when saved"
    NO_RULE = "no rule matches"
    NOT_DIVISIBLE = "not divisible"


@dataclass(frozen=True, slots=True)
class KeyCut:
    """How one tensor is spread over the tensor-parallel ranks: cut along an axis, or whole."""

    key: str
    axis: int | None
    reason: Reason


def parse_rule(text: str) -> AxisRule:
    """``REGEX=axis``, ``REGEX=none`` or ``REGEX=stored``.

    Raises:
        ValueError: if it is not of this form.
    """
    pattern, equals, axis = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"{text!r} is not of the form REGEX=axis, such as 'lm_head=0'")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if axis.strip().lower() == "none":
        return AxisRule(compiled, None)
    if axis.strip().lower() == AS_STORED:
        return AxisRule(compiled, AS_STORED)
    try:
        return AxisRule(compiled, int(axis))
    except ValueError:
        raise ValueError(
            f"{axis!r} in {text!r} is no axis; write a number, 'none' or 'stored'"
        ) from None


def guessed_rules(index: Index) -> tuple[AxisRule, ...]:
    """By name; of a model in which no name is known, as every tensor was cut when it was saved."""
    by_name = any(rule.pattern.search(key) for key in index for rule in MEGATRON_RULES)
    return MEGATRON_RULES if by_name else (AxisRule(re.compile(""), AS_STORED),)


def stored_axis(stored: StoredTensor, *, is_stacked: bool = False) -> int | None:
    """The last axis along which a tensor was cut when it was saved; None if it was not.

    The last, because stages of a pipeline cut stacked layers along the first, which does not count
    in a tensor that ``is_stacked``.
    """
    axes = (axis for axis, count in enumerate(_counts(stored)) if count > 1)
    return max((axis for axis in axes if axis or not is_stacked), default=None)


def _counts(stored: StoredTensor) -> list[int]:
    """In how many parts a tensor is cut along each axis."""
    if stored.pieces is None:
        return list(stored.grid.counts)
    return [len(set(column.tolist())) for column in stored.pieces.offsets.T]


def stacked_keys(index: Index) -> frozenset[str]:
    """The tensors whose first axis counts layers: how the layers of a model become one tensor.

    They are stored layer by layer, and all tensors below a prefix have that axis: weights of three
    axes, and norms or biases of two.
    """
    below: dict[str, list[StoredTensor]] = {}
    for key in index:
        parts = key.split(".")
        for depth in range(1, len(parts)):
            below.setdefault(".".join(parts[:depth]), []).append(index[key])
    found: set[str] = set()
    for tensors in below.values():
        ndims = {len(stored.global_shape) for stored in tensors}
        if min(ndims) < 2 or max(ndims) < 3:
            continue
        layers = {stored.global_shape[0] for stored in tensors}
        if len(layers) == 1 and all(_counts(stored)[0] in layers for stored in tensors):
            found.update(stored.key for stored in tensors)
    return frozenset(found)


def cut_keys(index: Index, parts: int, rules: Sequence[AxisRule]) -> list[KeyCut]:
    """How every tensor is cut into ``parts``; the first rule that matches counts.

    Raises:
        ValueError: if a rule names an axis that a tensor does not have.
    """
    stacked = stacked_keys(index)
    return [_cut(index[key], parts, rules, is_stacked=key in stacked) for key in index]


def _cut(
    stored: StoredTensor, parts: int, rules: Iterable[AxisRule], *, is_stacked: bool
) -> KeyCut:
    rule = next((rule for rule in rules if rule.pattern.search(stored.key)), None)
    if rule is None:
        return KeyCut(stored.key, None, Reason.NO_RULE)
    if rule.axis is None:
        return KeyCut(stored.key, None, Reason.ASKED)
    if rule.axis == AS_STORED:
        axis, reason = stored_axis(stored, is_stacked=is_stacked), Reason.STORED
    else:
        ndim = len(stored.global_shape)
        if not -ndim <= rule.axis < ndim:
            if rule in MEGATRON_RULES:  # a guess that does not fit is not used
                return KeyCut(stored.key, None, Reason.NO_RULE)
            raise ValueError(
                f"{stored.key!r} of shape {stored.global_shape} has no axis {rule.axis}, "
                f"which {rule.pattern.pattern!r} cuts"
            )
        axis, reason = rule.axis % ndim, Reason.RULE
    if axis is not None and stored.global_shape[axis] % parts:
        return KeyCut(stored.key, None, Reason.NOT_DIVISIBLE)
    return KeyCut(stored.key, axis, reason)


def part_of(stored: StoredTensor, cut: KeyCut, part: int, parts: int) -> Box:
    """The box that one of the tensor-parallel ranks holds."""
    whole = Box.whole(stored.global_shape)
    if cut.axis is None:
        return whole
    extent = stored.global_shape[cut.axis] // parts
    offset, shape = list(whole.offset), list(whole.shape)
    offset[cut.axis], shape[cut.axis] = part * extent, extent
    return Box(tuple(offset), tuple(shape))
