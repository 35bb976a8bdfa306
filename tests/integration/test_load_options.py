"""What load and the small readers do when asked: cast, strict, validation, removal."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.testing import run_ranks
from simulated_groups import the_one_error
from states import FORMAT, counted_cell as cell, counted_rows as rows, save_on, shard

Format = tuple[str, int]
# Devices and dtypes.


def test_a_tensor_on_the_meta_device_cannot_be_filled(tmp_path: Path) -> None:
    dc.save({"w": rows("w")}, tmp_path)
    template = {"w": shard("w", torch.empty(2, 3, device="meta"))}
    error = the_one_error(2, lambda comm: dc.load(template, tmp_path, comm=comm))
    assert type(error) is dc.StateMismatchError
    assert "'w': the tensor to fill is on the meta device" in str(error)
    assert "data=None" in str(error)
    loaded: Any = dc.load({"w": template["w"].without_data()}, tmp_path)
    assert torch.equal(loaded["w"], rows("w").data)  # type: ignore[arg-type]


CASTS = [  # stored, wanted, whether no value can change; unit/test_dtypes has all pairs
    (torch.bfloat16, torch.float32, True),
    (torch.bool, torch.int64, True),
    (torch.complex64, torch.complex128, True),
    (torch.float32, torch.bfloat16, False),
    (torch.bfloat16, torch.float8_e5m2, False),
    (torch.int64, torch.float32, False),
]


@pytest.mark.parametrize(("stored", "wanted", "lossless"), CASTS)
def test_cast_says_which_dtypes_are_converted(
    tmp_path: Path, *, stored: torch.dtype, wanted: torch.dtype, lossless: bool
) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [-3.0, 0.5, 100.0]]).abs().to(stored)
    dc.save({"w": shard("w", values)}, tmp_path)
    for given, cast in itertools.product((True, False), ("error", "widen", "any")):
        memory = torch.zeros(2, 3, dtype=wanted)
        leaf = shard("w", memory) if given else shard("w", memory).without_data()
        options: dict[str, Any] = {"cast": cast}
        if cast == "any" or (cast == "widen" and lossless):
            found = dc.load({"w": leaf}, tmp_path, **options)["w"]
            assert found.dtype == wanted
            assert torch.equal(found, values.to(wanted))
            assert (found is memory) == given
            continue
        said = rf"dtype differs(.|\n)*expected {wanted}; found {stored}(.|\n)*cast="
        with pytest.raises(dc.StateMismatchError, match=said):
            dc.load({"w": leaf}, tmp_path, **options)
        assert not memory.to(torch.complex64).any()


# Strictness.

SAVED = {"tensor": rows("tensor"), "unasked": rows("unasked"), "object": cell("object")}


def mismatched_template(rank: int) -> dict[str, Any]:
    """Both ranks ask for one stored tensor; rank 1 also for one that is not stored."""
    template: dict[str, Any] = {"known": rows("tensor", data=None), "step": -1}
    if rank == 1:
        template |= {"extra": {"deep": rows("extra", data=None)}, "o": cell("extra object")}
    return template


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dc.save({**SAVED, "step": 5}, tmp_path / "c")
    return tmp_path / "c"


def test_raise_all_is_about_keys_that_no_rank_asks_for(saved: Path) -> None:
    def load_rank(comm: Comm) -> Any:
        keys = ["tensor"] if comm.rank else ["unasked", "object"]
        template = {key: SAVED[key].without_data() for key in keys}
        return set(dc.load(template, saved, strict="raise_all", comm=comm))

    assert run_ranks(2, load_rank) == [{"unasked", "object", "step"}, {"tensor", "step"}]


def test_tensors_that_nobody_asks_for_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["model.a", "optim.a", "optim.b", "head", "optim.c"]
    dc.save({name: rows(name) for name in names}, tmp_path)

    def some(comm: Comm, **options: Any) -> None:
        # Each rank asks for something else, and no rank for the optimizer's.
        name = names[3 * comm.rank]
        dc.load({"w": rows(name, data=None)}, tmp_path, comm=comm, **options)

    run_ranks(2, some)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "3 of the 5 stored tensors are not loaded" in caplog.text
    assert "optim (3). If this is meant, pass strict='raise_unexpected'" in caplog.text
    caplog.clear()
    run_ranks(2, lambda comm: some(comm, strict="raise_unexpected"))
    run_ranks(2, lambda comm: dc.load({}, tmp_path, comm=comm))
    dc.load({name: rows(name, data=None) for name in names}, tmp_path)
    assert not caplog.records


@pytest.mark.parametrize(
    ("argument", "value", "error", "words"),
    [
        ("comm", 3, TypeError, "comm must be a Comm or None, not int"),
        ("strict", False, ValueError, r"strict=False; expected one of .*'ignore_all'"),
        ("strict", "bogus", ValueError, r"strict='bogus'; expected one of .*raise_all"),
        ("cast", "bogus", ValueError, "cast must be 'error', 'widen' or 'any', not 'bogus'"),
        ("cast", None, ValueError, "cast must be 'error', 'widen' or 'any', not None"),
    ],
)
def test_wrong_arguments_are_named(
    saved: Path, argument: str, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        dc.load({}, saved, **{argument: value})


UNEXPECTED = [
    "Unexpected keys (not found in the checkpoint)",
    "Unexpected keys (for this rank): {",
    "'extra'",
    "'extra object'",
]
MISSING = [
    "Some keys found in the checkpoint are missing in the provided sharded state dict",
    "Missing keys (for all ranks): {",
    "'unasked'",
]


@pytest.mark.parametrize("flag", [None, *(flag.value for flag in dc.StrictHandling)])
def test_what_each_flag_does(
    saved: Path, caplog: pytest.LogCaptureFixture, flag: str | None
) -> None:
    """With keys that rank 1 alone asks for, and keys that no rank asks for."""
    strict: Any = {} if flag is None else {"strict": flag}
    does, _, whom = (flag or "assume_ok_unexpected").partition("_")
    fitting: Any = dc.load({k: leaf.without_data() for k, leaf in SAVED.items()}, saved, **strict)
    assert caplog.text == "", "nothing is said when all fits"
    if does == "return":
        assert fitting[1:] == (set(), set())
        fitting = fitting[0]
    assert fitting["object"] == {"rank": 0}

    def load_rank(comm: Comm) -> Any:
        return dc.load(mismatched_template(comm.rank), saved, comm=comm, **strict)

    if does in ("assume", "raise"):
        error = the_one_error(2, load_rank, dc.StateMismatchError)
        extra = next(finding for finding in error.findings if finding.key == "extra")
        assert extra.ranks == (1,)
        asked = "in the checkpoint, but asked for by no rank"
        for words, is_said in (
            ("expected: by the template; found: in the checkpoint", does == "assume"),
            (f"{UNEXPECTED[0]} encountered", does == "raise"),
            ("'extra object'", does == "raise"),
            ("Some keys found in the checkpoint are missing", flag == "raise_all"),
            (f"'unasked': {asked}", flag == "raise_all"),
            (f"'object': {asked}", flag == "raise_all"),
        ):
            assert (words in str(error)) == is_said, words
        return
    for rank, result in enumerate(run_ranks(2, load_rank)):
        if does == "return":
            result, missing, unexpected = result  # noqa: PLW2901
            assert missing == ({"unasked", "object"} if whom == "all" else set())
            assert unexpected == ({"extra", "extra object"} if rank else set())
        assert torch.equal(result["known"], SAVED["tensor"].data)
        assert result["step"] == 5
        assert set(result) <= {"known", "step", "extra"}
        assert not result.get("extra")
    assert all((words in caplog.text) == (does == "log") for words in UNEXPECTED)
    assert all((words in caplog.text) == (flag == "log_all") for words in MISSING)
    assert caplog.text.count(UNEXPECTED[0]) == (does == "log")
    assert bool(caplog.text) == (does == "log")


LENIENT = ["log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all"]


@pytest.mark.parametrize("flag", LENIENT)
def test_an_unexpected_key_may_stand_anywhere(tmp_path: Path, flag: str) -> None:
    dc.save({"layers": [rows("known")], "gate": rows("f.gate")}, tmp_path)
    known, extra = rows("known", data=None), rows("extra", data=None)

    def halves(key: str, data: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"gate": shard(f"{key}.gate", data[:2]), "up": shard(f"{key}.up", data[2:])}

    def load(nest: Any) -> Any:
        result: Any = dc.load({"layers": nest}, tmp_path, strict=flag)
        return result[0] if isinstance(result, tuple) else result

    for nest in (
        [known, extra],
        [extra, known],
        (known, {"x": extra}),
        [[extra], known],
        {"k": [known], "e": [extra]},
        {"k": known, "f": dc.ShardedTensorFactory("g", torch.zeros(4, 3), halves, dict)},
    ):
        (found,) = [own for own in tree_leaves(load(nest)["layers"]) if own is not None]
        assert torch.equal(found, rows("known").data)  # type: ignore[arg-type]
    with pytest.raises(dc.StateMismatchError, match=r"f\.up"):  # of which a part is stored
        load(dc.ShardedTensorFactory("f", torch.zeros(4, 3), halves, dict))


# Validation of the template.


def test_a_partial_or_overlapping_template_is_fine_unless_validation_is_asked_for(
    tmp_path: Path,
) -> None:
    save_on(2, lambda comm: {"w": rows("w", comm.rank, 2)}, tmp_path)

    def load_rank(comm: Comm, parts: list[int], *, validate: bool) -> Any:
        template = {"w": rows("w", parts[comm.rank], 2, data=None)}
        return dc.load(template, tmp_path, validate_access_integrity=validate, comm=comm)

    for result in run_ranks(2, lambda comm: load_rank(comm, [1, 1], validate=False)):
        assert torch.equal(result["w"], torch.arange(6.0).reshape(2, 3) + 10)
    error = the_one_error(2, lambda comm: load_rank(comm, [1, 1], validate=True))
    assert type(error) is dc.InvalidShardingError
    assert "Invalid access pattern" in str(error)
    assert "'w'" in str(error)
    run_ranks(2, lambda comm: load_rank(comm, [1, 0], validate=True))


# Content metadata.


@pytest.mark.parametrize("content", [None, {}, {"version": 2, "nested": {"list": [1, (2, 3)]}}])
def test_content_metadata_comes_back(tmp_path: Path, content: Any) -> None:
    state = {"w": rows("w"), "step": 1}
    dc.save(state, tmp_path, content_metadata=content)
    assert state.keys() == {"w", "step"}
    assert dc.load_content_metadata(tmp_path) == content
    loaded: Any = dc.load({}, tmp_path)
    assert dc.load_content_metadata(preloaded_state_dict=loaded) == content
    assert dc.load_content_metadata(tmp_path / "nowhere", preloaded_state_dict=loaded) == content
    assert dc.load_content_metadata(preloaded_state_dict={}) is None
    with pytest.raises(ValueError, match="checkpoint_dir or preloaded_state_dict"):
        dc.load_content_metadata()


# Removal.


@FORMAT
def test_an_object_below_a_removed_tensor_survives_whatever_its_name(
    tmp_path: Path, file_format: Format
) -> None:
    names = ["c", "c.x", "piece", "piece.x", "c.0.0x", "0x", "0.1.x", ".zarray.x"]
    objects = {name: cell(f"model/{name}") for name in names}
    dc.save({"w": rows("model"), **objects}, tmp_path, file_format)
    dc.remove_sharded_tensors(tmp_path, "model")
    assert dc.load_tensors_metadata(tmp_path) == {}
    assert dc.load(dict(objects), tmp_path) == {key: {"rank": 0} for key in names}


def test_another_number_of_axes_is_no_mismatch_that_is_allowed(tmp_path: Path) -> None:
    dc.save({"w": shard("w", torch.ones(4, 2))}, tmp_path)
    for shape in ((8,), (4, 2, 1)):
        leaf = shard("w", torch.zeros(shape), allow_shape_mismatch=True)
        with pytest.raises(dc.StateMismatchError, match="global shape differs"):
            dc.load({"w": leaf}, tmp_path)
        assert leaf.data is not None
        assert not leaf.data.any()
