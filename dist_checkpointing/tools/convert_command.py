"""``dckpt convert``: converts a checkpoint into another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dist_checkpointing.byte_sizes import bytes_text, parse_bytes
from dist_checkpointing.errors import counted
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.file_names import EVERY_KEY
from dist_checkpointing.format.run_steps import located
from dist_checkpointing.tools.opening import Memory, Trusted, explaining
from dist_checkpointing.tools.report import AsJson, Report, progress_bar
from dist_checkpointing.tools.torchrun import ranks

if TYPE_CHECKING:
    from dist_checkpointing.tools.convert import Conversion

Texts = list[str]
_MODEL = "model.{key*}"  # as TorchState and others name the tensors of a model


def convert(
    source: Annotated[
        Path,
        Argument(
            parser=as_location,
            help="A checkpoint of any backend (also Megatron's, torch DCP's), safetensors (a file, "
            "or a folder of them), a file of torch.save, or a DeepSpeed ZeRO checkpoint.",
        ),
    ],
    destination: Annotated[
        Path,
        Argument(
            parser=as_location,
            help="What to make: a folder or the URL of one; with --to torch_file a file, with "
            "--to safetensors a file if it ends in .safetensors. Must not exist.",
        ),
    ],
    *,
    to: Annotated[
        str,
        Option(
            help="tensorstore, zarr, zarr:1 (Megatron's), torch_dist, safetensors or torch_file."
        ),
    ],
    include: Annotated[
        Texts | None,
        Option(metavar="PATTERN", help="Only keys that match, as the rule keep. May be repeated."),
    ] = None,
    exclude: Annotated[
        Texts | None,
        Option(metavar="PATTERN", help="No keys that match, as the rule drop. May be repeated."),
    ] = None,
    rename: Annotated[
        Texts | None,
        Option(
            metavar="PATTERN=KEY",
            help="Other names for keys that match: 'h.{i}.{x*}=layers.{i}.{x}'. If repeated, "
            "applied in this order.",
        ),
    ] = None,
    cast: Annotated[
        Texts | None,
        Option(
            metavar="[PATTERN=]DTYPE",
            help="Convert floating-point tensors: all, or those whose new keys match. Of several "
            "the last counts.",
        ),
    ] = None,
    lossy: Annotated[bool, Option("--lossy", help="Allow casts to change values.")] = False,
    recipe: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Rules in JSON or YAML that make other tensors of those of SOURCE, applied before "
            "--include, --exclude, --rename and --cast, in this order. --dry-run shows what comes "
            "from where.",
        ),
    ] = None,
    reshard: Annotated[
        Texts | None,
        Option(
            metavar="[PATTERN:]axis=0,parts=8",
            help="Split tensors into parts: all, or those whose new keys match; more axes follow "
            "after a semicolon. Otherwise they keep their chunks.",
        ),
    ] = None,
    weights: Annotated[
        bool,
        Option(
            "--weights",
            help="Only the model, under its own names: --tensors-only --include 'model.{x*}' "
            "--rename 'model.{x*}={x}', before the other options.",
        ),
    ] = False,
    tensors_only: Annotated[
        bool, Option("--tensors-only", help="Leave out common state and sharded objects.")
    ] = False,
    shard_size: Annotated[
        str, Option(metavar="SIZE", help="Largest file of a safetensors folder.")
    ] = "5GB",
    memory: Memory = "2GiB",
    threads: Annotated[
        int | None, Option(min=1, help="Threads that read and write.", show_default="auto")
    ] = None,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Replace what is at DESTINATION, if it is of the same kind; write also what is "
            "far larger than SOURCE.",
        ),
    ] = False,
    trusted: Trusted = False,
    verify: Annotated[
        bool,
        Option(
            "--verify/--no-verify",
            help="Compare the tensors with the checksums of SOURCE, if it has any.",
        ),
    ] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be done.")] = False,
    json: AsJson = False,
) -> None:
    """Convert a checkpoint into another format.

    Tensors keep every bit unless you --cast. They are read and written in
    parts, so that memory stays within its budget, and compared with the
    checksums of SOURCE, if it has any. DESTINATION appears when it is
    complete. After a kill, run the same command again.

    Example: dckpt convert runs/gpt@latest model --to safetensors --weights
    """
    with progress_bar("starting", None):
        # Imported here, because it imports torch.
        from dist_checkpointing.planning import CastTo, Drop, Keep, Recipe, Rename  # noqa: PLC0415
        from dist_checkpointing.tools import convert  # noqa: PLC0415
    rules = Recipe(
        *([] if recipe is None else [Recipe.read(recipe)]),
        *([Keep(_MODEL), Rename(_MODEL, to="{key}")] if weights else []),
        *([Keep(include)] if include else []),
        *map(Drop, exclude or ()),
        *(Rename(*_of_pattern("--rename", text)) for text in rename or ()),
        *(CastTo(*_of_pattern("--cast", text, EVERY_KEY)) for text in cast or ()),
    )
    options = convert.ConvertOptions(
        memory_bytes=parse_bytes(memory),
        threads=threads,
        shard_bytes=parse_bytes(shard_size),
        overwrite=force,
        trusted=trusted,
        verify=verify,
        dry_run=dry_run,
        reshard=reshard or (),
        lossy=lossy,
        tensors_only=tensors_only or weights,
    )
    place = located(source)
    try:
        with ranks() as comm, progress_bar("planning", None) as bar, explaining(place):
            done = convert.convert(
                place,
                destination,
                to,
                recipe=rules,
                options=options,
                progress=bar.show,
                comm=comm,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"nothing of {destination} is left") from None
    report = Report()
    for line in () if json else _lines(done, destination, dry_run=dry_run):
        report.line(line)
    report.finish(_as_json(done, dry_run=dry_run), as_json=json)


def _of_pattern(option: str, text: str, default: str = "") -> tuple[str, str]:
    """The pattern, and what follows the last equals sign."""
    pattern, _, value = text.rpartition("=")
    if not (pattern or default):
        raise ValueError(f"{option} {text!r}: expected PATTERN=KEY, as 'model.{{x*}}={{x}}'")
    return pattern or default, value


def _lines(done: Conversion, destination: Path, *, dry_run: bool) -> Iterator[str]:
    plan, made = done.plan, done.made
    what = f"{counted(len(plan.tensors), 'tensor')} ({bytes_text(plan.num_bytes)})"
    if plan.objects:
        what += f", {counted(len(plan.objects), 'object')}"
    if dry_run:
        yield from str(made).splitlines() if made.counts else ()
        changed = {*made.changed}
        for own in (tensor.stored for tensor in plan.tensors):
            if own.key not in changed:
                yield f"{own.key}  {own.dtype.name}{list(own.global_shape)}"
        yield f"would convert {what}, {done.source} -> {done.target}: {destination}"
    else:
        speed = bytes_text(plan.num_bytes / max(done.seconds, 1e-9))
        took = f"in {done.seconds:.1f} s ({speed}/s)"
        yield f"converted {what}, {done.source} -> {done.target}, {took}: {destination}"
        if made.counts:
            yield f"  recipe: {made.summary}; --dry-run shows it by key"
    for cast in plan.casts:
        loss = "no value changed" if cast.is_lossless else "values rounded"
        yield f"  cast: {counted(cast.tensors, 'tensor')} {cast.stored} -> {cast.wanted}, {loss}"
    if plan.uncut:
        keys, more = ", ".join(plan.uncut[:3]), ", ..." if len(plan.uncut) > 3 else ""
        yield f"  not split, no such axis: {counted(len(plan.uncut), 'tensor')} ({keys}{more})"
    if done.verified_bytes:
        size = bytes_text(done.verified_bytes)
        yield f"  verified: {size} of tensors by the checksums of the source"
    if done.num_proven:
        proven = counted(done.num_proven, "tensor")
        yield f"  proven: {proven} have the fingerprint of the source"
    if done.not_verified:
        yield f"  not verified: {done.not_verified}"
    for lost in done.left_out:
        yield f"  left out, {done.target} cannot hold it: {lost}"


def _as_json(done: Conversion, *, dry_run: bool) -> dict[str, Any]:
    plan, made = done.plan, done.made
    return {
        "source": done.source,
        "target": done.target,
        "dry_run": dry_run,
        "num_bytes": plan.num_bytes,
        "seconds": done.seconds,
        "tensors": [
            {
                "key": own.key,
                "source_keys": list(sources := made.tensors[own.key].sources),
                "dtype": own.dtype.name,
                "source_dtypes": sorted({made.stored[key].dtype.name for key in sources}),
                "shape": list(own.global_shape),
                "num_bytes": own.num_bytes,
            }
            for own in (tensor.stored for tensor in plan.tensors)
        ],
        "objects": [
            {"key": key, "source_key": made.objects[key], "shape": list(shape)}
            for key, shape in plan.objects.items()
        ],
        "casts": [cast._asdict() for cast in plan.casts],
        "not_cut": list(plan.uncut),
        "left_out": list(done.left_out),
        "verified_bytes": done.verified_bytes,
        "not_verified": done.not_verified,
        "num_proven": done.num_proven,
        "recipe": made.as_json(),
    }
