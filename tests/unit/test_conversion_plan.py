"""Plans of conversions are values: the chunks that --reshard makes, and casts that lose nothing."""

from typing import Any

import pytest

from dist_checkpointing.format import Index, StoredTensor, dtypes
from dist_checkpointing.planning import CastTo, Recipe
from dist_checkpointing.planning.quantization import Dequantize
from dist_checkpointing.planning.recipe import derive
from dist_checkpointing.planning.recipe_rules import Rule
from dist_checkpointing.tools.convert import ConversionPlan, ConvertOptions, plan_conversion


def stored(key: str, shape: tuple[int, ...], dtype: str = "float32") -> StoredTensor:
    return StoredTensor(key, dtypes.from_name(dtype), shape, tuple(max(1, e) for e in shape))


INDEX = Index.of([stored("a.w", (4, 6)), stored("a.b", (6,)), stored("n", (2,), "int64")])


def planned_by(*rules: Rule, index: Index = INDEX, **options: Any) -> ConversionPlan:
    return plan_conversion(derive(Recipe(*rules), index), {}, ConvertOptions(**options))


@pytest.mark.parametrize(
    ("text", "shape", "chunk"),
    [
        ("axis=0,parts=4", (8, 3), (2, 3)),
        ("axis=0,parts=4", (10, 3), (3, 3)),
        ("axis=0,parts=4", (3, 3), (1, 3)),
        ("axis=1, parts=2; axis=0, parts=2", (4, 6, 5), (2, 3, 5)),
        ("axis=0,parts=2", (0, 5), (1, 5)),
        ("axis=1,parts=2", (7,), None),
        ("fc|qkv:axis=0,parts=4", (8, 3), (4, 3)),  # for other keys
        ("a{x}:axis=0,parts=4", (8, 3), (2, 3)),
    ],
)
def test_parts_of_a_tensor(
    text: str, shape: tuple[int, ...], chunk: tuple[int, ...] | None
) -> None:
    index = Index.of([stored("any", shape)])
    (tensor,) = planned_by(index=index, reshard=[text, "axis=0,parts=2"]).tensors
    assert tensor.chunk_shape == chunk


def test_a_cast_that_keeps_every_value_needs_no_leave() -> None:
    plan = planned_by(CastTo("{x*}", "float64"))
    assert [cast.is_lossless for cast in plan.casts] == [True]
    # What counts is what is stored: nothing is rounded on the way.
    assert not planned_by(CastTo("{x*}", "float16"), CastTo("{x*}", "float32")).casts


def test_values_of_codes_are_no_lossy_cast() -> None:
    codes, scales = stored("w", (4, 4), "float8_e4m3fn"), stored("w_scale", ())
    plan = planned_by(Dequantize(), index=Index.of([codes, scales]))
    assert plan.casts == ()
    assert [tensor.widest_itemsize for tensor in plan.tensors] == [4]
