"""Which checkpoints of a run are kept: a pure function of their steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.file_names import optimizer_prefixes


class Due(NamedTuple):
    """What is due by retention: steps to delete, oldest first, and to free of optimizer state."""

    delete: tuple[int, ...]
    strip: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many checkpoints are kept, and how complete.

    Attributes:
        keep_last: Number of the newest checkpoints that are kept; None for all.
        keep_every: Steps that are multiples of this are always kept.
        keep_best: Number of checkpoints with the best metrics that are kept beside the others.
        best: Which metrics are best.
        drop_optimizer_after: Number of the newest checkpoints that keep their optimizer state.
            Older ones can be evaluated, but training cannot continue from them. Not for runs in
            an object store.
        optimizer_prefix: Prefix of the keys of optimizer state; None for ``optim.``,
            ``optimizer.``, ``chained_0.optimizer.`` and others that ``dckpt stats`` counts so.

    Example:
        >>> # The newest three, every 1000th step, and optimizer state only in the newest two.
        >>> retention = Retention(keep_last=3, keep_every=1000, drop_optimizer_after=2)
        >>> retention.due([500, 1000, 1500, 2000, 2500], protected=[2500])
        Due(delete=(500,), strip=(1000, 1500))
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: Literal["lowest", "highest"] = "lowest"
    drop_optimizer_after: int | None = None
    optimizer_prefix: str | None = None

    def __post_init__(self) -> None:
        findings = [
            Finding(f"{name} must be at least 1", found=value)
            for name in ("keep_last", "keep_every", "keep_best", "drop_optimizer_after")
            for value in (getattr(self, name),)
            if value is not None and value < 1
        ]
        if self.best not in ("lowest", "highest"):
            findings.append(Finding("best must be 'lowest' or 'highest'", found=repr(self.best)))
        if self.optimizer_prefix == "":
            findings.append(Finding("an empty optimizer_prefix would delete every tensor"))
        if findings:
            raise CheckpointingException("invalid retention", findings)

    def prefixes(self, keys: Iterable[str]) -> list[str]:
        """The prefixes of the optimizer state of a checkpoint; empty if it has none.

        Args:
            keys: keys of all tensors of the checkpoint.
        """
        if self.optimizer_prefix is None:
            return optimizer_prefixes(keys)
        is_there = any(key.startswith(self.optimizer_prefix) for key in keys)
        return [self.optimizer_prefix] if is_there else []

    def best_steps(self, metrics: Mapping[int, float]) -> list[int]:
        """The steps by their metrics, best first; of equal ones the newest first."""
        sign = 1 if self.best == "lowest" else -1
        return sorted(metrics, key=lambda step: (sign * metrics[step], -step))

    def due(
        self,
        steps: Collection[int],
        protected: Collection[int],
        metrics: Mapping[int, float] = MappingProxyType({}),
        history: Collection[int] | None = None,
    ) -> Due:
        """What is due for the committed ``steps``; ``protected`` ones are never touched.

        Args:
            steps: steps that are committed.
            protected: steps that stay as they are.
            metrics: metrics of some of the steps.
            history: those of the steps that the latest one has grown from, and itself; by default
                all. Only these count as newer than another.
        """
        newest_first = sorted(steps if history is None else history, reverse=True)

        def newest(count: int | None) -> set[int]:
            """The steps than which fewer than ``count`` are newer."""
            if count is None or count > len(newest_first):
                return set(steps)
            return {step for step in steps if step >= newest_first[count - 1]}

        kept = newest(self.keep_last)
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best is not None:
            known = {step: metrics[step] for step in newest_first if step in metrics}
            kept |= set(self.best_steps(known)[: self.keep_best])
        kept |= set(steps) & set(protected)
        complete = newest(self.drop_optimizer_after) | set(protected)
        return Due(tuple(sorted(set(steps) - kept)), tuple(sorted(kept - complete)))
