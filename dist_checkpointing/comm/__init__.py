"""How ranks talk to each other: a small protocol, and the three worlds it runs in.

``agree`` is the only way an exception crosses ranks: each rank brings its error or nothing, and all
leave with the same error or with nothing. ``exchange``, ``from_rank0`` and ``agreed`` are built on
it, so a reader finds every such point by searching for these four names.
"""

from __future__ import annotations

from dist_checkpointing.comm.defaults import default_comm, group_comm
from dist_checkpointing.comm.process_group import TorchComm
from dist_checkpointing.comm.protocol import Comm, SingleProcess
from dist_checkpointing.comm.threads import ThreadComm

__all__ = ["Comm", "SingleProcess", "ThreadComm", "TorchComm", "default_comm", "group_comm"]
