"""Element types of torch, and how bits get from torch to numpy and back.

They get there through views: no value is converted on its way to or from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.dtypes import ELEMENT_TYPES, DType, from_name, from_zarr_v2

__all__ = ["DType", "from_name", "from_zarr_v2"]  # beside what stands below

# float8_e8m0fnu came with torch 2.7.
DTYPES = tuple(row for row in ELEMENT_TYPES if hasattr(torch, row.name))
_BY_TORCH = {row.torch: row for row in DTYPES}


def from_torch(dtype: torch.dtype, *, key: str | None = None) -> DType:
    """The dtype for a torch dtype; InvalidShardingError if it cannot be stored."""
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        names = ", ".join(row.name for row in DTYPES)
        remedy = "Convert the tensor, or wrap it in a ShardedObject."
        finding = Finding("this dtype cannot be stored", key, names, str(dtype), remedy=remedy)
        raise InvalidShardingError("unsupported dtype", [finding]) from None


def is_lossless(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of ``stored``, signed zeros and infinities included, is in ``wanted``.

    This is stricter than numpy's "safe" casting, which allows int64 to float64.
    """
    source, target = from_torch(stored), from_torch(wanted)
    if source == target:
        return True
    if wanted.is_complex:
        return is_lossless(stored.to_real(), wanted.to_real())
    if stored == torch.bool:
        return target.name != "float8_e8m0fnu"  # it has no zero
    if wanted.is_floating_point and not stored.is_complex:
        return _fits_float(stored, wanted)
    if stored.is_complex or stored.is_floating_point or wanted == torch.bool:
        return False
    own, other = torch.iinfo(stored), torch.iinfo(wanted)
    return other.min <= own.min and own.max <= other.max


def _fits_float(stored: torch.dtype, wanted: torch.dtype) -> bool:
    # The 8-bit floats differ in their special values: no other type fits into one.
    if wanted.itemsize == 1:
        return False
    target = torch.finfo(wanted)
    if not stored.is_floating_point:
        # The most negative integer is a power of two, so the sign costs no precision.
        return (torch.iinfo(stored).max >> 1) * target.eps < 1
    source = torch.finfo(stored)
    is_fine = source.smallest_normal * source.eps >= target.smallest_normal * target.eps
    return source.eps >= target.eps and source.max <= target.max and is_fine


_BITS_BY_ITEMSIZE = {1: torch.int8, 2: torch.int16}
_BITS_BY_TORCH = {
    row.torch: _BITS_BY_ITEMSIZE[row.itemsize] for row in DTYPES if not row.is_of_numpy
}


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy array over the memory of a CPU tensor: same shape, same strides, same bits.

    A conjugate or negative view is copied first, because its memory holds other values.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dtype = from_torch(tensor.dtype)
    if dtype.is_of_numpy:
        return tensor.numpy()
    array: npt.NDArray[Any] = tensor.view(_BITS_BY_ITEMSIZE[dtype.itemsize]).numpy()
    return array.view(dtype.numpy)


def fillable(destination: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[Any] | None:
    """A numpy array over the memory of a tensor, if bits of ``dtype`` can be written there; None if
    torch must copy: to another device or dtype, or into a conjugate or negative view, whose memory
    holds other values than the view.
    """
    if destination.dtype is not dtype or not destination.is_cpu:
        return None
    if destination.is_conj() or destination.is_neg():
        return None
    bits = _BITS_BY_TORCH.get(dtype)
    return destination.numpy() if bits is None else destination.view(bits).numpy()


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_COMPARED = 32
"""More tensors than this that lie between each other are not compared one by one."""


def is_plain_memory(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose values are its CPU memory from ``data_ptr`` on, in C order."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def plain_addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Address of the first value of each tensor for which ``is_plain_memory`` holds; else -1."""
    return [tensor.data_ptr() if is_plain_memory(tensor) else -1 for tensor in tensors]


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of ``dtype`` over the memory of a numpy array with the same bits."""
    return torch.from_numpy(array.view(from_torch(dtype).bits)).view(dtype)


def overlaps_itself(data: torch.Tensor) -> bool:
    """Whether several elements surely have the same place in memory."""
    if data.layout is not torch.strided or data.is_contiguous():
        return False
    strides = [step for step, extent in zip(data.stride(), data.shape, strict=True) if extent > 1]
    return 0 in strides or len({*strides}) < len(strides)


def memory_of(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Address of the first byte, and bytes from there to the last; zeros if that is not known."""
    if type(tensor) not in _PLAIN or tensor is None or tensor.layout is not torch.strided:
        return 0, 0
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((extent - 1) * step for extent, step in axes) if tensor.numel() else 0
    return tensor.data_ptr(), elements * tensor.itemsize


def sharing_memory(
    tensors: Sequence[torch.Tensor | None],
    begins: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> list[int]:
    """Positions of the tensors that have an element in memory of another one, in order.

    ``begins`` and ``sizes`` are what ``memory_of`` gives for them. Columns of one tensor lie
    between each other, and do not share memory; but where very many do, they count as if they did.
    """
    order = np.argsort(begins, kind="stable")
    order = order[sizes[order] > 0]
    stops = np.searchsorted(begins[order], (begins + sizes)[order])
    shared: set[int] = set()
    for place in np.flatnonzero(stops > np.arange(1, len(order) + 1)).tolist():
        rows = order[place : stops[place]].tolist()
        if len(rows) > _MOST_COMPARED:
            shared.update(rows)
            continue
        first, *others = rows
        own = _places(tensors[first])
        for other in others:
            if np.shares_memory(own, _places(tensors[other])):
                shared |= {first, other}
    return sorted(shared)


def _places(tensor: Any) -> npt.NDArray[Any]:
    """An array over the memory of a tensor on any device, whose values must not be looked at."""
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": f"|V{tensor.itemsize}",
        "shape": tuple(tensor.shape),
        "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
