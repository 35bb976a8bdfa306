"""Any chain of rules, any save grid, any load grid. The oracle is plain torch on full tensors."""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import (
    CheckpointingException,
    Recipe,
    ShardedObject,
    ShardedTensor,
    StateMismatchError,
    UnsupportedFormatError,
    load,
    load_plain_tensors,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.planning.recipe import derive
from dist_checkpointing.planning.recipe_rules import CastTo, Drop, Keep, Missing, Rename, Rule
from dist_checkpointing.planning.recipe_shapes import (
    Concat,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from dist_checkpointing.serialization.load_recipe import preview_recipe
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies.base import LoadShardedStrategy
from dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools.convert import convert, open_source
from states import BACKEND, blanks, flat, shard, wholes
from tiers import examples

UNSYNCED = TensorStoreSaveShardedStrategy(options=StorageOptions(durability=Durability.PAGE_CACHE))
Tensors = dict[str, torch.Tensor]
Step = tuple[Rule, Tensors]


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def interleaved(parts: Sequence[torch.Tensor], axis: int, groups: int) -> torch.Tensor:
    """The first group of all, then the second of all, and so on."""
    cut = [part.tensor_split(groups, axis) for part in parts]
    return torch.cat([own[group] for group in range(groups) for own in cut], axis)


# Random rules, each with what it makes of the full tensors.


def renamed(draw: st.DrawFn, full: Tensors, new: str) -> Step | None:
    key = draw(st.sampled_from(sorted(full)))
    rest = {k: v for k, v in full.items() if k != key}
    return Rename(key, to=new), {**rest, new: full[key]}


def transposed(draw: st.DrawFn, full: Tensors, _: str) -> Step | None:
    key = draw(st.sampled_from(sorted(full)))
    order = draw(st.permutations(range(full[key].ndim)))
    return Transpose(key, order), {**full, key: full[key].permute(order)}


def resized(draw: st.DrawFn, full: Tensors, _: str) -> Step | None:
    key = draw(st.sampled_from(sorted(full)))
    old = full[key]
    if not old.ndim:
        return None
    axis, size = draw(st.integers(0, old.ndim - 1)), draw(st.integers(1, 6))
    made = torch.zeros((*old.shape[:axis], size, *old.shape[axis + 1 :]), dtype=old.dtype)
    kept = min(size, old.shape[axis])
    made.narrow(axis, 0, kept).copy_(old.narrow(axis, 0, kept))
    return Resize(key, axis - draw(st.sampled_from([0, old.ndim])), size), {**full, key: made}


def split(draw: st.DrawFn, full: Tensors, new: str) -> Step | None:
    key = draw(st.sampled_from(sorted(full)))
    old = full[key]
    fits = [
        (axis, groups, sizes)
        for axis, extent in enumerate(old.shape)
        for groups in (1, 2, 3)
        for sizes in ((1, 1), (2, 1), (1, 2, 1))
        if extent and extent % (groups * sum(sizes)) == 0
    ]
    if not fits:
        return None
    axis, groups, sizes = draw(st.sampled_from(fits))
    unit = old.shape[axis] // (groups * sum(sizes))
    rows = torch.split(old, [unit * size for size in sizes] * groups, axis)
    names = [f"{new}.{place}" for place in range(len(sizes))]
    rest = {k: v for k, v in full.items() if k != key}
    made = {n: torch.cat(rows[place :: len(sizes)], axis) for place, n in enumerate(names)}
    return Split(key, names, axis, sizes, groups), {**rest, **made}


def joined(draw: st.DrawFn, full: Tensors, new: str) -> Step | None:
    for first, second in draw(st.permutations(list(itertools.permutations(full, 2)))):
        a, b = full[first], full[second]
        for axis in range(a.ndim):
            alike = a.ndim == b.ndim and all(
                x == y for place, (x, y) in enumerate(zip(a.shape, b.shape, strict=True))
                if place != axis
            )  # fmt: skip
            groups = [n for n in (1, 2, 3) if alike and not (a.shape[axis] % n + b.shape[axis] % n)]
            if groups:
                count = draw(st.sampled_from(groups))
                rest = {k: v for k, v in full.items() if k not in (first, second)}
                made = interleaved([a, b], axis, count)
                return Concat([first, second], new, axis, count), {**rest, new: made}
    return None


def stacked(draw: st.DrawFn, full: Tensors, new: str) -> Step | None:
    # Only what an unstack has made has numbers in its names.
    stems = sorted({key.rpartition(".layer.")[0] for key in full if ".layer." in key})
    if not stems:
        return None
    stem = draw(st.sampled_from(stems))
    own = [key for key in full if key.startswith(f"{stem}.layer.")]
    layers = [full.get(f"{stem}.layer.{number}") for number in range(len(own))]
    if any(layer is None or layer.shape != layers[0].shape for layer in layers):  # type: ignore[union-attr]
        return None
    rest = {k: v for k, v in full.items() if k not in own}
    made = torch.stack(layers)  # type: ignore[arg-type]
    return Stack(f"{stem}.layer.{{i}}", into=new), {**rest, new: made}


def unstacked(draw: st.DrawFn, full: Tensors, new: str) -> Step | None:
    keys = sorted(key for key, own in full.items() if own.ndim and own.shape[0])
    if not keys:
        return None
    key = draw(st.sampled_from(keys))
    rest = {k: v for k, v in full.items() if k != key}
    rows = {f"{new}.layer.{number}": row for number, row in enumerate(full[key])}
    return Unstack(key, into=f"{new}.layer.{{i}}"), {**rest, **rows}


STEPS: list[Callable[[st.DrawFn, Tensors, str], Step | None]] = [
    renamed, transposed, resized, split, joined, stacked, stacked, unstacked, unstacked
]  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensors, list[Rule], Tensors]:
    """Stored tensors, rules, and what these make of them."""
    shapes = st.lists(st.integers(0, 4) | st.sampled_from([4, 6, 8]), max_size=3)
    stored: Tensors = {}
    for number in range(draw(st.integers(1, 3))):
        stored[f"t{number}"] = numbered(*draw(shapes), start=1000 * number + 1)
    if draw(st.booleans()):  # two that can be joined
        stored["twin"] = -stored["t0"]
    full, rules = dict(stored), list[Rule]()
    for number in range(draw(st.integers(1, 7))):
        step = draw(st.sampled_from(STEPS))(draw, full, f"new{number}")
        if step is not None:
            rules.append(step[0])
            full = step[1]
    return stored, rules, full


def cut(full: torch.Tensor, comm: Comm, axis: int) -> tuple[slice, ...]:
    """The uneven part of a rank; the first one has an empty part if there is little."""
    if not full.ndim:
        return ()
    axis %= full.ndim
    ends = [full.shape[axis] * rank**2 // comm.world_size**2 for rank in range(comm.world_size)]
    own = slice(ends[comm.rank], (*ends, full.shape[axis])[comm.rank + 1])
    return tuple(own if place == axis else slice(None) for place in range(full.ndim))


def part(key: str, full: torch.Tensor, box: tuple[slice, ...], data: Any, rank: int) -> Any:
    bounds = [own.indices(extent)[:2] for own, extent in zip(box, full.shape, strict=True)]
    offset, shape = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
    replica = 0 if box else rank
    return ShardedTensor(key, data, full.dtype, shape, tuple(full.shape), offset, None, replica)


@examples(80)
@given(
    verify=st.booleans(),
    chain=chains(),
    grids=st.tuples(*[st.integers(0, 2)] * 2),
    worlds=st.tuples(*[st.integers(1, 3)] * 2),
    memory=st.sampled_from(["none", "plain", "transposed", "flat"]),
    shares=st.booleans(),
)
def test_any_chain_on_any_grids(
    *, verify: bool, chain: Any, grids: Any, worlds: Any, memory: str, shares: bool
) -> None:
    stored, rules, full = chain

    with tempfile.TemporaryDirectory(prefix="recipes") as name:
        folder = Path(name) / "ckpt"

        def save_rank(comm: Comm) -> None:
            state = {}
            for key, own in stored.items():
                box = cut(own, comm, grids[0])
                state[key] = part(key, own, box, own[box].clone(), comm.rank)
            save(state, folder, UNSYNCED, comm=comm)

        def load_rank(comm: Comm) -> None:
            template, expected = {}, {}
            for key, own in full.items():
                box = cut(own, comm, grids[1])
                expected[key] = own[box]
                data = None if memory == "none" else torch.full_like(own[box].contiguous(), -7)
                if memory == "transposed" and data is not None:
                    data = data.mT.contiguous().mT if data.ndim > 1 else data
                template[key] = part(key, own, box, data, comm.rank)
                if memory == "flat" and own.ndim:
                    start, stop = sorted((comm.rank, own.numel() // (comm.rank + 1)))
                    stop = min(stop, own.numel())
                    start = min(start, stop)
                    expected[key] = own.reshape(-1)[start:stop]
                    template[key] = flat(key, torch.full_like(own, -7), start, stop)
            strategy = None
            if shares:
                strategy = FullyParallelLoadStrategyWrapper(
                    TensorStoreLoadShardedStrategy(), comm, min_shared_bytes=0
                )
            found: Any = load(
                template, folder, strategy, comm=comm, recipe=Recipe(*rules), verify=verify,
                strict="raise_all" if memory != "flat" else "assume_ok_unexpected",
            )  # fmt: skip
            for key, own in expected.items():
                assert torch.equal(found[key], own), (key, rules)
                given_data = template[key].data
                assert given_data is None or found[key] is given_data

        run_ranks(worlds[0], save_rank)
        run_ranks(worlds[1], load_rank)


@examples(40)
@given(
    chain=chains(),
    world=st.integers(1, 3),
    axis=st.integers(0, 2),
    to=st.sampled_from(["tensorstore", "zarr", "zarr:1", "torch_dist", "safetensors", "torch"]),
)
def test_a_conversion_makes_the_same(chain: Any, world: int, axis: int, to: str) -> None:
    stored, rules, full = chain
    with tempfile.TemporaryDirectory(prefix="recipes") as name:
        folder, out = Path(name) / "ckpt", Path(name) / "out"

        def save_rank(comm: Comm) -> None:
            state = {}
            for key, own in stored.items():
                box = cut(own, comm, axis)
                state[key] = part(key, own, box, own[box].clone(), comm.rank)
            save(state, folder, UNSYNCED, comm=comm)

        run_ranks(world, save_rank)
        done = convert(folder, out, to, recipe=Recipe(*rules))
        is_empty = not any(own.numel() for own in stored.values())
        assert (done.not_verified is None) != is_empty
        source = open_source(out)
        found = source.read([(key, Box.whole(source.index[key].global_shape)) for key in full])
        assert sorted(source.index) == sorted(full)
        for key, own in zip(full, found, strict=True):
            assert torch.equal(own, full[key]), (key, rules)


def test_groups_and_squares(tmp_path: Path) -> None:
    save(wholes({"qkv": numbered(8, 2), "square": numbered(3, 3)}), tmp_path / "c")
    split_up = Split("qkv", ["q", "k", "v"], sizes=[2, 1, 1], groups=2)
    convert(tmp_path / "c", tmp_path / "d", recipe=Recipe(split_up, Transpose("square")))
    found: Any = load_plain_tensors(tmp_path / "d")
    rows_of = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    assert all(torch.equal(found[key], numbered(8, 2)[own]) for key, own in rows_of.items())
    assert torch.equal(found["square"], numbered(3, 3).T)


def test_what_is_only_renamed_is_proven(tmp_path: Path) -> None:
    save(wholes({"a": numbered(4, 3), "b": numbered(2)}), tmp_path / "c", fingerprints=True)
    recipe = Recipe(Rename("a", to="c"), Resize("b", size=3))
    assert convert(tmp_path / "c", tmp_path / "d", recipe=recipe).num_proven == 1


@BACKEND
def test_every_backend(tmp_path: Path, backend: Any) -> None:
    q, k = numbered(4, 6), -numbered(2, 6)
    save(wholes({"q": q, "k": k, "x": q.T.contiguous()}), tmp_path / "c", backend)
    recipe = Recipe(Concat(["q", "k"], into="qk", groups=2), Transpose("x"), Resize("x", 1, 7))
    padded = torch.cat([q, torch.zeros(4, 1)], 1)
    expected = {"qk": interleaved([q, k], 0, 2), "x": padded}
    found = load(blanks(expected), tmp_path / "c", recipe=recipe, verify=backend[0] != "zarr")
    assert all(torch.equal(found[key], own) for key, own in expected.items())


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.{n}": numbered(2, 3, start=100 * i) for i in range(3) for n in "ab"}
    tensors["emb"] = numbered(5, 2)
    objects = {"rng": ShardedObject("layers.0.rng", {"seed": 1}, (1,), (0,))}
    save({**wholes(tensors), **objects, "step": 7}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_a_cast_converts_once_and_is_no_mismatch(ckpt: Path) -> None:
    recipe = Recipe(CastTo("emb|layers.*", "bfloat16"))
    template = blanks({"emb": torch.empty(5, 2, dtype=torch.bfloat16)})
    found = load(template, ckpt, recipe=recipe)
    assert torch.equal(found["emb"], numbered(5, 2).bfloat16())
    with pytest.raises(StateMismatchError, match="dtype differs"):
        load(template, ckpt, recipe=Recipe(Drop("layers.0.a")))


def test_what_is_missing_is_zero_kept_or_an_error(ckpt: Path) -> None:
    recipe = Recipe(Missing("new.zero.{x}"), Missing("new.{x*}", fill="template"))
    template = wholes({"new.zero.w": torch.ones(2, 2), "new.w": torch.ones(2, 2)})
    template["rng"] = ShardedObject("new.rng", {"seed": 5}, (1,), (0,))
    found = load(template, ckpt, recipe=recipe, strict="raise_unexpected")
    assert found["new.zero.w"].eq(0).all()
    assert found["new.w"].eq(1).all()
    assert found["rng"] == {"seed": 5}
    assert found["step"] == 7
    refusing = Recipe(Missing("new.zero.{x}", fill="error"), *recipe.rules)
    with pytest.raises(StateMismatchError, match=r"'new.zero.w': not in the checkpoint"):
        load(template, ckpt, recipe=refusing)
    template["new.w"].data = None
    with pytest.raises(StateMismatchError, match=r"'new.w': the template has no values to keep"):
        load(template, ckpt, recipe=recipe)


def test_a_vocabulary_gets_the_extent_of_the_template(ckpt: Path) -> None:
    for rows in (3, 5, 8):
        for fill, value in (("zeros", 0.0), ("template", 9.0)):
            template = wholes({"wte": torch.full((rows, 2), 9.0)})
            recipe = Recipe(Rename("emb", to="wte"), Resize("wte", fill=fill))  # type: ignore[arg-type]
            found = load(template, ckpt, recipe=recipe)["wte"]
            assert torch.equal(found[:5], numbered(5, 2)[:rows])
            assert found[5:].eq(value).all()


def test_objects_follow_names(ckpt: Path) -> None:
    recipe = Recipe(Rename("layers.{i}.{x}", to="blocks.{i}.{x}"))
    template = {"rng": ShardedObject("blocks.0.rng", None, (1,), (0,))}
    assert load(template, ckpt, recipe=recipe)["rng"] == {"seed": 1}
    old = {"rng": ShardedObject("layers.0.rng", None, (1,), (0,))}
    with pytest.raises(StateMismatchError, match=r"'layers.0.rng': not in the checkpoint"):
        load(old, ckpt, recipe=recipe)


def test_strictness_means_what_the_recipe_makes(ckpt: Path) -> None:
    recipe = Recipe(Keep(["layers.{i}.a"]), Stack("layers.{i}.{x}", into="all.{x}"))
    template = blanks({"all.a": torch.empty(3, 2, 3)})
    found = load(template, ckpt, recipe=recipe, strict="raise_all")
    assert torch.equal(
        found["all.a"], torch.stack([numbered(2, 3, start=100 * i) for i in range(3)])
    )
    _, missing, unexpected = load(
        blanks({"b": torch.empty(1)}), ckpt, recipe=recipe, strict="return_all"
    )
    assert (missing, unexpected) == ({"all.a"}, {"b"})


def test_a_stacked_template_with_a_prepended_axis(ckpt: Path) -> None:
    recipe = Recipe(Stack("layers.{i}.{x}", into="all.{x}"))
    for layer in range(3):
        leaf = shard("all.b", torch.empty(2, 3), (0, layer, 3), prepend_axis_num=1)
        assert torch.equal(
            load({"w": leaf}, ckpt, recipe=recipe)["w"], numbered(2, 3, start=100 * layer)
        )


def test_a_parameter_that_wants_gradients_is_filled(ckpt: Path) -> None:
    weight = torch.nn.Parameter(torch.empty(2, 5))
    load({"w": shard("emb", weight)}, ckpt, recipe=Recipe(Transpose("emb")))
    assert torch.equal(weight, numbered(5, 2).T)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([Rename("emb", to="layers.0.a")], "'layers.0.a': several tensors would have this name"),
        ([Drop("emb"), Stack("layers.{i}.{x}", into="s")], "layer 0 is there twice"),
        ([Drop("layers.0.a"), Stack("layers.{i}.a", into="s")], "layers are missing: 0"),
        (
            [Concat(["layers.{i}.a", "layers.{i}.c"], into="l.{i}")],
            "nothing matches 'layers.{i}.c'",
        ),
        ([Concat(["layers.0.a", "emb"], into="x")], "differ in dtype or shape"),
        ([Split("emb", ["p", "q"])], "axis 0 cannot be cut like that; expected a multiple of 2"),
        ([Split("emb", ["p", "p"], axis=1)], "'p': several tensors would have this name"),
        ([Resize("emb", axis=2, size=3)], "it has no axis 2"),
        ([Transpose("emb", [0, 0])], "axes must name each axis once"),
        ([Rename("(emb)", to=r"\2")], r"names what is not matched"),
        ([Rename("{x}", to="{y}")], r"names what is not matched"),
        ([Rename("layers.0.rng", to="{y}")], r"names what is not matched"),
    ],
)
def test_errors_name_the_rule(ckpt: Path, rules: list[Rule], said: str) -> None:
    recipe = Recipe(Rename("nothing", to="here"), *rules)
    with pytest.raises(StateMismatchError, match=re.escape(said)) as caught:
        load({}, ckpt, recipe=recipe)
    assert f"rule {1 + len(rules)} of the recipe does not fit: {rules[-1]}" in str(caught.value)


def test_a_template_that_does_not_fit_is_told_of_idle_rules(ckpt: Path) -> None:
    with pytest.raises(StateMismatchError) as caught:
        load(blanks({"wte": torch.empty(5, 2)}), ckpt, recipe=Recipe(Rename("enb", to="wte")))
    assert "'wte': not in the checkpoint" in str(caught.value)
    assert "rule 1 (rename 'enb', to='wte') matches nothing" in str(caught.value)


def test_nothing_is_touched_before_all_ranks_agree(ckpt: Path) -> None:
    given_data = torch.full((8, 2), 3.0)
    template = wholes({"emb": given_data})
    template["other"] = shard("other", torch.empty(1))
    with pytest.raises(StateMismatchError):
        load(template, ckpt, recipe=Recipe(Resize("emb")))
    assert given_data.eq(3).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("(", to="a"),
        lambda: Rename(3, to="a"),  # type: ignore[arg-type]
        lambda: Rename("a", to=3),  # type: ignore[arg-type]
        lambda: Transpose("a", ["0"]),  # type: ignore[list-item]
        lambda: Split("a", ["b", 2]),  # type: ignore[list-item]
        lambda: CastTo("a", "int8"),
        lambda: Resize("a", size=-1),
        lambda: Resize("a", fill="ones"),  # type: ignore[arg-type]
        lambda: Split("a", "bc"),
        lambda: Split("a", ["b", "c"], sizes=[1]),
        lambda: Split("a", ["b", "c"], groups=0),
        lambda: Concat(["a"], into="b"),
        lambda: Concat(["a", "b"], into="c", groups=True),
        lambda: Stack("a", into="b"),
        lambda: Unstack("a", into="b"),
        lambda: Missing("a", fill="ones"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_that_cannot_be_is_refused(make: Callable[[], Rule]) -> None:
    with pytest.raises(CheckpointingException, match=r"the rule `.*` is invalid"):
        make()


def test_files_say_the_same(ckpt: Path, tmp_path: Path) -> None:
    rows = [
        {"keep": ["layers.{x*}", "emb"]},
        {"stack": "layers.{i}.{x}", "into": "all.{x}"},
        {"cast": "emb", "dtype": "bfloat16"},
        {"resize": "emb", "axis": 0, "size": 6},
    ]
    expected = Recipe(
        Keep(["layers.{x*}", "emb"]),
        Stack("layers.{i}.{x}", into="all.{x}"),
        CastTo("emb", "bfloat16"),
        Resize("emb", 0, 6),
    )
    (tmp_path / "r.json").write_text(json.dumps(rows))
    yaml = pytest.importorskip("yaml")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(rows, sort_keys=False))
    for name in ("r.json", "r.yaml"):
        assert Recipe.read(tmp_path / name).rules == expected.rules
    made = preview_recipe(Recipe.read(tmp_path / "r.yaml"), ckpt)
    assert str(made).splitlines() == [
        "rule 1: keep ['layers.{x*}', 'emb']: 8 matched",
        "rule 2: stack 'layers.{i}.{x}', into='all.{x}': 6 matched",
        "rule 3: cast 'emb', dtype='bfloat16': 1 matched",
        "rule 4: resize 'emb', size=6: 1 matched",
        "all.a  float32[3, 2, 3] <- layers.*.a",
        "all.b  float32[3, 2, 3] <- layers.*.b",
        "emb  bfloat16[6, 2] <- emb, zeros",
        "3 tensors: 3 by rules, 0 as stored; 0 stored ones left out; 0 of 4 rules match nothing",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it must be a list of rules"),
        ("[", "Expecting value"),
        ('[{"drop": "a"}, "b"]', "rule 2: a rule is an object"),
        ('[{"rname": "a", "to": "b"}]', "rule 1: 'rname' is not one of rename, drop"),
        ('[{"rename": "a", "into": "b"}]', "unexpected keyword argument 'into'"),
        ('[{"split": "a", "into": "b"}]', "into must be a list of names"),
        ('[{"use": "gpt2"}]', "'gpt2' is not one of llama_to_megatron"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CheckpointingException, match="the recipe cannot be read") as caught:
        Recipe.read(tmp_path / "r.json")
    assert said in str(caught.value)
    assert str(tmp_path / "r.json") in str(caught.value)


def test_a_strategy_without_plans_is_refused(ckpt: Path) -> None:
    class Plain(LoadShardedStrategy):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            del sharded_state_dict, checkpoint_dir
            raise AssertionError

        def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
            return TensorStoreLoadShardedStrategy().load_tensors_metadata(checkpoint_dir)

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            return TensorStoreLoadShardedStrategy().load_sharded_metadata(checkpoint_dir)

        def check_backend_compatibility(self, loaded_backend: str) -> None:
            assert loaded_backend == "tensorstore"

        def check_version_compatibility(self, loaded_version: int) -> None:
            assert loaded_version == 1

    with pytest.raises(UnsupportedFormatError, match="makes no plans; found Plain"):
        load(blanks({"emb": torch.empty(5, 2)}), ckpt, Plain(), recipe=Recipe(Drop("x")))


def test_restored_values_are_verified(ckpt: Path) -> None:
    recipe = Recipe(Rename("emb", to="wte"), Stack("layers.{i}.{x}", into="all.{x}"))
    template = blanks({"wte": torch.empty(5, 2), "all.a": torch.empty(3, 2, 3)})
    found = load(template, ckpt, recipe=recipe, verify="restored")
    assert torch.equal(found["wte"], numbered(5, 2))


def test_deriving_does_not_grow_with_what_no_rule_matches() -> None:
    from dist_checkpointing.format.element_types import from_name
    from dist_checkpointing.format.index import Index, StoredTensor

    index = Index.of(StoredTensor.undivided(f"t{n}", from_name("float32"), (4,)) for n in range(50))
    made = derive(Recipe(Drop("t7")), index)
    assert len(made.tensors) == 49
    assert made.left_out == ["t7"]
    assert made.changed == []
