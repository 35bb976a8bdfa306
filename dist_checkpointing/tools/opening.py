"""Opens whatever a user names: a checkpoint, a step of a run, or files of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import CheckpointNotFoundError, Finding
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.locks import holder_of
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import CheckpointingConfig, is_committed
from dist_checkpointing.format.leftovers import ATTEMPT_NAME
from dist_checkpointing.tools.runs import LATEST, is_run, located, step_folders

if TYPE_CHECKING:
    from dist_checkpointing.strategies.tensor_files import TensorFiles

_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_TORCH_SIGNATURES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
"""How files of torch.save begin: as zip archives, or (before 1.6) as pickles of a number."""

_OPENED_ELSEWHERE = (
    "dckpt ls, show, stats and diff open it; dckpt convert makes a checkpoint of it."
)
_FOREIGN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    ("safetensors (such as a Hugging Face model)", ("*.safetensors*",), _OPENED_ELSEWHERE),
    (
        "an Orbax checkpoint (JAX)",
        ("_CHECKPOINT_METADATA", "_METADATA", "[0-9]*/_CHECKPOINT_METADATA"),
        "It is not read here: export it with Orbax, for example to safetensors.",
    ),
    (
        "a DeepSpeed checkpoint",
        ("*_model_states.pt", "global_step*/*_model_states.pt", "zero_to_fp32.py"),
        _OPENED_ELSEWHERE,
    ),
    (
        "Megatron's older format (torch)",
        ("mp_rank_*/*.pt",),
        "Each of its .pt files opens by itself; dist checkpoints need --ckpt-format torch_dist.",
    ),
    (
        "an unfinished save of torch DCP: .metadata, which it writes last, is missing",
        ("__*_*.distcp",),
        "Load an older checkpoint.",
    ),
    (
        "a Hugging Face model of pickled files",
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "adapter_model.bin"),
        "Each of its .bin files opens by itself.",
    ),
    ("a Hugging Face folder without weights", ("config.json", "tokenizer.json"), ""),
    (
        "a zarr or TensorStore database without a checkpoint",
        ("zarr.json", ".zgroup", ".zarray", "manifest.ocdbt"),
        "",
    ),
    ("a folder of torch.save files", ("*.pt", "*.pth", "*.ckpt"), "Each opens by itself."),
)
"""What other folders are: in words, the files by which they are known, and what to do."""


def open_named(path: Location, *, trusted: bool = False) -> Checkpoint:
    """Open a checkpoint, or a step of a run.

    Args:
        path: A folder, or ``run@1000`` or ``run@latest``.
        trusted: See ``Checkpoint.open``.

    Raises:
        CheckpointNotFoundError: if there is none; it says what there is.
        CorruptCheckpointError: see ``Checkpoint.open``.
    """
    place = located(path)
    with explaining(place):
        return Checkpoint.open(place, trusted=trusted)


class OpenedFiles(Checkpoint):
    """Files of tensors in another format, as a checkpoint."""

    def __init__(self, files: TensorFiles[Any], *, trusted: bool) -> None:
        super().__init__(files.path, CheckpointingConfig(files.backend), 0, trusted=trusted)
        self.files = files
        self.__dict__["reads"] = files  # fills the cached property

    def require_unchanged(self) -> None:
        self.files.require_unchanged()


def open_tensors(path: Location, *, trusted: bool = False) -> Checkpoint:
    """Like ``open_named``; also opens files of other formats, see ``open_source``."""
    place = located(path)
    if isinstance(place, Path) and place.is_file():
        return open_source(place, trusted=trusted)
    with explaining(place):
        return open_source(place, trusted=trusted)


def open_source(
    path: str | PathLike[str], *, trusted: bool = False, most_bytes: int = 2**31
) -> Checkpoint:
    """A checkpoint, or files of safetensors, torch.save or DeepSpeed, looked into like one.

    Args:
        path: a folder or file; or the URL of a checkpoint.
        trusted: unpickle anything in it.
        most_bytes: size of a file that may be loaded as a whole, if it must.

    Raises:
        CheckpointNotFoundError: if there is nothing of these.
        CheckpointingException: if it cannot be read.
    """
    place = as_location(path)
    is_folder = location.is_folder(place)
    if not isinstance(place, Path) or (is_folder and is_committed(place)):
        return Checkpoint.open(place, trusted=trusted)
    # Not at the top: these import torch.
    from dist_checkpointing.strategies.deepspeed import (  # noqa: PLC0415
        DeepSpeedFiles,
        step_folder,
    )
    from dist_checkpointing.strategies.safetensors_folder import SafetensorsFiles  # noqa: PLC0415
    from dist_checkpointing.strategies.torch_file import TorchFile  # noqa: PLC0415

    if is_folder:
        if any(name.endswith(_SAFETENSORS) for name in location.names_in(place)):
            return OpenedFiles(SafetensorsFiles(place), trusted=trusted)
        if (step := step_folder(place)) is not None:
            return OpenedFiles(DeepSpeedFiles(step, trusted=trusted), trusted=trusted)
        return Checkpoint.open(place, trusted=trusted)
    if not place.is_file():
        problem, message = "no such file or folder", f"{place} does not exist"
        if location.is_there(place):
            problem, message = "it is neither a file nor a folder", f"{place} cannot be read"
        raise CheckpointNotFoundError(message, [Finding(problem, path=str(place))])
    if place.name.endswith(_SAFETENSORS):
        return OpenedFiles(SafetensorsFiles(place), trusted=trusted)
    with place.open("rb") as file:
        signature = file.read(4)
    if signature in _TORCH_SIGNATURES:
        content = TorchFile(place, trusted=trusted, most_bytes=most_bytes)
        return OpenedFiles(content, trusted=trusted)
    problem = "neither a folder with a checkpoint, nor a file of safetensors or torch.save"
    raise CheckpointNotFoundError(f"{place} cannot be read", [Finding(problem, path=str(place))])


@contextmanager
def explaining(path: Location) -> Iterator[None]:
    """Say what there is if the body finds no checkpoint at a path."""
    try:
        yield
    except CheckpointNotFoundError as error:
        problem, remedy = _what_it_is(path)
        if not problem:
            raise
        finding = Finding(problem, path=str(path), remedy=remedy or None)
        message = f"{path} is not a distributed checkpoint"
        raise CheckpointNotFoundError(message, [finding]) from error


def _what_it_is(path: Location) -> tuple[str, str]:
    """What a path is instead of a checkpoint, and what to do; empty if nobody knows."""
    if isinstance(path, Path) and not path.is_dir():
        remedy = "dckpt ls, show, stats, diff and convert open files of safetensors and torch.save."
        return ("it is a file, not a folder", remedy) if path.is_file() else ("", "")
    if isinstance(path, Path) and (path / ATTEMPT_NAME).exists():
        holder = holder_of(path)
        now = f"it is being saved now, by process {holder.pid} on {holder.host}" if holder else ""
        return now, f"dckpt ls {path} --follow tells when it is done."
    if is_run(path):
        number = len(step_folders(path))
        remedy = f"dckpt ls {path} lists them; name one, such as {path}@{LATEST}."
        return f"it is a run with {number} step{'s' * (number != 1)}", remedy if number else ""
    if not isinstance(path, Path):
        return "", ""
    folders_inside = sorted(inside for inside in path.iterdir() if inside.is_dir())
    for what, holds in (("checkpoints", is_committed), ("runs", is_run)):
        names = [inside.name for inside in folders_inside if holds(inside)]
        if names:
            return f"it holds {what}: {', '.join(names[:8])}", "Name one of them."
    found = (row for row in _FOREIGN if any(any(path.glob(pattern)) for pattern in row[1]))
    what, _, remedy = next(found, ("", (), ""))
    return f"it is {what}" if what else "", remedy
