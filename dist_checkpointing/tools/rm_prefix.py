"""``dckpt rm-prefix``: removes tensors from a checkpoint, and frees their disk space."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Argument, Exit, Option, confirm

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import counted
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.serialization.load_metadata import preview_removal, remove_sharded_tensors
from dist_checkpointing.tools.opening import CheckpointArgument, count_files, open_named
from dist_checkpointing.tools.report import AsJson, Report, same_for_all_layers, shape_text, totals

_MAX_LISTED = 12


def rm_prefix(
    *,
    checkpoint: CheckpointArgument,
    prefix: Annotated[str, Argument(help="Tensors whose keys begin with this are removed.")],
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", "-n", help="Only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the tensors below a prefix from a checkpoint, for good.

    Shows which tensors it will remove and how many bytes that frees, and
    asks (--json needs --yes or --dry-run). A crash in between leaves the
    checkpoint with the tensors or without them; then run it again to free the
    rest. Sharded objects and common state stay. Not for object stores:
    dckpt convert --exclude makes a checkpoint without the tensors there.

    Example: dckpt rm-prefix ckpt/1000 optimizer
    """
    if not prefix:
        raise ValueError("an empty prefix means every tensor: delete the whole checkpoint instead")
    if as_json and not (yes or dry_run):
        raise ValueError("--json asks nothing: pass --yes to remove, or --dry-run to look")
    opened = open_named(checkpoint)
    planned = preview_removal(opened.path, prefix)
    if not planned.keys and not planned.is_unfinished:
        tops = sorted({key.split(".")[0] for key in opened})
        known = ", ".join(map(repr, tops[:8])) + (", ..." if len(tops) > 8 else "")
        near = f"; keys begin with {known}" if tops else ""
        raise LookupError(f"no tensor in {opened.path} has a key that begins with {prefix!r}{near}")
    uses = location.use_below(opened.folder)
    # Sizes of values in bytes, of files as on the disk.
    document: dict[str, Any] = {
        "checkpoint": str(opened.path),
        "prefix": prefix,
        "keys": planned.keys,
        "num_bytes": sum(opened.index[key].num_bytes for key in planned.keys),
        "files": planned.files,
        "file_bytes": sum(uses[name].num_bytes_stored for name in planned.files if name in uses),
        "bytes_not_freed": dict(planned.shared),
        "objects_kept": [key for key in opened.objects if key.startswith(prefix)],
        "removed": not dry_run,
    }
    report = _report(opened, planned, document)
    if not dry_run:
        if not as_json:
            report.print()
        count = counted(len(planned.keys), "tensor")
        if not (yes or sys.stdin.isatty()):
            raise ValueError("cannot ask without a terminal: pass --yes to remove them")
        if not (yes or confirm(f"Remove {count} for good?", default=False)):
            Report("Nothing was removed.").print()
            raise Exit(1)
        before = count_files(opened.path).num_bytes_on_disk
        remove_sharded_tensors(opened.path, prefix, comm=SingleProcess())
        freed = before - count_files(opened.path).num_bytes_on_disk
        document["bytes_freed"] = freed
        report = Report(f"Removed {count}: {bytes_text(freed)} are free again.")
    report.finish(document, as_json=as_json)


def _report(opened: Checkpoint, planned: PlannedRemoval, document: dict[str, Any]) -> Report:
    report = Report()
    removed = [opened.index[key] for key in planned.keys]
    groups = totals(
        ((same_for_all_layers(one.key), one.dtype.name, one.global_shape), one.num_bytes)
        for one in removed
    )
    rows = [
        (key, f"{count:,}", dtype, shape_text(shape), bytes_text(size))
        for (key, dtype, shape), (count, size) in groups.items()
    ]
    report.table(("TENSORS", "COUNT", "DTYPE", "SHAPE", "SIZE"), rows[:_MAX_LISTED], right=[1, 4])
    if left := sum(count for count, _ in list(groups.values())[_MAX_LISTED:]):
        report.line(f"and {left:,} smaller ones", "dim")
    backend, version = opened.backend
    size = bytes_text(document["num_bytes"])
    files = counted(len(planned.files), "file")
    facts = [
        ("checkpoint", f"{opened.path} ({backend} {version})"),
        ("tensors", f"{len(planned.keys)} of {len(opened)} go: {size} of values"),
        ("disk", f"{bytes_text(document['file_bytes'])} freed by deleting {files}"),
        ("unfinished", "an interrupted removal is completed" if planned.is_unfinished else ""),
    ]
    if shared_bytes := sum(planned.shared.values()):
        kept_in = counted(len(planned.shared), "file")
        text = (
            f"{bytes_text(shared_bytes)} stay on the disk: they are in {kept_in} with values that "
            "are kept. To free them, convert the checkpoint without these tensors into a new one."
        )
        facts.append(("not freed", text))
    if objects := document["objects_kept"]:
        kept = ", ".join(objects[:3]) + (", ..." if len(objects) > 3 else "")
        facts.append(("kept", f"{counted(len(objects), 'sharded object')}: {kept}"))
    report.section()
    report.facts(facts)
    report.line("")
    return report
