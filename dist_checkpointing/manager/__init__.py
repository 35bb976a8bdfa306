"""The checkpoints of one run."""

from dist_checkpointing.format.run_steps import RunRecord, StepRecord, read_record
from dist_checkpointing.manager.checkpoint_manager import CheckpointManager
from dist_checkpointing.manager.places import Place
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.save_log import JsonLinesLog, SavedStep

__all__ = [
    "CheckpointManager",
    "JsonLinesLog",
    "Place",
    "Retention",
    "RunRecord",
    "SavedStep",
    "StepRecord",
    "read_record",
]
