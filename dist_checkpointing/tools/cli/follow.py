"""``dckpt ls --follow``: follows the saves that are going on."""

from __future__ import annotations

import json
import sys
import time

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.tools.cli.screen import one_line, painted, progress_bar, say
from dist_checkpointing.tools.inspect.opening import explaining
from dist_checkpointing.tools.inspect.runs import (
    StepState,
    holder_at,
    is_run,
    look_at,
    step_folders,
)

_SECONDS = 0.5
_NOT_SAVED = 1
_INTERRUPTED = 130


def follow_saves(path: Location, *, as_json: bool) -> int:
    """Print how saves end: those of a run until Ctrl-C, or the one of a checkpoint.

    Returns:
        The exit code: 0 if a checkpoint is committed at ``path``.
    """
    try:
        is_empty = location.is_folder(path) and not location.names_in(path)
        if is_empty or is_run(path) or not location.is_there(path):
            _follow_run(path, as_json=as_json)
        elif not location.is_folder(path) or holder_at(path) is None or is_committed(path):
            with explaining(path):
                read_config(path)  # raises if there is neither a checkpoint nor a save
        return 0 if _follow_save(path.name, path, None, as_json=as_json) else _NOT_SAVED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _follow_run(root: Location, *, as_json: bool) -> None:
    """Returns only if a checkpoint, and no run, is saved there."""
    folders = step_folders(root)
    known = {name for name, folder in folders.items() if is_committed(folder)}
    if not as_json:
        _say_now(f"{one_line(str(root))}: waiting for saves; Ctrl-C ends")
    while folders or not (is_committed(root) or holder_at(root) is not None):
        for name, folder in step_folders(root).items():
            if name in known and isinstance(folder, ObjectPath):
                continue  # it stays a checkpoint while it is overwritten
            if name not in known if is_committed(folder) else holder_at(folder) is not None:
                before = [folder for other, folder in folders.items() if other in known]
                size = look_at("", before[-1]).files.num_bytes if before else None
                if _follow_save(name, folder, size, as_json=as_json):
                    known.add(name)
        _pause()
        folders = step_folders(root)


def _follow_save(name: str, folder: Location, expected_bytes: int | None, *, as_json: bool) -> bool:
    """Show a save until it ends; returns whether it has committed a checkpoint."""
    holder = None if is_committed(folder) else holder_at(folder)
    if holder is not None and not as_json:
        about = "" if expected_bytes is None else f", about {bytes_text(expected_bytes)}"
        _say_now(f"{one_line(name)}: being saved by process {holder.pid} on {holder.host}{about}")
    done = 0
    with progress_bar(one_line(name), expected_bytes) as bar:
        while not is_committed(folder) and holder_at(folder) is not None:
            files = look_at(name, folder).files
            # A file that is made at its full size has fewer blocks.
            size = min(files.num_bytes, files.num_bytes_on_disk)
            bar.advance(size - done)
            done = size
            _pause()
    return _print_end(name, folder, as_json=as_json)


def _print_end(name: str, folder: Location, *, as_json: bool) -> bool:
    step = look_at(name, folder) if location.is_folder(folder) else None
    is_saved = step is not None and step.state.is_checkpoint
    state = "deleted" if step is None else step.state.value
    num_bytes = None if step is None else step.files.num_bytes
    seconds = None  # not known of what another program saved
    if step is not None and is_saved and step.begun_at is not None:
        seconds = max(step.saved_at - step.begun_at, 1e-3)
    if as_json:
        document = {"step": name, "path": str(folder), "state": state}
        _say_now(json.dumps(document | {"num_bytes": num_bytes, "seconds": seconds}))
        return is_saved
    text = f"{one_line(name)}: {state}"
    if step is None:
        _say_now(painted(text, "yellow"))
    elif not is_saved:
        _say_now(painted(f"{text}: its save has ended", "red"))
    else:
        text += f", {bytes_text(step.files.num_bytes)}"
        if seconds is not None:
            speed = bytes_text(step.files.num_bytes / seconds)
            text += f", saved in {seconds:.1f} s ({speed}/s)"
        _say_now(painted(text, "red" if step.state is StepState.DAMAGED else "green"))
    return is_saved


def _say_now(line: str) -> None:
    """Print a line at once, into a pipe too."""
    say(line)
    sys.stdout.flush()


def _pause() -> None:
    time.sleep(_SECONDS)
