"""Tensors of torch modules by name, tied weights, and nests of state that torch makes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.mapping.nested_dicts import flatten, is_container, take_apart, unflatten


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
    """The keys of all tensors in an outline."""
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
            "FSDP1 keeps flat parameters without a shape of their own",
            expected="FSDP2",
            found="FullyShardedDataParallel",
            remedy="Wrap the model with torch.distributed.fsdp.fully_shard.",
        )
        raise InvalidShardingError("this module cannot be saved", [finding])
    return module


class ModuleTensors:
    """The state dict of an ``unwrapped`` module, each group of tied tensors under one name."""

    def __init__(self, module: nn.Module) -> None:
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
        self._groups: dict[str, list[str]] = {}
        for kind in (module.named_parameters, module.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                names = self._parameters.setdefault(tensor, [])
                names.append(self._clean_name(name))
                self._groups[names[-1]] = names

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
        outlines = {
            name: outline(value, f"{key}.{name}")
            for name, value in self.values.items()
            if name.endswith(_EXTRA)
        }
        return {name: outlined for name, outlined in outlines.items() if any(keys_of(outlined))}

    def take_extra(
        self,
        nests: Mapping[str, Any],
        common: Container[str],
        tensor: Callable[[str, object], Any],
    ) -> None:
        """Ask for what modules have saved beside parameters and buffers, whatever it is here."""
        for name in self.values:
            if name.endswith(_EXTRA) and (name in nests or name in common):
                self.values[name] = tensors_to_fill(nests.get(name), self.values[name], tensor)

    @property
    def ties(self) -> dict[str, str]:
        """Name of each tensor that is stored under another name, and that name."""
        chosen = self.choose({}, ())
        return {name: source for name, source in chosen.items() if name != source}

    def choose(self, ties: Mapping[str, str], stored: Container[str]) -> dict[str, str]:
        """The name under which each value lies in a checkpoint that has the names ``stored``, of a
        module with these ``ties``.
        """
        chosen = {}
        for name in self.values:
            known = [own for own in self._groups.get(name, [name]) if own in self.values]
            # A model that was tied and now is not finds its values under the other name.
            candidates = [*known, *(ties[own] for own in known if own in ties)]
            chosen[name] = next((own for own in candidates if own in stored), candidates[0])
        return chosen

    def tree(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        """The values by the names of a checkpoint, each once."""
        found: dict[str, Any] = {}
        for name, source in chosen.items():
            found.setdefault(source, self.values[name])
        return found

    def restore(self, loaded: Mapping[str, Any], chosen: Mapping[str, str]) -> None:
        """Put loaded values into the module."""
        full = {
            name: loaded[source]
            for name, own in self._names.items()
            if (source := chosen[own]) in loaded
        }
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
