"""What a checkpoint holds: values, bit for bit, keys, listings, common state; and its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.errors import InvalidShardingError, StateMismatchError
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, flatten
from dist_checkpointing.mapping.nested_dicts import mapped, path_text, value_at
from dist_checkpointing.serialization import (
    check_is_distributed_checkpoint,
    load_content_metadata,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from dist_checkpointing.strategies import LoadShardedStrategy
from dist_checkpointing.testing.conformance.backend_hooks import WORLD_SIZES, BackendHooks
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
    rows_of,
    template,
    uneven_shard,
    whole,
)

WEIRD_KEYS = (
    "ключ.重み.ş",
    "with spaces  and\ttab",
    "layers/0/weight",
    "layers/0/weight/deeper",
    "percent%20sign%",
    ".leading.dot",
    "trailing.dot.",
    "~tilde",
    "-dash",
    "star*question?[bracket]",
    'quote"colon:back\\slash|pipe',
    "UPPER",
    "upper",
    "0",
    "0.0",
    "k" * 300,
    "metadata.json",
    "common.pt",
    "layers/optimizer.sync",
)
"""Keys that are unusual for models or difficult for file systems."""

HOSTILE_KEYS = (
    "../outside",
    "a/../../outside",
    "/outside",
    "..",
    ".",
    "a/..",
    "./a",
    "a//b",
    "a\0b",
)
"""Keys that would leave the folder of the checkpoint if they were used as paths."""

MANY_KEYS = tuple(f"layers.{i}.weight" for i in range(500))


def _numbered(keys: Iterable[str]) -> dict[str, torch.Tensor]:
    return {key: random_bits(CUT_SHAPE, torch.int32, i) for i, key in enumerate(keys)}


_GUARD = 7.0


def _view(kind: str, values: torch.Tensor) -> torch.Tensor:
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


class RoundTrips(BackendHooks):
    """Saved and loaded values are the same bit for bit."""

    @WORLD_SIZES
    def test_every_dtype_bit_for_bit(self, tmp_path: Path, world_size: int) -> None:
        """NaN payloads, negative zeros and denormals too, on a chunk grid and in pieces."""
        seeds = enumerate(self.dtypes)
        tensors = {str(dtype): random_bits(CUT_SHAPE, dtype, seed) for seed, dtype in seeds}
        saved: dict[str, Sharding] = {"grid": by_rows, "pieces": CUTS["unevenly"]}

        def shards_of(rank: int, cuts: dict[str, Sharding] = saved) -> dict[str, Any]:
            return {
                f"{name} {how}": cut(f"{name} {how}", full, world_size)[rank]
                for how, cut in cuts.items()
                for name, full in tensors.items()
            }

        states = [shards_of(rank) for rank in range(world_size)]
        self.save_on(world_size, tmp_path / "c", states.__getitem__)
        for rank, state in enumerate(states):
            unchanged = {key: list(map(data_of, shards)) for key, shards in state.items()}
            assert_loaded(unchanged, shards_of(rank), "after the save")
        wanted: dict[str, Sharding] = dict.fromkeys(saved, by_columns)
        self.check_on(world_size, tmp_path / "c", lambda rank: shards_of(rank, wanted))

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
        # A template without data gets new CPU tensors, and is not changed itself.
        for emptied in (blank, lambda nest: mapped(nest, template)):
            given = [emptied(nest) for nest in wanted]
            loaded = self.load_on(load_world, tmp_path / "c", given.__getitem__)
            for rank, result in enumerate(loaded):
                assert_loaded(result, wanted[rank], f"rank {rank}")
                for path, shard in flatten(given[rank])[0].items():
                    value, is_given = value_at(result, path), emptied is blank
                    assert (value is shard.data) == is_given, path_text(path)
                    assert is_given or (shard.data is None and value.is_cpu), path_text(path)

    @WORLD_SIZES
    def test_tensors_without_elements_and_without_axes(
        self, tmp_path: Path, world_size: int
    ) -> None:
        """Global extents of 0, shards of extent 0, ranks without shards, 0-d tensors."""
        scalar, one = random_bits((), torch.float32, 1), random_bits((1,), torch.int16, 2)
        shapes = ((0,), (0, 3), (4, 0), (2, 0, 3))
        empties = {f"empty {shape}": torch.empty(shape) for shape in shapes}
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
        self.check_on(world_size, tmp_path / "c", lambda _: wanted)

    @WORLD_SIZES
    def test_nothing_to_save(self, tmp_path: Path, world_size: int) -> None:
        """No sharded leaf on any rank, or only on the last one."""
        self.save_on(world_size, tmp_path / "none", lambda _: {"step": 3})
        loaded = self.load_on(world_size, tmp_path / "none", lambda _: {})
        assert loaded == [{"step": 3}] * world_size
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
                    place = tensor.shape, tensor.stride(), tensor.storage_offset() + 1
                    assert (tensor.as_strided(*place) == _GUARD).all(), f"{name}: wrote beside it"


class Contents(BackendHooks):
    """Listings, partial templates, keys, common state, folders."""

    @WORLD_SIZES
    def test_metadata_lists_what_was_saved(self, tmp_path: Path, world_size: int) -> None:
        """Every tensor as one whole shard without data, and every object."""
        full = one_for_each_cut(torch.float32)
        full |= {str(dtype): random_bits((4, 3), dtype) for dtype in self.dtypes}
        full |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}

        def state_of(rank: int) -> dict[str, Any]:
            return {
                **{n: CUTS.get(n, replicated)(n, t, world_size)[rank] for n, t in full.items()},
                "object": ShardedObject("rng", rank, (world_size,), (rank,)),
            }

        self.save_on(world_size, tmp_path / "c", state_of)
        listed = load_tensors_metadata(tmp_path / "c", self.load_strategy())
        assert listed.keys() == full.keys()
        for key, tensor in full.items():
            shard, shape = listed[key], tuple(tensor.shape)
            assert (shard.key, shard.dtype, shard.data) == (key, tensor.dtype, None)
            assert tuple(shard.global_shape) == tuple(shard.local_shape) == shape, key
            assert tuple(shard.global_offset) == (0,) * len(shape), key
        objects = {f"rng/shard_{rank}_{world_size}" for rank in range(world_size)}
        both = load_sharded_metadata(tmp_path / "c", self.load_strategy())
        assert both.keys() == full.keys() | objects
        assert_loaded(self.load_whole(tmp_path / "c"), whole(full), "whole")

    @WORLD_SIZES
    def test_objects_and_common_state(self, tmp_path: Path, world_size: int) -> None:
        """They come back as they were, on more and on fewer ranks."""
        common = {"step": 3, "nested": [1, {"a": (2.5, None)}], "tensor": torch.arange(3)}
        weights = _numbered(["w"])

        def state_of(rank: int) -> dict[str, Any]:
            one = ShardedObject("rng", {"rank": rank}, (world_size,), (rank,))
            same = ShardedObject("extra", ["everywhere"], (1,), (0,), replica_id=rank)
            return {"rng": one, "extra": same, "w": rows_of(weights, world_size, rank), **common}

        self.save_on(world_size, tmp_path / "c", state_of, content_metadata={"version": 2})

        def all_of(_: int) -> dict[str, Any]:
            cells = [ShardedObject("rng", None, (world_size,), (r,)) for r in range(world_size)]
            return {"all": cells, "extra": ShardedObject("extra", None, (1,), (0,))}

        for other_world in (1, 3):
            for result in self.load_on(other_world, tmp_path / "c", all_of):
                assert result["all"] == [{"rank": r} for r in range(world_size)]
                assert result["extra"] == ["everywhere"]
                assert (result["step"], result["nested"]) == (3, common["nested"])
                assert torch.equal(result["tensor"], torch.arange(3))
                assert load_content_metadata(preloaded_state_dict=result) == {"version": 2}

    @WORLD_SIZES
    def test_mixed_containers(self, tmp_path: Path, world_size: int) -> None:
        """Lists and tuples may hold shards, objects and plain values side by side."""
        full = _numbered(["a", "b"])

        def state_of(rank: int) -> dict[str, Any]:
            shards = rows_of(full, world_size, rank)
            one, two = (ShardedObject(k, {k: 1}, (1,), (0,), replica_id=rank) for k in "xy")
            return {"list": [7, shards["a"], [one, "x"], 8], "tuple": (shards["b"], 9, two)}

        self.save_on(world_size, tmp_path / "c", state_of)

        def template_of(rank: int) -> dict[str, Any]:
            shards = {key: template(s) for key, s in rows_of(full, world_size, rank).items()}
            one, two = (ShardedObject(key, None, (1,), (0,)) for key in "xy")
            return {"list": [0, shards["a"], [one, 0], 0], "tuple": (shards["b"], 0, two)}

        for rank, result in enumerate(self.load_on(world_size, tmp_path / "c", template_of)):
            expected = rows_of(full, world_size, rank)
            (seven, a, nested, eight), (b, nine, two) = result["list"], result["tuple"]
            assert (seven, nested, eight, nine, two) == (7, [{"x": 1}, "x"], 8, 9, {"y": 1})
            assert isinstance(result["tuple"], tuple)
            assert_same_bits(a, data_of(expected["a"]), "in a list")
            assert_same_bits(b, data_of(expected["b"]), "in a tuple")

    @WORLD_SIZES
    def test_partial_templates(self, tmp_path: Path, world_size: int) -> None:
        """Some keys, some parts, different ones on each rank, or the same one several times."""
        full = _numbered(["a", "b", "c"])
        self.save_on(world_size, tmp_path / "c", lambda rank: rows_of(full, world_size, rank))

        def template_of(rank: int) -> dict[str, Any]:
            if rank == 1:
                return {}
            part = template(by_columns("a", full["a"], 4)[rank][0])
            return {"part": part, "again": [template(part), template(part)]}

        loaded = self.load_on(4, tmp_path / "c", template_of)
        assert loaded[1] == {}
        for rank in (0, 2, 3):
            expected = data_of(by_columns("a", full["a"], 4)[rank][0])
            for tensor in (loaded[rank]["part"], *loaded[rank]["again"]):
                assert_same_bits(tensor, expected, f"part on rank {rank}")

    @pytest.mark.parametrize("keys", [WEIRD_KEYS, MANY_KEYS], ids=["weird", "many"])
    def test_all_keys_in_one_checkpoint(self, tmp_path: Path, keys: Sequence[str]) -> None:
        """Unusual keys and hundreds of keys, each with shards on both ranks."""
        full = _numbered(key for key in keys if key not in self.refused_keys)
        self.save_on(2, tmp_path / "c", lambda rank: rows_of(full, 2, rank))
        assert load_tensors_metadata(tmp_path / "c", self.load_strategy()).keys() == full.keys()
        self.check_on(2, tmp_path / "c", lambda rank: rows_of(full, 2, 1 - rank))

    def test_refused_keys(self, tmp_path: Path) -> None:
        """A key that cannot be stored is refused before anything is written."""
        assert set(WEIRD_KEYS) >= self.refused_keys
        for i, key in enumerate(sorted(self.refused_keys)):
            folder = tmp_path / str(i)
            shards = by_rows(key, random_bits(CUT_SHAPE, torch.int32), 2)
            state = [{"w": shards[rank][0]} for rank in range(2)]
            with pytest.raises(InvalidShardingError):
                self.save_on(2, folder, state.__getitem__)
            assert not folder.exists() or not any(p.is_file() for p in folder.rglob("*"))

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_keys_never_leave_the_folder(self, tmp_path: Path, key: str) -> None:
        """A hostile key is refused, or stored inside the checkpoint like any other."""
        folder = tmp_path / "above" / "c"
        full = _numbered([key])
        try:
            self.save_on(1, folder, lambda _: whole(full))
        except InvalidShardingError:
            assert not check_is_distributed_checkpoint(folder)
        else:
            (result,) = self.load_on(1, folder, lambda _: {"w": template(whole(full)[key])})
            assert_same_bits(result["w"], full[key], key)
        assert {p.name for p in tmp_path.iterdir()} <= {"above"}
        assert {p.name for p in (tmp_path / "above").glob("*")} <= {"c"}

    def test_two_saves_at_once(self, tmp_path: Path) -> None:
        """Saves into different folders share nothing."""
        full = [{"w": random_bits((64, 64), torch.float32, seed)} for seed in range(3)]

        def one(number: int) -> None:
            self.save_on(2, tmp_path / str(number), lambda r: rows_of(full[number], 2, r))

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(one, range(3)))
        for number in range(3):
            result = self.load_whole(tmp_path / str(number))
            assert_loaded(result, whole(full[number]), f"save {number}")

    def test_moved_folder(self, tmp_path: Path) -> None:
        """A checkpoint holds no absolute path: it can be moved and renamed."""
        full = _numbered(["a", "b"])
        before, after = tmp_path / "somewhere-before", tmp_path / "else" / "after"
        self.save_on(2, before, lambda rank: rows_of(full, 2, rank))
        after.parent.mkdir()
        before.rename(after)
        files = [path for path in after.rglob("*") if path.is_file()]
        assert not [path for path in files if str(before).encode() in path.read_bytes()]
        self.check_on(1, after, lambda _: whole(full))

    def test_remove_sharded_tensors(self, tmp_path: Path) -> None:
        """Removed tensors are gone from listings and loads; the rest is as before."""
        kept, gone = _numbered(["model.a", "optim"]), _numbered(["optimizer.a", "optimizer.b/c"])
        gone = {key: tensor for key, tensor in gone.items() if key not in self.refused_keys}
        folder = tmp_path / "c"

        def state_of(rank: int) -> dict[str, Any]:
            rng = ShardedObject("optimizer.rng", [1], (1,), (0,), replica_id=rank)
            return {**rows_of(kept | gone, 2, rank), "rng": rng, "step": 3}

        self.save_on(2, folder, state_of)
        if type(self.loader()).remove_sharded_tensors is LoadShardedStrategy.remove_sharded_tensors:
            with pytest.raises(NotImplementedError):
                self.loader().remove_sharded_tensors(folder, "optimizer.")
            kept |= gone
        else:
            planned = self.loader().plan_removal(folder, "optimizer.")
            assert set(planned.keys) == gone.keys()
            remove_sharded_tensors(folder, "optimizer.")
            assert not any((folder / name).exists() for name in planned.files)
            assert load_tensors_metadata(folder, self.load_strategy()).keys() == kept.keys()
            for key, tensor in gone.items():
                with pytest.raises(StateMismatchError):
                    self.load_on(1, folder, [blank(whole({key: tensor}))].__getitem__)
            # A second time, there is nothing to do.
            remove_sharded_tensors(folder, "optimizer.")
        result = self.load_whole(folder)
        assert result.keys() == {*kept, "step"}
        assert_loaded(result, whole(kept), "kept")
        rng = {"rng": ShardedObject("optimizer.rng", None, (1,), (0,))}
        assert self.load_on(1, folder, lambda _: rng) == [{"rng": [1], "step": 3}]

    def test_direct_calls(self, tmp_path: Path) -> None:
        """Strategies also work alone, without ``save`` and ``load``."""
        full = _numbered(["a", "b"])
        self.saver().save(whole(full), tmp_path)
        given = {key: [shard] for key, shard in blank(whole(full)).items()}
        result = self.loader().load(given, tmp_path)
        for key, tensor in full.items():
            assert_same_bits(result[key][0], tensor, key)
            assert result[key][0] is given[key][0].data
        assert not check_is_distributed_checkpoint(tmp_path)
        save({}, tmp_path / "committed", self.saver())
        assert check_is_distributed_checkpoint(tmp_path / "committed")
