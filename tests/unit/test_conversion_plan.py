"""Plans of conversions are values: names, dtypes, and boxes that make each tensor up once."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from dist_checkpointing.tools.convert import Rules, plan_conversion
from dist_checkpointing.tools.convert.plan import PlannedTensor, shards

FLOAT32 = dtypes.from_name("float32")


def stored(key: str, shape: tuple[int, ...], dtype: str = "float32") -> StoredTensor:
    return StoredTensor(key, dtypes.from_name(dtype), shape, tuple(max(1, e) for e in shape))


INDEX = Index.of([stored("a.w", (4, 6)), stored("a.b", (6,)), stored("n", (2,), "int64")])


def test_all_is_taken_as_it_is() -> None:
    plan = plan_conversion(INDEX, {"rng": (2,)}, Rules())
    assert [tensor.key for tensor in plan.tensors] == ["a.b", "a.w", "n"]
    assert [sharded.key for sharded in plan.objects] == ["rng"]
    assert plan.num_bytes == 4 * 24 + 4 * 6 + 8 * 2
    assert (plan.num_left, plan.num_renamed, plan.casts, plan.uncut) == (0, 0, (), ())


def test_what_changes_is_counted() -> None:
    rules = Rules.parse(
        include=["a", "n"],
        rename=["^a=c"],
        cast=["bfloat16"],
        lossy=True,
        reshard=["axis=1,parts=2"],
    )
    plan = plan_conversion(INDEX, {"rng": (2,)}, rules)
    assert [tensor.key for tensor in plan.tensors] == ["c.b", "c.w", "n"]
    assert (plan.num_left, plan.num_renamed) == (0, 2)
    (cast,) = plan.casts
    assert (cast.stored, cast.wanted, cast.tensors) == ("float32", "bfloat16", 2)
    assert not cast.is_lossless
    assert plan.uncut == ("a.b", "n")


@pytest.mark.parametrize(
    ("rules", "keys", "expected"),
    [
        (
            {"include": ["^model", "bias"], "exclude": ["layer.1"]},
            ["model.layer.0.w", "model.layer.1.w", "other.bias", "other.w"],
            ["model.layer.0.w", "other.bias"],
        ),
        ({"rename": [r"^model\.(.*)=\1", r"layers\.(\d+)=h.\1"]}, ["model.layers.3.w"], ["h.3.w"]),
        ({"rename": ["a(?=b)=x"]}, ["ab"], ["xb"]),  # the last equals sign divides
    ],
)
def test_names(rules: dict[str, list[str]], keys: list[str], expected: list[str]) -> None:
    index = Index.of(stored(key, (1,)) for key in keys)
    plan = plan_conversion(index, {}, Rules.parse(**rules))  # type: ignore[arg-type]
    assert [tensor.key for tensor in plan.tensors] == expected


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("norm.w", "float16", "float32"),
        ("fc.w", "float16", "bfloat16"),
        ("fc.steps", "int64", "int64"),
        ("scale", "float8_e8m0fnu", "float8_e8m0fnu"),
    ],
)
def test_the_first_cast_that_matches_counts_and_integers_stay(key: str, old: str, new: str) -> None:
    rules = Rules.parse(cast=["norm=float32", "bfloat16"], lossy=True)
    (tensor,) = plan_conversion(Index.of([stored(key, (1,), old)]), {}, rules).tensors
    assert tensor.dtype.name == new


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
    ],
)
def test_parts_of_a_tensor(
    text: str, shape: tuple[int, ...], chunk: tuple[int, ...] | None
) -> None:
    rules = Rules.parse(reshard=[text, "axis=0,parts=2"])
    (tensor,) = plan_conversion(Index.of([stored("any", shape)]), {}, rules).tensors
    assert tensor.chunk_shape == chunk


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("include", "("),
        ("exclude", "[a"),
        ("rename", "no replacement"),
        ("rename", "=a"),
        ("rename", "(=a"),
        ("rename", r"a=\2"),
        ("cast", "int32"),
        ("cast", "floof"),
        ("cast", "(=float32"),
        ("reshard", "axis=0"),
        ("reshard", "axis=0,parts=0"),
        ("reshard", "axis=0,parts=2;axis=0,parts=3"),
        ("reshard", "(:axis=0,parts=2"),
    ],
)
def test_a_text_that_says_nothing_is_named(kind: str, text: str) -> None:
    with pytest.raises(CheckpointingException, match=f"^{kind} ") as caught:
        plan_conversion(INDEX, {}, Rules.parse(**{kind: [text]}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) or kind == "cast"


def test_a_cast_that_keeps_every_value_needs_no_leave() -> None:
    plan = plan_conversion(INDEX, {}, Rules.parse(cast=["float64"]))
    assert [cast.is_lossless for cast in plan.casts] == [True]


def test_a_cast_that_loses_values_is_refused() -> None:
    with pytest.raises(CheckpointingException, match=r"lossy.*\n.*\(2 tensors\) changes values"):
        plan_conversion(INDEX, {}, Rules.parse(cast=["float16"]))
    with pytest.raises(CheckpointingException, match=r"\(1 tensor\) changes values"):
        plan_conversion(INDEX, {}, Rules.parse(cast=["w=float16"]))


def test_keys_that_would_become_one_are_named_all_at_once() -> None:
    with pytest.raises(CheckpointingException) as caught:
        plan_conversion(INDEX, {"a.x": ()}, Rules.parse(rename=[r"^a\..*=all"]))
    (finding,) = caught.value.findings
    assert finding.key == "all"
    assert all(name in str(finding.found) for name in ("'a.w'", "'a.b'", "'a.x'"))


def test_a_key_without_a_name_is_refused() -> None:
    with pytest.raises(CheckpointingException, match="no name"):
        plan_conversion(INDEX, {}, Rules.parse(rename=["^n$="]))


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(CheckpointingException, match="leave nothing"):
        plan_conversion(INDEX, {}, Rules.parse(include=["nowhere"]))
    with pytest.raises(CheckpointingException, match=r"none of 1 key\."):
        plan_conversion(Index.of([stored("a", ())]), {}, Rules.parse(include=["nowhere"]))


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
    return PlannedTensor(tensor, "k", FLOAT32, wanted)


@given(planned(), st.integers(1, 200))
def test_shards_make_up_the_tensor_once(tensor: PlannedTensor, most_bytes: int) -> None:
    counts = np.zeros(tensor.shape, dtype=np.int64)
    boxes = list(shards(tensor, most_bytes))
    for box in boxes:
        counts[box.slices()] += 1
        assert box.num_elements * tensor.widest_itemsize <= max(most_bytes, tensor.widest_itemsize)
    assert boxes
    assert (counts == 1).all()


def test_an_awkward_extent_does_not_make_tiny_parts() -> None:
    # 1366 = 2 * 683: the only divisor that fits would make parts of two rows.
    tensor = PlannedTensor(stored("k", (4096, 8)), "k", FLOAT32, (1366, 8))
    boxes = list(shards(tensor, 400 * 32))
    assert len(boxes) <= 2 * -(-4096 // 400)
