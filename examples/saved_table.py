"""Tables for the terminal: what was saved, and what was checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from checkpoint_contents import Contents, StoredTensorRow, shape_text
from dist_checkpointing.format.byte_sizes import bytes_text
from resume_checks import Check
from training_runs import Run


def saved_table(contents: Contents, saved: Run, checkpoint: Path) -> Table:
    """Every weight; the optimizer's moments, which are shaped alike, in one row each."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    on_disk = bytes_text(sum(path.stat().st_size for path in files))
    table = Table(title="What was saved", caption=f"{on_disk} in {len(files)} files", expand=False)
    table.add_column("key", no_wrap=True)
    table.add_column("dtype")
    table.add_column("global shape")
    table.add_column(f"each of {saved.tensor_parallel} ranks")
    table.add_column("chunks stored")
    table.add_column("bytes", justify="right")
    moments: dict[str, list[StoredTensorRow]] = {}
    for row in contents.tensors:
        if row.key.startswith("optimizer."):
            moments.setdefault(row.key.split(".")[1], []).append(row)
            continue
        table.add_row(
            escape(row.key),
            row.dtype,
            shape_text(row.global_shape),
            _share(row, saved),
            row.chunks,
            bytes_text(row.num_bytes),
        )
    table.add_section()
    for name, rows in moments.items():
        table.add_row(
            f"optimizer.{name}.*",
            ", ".join(sorted({row.dtype for row in rows})),
            f"{len(rows)} tensors",
            "as the weights",
            "as the weights",
            bytes_text(sum(row.num_bytes for row in rows)),
        )
    for name in contents.objects:
        table.add_row(escape(name), "object", "", "the same one", "", "")
    table.add_row(", ".join(contents.common), "common", "", "the same", "", "")
    return table


def _share(row: StoredTensorRow, saved: Run) -> str:
    shards = saved.shards[row.key]
    own = [tuple(shard["shape"]) for shard in shards if shard["rank"] == 0]
    whole = [1, *row.global_shape[1:]] if len(own) > 1 else row.global_shape
    text = f"{len(own)} times {shape_text(own[0])}" if len(own) > 1 else shape_text(own[0])
    return f"{text} (copy)" if own[0] == tuple(whole) else text


def check_table(checks: Sequence[Check]) -> Table:
    """What must hold, and what was found."""
    table = Table(title="Checks")
    table.add_column("")
    table.add_column("must hold", overflow="fold")
    table.add_column("found", overflow="fold")
    for check in checks:
        mark = "[green]ok[/]" if check.holds else "[bold red]FAILED[/]"
        table.add_row(mark, escape(check.what), escape(check.found))
    return table
