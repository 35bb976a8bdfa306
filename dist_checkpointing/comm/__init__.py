"""How ranks talk to each other: a small protocol, and the three kinds of ranks that it runs on.

An exception crosses ranks only in ``agree``, ``exchange``, ``to_rank0`` and ``from_rank0``: each
rank passes its error or None, and all ranks raise the same error or none. ``agreed`` is ``agree``
around a body, so searching for these five names finds every such point.
"""

from dist_checkpointing.comm.interface import Comm as Comm, SingleProcess as SingleProcess
from dist_checkpointing.comm.rank_failures import Outcome as Outcome
from dist_checkpointing.comm.thread_comm import ThreadComm as ThreadComm
from dist_checkpointing.comm.torch_distributed import (
    TorchComm as TorchComm,
    default_comm as default_comm,
    group_comm as group_comm,
)
