import pickle

import pytest

from dist_checkpointing import errors
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    RankFailedError,
    StateMismatchError,
    StrategyNotFoundError,
    UnsupportedFormatError,
    merge_findings,
    near_names,
)

TREE: dict[type[CheckpointingException], tuple[type[Exception], ...]] = {
    InvalidShardingError: (ValueError,),
    StateMismatchError: (),
    CheckpointNotFoundError: (FileNotFoundError, OSError),
    CheckpointExistsError: (FileExistsError, OSError),
    CorruptCheckpointError: (),
    UnsupportedFormatError: (),
    StrategyNotFoundError: (LookupError,),
    RankFailedError: (),
}
BUILTINS = (ValueError, OSError, LookupError, RuntimeError, TypeError)
FULL = Finding(
    problem="shapes differ",
    key="layer.weight",
    expected=(4, 8),
    found=(4, 7),
    ranks=(3, 5),
    path="a/b.bin",
    remedy="Save again.",
)


def test_the_tree_is_exactly_what_is_documented() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == {CheckpointingException, *TREE}


@pytest.mark.parametrize("cls", [CheckpointingException, *TREE], ids=lambda cls: cls.__name__)
def test_an_error_is_the_builtins_it_promises_and_survives_pickling(
    cls: type[CheckpointingException],
) -> None:
    assert issubclass(cls, CheckpointingException)
    promised: tuple[type[Exception], ...] = TREE.get(cls, ())
    assert all(issubclass(cls, builtin) for builtin in promised)
    assert not any(issubclass(cls, other) for other in BUILTINS if other not in promised)
    error = cls("no luck", [FULL, Finding("other")])
    if isinstance(error, OSError):  # which holds no sentence where a number belongs
        assert (error.errno, error.strerror) == (None, None)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is cls
        assert again.message == "no luck"
        assert again.findings == (FULL, Finding("other"))
        assert str(again) == str(error)


def test_the_text_says_everything_a_reader_needs() -> None:
    text = str(StateMismatchError("template and checkpoint differ", [FULL]))
    words = ("differ", "'layer.weight'", "shapes differ", "expected (4, 8)", "found (4, 7)")
    for word in (*words, "ranks 3, 5", "a/b.bin", "Save again."):
        assert word in text


def test_falsy_values_are_said_and_absent_ones_are_not() -> None:
    text = str(Finding("p", key="", expected=0, found=(), remedy="r"))
    assert text.startswith("'': p")
    assert "expected 0" in text
    assert "found ()" in text
    assert str(Finding("p")) == "p"


@pytest.mark.parametrize(("count", "hidden"), [(50, None), (51, 1), (1000, 950)])
def test_many_findings_are_cut_in_print_only(count: int, hidden: int | None) -> None:
    error = StateMismatchError("many", [Finding(f"problem {i:04}") for i in range(count)])
    assert len(error.findings) == count
    text = str(error)
    assert text.count("problem ") == 50
    assert "problem 0049" in text
    assert (f"{hidden} more" in text) if hidden else ("more" not in text)


def test_rank_failed_error_prints_the_first_tracebacks_and_keeps_all() -> None:
    found = [Finding("a", ranks=(9, 2)), Finding("b", ranks=(2,)), Finding("c")]
    error = RankFailedError("m", found, {rank: f"text of {rank}\n" for rank in range(20, 0, -1)})
    assert (error.ranks, RankFailedError("m").ranks) == ((2, 9), ())
    text = str(error)
    assert "rank 1" in text
    assert "text of 1" in text
    assert "text of 20" not in text
    again = pickle.loads(pickle.dumps(error))
    assert (again.tracebacks, again.ranks, str(again)) == (error.tracebacks, error.ranks, text)
    assert len(again.tracebacks) == 20


def test_merge_unites_findings_that_differ_only_in_rank() -> None:
    def on(*ranks: int, key: str = "a", found: object = ([1], {"a": 2})) -> Finding:
        return Finding("p", key, found=found, ranks=ranks)

    merged = merge_findings(
        [on(4), on(0, 2, key="b"), on(1), on(4), on(0), on(7, found=2), on(2, key="b")]
    )
    assert merged == (on(0, 1, 4), on(0, 2, key="b"), on(7, found=2))


def test_among_very_many() -> None:
    keys = [f"decoder.layers.{i}.mlp.expert.{j}.weight" for i in range(1000) for j in range(40)]
    assert near_names("decoder.layers.777.mlp.exprt.35.weight", keys)[0] == (
        "decoder.layers.777.mlp.expert.35.weight"
    )
    assert len(near_names("expert.7", keys, count=5)) == 5
