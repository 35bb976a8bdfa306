"""For tests: ranks simulated by threads, and the conformance suite that every backend passes."""

from dist_checkpointing.testing.ranks import run_ranks

__all__ = ["run_ranks"]
