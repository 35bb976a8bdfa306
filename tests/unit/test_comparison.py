import argparse
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dist_checkpointing import Checkpoint, ShardedTensor, save
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import random_bits
from dist_checkpointing.tools import diff, values
from dist_checkpointing.tools.diff import (
    Difference,
    Tolerance,
    compare_checkpoints,
    compare_tensors,
    compare_values,
)
from states import shard
from tiers import examples

numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0])


def same(a: float, b: float, tolerance: Tolerance) -> bool:
    if math.isnan(a) and math.isnan(b):
        return tolerance.equal_nan
    if a == b:
        return True
    if not math.isfinite(a) or not math.isfinite(b):
        return False
    return abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)


@examples(200)
@given(
    st.lists(st.tuples(numbers, numbers | st.none())),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.sampled_from([0.0, 1e-2, 10.0]),
    st.booleans(),
)
def test_the_difference_of_two_tensors(
    pairs: list[tuple[float, float | None]], rtol: float, atol: float, equal_nan: bool
) -> None:
    tolerance = Tolerance(rtol=rtol, atol=atol, equal_nan=equal_nan)
    rows = [(a, a if b is None else b) for a, b in pairs]
    a, b = (
        torch.tensor(list(column), dtype=torch.float64)
        for column in (zip(*rows, strict=True) if rows else ([], []))
    )
    found = compare_tensors(a, b, tolerance)
    differing = [i for i, (x, y) in enumerate(rows) if not same(x, y, tolerance)]
    assert found.num_differing == len(differing)
    assert found.num_compared == len(rows)
    if not differing:
        assert found == Difference(num_compared=len(rows), norm_before=found.norm_before)
        return
    assert found.first_index == (differing[0],)
    assert repr(found.first_values) == repr(rows[differing[0]])
    known = [abs(x - y) for x, y in (rows[i] for i in differing) if not math.isnan(x - y)]
    assert found.max_abs == pytest.approx(max(known, default=0.0))


@pytest.mark.parametrize("dtype", [row.torch for row in DTYPES], ids=str)
def test_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "SLAB_ELEMENTS", 16)
    tensor = random_bits((4, 25), dtype)
    assert compare_tensors(tensor, tensor.clone(), Tolerance(equal_nan=True)).num_differing == 0
    other = tensor.clone()
    pair = [1, 0] if dtype != torch.float8_e8m0fnu else [1.0, 2.0]  # which has no zero
    one, zero = torch.tensor(pair).to(dtype)
    tensor[2, 7], other[2, 7] = one, zero
    tensor[3, 24], other[3, 24] = zero, one
    found = compare_tensors(tensor, other, Tolerance(equal_nan=True), origin=(10, 100))
    assert (found.num_differing, found.max_abs) == (2, 1.0)
    assert found.first_index == (12, 107)
    assert found.first_values == (one.item(), zero.item())


def test_large_integers_are_compared_exactly() -> None:
    a = torch.tensor([2**62 + 1, -(2**63), 5])
    b = torch.tensor([2**62, 2**63 - 1, 5])
    found = compare_tensors(a, b)
    assert (found.num_differing, found.max_abs) == (2, float(2**64 - 1))
    assert compare_tensors(a[:1], b[:1], Tolerance(atol=1)).num_differing == 0
    # As float64 they would be the same.
    assert compare_tensors(a[:1], b[:1].double()).num_differing == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_of_float32_neither_overflow_nor_underflow(scale: float) -> None:
    a = torch.tensor([3.0, 4.0, math.nan, 0.0]) * scale
    b = torch.tensor([0.0, 4.0, math.nan, 4.0]) * scale
    found = compare_tensors(a, b)
    assert found.norm_before == pytest.approx(5 * scale)
    assert found.norm_of_change == pytest.approx(5 * scale)
    assert found.relative_change == pytest.approx(1)
    assert compare_tensors(a[:0], b[:0]).relative_change == 0


@pytest.mark.parametrize("memory_bytes", [64, 10_000, 2**28])
def test_checkpoints_are_compared_in_pieces(tmp_path: Path, memory_bytes: int) -> None:
    full = torch.arange(60 * 20, dtype=torch.float32).reshape(60, 20)
    other = full.clone()
    other[[7, 7, 50], [3, 19, 0]] += torch.tensor([1.0, 2.0, 4.0])

    def rows(tensor: torch.Tensor, count: int) -> list[ShardedTensor]:
        return [shard("w", tensor.chunk(count)[i], (0, i, count)) for i in range(count)]

    save({"w": rows(full, 4)}, tmp_path / "a")
    save({"w": rows(other, 3)}, tmp_path / "b", Zarr3SaveShardedStrategy(codec="zstd"))
    seen: list[int] = []
    a, b = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b")
    found = compare_checkpoints(a, b, memory_bytes=memory_bytes, report=seen.append)
    (row,) = found.differing
    assert row.values is not None
    assert row.values.norm_before == pytest.approx(full.double().norm().item())
    assert row.values.norm_of_change == pytest.approx(21**0.5)
    assert (row.values.num_differing, row.values.num_compared) == (3, 1200)
    assert (row.values.first_index, row.values.first_values) == ((7, 3), (143.0, 144.0))
    assert row.values.max_abs == 4.0
    assert sum(seen) == full.nbytes
    assert max(seen) <= max(memory_bytes // 2, 4)
    assert not found.is_same
    assert compare_checkpoints(a, a).is_same
    assert compare_checkpoints(a, b, tolerance=Tolerance(atol=4)).is_same
    assert compare_checkpoints(a, b, wanted=lambda key: key != "w").is_same


def test_nests_of_plain_values() -> None:
    def nest(**changed: Any) -> dict[str, Any]:
        return {
            "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
            "list": [1, {"deep": None}],
            "tensor": torch.tensor([1.0, math.nan]),
            "array": np.array([1, 2]),
            "empty": {},
            "buffer": io.BytesIO(b"same"),
            **changed,
        }

    def differing(other: Any, **tolerance: Any) -> list[tuple[Any, ...]]:
        rows = compare_values(nest(), other, Tolerance(**{"equal_nan": True, **tolerance}))
        return [(row.name, *row.texts) for row in rows]

    assert differing(nest()) == []
    assert [name for name, *_ in differing(nest(), equal_nan=False)] == ["tensor"]
    changed = argparse.Namespace(lr=0.1001, betas=(0.9, 0.95))
    assert differing(nest(args=changed)) == [("args.lr", "0.1", "0.1001")]
    assert differing(nest(args=changed), rtol=1e-2) == []
    assert differing(nest(list=[1, {"deep": 0}])) == [("list.1.deep", "None", "0")]
    assert differing(nest(list=[True, {"deep": None}])) == [("list.0", "1", "True")]
    assert differing(nest(list=[1])) == [("list.1.deep", "None", None)]
    assert differing(nest(empty=[])) == [("empty", "{}", "[]")]
    assert differing(nest(array=np.array([1.0, 2.0])))[0][0] == "array"
    assert differing(nest(array=np.array([1, 3])))[0][0] == "array"
    assert differing(nest(tensor=torch.tensor([1.0, 2.0])))[0][0] == "tensor"
    assert differing(nest(tensor=torch.tensor([1.0])))[0][0] == "tensor"
    assert differing(nest(buffer=io.BytesIO(b"other"))) == [
        ("buffer", "BytesIO(b'same')", "BytesIO(b'other')")
    ]
    assert differing(nest(new="x")) == [("new", None, "'x'")]


def test_a_nest_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    entries = values.entries({"loop": loop})
    assert list(entries) == ["loop.0", "loop.1"]
    assert compare_values({"loop": loop}, {"loop": loop}) == []


def test_a_nest_that_grows_beyond_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_ENTRIES", 1000)
    bomb: list[Any] = [0] * 10
    for _ in range(10):
        bomb = [bomb] * 10
    with pytest.raises(ValueError, match="more than 1000 values"):
        values.entries(bomb)


def test_a_value_in_one_line() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert values.value_text(torch.tensor([1, 2])) == "int64 tensor 2 [1, 2]"
    assert values.value_text(torch.zeros(99)) == "float32 tensor 99 ..."
    assert values.value_text("a\nb") == r"'a\nb'"
    assert len(values.value_text("x" * 1000)) == 200
    assert values.value_text(Bad()) == "<Bad: no>"
    assert diff.Tolerance() == diff.EXACT
