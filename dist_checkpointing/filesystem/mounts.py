"""What is known of the file system that a folder is on: its type, and the room on it."""

from __future__ import annotations

import os
from pathlib import Path

from dist_checkpointing.errors import CheckpointingException, Finding


def check_room(folder: Path, num_bytes: int) -> None:
    """Check before a save that ``num_bytes`` can be written below a folder.

    Quotas are not checked.

    Raises:
        CheckpointingException: if it is write-protected or a file, or its file system too full.
    """
    place = next(place for place in (folder, *folder.parents) if place.exists())
    findings = []
    if not place.is_dir():
        findings.append(Finding("a file is in the way", path=str(place)))
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = "this process may not write here"
        findings.append(Finding(problem, path=str(place), remedy="Change the permissions."))
    room = os.statvfs(place)
    # Some file systems do not say how large they are.
    if room.f_blocks and room.f_bavail * room.f_frsize < num_bytes:
        findings.append(
            Finding(
                "not enough free space",
                expected=f"{num_bytes} bytes",
                found=f"{room.f_bavail * room.f_frsize} bytes",
                path=str(place),
                remedy="Delete old checkpoints, or keep fewer.",
            )
        )
    if findings:
        raise CheckpointingException(f"cannot save into {folder}", findings)


def file_system_type(path: Path) -> str:
    """The kernel's name for the type of the file system of ``path``; "" if it is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except FileNotFoundError:
        return ""
    device = path.stat().st_dev
    # Spaces in paths are escaped, so this is the field of the device.
    _, _, rest = mounts.partition(f" {os.major(device)}:{os.minor(device)} ")
    return rest.partition("\n")[0].partition(" - ")[2].partition(" ")[0]
