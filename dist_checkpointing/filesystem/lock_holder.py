"""Who holds the lock of a folder, and whether that process is gone."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

from dist_checkpointing.filesystem import local

_TOKEN: Final = re.compile(r"[0-9a-f]{32}")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Kind(Enum):
    """What the lock is: a ``flock``, or the file itself."""

    FLOCK = "flock"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lock file: who holds the lock.

    Attributes:
        token: Random name of this one holding of the lock.
        kind: Kind of the lock.
        host: Name of the machine.
        boot: Id of the last start of the machine.
        pid_space: Namespace of ``pid``: each container numbers its own processes.
        pid: Id of the process.
        started: When the process started, in ticks of the kernel; a later process may have its id.
    """

    token: str
    kind: Kind
    host: str
    boot: str
    pid_space: str
    pid: int
    started: int

    @classmethod
    def own(cls, kind: Kind) -> Holder:
        """This process."""
        pid = os.getpid()
        boot = _boot()
        return cls(
            uuid.uuid4().hex,
            kind,
            socket.gethostname(),
            boot,
            os.readlink("/proc/self/ns/pid") if boot else "",  # noqa: PTH115 - for each save
            pid,
            _start_of(pid) or 0,
        )

    @property
    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False on another machine, which cannot know."""
        if not (self.boot and self.is_here):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it exists, and belongs to another user
        return _start_of(self.pid) not in (self.started, None)

    @property
    def is_here(self) -> bool:
        """Whether the process runs, or ran, where this one can see it."""
        own = Holder.own(self.kind)
        here = (own.host, own.boot, own.pid_space)
        return (self.host, self.boot, self.pid_space) == here

    def to_json(self) -> bytes:
        """The content of a lock file."""
        return json.dumps({**asdict(self), "kind": self.kind.value}).encode()

    @classmethod
    def parsed(cls, data: bytes) -> Holder | None:
        """The holder that a lock file names; None if it names none."""
        try:
            content = local.parse_json(data)
            holder = cls(**{**content, "kind": Kind(content["kind"])})
        except (ValueError, KeyError, TypeError):
            return None
        texts = (holder.token, holder.host, holder.boot, holder.pid_space)
        numbers = (holder.pid, holder.started)
        if [*map(type, texts)] != [str] * 4 or [*map(type, numbers)] != [int] * 2:
            return None
        # Any other number would mean a group of processes to the kernel.
        return holder if _TOKEN.fullmatch(holder.token) and 0 < holder.pid < 1 << 31 else None


@cache
def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _start_of(pid: int) -> int | None:
    """When a process started; 0 if it has ended but is still listed, None if that is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
