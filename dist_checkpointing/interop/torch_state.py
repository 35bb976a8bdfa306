"""TorchState: model, optimizer, scheduler, RNG and more as one object; names of module tensors,
tied weights.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError
from dist_checkpointing.interop.dtensor_state_dict import shard_state_dict, unshard_state_dict
from dist_checkpointing.interop.torch_named_state import (
    ModuleTensors,
    OptimizerTemplate,
    optimizer_tree,
    outline,
    regroup,
    tensors_to_fill,
    unwrapped,
)
from dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict, StoredState
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning.replica_check import digest_of_values
from dist_checkpointing.validation.save_errors import common_digests, number_of_digests


def rng_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that training code uses
    state["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


logger: logging.Logger = logging.getLogger(__name__)
_RECORD: Final = "torch_state"
_NO_RECORD: Final[Mapping[str, Any]] = {"world_size": 0, "ties": {}, "per_rank": (), "objects": ()}
_RESERVED: Final = frozenset({"model", "optimizer", "step", "rng", _RECORD})


class TorchState:
    """The state of a training run: ``save`` and ``load`` take it in place of a state dict.

    ``load`` restores all of it in place. The model may be plain, in DistributedDataParallel, cut by
    FSDP2 (``fully_shard``), tensor parallelism, HSDP or products of them, with torch.compile and
    activation checkpointing; it may be cut in another way when it is loaded. Optimizer state goes
    by parameter name, so parameters may be grouped in another way or frozen; it is made where an
    optimizer has none before its first step. Tied weights are stored once. The states of the random
    number generators are kept for each rank, and restored if there is an optimizer.

    Args:
        model: Model, with memory (not on the meta device).
        optimizer: Optimizer of its parameters, or several; made after the model was cut.
        step: Number of the step, kept as ``state.step``.
        others: What else to save, by name: modules (an EMA of the model), objects with
            ``state_dict`` and ``load_state_dict`` (schedulers, GradScaler, data loaders), and dicts
            of plain values, which are filled in place; None for a part that there is not. What
            differs between ranks is kept for each, and restored on the same number of ranks.

    Attributes:
        step: Number of the step; ``load`` sets it.

    Raises:
        ValueError: for a name that is reserved.
        TypeError: for an argument that is none of these.
        InvalidShardingError: for FSDP1 and ZeroRedundancyOptimizer; by ``save`` and ``load`` for an
            optimizer of parameters that the model does not have.
        StateMismatchError: by ``load``, if the checkpoint does not hold what is asked for.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = TorchState(model, optimizer, step=17)
        >>> save(state, "ckpt/17")
        >>> state.step = 0
        >>> _ = load(state, "ckpt/17")
        >>> state.step
        17
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        step: int = 0,
        **others: nn.Module | Stateful | dict[str, Any] | None,
    ) -> None:
        if reserved := _RESERVED & others.keys():
            raise ValueError(f"the name {min(reserved)!r} is reserved")
        given = {name: other for name, other in others.items() if other is not None}
        for name, other in given.items():
            if not isinstance(other, nn.Module | Stateful | dict):
                raise TypeError(
                    f"{name} must be a module, a dict, or have state_dict and load_state_dict; "
                    f"it is a {type(other).__name__}"
                )
        if not issubclass(type(model), nn.Module):
            kind = type(model).__name__
            message = f"model must be a torch.nn.Module, not a {kind}: TorchState(model, optimizer)"
            raise TypeError(message)
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        if not all(hasattr(one, "param_groups") for one in several):
            found = ", ".join(type(one).__name__ for one in several)
            raise TypeError(f"optimizer must be an optimizer, or several; found {found}")
        if any(hasattr(one, "consolidate_state_dict") for one in several):
            finding = Finding(
                "ZeroRedundancyOptimizer keeps its state outside optimizer.state",
                found=", ".join(type(one).__name__ for one in several),
                remedy="Wrap the model with torch.distributed.fsdp.fully_shard.",
            )
            raise InvalidShardingError("this optimizer cannot be saved", [finding])
        self.step = step
        self._optimizers = [*several]
        modules = {name: part for name, part in given.items() if isinstance(part, nn.Module)}
        self._modules = {
            name: unwrapped(module) for name, module in {"model": model, **modules}.items()
        }
        self._others = {name: part for name, part in given.items() if name not in modules}

    def sharded_state_dict(self, comm: Comm) -> ShardedStateDict:
        """What ``save`` writes; its tensors are those of the training. Collective."""
        with comm.agreed("taking the state of the model"):
            step = operator.index(self.step)
            modules = {name: ModuleTensors(module) for name, module in self._modules.items()}
        state: StateDict = {name: tensors.tree() for name, tensors in modules.items()}
        if self._optimizers:
            names_of = modules["model"].names_of
            state["optimizer"] = optimizer_tree(self._optimizers, names_of, comm)
        per_rank, objects = {}, {}
        nests = {name: tensors.nests(name) for name, tensors in modules.items()}
        for name in self._others:
            with comm.agreed(f"taking the state of {name}"):
                own = self._state_of(name)
                # There may be gigabytes of it, which one rank need not look at.
                number = 0 if comm.world_size == 1 else _number_of(own)
            if not comm.all_same(number):
                with comm.agreed(f"taking the state of {name}"):
                    if _has(own, lambda leaf: isinstance(leaf, DTensor)):
                        finding = Finding(
                            "it has DTensors, and other values that differ between ranks",
                            name,
                            remedy="Keep values that differ between ranks in a separate object.",
                        )
                        raise InvalidShardingError("this object cannot be saved", [finding])
                per_rank[name] = own
            elif _has(own, _is_weight):
                state[name], nests[name] = own, outline(own, name)
            elif not _has(own, torch.is_tensor):
                state[name] = own
            else:
                # A new object may have no tensor yet that could be filled.
                objects[name] = own
        state["step"] = step
        state[_RECORD] = {
            "world_size": comm.world_size,
            "ties": {name: tensors.ties for name, tensors in modules.items()},
            "per_rank": [*per_rank],
            "objects": [*objects],
            "nests": nests,
        }
        sharded = shard_state_dict(state, comm=comm)
        per_rank["rng"] = rng_state()
        cells = {name: _cell(name, own, comm) for name, own in per_rank.items()}
        for name, own in objects.items():
            cells[name] = ShardedObject(name, own, (1,), (0,), comm.rank)
        return {**sharded, **cells}

    def template_for(
        self, stored: StoredState, comm: Comm
    ) -> tuple[ShardedStateDict, Callable[[StateDict], None]]:
        """What ``load`` asks for, and what restores it. Collective."""
        record = stored.common.get(_RECORD, _NO_RECORD)
        nests = record.get("nests")  # older checkpoints have none
        # What holds a model and nothing else, as folders of Hugging Face do, has its names alone.
        is_alone = (
            record is _NO_RECORD
            and [*self._modules] == ["model"]
            and not any(
                f"model.{name}" in stored.tensors for name in self._modules["model"].state_dict()
            )
        )

        def tensor(key: str, own: object) -> torch.Tensor:
            shape, dtype = stored.tensors.get(key, ((), torch.float32))
            if isinstance(own, torch.Tensor):
                if isinstance(own, DTensor) or (tuple(own.shape), own.dtype) == (shape, dtype):
                    return own
                return own.new_empty(shape, dtype=dtype)
            return torch.empty(shape, dtype=dtype)

        modules: dict[str, ModuleTensors] = {}
        optimizer: OptimizerTemplate | None = None
        with comm.agreed("asking for the state"):
            state: StateDict = {}
            for name, module in self._modules.items():
                prefix, keys = "" if is_alone else f"{name}.", stored.tensors
                known = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
                tensors = ModuleTensors(module, record["ties"].get(name, {}), known)
                if nests is not None:
                    common = stored.common.get(name, {})
                    tensors.take_extra(nests.get(name, {}), common, tensor)
                modules[name], state[name] = tensors, tensors.tree()
            if self._optimizers:
                names_of = modules["model"].names_of
                optimizer = OptimizerTemplate(self._optimizers, names_of, stored)
                state["optimizer"] = {"state": optimizer.tree}
            cells = {}
            if comm.rank < record["world_size"]:
                cells["rng"] = _cell("rng", None, comm, record["world_size"])
            restored = self._restorable(stored, record, comm)
            for name in restored:
                if name in record["per_rank"]:
                    cells[name] = _cell(name, None, comm)
                elif name in record["objects"]:
                    cells[name] = ShardedObject(name, None, (1,), (0,))
                elif nests is not None:
                    if name in nests:
                        state[name] = tensors_to_fill(nests[name], self._state_of(name), tensor)
                elif _has(own := self._state_of(name), torch.is_tensor):
                    state[name] = own
        if is_alone:
            state |= state.pop("model")
        sharded = shard_state_dict(state, comm=comm)

        def restore(loaded: StateDict) -> None:
            loaded = unshard_state_dict(loaded, state)
            for name, tensors in modules.items():
                tensors.restore(loaded if is_alone else loaded.get(name, {}))
            if optimizer is not None:
                optimizer.restore(loaded["optimizer"])
            for name in restored:
                self._restore_other(name, loaded[name], optimizer)
            self.step = loaded.get("step", self.step)
            # Without an optimizer this is no training that goes on: an evaluation keeps its own.
            if "rng" in cells and self._optimizers:
                set_rng_state(loaded["rng"])

        return {**sharded, **cells}, restore

    def _state_of(self, name: str) -> dict[str, Any]:
        part = self._others[name]
        return part if isinstance(part, dict) else part.state_dict()

    def _restorable(self, stored: StoredState, record: Mapping[str, Any], comm: Comm) -> list[str]:
        """Names of the other objects whose state fits this number of ranks."""
        missing = [
            name
            for name in self._others
            if name not in (*record["per_rank"], *record["objects"], *stored.common)
            and not any(key.startswith(f"{name}.") for key in stored.tensors)
        ]  # fmt: skip
        remedy = "Leave it out of TorchState for this load."
        findings = [Finding("not in the checkpoint", name, remedy=remedy) for name in missing]
        StateMismatchError.raise_if(findings, "template and checkpoint do not fit")
        is_same = record["world_size"] == comm.world_size
        unfit = [name for name in self._others if name in record["per_rank"] and not is_same]
        for name in unfit:
            logger.warning(
                "%s is not restored: it was saved per rank on %d ranks, and now there are others",
                name,
                record["world_size"],
            )
        return [name for name in self._others if name not in unfit]

    def _restore_other(
        self, name: str, loaded: dict[str, Any], optimizer: OptimizerTemplate | None
    ) -> None:
        part = self._others[name]
        if isinstance(part, dict):
            part.clear()
            part.update(loaded)
            return
        try:
            part.load_state_dict(loaded)
        except Exception as error:
            error.add_note(
                f"{name}.load_state_dict failed when the model and the optimizer were restored: "
                "only a part of the training is that of the checkpoint now"
            )
            raise
        # Accelerate wraps schedulers.
        scheduler = getattr(part, "scheduler", part)
        if isinstance(scheduler, LRScheduler) and optimizer is not None:
            regroup(scheduler, optimizer)


def _cell(name: str, value: object, comm: Comm, world_size: int | None = None) -> ShardedObject:
    return ShardedObject(name, value, (world_size or comm.world_size,), (comm.rank,))


def _is_weight(value: object) -> bool:
    return isinstance(value, DTensor) or (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 0
    )


def _number_of(state: dict[str, Any]) -> int:
    """A number that tells whether ranks hold the same; DTensors are parts of a whole."""
    leaves, skeleton = flatten(state)
    for path, leaf in leaves.items():
        if isinstance(leaf, DTensor):
            leaves[path] = None
        elif _is_weight(leaf):
            content = digest_of_values(leaf.detach().reshape(-1))
            leaves[path] = f"{leaf.dtype}{tuple(leaf.shape)}{content.hex()}"
    return number_of_digests(common_digests(unflatten(skeleton, leaves)))


def _has(state: dict[str, Any], kind: Callable[[object], bool]) -> bool:
    leaves, _ = flatten(state)
    return any(map(kind, leaves.values()))
