"""A web page of how the tensors of a checkpoint are cut into chunks, and which rank wrote each.

``contents`` reads from the checkpoint what there is to show; ``page`` turns that into HTML, whose
script draws.
"""

from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, checkpoint_map

__all__ = ["CheckpointMap", "MappedTensor", "checkpoint_map"]
