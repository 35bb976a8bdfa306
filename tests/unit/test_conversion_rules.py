"""Rules of a conversion: what they take, rename, cast and cut. No file is touched."""

from __future__ import annotations

from typing import Any

import pytest

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format import dtypes
from dist_checkpointing.tools.convert import Rules


def test_no_rules_change_nothing() -> None:
    rules = Rules.parse()
    assert rules.takes("a")
    assert rules.new_name("a") == "a"
    assert rules.new_dtype("a", dtypes.from_name("float32")).name == "float32"
    assert rules.reshard_of("a") is None


def test_a_key_is_taken_if_included_and_not_excluded() -> None:
    rules = Rules.parse(include=["^model", "bias"], exclude=["layer.1"])
    keys = ["model.layer.0.w", "model.layer.1.w", "other.bias", "other.w"]
    assert [key for key in keys if rules.takes(key)] == ["model.layer.0.w", "other.bias"]


def test_renames_follow_each_other_and_know_groups() -> None:
    rules = Rules.parse(rename=[r"^model\.(.*)=\1", r"layers\.(\d+)=h.\1"])
    assert rules.new_name("model.layers.3.w") == "h.3.w"


def test_the_last_equals_sign_divides_a_rename() -> None:
    assert Rules.parse(rename=["a(?=b)=x"]).new_name("ab") == "xb"


def test_the_first_cast_that_matches_counts_and_integers_stay() -> None:
    rules = Rules.parse(cast=["norm=float32", "bfloat16"])
    half, whole = dtypes.from_name("float16"), dtypes.from_name("int64")
    assert rules.new_dtype("norm.w", half).name == "float32"
    assert rules.new_dtype("fc.w", half).name == "bfloat16"
    assert rules.new_dtype("fc.steps", whole).name == "int64"
    assert rules.new_dtype("scale", dtypes.from_name("float8_e8m0fnu")).name == "float8_e8m0fnu"


@pytest.mark.parametrize(
    ("text", "shape", "chunk"),
    [
        ("axis=0,parts=4", (8, 3), (2, 3)),
        ("axis=0,parts=4", (10, 3), (3, 3)),
        ("axis=0,parts=4", (3, 3), (1, 3)),
        ("axis=1, parts=2; axis=0, parts=2", (4, 6, 5), (2, 3, 5)),
        ("axis=0,parts=2", (0, 5), (1, 5)),
        ("axis=1,parts=2", (7,), None),
    ],
)
def test_parts_of_a_tensor(
    text: str, shape: tuple[int, ...], chunk: tuple[int, ...] | None
) -> None:
    reshard = Rules.parse(reshard=[text]).reshard_of("any")
    assert reshard is not None
    assert reshard.chunk_shape(shape) == chunk


def test_a_reshard_may_be_for_some_keys() -> None:
    rules = Rules.parse(reshard=["fc|qkv:axis=0,parts=2", "axis=1,parts=3"])
    found = [rules.reshard_of(key) for key in ("fc.w", "other")]
    assert [rule and rule.axes for rule in found] == [((0, 2),), ((1, 3),)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("include", "("),
        ("exclude", "[a"),
        ("rename", "no replacement"),
        ("rename", "=a"),
        ("rename", "(=a"),
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
    arguments: dict[str, Any] = {kind: [text]}
    with pytest.raises(CheckpointingException) as caught:
        Rules.parse(**arguments)
    assert kind in str(caught.value)
    assert "\n" not in str(caught.value) or kind == "cast"


def test_a_group_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointingException, match="rename"):
        Rules.parse(rename=[r"a=\2"]).new_name("a")
