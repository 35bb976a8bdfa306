"""DeepSpeed ZeRO checkpoints: parameters and optimizer state, whole, by parameter name.

ZeRO-3 gives each rank the same share of every parameter, padded at its end. ZeRO-1 and 2 lay the
parameters of a group one after the other, and give each rank a share of the whole.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints, ravel_offset, values_of_part
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.nested_dicts import MISSING, flatten, unflatten_part
from dist_checkpointing.strategies.safe_pickle import deserialize_file
from dist_checkpointing.strategies.tensor_files import TensorFiles, TensorRow

_STAGE_3 = 3
_ZERO_KEY = "optimizer_state_dict"
_UNIVERSAL = "zero"
_MAX_NAME_BYTES = 4096
_NOT_IN_COMMON: Final = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
     "frozen_param_fragments", "shared_params"}
)  # fmt: skip
"""What of the state of the model becomes tensors, names of them, or nothing."""

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARALLEL = re.compile(r"mp_rank_(?!00_)|_expert_|^expp_rank|^layer_")

KeyPath = tuple[str | int, ...]
Piece = tuple[int, int, int, int]
"""Rank, number of its flat tensor, first element and number of elements there."""


class _Stage(IntEnum):
    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


STAND_INS: Final = (
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
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


@dataclass(frozen=True, slots=True)
class _Share:
    """What a file of a rank holds: where its flat weights are, their sizes, and their state."""

    file: Path
    weights: KeyPath
    sizes: tuple[int, ...]
    paddings: Sequence[Sequence[int]] | None
    state: tuple[dict[str, tuple[KeyPath, Any]], ...]
    groups: tuple[dict[str, Any], ...]


class DeepSpeedFiles(TensorFiles[Any]):
    """A DeepSpeed checkpoint by parameter name, with the keys of ``TorchState``.

    The master weights are ``model.NAME``, their optimizer state is ``optimizer.state.NAME.exp_avg``
    and the like. Buffers and frozen parameters keep their dtype; tied weights are there once.

    Args:
        folder: folder of a step, see ``step_folder``.
        trusted: unpickle anything in it, each time that a file is mapped.

    Raises:
        UnsupportedFormatError: for tensor, pipeline or expert parallelism,
            and for files with more than plain data that are not trusted.
        CorruptCheckpointError: if files are missing, damaged, or do not fit together.
    """

    backend = "deepspeed"

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self._trusted = trusted
        super().__init__(folder, sorted(folder.rglob("*.pt")))
        self._segments: dict[str, tuple[Ints, list[_Segment]]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        try:
            self._find()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise _damage("not a DeepSpeed checkpoint", problem, folder) from error
        self._begins = {
            key: [0, *accumulate(segment.count for segment in segments)]
            for key, (_, segments) in self._segments.items()
        }

    def _find(self) -> None:
        """Read all but the values."""
        if any(_PARALLEL.search(file.name) for file in self.paths if file.parent == self.path):
            _refuse_parallel(self.path)
        optimizer = self.path / _UNIVERSAL / "optimizer_state.pt"
        if is_universal := optimizer.parent.is_dir():
            zero = self._load(optimizer)
            self._stage = int(_required(zero, "zero_stage", optimizer))
            self.kind = "DeepSpeed checkpoint, universal"
        else:
            shares = self._read_shares()
            self.kind = f"DeepSpeed checkpoint, ZeRO-{self._stage}, {len(shares)} ranks"
        first = self._model_file(0)
        model = self._load(first)
        if model.keys() & {"ds_autoep_layers", "autoep_layers"}:
            _refuse_parallel(self.path)
        shapes = [
            {name: tuple(shape) for name, shape in group.items()}
            for group in _required(model, "param_shapes", first)
        ]
        if is_universal:
            groups = self._add_universal(shapes, zero, optimizer)
        else:
            groups = self._add_partitions(shapes, shares)
        self._add_frozen_and_buffers(model)
        self._common = self._common_of(model, groups)
        self._file_of = {key: parts[0].file for key, (_, parts) in self._segments.items() if parts}
        self._set_index(self._rows())

    def _load(self, file: Path) -> Any:
        if not file.is_file():
            remedy = "Copy the whole folder."
            raise _damage("the checkpoint is not whole", "missing", file, remedy=remedy)
        return deserialize_file(file, trusted=self._trusted, stand_ins=STAND_INS)

    def _model_file(self, rank: int) -> Path:
        by_rank = self.path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return by_rank if self._stage == _STAGE_3 else self.path / "mp_rank_00_model_states.pt"

    def _read_shares(self) -> list[_Share]:
        """What each rank has; also finds out the stage."""
        path = str(self.path)
        names = [file.name for file in self.paths if file.parent == self.path]
        found = {int(match[1]): match[0] for name in names if (match := _OPTIM.fullmatch(name))}
        if not found:
            remedy = "Convert its *_model_states.pt: without ZeRO that holds the whole model."
            finding = Finding("there are no *_optim_states.pt", path=path, remedy=remedy)
            raise UnsupportedFormatError("not a ZeRO checkpoint", [finding])
        shares, kinds = {}, {}
        for rank, name in sorted(found.items()):
            file = self.path / name
            zero = _required(self._load(file), _ZERO_KEY, file)
            self._stage = int(_required(zero, "zero_stage", file))
            counts = _required(zero, "partition_count", file)
            counts = sorted(set(counts)) if isinstance(counts, list) else [counts]
            if len(counts) != 1:
                _refuse_parallel(self.path)
            kinds[rank] = f"stage {self._stage}, {counts[0]} ranks"
            shares[rank] = _share(zero, self._stage, file)
        wanted = range(int(counts[0]))
        first, expected = shares[min(shares)], kinds[min(kinds)]
        problem = "written with another number of ranks or stage of ZeRO"
        findings = [
            Finding(problem, None, expected, kind, (rank,), str(shares[rank].file))
            for rank, kind in kinds.items()
            if kind != expected
        ]
        for problem, ranks, remedy in (
            ("its file is missing", {*wanted} - found.keys(), "Copy the files of all nodes here."),
            ("there was no such rank", found.keys() - {*wanted}, "Remove what another run left."),
        ):
            if ranks and not findings:
                expected = f"files of ranks 0 to {wanted[-1]}"
                own = tuple(sorted(ranks))
                findings.append(Finding(problem, None, expected, None, own, path, remedy))
        findings = findings or [
            Finding("other sizes than rank 0", None, first.sizes, own.sizes, (rank,), str(own.file))
            for rank, own in shares.items()
            if len(own.sizes) != len(first.sizes)
            or (self._stage == _STAGE_3 and own.sizes != first.sizes)
        ]
        if findings:
            raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
        return [shares[rank] for rank in wanted]

    def _add_partitions(
        self, shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share]
    ) -> list[dict[str, Any]]:
        """Find where parameters and their state lie; the groups of the optimizer, with names."""
        first = shares[0]
        groups = [{**group, "params": []} for group in first.groups]
        group_of = {
            number: own
            for own, group in zip(groups, first.groups, strict=True)
            for number in group["params"]
        }
        layout = _zero3_layout if self._stage == _STAGE_3 else _zero12_layout
        for name, shape, pieces in layout(shapes, shares):
            weights = [
                _Segment(shares[rank].file, (*shares[rank].weights, number), start, count)
                for rank, number, start, count in pieces
            ]
            self._segments[f"model.{name}"] = shape, weights
            number = pieces[0][1] if pieces else -1
            if number not in group_of:
                continue
            group_of[number]["params"].append(name)
            for entry, (path, value) in first.state[number].items():
                is_cut = isinstance(value, torch.Tensor) and value.ndim > 0
                parts = [_Segment(first.file, path, 0, 1)]
                if is_cut:
                    parts = [
                        _Segment(shares[rank].file, shares[rank].state[n][entry][0], *run)
                        for rank, n, *run in pieces
                        if entry in shares[rank].state[n]
                    ]
                self._add_state(name, entry, value, shape if is_cut else (), parts)
        return groups

    def _add_universal(
        self, shapes: Sequence[Mapping[str, Ints]], zero: Mapping[str, Any], optimizer: Path
    ) -> list[dict[str, Any]]:
        groups = _required(zero, "param_groups", optimizer)
        named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        # Stage 3 has a dict of shapes for each part of a group that it updates at a time.
        group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
        for number, (at, own_shapes) in enumerate(zip(group_of, shapes, strict=True)):
            named[at]["params"] += own_shapes
            steps: tuple[KeyPath, ...] = (
                (_ZERO_KEY, "state", number, "step"), ("param_groups", at, "step"),
            )  # fmt: skip
            step = next((path for path in steps if _tensor_at(zero, path) is not None), None)
            for name, shape in own_shapes.items():
                if step is not None:
                    part = _Segment(optimizer, step, 0, 1)
                    self._add_state(name, "step", _tensor_at(zero, step), (), [part])
                folder = self.path / _UNIVERSAL / name
                for file in sorted({*folder.glob("*.pt"), folder / "fp32.pt"}):
                    value = self._load(file)
                    path: KeyPath = ("param",) if isinstance(value, dict) else ()
                    found = _tensor_at(value, path)
                    own = () if found is None or found.ndim == 0 else shape
                    if found is not None and own and found.numel() != math.prod(own):
                        finding = Finding("another size", name, shape, found.shape, (), str(file))
                        raise CorruptCheckpointError("the files do not fit together", [finding])
                    parts = [_Segment(file, path, 0, math.prod(own))]
                    if file.stem == "fp32":
                        self._segments[f"model.{name}"] = own, parts
                    else:
                        self._add_state(name, file.stem, found, own, parts)
        return named

    def _add_state(
        self, name: str, entry: str, value: object, shape: Ints, parts: list[_Segment]
    ) -> None:
        # Optimizers of torch count steps in a tensor; those of DeepSpeed in a number.
        if isinstance(value, torch.Tensor) or (entry == "step" and isinstance(value, int)):
            self._segments[f"optimizer.state.{name}.{entry}"] = shape, parts
        else:
            self._values.setdefault(name, {})[entry] = value

    def _add_frozen_and_buffers(self, model: Mapping[str, Any]) -> None:
        first, is_cut = self._model_file(0), self._stage == _STAGE_3
        fragments = model.get("frozen_param_fragments") or {}
        for name, size in (model.get("frozen_param_shapes") or {}).items():
            if is_cut and name in fragments:
                runs = _even_runs(math.prod(size), int(_required(model, "dp_world_size", first)))
                path = ("frozen_param_fragments", name)
                parts = [_Segment(self._model_file(rank), path, 0, count) for rank, count in runs]
                self._segments[f"model.{name}"] = tuple(size), parts
        # Below stage 3 it also has the frozen parameters, and weights of lower precision.
        buffers, tied = _required(model, "buffer_names", first), model.get("shared_params") or {}
        for name, value in _required(model, "module", first).items():
            key = f"model.{name}"
            is_whole = isinstance(value, torch.Tensor) and (not is_cut or name in buffers)
            if is_whole and key not in self._segments and name not in tied:
                segment = _Segment(first, ("module", name), 0, value.numel())
                self._segments[key] = tuple(value.shape), [segment]

    def _common_of(
        self, model: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> dict[Any, Any]:
        for group in groups:
            group.pop("step", None)
            for name, value in group.items():
                group[name] = value.tolist() if isinstance(value, torch.Tensor) else value
        rest = {key: value for key, value in model.items() if key not in _NOT_IN_COMMON}
        leaves, skeleton = flatten(rest)
        plain = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
        others = unflatten_part(skeleton, plain)
        ties = dict(model.get("shared_params") or {})
        return {
            "optimizer": {"state": self._values, "param_groups": list(groups)},
            "step": int(model.get("global_steps", 0)),
            "torch_state": {
                "world_size": 0, "ties": {"model": ties}, "per_rank": [], "objects": [],
            },
            "deepspeed": {} if others is MISSING else others,
        }  # fmt: skip

    def _rows(self) -> Iterator[TensorRow]:
        """Describe each tensor, after a look at all that it consists of."""
        used: dict[Path, list[tuple[str, _Segment]]] = {}
        for key, (_, segments) in self._segments.items():
            for segment in segments:
                used.setdefault(segment.file, []).append((key, segment))
        dtype_of: dict[str, torch.dtype] = {}
        findings = []
        for file, wanted in sorted(used.items()):
            state = self._load(file)
            for key, segment in wanted:
                found = _tensor_at(state, segment.path)
                stop = segment.start + segment.count
                if found is None or found.numel() < stop:
                    size = 0 if found is None else found.numel()
                    expected = f"at least {stop} elements"
                    findings.append(Finding("cut off", key, expected, size, path=str(file)))
                elif dtype_of.setdefault(key, found.dtype) is not found.dtype:
                    own, other = dtype_of[key], found.dtype
                    findings.append(Finding("two dtypes", key, own, other, path=str(file)))
        findings += [
            Finding("parts of it are missing", key, shape, path=str(self.path))
            for key, (shape, segments) in self._segments.items()
            if sum(segment.count for segment in segments) != math.prod(shape)
        ]
        if findings:
            raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
        for key, (shape, _) in self._segments.items():
            yield key, tensor_memory.from_torch(dtype_of.get(key, torch.float32)), shape

    def _open(self, file: Path) -> Any:
        return self._load(file)

    def _copy(self, key: str, box: Box, out: torch.Tensor) -> None:
        if not out.numel():
            return
        (shape, segments), begins = self._segments[key], self._begins[key]
        last = ravel_offset(tuple(stop - 1 for stop in box.stop), shape)
        first = bisect_right(begins, ravel_offset(box.offset, shape)) - 1
        for number in range(first, bisect_right(begins, last)):
            segment, begin = segments[number], begins[number]
            found = _tensor_at(self._content(segment.file), segment.path)
            assert found is not None
            run = found.detach().flatten()[segment.start : segment.start + segment.count]
            flat_range = (begin, begin + segment.count)
            for part, values in values_of_part(Box.whole(shape), flat_range, run):
                common = part.intersect(box)
                if common is not None:
                    target = out[common.relative_to(box.offset).slices()]
                    target.copy_(values[common.relative_to(part.offset).slices()])


def step_folder(path: Location) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint: itself, or what ``latest`` names."""
    if not isinstance(path, Path):
        return None
    latest = path / "latest"
    folders = [path]
    if latest.is_file() and latest.stat().st_size <= _MAX_NAME_BYTES:
        folders.append(path / Path(latest.read_text(errors="replace").strip()).name)
    for folder in folders:
        if any(any(folder.glob(f"*_{what}_states.pt")) for what in ("model", "optim")):
            return folder
    return None


def _value_at(state: Any, path: KeyPath) -> Any:
    """What is below some keys; None if there is nothing."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _tensor_at(state: Any, path: KeyPath) -> torch.Tensor | None:
    found = _value_at(state, path)
    if isinstance(found, int):
        return torch.tensor(float(found))
    return found if isinstance(found, torch.Tensor) else None


def _required(state: Any, key: str, file: Path) -> Any:
    """An entry of a file that every such file has."""
    if not isinstance(state, dict) or key not in state:
        raise _damage("not a file of a ZeRO checkpoint", f"it has no {key}", file)
    return state[key]


def _damage(
    message: str,
    problem: str,
    path: Path,
    expected: object = None,
    found: object = None,
    remedy: str | None = None,
) -> CorruptCheckpointError:
    finding = Finding(problem, None, expected, found, (), str(path), remedy)
    return CorruptCheckpointError(message, [finding])


def _refuse_parallel(folder: Path) -> NoReturn:
    finding = Finding(
        "tensor, pipeline or expert parallelism",
        path=str(folder),
        remedy="Load it with DeepSpeed on data-parallel ranks alone, and save that.",
    )
    raise UnsupportedFormatError("parts of a model are not put together", [finding])


def _share(zero: Any, stage: int, file: Path) -> _Share:
    weights_key, state_key = "single_partition_of_fp32_groups", "base_optimizer_state"
    if stage == _STAGE_3:
        weights_key, state_key = "fp32_flat_groups", "optimizer_state_dict"
    weights, base = _required(zero, weights_key, file), _required(zero, state_key, file)
    path: KeyPath = (_ZERO_KEY, state_key)
    state: list[dict[str, tuple[KeyPath, Any]]] = []
    groups = [{"params": [number]} for number in range(len(weights))]
    if isinstance(base, dict):
        groups = _required(base, "param_groups", file)
    for number in range(len(weights)):
        # Elastic checkpoints have a list of states.
        own_path = (*path, "state", number) if isinstance(base, dict) else (*path, number)
        own = _value_at(zero, own_path[1:]) or {}
        state.append({entry: ((*own_path, entry), value) for entry, value in own.items()})
    for at, group in enumerate(groups):
        if "step" in group:
            step = ((*path, "param_groups", at, "step"), group["step"])
            for number in group["params"]:
                state[number].setdefault("step", step)
    sizes = tuple(weight.numel() for weight in weights)
    paddings = zero.get("param_alignment_paddings")
    return _Share(file, (_ZERO_KEY, weights_key), sizes, paddings, tuple(state), tuple(groups))


def _even_runs(num_elements: int, num_ranks: int) -> list[tuple[int, int]]:
    """The ranks that hold a part of a tensor that ZeRO-3 cuts evenly, and how much each has."""
    most = -(-num_elements // num_ranks)
    counts = ((rank, min(most, num_elements - rank * most)) for rank in range(num_ranks))
    return [(rank, count) for rank, count in counts if count > 0]


def _zero3_layout(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share]
) -> Iterator[tuple[str, Ints, list[Piece]]]:
    """Each parameter, and its pieces: each rank has an even part of it at the same place."""
    begins = [0, *accumulate(shares[0].sizes)]
    position = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        pieces = [
            (rank, *run)
            for rank, own in _even_runs(count, len(shares))
            for run in _across(begins, position, own)
        ]
        yield name, shape, pieces
        position += -(-count // len(shares))
    _check_used(position, begins[-1], shares[0].file)


def _zero12_layout(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share]
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
        message = "parameters cannot be found in the partitions"
        raise _damage(message, "the shapes do not fit the partitions", file, used, there)


def _across(begins: Sequence[int], start: int, count: int) -> list[tuple[int, int, int]]:
    """``(number, start, count)`` in each of the parts that a range of their sequence touches."""
    stop = start + count
    return [
        (number, max(begin, start) - begin, min(end, stop) - max(begin, start))
        for number, (begin, end) in enumerate(pairwise(begins))
        if max(begin, start) < min(end, stop)
    ]
