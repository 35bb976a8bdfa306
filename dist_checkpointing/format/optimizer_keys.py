"""Which tensors belong to an optimizer, judged by their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?s?(?:[^a-z]|$)")
"""Megatron numbers chained optimizers. "optimal" and "optimism" do not match."""


def is_of_optimizer(key: str) -> bool:
    """Whether a key belongs to an optimizer: ``optim.exp_avg``, ``chained_0.optimizer.0``.

    ``dckpt stats``, retention and the tensorstore backend use this.
    """
    return _OPTIMIZER.match(key) is not None


def optimizer_prefixes(keys: Iterable[str]) -> list[str]:
    """The prefixes of the keys of optimizers, with which no other key begins."""
    known = list(keys)
    found = {match.group() for match in map(_OPTIMIZER.match, known) if match is not None}
    # A key that is only the word is a prefix of other words too: "optim" of "optimal".
    return sorted(
        prefix
        for prefix in found
        if all(is_of_optimizer(key) for key in known if key.startswith(prefix))
    )
