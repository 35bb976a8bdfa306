"""DeepSpeed ZeRO checkpoints: parameters and optimizer state, whole, by parameter name.

ZeRO-3 gives each rank the same share of every parameter, padded at its end. ZeRO-1 and 2 lay the
parameters of a group one after the other, and give each rank a share of the whole.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.format.foreign_formats import deepspeed_step
from dist_checkpointing.format.geometry import Box, Ints, ravel_offset, values_of_part
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.nested_dicts import MISSING, mapped
from dist_checkpointing.strategies import tensor_files
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.safe_pickle import deserialize

_MODEL = "mp_rank_00_model_states.pt"
_ZERO_KEY = "optimizer_state_dict"
_UNIVERSAL = "zero"
_WEIGHTS = "fp32"
"""The master weights of a parameter, among the entries of its state."""

_CUTS_WEIGHTS: Final = 3
"""Stage of ZeRO that gives each rank a part of every parameter."""
_NOT_IN_COMMON: Final = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
     "frozen_param_fragments", "shared_params"}
)  # fmt: skip
"""What of the state of the model becomes tensors, names of them, or nothing."""

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARALLEL = re.compile(r"mp_rank_(?!00_)|_expert_|^expp_rank|^layer_")

KeyPath = tuple[str | int, ...]


STAND_INS: Final = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SimpleNamespace, "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""Plain data in place of DeepSpeed's classes: the files need neither trust nor DeepSpeed."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of elements of a flat tensor in a file, found by a path of keys."""

    file: Path
    path: KeyPath
    start: int
    count: int
    dtype: torch.dtype
    size: int

    @classmethod
    def of(cls, file: Path, path: KeyPath, value: object, start: int = 0, count: int = 1) -> Self:
        found = _tensor_at(value, ())
        if found is None:
            return cls(file, path, start, count, torch.float32, 0)
        return cls(file, path, start, count, found.dtype, found.numel())


_Parameter = tuple[int | None, str, Ints, dict[str, tuple[Any, list[_Segment]]]]
"""Number of its group, name, shape, and a value and the segments of each entry of its state."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a file of a rank holds: for each flat tensor, paths and values of all its state."""

    file: Path
    kind: str
    stage: int
    num_ranks: int
    sizes: Sequence[int]
    paddings: Sequence[Sequence[int]] | None
    state: Sequence[Mapping[str, tuple[KeyPath, Any]]]
    groups: Sequence[Mapping[str, Any]]


class DeepSpeedFiles(tensor_files.TensorFiles):
    """A DeepSpeed checkpoint by parameter name, with the keys of ``TorchState``.

    The master weights are ``model.NAME``, their optimizer state is ``optimizer.state.NAME.exp_avg``
    and the like. Buffers and frozen parameters keep their dtype; tied weights are there once.

    Args:
        folder: folder of a step, or of a run, see ``deepspeed_step``.
        trusted: unpickle anything in it, each time that a file is mapped.

    Raises:
        UnsupportedFormatError: for tensor, pipeline or expert parallelism,
            and for files with more than plain data that are not trusted.
        CorruptCheckpointError: if files are missing, damaged, or do not fit together.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self._trusted = trusted
        folder = deepspeed_step(folder) or folder
        super().__init__(folder, sorted(folder.rglob("*.pt")))
        # Shape and segments of each tensor, and at which element each segment begins.
        self._segments: dict[str, tuple[Ints, list[_Segment], list[int]]] = {}
        try:
            self._find()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise _damage("not a DeepSpeed checkpoint", problem, folder) from error

    def _find(self) -> None:
        """Read all but the values."""
        folder = self.path
        if any(_PARALLEL.search(file.name) for file in self.paths if file.parent == folder):
            raise _parallel(folder)
        optimizer, zero, shares = folder / _UNIVERSAL / "optimizer_state.pt", {}, []
        if optimizer.parent.is_dir():
            zero = self._open(optimizer)
            stage = int(_required(zero, "zero_stage", optimizer))
            groups = _required(zero, "param_groups", optimizer)
        else:
            shares = self._read_shares()
            stage, groups = shares[0].stage, shares[0].groups
        by_rank = "zero_pp_rank_0_" if stage == _CUTS_WEIGHTS else ""
        first = folder / f"{by_rank}{_MODEL}"
        model = self._open(first)
        if model.keys() & {"ds_autoep_layers", "autoep_layers"}:
            raise _parallel(folder)
        shapes = [
            {name: tuple(shape) for name, shape in group.items()}
            for group in _required(model, "param_shapes", first)
        ]
        group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
        parameters = self._universal(shapes, group_of, zero, optimizer)
        if shares:
            parameters = _partitioned(shapes, shares, group_of)
        state = self._add_parameters(parameters, groups)
        self._add_frozen_and_buffers(model, first, is_cut=stage == _CUTS_WEIGHTS)
        rest = {key: value for key, value in model.items() if key not in _NOT_IN_COMMON}
        ties = {"model": dict(model.get("shared_params") or {})}
        self.common: dict[Any, Any] = {
            "optimizer": state,
            "step": int(model.get("global_steps", 0)),
            "torch_state": {"world_size": 0, "ties": ties, "per_rank": [], "objects": []},
            "deepspeed": mapped(
                rest, lambda leaf: MISSING if isinstance(leaf, torch.Tensor) else leaf
            ),
        }
        self._set_index(self._rows())

    def _add(self, key: str, shape: Ints, segments: list[_Segment]) -> None:
        begins = [0, *accumulate(segment.count for segment in segments)]
        self._segments[key] = shape, segments, begins
        if segments:
            self.file_of[key] = segments[0].file

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            remedy = "Copy the whole folder."
            raise _damage("the checkpoint is not whole", "missing", file, remedy=remedy)
        return deserialize(file, trusted=self._trusted, stand_ins=STAND_INS)

    def _read_shares(self) -> list[_Share]:
        path = str(self.path)
        files = [file for file in self.paths if file.parent == self.path]
        found = {int(match[1]): f for f in files if (match := _OPTIM.fullmatch(f.name))}
        if not found:
            remedy = "Convert its *_model_states.pt: without ZeRO that holds the whole model."
            finding = Finding("there are no *_optim_states.pt", path=path, remedy=remedy)
            raise UnsupportedFormatError("not a ZeRO checkpoint", [finding])
        shares = {rank: _share(self._open(file), file) for rank, file in sorted(found.items())}
        first = shares[min(shares)]
        ranks = set(range(first.num_ranks))
        findings = []
        for rank, own in shares.items():
            where = (rank,), str(own.file)
            if own.kind != first.kind:
                problem = "written with another number of ranks or stage of ZeRO"
                findings.append(Finding(problem, None, first.kind, own.kind, *where))
            elif len(own.sizes) != len(first.sizes) or (
                own.stage == _CUTS_WEIGHTS and own.sizes != first.sizes
            ):
                problem = "other sizes than rank 0"
                findings.append(Finding(problem, None, first.sizes, own.sizes, *where))
        for problem, wrong, remedy in (
            ("its file is missing", ranks - found.keys(), "Copy the files of all nodes here."),
            ("there was no such rank", found.keys() - ranks, "Remove what another run left."),
        ):
            if wrong and not findings:
                expected, numbers = f"files of ranks 0 to {max(ranks)}", tuple(sorted(wrong))
                findings.append(Finding(problem, None, expected, None, numbers, path, remedy))
        CorruptCheckpointError.raise_if(findings, "the files of the ranks do not fit together")
        return [*shares.values()]

    def _universal(
        self,
        shapes: Sequence[Mapping[str, Ints]],
        group_of: Sequence[int],
        zero: Mapping[str, Any],
        optimizer: Path,
    ) -> Iterator[_Parameter]:
        """Each parameter, which has a folder with a file for each entry of its state."""
        # Stage 3 has a dict of shapes for each part of a group that it updates at a time.
        for number, (at, group) in enumerate(zip(group_of, shapes, strict=True)):
            step: dict[str, tuple[Any, list[_Segment]]] = {}
            for path in ("param_groups", at, "step"), (_ZERO_KEY, "state", number, "step"):
                if (value := _tensor_at(zero, path)) is not None:
                    step = {"step": (value, [_Segment.of(optimizer, path, value)])}
            for name, shape in group.items():
                state = dict(step)
                folder = self.path / _UNIVERSAL / name
                for file in sorted({*folder.glob("*.pt"), folder / f"{_WEIGHTS}.pt"}):
                    content = self._open(file)
                    below: KeyPath = ("param",) if isinstance(content, dict) else ()
                    found = _tensor_at(content, below)
                    count = math.prod(shape) if _is_cut(found) else 1
                    if found is not None and found.numel() != count:
                        finding = Finding("another size", name, shape, found.shape, (), str(file))
                        raise CorruptCheckpointError("the files do not fit together", [finding])
                    state[file.stem] = found, [_Segment.of(file, below, found, 0, count)]
                yield at, name, shape, state

    def _add_parameters(
        self, parameters: Iterable[_Parameter], groups: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Note where weights and state are; what is no tensor, and the groups, with names."""
        named = [
            {
                key: value.tolist() if isinstance(value, torch.Tensor) else value
                for key, value in {**group, "params": []}.items()
                if key != "step"
            }
            for group in groups
        ]
        values: dict[str, dict[str, Any]] = {}
        for at, name, shape, state in parameters:
            if at is not None:
                named[at]["params"].append(name)
            for entry, (value, segments) in state.items():
                # Optimizers of torch count steps in a tensor; those of DeepSpeed in a number.
                if entry == _WEIGHTS:
                    self._add(f"model.{name}", shape, segments)
                elif isinstance(value, (torch.Tensor, int) if entry == "step" else torch.Tensor):
                    own = shape if _is_cut(value) else ()
                    self._add(f"optimizer.state.{name}.{entry}", own, segments)
                else:
                    values.setdefault(name, {})[entry] = value
        return {"state": values, "param_groups": named}

    def _add_frozen_and_buffers(
        self, model: Mapping[str, Any], first: Path, *, is_cut: bool
    ) -> None:
        fragments, opened = model.get("frozen_param_fragments") or {}, cache(self._open)
        for name, size in (model.get("frozen_param_shapes") or {}).items():
            if is_cut and name in fragments:
                runs = _even_runs(math.prod(size), int(_required(model, "dp_world_size", first)))
                path = ("frozen_param_fragments", name)
                parts = [
                    _Segment.of(file, path, _tensor_at(opened(file), path), 0, count)
                    for rank, count in runs
                    for file in [self.path / f"zero_pp_rank_{rank}_{_MODEL}"]
                ]
                self._add(f"model.{name}", tuple(size), parts)
        # Below stage 3 it also has the frozen parameters, and weights of lower precision.
        buffers, tied = _required(model, "buffer_names", first), model.get("shared_params") or {}
        for name, value in _required(model, "module", first).items():
            key = f"model.{name}"
            is_whole = isinstance(value, torch.Tensor) and (not is_cut or name in buffers)
            if is_whole and key not in self._segments and name not in tied:
                segment = _Segment.of(first, ("module", name), value, 0, value.numel())
                self._add(key, tuple(value.shape), [segment])

    def _rows(self) -> list[tensor_files.TensorRow]:
        findings, rows = [], []
        for key, (shape, segments, begins) in self._segments.items():
            dtype = segments[0].dtype if segments else torch.float32
            for part in segments:
                path, stop = str(part.file), part.start + part.count
                if part.size < stop:
                    expected = f"at least {stop} elements"
                    findings.append(Finding("truncated", key, expected, part.size, path=path))
                elif part.dtype is not dtype:
                    findings.append(Finding("two dtypes", key, dtype, part.dtype, path=path))
            if begins[-1] != math.prod(shape):
                findings.append(Finding("parts of it are missing", key, shape, path=str(self.path)))
            rows.append((key, dtype, shape))
        CorruptCheckpointError.raise_if(findings, "the files of the ranks do not fit together")
        return [(key, tensor_memory.from_torch(dtype), shape) for key, dtype, shape in rows]

    def _copy(self, key: str, box: Box, out: torch.Tensor) -> None:
        if not out.numel():
            return
        shape, segments, begins = self._segments[key]
        first = ravel_offset(box.offset, shape)
        last = ravel_offset(tuple(stop - 1 for stop in box.stop), shape)
        for number, start, count in _across(begins, first, last + 1 - first):
            segment, begin = segments[number], begins[number] + start
            found = _tensor_at(self._content(segment.file), segment.path)
            assert found is not None
            run = found.detach().flatten()[segment.start + start :][:count]
            for part, values in values_of_part(Box.whole(shape), (begin, begin + count), run):
                common = part.intersect(box)
                if common is not None:
                    target = out[common.relative_to(box.offset).slices()]
                    target.copy_(values[common.relative_to(part.offset).slices()])


class DeepSpeedReader(tensor_files.TensorFilesReader):
    """Reads a DeepSpeed checkpoint."""

    files_type: ClassVar[type[DeepSpeedFiles]] = DeepSpeedFiles


class DeepSpeedLoadShardedStrategy(PlannedLoadStrategy):
    """Loads DeepSpeed checkpoints, as ("deepspeed", 1)."""

    reader_type: ClassVar[type[DeepSpeedReader]] = DeepSpeedReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("deepspeed", 1)})


class DeepSpeedCommonLoadStrategy(tensor_files.TensorFilesCommonStrategy):
    """Reads what DeepSpeed keeps beside tensors."""

    files_type: ClassVar[type[DeepSpeedFiles]] = DeepSpeedFiles
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("deepspeed", 1)})


def _is_cut(value: object) -> bool:
    """Whether a value of the state has an element for each of the parameter."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _tensor_at(state: Any, path: KeyPath) -> torch.Tensor | None:
    """The tensor below some keys, or the number as one; None if there is nothing."""
    try:
        for key in path:
            state = state[key]
    except (KeyError, IndexError, TypeError):
        return None
    if isinstance(state, int):
        return torch.tensor(float(state))
    return state if isinstance(state, torch.Tensor) else None


def _required(state: Any, key: str, file: Path) -> Any:
    if not isinstance(state, dict) or key not in state:
        raise _damage("not a file of a ZeRO checkpoint", f"it has no {key}", file)
    return state[key]


def _damage(message: str, problem: str, path: Path, **values: Any) -> CorruptCheckpointError:
    return CorruptCheckpointError(message, [Finding(problem, path=str(path), **values)])


def _parallel(folder: Path) -> UnsupportedFormatError:
    finding = Finding(
        "tensor, pipeline or expert parallelism",
        path=str(folder),
        remedy="Load it with DeepSpeed on data-parallel ranks alone, and save that.",
    )
    return UnsupportedFormatError("parts of a model are not put together", [finding])


def _share(content: Any, file: Path) -> _Share:
    zero = _required(content, _ZERO_KEY, file)
    stage = int(_required(zero, "zero_stage", file))
    counts = _required(zero, "partition_count", file)
    counts = sorted(set(counts)) if isinstance(counts, list) else [counts]
    if len(counts) != 1:
        raise _parallel(file.parent)
    weights_key, state_key = "single_partition_of_fp32_groups", "base_optimizer_state"
    if stage == _CUTS_WEIGHTS:
        weights_key, state_key = "fp32_flat_groups", "optimizer_state_dict"
    weights, base = _required(zero, weights_key, file), _required(zero, state_key, file)
    path: KeyPath = (_ZERO_KEY, state_key)
    if isinstance(base, dict):
        groups = _required(base, "param_groups", file)
        states, below = base.get("state", {}), (*path, "state")
    else:  # elastic checkpoints have a list of states
        groups = [{"params": [number]} for number in range(len(weights))]
        states, below = dict(enumerate(base)), path
    state = [
        {_WEIGHTS: ((_ZERO_KEY, weights_key, number), flat)}
        | {key: ((*below, number, key), value) for key, value in (states.get(number) or {}).items()}
        for number, flat in enumerate(weights)
    ]
    for at, group in enumerate(groups):
        if "step" in group:
            step = ((*path, "param_groups", at, "step"), group["step"])
            for number in group["params"]:
                state[number].setdefault("step", step)
    sizes = tuple(weight.numel() for weight in weights)
    kind, paddings = f"stage {stage}, world size {counts[0]}", zero.get("param_alignment_paddings")
    return _Share(file, kind, stage, int(counts[0]), sizes, paddings, state, groups)


def _partitioned(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share], group_of: Sequence[int]
) -> Iterator[_Parameter]:
    """Each parameter, of which each rank has a part."""
    first, num_ranks = shares[0], len(shares)
    is_even = first.stage == _CUTS_WEIGHTS
    runs = [[*group.items()] for group in shapes]
    if is_even:
        runs = [[*chain(*runs)]]
    else:
        _require_fit(len(runs), len(first.sizes), first.file)
    for number, run in enumerate(runs):
        sizes = first.sizes if is_even else [share.sizes[number] for share in shares]
        begins, position = [0, *accumulate(sizes)], 0
        after: Sequence[int] = [0] * len(run)
        if not is_even and first.paddings is not None:
            after = first.paddings[number]
        _require_fit(len(run), len(after), first.file)
        for (name, shape), padding in zip(run, after, strict=True):
            size = math.prod(shape)
            if is_even:
                # Each rank has its part at the same position of its flat tensors.
                pieces = [
                    (rank, *part)
                    for rank, count in _even_runs(size, num_ranks)
                    for part in _across(begins, position, count)
                ]
                position += -(-size // num_ranks)
            else:
                parts = _across(begins, position, size)
                pieces = [(rank, number, start, count) for rank, start, count in parts]
                position += size + padding
            if not pieces:
                yield None, name, shape, {_WEIGHTS: (None, [])}
                continue
            state, flat = {}, pieces[0][1]
            for entry, (path, value) in first.state[flat].items():
                segments = [_Segment.of(first.file, path, value)]
                if _is_cut(value):
                    segments = [
                        _Segment.of(shares[rank].file, *shares[rank].state[own][entry], *run)
                        for rank, own, *run in pieces
                        if entry in shares[rank].state[own]
                    ]
                state[entry] = value, segments
            yield group_of[flat] if flat < len(group_of) else None, name, shape, state
        # The end of a group is padded to twice the number of ranks, and not always saved.
        unit = 1 if is_even else 2 * num_ranks
        _require_fit(-(-position // unit), -(-begins[-1] // unit), first.file)


def _require_fit(used: int, there: int, file: Path) -> None:
    if used != there:
        message = "parameters cannot be found in the partitions"
        problem = "the shapes do not fit the partitions"
        raise _damage(message, problem, file, expected=used, found=there)


def _even_runs(num_elements: int, num_ranks: int) -> list[tuple[int, int]]:
    """The ranks that hold a part of a tensor that ZeRO-3 cuts evenly, and how much each has."""
    most = max(1, -(-num_elements // num_ranks))
    starts = range(0, num_elements, most)
    return [(rank, min(most, num_elements - start)) for rank, start in enumerate(starts)]


def _across(begins: Sequence[int], start: int, count: int) -> list[tuple[int, int, int]]:
    """``(number, start, count)`` in each of the parts that a range of their sequence touches."""
    stop = start + count
    first, last = bisect_right(begins, start) - 1, bisect_left(begins, stop)
    return [
        (number, max(begin, start) - begin, min(end, stop) - max(begin, start))
        for number, (begin, end) in enumerate(pairwise(begins[first : last + 1]), first)
        if max(begin, start) < min(end, stop)
    ]
