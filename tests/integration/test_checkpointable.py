"""Sharded tensors through plain ``torch.distributed.checkpoint``, unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from dist_checkpointing import InvalidShardingError, ShardedTensor, load
from dist_checkpointing.strategies import CheckpointableShardedTensor, LocalShardsContainer
from dist_checkpointing.testing import (
    CUT_SHAPE,
    CUTS,
    assert_same_bits,
    data_of,
    poisoned,
    random_bits,
    run_ranks,
    template,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def dcp_save(state: dict[str, Any], folder: Path) -> None:
    save_by_dcp(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def dcp_load(state: dict[str, Any], folder: Path) -> None:
    load_by_dcp(state, storage_reader=FileSystemReader(folder), no_dist=True)


def all_shards(name: str, full: torch.Tensor, world_size: int) -> list[ShardedTensor]:
    """The shards of all ranks, as if one rank had them; of replicas only the first."""
    main: dict[Any, ShardedTensor] = {}
    for shards in CUTS[name](name, full, world_size):
        for shard in shards:
            place = (shard.global_offset, shard.local_shape, str(shard.flattened_range))
            main.setdefault(place, shard)
    return list(main.values())


def container(name: str, full: torch.Tensor, world_size: int) -> LocalShardsContainer:
    return LocalShardsContainer.from_sh_tens(all_shards(name, full, world_size))


@pytest.mark.parametrize(
    ("saved", "loaded", "dtype"),
    [(1, 4, torch.float32), (4, 1, torch.bfloat16), (4, 2, torch.float8_e4m3fn)],
)
def test_every_cut_goes_through_dcp_and_comes_back_cut_otherwise(
    tmp_path: Path, saved: int, loaded: int, dtype: torch.dtype
) -> None:
    full = {name: random_bits(CUT_SHAPE, dtype, i) for i, name in enumerate(CUTS)}
    dcp_save({name: container(name, tensor, saved) for name, tensor in full.items()}, tmp_path)
    # A plain tensor is what DCP makes of the whole; our own cut is what we ask for.
    whole = {name: poisoned(tensor) for name, tensor in full.items()}
    dcp_load(whole, tmp_path)
    for name, tensor in full.items():
        assert_same_bits(whole[name], tensor, name)
    shards = {name: all_shards(name, tensor, loaded) for name, tensor in full.items()}
    given = {
        name: [template(s, poisoned(data_of(s))) for s in group] for name, group in shards.items()
    }
    dcp_load({n: LocalShardsContainer.from_sh_tens(group) for n, group in given.items()}, tmp_path)
    wanted = {n: [template(s) for s in group] for n, group in shards.items()}
    ours = run_ranks(2, lambda comm: load(wanted, tmp_path, comm=comm))[1]
    for name, group in shards.items():
        for i, shard in enumerate(group):
            assert_same_bits(data_of(given[name][i]), data_of(shard), f"{name} by DCP")
            assert_same_bits(ours[name][i], data_of(shard), f"{name} by us")


def row(number: int, **options: Any) -> ShardedTensor:
    data = torch.full((3,), float(number))
    return ShardedTensor.from_rank_offsets(
        "w", data, (0, number, 4), (1, 1, 2), prepend_axis_num=1, **options
    )


def test_a_container_finds_its_shards_by_hint_and_by_offset() -> None:
    group = LocalShardsContainer.from_sh_tens([row(0), row(3)])
    items = group.__create_write_items__("w", group)
    assert group.__create_write_items__(fqn="w", sh_ten=group) == items
    for hint in (None, 0, 1, 2, 99):  # DCP's hints may count the chunks of all ranks
        found = group.__get_tensor_shard__(MetadataIndex("w", [3, 3], hint))
        assert found.tolist() == [[3, 3, 3]]
    with pytest.raises(ValueError, match="offset must say which one"):
        group.__get_tensor_shard__(MetadataIndex("w"))
    with pytest.raises(ValueError, match=r"no part at \(1, 3\)"):
        group.__get_tensor_shard__(MetadataIndex("w", [1, 3]))


def test_an_empty_part_does_not_hide_a_real_one(tmp_path: Path) -> None:
    full = torch.arange(4.0)
    bounds = [(0, 0), (0, 4), (4, 4)]
    shards = [
        ShardedTensor("w", full[a:b].clone(), full.dtype, (b - a,), (4,), (a,), None)
        for a, b in bounds
    ]
    dcp_save({"w": LocalShardsContainer.from_sh_tens(shards)}, tmp_path)
    given = {"w": torch.zeros(4)}
    dcp_load(given, tmp_path)
    assert torch.equal(given["w"], full)
    nothing = ShardedTensor.from_rank_offsets("e", torch.empty(0, 3))
    dcp_save({"e": CheckpointableShardedTensor.from_sh_ten(nothing)}, tmp_path / "empty")
    dcp_load({"e": torch.empty(0, 3)}, tmp_path / "empty")


def test_what_cannot_be_made_checkpointable() -> None:
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(3), (2, 2), flattened_range=slice(0, 3)
    )
    with pytest.raises(InvalidShardingError, match="from_sh_tens"):
        CheckpointableShardedTensor.from_sh_ten(flat)
    with pytest.raises(InvalidShardingError, match="no data"):
        CheckpointableShardedTensor.from_sh_ten(row(0).without_data())
    with pytest.raises(NotImplementedError, match="only saved and loaded"):
        CheckpointableShardedTensor.from_sh_ten(row(0)) + 1
    with pytest.raises(InvalidShardingError, match="another shape"):
        CheckpointableShardedTensor(torch.ones(4), row(0))
    with pytest.raises(InvalidShardingError, match="one tensor"):
        LocalShardsContainer([])
    other = ShardedTensor.from_rank_offsets("other", torch.ones(3))
    with pytest.raises(InvalidShardingError, match="one tensor"):
        LocalShardsContainer.from_sh_tens([row(0), other])
