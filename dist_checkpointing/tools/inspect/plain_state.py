"""Common state and objects as a flat list of named values."""

from __future__ import annotations

import argparse
import io
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

_MOST_ENTRIES = 1 << 20
_MOST_TEXT = 200


def entries(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, lists, tuples and namespaces, by path such as ``args.betas.0``.

    An empty container is a leaf, and so is a container that contains itself.

    Raises:
        ValueError: if there are too many leaves for a state dict.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, frozenset[int]]] = [(name, value, frozenset())]
    while waiting:
        path, node, above = waiting.pop()
        children = None if id(node) in above else list(_children(node))
        if not children:
            found[_free(path, found)] = node
            continue
        if len(found) + len(waiting) > _MOST_ENTRIES:
            raise ValueError(
                f"more than {_MOST_ENTRIES} values are nested in {name or 'the state'}"
            )
        inside = above | {id(node)}
        waiting += [
            (f"{path}.{step}" if path else str(step), child, inside)
            for step, child in reversed(children)
        ]
    return found


def _children(node: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(node, argparse.Namespace | types.SimpleNamespace):
        node = vars(node)
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        yield from enumerate(node)


def _free(path: str, taken: dict[str, Any]) -> str:
    """A path that is not taken: the keys 1 and "1" of one dict have the same text."""
    number = 2
    name = path
    while name in taken:
        name = f"{path} ({number})"
        number += 1
    return name


def below(value: Any, path: str) -> Any:
    """The value at a path such as ``args.betas``.

    Raises:
        KeyError: if there is no value.
    """
    for step, child in _children(value):
        name = str(step)  # a key may itself hold dots
        if path == name:
            return child
        if path.startswith(f"{name}."):
            with suppress(KeyError):
                return below(child, path.removeprefix(f"{name}."))
    raise KeyError(path)


def type_text(value: Any) -> str:
    """The type of a value as text: ``int``, ``float32 tensor 2x3``."""
    if isinstance(value, torch.Tensor):
        shape = "x".join(map(str, value.shape)) or "scalar"
        return f"{str(value.dtype).removeprefix('torch.')} tensor {shape}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {'x'.join(map(str, value.shape)) or 'scalar'}"
    return type(value).__name__


def value_text(value: Any) -> str:
    """A value as one line of text."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        text = f"{type_text(value)} {_numbers_text(value)}"
    elif isinstance(value, io.BytesIO):
        text = f"BytesIO({value.getvalue()[:_MOST_TEXT]!r})"
    else:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001 - an unknown __repr__ may raise anything
            text = f"<{type(value).__name__}: {error}>"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"


def _numbers_text(value: torch.Tensor) -> str:
    if value.numel() > 16 or value.is_sparse or value.device.type == "meta":
        return "..."
    return str(value.tolist())
