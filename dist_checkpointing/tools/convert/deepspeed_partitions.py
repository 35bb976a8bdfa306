"""Where ZeRO puts each parameter: the flat partitions of the ranks, and their layout.

ZeRO-3 gives each rank the same share of every parameter, padded at its end. ZeRO-1 and 2 lay the
parameters of a group one after the other, and give each rank a share of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.format.geometry import Ints

STAGE_3: Final = 3
ZERO_KEY: Final = "optimizer_state_dict"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARALLEL = re.compile(r"mp_rank_(?!00_)|_expert_|^expp_rank|^layer_")

KeyPath = tuple[str | int, ...]
Piece = tuple[int, int, int, int]
"""Rank, number of its flat tensor, first element and number of elements there."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a file of a rank holds: where its flat weights are, their sizes, and their state."""

    file: Path
    weights: KeyPath
    sizes: tuple[int, ...]
    paddings: Sequence[Sequence[int]] | None
    state: tuple[dict[str, tuple[KeyPath, Any]], ...]
    groups: tuple[dict[str, Any], ...]


def value_at(state: Any, path: KeyPath) -> Any:
    """What is below some keys; None if there is nothing."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def required(state: Any, key: str, file: Path) -> Any:
    """An entry of a file that every such file has."""
    if not isinstance(state, dict) or key not in state:
        finding = Finding(f"it has no {key}", path=str(file))
        raise CorruptCheckpointError("not a file of a ZeRO checkpoint", [finding])
    return state[key]


def refuse_parallel(folder: Path) -> NoReturn:
    """Raise UnsupportedFormatError for parts of a model."""
    finding = Finding(
        "tensor, pipeline or expert parallelism",
        path=str(folder),
        remedy="Load it with DeepSpeed on data-parallel ranks alone, and save that.",
    )
    raise UnsupportedFormatError("parts of a model are not put together", [finding])


def check_not_parallel(folder: Path, files: Iterable[Path]) -> None:
    """Raise UnsupportedFormatError if there are files of parts of a model."""
    if any(_PARALLEL.search(file.name) for file in files if file.parent == folder):
        refuse_parallel(folder)


def read_shares(
    folder: Path, files: Iterable[Path], load: Callable[[Path], Any]
) -> tuple[int, list[Share]]:
    """The stage of ZeRO, and what each rank has.

    Raises:
        CorruptCheckpointError: if files are missing, or are not of one run.
        UnsupportedFormatError: for parts of a model, in other groups of ranks.
    """
    path = str(folder)
    names = [file.name for file in files if file.parent == folder]
    found = {int(match[1]): match for name in names if (match := _OPTIM.fullmatch(name))}
    if not found:
        remedy = "Convert its *_model_states.pt: without ZeRO that holds the whole model."
        finding = Finding("there are no *_optim_states.pt", path=path, remedy=remedy)
        raise UnsupportedFormatError("not a ZeRO checkpoint", [finding])
    shares, kinds = {}, {}
    for rank, match in sorted(found.items()):
        file = folder / match.string
        zero = required(load(file), ZERO_KEY, file)
        stage = int(required(zero, "zero_stage", file))
        counts = required(zero, "partition_count", file)
        counts = sorted(set(counts)) if isinstance(counts, list) else [counts]
        kinds[rank] = f"stage {stage}, {', '.join(map(str, counts))} ranks"
        shares[rank] = _share(zero, stage, file)
        if len(counts) != 1:
            refuse_parallel(folder)
        world_size = int(counts[0])
    findings = [
        Finding("written with another number of ranks or stage of ZeRO", None,
                kinds[min(kinds)], kind, (rank,), str(shares[rank].file))
        for rank, kind in kinds.items()
        if kind != kinds[min(kinds)]
    ]  # fmt: skip
    wanted = range(world_size)
    for problem, ranks, remedy in (
        ("its file is missing", set(wanted) - found.keys(), "Copy the files of all nodes here."),
        ("there was no such rank", found.keys() - set(wanted), "Remove what another run left."),
    ):
        if ranks and not findings:
            expected = f"files of ranks 0 to {world_size - 1}"
            own = tuple(sorted(ranks))
            findings.append(Finding(problem, None, expected, None, own, path, remedy))
    if not findings:
        findings += [
            Finding("other sizes than rank 0", None, shares[0].sizes, share.sizes, (rank,),
                    str(share.file))
            for rank, share in shares.items()
            if (share.sizes if stage == STAGE_3 else len(share.sizes))
            != (shares[0].sizes if stage == STAGE_3 else len(shares[0].sizes))
        ]  # fmt: skip
    if findings:
        raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
    return stage, [shares[rank] for rank in wanted]


def _share(zero: Any, stage: int, file: Path) -> Share:
    weights_key, state_key = "single_partition_of_fp32_groups", "base_optimizer_state"
    if stage == STAGE_3:
        weights_key, state_key = "fp32_flat_groups", "optimizer_state_dict"
    weights, base = required(zero, weights_key, file), required(zero, state_key, file)
    path: KeyPath = (ZERO_KEY, state_key)
    state: list[dict[str, tuple[KeyPath, Any]]] = []
    groups = [{"params": [number]} for number in range(len(weights))]
    if isinstance(base, dict):
        groups = required(base, "param_groups", file)
    for number in range(len(weights)):
        # Elastic checkpoints have a list of states.
        own_path = (*path, "state", number) if isinstance(base, dict) else (*path, number)
        own = value_at(zero, own_path[1:]) or {}
        state.append({entry: ((*own_path, entry), value) for entry, value in own.items()})
    for at, group in enumerate(groups):
        if "step" in group:
            for number in group["params"]:
                state[number].setdefault(
                    "step", ((*path, "param_groups", at, "step"), group["step"])
                )
    sizes = tuple(weight.numel() for weight in weights)
    paddings = zero.get("param_alignment_paddings")
    return Share(file, (ZERO_KEY, weights_key), sizes, paddings, tuple(state), tuple(groups))


def even_runs(num_elements: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """The ranks that hold a part of a tensor that ZeRO-3 cuts evenly, and how much each has."""
    most = -(-num_elements // num_ranks)
    for rank in range(num_ranks):
        count = min(most, num_elements - rank * most)
        if count > 0:
            yield rank, count


def zero3_layout(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[Share]
) -> Iterator[tuple[str, Ints, list[Piece]]]:
    """Each parameter, and its pieces: each rank has an even part of it at the same place."""
    begins = [0, *accumulate(shares[0].sizes)]
    position = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        pieces = [
            (rank, *run)
            for rank, own in even_runs(count, len(shares))
            for run in _across(begins, position, own)
        ]
        yield name, shape, pieces
        position += -(-count // len(shares))
    _check_used(position, begins[-1], shares[0].file)


def zero12_layout(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[Share]
) -> Iterator[tuple[str, Ints, list[Piece]]]:
    """Each parameter, and its pieces: a group is flat, and each rank has a run of it."""
    _check_used(len(shapes), len(shares[0].sizes), shares[0].file)
    for number, group in enumerate(shapes):
        begins = [0, *accumulate(share.sizes[number] for share in shares)]
        paddings = shares[0].paddings
        after = paddings[number] if paddings is not None else [0] * len(group)
        _check_used(len(group), len(after), shares[0].file)
        position = 0
        for (name, shape), padding in zip(group.items(), after, strict=True):
            runs = _across(begins, position, math.prod(shape))
            yield name, shape, [(rank, number, start, count) for rank, start, count in runs]
            position += math.prod(shape) + padding
        # The end of the group is padded to twice the number of ranks, and not always saved.
        unit = 2 * len(shares)
        _check_used(-(-position // unit), -(-begins[-1] // unit), shares[0].file)


def _check_used(used: int, there: int, file: Path) -> None:
    if used != there:
        finding = Finding("the shapes do not fit the partitions", None, used, there, (), str(file))
        raise CorruptCheckpointError("parameters cannot be found in the partitions", [finding])


def _across(begins: Sequence[int], start: int, count: int) -> list[tuple[int, int, int]]:
    """``(number, start, count)`` in each of the parts that a range of their sequence touches."""
    found = []
    for number, (begin, stop) in enumerate(pairwise(begins)):
        first, last = max(begin, start), min(stop, start + count)
        if first < last:
            found.append((number, first - begin, last - first))
    return found
