"""``dckpt watch``: follows a save that is going on."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.filesystem import store
from dist_checkpointing.filesystem.object_path import Location, ObjectPath
from dist_checkpointing.filesystem.paths import location
from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.tools.cli.screen import one_line, painted, progress_bar, say
from dist_checkpointing.tools.inspect.opening import explaining
from dist_checkpointing.tools.inspect.runs import (
    StepState,
    holder_at,
    is_run,
    located,
    look_at,
    step_folders,
)

_SECONDS = 0.5
_NOT_SAVED = 1
_INTERRUPTED = 130


def watch(
    path: Annotated[
        Path,
        typer.Argument(
            parser=location,
            help="Folder or URL of a run, or of a checkpoint that is being saved.",
        ),
    ],
) -> None:
    """Follow a save that is going on: who saves, how many bytes so far, and how it ends.

    Of a run, follows one save after the other until Ctrl-C; how much a save
    will write is taken from the step before. Of one checkpoint, ends with its
    save. Only looks at files: the training does not notice.

    Exit code: 0 if the checkpoint is committed, 1 if its save ended without a
    commit, 130 after Ctrl-C.

    Example: dckpt watch runs/gpt
    """
    place = located(path)
    try:
        if is_run(place) or (store.is_folder(place) and not store.names_in(place)):
            _watch_run(place)
        elif holder_at(place) is None or is_committed(place):
            with explaining(place):
                read_config(place)  # raises if there is neither a checkpoint nor a save
            _tell(place.name, place)
        elif not _follow(place.name, place, None):
            raise typer.Exit(_NOT_SAVED)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def _watch_run(root: Location) -> None:
    folders = step_folders(root)
    known = {name for name, folder in folders.items() if is_committed(folder)}
    say_now(f"{one_line(str(root))}: waiting for saves; Ctrl-C ends")
    while True:
        for name, folder in step_folders(root).items():
            if name in known and isinstance(folder, ObjectPath):
                continue  # it stays a checkpoint while it is overwritten
            if is_committed(folder):
                if name not in known:  # saved between two looks
                    _tell(name, folder)
                known.add(name)
            elif holder_at(folder) is not None:
                before = [folder for other, folder in folders.items() if other in known]
                size = look_at("", before[-1]).files.num_bytes if before else None
                if _follow(name, folder, size):
                    known.add(name)
        _pause()
        folders = step_folders(root)


def _follow(name: str, folder: Location, expected_bytes: int | None) -> bool:
    """Show a save until it ends; returns whether it has committed a checkpoint."""
    holder = holder_at(folder)
    if holder is not None:
        about = "" if expected_bytes is None else f", about {bytes_text(expected_bytes)}"
        say_now(f"{one_line(name)}: being saved by process {holder.pid} on {holder.host}{about}")
    done = 0
    with progress_bar(one_line(name), expected_bytes) as bar:
        while not is_committed(folder) and holder_at(folder) is not None:
            files = look_at(name, folder).files
            # A file that is made at its full size has fewer blocks.
            size = min(files.num_bytes, files.num_bytes_on_disk)
            bar.advance(size - done)
            done = size
            _pause()
    return _tell(name, folder)


def _tell(name: str, folder: Location) -> bool:
    """Print how the save of a step has ended; returns whether it has committed a checkpoint."""
    if not store.is_folder(folder):
        say_now(painted(f"{one_line(name)}: deleted", "yellow"))
        return False
    step = look_at(name, folder)
    if not step.state.is_checkpoint:
        say_now(painted(f"{one_line(name)}: {step.state.value}: its save has ended", "red"))
        return False
    text = f"{one_line(name)}: {step.state.value}, {bytes_text(step.files.num_bytes)}"
    if step.begun_at is not None:
        seconds = max(step.saved_at - step.begun_at, 1e-3)
        text += f", saved in {seconds:.1f} s ({bytes_text(step.files.num_bytes / seconds)}/s)"
    say_now(painted(text, "red" if step.state is StepState.DAMAGED else "green"))
    return True


def say_now(line: str) -> None:
    """Print a line at once, into a pipe too."""
    say(line)
    sys.stdout.flush()


def _pause() -> None:
    time.sleep(_SECONDS)
