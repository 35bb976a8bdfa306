"""Nests of tensors in the state of an object, which the object that loads may not have yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from dist_checkpointing.mapping.nested_dicts import is_container


def outline(value: object, key: str) -> Any:
    """The nest in plain containers, with the key of each tensor, and None for other values."""
    if isinstance(value, torch.Tensor):
        return key
    if not is_container(value):
        return None
    if isinstance(value, dict):
        return {step: outline(below, f"{key}.{step}") for step, below in value.items()}
    assert isinstance(value, list | tuple)
    entries = (outline(below, f"{key}.{step}") for step, below in enumerate(value))
    return tuple(entries) if isinstance(value, tuple) else list(entries)


def keys_of(outlined: Any) -> Iterator[str]:
    """The keys of all tensors in an outline."""
    if isinstance(outlined, str):
        return iter((outlined,))
    below = outlined.values() if isinstance(outlined, Mapping) else outlined or ()
    return chain.from_iterable(map(keys_of, below))


def tensors_to_fill(outlined: Any, own: object, tensor: Callable[[str, object], Any]) -> Any:
    """The nest that was saved, of which only the tensors count.

    Args:
        outlined: its outline.
        own: the nest that is there now.
        tensor: gives what to fill, for the key of a tensor and what is at its place in ``own``.
    """
    if isinstance(outlined, str):
        return tensor(outlined, own)
    if isinstance(outlined, dict):
        there = own if isinstance(own, dict) else {}
        return {
            step: tensors_to_fill(below, there.get(step), tensor)
            for step, below in outlined.items()
        }
    if isinstance(outlined, list | tuple):
        entries = [*own] if isinstance(own, list | tuple) else []
        entries += [None] * (len(outlined) - len(entries))
        return type(outlined)(
            tensors_to_fill(below, entry, tensor)
            for below, entry in zip(outlined, entries, strict=False)
        )
    return None
