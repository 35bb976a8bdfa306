"""What tests in simulated worlds save: a state of which everything is one value."""

from typing import Any

import torch

from dist_checkpointing import CheckpointManager
from dist_checkpointing.comm import Comm
from states import rows, shard


def state_of(comm: Comm, value: int | None) -> dict[str, Any]:
    """What a rank saves, of which everything is one value; or a template."""
    number = -1.0 if value is None else float(value)
    same = shard("optimizer.same", torch.full((3,), number), replica_id=comm.rank)
    return {"rows": rows("rows", torch.full((12, 2), number), comm), "same": same, "value": number}


def value_of(loaded: Any) -> int:
    """The value of a state that was loaded; ValueError if it has several."""
    (value,) = {*loaded["rows"].flatten().tolist(), *loaded["same"].tolist(), loaded["value"]}
    return int(value)


def loaded_from(manager: CheckpointManager, comm: Comm, step: int | None = None) -> int:
    return value_of(manager.load(state_of(comm, None), step))
