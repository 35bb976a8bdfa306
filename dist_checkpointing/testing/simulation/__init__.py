"""A simulated world for tests: real code, on disks, a store and machines that a seed troubles."""

from dist_checkpointing.testing.simulation.scheduler import StuckError
from dist_checkpointing.testing.simulation.world import MEMORY, OWN, SHARED, Fault, Launch, World

__all__ = ["MEMORY", "OWN", "SHARED", "Fault", "Launch", "StuckError", "World"]
