"""What each save of a run took, for functions of the caller and for logs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed save, as ``on_saved`` of a CheckpointManager gets it.

    Attributes:
        step: Number of the step.
        folder: Folder of the checkpoint.
        metric: The metric that was passed to the save, if any.
        seconds: Seconds from the call to the commit.
        blocked_seconds: Those of them in which the training waited, also for the save before.
        num_bytes: Bytes of all tensors, before compression; 0 if a third party's strategy does not
            tell.
    """

    step: int
    folder: Path
    metric: float | None
    seconds: float
    blocked_seconds: float
    num_bytes: int


Hook = Callable[[SavedStep], object]
Hooks = Hook | Sequence[Hook]


@dataclass(slots=True)
class Stopwatch:
    """Measures one save, from when it is made."""

    begin: float = field(default_factory=time.perf_counter)
    num_bytes: int = 0
    blocked_seconds: float | None = None

    def stop_blocking(self) -> None:
        """Note that the training goes on."""
        self.blocked_seconds = time.perf_counter() - self.begin

    def saved(self, step: int, folder: Path, metric: float | None) -> SavedStep:
        """The save, which is committed now."""
        seconds = time.perf_counter() - self.begin
        blocked = seconds if self.blocked_seconds is None else self.blocked_seconds
        return SavedStep(step, folder, metric, seconds, blocked, self.num_bytes)


def call_hooks(hooks: Hooks, saved: SavedStep) -> None:
    """Call functions of the caller; what they raise is logged, because the checkpoint is there."""
    for hook in (hooks,) if callable(hooks) else hooks:
        try:
            hook(saved)
        except Exception:
            logger.exception("a hook of the manager failed for %s", saved)


class JsonLinesLog:
    """An ``on_saved`` that appends each save to a file, as one JSON object a line.

    Example:
        >>> log = JsonLinesLog("saves.jsonl")
        >>> with CheckpointManager("run", on_saved=log) as manager:
        ...     manager.save(100, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))})
        >>> line = json.loads(Path("saves.jsonl").read_text())
        >>> line["step"], line["num_bytes"], sorted(line)
        (100, 12, ['blocked_seconds', 'metric', 'num_bytes', 'seconds', 'step', 'time'])
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: Path = Path(path)

    def __call__(self, saved: SavedStep) -> None:
        """Append a line; ``time`` is the Unix time of the commit."""
        line = {
            "step": saved.step,
            "time": round(time.time(), 3),
            "seconds": round(saved.seconds, 6),
            "blocked_seconds": round(saved.blocked_seconds, 6),
            "num_bytes": saved.num_bytes,
            "metric": saved.metric,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
