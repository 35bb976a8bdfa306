"""Strategies that can list what they read."""

from __future__ import annotations

from typing import ClassVar

from dist_checkpointing.errors import Finding, UnsupportedFormatError


class KnownFormats:
    """Checks what is to be loaded against a list, for any kind of load strategy.

    Attributes:
        reads: the (backend, version)s that the strategy understands.
        argument: of ``load``, by which a user has chosen it.
    """

    reads: ClassVar[frozenset[tuple[str, int]]]
    argument: ClassVar[str] = "sharded_strategy"

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the backend."""
        backends = sorted({backend for backend, _ in self.reads})
        if loaded_backend not in backends:
            raise self._incompatible("backend", backends, loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the version."""
        versions = sorted({version for _, version in self.reads})
        if loaded_version not in versions:
            raise self._incompatible("version", versions, loaded_version)

    def _incompatible(self, what: str, known: object, found: object) -> UnsupportedFormatError:
        finding = Finding(
            f"{type(self).__name__} does not read this {what}",
            expected=f"one of {known}",
            found=found,
            remedy=f"Leave {self.argument} out: the right one is found from the checkpoint.",
        )
        return UnsupportedFormatError(f"wrong strategy for this checkpoint's {what}", [finding])
