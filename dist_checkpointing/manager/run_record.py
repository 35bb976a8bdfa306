"""What a CheckpointManager knows about its folder: one small JSON file, replaced as a whole."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location

logger: logging.Logger = logging.getLogger(__name__)

RECORD_NAME: Final = "manager.json"
_FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known about one step.

    Attributes:
        attempt: Name of the save that committed it; None if none has.
        begun: Name of the save that claimed its folder after that, and is not known to have
            committed.
        verified: Whether all of it has been read back and compared.
        stripped: Whether its optimizer state has been deleted.
        metric: Metric that was passed to its save.
    """

    attempt: str | None = None
    verified: bool = False
    stripped: bool = False
    begun: str | None = None
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The pointer, and every step that the manager has begun to write.

    Attributes:
        latest: The step that was last committed, durably, before this was written.
        steps: What is known about each step.
    """

    latest: int | None = None
    steps: dict[int, StepRecord] = field(default_factory=dict)

    def with_step(self, step: int, record: StepRecord) -> RunRecord:
        """The record with one step replaced."""
        return replace(self, steps={**self.steps, step: record})

    def without_step(self, step: int) -> RunRecord:
        """The record without a step."""
        return replace(self, steps={s: r for s, r in self.steps.items() if s != step})

    @property
    def metrics(self) -> dict[int, float]:
        """The metric of each step that has one."""
        return {s: r.metric for s, r in self.steps.items() if r.metric is not None}

    @property
    def last_verified(self) -> int | None:
        """The newest step that was verified and has its optimizer state."""
        return max(
            (s for s, r in self.steps.items() if r.verified and not r.stripped), default=None
        )


def read_record(root: Location) -> RunRecord:
    """The record of a folder; an empty one if it is missing or cannot be read.

    It is safe to lose the record: a manager deletes only what its record names.

    Raises:
        OSError: if the file system fails.
    """
    path = root / RECORD_NAME
    try:
        with local_folder.parsing("it cannot be read and is not used", path):
            return _parsed(location.read_json(path, _MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return RunRecord()
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
        return RunRecord()


def _parsed(content: Any) -> RunRecord:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}")
    steps = {int(step): StepRecord(**known) for step, known in content["steps"].items()}
    latest = content["latest"]
    if not (latest is None or type(latest) is int):
        raise ValueError(f"latest is {latest!r}")
    for record in steps.values():
        flags, names = (record.verified, record.stripped), (record.attempt, record.begun)
        texts = {type(value) for value in names} - {str, type(None)}
        is_number = type(record.metric) in (float, int, type(None))
        if texts or not is_number or {type(value) for value in flags} != {bool}:
            raise ValueError(f"{record!r}")
    return RunRecord(latest, steps)


def clear_unfinished(root: Location) -> None:
    """Delete the temporary files of a killed ``write_record``."""
    for path in location.temporaries([RECORD_NAME], root):
        path.unlink()


def write_record(record: RunRecord, root: Location, durability: local_folder.Durability) -> None:
    """Replace the record."""
    content = {
        "format": _FORMAT,
        "latest": record.latest,
        "steps": {str(step): _as_json(known) for step, known in sorted(record.steps.items())},
    }
    location.make_folder(root)
    location.write(root / RECORD_NAME, json.dumps(content).encode(), durability)


def _as_json(known: StepRecord) -> dict[str, object]:
    # Older versions do not know these, which are rarely there.
    unknown = ("begun", "metric")
    return {k: v for k, v in asdict(known).items() if k not in unknown or v is not None}
