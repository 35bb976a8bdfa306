"""Pictures of how the tensors of a checkpoint are cut into chunks, and who wrote them.

``contents`` finds out what there is to show; everything else is data in, picture out: ``page``
makes a web page that explores, ``treemap`` and ``chunk_grid`` lay out a still picture, which
``svg`` and ``png`` draw.
"""

from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, checkpoint_map

__all__ = ["CheckpointMap", "MappedTensor", "checkpoint_map"]
