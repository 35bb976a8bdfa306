"""Tensors of torch modules and state of optimizers by parameter name: tied weights, other groups
and ranks, nests of state that torch makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError
from dist_checkpointing.mapping import StateDict, StoredState
from dist_checkpointing.mapping.nested_dicts import (
    MISSING,
    flatten,
    is_container,
    mapped,
    take_apart,
    unflatten,
)
from dist_checkpointing.validation.save_errors import common_digests, number_of_digests

logger: logging.Logger = logging.getLogger(__name__)


def outline(value: object, key: str) -> Any:
    """The nest in plain containers, with the key of each tensor, and None for other values."""
    if isinstance(value, torch.Tensor):
        return key
    if not is_container(value):
        return None
    if isinstance(value, dict):
        return {step: outline(below, f"{key}.{step}") for step, below in value.items()}
    assert isinstance(value, list | tuple)
    entries = (outline(below, f"{key}.{step}") for step, below in enumerate(value))
    return tuple(entries) if isinstance(value, tuple) else list(entries)


def keys_of(outlined: object) -> list[str]:
    leaves: list[Any] = []
    take_apart(outlined, leaves)
    return [key for key in leaves if isinstance(key, str)]


def tensors_to_fill(outlined: Any, own: object, tensor: Callable[[str, object], Any]) -> Any:
    """The nest that was saved, by its outline, with only tensors in it.

    ``tensor`` gives what to fill, for a key and what is at its place in ``own``, the nest of now.
    """
    keys, structure = flatten(outlined)
    there, _ = flatten(own)
    filled = {
        path: tensor(key, there.get(path)) if isinstance(key, str) else None
        for path, key in keys.items()
    }
    return unflatten(structure, filled)


_EXTRA: Final = "_extra_state"
"""How torch ends the names of what ``get_extra_state`` returns."""
_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch.compile and activation checkpointing put into names."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile; FSDP1 is refused."""
    inner: Any = module
    while isinstance(inner, nn.Module):
        module = inner
        name = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"
        inner = getattr(module, name, None)
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        finding = Finding(
            "FSDP1 keeps flat parameters, which have lost their shapes",
            expected="FSDP2",
            found="FullyShardedDataParallel",
            remedy="Wrap the model with torch.distributed.fsdp.fully_shard.",
        )
        raise InvalidShardingError("this module cannot be saved", [finding])
    return module


class ModuleTensors:
    """The state dict of an ``unwrapped`` module, each group of tied tensors under one name.

    ``sources`` are the names under which the values lie in a checkpoint that has the names
    ``stored``, of a module with these ``ties``; or under which they are saved.
    """

    def __init__(
        self, module: nn.Module, ties: Mapping[str, str] = {}, stored: Container[str] = ()
    ) -> None:
        self._module = module
        self._parallel = {
            f"{name}.module"
            for name, part in module.named_modules(remove_duplicate=False)
            if isinstance(part, DistributedDataParallel)
        }
        own = module.state_dict()
        self._names = {name: self._clean_name(name) for name in own}
        self.values: dict[str, Any] = {self._names[name]: value for name, value in own.items()}
        self._parameters: dict[torch.Tensor, list[str]] = {}
        groups: dict[str, list[str]] = {}
        for kind in (module.named_parameters, module.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                names = self._parameters.setdefault(tensor, [])
                names.append(self._clean_name(name))
                groups[names[-1]] = names
        self.sources: dict[str, str] = {}
        for name in self.values:
            known = [tied for tied in groups.get(name, [name]) if tied in self.values]
            # A model that was tied and now is not finds its values under the other name.
            candidates = [*known, *(ties[tied] for tied in known if tied in ties)]
            self.sources[name] = next((c for c in candidates if c in stored), candidates[0])

    def _clean_name(self, name: str) -> str:
        """The name of a parameter without the wrappers around modules."""
        parts = name.split(".")
        inside = accumulate(parts, lambda above, part: f"{above}.{part}")
        return ".".join(
            part
            for part, path in zip(parts, inside, strict=True)
            if part not in _WRAPPERS and path not in self._parallel
        )

    def nests(self, key: str) -> dict[str, Any]:
        """Outlines of what modules save beside parameters and buffers, if there are tensors."""
        return {
            name: outlined
            for name, value in self.values.items()
            if name.endswith(_EXTRA) and any(keys_of(outlined := outline(value, f"{key}.{name}")))
        }

    def take_extra(
        self, nests: Mapping[str, Any], common: Container[str], tensor: Callable[[str, object], Any]
    ) -> None:
        """Ask for what modules have saved beside parameters and buffers, whatever it is here."""
        for name in self.values:
            if name.endswith(_EXTRA) and (name in nests or name in common):
                self.values[name] = tensors_to_fill(nests.get(name), self.values[name], tensor)

    @property
    def ties(self) -> dict[str, str]:
        """Name of each tensor that is stored under another name, and that name."""
        return {name: source for name, source in self.sources.items() if name != source}

    def tree(self) -> dict[str, Any]:
        """The values by the names of the checkpoint, each once."""
        found: dict[str, Any] = {}
        for name, source in self.sources.items():
            found.setdefault(source, self.values[name])
        return found

    def restore(self, loaded: Mapping[str, Any]) -> None:
        sources = {name: self.sources[clean] for name, clean in self._names.items()}
        full = {name: loaded[source] for name, source in sources.items() if source in loaded}
        # Parameters have been filled in place; this is for what a module makes of its state dict.
        self._module.load_state_dict(full, strict=False)

    def names_of(self, parameter: torch.Tensor) -> list[str]:
        """All names of a parameter of the module; refuses other tensors."""
        if parameter not in self._parameters:
            finding = Finding(
                "the optimizer has a parameter that the model does not have",
                found=f"a tensor of shape {list(parameter.shape)}",
                remedy="Make the optimizer after fully_shard or parallelize_module, from the "
                "parameters of the model that is given.",
            )
            raise InvalidShardingError("optimizer state without a name", [finding])
        return self._parameters[parameter]


NamesOf = Callable[[torch.Tensor], list[str]]
Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each stored tensor of a parameter, by entry of its state."""
_PREFIX: Final = "optimizer.state."


def optimizer_tree(
    optimizers: Sequence[Optimizer], names_of: NamesOf, comm: Comm
) -> dict[str, Any]:
    """State and groups of all optimizers, by parameter name. Collective.

    Ranks with other parameters than rank 0 (pipeline stages) add their groups to it.
    """
    state: dict[str, dict[str, Any]] = {}
    groups_here: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    nests: dict[str, dict[str, Any]] = {}
    with comm.agreed("naming the optimizer state"):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                names = [names_of(parameter)[0] for parameter in group["params"]]
                own = {key: _plain(value) for key, value in group.items() if key != "params"}
                groups_here.append({**own, "params": names})
                for name, parameter in zip(names, group["params"], strict=True):
                    if parameter in optimizer.state:
                        state[name] = dict(optimizer.state[parameter])
        for name, entries in state.items():
            values[name], nested = _without_tensors(entries, f"{_PREFIX}{name}")
            nests |= {name: nested} if nested else {}
    groups = groups_here
    digests = common_digests({"all": repr((groups, values, nests))})
    if not comm.all_same(number_of_digests(digests)):
        groups = []
        for groups_there, values_there, nests_there in comm.all_gather(
            (groups_here, values, nests)
        ):
            groups += [group for group in groups_there if group not in groups]
            nests |= nests_there
            for name, own in values_there.items():
                state[name] = own | state.get(name, {})
    return {"state": state, "param_groups": groups, **({"nests": nests} if nests else {})}


def _without_tensors(state: dict[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if not any(map(is_container, state.values())):
        return {entry: v for entry, v in state.items() if not isinstance(v, torch.Tensor)}, {}
    rest = mapped(state, lambda leaf: MISSING if isinstance(leaf, torch.Tensor) else leaf)
    nests = {
        entry: nest
        for entry, nest in outline(state, key).items()
        if not isinstance(nest, str) and any(keys_of(nest))
    }
    return rest, nests


def _plain(value: Any) -> Any:
    """A hyperparameter without tensors, whose keys would depend on the grouping."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value


class OptimizerTemplate:
    """What is asked of a checkpoint for optimizers that may have no state yet.

    ``tree`` is their state by the names of the checkpoint, ``groups`` are those that were saved, of
    all optimizers. StateMismatchError if the checkpoint has no optimizer, or state of a form that
    cannot be made before the first step.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], names_of: NamesOf, stored: StoredState
    ) -> None:
        saved = stored.common.get("optimizer")
        if not isinstance(saved, dict) or "param_groups" not in saved:
            remedy = "Load TorchState(model) alone."
            finding = Finding("the checkpoint has no optimizer", "optimizer", remedy=remedy)
            raise StateMismatchError("template and checkpoint do not fit", [finding])
        self._optimizers = optimizers
        self._values: Mapping[str, Any] = saved.get("state", {})
        self._nests: Mapping[str, Any] = saved.get("nests", {})
        self.groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
        self._group_of = {
            name: number for number, group in enumerate(self.groups) for name in group["params"]
        }
        self._has_recipe = bool(stored.sources)
        # A recipe gives parameters other names; their groups go by the old ones.
        self._group_of |= {
            key.removeprefix("model."): self._group_of[old]
            for key, sources in stored.sources.items()
            for old in (own.removeprefix("model.") for own in sources)
            if old in self._group_of
        }
        self._names: dict[torch.Tensor, str] = {}
        self.tree: dict[str, dict[str, Any]] = {}
        tensors = self._tensors_by_name(stored)
        findings: list[Finding] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    names = names_of(parameter)
                    name = next((own for own in names if own in self._group_of), names[0])
                    self._names[parameter] = name
                    if name in tensors or name in self._values:
                        self.tree[name] = dict(optimizer.state.get(parameter, {}))
                        findings += self._add_missing(name, parameter, group, tensors.get(name, {}))
        StateMismatchError.raise_if(findings, "optimizer state cannot be made")
        self._log_unequal(set(tensors) | set(self._values))

    def _tensors_by_name(self, stored: StoredState) -> dict[str, Described]:
        found: dict[str, Described] = {}
        for key, described in stored.tensors.items():
            # Both parts may have dots; the first is the name of a parameter in a group.
            name = key.removeprefix(_PREFIX)
            while name != key and name and name not in self._group_of:
                name = name.rpartition(".")[0]
            if name and name != key:
                found.setdefault(name, {})[key[len(_PREFIX) + len(name) + 1 :]] = described
        return found

    def _add_missing(
        self, name: str, parameter: torch.Tensor, group: Mapping[str, Any], stored: Described
    ) -> list[Finding]:
        """Make the tensors that a step would make; what cannot be made."""
        own, findings = self.tree[name], []
        nests, prefix = self._nests.get(name, {}), f"{_PREFIX}{name}."

        def tensor(key: str, there: object) -> object:
            if isinstance(there, torch.Tensor):
                return there
            entry = key.removeprefix(prefix)
            shape, dtype = stored.get(entry, ((), torch.float32))
            if entry == "step" and not (group.get("fused") or group.get("capturable")):
                return torch.empty(shape, dtype=dtype)
            if shape == tuple(parameter.shape) or (
                # A rule that resizes takes the extents of the template.
                self._has_recipe and len(shape) == parameter.ndim and max(shape, default=0) > 1
            ):
                return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            if (isinstance(parameter, DTensor) and shape) or (not nests and "." in entry):
                problem = "how this state is sharded is known only after a step of the optimizer"
                expected = f"the shape of the parameter, {list(parameter.shape)}"
                remedy = "Make one step of the optimizer before the load."
                findings.append(Finding(problem, key, expected, list(shape), remedy=remedy))
            return torch.empty(shape, dtype=dtype, device=parameter.device)

        for entry in own.keys() - nests.keys():
            is_known = entry in self._values.get(name, {}) or is_container(own[entry])
            if is_known and not any(key == entry or key.startswith(f"{entry}.") for key in stored):
                del own[entry]  # tensors here, but none were saved
        for entry, nest in nests.items():
            own[entry] = tensors_to_fill(nest, own.get(entry), tensor)
        known = {*keys_of(nests), *keys_of(outline(own, prefix[:-1]))}
        for entry in stored:
            if prefix + entry not in known:
                own[entry] = tensor(prefix + entry, None)
        return findings

    def _log_unequal(self, stored: set[str]) -> None:
        fresh = set(self._names.values()) - stored
        if fresh and stored:
            logger.warning(
                "%d of %d parameters start without optimizer state: the checkpoint has none, "
                "for example of %s",
                len(fresh), len(self._names), min(fresh),
            )  # fmt: skip
        saved = {key for group in self.groups for key in group} - {"params"}
        for optimizer in self._optimizers:
            own = {key for group in optimizer.param_groups for key in group}
            if saved and saved - own and optimizer.defaults.keys() - saved:
                logger.warning(
                    "%s has no %s, but the optimizer that was saved, which has no %s: it may be "
                    "another one",
                    type(optimizer).__name__,
                    ", ".join(sorted(saved - own)),
                    ", ".join(sorted(optimizer.defaults.keys() - saved)),
                )

    def restore(self, loaded: StateDict) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names[parameter]
                    if name in self.tree:
                        optimizer.state[parameter] = loaded["state"].get(name, {})
                    else:
                        optimizer.state.pop(parameter, None)
                self._restore_group(group)

    def saved_groups(self, group: Mapping[str, Any]) -> list[int]:
        """Numbers of the saved groups that the parameters of a group were in."""
        names = {self._names.get(parameter) for parameter in group["params"]}
        return sorted({self._group_of[name] for name in names if name in self._group_of})

    def _restore_group(self, group: dict[str, Any]) -> None:
        found = [self.groups[number] for number in self.saved_groups(group)]
        for key in {key for saved in found for key in saved} - {"params"}:
            values = [saved[key] for saved in found if key in saved]
            if any(value != values[0] for value in values):
                logger.warning(
                    "%s stays %r: parameters of one group were saved with different values",
                    key,
                    group.get(key),
                )
            elif isinstance(group.get(key), torch.Tensor):
                group[key].fill_(values[0])
            else:
                group[key] = values[0]


def regroup(scheduler: LRScheduler, optimizer: OptimizerTemplate) -> None:
    """Give each group what the scheduler has loaded for the saved groups of its parameters."""
    groups = scheduler.optimizer.param_groups
    sources = [optimizer.saved_groups(group) for group in groups]
    num_saved = len(getattr(scheduler, "_last_lr", groups))
    # With several optimizers the groups of this one are a run of all.
    known = [number for numbers in sources for number in numbers]
    first = min(known) if known and num_saved < len(optimizer.groups) else 0
    if sources != [[first + number] for number in range(num_saved)]:
        # What schedulers keep for each group, beside the last rates.
        for name in ("base_lrs", "min_lrs", "max_lrs"):
            saved = getattr(scheduler, name, None)
            if not isinstance(saved, list) or len(saved) != num_saved:
                continue
            values = []
            for group, numbers in zip(groups, sources, strict=True):
                own = [saved[number - first] for number in numbers if number - first < num_saved]
                if not own or any(value != own[0] for value in own):
                    own = [group.get("initial_lr", group["lr"]) if name == "base_lrs" else saved[0]]
                values.append(own[0])
            setattr(scheduler, name, values)
        scheduler._last_lr = [group["lr"] for group in groups]  # noqa: SLF001 - there is no setter
    for part in getattr(scheduler, "_schedulers", ()):
        regroup(part, optimizer)
