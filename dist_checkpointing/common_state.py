"""Whether all ranks hold the same common state, of which only rank 0's is saved."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
from collections.abc import Callable

import torch

from dist_checkpointing.collector import paused_collector
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import CommonStateDict
from dist_checkpointing.tree import flatten, path_text
from dist_checkpointing.validation import difference_of_common_state

logger = logging.getLogger(__name__)


def compare_common_state(
    common: CommonStateDict,
    preprocess: Callable[[CommonStateDict], CommonStateDict] | None,
    comm: Comm,
) -> None:
    """Log, on every rank that differs, how its common state differs from rank 0's."""
    if comm.world_size == 1:
        return
    with comm.agreed("comparing the common state"), paused_collector():
        seen = common if preprocess is None else preprocess(dict(common))
        leaves, _ = flatten(seen)
        digests = {path_text(path): _digest(leaf) for path, leaf in leaves.items()}
        text = repr(sorted(digests.items())).encode()
        summary = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    if comm.all_same(summary >> 2):
        return
    difference = difference_of_common_state(comm.broadcast(digests), digests, comm.rank)
    if difference is not None:
        logger.warning("%s", difference)


def _digest(leaf: object) -> bytes:
    """Equal for equal leaves; a pickle alone also depends on which objects are the same one."""
    try:
        if isinstance(leaf, torch.Tensor):
            bits = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = f"{leaf.dtype}{tuple(leaf.shape)}".encode() + bits.numpy().tobytes()
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            content = repr(leaf).encode()
        else:
            content = pickle.dumps(copy.deepcopy(leaf))
    except Exception as error:  # noqa: BLE001 - saving it will fail with a better message
        content = repr(error).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
