"""Loaded values are the saved ones: for every dtype, cut and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.mapping import ShardedTensor, flatten
from dist_checkpointing.mapping.nested_dicts import path_text, value_at
from dist_checkpointing.testing.conformance.backend_hooks import BackendHooks
from dist_checkpointing.testing.conformance.sample_shards import (
    CUT_SHAPE,
    CUTS,
    Sharding,
    assert_loaded,
    assert_same_bits,
    blank,
    by_columns,
    by_rows,
    data_of,
    every_cut,
    one_for_each_cut,
    poisoned,
    random_bits,
    replicated,
    template,
    uneven_shard,
    whole,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


class RoundTrips(BackendHooks):
    """Saved and loaded values are the same bit for bit."""

    @WORLD_SIZES
    def test_every_dtype_bit_for_bit(self, tmp_path: Path, world_size: int) -> None:
        """NaN payloads, negative zeros and denormals too, on a chunk grid and in pieces."""
        tensors = {
            str(dtype): random_bits(CUT_SHAPE, dtype, i) for i, dtype in enumerate(self.dtypes)
        }
        saved: dict[str, Sharding] = {"grid": by_rows, "pieces": CUTS["unevenly"]}

        def state_of(rank: int) -> dict[str, Any]:
            return {
                f"{name} {how}": cut(f"{name} {how}", full, world_size)[rank]
                for how, cut in saved.items()
                for name, full in tensors.items()
            }

        states = [state_of(rank) for rank in range(world_size)]
        self.save_on(world_size, tmp_path / "c", states.__getitem__)
        for rank in range(world_size):
            unchanged = {key: data_of(shards[0]) for key, shards in states[rank].items()}
            assert_loaded(unchanged, {k: s for k, (s,) in state_of(rank).items()}, "after the save")
        wanted = [
            {
                f"{name} {how}": by_columns(f"{name} {how}", full, world_size)[rank][0]
                for how in saved
                for name, full in tensors.items()
            }
            for rank in range(world_size)
        ]
        loaded = self.load_on(world_size, tmp_path / "c", lambda rank: blank(wanted[rank]))
        for rank, result in enumerate(loaded):
            assert result.keys() == wanted[rank].keys()
            assert_loaded(result, wanted[rank], f"rank {rank}")

    @pytest.mark.parametrize(("save_world", "load_world"), [(1, 4), (2, 2), (4, 3), (3, 2)])
    def test_every_cut_to_every_cut(self, tmp_path: Path, save_world: int, load_world: int) -> None:
        """From any shards that a tensor was saved as, any other shards can be loaded."""
        tensors = one_for_each_cut(torch.int32)
        self.save_on(save_world, tmp_path / "c", lambda rank: every_cut(tensors, save_world, rank))
        wanted = [
            {
                key: {name: cut(key, full, load_world)[rank] for name, cut in CUTS.items()}
                for key, full in tensors.items()
            }
            for rank in range(load_world)
        ]
        given = [blank(nest) for nest in wanted]
        loaded = self.load_on(load_world, tmp_path / "c", given.__getitem__)
        for rank, result in enumerate(loaded):
            assert_loaded(result, wanted[rank], f"rank {rank}")
            for path, shard in flatten(given[rank])[0].items():
                assert value_at(result, path) is shard.data, path_text(path)

    @WORLD_SIZES
    def test_data_none_is_allocated(self, tmp_path: Path, world_size: int) -> None:
        """A template without data gets new CPU tensors, and is not changed itself."""
        full = one_for_each_cut(torch.float64)
        states = [every_cut(full, world_size, rank) for rank in range(world_size)]
        self.save_on(world_size, tmp_path / "c", states.__getitem__)
        templates = [{n: list(map(template, shards)) for n, shards in s.items()} for s in states]
        loaded = self.load_on(world_size, tmp_path / "c", templates.__getitem__)
        for rank, result in enumerate(loaded):
            assert_loaded(result, states[rank], f"rank {rank}")
            for path, given in flatten(templates[rank])[0].items():
                assert value_at(result, path).device.type == "cpu"
                assert given.data is None

    @WORLD_SIZES
    def test_tensors_without_elements_and_without_axes(
        self, tmp_path: Path, world_size: int
    ) -> None:
        """Global extents of 0, shards of extent 0, ranks without shards, 0-d tensors."""
        scalar, one = random_bits((), torch.float32, 1), random_bits((1,), torch.int16, 2)
        empties = {
            f"empty {shape}": torch.empty(shape) for shape in ((0,), (0, 3), (4, 0), (2, 0, 3))
        }
        layers = torch.arange(3.0)

        def state_of(rank: int) -> dict[str, Any]:
            extent = 1 if rank == world_size - 1 else 0
            state: dict[str, Any] = {
                "scalar": replicated("scalar", scalar, world_size)[rank][0],
                # All but the last rank hold nothing.
                "last only": uneven_shard("last only", one, (0,), (extent,)),
                **{k: replicated(k, t, world_size)[rank][0] for k, t in empties.items()},
            }
            if rank == 0:
                state["prepended scalars"] = [
                    ShardedTensor.from_rank_offsets("layers", x, (0, i, 3), prepend_axis_num=1)
                    for i, x in enumerate(layers)
                ]
            return state

        self.save_on(world_size, tmp_path / "c", state_of)
        wanted = whole({"scalar": scalar, "last only": one, "layers": layers, **empties})
        for result in self.load_on(world_size, tmp_path / "c", lambda _: blank(wanted)):
            assert_loaded(result, wanted, "whole")

    @WORLD_SIZES
    def test_nothing_to_save(self, tmp_path: Path, world_size: int) -> None:
        """No sharded leaf on any rank, or only on the last one."""
        self.save_on(world_size, tmp_path / "none", lambda _: {"step": 3})
        assert (
            self.load_on(world_size, tmp_path / "none", lambda _: {}) == [{"step": 3}] * world_size
        )
        full, last = random_bits(CUT_SHAPE, torch.float32), world_size - 1

        def on_last(rank: int) -> dict[str, Any]:
            return {"w": replicated("w", full, 1)[0][0]} if rank == last else {}

        self.save_on(world_size, tmp_path / "last", on_last)
        loaded = self.load_on(world_size, tmp_path / "last", on_last)
        assert loaded[:last] == [{}] * last
        assert_same_bits(loaded[last]["w"], full, "w")

    @pytest.mark.parametrize(
        "kind", ["transposed", "strided", "conjugated", "negated", "parameter"]
    )
    @WORLD_SIZES
    def test_views_as_sources_and_destinations(
        self, tmp_path: Path, world_size: int, kind: str
    ) -> None:
        """Tensors that are not contiguous, or not plain memory, are saved and filled in place."""
        dtype = torch.complex64 if kind == "conjugated" else torch.float32
        if dtype not in self.dtypes:
            pytest.skip(f"no {dtype}")
        full = torch.randn(CUT_SHAPE, dtype=dtype)
        cuts: dict[str, Sharding] = {"rows": by_rows, "flat": CUTS["flattened"]}

        def shards_of(rank: int) -> dict[str, ShardedTensor]:
            return {name: cut(name, full, world_size)[rank][0] for name, cut in cuts.items()}

        def as_views(rank: int, *, destination: bool) -> dict[str, ShardedTensor]:
            return {
                name: template(shard, _view(kind, poisoned(data) if destination else data))
                for name, shard in shards_of(rank).items()
                for data in [data_of(shard)]
            }

        self.save_on(world_size, tmp_path / "c", lambda rank: as_views(rank, destination=False))
        given = [as_views(rank, destination=True) for rank in range(world_size)]
        loaded = self.load_on(world_size, tmp_path / "c", given.__getitem__)
        for rank, result in enumerate(loaded):
            assert_loaded(result, shards_of(rank), f"{kind} on rank {rank}")
            for name, tensor in result.items():
                assert tensor is given[rank][name].data, f"{name}: not the given tensor"
                if kind == "strided" and tensor is not None and tensor.numel():
                    assert (_between(tensor) == _GUARD).all(), f"{name}: wrote beside it"


_GUARD = 7.0


def _view(kind: str, values: torch.Tensor) -> torch.Tensor:
    """A tensor equal to ``values`` that is a view of the given kind."""
    if kind == "transposed":
        axes = tuple(range(values.ndim))[::-1]
        return values.permute(axes).contiguous().permute(axes)
    if kind == "strided":
        around = torch.full((*values.shape, 2), _GUARD, dtype=values.dtype)
        around[..., 0] = values
        return around[..., 0]
    if kind == "conjugated":
        return values.conj().resolve_conj().conj()
    if kind == "negated":
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    return torch.nn.Parameter(values)


def _between(strided: torch.Tensor) -> torch.Tensor:
    """The elements between those of a strided view."""
    return strided.as_strided(strided.shape, strided.stride(), strided.storage_offset() + 1)
