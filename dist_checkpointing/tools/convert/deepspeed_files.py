"""DeepSpeed ZeRO checkpoints: parameters and optimizer state out of the flat partitions of ranks.

ZeRO-3 gives each rank the same share of every parameter, padded at its end. ZeRO-1 and 2 lay the
parameters of a group one after the other, and give each rank a share of the whole. The universal
format has a file for each tensor.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.object_path import Location
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping.nesting import MISSING, flatten, unflatten_part
from dist_checkpointing.strategies.safe_pickle import deserialize_file
from dist_checkpointing.tools.convert.sources import MappedSource, require

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO = "optimizer_state_dict"
_UNIVERSAL = "zero"
_STAGE_3 = 3
_MOST_NAME_BYTES = 4096
_OWN_KEYS: Final = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
     "frozen_param_fragments", "shared_params"}
)  # fmt: skip
"""What of the state of the model becomes tensors, names of them, or nothing."""


class _Stage(IntEnum):
    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


_STAND_INS: Final = (
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SimpleNamespace, "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""Plain data in place of DeepSpeed's classes: the files need neither trust nor DeepSpeed."""


_Path = tuple[str | int, ...]
_Piece = tuple[int, int, int, int]
"""Rank, number of its flat tensor, first element and number of elements there."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of elements of a flat tensor in a file, found by a path of keys."""

    file: Path
    path: _Path
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Share:
    """What a file of a rank holds: where its flat weights are, their sizes, and their state."""

    file: Path
    weights: _Path
    sizes: tuple[int, ...]
    paddings: Sequence[Sequence[int]] | None
    state: tuple[dict[str, tuple[_Path, Any]], ...]
    groups: tuple[dict[str, Any], ...]


class _Opened:
    """Files that are mapped when they are first needed."""

    def __init__(self, open_file: Callable[[Path], Any]) -> None:
        self._open_file = open_file
        self._states: dict[Path, Any] = {}

    def flat(self, segment: _Segment) -> torch.Tensor:
        if segment.file not in self._states:
            self._states[segment.file] = self._open_file(segment.file)
        found = _tensor_at(self._states[segment.file], segment.path)
        assert found is not None
        return found.detach().flatten()[segment.start : segment.start + segment.count]


class DeepSpeedSource(MappedSource[_Opened]):
    """A DeepSpeed checkpoint by parameter name, with the keys of ``TorchState``.

    The master weights are ``model.NAME``, their optimizer state is ``optimizer.state.NAME.exp_avg``
    and the like. Buffers and frozen parameters keep their dtype; tied weights are there once.

    Args:
        path: folder of a step, or the one above, whose file ``latest`` names a step.
        trusted: unpickle anything in it, each time that a file is mapped.

    Raises:
        UnsupportedFormatError: for tensor, pipeline or expert parallelism that is not universal,
            and for files with more than plain data that are not trusted.
        CorruptCheckpointError: if files are missing, damaged, or do not fit together.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self._trusted = trusted
        folder = step_folder(path)
        require(
            folder is not None,
            "the step cannot be found",
            Finding("latest names no step that is there", path=str(path / "latest")),
        )
        assert folder is not None
        self._folder = folder
        super().__init__(folder, sorted(folder.rglob("*.pt")))
        if is_universal := (folder / _UNIVERSAL).is_dir():
            optimizer = folder / _UNIVERSAL / "optimizer_state.pt"
            zero = self._load(optimizer)
            self._stage = int(_get(zero, "zero_stage", optimizer))
            self._world_size = 1
        else:
            shares = self._shares()
        what = "universal" if is_universal else f"ZeRO-{self._stage}"
        self._kind = f"DeepSpeed checkpoint, {what}, {self._world_size} ranks"
        model = self._load(self._model_file(0))
        require(
            not model.keys() & {"ds_autoep_layers", "autoep_layers"},
            "experts are not put together",
            Finding("expert parallelism", path=str(folder), remedy=_MAKE_UNIVERSAL),
        )
        self._placed: dict[str, tuple[Ints, list[_Segment]]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        shapes = [
            {name: tuple(shape) for name, shape in group.items()}
            for group in _get(model, "param_shapes", self._model_file(0))
        ]
        if is_universal:
            groups = self._place_universal(shapes, _get(zero, "param_groups", optimizer))
        else:
            groups = self._place_partitions(shapes, shares)
        self._place_model(model)
        self._common = self._common_of(model, groups)
        self._index = Index.of(self._stored())
        self._begins = {
            key: [0, *accumulate(segment.count for segment in segments)]
            for key, (_, segments) in self._placed.items()
        }

    def _load(self, file: Path) -> Any:
        if not file.is_file():
            finding = Finding("missing", path=str(file), remedy="Copy the whole folder.")
            raise CorruptCheckpointError("the checkpoint is not whole", [finding])
        return deserialize_file(file, trusted=self._trusted, stand_ins=_STAND_INS)

    def _model_file(self, rank: int) -> Path:
        by_rank = self._folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return by_rank if self._stage == _STAGE_3 else self._folder / "mp_rank_00_model_states.pt"

    def _shares(self) -> list[_Share]:
        """What each rank has, after a check that all ranks are there and agree."""
        found = {
            (int(match[1]), int(match[2])): file
            for file in self._files
            if (match := _OPTIM.fullmatch(file.name)) and file.parent == self._folder
        }
        path = str(self._folder)
        remedy = "Convert its *_model_states.pt: without ZeRO that holds the whole model."
        finding = Finding("there are no *_optim_states.pt", path=path, remedy=remedy)
        require(found, "not a ZeRO checkpoint", finding)
        is_parallel = any(model for _, model in found) or any(
            "_expert_" in file.name or "expp_rank" in file.name for file in self._files
        )
        if is_parallel:
            problem = "tensor, pipeline or expert parallelism"
            finding = Finding(problem, path=path, remedy=_MAKE_UNIVERSAL)
            raise UnsupportedFormatError("parts of a model are not put together", [finding])
        shares, kinds = [], {}
        for (rank, _), file in sorted(found.items()):
            zero = _get(self._load(file), _ZERO, file)
            counts = _get(zero, "partition_count", file)
            kinds[rank] = int(_get(zero, "zero_stage", file)), counts
            shares.append(_share(zero, kinds[rank][0], file))
        self._stage, counts = kinds[0] if 0 in kinds else next(iter(kinds.values()))
        sizes = set(counts) if isinstance(counts, list) else {counts}
        finding = Finding("expert parallelism", path=path, remedy=_MAKE_UNIVERSAL)
        require(len(sizes) == 1, "experts are not put together", finding)
        (self._world_size,) = sizes
        findings = [
            Finding(
                "written with another number of ranks or stage of ZeRO",
                expected=f"stage {self._stage}, {counts} ranks",
                found=f"stage {stage}, {own} ranks",
                path=str(found[rank, 0]),
                ranks=(rank,),
            )
            for rank, (stage, own) in kinds.items()
            if (stage, own) != (self._stage, counts)
        ]
        missing = tuple(sorted(set(range(self._world_size)) - kinds.keys()))
        extra = tuple(sorted(kinds.keys() - set(range(self._world_size))))
        expected = f"files of ranks 0 to {self._world_size - 1}"
        if missing:
            remedy = "Copy the files of all nodes into one folder."
            findings.append(
                Finding("missing *_optim_states.pt", None, expected, None, missing, path, remedy)
            )
        if extra:
            remedy = "Remove what another run left there."
            findings.append(
                Finding("more *_optim_states.pt", None, expected, None, extra, path, remedy)
            )
        findings += [
            Finding("partitions of other sizes than rank 0's", path=str(own.file), ranks=(rank,))
            for rank, own in enumerate(shares)
            if self._stage == _STAGE_3 and own.sizes != shares[0].sizes and not findings
        ]
        if findings:
            raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
        return shares

    def _place_partitions(
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
        layout = _zero3 if self._stage == _STAGE_3 else _zero12
        for name, shape, pieces in layout(shapes, shares):
            weights = [
                _Segment(shares[rank].file, (*shares[rank].weights, number), start, count)
                for rank, number, start, count in pieces
            ]
            self._placed[f"model.{name}"] = shape, weights
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
                self._place_state(name, entry, value, shape if is_cut else (), parts)
        return groups

    def _place_universal(
        self, shapes: Sequence[Mapping[str, Ints]], groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        known = {name: shape for group in shapes for name, shape in group.items()}
        for name, shape in known.items():
            folder = self._folder / _UNIVERSAL / name
            files = sorted({*folder.glob("*.pt"), folder / "fp32.pt"})
            for file in files:
                value = self._load(file)
                path: _Path = ("param",) if isinstance(value, dict) else ()
                found = _tensor_at(value, path)
                own = () if found is None or found.ndim == 0 else shape
                parts = [_Segment(file, path, 0, math.prod(own))]
                if file.stem == "fp32":
                    self._placed[f"model.{name}"] = own, parts
                else:
                    self._place_state(name, file.stem, found, own, parts)
        # Stage 3 has a dict of shapes for each part of a group that it updates at a time.
        named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        owner = [own for own, group in zip(named, groups, strict=True) for _ in group["params"]]
        for own, names in zip(owner, shapes, strict=False):
            own["params"] += names
        return named

    def _place_state(
        self, name: str, entry: str, value: object, shape: Ints, parts: list[_Segment]
    ) -> None:
        # Optimizers of torch count steps in a tensor; those of DeepSpeed in a number.
        if isinstance(value, torch.Tensor) or (entry == "step" and isinstance(value, int)):
            self._placed[f"optimizer.state.{name}.{entry}"] = shape, parts
        else:
            self._values.setdefault(name, {})[entry] = value

    def _place_model(self, model: Mapping[str, Any]) -> None:
        """Find the frozen parameters and the buffers."""
        first, is_cut = self._model_file(0), self._stage == _STAGE_3
        fragments = model.get("frozen_param_fragments") or {}
        for name, size in (model.get("frozen_param_shapes") or {}).items():
            if is_cut and name in fragments:
                shape, path = tuple(size), ("frozen_param_fragments", name)
                num_ranks = int(_get(model, "dp_world_size", first))
                self._placed[f"model.{name}"] = (
                    shape,
                    [
                        _Segment(self._model_file(rank), path, 0, count)
                        for rank, count in _even_runs(math.prod(shape), num_ranks)
                    ],
                )
        # Below stage 3 it also has the frozen parameters, and weights of lower precision.
        buffers, tied = _get(model, "buffer_names", first), model.get("shared_params") or {}
        for name, value in _get(model, "module", first).items():
            key = f"model.{name}"
            is_whole = isinstance(value, torch.Tensor) and (not is_cut or name in buffers)
            if is_whole and key not in self._placed and name not in tied:
                shape = tuple(value.shape)
                self._placed[key] = shape, [_Segment(first, ("module", name), 0, value.numel())]

    def _common_of(
        self, model: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> dict[Any, Any]:
        for group in groups:
            group.pop("step", None)
            for key, value in group.items():
                group[key] = value.tolist() if isinstance(value, torch.Tensor) else value
        rest = {key: value for key, value in model.items() if key not in _OWN_KEYS}
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

    def _stored(self) -> Iterator[StoredTensor]:
        """Describe each tensor, after a look at all that it consists of."""
        used: dict[Path, list[tuple[str, _Segment]]] = {}
        for key, (_, segments) in self._placed.items():
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
        if findings:
            raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
        for key, (shape, _) in sorted(self._placed.items()):
            dtype = dtype_of.get(key, torch.float32)
            yield StoredTensor.undivided(key, dtypes.from_torch(dtype), shape)

    def _open(self) -> _Opened:
        return _Opened(self._load)

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def common(self) -> dict[Any, Any]:
        return self._common

    def files(self) -> tuple[Location, ...]:
        return (self.path, *self._files)

    def file_of(self, key: str) -> Path:
        segments = self._placed[key][1]
        return segments[0].file if segments else self._folder

    def _copy(self, content: _Opened, key: str, box: Box) -> torch.Tensor:
        out = torch.empty(box.shape, dtype=self._index[key].dtype.torch)
        if out.numel():
            self._fill(content, key, 0, self._placed[key][0], box.offset, out)
        return out

    def _fill(
        self, content: _Opened, key: str, begin: int, shape: Ints, offset: Ints, out: torch.Tensor
    ) -> None:
        """Fill a contiguous tensor with a box of the tensor that begins at a flat position."""
        if not shape:
            out.copy_(self._runs(content, key, begin, 1)[0].view(()))
            return
        row = math.prod(shape[1:])
        begin, rows = begin + offset[0] * row, len(out)
        segments = self._segments(key, begin, rows * row)
        if out.shape[1:] == shape[1:]:
            flat = out.view(-1)
            for run in self._runs(content, key, begin, rows * row):
                flat[: run.numel()] = run
                flat = flat[run.numel() :]
        elif len(segments) == 1:
            view = self._runs(content, key, begin, rows * row)[0].view(rows, *shape[1:])
            inner = [slice(o, o + e) for o, e in zip(offset[1:], out.shape[1:], strict=True)]
            out.copy_(view[(slice(None), *inner)])
        elif rows == 1:
            self._fill(content, key, begin, shape[1:], offset[1:], out[0])
        else:
            # Only the rows where two segments meet are read one by one.
            half = rows // 2
            self._fill(content, key, begin, shape, (0, *offset[1:]), out[:half])
            self._fill(content, key, begin, shape, (half, *offset[1:]), out[half:])

    def _segments(self, key: str, begin: int, count: int) -> range:
        """Numbers of the segments that a flat range touches."""
        begins = self._begins[key]
        last = bisect_right(begins, begin + count - 1)
        return range(bisect_right(begins, begin) - 1, last)

    def _runs(self, content: _Opened, key: str, begin: int, count: int) -> list[torch.Tensor]:
        runs, segments, begins = [], self._placed[key][1], self._begins[key]
        for number in self._segments(key, begin, count):
            first = max(0, begin - begins[number])
            runs.append(content.flat(segments[number])[first : begin + count - begins[number]])
        return runs


_MAKE_UNIVERSAL = (
    "Make it universal first: python -m deepspeed.checkpoint.ds_to_universal "
    "--input_folder SRC --output_folder DST."
)


def step_folder(path: Location) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint: itself, or what ``latest`` names."""
    if not isinstance(path, Path):
        return None
    latest = path / "latest"
    places = [path]
    if latest.is_file() and latest.stat().st_size <= _MOST_NAME_BYTES:
        places.append(path / Path(latest.read_text(errors="replace").strip()).name)
    for place in places:
        if any(any(place.glob(f"*_{what}_states.pt")) for what in ("model", "optim")):
            return place
    return None


def _at(state: Any, path: _Path) -> Any:
    """What is below some keys; None if there is nothing."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _tensor_at(state: Any, path: _Path) -> torch.Tensor | None:
    found = _at(state, path)
    if isinstance(found, int):
        return torch.tensor(float(found))
    return found if isinstance(found, torch.Tensor) else None


def _get(state: Any, key: str, file: Path) -> Any:
    if not isinstance(state, dict) or key not in state:
        finding = Finding(f"it has no {key}", path=str(file))
        raise CorruptCheckpointError("not a file of a ZeRO checkpoint", [finding])
    return state[key]


def _share(zero: Any, stage: int, file: Path) -> _Share:
    weights_key, state_key = "single_partition_of_fp32_groups", "base_optimizer_state"
    if stage == _STAGE_3:
        weights_key, state_key = "fp32_flat_groups", "optimizer_state_dict"
    weights, base = _get(zero, weights_key, file), _get(zero, state_key, file)
    path: _Path = (_ZERO, state_key)
    state: list[dict[str, tuple[_Path, Any]]] = []
    groups = [{"params": [number]} for number in range(len(weights))]
    if isinstance(base, dict):
        groups = _get(base, "param_groups", file)
    for number in range(len(weights)):
        # Elastic checkpoints have a list of states.
        own_path = (*path, "state", number) if isinstance(base, dict) else (*path, number)
        own = _at(zero, own_path[1:]) or {}
        state.append({entry: ((*own_path, entry), value) for entry, value in own.items()})
    for at, group in enumerate(groups):
        if "step" in group:
            for number in group["params"]:
                state[number].setdefault(
                    "step", ((*path, "param_groups", at, "step"), group["step"])
                )
    sizes = tuple(weight.numel() for weight in weights)
    paddings = zero.get("param_alignment_paddings")
    return _Share(file, (_ZERO, weights_key), sizes, paddings, tuple(state), tuple(groups))


def _even_runs(num_elements: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """The ranks that hold a part of a tensor that ZeRO-3 cuts evenly, and how much each has."""
    most = -(-num_elements // num_ranks)
    for rank in range(num_ranks):
        count = min(most, num_elements - rank * most)
        if count > 0:
            yield rank, count


def _zero3(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share]
) -> Iterator[tuple[str, Ints, list[_Piece]]]:
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


def _zero12(
    shapes: Sequence[Mapping[str, Ints]], shares: Sequence[_Share]
) -> Iterator[tuple[str, Ints, list[_Piece]]]:
    """Each parameter, and its pieces: a group is flat, and each rank has a run of it."""
    _check_used(len(shapes), len(shares[0].sizes), shares[0].file)
    for number, group in enumerate(shapes):
        begins = [0, *accumulate(share.sizes[number] for share in shares)]
        paddings = shares[0].paddings
        after = paddings[number] if paddings is not None else [0] * len(group)
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
