"""What Megatron's training imports from its writer."""

from typing import Any

from dist_checkpointing.interop.megatron.hook import left_out

_results_queue = None


def __getattr__(name: str) -> Any:
    left_out("strategies.filesystem_async", name, ("FileSystemWriterAsync",))
