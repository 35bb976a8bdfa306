"""DeepSpeed ZeRO checkpoints: parameters and optimizer state, whole, by parameter name."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.nested_dicts import MISSING, flatten, unflatten_part
from dist_checkpointing.strategies.safe_pickle import deserialize_file
from dist_checkpointing.tools.convert.deepspeed_partitions import (
    STAGE_3,
    ZERO_KEY,
    KeyPath,
    Share,
    check_not_parallel,
    even_runs,
    read_shares,
    refuse_parallel,
    required,
    value_at,
    zero3_layout,
    zero12_layout,
)
from dist_checkpointing.tools.convert.sources import MappedSource

_UNIVERSAL = "zero"
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


class _Opened:
    """Files that are mapped when they are first needed."""

    def __init__(self, open_file: Callable[[Path], Any]) -> None:
        self._open_file = open_file
        self._states: dict[Path, Any] = {}

    def flat(self, segment: _Segment) -> torch.Tensor:
        """The elements of a segment, in the mapped file."""
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
        folder: folder of a step, see ``step_folder``.
        trusted: unpickle anything in it, each time that a file is mapped.

    Raises:
        UnsupportedFormatError: for tensor, pipeline or expert parallelism,
            and for files with more than plain data that are not trusted.
        CorruptCheckpointError: if files are missing, damaged, or do not fit together.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._folder = folder
        super().__init__(folder, sorted(folder.rglob("*.pt")))
        self._placed: dict[str, tuple[Ints, list[_Segment]]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        try:
            self._find()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            finding = Finding(f"{type(error).__name__}: {error}", path=str(folder))
            raise CorruptCheckpointError("not a DeepSpeed checkpoint", [finding]) from error
        self._begins = {
            key: [0, *accumulate(segment.count for segment in segments)]
            for key, (_, segments) in self._placed.items()
        }

    def _find(self) -> None:
        """Read all but the values."""
        check_not_parallel(self._folder, self._files)
        optimizer = self._folder / _UNIVERSAL / "optimizer_state.pt"
        if is_universal := optimizer.parent.is_dir():
            zero = self._load(optimizer)
            self._stage = int(required(zero, "zero_stage", optimizer))
            self._kind = "DeepSpeed checkpoint, universal"
        else:
            self._stage, shares = read_shares(self._folder, self._files, self._load)
            self._kind = f"DeepSpeed checkpoint, ZeRO-{self._stage}, {len(shares)} ranks"
        first = self._model_file(0)
        model = self._load(first)
        if model.keys() & {"ds_autoep_layers", "autoep_layers"}:
            refuse_parallel(self._folder)
        shapes = [
            {name: tuple(shape) for name, shape in group.items()}
            for group in required(model, "param_shapes", first)
        ]
        if is_universal:
            groups = self._place_universal(shapes, zero, optimizer)
        else:
            groups = self._place_partitions(shapes, shares)
        self._place_model(model)
        self._common = self._common_of(model, groups)
        self._index = Index.of(self._stored())

    def _load(self, file: Path) -> Any:
        if not file.is_file():
            finding = Finding("missing", path=str(file), remedy="Copy the whole folder.")
            raise CorruptCheckpointError("the checkpoint is not whole", [finding])
        return deserialize_file(file, trusted=self._trusted, stand_ins=STAND_INS)

    def _model_file(self, rank: int) -> Path:
        by_rank = self._folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return by_rank if self._stage == STAGE_3 else self._folder / "mp_rank_00_model_states.pt"

    def _place_partitions(
        self, shapes: Sequence[Mapping[str, Ints]], shares: Sequence[Share]
    ) -> list[dict[str, Any]]:
        """Find where parameters and their state lie; the groups of the optimizer, with names."""
        first = shares[0]
        groups = [{**group, "params": []} for group in first.groups]
        group_of = {
            number: own
            for own, group in zip(groups, first.groups, strict=True)
            for number in group["params"]
        }
        layout = zero3_layout if self._stage == STAGE_3 else zero12_layout
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
        self, shapes: Sequence[Mapping[str, Ints]], zero: Mapping[str, Any], optimizer: Path
    ) -> list[dict[str, Any]]:
        groups = required(zero, "param_groups", optimizer)
        named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        # Stage 3 has a dict of shapes for each part of a group that it updates at a time.
        group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
        for number, (at, own_shapes) in enumerate(zip(group_of, shapes, strict=True)):
            named[at]["params"] += own_shapes
            steps: list[KeyPath] = [
                (ZERO_KEY, "state", number, "step"),
                ("param_groups", at, "step"),
            ]
            step = next((path for path in steps if _tensor_at(zero, path) is not None), None)
            for name, shape in own_shapes.items():
                if step is not None:
                    part = _Segment(optimizer, step, 0, 1)
                    self._place_state(name, "step", _tensor_at(zero, step), (), [part])
                folder = self._folder / _UNIVERSAL / name
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
                        self._placed[f"model.{name}"] = own, parts
                    else:
                        self._place_state(name, file.stem, found, own, parts)
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
        first, is_cut = self._model_file(0), self._stage == STAGE_3
        fragments = model.get("frozen_param_fragments") or {}
        for name, size in (model.get("frozen_param_shapes") or {}).items():
            if is_cut and name in fragments:
                shape, path = tuple(size), ("frozen_param_fragments", name)
                num_ranks = int(required(model, "dp_world_size", first))
                self._placed[f"model.{name}"] = (
                    shape,
                    [
                        _Segment(self._model_file(rank), path, 0, count)
                        for rank, count in even_runs(math.prod(shape), num_ranks)
                    ],
                )
        # Below stage 3 it also has the frozen parameters, and weights of lower precision.
        buffers, tied = required(model, "buffer_names", first), model.get("shared_params") or {}
        for name, value in required(model, "module", first).items():
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
            for name, value in group.items():
                group[name] = value.tolist() if isinstance(value, torch.Tensor) else value
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
        findings += [
            Finding("parts of it are missing", key, shape, path=str(self._folder))
            for key, (shape, segments) in self._placed.items()
            if sum(segment.count for segment in segments) != math.prod(shape)
        ]
        if findings:
            raise CorruptCheckpointError("the files of the ranks do not fit together", findings)
        for key, (shape, _) in sorted(self._placed.items()):
            dtype = dtype_of.get(key, torch.float32)
            yield StoredTensor.undivided(key, tensor_memory.from_torch(dtype), shape)

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


def _tensor_at(state: Any, path: KeyPath) -> torch.Tensor | None:
    found = value_at(state, path)
    if isinstance(found, int):
        return torch.tensor(float(found))
    return found if isinstance(found, torch.Tensor) else None
