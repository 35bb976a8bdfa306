"""What Megatron's users lean on, where it differs from the defaults of this library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class MegatronDefaults:
    """How ``save`` and ``load`` of the package that Megatron imports behave.

    Attributes:
        backend: Backend, and its version, of a save that names no strategy.
        validate: Whether a load checks that the shards of all ranks make up each tensor once.
        cast: What to do where stored and wanted dtype differ. Megatron converts and says nothing.
        overwrite: Whether a save may replace a checkpoint, also one that Megatron wrote.
        trusted: Whether loads unpickle anything, and saves take anything that pickles.

    Example:
        >>> from dist_checkpointing.interop.megatron import MegatronDefaults
        >>> MegatronDefaults().backend
        ('torch_dist', 1)
    """

    backend: tuple[str, int] = ("torch_dist", 1)
    validate: bool = True
    cast: Literal["error", "widen", "any"] = "any"
    overwrite: bool = True
    trusted: bool = False


_in_use = MegatronDefaults()


def defaults() -> MegatronDefaults:
    """The defaults that are in use in this process."""
    return _in_use


def use(**changes: Any) -> None:
    """Use these values from now on, and for the others those of the class."""
    global _in_use  # noqa: PLW0603 - an import hook is one for a process, and so is what it means
    _in_use = replace(MegatronDefaults(), **changes)
