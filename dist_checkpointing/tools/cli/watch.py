"""``dckpt watch``: follows a save that is going on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.tools.cli.screen import one_line, painted, progress_bar, say
from dist_checkpointing.tools.inspect.opening import explaining
from dist_checkpointing.tools.inspect.runs import (
    RunStep,
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
            parser=as_location,
            help="Folder or URL of a run, or of a checkpoint that is being saved.",
        ),
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each save that has ended.")
    ] = False,
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
        if is_run(place) or (location.is_folder(place) and not location.names_in(place)):
            _watch_run(place, as_json=as_json)
        elif not location.is_folder(place) or holder_at(place) is None or is_committed(place):
            with explaining(place):
                read_config(place)  # raises if there is neither a checkpoint nor a save
            _tell(place.name, place, as_json=as_json)
        elif not _follow(place.name, place, None, as_json=as_json):
            raise typer.Exit(_NOT_SAVED)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def _watch_run(root: Location, *, as_json: bool) -> None:
    folders = step_folders(root)
    known = {name for name, folder in folders.items() if is_committed(folder)}
    if not as_json:
        say_now(f"{one_line(str(root))}: waiting for saves; Ctrl-C ends")
    while True:
        for name, folder in step_folders(root).items():
            if name in known and isinstance(folder, ObjectPath):
                continue  # it stays a checkpoint while it is overwritten
            if is_committed(folder):
                if name not in known:  # saved between two looks
                    _tell(name, folder, as_json=as_json)
                known.add(name)
            elif holder_at(folder) is not None:
                before = [folder for other, folder in folders.items() if other in known]
                size = look_at("", before[-1]).files.num_bytes if before else None
                if _follow(name, folder, size, as_json=as_json):
                    known.add(name)
        _pause()
        folders = step_folders(root)


def _follow(name: str, folder: Location, expected_bytes: int | None, *, as_json: bool) -> bool:
    """Show a save until it ends; returns whether it has committed a checkpoint."""
    holder = holder_at(folder)
    if holder is not None and not as_json:
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
    return _tell(name, folder, as_json=as_json)


def _tell(name: str, folder: Location, *, as_json: bool) -> bool:
    """Print how the save of a step has ended; returns whether it has committed a checkpoint."""
    if as_json:
        return _tell_as_json(name, folder)
    if not location.is_folder(folder):
        say_now(painted(f"{one_line(name)}: deleted", "yellow"))
        return False
    step = look_at(name, folder)
    if not step.state.is_checkpoint:
        say_now(painted(f"{one_line(name)}: {step.state.value}: its save has ended", "red"))
        return False
    text = f"{one_line(name)}: {step.state.value}, {bytes_text(step.files.num_bytes)}"
    if (seconds := _seconds_of(step)) is not None:
        text += f", saved in {seconds:.1f} s ({bytes_text(step.files.num_bytes / seconds)}/s)"
    say_now(painted(text, "red" if step.state is StepState.DAMAGED else "green"))
    return True


def _tell_as_json(name: str, folder: Location) -> bool:
    step = look_at(name, folder) if location.is_folder(folder) else None
    document = {
        "step": name,
        "path": str(folder),
        "state": "deleted" if step is None else step.state.value,
        "num_bytes": None if step is None else step.files.num_bytes,
        "seconds": None if step is None else _seconds_of(step),
    }
    say_now(json.dumps(document))
    return step is not None and step.state.is_checkpoint


def _seconds_of(step: RunStep) -> float | None:
    """How long the save of a step took; None for what another program saved."""
    if not step.state.is_checkpoint or step.begun_at is None:
        return None
    return max(step.saved_at - step.begun_at, 1e-3)


def say_now(line: str) -> None:
    """Print a line at once, into a pipe too."""
    say(line)
    sys.stdout.flush()


def _pause() -> None:
    time.sleep(_SECONDS)
