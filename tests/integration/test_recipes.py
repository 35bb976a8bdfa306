"""Any chain of rules, any save grid, any load grid. The oracle is plain torch on full tensors."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import flip, place_of
from dist_checkpointing.comm import Comm
from dist_checkpointing.interop import TorchState
from dist_checkpointing.planning import (
    CastTo,
    Concat,
    DefaultSavePlanner,
    Dequantize,
    Drop,
    Keep,
    Missing,
    Quantize,
    Rename,
    Resize,
    Rule,
    SavePlanner,
    Split,
    Stack,
    Transpose,
    Unstack,
    WriteItem,
)
from dist_checkpointing.serialization import preview_recipe
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    StrategyAction,
    TensorStoreLoadShardedStrategy,
    get_default_strategy,
)
from dist_checkpointing.testing import failures_on, run_ranks
from dist_checkpointing.tools import convert
from states import blanks, rows, shard, wholes


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.{n}": numbered(2, 3, start=100 * i) for i in range(3) for n in "ab"}
    tensors["emb"] = numbered(5, 2)
    objects = {"rng": dc.ShardedObject("layers.0.rng", {"seed": 1}, (1,), (0,))}
    dc.save({**wholes(tensors), **objects, "step": 7}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_what_is_missing_is_zero_kept_or_an_error(ckpt: Path) -> None:
    recipe = dc.Recipe(Missing("new.zero.{x}"), Missing("new.{x*}", fill="template"))
    template = wholes({"new.zero.w": torch.ones(2, 2), "new.w": torch.ones(2, 2)})
    template["rng"] = dc.ShardedObject("new.rng", {"seed": 5}, (1,), (0,))
    made = str(preview_recipe(recipe, ckpt, template))
    assert "rule 2: missing 'new.{x*}', fill='template': 2 matched" in made
    assert "object new.rng <- template" in made
    found = dc.load(template, ckpt, recipe=recipe, strict="raise_unexpected")
    assert found["new.zero.w"].eq(0).all()
    assert found["new.w"].eq(1).all()
    assert (found["rng"], found["step"]) == ({"seed": 5}, 7)
    refusing = dc.Recipe(Missing("new.zero.{x}", fill="error"), *recipe.rules)
    for wrong, said in (
        (refusing, "'new.zero.w': not in the checkpoint"),
        (dc.Recipe(Missing("new.{x*}")), "'new.rng': not in .*fill='template'"),
        (recipe, "'new.w': the template has no values to keep"),
    ):
        template["new.w"].data = None if wrong is recipe else torch.ones(2, 2)
        with pytest.raises(dc.StateMismatchError, match=said) as caught:
            dc.load(template, ckpt, recipe=wrong)
        assert wrong is refusing or "nothing matches" not in str(caught.value)


def test_strictness_means_what_the_recipe_makes(ckpt: Path) -> None:
    recipe = dc.Recipe(Keep(["layers.{i}.a"]), Stack("layers.{i}.{x}", into="all.{x}"))
    template = blanks({"all.a": torch.empty(3, 2, 3)})
    found = dc.load(template, ckpt, recipe=recipe, strict="raise_all")
    assert torch.equal(
        found["all.a"], torch.stack([numbered(2, 3, start=100 * i) for i in range(3)])
    )
    _, missing, unexpected = dc.load(
        blanks({"b": torch.empty(1)}), ckpt, recipe=recipe, strict="return_all"
    )
    assert (missing, unexpected) == ({"all.a"}, {"b"})


def test_a_parameter_that_wants_gradients_is_filled(ckpt: Path) -> None:
    weight = torch.nn.Parameter(torch.empty(2, 5))
    dc.load({"w": shard("emb", weight)}, ckpt, recipe=dc.Recipe(Transpose("emb")))
    assert torch.equal(weight, numbered(5, 2).T)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([Drop("emb"), Stack("layers.{i}.{x}", into="s")], "layer 0 is there twice"),
        ([Drop("layers.0.a"), Stack("layers.{i}.a", into="s")], "layers are missing: 0"),
        (
            [Concat(["layers.{i}.a", "layers.{i}.c"], into="l.{i}")],
            "nothing matches 'layers.{i}.c'",
        ),
        ([Concat(["layers.0.a", "emb"], into="x")], "differ in dtype or shape"),
        ([Split("emb", ["p", "q"])], "axis 0 cannot be split like that; expected a multiple of 2"),
        ([Split("emb", ["p", "p"], axis=1)], "'p': several tensors would have this name"),
        ([Resize("emb", axis=2, size=3)], "it has no axis 2"),
        ([Transpose("emb", [0, 0])], "axes must name each axis once"),
        ([Rename("(emb)", to=r"\2")], r"names what is not matched"),
        ([Rename("layers.0.rng", to="{y}")], r"names what is not matched"),
        ([Rename("emb", to="layers.0.a")], "found made of layers.0.a and emb"),
        ([Rename("(x?)emb", to=r"\1")], "'emb': it would have no name"),
        ([Rename(r"layers\.0\.rng(x?)", to=r"\1")], "'layers.0.rng': it would have no name"),
        ([Rename("layers.0.rng", to="emb")], "'emb': a tensor and a sharded object would have"),
        ([Rename("emb", to="layers.0.rng")], "'layers.0.rng': a tensor and a sharded object"),
    ],
)
def test_errors_name_the_rule(ckpt: Path, rules: list[Rule], said: str) -> None:
    recipe = dc.Recipe(Rename("nothing", to="here"), *rules)
    with pytest.raises(dc.StateMismatchError, match=re.escape(said)) as caught:
        dc.load({}, ckpt, recipe=recipe)
    assert f"rule {1 + len(rules)} of the recipe does not fit: {rules[-1]}" in str(caught.value)


def test_what_is_not_there_is_explained(ckpt: Path) -> None:
    rules = [Rename("layers.{i}.{x}", to="blocks.{i}.{x}"), Drop("emb"), Rename("enb", to="wte")]
    template = {name: torch.empty(2, 3) for name in ("block.1.a", "layers.1.a", "emb", "new")}
    with pytest.raises(dc.StateMismatchError) as caught:
        dc.load(blanks(template), ckpt, recipe=dc.Recipe(*rules))
    assert "nothing matches rule 3 (rename 'enb', to='wte')" in str(caught.value)
    said = {finding.key: str(finding) for finding in caught.value.findings}
    assert "did you mean 'blocks.1.a'" in said["block.1.a"]
    explained = "Stored is 'layers.1.a', of which the recipe makes 'blocks.1.a'."
    assert said["layers.1.a"].endswith(explained)
    assert said["emb"].endswith("Stored is 'emb', of which the recipe makes nothing.")
    assert said["new"].endswith("or say with a rule (missing) what fills it.")


def test_the_dry_run_says_what_is_lost(ckpt: Path) -> None:
    recipe = dc.Recipe(
        CastTo("layers.{x*}", "float16"),
        Resize("emb", size=4),
        Resize("layers.{i}.a", axis=1, size=2),
        Resize("layers.{i}.b", size=3),
        Rename("layers.{i}.rng", to="rng"),
    )
    made = preview_recipe(recipe, ckpt)
    assert str(made).splitlines()[3:] == [
        "rule 4: resize 'layers.{i}.b', size=3: 3 matched",
        "rule 5: rename 'layers.{i}.rng', to='rng': 1 matched",
        "emb  float32[4, 2] <- emb",
        "layers.*.a  float16[2, 2] <- layers.*.a; rounded from float32  (3)",
        "layers.*.b  float16[3, 3] <- layers.*.b, zeros; rounded from float32  (3)",
        "left out: 2 of 10 elements of emb",
        "left out: 2 of 6 elements of layers.*.a  (3)",
        "object rng <- layers.0.rng",
        (
            "tensors: 7 (7 by rules, 0 as stored), 0 left out, 4 in part; "
            "rules that match nothing: 0 of 5"
        ),
    ]
    told = made.as_json()
    assert told["cut"]["emb"] == 2
    assert told["tensors"]["layers.0.b"] == "layers.0.b, zeros"
    assert told["rounded"]["layers.0.b"] == ["float32"]
    assert "emb" not in told["rounded"]
    dropped = preview_recipe(dc.Recipe(Drop("layers.0.rng")), ckpt)
    assert "left out: object layers.0.rng" in str(dropped)
    assert dropped.as_json()["objects_left_out"] == ["layers.0.rng"]
    # Upcasting loses nothing.
    assert "rounded" not in str(preview_recipe(dc.Recipe(CastTo("emb", "float64")), ckpt))


def test_a_torch_state_under_other_names(tmp_path: Path) -> None:
    """Names, moments and hyperparameters of every parameter, in every group."""

    def made(*names: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})
        groups = [{"params": [*own.parameters()]} for own in model.values()]
        return model, torch.optim.AdamW(groups, lr=0.5)

    model, optimizer = made("a", "b")
    for rate, group in zip((0.1, 0.2), optimizer.param_groups, strict=True):
        group["lr"] = rate
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    dc.save(TorchState(model, optimizer, step=3), tmp_path / "c")
    # Both change places, and one gets another name on the way.
    names = r"(model|optimizer\.state)"
    recipe = dc.Recipe(
        Rename(names + r"\.a\.{x*}", to=r"\1.other.{x}"),
        Rename(names + r"\.b\.{x*}", to=r"\1.a.{x}"),
    )
    other, its_optimizer = made("other", "a")
    dc.load(TorchState(other, its_optimizer), tmp_path / "c", recipe=recipe)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(old, new)
        for name, value in optimizer.state[old].items():
            assert torch.equal(its_optimizer.state[new][name], value)
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_torch_state_with_more_rows(tmp_path: Path, *, has_stepped: bool) -> None:
    def made(rows: int, *, has_stepped: bool) -> tuple[torch.nn.Embedding, torch.optim.Adam]:
        model = torch.nn.Embedding(rows, 2)
        optimizer = torch.optim.Adam(model.parameters())
        if has_stepped:
            model(torch.tensor([1, 5])).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(6, has_stepped=True)
    dc.save(TorchState(model, optimizer), tmp_path / "c")
    padded, its_optimizer = made(8, has_stepped=has_stepped)
    moments = Resize(r"optimizer\.state\.weight\.exp_avg(_sq)?")
    recipe = dc.Recipe(Resize("model.weight"), moments)
    dc.load(TorchState(padded, its_optimizer), tmp_path / "c", recipe=recipe)
    zeros, state = torch.zeros(2, 2), its_optimizer.state[padded.weight]
    assert torch.equal(torch.cat([model.weight, zeros]), padded.weight)
    for name in ("exp_avg", "exp_avg_sq"):
        own = optimizer.state[model.weight][name]
        assert torch.equal(torch.cat([own, zeros]), state[name])
    padded(torch.tensor([1, 7])).sum().backward()
    its_optimizer.step()
    # A rule that forgets the moments is told so, and not by the next step.
    forgetful = dc.Recipe(Resize("model.weight"))
    with pytest.raises(dc.StateMismatchError, match=r"exp_avg': global shape differs"):
        dc.load(TorchState(*made(8, has_stepped=False)), tmp_path / "c", recipe=forgetful)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("(", to="a"),
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
        lambda: Quantize("w", block=[0, 1]),
        lambda: Quantize("w", block=128),  # type: ignore[arg-type]
        lambda: Dequantize(block=128),  # type: ignore[arg-type]
        lambda: Dequantize(dtype="int8"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(make: Callable[[], Rule]) -> None:
    with pytest.raises(dc.CheckpointingException, match=r"the rule `.*` is invalid"):
        make()


def test_files_say_the_same(tmp_path: Path) -> None:
    rows = [
        {"keep": ["layers.{x*}", "emb"]},
        {"stack": "layers.{i}.{x}", "into": "all.{x}"},
        {"cast": "emb", "dtype": "bfloat16"},
        {"resize": "emb", "axis": 0, "size": 6},
    ]
    expected = dc.Recipe(
        Keep(["layers.{x*}", "emb"]),
        Stack("layers.{i}.{x}", into="all.{x}"),
        CastTo("emb", "bfloat16"),
        Resize("emb", 0, 6),
    )
    (tmp_path / "r.json").write_text(json.dumps(rows))
    yaml = pytest.importorskip("yaml")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(rows, sort_keys=False))
    for name in ("r.json", "r.yaml"):
        assert dc.Recipe.read(tmp_path / name).rules == expected.rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it must be a list of rules"),
        ("[", "Expecting value"),
        ('[{"drop": "a"}, "b"]', "rule 2: a rule is an object"),
        ('[{"rname": "a", "to": "b"}]', "did you mean 'rename'?"),
        ('[{"rename": "a", "into": "b"}]', "rename takes to, not 'into'; did you mean 'to'?"),
        ('[{"rename": "a"}]', "rename needs 'to'"),
        ('[{"rename": "a", "to": "b", "drop": "c"}]', "one object is one rule, not 'rename' and"),
        ('[{"rename": "a", "to": "b", "rename": "c", "to": "d"}]', "'rename' is there 2 times"),
        ('[{"split": "a", "into": "b"}]', "into must be a list, not 'b'"),
        ('[{"resize": "a", "axis": "0"}]', "axis must be a whole number, not '0'"),
        ('[{"concat": ["a", "b"], "into": "c", "axis": null}]', "axis must be a whole number"),
        ('[{"drop": 3}]', "the patterns must be a list, not 3"),
        ('[{"keep": []}]', "it keeps nothing"),
        ('[{"use": "lama_to_megatron"}]', "did you mean 'llama_to_megatron' or"),
        ('[{"use": ["llama_to_megatron"]}]', "['llama_to_megatron'] is not one of"),
        ('[{"use": "llama_to_megatron"}]', "llama_to_megatron needs 'num_query_groups'"),
        ('[{"use": "llama_to_megatron", "groups": 2}]', "not 'groups'; did you mean"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(dc.CheckpointingException, match="the recipe cannot be read") as caught:
        dc.Recipe.read(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_mapping_of_yaml_with_bad_keys_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "r.yaml").write_text("- rename: a\n  to: b\n  rename: c\n  to: d\n")
    with pytest.raises(dc.CheckpointingException, match="'rename' is there 2 times in one rule"):
        dc.Recipe.read(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("- drop: a\n- ? [rename, drop]\n  : b\n")
    with pytest.raises(dc.CheckpointingException, match=r"unhashable key(.|\n)*line 2"):
        dc.Recipe.read(tmp_path / "r.yaml")
    # The order of the names is free.
    (tmp_path / "r.json").write_text('[{"axis": 1, "into": "c", "concat": ["a", "b"]}]')
    assert dc.Recipe.read(tmp_path / "r.json").rules == (Concat(["a", "b"], "c", 1),)


@pytest.mark.parametrize("given_recipe", [[Drop("a")], Drop("a"), "rules.json"])
def test_what_is_no_recipe_is_refused(ckpt: Path, tmp_path: Path, given_recipe: Any) -> None:
    for use in (
        lambda: dc.load({}, ckpt, recipe=given_recipe),
        lambda: convert.convert(ckpt, tmp_path / "out", recipe=given_recipe),
        lambda: preview_recipe(given_recipe, ckpt),
    ):
        with pytest.raises(TypeError, match="recipe must be a Recipe, not"):
            use()


def test_a_strategy_without_a_reader_takes_recipes(ckpt: Path) -> None:
    class Plain(LoadShardedStrategy):
        """One of a third party, which does not say that it has a reader."""

    own = TensorStoreLoadShardedStrategy()
    inner = {name: getattr(own, name) for name in LoadShardedStrategy.__abstractmethods__}
    plain: Any = type("Plain", (Plain,), {k: staticmethod(call) for k, call in inner.items()})()
    recipe = dc.Recipe(Rename("emb", to="wte"), Stack("layers.{i}.{x}", into="all.{x}"))
    template = {"wte": torch.empty(5, 2), "all.a": torch.empty(3, 2, 3)}
    loaded, expected = (dc.load(blanks(template), ckpt, by, recipe=recipe) for by in (plain, None))
    assert all(torch.equal(loaded[key], expected[key]) for key in template)


@pytest.mark.parametrize(
    ("backend", "rule", "shape"),
    [
        ("tensorstore", Transpose("w"), (8, 8)),
        ("zarr", Concat(["w", "v"], into="w"), (16, 8)),
        ("zarr", Resize("w", size=4), (4, 8)),
        ("tensorstore", CastTo("w", "float64"), (8, 8)),
    ],
)
def test_damage_is_found_through_a_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str, rule: Rule, shape: Any
) -> None:
    tensors = {"w": numbered(8, 8, start=1), "v": numbered(8, 8, start=1000)}
    dc.save(wholes(tensors), tmp_path / "c", backend, fingerprints=True)
    file, start = place_of(tmp_path / "c", tensors["w"])
    flip(file, start + tensors["w"].nbytes - 2)  # in the last row
    dtype = torch.float64 if isinstance(rule, CastTo) else torch.float32
    template, recipe = blanks({"w": torch.empty(shape, dtype=dtype)}), dc.Recipe(rule)
    with pytest.raises(dc.CorruptCheckpointError, match="'w': checksum differs"):
        dc.load(template, tmp_path / "c", recipe=recipe, verify=True)
    with pytest.raises(dc.CorruptCheckpointError, match="not what was saved"):
        convert.convert(tmp_path / "c", tmp_path / "out", recipe=recipe)
    if isinstance(rule, Resize | CastTo):
        dc.load(template, tmp_path / "c", recipe=recipe, verify="restored")
        assert "tensors not compared with what was saved (1)" in caplog.text
    else:
        with pytest.raises(dc.CorruptCheckpointError, match="'w': what lies in memory is not"):
            dc.load(template, tmp_path / "c", recipe=recipe, verify="restored")


def test_a_save_behind_a_training_takes_a_recipe(tmp_path: Path) -> None:
    state = {
        **wholes({"a": numbered(4, 3), "b": numbered(2)}),
        "rng": dc.ShardedObject("a.rng", 7, (1,), (0,)),
        "here": dc.LocalNonpersistentObject(object()),
        "0": {"step": 3},
    }
    rules = [Rename("a", to="w"), Rename("a.rng", to="seed"), CastTo("w", "bfloat16"), Drop("b")]
    recipe = dc.Recipe(*rules, Resize("w", size=5))
    dc.async_save(state, tmp_path, recipe=recipe).wait()
    expected = torch.cat([numbered(4, 3), torch.zeros(1, 3)]).bfloat16()
    opened = dc.Checkpoint.open(tmp_path)
    assert [*opened] == ["w"]
    assert torch.equal(opened["w"][:], expected)
    assert [*opened.objects] == ["seed"]
    assert opened.common == {"0": {"step": 3}}
    assert state["a"].key == "a"
    assert state["a"].data.dtype == torch.float32


class Doubled(DefaultSavePlanner):
    def get_data(self, item: WriteItem) -> Any:
        data = super().get_data(item)
        assert isinstance(data, torch.Tensor)
        return data * 2


class OneItem(SavePlanner):
    """Plans and answers for one tensor, whatever the library does for it elsewhere."""

    def configure_planner(self, state_dict: Any, *_: Any, **options: Any) -> None:
        inner = DefaultSavePlanner()
        inner.configure_planner(state_dict, **options)
        (self._leaf,) = state_dict.values()
        for name in ("build_local_plan", "build_global_plan", "finalize_plan"):
            setattr(self, name, getattr(inner, name))

    def get_data(self, item: WriteItem) -> Any:
        assert item.tensor_data is not None
        return self._leaf.data[item.tensor_data.chunk.slices()]

    build_local_plan = build_global_plan = finalize_plan = None  # type: ignore[assignment]


@pytest.mark.parametrize("planner", [Doubled, OneItem])
@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist", "safetensors"])
def test_whoever_writes_casts(tmp_path: Path, backend: str, planner: Any) -> None:
    strategy: Any = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1)
    made = type(strategy)(planner=planner())
    state = wholes({"w": numbered(40, 30) / 7})
    factor = 2 if planner is Doubled else 1
    for dtype in (torch.bfloat16, torch.float64):
        recipe = dc.Recipe(CastTo("w", str(dtype)), Resize("w", size=39))
        now, later = (tmp_path / f"{dtype}{number}" for number in range(2))
        dc.save(state, now, made, recipe=recipe)
        dc.async_save(state, later, sharded_strategy=made, recipe=recipe).wait()
        for folder in (now, later):
            found = dc.Checkpoint.open(folder)["w"][:]
            assert torch.equal(found, (state["w"].data[:39] * factor).to(dtype))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([Rename("{x}", to="one")], "rule 1 of the recipe does not fit.*several tensors"),
        ([Rename("a", to="a.rng")], "a tensor and a sharded object would have this name"),
        ([Dequantize()], "neither quantizes nor dequantizes.*Dequantize on load"),
        ("rename a b", "recipe must be a Recipe"),
        ([Rename("a", to="d")], r"float32\[4, 3\].*rank 1"),
    ],
)
def test_a_recipe_that_does_not_fit_a_save(tmp_path: Path, rules: Any, said: str) -> None:
    recipe: Any = rules if isinstance(rules, str) else dc.Recipe(*rules)

    def save_rank(comm: Comm) -> None:
        state: dict[str, Any] = {key: rows(key, numbered(4, 3), comm) for key in "ab"}
        if "rank 1" in said:  # holds a part of another tensor
            state["a"] = rows("a", numbered(4 + 2 * comm.rank, 3), comm)
        state["f"] = rows("f", numbered(4, 2).to(torch.float8_e4m3fn), comm)
        state["s"] = shard("f_scale_inv", torch.ones(1, 1), replica_id=comm.rank)
        state["rng"] = dc.ShardedObject("a.rng", 7, (2,), (comm.rank,))
        dc.save(state, tmp_path / "ckpt", comm=comm, recipe=recipe)

    failures = failures_on(2, save_rank)
    assert len({str(error) for error in failures}) == 1
    assert re.search(said, str(failures[0]), re.DOTALL)
    assert not (tmp_path / "ckpt").exists()


def test_a_rank_of_which_nothing_is_left(tmp_path: Path) -> None:
    def save_rank(comm: Comm) -> None:
        state: dict[str, Any] = {"step": 3, "b": rows("b", numbered(4, 3), comm)}
        if comm.rank:
            state["a"] = shard("a", numbered(2, 3))
        dc.save(state, tmp_path / "ckpt", comm=comm, recipe=dc.Recipe(Drop("b")))

    run_ranks(2, save_rank)
    assert dc.Checkpoint.open(tmp_path / "ckpt").common == {"step": 3}


def test_one_stored_tensor_in_two_places(tmp_path: Path) -> None:
    """A bfloat16 weight and its float32 master, or tied embeddings."""
    weight = numbered(4, 3).bfloat16()
    dc.save(wholes({"w": weight}), tmp_path / "c")
    leaves = {"model": weight.T.clone(), "master": torch.empty(3, 4)}
    template = {name: shard("x", torch.empty_like(own)) for name, own in leaves.items()}
    recipe = dc.Recipe(Rename("w", to="x"), Transpose("x"))
    found = dc.load(template, tmp_path / "c", recipe=recipe, cast="widen")
    assert torch.equal(found["model"], weight.T)
    assert torch.equal(found["master"], weight.T.float())
