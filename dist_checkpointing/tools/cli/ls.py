"""``dckpt ls``: lists what a checkpoint holds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import hint
from dist_checkpointing.threads import paused_collector
from dist_checkpointing.tools.cli.follow import follow_saves
from dist_checkpointing.tools.cli.run_listing import print_run
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointArgument,
    Regex,
    Trusted,
    counted,
    fail,
    in_columns,
    one_line,
    painted,
    progress_bar,
    say,
    terminal_width,
)
from dist_checkpointing.tools.inspect.inventory import count_files
from dist_checkpointing.tools.inspect.listing import (
    COMMON,
    OBJECT,
    Branch,
    Entry,
    as_tree,
    name_filter,
    shape_text,
    subtotals,
    tensor_entries,
)
from dist_checkpointing.tools.inspect.opening import open_tensors
from dist_checkpointing.tools.inspect.runs import LATEST, is_run, located, read_run

_NARROW = 90
_MOST_SUBTOTALS = 12
_LINES_AT_ONCE = 1000
_NO_MATCH = 1


def ls(
    checkpoint: CheckpointArgument,
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Only these keys: a glob for the whole key if it has *, ? or [, else part of it."
        ),
    ] = None,
    *,
    regex: Regex = False,
    tree: Annotated[
        bool, typer.Option("--tree", "-t", help="As a tree of the parts of the keys.")
    ] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=1, help="Levels of the tree to show.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Sharded objects and common state too.")
    ] = False,
    fingerprint: Annotated[
        bool,
        typer.Option(
            "--fingerprint", "-f", help="Fingerprints of the tensors; reads those without one."
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Follow the saves that are going on; see below.")
    ] = False,
    trusted: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """List the tensors of a checkpoint, or the steps of a run.

    Of a tensor: key, shape, dtype, size and how it is cut. Also opens
    safetensors, files of torch.save and DeepSpeed checkpoints. Of a step of a
    run: whether it is whole, its age, size and what deleting it would free
    (OWN), and which steps share files with it.

    "8x1 of 512x4096" means 8 chunks along the first axis and 1 along the
    second, each of that shape. A fingerprint depends on values, dtype and
    shape, and not on how a tensor is cut. One that the save did not keep is
    computed: the tensor is read.

    With --follow, shows who saves, how many bytes so far, and how each save
    ends: of a run, which need not exist yet, until Ctrl-C; of one checkpoint,
    until its save has ended. Only looks at files: the training does not
    notice. With --json, prints one line of JSON for each save that has ended.

    Exit code: 0, 1 if PATTERN matches nothing or the save that --follow showed
    ended without a commit, 2 if there is nothing to list, 130 after Ctrl-C.

    Example: dckpt ls runs/gpt --follow

    Example: dckpt ls ckpt/1000 "optimizer.*" --tree --depth 2
    """
    wanted = name_filter(pattern, regex=regex)
    place = located(checkpoint)
    of_one = pattern is not None or everything or fingerprint or tree or depth is not None
    if follow and of_one:
        raise ValueError("--follow shows saves: it takes no PATTERN and no option but --json")
    if is_run(place):
        if of_one:
            raise ValueError(f"{place} is a run: name a step of it, as {place}@{LATEST}")
        if not (follow and as_json):
            print_run(read_run(place), as_json=as_json)
    if follow:
        raise typer.Exit(follow_saves(place, as_json=as_json))
    if is_run(place):
        return
    opened = open_tensors(place, trusted=trusted)
    with paused_collector():
        tensors = list(tensor_entries(opened.index, wanted))
        others = [entry for entry in _others(opened) if wanted(entry.key)] if everything else []
        prints = _fingerprints(opened, tensors) if fingerprint else None
        if as_json:
            _print_document(opened, tensors, others if everything else None, prints)
        elif tree or depth is not None:
            _print_tree(as_tree([*tensors, *others]), depth)
            _print_total(tensors, others)
        else:
            _print_table([*tensors, *others], prints)
            _print_total(tensors, others)
            _print_subtotals(tensors)
            if pattern is None and (files := count_files(opened.folder)).num_bytes_shared:
                say(f"of its own: {files.own_text()}")
    if pattern is not None and not tensors and not others:
        near = hint(pattern, opened)
        more = "" if everything else "; --all looks at objects and common state too"
        fail(f"no key of {opened.path} matches {pattern!r}{near or more}")
        raise typer.Exit(_NO_MATCH)


def _fingerprints(opened: Checkpoint, tensors: Sequence[Entry]) -> dict[str, str]:
    known = opened.index.fingerprints
    num_bytes = sum(entry.num_bytes for entry in tensors if entry.key not in known)
    with progress_bar("reading", num_bytes) as bar:
        return opened.fingerprints([entry.key for entry in tensors], report=bar.advance)


def _others(opened: Checkpoint) -> Iterator[Entry]:
    # Imports torch, which plain tensors do not need.
    from dist_checkpointing.tools.inspect import plain_state  # noqa: PLC0415

    for key, handle in opened.objects.items():
        cells = (
            f"1 cell of {shape_text(handle.shape)}" if len(handle) == 1 else f"{len(handle)} cells"
        )
        yield Entry(key, handle.shape, OBJECT, 0, cells)
    for name, value in plain_state.entries(opened.common).items():
        yield Entry(name, None, COMMON, 0, plain_state.type_text(value))


def _print_document(
    opened: Checkpoint,
    tensors: Sequence[Entry],
    others: Sequence[Entry] | None,
    prints: Mapping[str, str] | None,
) -> None:
    name, version = opened.backend
    say("{")
    say(f'  "path": {json.dumps(str(opened.path))},')
    say(f'  "backend": {json.dumps([name, version])},')
    say(f'  "num_tensors": {len(tensors)},')
    say(f'  "num_bytes": {sum(entry.num_bytes for entry in tensors)},')
    if others is not None:
        objects = ({"key": e.key, "shape": e.shape} for e in others if e.dtype == OBJECT)
        common = ({"key": e.key, "type": e.sharding} for e in others if e.dtype == COMMON)
        _print_array("objects", objects, last=False)
        _print_array("common", common, last=False)
    _print_array("tensors", (_as_json(opened, entry, prints) for entry in tensors), last=True)
    say("}")


def _print_array(name: str, rows: Iterable[dict[str, Any]], *, last: bool) -> None:
    # One line for each row: json writes indented text ten times more slowly.
    texts = [f"    {json.dumps(row)}" for row in rows]
    body = ",\n".join(texts)
    inside = f"\n{body}\n  " if texts else ""
    say(f'  "{name}": [{inside}]{"" if last else ","}')


def _as_json(opened: Checkpoint, entry: Entry, prints: Mapping[str, str] | None) -> dict[str, Any]:
    chunk_shape = opened.index.chunk_shape(entry.key)
    row: dict[str, Any] = {
        "key": entry.key,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "num_bytes": entry.num_bytes,
        "chunk_shape": chunk_shape,
    }
    if chunk_shape is None:
        row["num_pieces"] = len(opened.index.pieces[entry.key])
    if prints is not None:
        row["fingerprint"] = prints[entry.key]
    return row


def _print_table(entries: Sequence[Entry], prints: Mapping[str, str] | None) -> None:
    width = terminal_width()
    short = width is not None and width < _NARROW
    sizes: dict[int, str] = {}
    rows = []
    for key, shape, dtype, num_bytes, sharding in entries:
        if num_bytes not in sizes:
            sizes[num_bytes] = bytes_text(num_bytes)
        size = sizes[num_bytes] if dtype not in (OBJECT, COMMON) else ""
        cut = sharding.partition(" of ")[0] if short else sharding
        own = () if prints is None else (prints.get(key, ""),)
        rows.append((one_line(key), shape_text(shape), dtype, size, cut, *own))
    if not rows:
        return
    more = () if prints is None else ("FINGERPRINT",)
    headers = ("KEY", "SHAPE", "DTYPE", "SIZE", "CHUNKS" if short else "SHARDING", *more)
    _print_lines(in_columns(headers, rows, right=[3]))


def _print_lines(lines: Iterator[str]) -> None:
    while some := list(itertools.islice(lines, _LINES_AT_ONCE)):
        say("\n".join(some))


def _print_total(tensors: Sequence[Entry], others: Sequence[Entry]) -> None:
    total = f"{counted(len(tensors), 'tensor')}, {bytes_text(sum(e.num_bytes for e in tensors))}"
    for kind, word in ((OBJECT, "object"), (COMMON, "value")):
        number = sum(entry.dtype == kind for entry in others)
        if number:
            where = " of common state" if kind == COMMON else ""
            total += f", {counted(number, word)}{where}"
    say()
    say(painted(total, "bold"))


def _print_subtotals(tensors: Sequence[Entry]) -> None:
    rows = subtotals(tensors)
    if not 1 < len(rows) < len(tensors):
        return
    shown = [
        (
            f"  {one_line(row.prefix)}",
            counted(row.num_tensors, "tensor"),
            bytes_text(row.num_bytes),
        )
        for row in rows[:_MOST_SUBTOTALS]
    ]
    rest = rows[_MOST_SUBTOTALS:]
    if rest:
        number = sum(row.num_tensors for row in rest)
        size = bytes_text(sum(row.num_bytes for row in rest))
        shown.append((f"  {len(rest)} more prefixes", counted(number, "tensor"), size))
    for line in in_columns(("", "", ""), shown, right=[1, 2]):
        say(line)


def _print_tree(root: Branch, depth: int | None) -> None:
    rows = list(_branches(root, "", depth))
    if not rows:
        return
    _print_lines(in_columns(("KEY", "SIZE", ""), rows, right=[1]))


def _branches(branch: Branch, indent: str, depth: int | None) -> Iterator[tuple[str, str, str]]:
    last = len(branch.below) - 1
    for place, below in enumerate(branch.below.values()):
        child, name = _joined(below)
        text = f"{indent}{'└── ' if place == last else '├── '}{one_line(name)}"
        if child.entry is not None and not child.below:
            yield text, *_leaf_facts(child.entry)
            continue
        is_cut = depth is not None and depth <= 1
        number = f"({child.num_entries:,}{' …' if is_cut else ''})"
        yield text, bytes_text(child.num_bytes) if child.num_bytes else "", number
        if is_cut:
            continue
        if child.entry is not None:
            # It is a tensor itself, and also a prefix of other keys.
            own = Branch(".", entry=child.entry)
            child = Branch(child.name, below={".": own, **child.below})
        longer = f"{indent}{'    ' if place == last else '│   '}"
        yield from _branches(child, longer, None if depth is None else depth - 1)


def _joined(branch: Branch) -> tuple[Branch, str]:
    """The first branch from here on with an entry or several children, and its name from here."""
    name = branch.name
    while branch.entry is None and len(branch.below) == 1:
        (branch,) = branch.below.values()
        name = f"{name}.{branch.name}"
    return branch, name


def _leaf_facts(entry: Entry) -> tuple[str, str]:
    if entry.shape is None:
        return "", entry.sharding
    size = "" if entry.dtype == OBJECT else bytes_text(entry.num_bytes)
    return size, f"{entry.dtype} {shape_text(entry.shape)}"
