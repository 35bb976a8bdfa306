"""``dckpt ls``: lists the tensors of a checkpoint without torch, and follows saves."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, NamedTuple

from typer import Argument, Exit, Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import counted, hint
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.format import dtypes, run_steps
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.format.file_names import EVERY_KEY, WHOLE_KEY, key_pattern
from dist_checkpointing.format.index import Index
from dist_checkpointing.threads import in_threads, paused_collector
from dist_checkpointing.tools import opening
from dist_checkpointing.tools.report import (
    EXIT_INTERRUPTED,
    AsJson,
    Report,
    fail,
    in_columns,
    is_narrower_than,
    json_text,
    one_line,
    painted,
    print_json,
    progress_bar,
    shape_text,
)

Pattern = Annotated[
    str | None,
    Argument(help="Only keys that match: 'layers.{i}.{x*}', or a regular expression."),
]
OBJECT = "object"
COMMON = "common"
_NARROW = 90
_MAX_SHARING_SHOWN = 3
_MAX_LEVELS = 100
_THREADS = 16
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_POLL_SECONDS = 0.5


def ls(
    checkpoint: opening.CheckpointArgument,
    pattern: Pattern = None,
    *,
    tree: Annotated[
        bool, Option("--tree", "-t", help="As a tree of the parts of the keys.")
    ] = False,
    depth: Annotated[
        int | None, Option("--depth", "-d", min=1, help="Levels of the tree to show.")
    ] = None,
    everything: Annotated[
        bool, Option("--all", "-a", help="Sharded objects and common state too.")
    ] = False,
    fingerprint: Annotated[
        bool,
        Option("--fingerprint", "-f", help="Fingerprints of the tensors; reads those without one."),
    ] = False,
    follow: Annotated[
        bool, Option("--follow", help="Follow saves in progress; see above.")
    ] = False,
    trusted: opening.Trusted = False,
    as_json: AsJson = False,
) -> None:
    """List the tensors of a checkpoint, or the steps of a run.

    Of a tensor: key, shape, dtype, size and chunks. Also opens
    safetensors, files of torch.save and DeepSpeed checkpoints. Of a step of a
    run: whether it is whole, its age, size and what deleting it would free
    (OWN), and which steps share files with it.

    "8x1 of 512x4096" means 8 chunks along the first axis and 1 along the
    second, each of that shape. A fingerprint depends on values, dtype and
    shape, and not on how a tensor is sharded. One that the save did not keep is
    computed: the tensor is read.

    With --follow, shows who saves, how many bytes so far, and how each save
    ends: of a run, which need not exist yet, until Ctrl-C; of one checkpoint,
    until its save has ended. Only looks at files: the training does not
    notice. With --json, prints one line of JSON for each save that has ended.

    Exit code: 0, 1 if PATTERN matches nothing or the save that --follow showed
    ended without a commit, 2 if there is nothing to list, 130 after Ctrl-C.

    Example: dckpt ls runs/gpt --follow

    Example: dckpt ls ckpt/1000 'optimizer.{x*}' --tree --depth 2
    """
    wanted = key_pattern(pattern or EVERY_KEY).fullmatch
    path = run_steps.located(checkpoint)
    of_one = pattern is not None or everything or fingerprint or tree or depth is not None
    if follow and of_one:
        raise ValueError("--follow shows saves: it takes no PATTERN and no option but --json")
    if run_steps.is_run(path):
        if of_one:
            raise ValueError(f"{path} is a run: name a step of it, as {path}@{run_steps.LATEST}")
        if not (follow and as_json):
            print_run(path, as_json=as_json)
        if not follow:
            return
    if follow:
        raise Exit(follow_saves(path, as_json=as_json))
    opened = opening.open_named(path, trusted=trusted)
    with paused_collector():
        tensors = list(tensor_entries(opened.index, wanted))
        others = [entry for entry in _others(opened) if wanted(entry.key)] if everything else None
        fingerprints = _fingerprints(opened, tensors) if fingerprint else None
        entries = [*tensors, *(others or ())]
        report = Report()
        if as_json:
            print_json(_document(opened, tensors, others, fingerprints))
        elif tree or depth is not None:
            report.table(("KEY", "SIZE", ""), _branches(as_tree(entries), "", depth), right=[1])
            report.paragraph(_total(entries), "bold")
        else:
            _add_table(report, entries, fingerprints)
            report.paragraph(_total(entries), "bold")
            if pattern is None and (own := opening.count_files(opened.folder).own_text()):
                report.line(f"not shared: {own}")
        report.print()
    if pattern is not None and not tensors and not others:
        near = hint(pattern, opened)
        more = "" if everything else "; --all looks at objects and common state too"
        fail(f"no key of {opened.path} matches {pattern!r}: {WHOLE_KEY}{near or more}")
        raise Exit(1)


# The list of the tensors.


class Entry(NamedTuple):
    """A line of the list. A named tuple, because there may be hundreds of thousands.

    The parts of a tensor are the shape of its chunks, or the number of its pieces; those of an
    object or value a text. The dtype of a sharded object is ``OBJECT``, and its shape is that of
    its grid; common state has no shape, and ``COMMON`` for a dtype.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str
    num_bytes: int
    parts: tuple[int, ...] | int | str


def tensor_entries(index: Index, wanted: Callable[[str], object]) -> Iterator[Entry]:
    itemsizes = {row.name: row.itemsize for row in dtypes.ELEMENT_TYPES}
    columns = index.dtype_column, index.global_shape_column, index.chunk_shape_column
    for key, dtype, extents, chunk in zip(index.keys_column, *columns, strict=True):
        if wanted(key):
            parts = len(index.pieces[key]) if chunk is None else tuple(chunk)
            yield Entry(key, tuple(extents), dtype, math.prod(extents) * itemsizes[dtype], parts)


@cache  # because the tensors of a large model have only a few different shapes
def sharding_text(shape: tuple[int, ...], parts: tuple[int, ...] | int | str) -> str:
    """``8x1 of 512x4096``: chunks along each axis, and the shape of a chunk; or ``2 pieces``."""
    if not isinstance(parts, tuple):
        return counted(parts, "piece") if isinstance(parts, int) else parts
    counts = [-(-extent // part) for extent, part in zip(shape, parts, strict=True)]
    number = math.prod(counts)
    if number <= 1:
        return "1 chunk" if number else "empty"
    return f"{shape_text(counts)} of {shape_text(parts)}"


def _fingerprints(opened: Checkpoint, tensors: Sequence[Entry]) -> dict[str, str]:
    known = opened.index.fingerprints
    num_bytes = sum(entry.num_bytes for entry in tensors if entry.key not in known)
    with progress_bar("reading", num_bytes) as bar:
        return opened.fingerprints([entry.key for entry in tensors], report=bar.advance)


def _others(opened: Checkpoint) -> Iterator[Entry]:
    # Imports torch, which plain tensors do not need.
    from dist_checkpointing.tools import values  # noqa: PLC0415

    for key, handle in opened.objects.items():
        grid = f" of {shape_text(handle.shape)}" if len(handle) == 1 else ""
        yield Entry(key, handle.shape, OBJECT, 0, counted(len(handle), "cell") + grid)
    for name, value in values.entries(values.common_state(opened)).items():
        yield Entry(name, None, COMMON, 0, values.type_text(value))


def _document(
    opened: Checkpoint,
    tensors: Sequence[Entry],
    others: Sequence[Entry] | None,
    fingerprints: Mapping[str, str] | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": str(opened.path),
        "backend": opened.backend,
        "num_tensors": len(tensors),
        "num_bytes": sum(entry.num_bytes for entry in tensors),
    }
    if others is not None:
        objects = [{"key": e.key, "shape": e.shape} for e in others if e.dtype == OBJECT]
        common = [{"key": e.key, "type": e.parts} for e in others if e.dtype == COMMON]
        document |= {"objects": objects, "common": common}
    rows = []
    for key, shape, dtype, num_bytes, parts in tensors:
        row = {"key": key, "shape": shape, "dtype": dtype, "num_bytes": num_bytes}
        if isinstance(parts, tuple):
            row["chunk_shape"] = parts
        else:
            row |= {"chunk_shape": None, "num_pieces": parts}
        if fingerprints is not None:
            row["fingerprint"] = fingerprints[key]
        rows.append(row)
    return {**document, "tensors": rows}


def _add_table(
    report: Report, entries: Sequence[Entry], fingerprints: Mapping[str, str] | None
) -> None:
    is_narrow = is_narrower_than(_NARROW)
    sizes = {entry.num_bytes: bytes_text(entry.num_bytes) for entry in entries}
    last, known = ("", {}) if fingerprints is None else ("FINGERPRINT", fingerprints)
    rows = []
    for key, shape, dtype, num_bytes, parts in entries:
        size = "" if dtype in (OBJECT, COMMON) else sizes[num_bytes]
        text = sharding_text(shape or (), parts)
        text = text.partition(" of ")[0] if is_narrow else text
        rows.append((key, shape_text(shape), dtype, size, text, known.get(key, "")))
    headers = ("KEY", "SHAPE", "DTYPE", "SIZE", "CHUNKS" if is_narrow else "SHARDING", last)
    report.table(headers, rows, right=[3])


def _total(entries: Sequence[Entry]) -> str:
    num_objects, num_values = (sum(e.dtype == kind for e in entries) for kind in (OBJECT, COMMON))
    num_bytes = sum(entry.num_bytes for entry in entries)
    total = counted(len(entries) - num_objects - num_values, "tensor")
    total += f", {bytes_text(num_bytes)}"
    total += f", {counted(num_objects, 'object')}" if num_objects else ""
    return total + (f", {counted(num_values, 'value')} of common state" if num_values else "")


# The tree.


@dataclass(slots=True)
class Branch:
    """One part of the keys, the entry with exactly this key, and the parts below it by name.

    The sums are of the entries here and below.
    """

    name: str
    below: dict[str, Branch] = field(default_factory=dict)
    entry: Any = None
    num_entries: int = 0
    num_bytes: int = 0


def as_tree(entries: Sequence[Entry]) -> Branch:
    """The entries as a tree of the parts of their keys, which ``.`` and ``/`` separate."""
    root = Branch("")
    for entry in entries:
        path = [root]
        for name in entry.key.replace("/", ".").split(".", _MAX_LEVELS):
            below = path[-1].below
            if name not in below:
                below[name] = Branch(name)
            path.append(below[name])
        # If two keys differ only in their separators, the second gets its own line.
        if path[-1].entry is not None:
            path[-1] = path[-2].below.setdefault(entry.key, Branch(entry.key))
        path[-1].entry = entry
        for branch in path:
            branch.num_entries += 1
            branch.num_bytes += entry.num_bytes
    return root


def _branches(branch: Branch, indent: str, depth: int | None) -> Iterator[tuple[str, str, str]]:
    last = len(branch.below) - 1
    for position, below in enumerate(branch.below.values()):
        child, name = _joined(below)
        text = f"{indent}{'└── ' if position == last else '├── '}{name}"
        entry = child.entry
        if entry is not None and not child.below:
            if entry.shape is None:
                yield text, "", entry.parts
            else:
                size = "" if entry.dtype == OBJECT else bytes_text(entry.num_bytes)
                yield text, size, f"{entry.dtype} {shape_text(entry.shape)}"
            continue
        is_cut = depth is not None and depth <= 1
        number = f"({child.num_entries:,}{' …' if is_cut else ''})"
        yield text, bytes_text(child.num_bytes) if child.num_bytes else "", number
        if is_cut:
            continue
        if entry is not None:
            # It is a tensor itself, and also a prefix of other keys.
            child = Branch(child.name, below={".": Branch(".", entry=entry), **child.below})
        longer = f"{indent}{'    ' if position == last else '│   '}"
        yield from _branches(child, longer, None if depth is None else depth - 1)


def _joined(branch: Branch) -> tuple[Branch, str]:
    """The first branch from here on with an entry or several children, and its name from here."""
    name = branch.name
    while branch.entry is None and len(branch.below) == 1:
        (branch,) = branch.below.values()
        name = f"{name}.{branch.name}"
    return branch, name


# The steps of a run.


def print_run(root: Location, *, as_json: bool) -> None:
    folders = run_steps.step_folders(root)
    latest, remark = run_steps.latest_of(root, folders)
    notes = _notes_of(root)
    uses = _uses_of_steps(root, folders)
    steps = in_threads(
        lambda row: opening.look_at(*row, uses.get(row[0])), list(folders.items()), _THREADS
    )
    holders: dict[tuple[int, int, int], list[str]] = {}
    for step in steps:
        for inode in step.inodes:
            holders.setdefault(inode, []).append(step.name)
    documents: list[dict[str, Any]] = []
    for step in steps:
        others = {name for inode in step.inodes for name in holders[inode]} - {step.name}
        documents.append(
            {
                "step": step.name,
                "path": str(step.folder),
                "state": step.state.value,
                "saved_at": step.saved_at,
                "num_bytes": step.files.num_bytes,
                "num_bytes_shared": step.files.num_bytes_shared,
                "shared_with": [other.name for other in steps if other.name in others],
                "notes": notes.get(step.name, []),
            }
        )
    report = Report(str(root))
    now = time.time()
    rows = [_cells(document, latest, now) for document in documents]
    headers = ("STEP", "STATE", "AGE", "SIZE", "OWN", "NOTES")
    table = list(in_columns(headers, rows, right=[0, 2, 3, 4]))
    # If they do not fit beside the rest, notes get lines of their own.
    is_narrow = is_narrower_than(max(map(len, table), default=0))
    if is_narrow:
        table = list(in_columns(headers[:-1], [row[:-1] for row in rows], right=[0, 2, 3, 4]))
    report.raw(table[:1])
    for line, row, step in zip(table[1:], rows, steps, strict=True):
        is_fine = step.state in (opening.StepState.WHOLE, opening.StepState.COMMITTED)
        report.raw([painted(line, None if is_fine else "yellow")])
        if is_narrow and row[-1]:
            report.line(f"      {row[-1]}", "dim")
    # A file that several steps share counts once.
    unshared = sum(step.files.num_bytes - step.files.num_bytes_shared for step in steps)
    size = bytes_text(unshared + sum(num_bytes for _, _, num_bytes in holders))
    is_any = any(step.state.is_checkpoint for step in steps)
    which = f"latest {latest}" if latest else "none is numbered" if is_any else "none is committed"
    report.paragraph(f"{counted(len(steps), 'step')}, {size}, {which}", "bold")
    if remark is not None:
        report.line(remark, "yellow")
    document = {"path": str(root), "latest": latest, "remark": remark, "steps": documents}
    report.finish(document, as_json=as_json)


def _cells(step: dict[str, Any], latest: str | None, now: float) -> tuple[str, ...]:
    notes = ["latest"] * (step["step"] == latest) + step["notes"]
    if nearest := step["shared_with"][::-1]:
        names, more = ", ".join(nearest[:_MAX_SHARING_SHOWN]), len(nearest) - _MAX_SHARING_SHOWN
        notes.append(f"shares with {names}{f' and {more} more' if more > 0 else ''}")
    seconds = max(now - step["saved_at"], 0)
    unit_seconds, unit = next(row for row in _UNITS if seconds >= row[0] or row[1] == "s")
    age = f"{seconds // unit_seconds:.0f} {unit}"
    size = step["num_bytes"]
    sizes = bytes_text(size), bytes_text(size - step["num_bytes_shared"])
    return step["step"], step["state"], age, *sizes, ", ".join(notes)


def _uses_of_steps(root: Location, folders: dict[str, Location]) -> dict[str, opening.Uses]:
    if not isinstance(root, ObjectPath):  # what is in a store is listed at once
        return {}
    uses: defaultdict[str, dict[str, location.FileUse]] = defaultdict(dict)
    for path, use in location.use_below(root).items():
        folder, _, rest = path.partition("/")
        uses[folder][rest] = use
    return {name: uses[folder.name] for name, folder in folders.items()}


def _notes_of(root: Location) -> dict[str, list[str]]:
    if not location.is_file(root / run_steps.RECORD_NAME):
        return {}
    record = run_steps.up_to_date(root, run_steps.read_record(root))
    abandoned = record.abandoned
    return {
        str(number): ["verified"] * known.verified
        + ["without optimizer"] * known.stripped
        + ["abandoned"] * (number in abandoned)
        for number, known in record.steps.items()
    }


# Following saves.


def follow_saves(path: Location, *, as_json: bool) -> int:
    """Print how saves end, of a run until Ctrl-C, or the one of a checkpoint; the exit code."""
    try:
        is_empty = location.is_folder(path) and not location.names_in(path)
        if is_empty or run_steps.is_run(path) or not location.is_there(path):
            _follow_run(path, as_json=as_json)
        elif not location.is_folder(path) or opening.holder_at(path) is None or is_committed(path):
            with opening.explaining(path):
                read_config(path)  # raises if there is neither a checkpoint nor a save
        return int(not _follow_save(path.name, path, None, as_json=as_json))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _follow_run(root: Location, *, as_json: bool) -> None:
    """Returns only if a checkpoint, and no run, is saved there."""
    folders = run_steps.step_folders(root)
    known = {name for name, folder in folders.items() if is_committed(folder)}
    if not as_json:
        Report(f"{root}: waiting for saves; Ctrl-C ends", None).print()
    while folders or not (is_committed(root) or opening.holder_at(root) is not None):
        for name, folder in run_steps.step_folders(root).items():
            if name in known and isinstance(folder, ObjectPath):
                continue  # it stays a checkpoint while it is overwritten
            if name not in known if is_committed(folder) else opening.holder_at(folder) is not None:
                before = [folder for other, folder in folders.items() if other in known]
                size = opening.look_at("", before[-1]).files.num_bytes if before else None
                if _follow_save(name, folder, size, as_json=as_json):
                    known.add(name)
        _pause()
        folders = run_steps.step_folders(root)


def _follow_save(name: str, folder: Location, expected_bytes: int | None, *, as_json: bool) -> bool:
    """Show a save until it ends; returns whether it has committed a checkpoint."""
    holder = None if is_committed(folder) else opening.holder_at(folder)
    if holder is not None and not as_json:
        about = "" if expected_bytes is None else f", about {bytes_text(expected_bytes)}"
        Report(f"{name}: being saved by process {holder.pid} on {holder.host}{about}", None).print()
    done = 0
    with progress_bar(one_line(name), expected_bytes) as bar:
        while not is_committed(folder) and opening.holder_at(folder) is not None:
            files = opening.look_at(name, folder).files
            # A file that is made at its full size has fewer blocks.
            size = min(files.num_bytes, files.num_bytes_on_disk)
            bar.advance(size - done)
            done = size
            _pause()
    return _print_end(name, folder, as_json=as_json)


def _print_end(name: str, folder: Location, *, as_json: bool) -> bool:
    state, num_bytes, seconds, is_saved = "deleted", None, None, False
    if location.is_folder(folder):
        step = opening.look_at(name, folder)
        state, num_bytes = step.state.value, step.files.num_bytes
        is_saved = step.state.is_checkpoint
        if is_saved and step.begun_at is not None:  # not known of what another program saved
            seconds = max(step.saved_at - step.begun_at, 1e-3)
    report, text, style = Report(), f"{name}: {state}", "yellow"
    if num_bytes is not None and not is_saved:
        text, style = f"{text}: its save has ended", "red"
    elif num_bytes is not None:
        text += f", {bytes_text(num_bytes)}"
        if seconds is not None:
            text += f", saved in {seconds:.1f} s ({bytes_text(num_bytes / seconds)}/s)"
        style = "red" if state == opening.StepState.DAMAGED.value else "green"
    if as_json:
        document = {"step": name, "path": str(folder), "state": state}
        report.raw([json_text({**document, "num_bytes": num_bytes, "seconds": seconds})])
    else:
        report.line(text, style)
    report.print()
    return is_saved


def _pause() -> None:
    time.sleep(_POLL_SECONDS)
