"""What a person, or a pipe, sees: tables in the width there is, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

out = Console(soft_wrap=False, highlight=False)
"""Where results go. rich itself leaves colours out for NO_COLOR and for pipes."""

errors = Console(stderr=True, highlight=False)
"""Where errors and progress go."""


def fail(message: str) -> None:
    """Say in one place what went wrong; what follows the first line are its details."""
    first, _, rest = message.partition("\n")
    errors.print(f"[bold red]error:[/] {_escaped(first)}", soft_wrap=True)
    if rest:
        errors.print(_escaped(rest), soft_wrap=True)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def print_json(value: Any) -> None:
    """One JSON document on the standard output, for scripts."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def bytes_as_text(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes everything")
