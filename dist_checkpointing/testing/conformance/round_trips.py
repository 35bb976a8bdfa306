"""Loaded values are the saved ones: for every dtype, cut and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.testing.conformance.backend_hooks import BackendHooks
from dist_checkpointing.testing.conformance.sample_shards import (
    CUT_SHAPE,
    CUTS,
    Sharding,
    assert_same_bits,
    by_columns,
    by_rows,
    data_of,
    poisoned,
    random_bits,
    replicated,
    template,
    uneven_shard,
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

        self.save_on(world_size, tmp_path / "c", state_of)
        for rank in range(world_size):
            for key, shards in state_of(rank).items():
                expected = saved[key.split()[1]](key, tensors[key.split()[0]], world_size)[rank]
                what = f"{key}: changed by the save"
                assert_same_bits(shards[0].data, data_of(expected[0]), what)
        wanted = [
            {
                f"{name} {how}": by_columns(f"{name} {how}", full, world_size)[rank][0]
                for how in saved
                for name, full in tensors.items()
            }
            for rank in range(world_size)
        ]
        loaded = self.load_on(
            world_size,
            tmp_path / "c",
            lambda rank: {k: template(s, poisoned(data_of(s))) for k, s in wanted[rank].items()},
        )
        for rank, result in enumerate(loaded):
            assert result.keys() == wanted[rank].keys()
            for key, shard in wanted[rank].items():
                assert_same_bits(result[key], data_of(shard), f"{key} on rank {rank}")

    @pytest.mark.parametrize("load_world", [1, 2, 4])
    @pytest.mark.parametrize("save_world", [1, 2, 4])
    def test_every_cut_to_every_cut(self, tmp_path: Path, save_world: int, load_world: int) -> None:
        """From any shards that a tensor was saved as, any other shards can be loaded."""
        tensors = {name: random_bits(CUT_SHAPE, torch.int32, i) for i, name in enumerate(CUTS)}
        self.save_on(
            save_world,
            tmp_path / "c",
            lambda rank: {n: CUTS[n](n, full, save_world)[rank] for n, full in tensors.items()},
        )

        def wanted_on(rank: int) -> dict[str, dict[str, list[ShardedTensor]]]:
            return {
                key: {name: cut(key, full, load_world)[rank] for name, cut in CUTS.items()}
                for key, full in tensors.items()
            }

        given = [
            {
                key: {
                    name: [template(s, poisoned(data_of(s))) for s in shards]
                    for name, shards in cuts.items()
                }
                for key, cuts in wanted_on(rank).items()
            }
            for rank in range(load_world)
        ]
        loaded = self.load_on(load_world, tmp_path / "c", lambda rank: given[rank])
        for rank, result in enumerate(loaded):
            for key, cuts in wanted_on(rank).items():
                for name, shards in cuts.items():
                    for i, shard in enumerate(shards):
                        what = f"{key} -> {name}, rank {rank}, shard {i}"
                        assert_same_bits(result[key][name][i], data_of(shard), what)
                        assert result[key][name][i] is given[rank][key][name][i].data, what

    @WORLD_SIZES
    def test_data_none_is_allocated(self, tmp_path: Path, world_size: int) -> None:
        """A template without data gets new CPU tensors, and is not changed itself."""
        full = {name: random_bits(CUT_SHAPE, torch.float64, i) for i, name in enumerate(CUTS)}

        def state_of(rank: int) -> dict[str, Any]:
            return {n: CUTS[n](n, tensor, world_size)[rank] for n, tensor in full.items()}

        self.save_on(world_size, tmp_path / "c", state_of)
        templates = [
            {n: [template(s) for s in shards] for n, shards in state_of(rank).items()}
            for rank in range(world_size)
        ]
        loaded = self.load_on(world_size, tmp_path / "c", lambda rank: templates[rank])
        for rank, result in enumerate(loaded):
            for name, shards in state_of(rank).items():
                for i, shard in enumerate(shards):
                    assert_same_bits(result[name][i], data_of(shard), f"{name} on rank {rank}")
                    assert result[name][i].device.type == "cpu"
                    assert templates[rank][name][i].data is None

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
        wanted = {
            "scalar": scalar,
            "last only": one,
            "layers": layers,
            **empties,
        }
        loaded = self.load_on(
            world_size,
            tmp_path / "c",
            lambda _: {k: template(replicated(k, t, 1)[0][0]) for k, t in wanted.items()},
        )
        for result in loaded:
            for key, expected in wanted.items():
                assert_same_bits(result[key], expected, key)

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
        loaded = self.load_on(world_size, tmp_path / "c", lambda rank: given[rank])
        for rank, result in enumerate(loaded):
            for name, shard in shards_of(rank).items():
                what = f"{kind} {name} on rank {rank}"
                assert result[name] is given[rank][name].data, f"{what}: not the given tensor"
                assert_same_bits(result[name], data_of(shard), what)
                if kind == "strided" and result[name].numel():
                    assert (_between(result[name]) == _GUARD).all(), f"{what}: wrote beside it"


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
