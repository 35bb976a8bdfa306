"""The checkpoints of one run."""

from dist_checkpointing.manager.manager import CheckpointManager
from dist_checkpointing.manager.retention import Retention

__all__ = ["CheckpointManager", "Retention"]
