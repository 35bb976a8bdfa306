"""A web page that shows how tensors are cut into chunks, and which rank wrote each.

``contents`` reads the chunks and their writers; ``page`` makes the HTML, and its script draws.
"""

from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, checkpoint_map

__all__ = ["CheckpointMap", "MappedTensor", "checkpoint_map"]
