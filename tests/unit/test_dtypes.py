from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing.errors import InvalidShardingError, UnsupportedFormatError
from dist_checkpointing.mapping import DTYPES, as_numpy, tensor_memory

NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)


def test_the_table_has_every_documented_dtype() -> None:
    assert {row.name for row in DTYPES} == {name for name in NAMES.split() if hasattr(torch, name)}
    for field in ("name", "torch", "numpy", "zarr_v2"):
        assert len({getattr(row, field) for row in DTYPES}) == len(DTYPES)


OTHER_NAMES = ["", "float", "<f4", "Float32", "object"]
OTHER_ZARR_NAMES = ["", ">f4", "float32", "|O", "=f4"]


@pytest.mark.parametrize(
    ("look_up", "name", "known"),
    [
        *((tensor_memory.from_name, name, "bfloat16") for name in OTHER_NAMES),
        *((tensor_memory.from_zarr_v2, name, "<f4") for name in OTHER_ZARR_NAMES),
    ],
)
def test_unknown_names_say_what_is_known(look_up: Any, name: str, known: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        look_up(name)
    assert repr(name) in str(caught.value)
    assert known in str(caught.value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.quint8, torch.qint32])
def test_an_unknown_torch_dtype_names_the_key_and_a_way_out(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidShardingError) as caught:
        tensor_memory.from_torch(dtype, key="layer.weight")
    (finding,) = caught.value.findings
    assert finding.key == "layer.weight"
    assert finding.found == str(dtype)
    assert finding.remedy
    assert "float32" in str(caught.value)
    uses: list[Callable[[], object]] = [
        lambda: tensor_memory.from_torch(dtype),
        lambda: tensor_memory.is_lossless(dtype, torch.float32),
        lambda: tensor_memory.is_lossless(torch.float32, dtype),
        lambda: tensor_memory.as_tensor(np.zeros(2, np.int32), dtype),
        lambda: as_numpy(torch.empty(2, dtype=torch.complex32)),
    ]
    for use in uses:
        with pytest.raises(InvalidShardingError):
            use()


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of an 8- or 16-bit dtype."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return torch.arange(1 << (8 * dtype.itemsize)).to(bits).view(dtype)


def edge_values(dtype: torch.dtype) -> torch.Tensor:
    """Values of a 32- or 64-bit dtype that only just fit."""
    if dtype.is_complex:
        part = edge_values(torch.float32 if dtype == torch.complex64 else torch.float64)
        return torch.complex(part, part.flip(0))
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        tiny = torch.tensor(info.smallest_normal, dtype=dtype)
        values = [info.max, info.min, 1 + info.eps, 1 / 3, float("inf"), -0.0]
        return torch.cat([torch.tensor(values, dtype=dtype), (tiny * info.eps)[None]])
    ints = torch.iinfo(dtype)
    candidates = [ints.min, ints.max, 2**24 + 1, 2**31 - 1, 2**31 + 1, 2**53 + 1, 1, -1]
    return torch.tensor([v for v in candidates if ints.min <= v <= ints.max], dtype=dtype)


def changed_by(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    """Those of ``values``, NaN aside, that do not come back from a trip through ``wanted``."""
    back = values.to(wanted).to(values.dtype)
    if values.dtype.is_complex:
        return values[back != values]
    is_nan = torch.isnan(values.to(torch.float64))
    rows = (tensor.view(torch.uint8).reshape(len(tensor), -1) for tensor in (values, back))
    return values[torch.ne(*rows).any(1) & ~is_nan]


PAIRS = [
    pytest.param(source.torch, target.torch, id=f"{source.name}-{target.name}")
    for source in DTYPES
    for target in DTYPES
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_lossless_means_that_every_value_comes_back_and_refused_that_some_do_not(
    source: torch.dtype, target: torch.dtype
) -> None:
    values = all_values(source) if source.itemsize <= 2 else edge_values(source)
    if not tensor_memory.is_lossless(source, target):
        # Integers that change their sign come back, and nothing can say what a NaN becomes.
        exact = not (target.is_complex or target.is_floating_point)
        assert exact or changed_by(values, target).numel()
        return
    assert changed_by(values, target).tolist() == []
    if not target.is_complex and source.itemsize <= 2:
        before, after = values.to(torch.float64), values.to(target).to(torch.float64)
        assert torch.equal(before.nan_to_num(nan=7), after.nan_to_num(nan=7))


# Of integers the test above says only what is lost; these are the pairs that it leaves open.
@pytest.mark.parametrize(
    ("source", "target", "is_lossless"),
    [
        *((row.torch, row.torch, True) for row in DTYPES),
        (torch.int8, torch.int16, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.uint8, True),
        (torch.int8, torch.uint8, False),
        (torch.int16, torch.int8, False),
        (torch.float32, torch.int64, False),
        (torch.uint64, torch.int64, False),
    ],
)
def test_integers_fit_into_wider_ones_and_each_dtype_into_itself(
    source: torch.dtype, target: torch.dtype, is_lossless: bool
) -> None:
    assert tensor_memory.is_lossless(source, target) == is_lossless
