"""What Megatron's training imports from its writer."""

from dist_checkpointing.interop.megatron.import_hook import forwarding

_results_queue = None
__getattr__ = forwarding(__name__, left_out=("FileSystemWriterAsync",))
