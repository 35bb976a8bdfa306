"""Which rank of a group saves or loads a shard that several have, and how loaded ones travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_checkpointing.interop.megatron.state_dicts import (
    _sharded_tensor_shard_id,
    _ShardId,
    nested_values,
)
from dist_checkpointing.mapping import ShardedTensor, StateDict, is_main_replica
from dist_checkpointing.planning import distribute_shards_to_ranks

Tensors = dict[_ShardId, torch.Tensor]


class ShardDistribution(NamedTuple):
    """Which rank of a group saves or loads each shard, and which ranks have it, by rank in the
    group; the shards that a rank of the group saves or loads; and each shard that one has, without
    data.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def _shard_size(sh_ten: ShardedTensor) -> int:
    flat = sh_ten.flat_range
    return (sh_ten.box.num_elements if flat is None else flat[1] - flat[0]) * sh_ten.dtype.itemsize


def determine_main_replica_uniform_distribution(
    sharded_state_dict: StateDict,
    parallelization_group: dist.ProcessGroup | None = None,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Who saves or loads what, so that each rank has about as many bytes; None for a group of one
    rank. Collective in the group.

    Shards without a main replica in the group count with ``ignore_groups`` only, and come last.
    """
    if not dist.is_initialized() or dist.get_world_size(parallelization_group) <= 1:
        return None
    own = [x.without_data() for x in nested_values(sharded_state_dict) if type(x) is ShardedTensor]
    of_ranks: list[Any] = [None] * dist.get_world_size(parallelization_group)
    dist.all_gather_object(of_ranks, own, group=parallelization_group)
    ranks: dict[_ShardId, list[int]] = {}
    shards: dict[_ShardId, ShardedTensor] = {}
    main = set[_ShardId]()
    for rank, leaves in enumerate(of_ranks):
        for leaf in leaves:
            shard = _sharded_tensor_shard_id(leaf)
            ranks.setdefault(shard, []).append(rank)
            shards.setdefault(shard, leaf)
            if is_main_replica(leaf.replica_id):
                main.add(shard)
    here = set(shards) if ignore_groups else main
    ranks = {shard: holders for shard, holders in ranks.items() if shard in here}
    sizes = {shard: _shard_size(leaf) for shard, leaf in shards.items()}
    chosen = distribute_shards_to_ranks(ranks, sizes, len(of_ranks), here - main)
    return ShardDistribution(chosen, here, shards, ranks)


def exchange_by_distribution(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: dist.ProcessGroup | None = None,
    exchange_algo: str = "broadcast",
) -> Tensors:
    """All tensors that this rank needs: those that it has loaded, and those of others. Collective.

    Each tensor that several ranks need is broadcast, whichever of Megatron's names is given.
    """
    if exchange_algo not in ("broadcast", "gather_object", "gather_rounds"):
        raise NotImplementedError(f"unknown exchange_algo: {exchange_algo}")
    group: Any = dist.group.WORLD if parallelization_group is None else parallelization_group
    rank, on_cpu = dist.get_rank(group), dist.get_backend(group) != "nccl"
    tensors = dict(loaded_tensors)
    for shard, reader in shard_distribution.main_rank_for_shard.items():
        if len(shard_distribution.all_ranks_for_shard[shard]) == 1:
            continue
        if rank == reader:
            sent = tensors[shard]
        else:
            leaf = unloaded_shards.get(shard, shard_distribution.shard_to_metadata[shard])
            empty: Any = leaf.without_data()
            empty.init_data("cpu" if leaf.data is None else leaf.data.device)
            sent = empty.data
        home = sent.device
        sent = sent.detach().contiguous() if on_cpu else sent.detach().contiguous().cuda()
        dist.broadcast(sent, dist.get_global_rank(group, reader), group=group)
        if rank != reader and shard in unloaded_shards:
            tensors[shard] = sent.to(home)
    return tensors
