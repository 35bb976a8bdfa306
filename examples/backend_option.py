"""The ``--backend`` option of the examples."""

from __future__ import annotations

import argparse

from dist_checkpointing.strategies.registry import StrategyAction, available_strategies

HELP = "NAME (its newest version) or NAME:VERSION to save with; the library's default if left out"


def parse_backend(text: str) -> str | tuple[str, int]:
    """What ``save`` takes: a name, or a name and a version; a wrong one ends the program here."""
    known = available_strategies(StrategyAction.SAVE_SHARDED)
    for name, version in known:
        if text == name:
            return name
        if text == f"{name}:{version}":
            return name, version
    choices = ", ".join(f"{name}:{version}" for name, version in known)
    raise argparse.ArgumentTypeError(f"{text!r} is none of {choices}")
