"""Plans of conversions are values: names, dtypes, and boxes that make each tensor up once."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from dist_checkpointing.planning import CastTo, Concat, Drop, Keep, Recipe, Rename
from dist_checkpointing.planning.quantization_rules import Dequantize
from dist_checkpointing.planning.recipe import derive
from dist_checkpointing.planning.recipe_rules import Rule
from dist_checkpointing.tools.convert import ConversionPlan, ConvertOptions, plan_conversion
from dist_checkpointing.tools.convert.plan import PlannedTensor, shards


def stored(key: str, shape: tuple[int, ...], dtype: str = "float32") -> StoredTensor:
    return StoredTensor(key, dtypes.from_name(dtype), shape, tuple(max(1, e) for e in shape))


INDEX = Index.of([stored("a.w", (4, 6)), stored("a.b", (6,)), stored("n", (2,), "int64")])


def planned_by(
    *rules: Rule, index: Index = INDEX, objects: Sequence[str] = (), **options: Any
) -> ConversionPlan:
    made = derive(Recipe(*rules), index, objects)
    return plan_conversion(made, dict.fromkeys(made.objects, (2,)), ConvertOptions(**options))


def test_what_changes_is_counted() -> None:
    rules = (Keep(["a.{x*}", "n"]), Rename("a.{x*}", "c.{x}"), CastTo("{x*}", "bfloat16"))
    plan = planned_by(*rules, objects=["rng"], lossy=True, reshard=["axis=1,parts=2"])
    assert [tensor.stored.key for tensor in plan.tensors] == ["c.b", "c.w", "n"]
    assert [tensor.stored.dtype.name for tensor in plan.tensors] == ["bfloat16"] * 2 + ["int64"]
    assert [tensor.widest_itemsize for tensor in plan.tensors] == [4, 4, 8]
    assert not plan.objects
    (cast,) = plan.casts
    assert (cast.stored, cast.wanted, cast.tensors) == ("float32", "bfloat16", 2)
    assert not cast.is_lossless
    assert plan.uncut == ("c.b", "n")


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


@pytest.mark.parametrize(
    "text", ["axis=0", "axis=0,parts=0", "axis=0,parts=2;axis=0,parts=3", "(:axis=0,parts=2"]
)
def test_a_text_that_says_nothing_is_named(text: str) -> None:
    with pytest.raises(CheckpointingException, match=r"\Areshard .*\Z"):
        planned_by(reshard=[text])


def test_a_cast_that_keeps_every_value_needs_no_leave() -> None:
    plan = planned_by(CastTo("{x*}", "float64"))
    assert [cast.is_lossless for cast in plan.casts] == [True]
    # What counts is what is stored: nothing is rounded on the way.
    assert not planned_by(CastTo("{x*}", "float16"), CastTo("{x*}", "float32")).casts


def test_a_cast_that_loses_values_is_refused() -> None:
    with pytest.raises(CheckpointingException, match=r"lossy.*\n.*\(2 tensors\) changes values"):
        planned_by(CastTo("{x*}", "float16"))
    with pytest.raises(CheckpointingException, match=r"\(1 tensor\) changes values"):
        planned_by(CastTo("{x}.w", "float16"))
    joined = (Concat(["a.b", "a.b2"], into="b"), CastTo("b", "float16"))
    index = Index.of([stored("a.b", (6,)), stored("a.b2", (6,))])
    with pytest.raises(CheckpointingException, match=r"float32 to float16 \(1 tensor\)"):
        planned_by(*joined, index=index)


def test_values_of_codes_are_no_lossy_cast() -> None:
    codes, scales = stored("w", (4, 4), "float8_e4m3fn"), stored("w_scale", ())
    plan = planned_by(Dequantize(), index=Index.of([codes, scales]))
    assert plan.casts == ()
    assert [tensor.widest_itemsize for tensor in plan.tensors] == [4]


def test_each_of_several_patterns_must_match() -> None:
    rules = [Keep(["a.{x}", "rng", "missing.{x*}"]), Drop(["a.b", "a.b"]), Drop("a.c")]
    made = derive(Recipe(*rules), INDEX, ["rng"])
    (finding,) = made.unused
    text = "nothing matches rule 3 (drop 'a.c'), 'missing.{x*}' of rule 1: a pattern must match"
    assert finding.problem.startswith(text)


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(CheckpointingException, match="nothing is left") as caught:
        planned_by(Keep("a"))
    assert "none of 3 keys" in str(caught.value)
    assert "nothing matches rule 1 (keep 'a'): a pattern must match" in str(caught.value)
    with pytest.raises(CheckpointingException, match=r"none of 1 key\."):
        planned_by(index=Index.of([]), objects=["rng"], tensors_only=True)


@st.composite
def planned(draw: st.DrawFn) -> PlannedTensor:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = dtypes.from_name(draw(st.sampled_from(["uint8", "bfloat16", "float32"])))
    chunk = tuple(draw(st.integers(1, max(1, extent))) for extent in shape)
    tensor = StoredTensor("k", dtype, shape, chunk)
    if math.prod(shape) and draw(st.booleans()):
        count = math.prod(shape)
        cut = draw(st.integers(0, count))
        whole = Box.whole(shape)
        pieces = Pieces.of(len(shape), [(whole, (0, cut)), (whole, (cut, count))])
        tensor = StoredTensor("k", dtype, shape, None, pieces)
    wanted = None
    if draw(st.booleans()):
        wanted = tuple(draw(st.integers(1, max(1, extent))) for extent in shape)
    return PlannedTensor(tensor, max(4, dtype.itemsize), wanted)


@given(planned(), st.integers(1, 200))
def test_shards_make_up_the_tensor_once(tensor: PlannedTensor, most_bytes: int) -> None:
    counts = np.zeros(tensor.stored.global_shape, dtype=np.int64)
    boxes = list(shards(tensor, most_bytes))
    for box in boxes:
        counts[box.slices()] += 1
        assert box.num_elements * tensor.widest_itemsize <= max(most_bytes, tensor.widest_itemsize)
    assert boxes
    assert (counts == 1).all()


def test_an_awkward_extent_does_not_make_tiny_parts() -> None:
    # 1366 = 2 * 683: the only divisor that fits would make parts of two rows.
    tensor = PlannedTensor(stored("k", (4096, 8)), 4, (1366, 8))
    boxes = list(shards(tensor, 400 * 32))
    assert len(boxes) <= 2 * -(-4096 // 400)
