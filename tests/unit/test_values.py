import cmath
import math

import pytest
import torch

from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.testing import random_bits
from dist_checkpointing.tools import values
from dist_checkpointing.tools.values import ReusedMemory, Statistics, statistics_of


def oracle(tensor: torch.Tensor) -> Statistics:
    """By the book, with all values in memory as Python numbers."""
    numbers = tensor.reshape(-1).tolist()
    finite = [x for x in numbers if math.isfinite(abs(x))]
    num_nan = sum(cmath.isnan(x) for x in numbers)
    mean = sum(finite) / len(finite) if finite else None
    std = None
    if mean is not None:
        std = math.sqrt(sum(abs(x - mean) ** 2 for x in finite) / len(finite))
    ordered = finite and not isinstance(finite[0], complex)
    return Statistics(
        len(numbers),
        min(finite) if ordered else None,
        max(finite) if ordered else None,
        mean,
        std,
        num_nan,
        len(numbers) - len(finite) - num_nan,
        sum(x == 0 for x in numbers),
    )


def assert_alike(found: Statistics, wanted: Statistics) -> None:
    for name in ("count", "num_nan", "num_inf", "num_zero", "minimum", "maximum"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("mean", "std"):
        have, want = getattr(found, name), getattr(wanted, name)
        assert (have is None) == (want is None)
        if want is not None:
            assert have == pytest.approx(want, rel=1e-9, abs=1e-12 * (wanted.std or 1)), name


@pytest.mark.parametrize("dtype", [row.torch for row in DTYPES], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_statistics_of_random_bits(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "SLAB_ELEMENTS", 64)
    tensor = random_bits((count,), dtype)
    if dtype in (torch.float64, torch.complex128):
        # The squares of the largest are infinite, for everybody.
        tensor = torch.where(tensor.abs() < 1e100, tensor, torch.nan)
    assert_alike(statistics_of(tensor), oracle(tensor))


def test_memory_that_nobody_looks_into_any_more_is_used_again() -> None:
    memory = ReusedMemory()
    memory.most_bytes = 2**22
    first = memory((2**20,), dtype=torch.float32)
    address, part = first.data_ptr(), first[5:]
    del first
    assert memory((2**20,), dtype=torch.float32).data_ptr() != address, "a view holds it"
    del part
    again = memory((3, 2**19), dtype=torch.bfloat16)
    assert (again.data_ptr(), again.shape, again.dtype) == (address, (3, 2**19), torch.bfloat16)
    assert memory((), dtype=torch.int8).shape == ()
