"""Which tensors are an optimizer's, as far as their keys say so."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?s?(?:[^a-z]|$)")
"""Megatron chains several optimizers. "optimal" and "optimism" are other words."""


def is_of_optimizer(key: str) -> bool:
    """Whether a key says that it is an optimizer's: ``optim.exp_avg``, ``chained_0.optimizer.0``.

    ``dckpt stats``, retention and the tensorstore backend all go by this.
    """
    return _OPTIMIZER.match(key) is not None


def optimizer_prefixes(keys: Iterable[str]) -> list[str]:
    """The prefixes with which all keys of optimizers begin, and no others.

    Args:
        keys: of all tensors; some may be an optimizer's.
    """
    known = list(keys)
    found = {match.group() for match in map(_OPTIMIZER.match, known) if match is not None}
    # A key that is nothing but the word has no end of its own: "optim" begins "optimal" too.
    return sorted(
        prefix
        for prefix in found
        if all(is_of_optimizer(key) for key in known if key.startswith(prefix))
    )
