"""A command on many ranks: ``torchrun ... -m dist_checkpointing``; the first one talks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_checkpointing.errors import RankFailedError

if TYPE_CHECKING:
    from dist_checkpointing.comm import Comm

IS_UNDER_TORCHRUN: bool = "TORCHELASTIC_RUN_ID" in os.environ
IS_SILENT: bool = IS_UNDER_TORCHRUN and os.environ.get("RANK", "0") != "0"
"""Whether another rank says what this one would."""


@contextmanager
def ranks() -> Iterator[Comm]:
    """The ranks that run this command together, or this process alone."""
    # Not at the top: these import torch.
    from torch import distributed  # noqa: PLC0415

    from dist_checkpointing.comm import SingleProcess  # noqa: PLC0415
    from dist_checkpointing.comm.torch_distributed import chosen_comm  # noqa: PLC0415

    if not IS_UNDER_TORCHRUN:
        try:
            yield SingleProcess()
        except RankFailedError as error:  # what failed says more than that rank 0 of 1 failed
            raise error.__cause__ or error from None
        return
    distributed.init_process_group("gloo")
    try:
        yield chosen_comm(None)
    finally:
        distributed.destroy_process_group()
