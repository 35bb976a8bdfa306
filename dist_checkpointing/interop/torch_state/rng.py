"""The states of a process's random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and the current CUDA device."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that training code uses
    state["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue where ``rng_state`` was called."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
