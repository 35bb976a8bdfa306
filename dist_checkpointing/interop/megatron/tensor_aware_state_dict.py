"""A state dict whose tensors can be taken out and put back: local checkpoints of NVRx."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dist_checkpointing.interop.megatron import shard_exchange, state_dicts as nests, validation
from dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
    apply_factory_merges,
)
from dist_checkpointing.validation.load_errors import StrictHandling, parse_strict_flag

try:
    _nvrx: Any = importlib.import_module(
        "nvidia_resiliency_ext.checkpointing.local.base_state_dict"
    )
    _Base: Any = _nvrx.TensorAwareStateDict
except ImportError:
    _Base = object

Group = dist.ProcessGroup | None


def save_preprocess(
    sharded_state_dict: StateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
) -> tuple[StateDict, StateDict]:
    """The sharded and the common part of what is saved; factories are applied in place."""
    apply_factories(sharded_state_dict)
    sharded, common = nests.extract_sharded_base(nests.extract_nonpersistent(sharded_state_dict)[1])
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check or (lambda state: state)
        _, metadata = validation.determine_global_metadata(sharded)
        validation.validate_sharding_integrity(metadata, preprocess(dict(common)))
    return sharded, common


def load_preprocess(sharded_state_dict: StateDict) -> tuple[StateDict, Any, Any]:
    """A template with its factories applied, its local values, and the factories without data."""
    copied = filter_out_empty_flatten_tensor(
        nests.extract_matching_values(sharded_state_dict, lambda _: True)[0]
    )
    factories, _ = nests.extract_matching_values(
        copied, lambda x: isinstance(x, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    nests.dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    local, sharded = nests.extract_nonpersistent(copied)
    return sharded, nests.dict_list_map_inplace(lambda x: x.unwrap(), local), factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    def is_empty(x: object) -> bool:
        flat = x.flat_range if isinstance(x, ShardedTensor) else None
        return flat is not None and flat[0] == flat[1]

    return nests.extract_matching_values(sharded_state_dict, is_empty)[1]


def _id(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, ShardedTensor)
    return (nests._sharded_tensor_shard_id if is_tensor else nests._sharded_object_id)(leaf)  # noqa: SLF001 - Megatron's names


def _require_known(algo: str) -> None:
    if algo not in ("atomic", "fully_parallel"):
        raise NotImplementedError(f"algo must be 'atomic' or 'fully_parallel', not {algo!r}")


@dataclass
class MCoreTensorAwareStateDict(_Base):  # type: ignore[misc]  # a package that may be missing
    """A state dict of one rank, split into its common state and its sharded leaves."""

    common: dict[str, Any]
    sharded_state_dict: dict[str, Any]
    _is_hollow: bool = False

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: dict[str, Any],
        algo: str = "fully_parallel",
        parallelization_group: Group = None,
        cached_metadata: shard_exchange.ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, Any]:
        """The state dict, and the distribution to pass to the next call. Collective in the group.

        With ``"fully_parallel"`` each tensor that several ranks of the group have stays on one.
        """
        _require_known(algo)
        sharded, common = save_preprocess(sharded_state_dict, cached_metadata is None)
        if algo == "atomic":
            return cls(common, sharded), (None, None, None, None)
        determine = shard_exchange.determine_main_replica_uniform_distribution
        distribution = cached_metadata or determine(sharded, parallelization_group, True)
        if distribution is not None:
            rank = dist.get_rank(parallelization_group)
            for leaf in nests.nested_values(nests.extract_sharded_tensors(sharded)[0]):
                if distribution.main_rank_for_shard[_id(leaf)] != rank:
                    leaf.data = None
        return cls(common, sharded), distribution

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    @property
    def common_state_dict(self) -> dict[str, Any]:
        return self.common

    def _leaves(self) -> Iterator[Any]:
        """The leaves that have data, or had it before it was taken out."""
        for leaf in nests.nested_values(self.sharded_state_dict):
            kept = hasattr(leaf, "orig_device") if self._is_hollow else leaf.data is not None
            if isinstance(leaf, ShardedTensor) and kept:
                yield leaf

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        assert not self._is_hollow
        return (leaf.data for leaf in self._leaves())

    def pop_tensors(self) -> list[torch.Tensor]:
        assert not self._is_hollow
        tensors = []
        for leaf in self._leaves():
            tensors.append(leaf.data)
            leaf.orig_device, leaf.data = leaf.data.device.type, None
        self._is_hollow = True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back in the order in which they were taken out."""
        assert self._is_hollow
        for leaf, tensor in nests.zip_strict(self._leaves(), tensor_data):
            leaf.data = tensor
            if leaf.orig_device == tensor.device.type:
                del leaf.orig_device
        self._is_hollow = False

    def init_tensors(self) -> None:
        assert self._is_hollow
        for leaf in list(self._leaves()):
            leaf.init_data(leaf.orig_device)
            del leaf.orig_device
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        assert not self._is_hollow
        for leaf in self._leaves():
            if hasattr(leaf, "orig_device"):
                continue
            if leaf.data.is_cpu:
                leaf.data = leaf.data.detach().clone()
            else:
                leaf.orig_device = leaf.data.device.type
                leaf.data = leaf.data.detach().to("cpu", non_blocking=non_blocking)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        assert not self._is_hollow
        for leaf in self._leaves():
            if hasattr(leaf, "orig_device"):
                leaf.data = leaf.data.to(leaf.orig_device, non_blocking=non_blocking)
                del leaf.orig_device

    def to_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: Group = None,
        strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """The state dict that a template describes; with the missing and unexpected keys if asked.

        Collective in the group, as ``from_state_dict``.
        """
        assert not self._is_hollow
        _require_known(algo)
        state = nests.dict_list_map_outplace(lambda leaf: leaf, self.common)
        if not sharded_state_dict:
            return state
        template, local, factories = load_preprocess(sharded_state_dict)
        nests.merge(state, local)
        wanted, _ = nests.extract_sharded_base(template)
        flag = parse_strict_flag(strict)
        own = {
            leaf.key: leaf.without_data() for leaf in nests.nested_values(self.sharded_state_dict)
        }
        of_ranks = None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(flag):
            of_ranks = validation.determine_global_metadata(wanted)[1]
        _, missing, unexpected = validation.validate_integrity_and_strict_load(
            wanted, flag, validate_access_integrity, None, of_ranks, own
        )
        value_of = self._values(wanted, algo, exchange_algo, parallelization_group)
        nests.merge(
            state, apply_factory_merges(nests.dict_list_map_inplace(value_of, wanted), factories)
        )
        return (state, missing, unexpected) if return_mismatch_keys else state

    def _values(
        self, wanted: dict[str, Any], algo: str, exchange_algo: str, group: Group
    ) -> Callable[[Any], Any]:
        tensors = {_id(leaf): leaf.data for leaf in self._leaves()}
        if algo == "fully_parallel":
            leaves = nests.nested_values(nests.extract_sharded_tensors(wanted)[0])
            found = shard_exchange.determine_main_replica_uniform_distribution(
                wanted, group, ignore_groups=True
            )
            if found is not None:
                rest = {_id(leaf): leaf for leaf in leaves if _id(leaf) not in tensors}
                tensors = shard_exchange.exchange_by_distribution(
                    tensors, rest, found, group, exchange_algo
                )
        leaves = nests.nested_values(self.sharded_state_dict)
        objects = {_id(leaf): leaf.data for leaf in leaves if not isinstance(leaf, ShardedTensor)}

        def value_of(leaf: Any) -> Any:
            values = tensors if isinstance(leaf, ShardedTensor) else objects
            assert _id(leaf) in values, f"{_id(leaf)} is not in the state dict"
            return values[_id(leaf)]

        return value_of
