"""The layer that Megatron's code imports, without Megatron."""

import importlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import dist_checkpointing as dc
from dist_checkpointing.format import Attempt
from dist_checkpointing.interop import megatron
from real_ranks import run_script
from samples import Run
from scripts import run_fresh

GOLDEN = Path(__file__).parents[1] / "golden"
PACKAGE = "megatron.core.dist_checkpointing"


@pytest.fixture(autouse=True)
def fake_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``megatron.core`` with a package of checkpoints that must not be imported."""
    theirs = tmp_path / "theirs"
    own = theirs / "megatron" / "core" / "dist_checkpointing"
    (own / "strategies").mkdir(parents=True)
    (own.parent / "__init__.py").write_text("real = True\n")
    (own / "__init__.py").write_text("theirs = True\n")
    (own / "strategies" / "__init__.py").touch()
    (own / "secret.py").touch()
    monkeypatch.syspath_prepend(str(theirs))
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    megatron.install()
    yield theirs
    megatron.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def theirs(name: str = "") -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def shard(key: str, data: torch.Tensor, **more: Any) -> dc.ShardedTensor:
    return dc.ShardedTensor.from_rank_offsets(key, data, **more)


# The hook.


def test_the_package_and_what_is_below_it_resolve_to_ours() -> None:
    package = theirs()
    assert package.ShardedTensor is dc.ShardedTensor
    assert not hasattr(package, "theirs")
    assert importlib.import_module("megatron.core").real
    assert package.core.CheckpointingException is dc.CheckpointingException
    assert theirs("mapping").ShardedTensor is dc.ShardedTensor
    assert package.strategies.zarr is theirs("strategies.zarr")
    assert (
        theirs("strategies.base").LoadShardedStrategy
        in theirs("strategies.torch").TorchDistLoadShardedStrategy.mro()
    )
    with pytest.raises(ModuleNotFoundError, match="secret"):
        theirs("secret")


def test_uninstall_lets_the_next_import_find_the_real_one() -> None:
    theirs("strategies.torch")
    megatron.uninstall()
    assert theirs().theirs
    with pytest.raises(dc.CheckpointingException, match=r"was imported before(.|\n)*at the top"):
        megatron.install()


def test_a_second_install_changes_the_arguments(tmp_path: Path) -> None:
    with pytest.raises(dc.StrategyNotFoundError, match="nonsense"):
        megatron.install(backend="nonsense")
    megatron.install(backend="tensorstore")
    theirs().save({"w": shard("w", torch.ones(2))}, str(tmp_path / "a"))
    assert theirs("core").maybe_load_config(str(tmp_path / "a")).sharded_backend == "tensorstore"
    megatron.uninstall()
    megatron.install()
    theirs().save({"w": shard("w", torch.ones(2))}, str(tmp_path / "b"))
    assert theirs("core").maybe_load_config(str(tmp_path / "b")).sharded_backend == "torch_dist"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("strategies.async_utils", "PersistentAsyncCaller"),
        ("strategies.filesystem_async", "FileSystemWriterAsync"),
        ("strategies.torch", "MCoreSavePlanner"),
    ],
)
def test_a_name_that_is_left_out_says_so_on_import_and_on_use(module: str, name: str) -> None:
    found: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="is internal to Megatron's way of saving"):
        exec(f"from {PACKAGE}.{module} import {name}", found)
    with pytest.raises(ImportError, match=rf"{module}\.{name} is internal"):
        found[name]("ckpt")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = theirs(module).nonsense


@pytest.mark.parametrize(
    "module", ["state_dict_saver", "two_stage", "cached_metadata_filesystem_reader", "resharding"]
)
def test_a_module_that_is_left_out_says_so_on_import(module: str) -> None:
    with pytest.raises(ImportError, match=rf"{module} is internal to Megatron's way of saving"):
        theirs(f"strategies.{module}")


SCRIPT = """
import sys
import torch
from megatron.core import dist_checkpointing as mc
import neighbour
assert __name__ == "__main__"
w = mc.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
mc.save({"w": w}, sys.argv[1])
print(sys.argv[2:], neighbour.__name__)
"""


def test_a_script_is_run(tmp_path: Path, fake_megatron: Path, dckpt: Run) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").touch()
    run_module = "runpy.run_module('dist_checkpointing.interop.megatron', None, '__main__', True)"
    program = f"import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); {run_module}"
    done: subprocess.CompletedProcess[str] = run_fresh(
        *("-c", program, fake_megatron, "--backend", "zarr"),
        *(tmp_path / "script.py", tmp_path / "ckpt", "--backend", "x"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--backend', 'x'] neighbour\n"
    assert dc.load_plain_tensors(tmp_path / "ckpt")["w"].tolist() == [0, 1, 2, 3]
    assert "float32" in dckpt("ls", tmp_path / "ckpt").out


# Save, load and their defaults.


@pytest.mark.parametrize(
    ("name", "backend"),
    [("mc0.15.3_torch_dist", "tensorstore"), ("mc0.12.0_zarr", "torch_dist")],
)
def test_what_megatron_wrote_is_overwritten_once_the_plan_stands(
    tmp_path: Path, name: str, backend: str
) -> None:
    megatron.install(backend)
    folder = tmp_path / "ckpt"
    shutil.copytree(GOLDEN / name, folder)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("kept")
    before = dc.load_plain_tensors(folder)
    overlapping = {1: shard("w", torch.ones(2)), 2: shard("w", torch.ones(2))}
    with pytest.raises(dc.CheckpointingException, match="Invalid access pattern"):
        theirs().save(overlapping, str(folder))
    assert dc.load_plain_tensors(folder).keys() == before.keys()
    theirs().save({"w": shard("w", torch.ones(2))}, str(folder))
    assert dc.load_plain_tensors(folder)["w"].tolist() == [1, 1]
    assert (folder / "tokenizer" / "vocab.txt").read_text() == "kept"
    left = {path.name for path in folder.iterdir() if not path.name.startswith((".", "__"))}
    assert left <= {"common.pt", "metadata.json", "tokenizer", "d", "data", "manifest.ocdbt"}
    dc.verify_checkpoint(folder)


def test_a_save_that_is_cut_off_after_the_folder_was_adopted_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(GOLDEN / "mc0.15.3_torch_dist", folder)
    before = dc.load_plain_tensors(folder)
    monkeypatch.setattr(Attempt, "begin", lambda *_, **__: 1 / 0)
    with pytest.raises(dc.CheckpointingException, match="division by zero"):
        theirs().save({"w": shard("w", torch.ones(2))}, str(folder))
    assert dc.load_plain_tensors(folder).keys() == before.keys()


def test_what_an_unfinished_save_of_megatron_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "__3_1.distcp").write_text("half")
    (tmp_path / "__0_0.distcp").write_text("half")
    theirs().save({"w": shard("w", torch.ones(2))}, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*.distcp")) == ["__0_0.distcp"]
    assert dc.load_plain_tensors(tmp_path)["w"].tolist() == [1, 1]


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    megatron.install("zarr")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text("mine")
    (tmp_path / "common.pt").write_text("mine")
    with pytest.raises(dc.CheckpointExistsError):
        theirs().save({"w": shard("w", torch.ones(2))}, str(tmp_path), ("zarr", 1))
    assert (tmp_path / "w" / ".zarray").read_text() == "mine"
    assert (tmp_path / "common.pt").read_text() == "mine"


def test_an_array_beside_a_checkpoint_of_torch_dist_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(GOLDEN / "mc0.15.3_torch_dist", folder)
    (folder / "tokens").mkdir()
    (folder / "tokens" / ".zarray").write_text("mine")
    theirs().save({"w": shard("w", torch.ones(2))}, str(folder))
    assert (folder / "tokens" / ".zarray").read_text() == "mine"


def test_another_dtype_is_converted_and_a_partial_template_refused(tmp_path: Path) -> None:
    theirs().save({"w": shard("w", torch.arange(4.0))}, str(tmp_path))
    loaded = theirs().load({"w": shard("w", torch.zeros(4, dtype=torch.bfloat16))}, str(tmp_path))
    assert loaded["w"].dtype is torch.bfloat16
    assert loaded["w"].tolist() == [0, 1, 2, 3]
    half = dc.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
    with pytest.raises(dc.CheckpointingException, match="Invalid access pattern"):
        theirs().load({"w": half}, str(tmp_path))
    loaded = theirs().load({"w": half}, str(tmp_path), validate_access_integrity=False)
    assert loaded["w"].tolist() == [0, 1]


def test_plain_tensors_of_a_template_are_returned_and_not_filled(tmp_path: Path) -> None:
    dc.save({"scale": torch.ones(2), "l": [shard("w", torch.ones(2))]}, tmp_path)
    given = torch.zeros(3)
    template = {"scale": given, "new": given, "l": [shard("w", torch.zeros(2))]}
    loaded = theirs().load(template, tmp_path)
    assert (given.any().item(), loaded["scale"].tolist()) == (False, [1, 1])
    assert ("new" in loaded, loaded["l"][0].tolist()) == (False, [1, 1])


@pytest.mark.parametrize("error", [CheckpointException, dc.CheckpointingException])
def test_an_unexpected_key_raises_torchs_error_too(
    tmp_path: Path, error: type[BaseException]
) -> None:
    theirs().save({"w": shard("w", torch.ones(2))}, str(tmp_path))
    with pytest.raises(error, match="other_key") as caught:
        theirs().load({"w": shard("other_key", torch.ones(2))}, str(tmp_path))
    assert getattr(caught.value, "failures", None) == {}


def test_nothing_is_said_about_tensors_that_no_rank_asks_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs().save({key: shard(key, torch.ones(2)) for key in ("w", "v")}, str(tmp_path))
    theirs().load({"w": shard("w", torch.zeros(2))}, str(tmp_path))
    assert not caplog.messages


def test_flattened_tensors_of_torch_dist_are_listed_and_loaded_flattened() -> None:
    folder = str(GOLDEN / "mc0.15.3_torch_dist")
    listed = theirs().load_tensors_metadata(folder)
    flattened = {key for key, leaf in listed.items() if leaf.flattened_range is not None}
    assert flattened == {"optim.exp_avg", "optim.bias_avg"}
    plain = theirs().load_plain_tensors(folder)
    whole = dc.load_plain_tensors(folder)
    for key in flattened:
        assert torch.equal(plain[key], whole[key].flatten())


def test_tensors_are_removed_by_one_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = theirs("strategies.torch").TorchDistSaveShardedStrategy(
        "torch_dist", 1, separation_hint="prefix"
    )
    state = {key: shard(key, torch.ones(4)) for key in ("prefix_gone", "kept")}
    theirs().save(state, str(tmp_path), strategy)
    assert [path.name for path in tmp_path.glob("prefix*")] == ["prefix__0_0.distcp"]
    monkeypatch.setenv("WORLD_SIZE", "2")  # and no process group: a collective is an error
    theirs().remove_sharded_tensors(str(tmp_path), key_prefix="prefix")
    assert not list(tmp_path.glob("prefix*"))
    assert list(theirs().load_tensors_metadata(str(tmp_path))) == ["kept"]


def test_the_attributes_that_megatrons_training_sets(tmp_path: Path) -> None:
    serialization = theirs("serialization")
    strategy = serialization.get_default_save_sharded_strategy()
    assert (strategy.use_cached_ckpt_structure, strategy.cached_global_metadata) == (False, None)
    strategy.use_cached_ckpt_structure = True
    for step in range(3):
        theirs().save({"w": shard("w", torch.full((2,), step))}, str(tmp_path), strategy)
        assert dc.load_plain_tensors(tmp_path)["w"].tolist() == [step, step]
    load_strategy = serialization.get_default_load_sharded_strategy(str(tmp_path))
    assert load_strategy.cached_global_metadata is None
    assert theirs("strategies.filesystem_async")._results_queue is None


def test_a_folder_is_a_checkpoint_if_it_has_metadata_json(tmp_path: Path) -> None:
    core = theirs("core")
    assert core.maybe_load_config("") is None
    assert core.maybe_load_config(str(tmp_path)) is None
    assert not theirs().check_is_distributed_checkpoint(str(tmp_path))
    config = core.CheckpointingConfig("torch_dist")
    core.save_config(config, str(tmp_path))
    assert core.maybe_load_config(str(tmp_path)) == config
    assert theirs().check_is_distributed_checkpoint(str(tmp_path))


# Functions of nested dicts.


def test_matching_values_are_extracted() -> None:
    extract = theirs("dict_utils").extract_matching_values
    x: Any = {"a": [1, [], {}], "e": {}, "b": {"c": "x"}}
    expected: Any = ({"a": [1]}, {"a": [[], {}], "e": {}, "b": {"c": "x"}})
    assert extract(x, lambda v: v == 1) == expected
    found = extract({"a": ["y", 1, [2, 1]]}, lambda v: v == 1, True)
    assert found == ({"a": {1: 1, 2: {1: 1}}}, {"a": {0: "y", 2: {0: 2}}})
    assert extract({"e": {}}, lambda _: True) == ({}, {"e": {}})
    with pytest.raises(ValueError, match="expected a dict or a list"):
        extract(3, lambda _: True)


def test_differences_are_found() -> None:
    diff = theirs("dict_utils").diff
    assert diff({"a": 1, "r": 0}, {"b": 2, "r": 1}) == ([("a",)], [("b",)], [(("r",), int, int)])
    assert diff([1, 2, 3], [1]) == ([2, 1], [], [])
    assert diff((1,), (1, 5)) == ([], [1], [])
    assert diff({"t": torch.ones(2)}, {"t": torch.ones(2)}) == ([], [], [])
    *_, ((path, *_, count, shape, places),) = diff([torch.ones(2)], [torch.arange(2)])
    assert (path, int(count), shape, places) == ((0,), 1, (2,), [[0]])
    *_, ((path, *_, shape, other),) = diff(torch.ones(2), torch.ones(3))
    assert (path, shape, other) == ((), (2,), (3,))
    *_, ((path, *_),) = diff({"w": shard("w", torch.ones(2))}, {"w": shard("w", torch.zeros(2))})
    assert path == ("w", dc.ShardedTensor)


def test_nests_are_mapped_and_merged(capsys: pytest.CaptureFixture[str]) -> None:
    nest = theirs("dict_utils")
    x: Any = {"a": [1, {"b": 2}], "c": 3}
    assert list(nest.nested_values(x)) == [1, 2, 3]
    assert [(key, value) for _, key, value in nest.nested_items_iter(x)] == [
        (0, 1), ("b", 2), ("c", 3)
    ]  # fmt: skip
    outside = nest.dict_list_map_outplace(str, x)
    assert outside == {"a": ["1", {"b": "2"}], "c": "3"}
    inner = x["a"]
    assert nest.dict_list_map_inplace(lambda v: v + 1, x) is x
    assert x["a"] is inner
    assert x == {"a": [2, {"b": 3}], "c": 4}
    nest.dict_map(lambda v: v * 10, x)
    nest.dict_map_with_key(lambda k, v: (k, v), x)
    assert x == {"a": [(0, 20), {"b": ("b", 30)}], "c": ("c", 40)}
    assert nest.merge({"a": [{}]}, {"a": [{"b": 1}], "c": 2}) == {"a": [{"b": 1}], "c": 2}
    others: list[Any] = [{"a": 1}, {"a": [1]}, {"a": {}}]
    for other in others:
        with pytest.raises(ValueError, match=r"Duplicate|lengths|entries"):
            nest.merge({"a": [1, 2]}, other)
    assert nest.map_reduce(range(4), lambda v: v % 2, str, "".join) == {0: "02", 1: "13"}
    nest.inspect_types({"a": [torch.ones(2)], "b": 1})
    assert "torch.float32 of shape (2,)" in capsys.readouterr().out


# Functions of sharded leaves.


def test_leaves_are_taken_out_and_renamed(caplog: pytest.LogCaptureFixture) -> None:
    utils = theirs("utils")
    factory = dc.ShardedTensorFactory("f", torch.ones(1), lambda *_: None, sum)
    state = {
        "t": shard("t", torch.ones(2)),
        "f": factory,
        "o": dc.ShardedObject("o", 1, (1,), (0,)),
        "l": dc.LocalNonpersistentObject(2),
        "plain": 3,
    }
    for name, kinds in {
        "extract_sharded_tensors": "t",
        "extract_sharded_tensors_and_factories": "tf",
        "extract_sharded_tensors_or_nonpersistent": "tfl",
        "extract_sharded_base": "tfo",
        "extract_nonpersistent": "l",
    }.items():
        matching, rest = getattr(utils, name)(state)
        assert (set(matching), {*matching, *rest}) == (set(kinds), set(state)), name

    def keys() -> list[str]:
        return [state[name].key for name in "tfo"]  # type: ignore[attr-defined]

    utils.add_prefix_for_sharding(state, "a.")
    assert keys() == ["a.t", "a.f", "a.o"]
    utils.apply_prefix_mapping(state, {"a.t": "T", "a.": "b."})
    assert keys() == ["T", "b.f", "b.o"]
    with pytest.raises(ValueError, match="Expected T to begin with prefix b"):
        utils.replace_prefix_for_sharding(state, "b.", "")
    state["t"].key = "b.t"  # type: ignore[attr-defined]
    utils.replace_prefix_for_sharding(state, "b.", "")
    assert keys() == ["t", "f", "o"]
    assert utils._sharded_tensor_shard_id(state["t"]) == ("t", (0,), None)
    assert utils._sharded_object_id(state["o"]) == ("o", (0,), (1,))
    assert list(utils.zip_strict([1], [2])) == [(1, 2)]
    with pytest.raises(AssertionError):
        utils.zip_strict([1], [])
    with caplog.at_level(logging.DEBUG):

        @utils.debug_time("inner", threshold=0)  # type: ignore[untyped-decorator]
        def work() -> None:
            utils.debug_msg("hello")

        with utils.debug_time("outer", logging.getLogger("mine")):
            work()
    words = [(r.name, r.levelname, r.getMessage().split(" took ")[0]) for r in caplog.records]
    assert words == [
        ("mine", "DEBUG", "outer.inner hello"),
        ("mine", "WARNING", "outer.inner"),
        ("mine", "DEBUG", "outer"),
    ]
    assert utils._clean_metadata_for_serialization({"dp_cp_group": 1, "a": 2}) == {"a": 2}


def test_the_state_of_an_optimizer_is_sharded_as_its_parameters() -> None:
    optimizer = theirs("optimizer")
    w, fused = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.AdamW([fused, w])
    model = {
        "w": dc.ShardedTensor.from_rank_offsets("w", w, (0, 1, 2)),
        "f": dc.ShardedTensorFactory("f", fused, lambda *_: None, sum),
    }
    numbers = optimizer.get_param_id_to_sharded_param_map(model, [fused, w])
    assert {number: leaf.key for number, leaf in numbers.items()} == {0: "f", 1: "w"}
    w.grad, fused.grad = torch.ones(2, 3), torch.ones(4)
    adam.step()
    state = adam.state_dict()
    optimizer.optim_state_to_sharding_state(state, numbers, exclude_keys=("step",))
    average = state["state"][1]["exp_avg"]
    assert (average.key, average.global_shape) == ("optimizer.state.exp_avg.w", (4, 3))
    assert state["state"][0]["exp_avg"].key == "optimizer.state.exp_avg.f"
    assert state["param_groups"][0]["params"].unwrap() == [0, 1]
    with pytest.raises(ValueError, match="Param id 0 does not match"):
        optimizer.optim_state_to_sharding_state(adam.state_dict(), {})


# Validation.


def test_each_rank_is_told_what_is_wrong_with_a_template() -> None:
    validation = theirs("validation")
    strict = validation.StrictHandling
    halves = [dc.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, n, 2)) for n in (0, 1)]
    validation.validate_sharding_integrity([[halves[0]], [halves[1]]])
    with pytest.raises(dc.CheckpointingException, match="Invalid access pattern"):
        validation.validate_sharding_integrity([[halves[0]], [halves[0]]])
    flat = dc.ShardedTensor.from_rank_offsets_flat(
        "f", torch.ones(2), (4,), flattened_range=slice(0, 2)
    )
    text = "Flattened ranges dont cover the whole shard ShardedTensor"
    with pytest.raises(dc.CheckpointingException, match=text):
        validation.validate_sharding_integrity([[flat]])
    stored = {"w": halves[0], "other": shard("other", torch.ones(1))}
    state = {"w": halves[0], "new": shard("new", torch.ones(1))}
    own, of_ranks = validation.determine_global_metadata(state)
    check = validation.validate_integrity_and_strict_load
    kept, missing, unexpected = check(state, strict.RETURN_ALL, False, own, of_ranks, stored)
    assert (list(kept), missing, unexpected) == (["w"], {"other"}, {"new"})
    *_, missing, unexpected = check(state, strict.RETURN_UNEXPECTED, False, None, of_ranks, stored)
    assert (missing, unexpected) == (set(), {"new"})
    with pytest.raises(
        dc.CheckpointingException, match=r"Missing keys.*other(.|\n)*Unexpected.*new"
    ):
        check(state, strict.RAISE_ALL, False, own, of_ranks, stored)
    with pytest.raises(dc.CheckpointingException, match="ckpt_sharded_metadata=None"):
        check(state, strict.LOG_ALL, False)
    with pytest.raises(dc.CheckpointingException, match="without global_metadata"):
        check(state, strict.ASSUME_OK_UNEXPECTED, True)


def test_a_state_dict_is_sorted_out() -> None:
    preprocess = theirs("state_dict_utils")
    empty = dc.ShardedTensor.from_rank_offsets_flat(
        "e", torch.ones(0), (4,), flattened_range=slice(1, 1)
    )

    def state_dict() -> dict[str, Any]:
        return {
            "f": dc.ShardedTensorFactory("f", torch.ones(2), lambda k, t, *_: [shard(k, t)], sum),
            "l": dc.LocalNonpersistentObject(3),
            "e": empty,
            "plain": [4],
        }

    sharded, common = preprocess.save_preprocess(state_dict())
    assert ([*sharded], common) == (["f"], {"plain": [4]})
    state = state_dict()
    template, local, factories = preprocess.load_preprocess(state)
    assert isinstance(state["f"], dc.ShardedTensorFactory)
    assert (template["f"][0].key, local) == ("f", {"l": 3})
    assert factories["f"].data is None
    assert "e" not in template


def test_a_tensor_aware_state_dict_gives_its_tensors_and_takes_them() -> None:
    kind = theirs("tensor_aware_state_dict").MCoreTensorAwareStateDict
    weight = torch.arange(3.0)
    state = {"w": shard("w", weight), "o": dc.ShardedObject("o", "rng", (1,), (0,)), "step": 7}
    saved, _ = kind.from_state_dict(state, algo="atomic")
    saved.copy_tensors_to_cpu()
    weight.zero_()
    tensors = saved.pop_tensors()
    assert saved.is_hollow
    with pytest.raises(AssertionError):
        saved.pop_tensors()
    saved.insert_tensors(tensors)
    template = {"w": shard("w", torch.zeros(3)), "o": dc.ShardedObject("o", None, (1,), (0,))}
    loaded = saved.to_state_dict(template)
    assert (loaded["w"].tolist(), loaded["o"], loaded["step"]) == ([0, 1, 2], "rng", 7)
    with pytest.raises(AssertionError):
        saved.to_state_dict({"v": shard("v", torch.zeros(3))}, strict="log_all")
    saved.pop_tensors()
    saved.init_tensors()
    assert [tensor.shape for tensor in saved.tensors] == [(3,)]
    with pytest.raises(NotImplementedError):
        kind.from_state_dict(state, algo="other")


# The layer for Megatron on two processes.


def test_two_ranks_use_the_layer(tmp_path: Path) -> None:
    script = Path(__file__).with_name("layer_rank.py")
    place = tmp_path / "place"
    place.mkdir()
    reports = tmp_path / "reports"
    ranks = run_script(2, script, place, reports=reports, timeout_seconds=120)
    for found in ranks:
        # The cut one first, then the larger of those that both have.
        assert found["writers"] == {"large": 0, "small": 1}
        assert found["left"] == ["large", "small"]
        assert found["files"] == ["__0_0.distcp", "__1_0.distcp"]
        assert found["refused"]
        assert found["logged_without"] == []
        assert (found["finalized"], found["async"]) == ([0], [2.0] * 4 + [3.0] * 4)
    written = [found["written"] for found in ranks]
    assert written == [found["read"] for found in ranks] == [["cut", "large"], ["cut", "small"]]
    assert [found["replica_ids"] for found in ranks] == [
        {"large": 0, "small": 1, "cut": 0},
        {"large": 1, "small": 0, "cut": 0},
    ]
    assert [found["planned_ids"]["large"] for found in ranks] == [0, 1], "of the caller"
    assert [found["tensors"] for found in ranks] == [2, 2]
    assert [found["tensors_again"] for found in ranks] == [2, 2]
    assert ranks[0]["logged"] == []
    (logged,) = ranks[1]["logged"]
    assert logged == (
        "Rank 1 common state dict differs from rank 0 common state dict. Keys only on rank 0: [], "
        "Keys only on 1: [], Mismatched keys: [(('rank',), <class 'int'>, <class 'int'>)]"
    )
    assert "Invalid access pattern" in ranks[0]["invalid"]
    assert "invalid" not in ranks[1]
