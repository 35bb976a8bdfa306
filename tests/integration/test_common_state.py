"""Common state and objects: all that real states hold comes back, and no code ever runs."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import logging
import os
import pathlib
import pickle
import random
import threading
import types
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.testing import run_ranks
from simulated_groups import the_one_error
from states import BACKEND, save_on, shard


def cell(value: Any = None, key: str = "o") -> dc.ShardedObject:
    return dc.ShardedObject(key, value, (1,), (0,))


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    """A class of the user's own."""

    depth: int = 3


class Pair(NamedTuple):
    first: Any
    second: Any


def same(got: Any, expected: Any) -> bool:
    """Equal in type, value and nesting; tensors and arrays bit by bit."""
    attributes = [
        [getattr(x, n, 0) for n in ("default_factory", "maxlen")] for x in (got, expected)
    ]
    if type(got) is not type(expected) or attributes[0] != attributes[1]:
        return False
    if isinstance(expected, torch.Tensor | np.ndarray | np.generic):
        equal = got.dtype == expected.dtype and got.shape == expected.shape
        return bool(equal and contents(got) == contents(expected))
    if isinstance(expected, dict):
        return list(got) == list(expected) and same([*got.values()], [*expected.values()])
    if isinstance(expected, list | tuple | collections.deque):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, argparse.Namespace | types.SimpleNamespace):
        return same(vars(got), vars(expected))
    if isinstance(expected, io.BytesIO):
        got, expected = ((buffer.getvalue(), buffer.tell()) for buffer in (got, expected))
    return bool(got == expected)


def contents(value: Any) -> bytes:
    """The bytes of an array or tensor."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    copied: bytes = value.tobytes()
    return copied


def namespace(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**values)


def written(content: bytes) -> io.BytesIO:
    """A buffer as torch.save leaves it, which is how extra states of layers are made."""
    buffer = io.BytesIO()
    buffer.write(content)
    return buffer


NEW_YORK = dt.timezone(dt.timedelta(hours=-5), "EST")
VALUES: dict[str, Any] = {
    "Python": [None, True, 2**200, 1 << 2_000, -0.1, float("inf"), 1 - 2j, "naïve 😀 \0"],
    "bytes": [b"\0\xff", bytearray(b"\0\xff"), b"abc" * 3_000, bytearray(b"x" * 300)],
    "buffers": [io.BytesIO(b"\0\xff" * 1000), written(b"\0\xff")],
    "slices": [slice(1, None, 2), range(1, 10, 3), range(10**12)],
    "tuples": (1, (2, [3]), ()),
    "sets": [{1, "two", 3.0}, frozenset({1, 2}), set()],
    "ordered dicts": [collections.OrderedDict(b=1, a=[2]), collections.Counter("abracadabra")],
    "defaultdicts": [
        collections.defaultdict(list),
        collections.defaultdict(list, a=[1], b=[2, 3]),
        collections.defaultdict(dict, {1: {"x": 2}}),
        collections.defaultdict(int, steps=5),
    ],
    "deques": [collections.deque(x, maxlen=n) for x, n in (([], None), ([1], None), ([0.5], 5))],
    "namespaces": [namespace(lr=0.1, betas=(0.9, 0.95), nested=namespace(x=[1])), namespace()],
    "simple namespace": types.SimpleNamespace(a=1, b=types.SimpleNamespace(c="d")),
    "times": [
        dt.date(2024, 2, 29),
        dt.datetime(2024, 2, 29, 12, 30, 1, 5),  # noqa: DTZ001
        dt.datetime(2024, 2, 29, tzinfo=dt.UTC),
        dt.datetime(2024, 2, 29, tzinfo=NEW_YORK),
        dt.time(1, 2, 3, 4),
        dt.timedelta(days=-1, microseconds=3),
    ],
    "numbers": [decimal.Decimal("0.10"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
    "paths": [pathlib.Path("/a/b c"), pathlib.PurePosixPath("a/b")],
    "torch sizes": [torch.Size([2, 3]), torch.Size([])],
    "torch dtypes": [torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float8_e5m2],
    "torch devices": [torch.device("cpu"), torch.device("cuda", 3)],
    "tensors": [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.ones(2, 3).expand(50, 2, 3),
        torch.zeros(2, dtype=torch.uint16),
        torch.tensor(1 + 2j).conj(),
    ],
    "numpy numbers": [
        *(np.int64(5), np.float32(0.1), np.float16(0.5), np.True_, np.complex64(1 + 2j)),
        *(np.uint8(255), np.str_("text"), np.bytes_(b"bytes")),
        *(np.datetime64("2024-02-29T12:00", "s"), np.timedelta64(5, "ms")),
    ],
    "numpy arrays": [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(1.5),
        np.empty((0, 2)),
        np.zeros((200, 300), dtype=bool),
        np.array(["a", "bcd"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2024-02-29"], dtype="datetime64[D]"),
    ],
    "numpy dtypes": [*(np.dtype(c) for c in "?bBhHiIlLefdFD"), np.dtype([("a", "i4")])],
    "random states": [
        random.Random(5).getstate(),
        np.random.RandomState(5).get_state(),
        np.random.default_rng(5).bit_generator.state,
        np.random.Philox(5).state,
        torch.Generator().manual_seed(5).get_state(),
    ],
    "ids": {1: "int", "1": "text", (1, "a"): "tuple", None: "none", 1.5: "float", b"b": "bytes"},
    "long text": "ü" * 10_000,
    "nested deep": [[[[[[[[[["bottom"], 1], {2: []}]]]]]]]],
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_data_comes_back_and_is_saved_without_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = VALUES[name]
    dc.save({"v": value, "o": cell(value), "after": "end"}, tmp_path)
    assert caplog.text == ""
    loaded = dc.load_common_state_dict(tmp_path)
    assert loaded["after"] == "end"
    assert same(loaded["v"], value)
    loaded = dc.load({"o": cell()}, tmp_path)
    assert same(loaded["v"], value)
    assert same(loaded["o"], value)


# What is not plain data: refused when it is saved, unless it is to be loaded with trust.

FOREIGN: dict[str, tuple[Any, str]] = {
    "an enum": (Colour.RED, "Colour"),
    "an object of a user's class": (Settings(5), "Settings"),
    "a named tuple": (Pair(1, 2), "Pair"),
    "a function": (same, "same"),
    "a partial": (functools.partial(int, base=2), "functools.partial"),
    "a module": (torch.nn.Identity(), "Identity"),
    "an enum as a key": ({Colour.RED: 1}, "Colour"),
    "an object in a set": ({Colour.RED}, "Colour"),
    "an object in a deque": (collections.deque([Settings(5)]), "Settings"),
    "an object in a namespace": (namespace(deep=[Settings(5)]), "Settings"),
    "a class as a factory": (collections.defaultdict(Settings), "Settings"),
    "a subclass of dict": (type("Own", (dict,), {"__module__": __name__})(), "Own"),
}
# Pickle finds it by its name.
Own = type(FOREIGN["a subclass of dict"][0])


@pytest.mark.parametrize("name", FOREIGN)
def test_what_load_would_refuse_is_refused_at_save(tmp_path: Path, name: str) -> None:
    value, word = FOREIGN[name]
    state = {"step": 1, "deep": [{"v": value}]}

    def refuses(call: Callable[[], Any], place: str) -> None:
        with pytest.raises(dc.UnsupportedFormatError) as raised:
            call()
        for words in (word, place, "trusted=True", "add_safe_globals"):
            assert words in str(raised.value)

    refuses(lambda: dc.save(state, tmp_path / "c"), "state_dict['deep'][0]['v']")
    assert not (tmp_path / "c").exists()
    dc.save(state, tmp_path / "c", trusted=True)
    file = str(tmp_path / "c" / "common.pt")
    template: dict[str, Any] = {}
    refuses(lambda: dc.load(template, tmp_path / "c"), file)
    refuses(lambda: dc.load_common_state_dict(tmp_path / "c"), file)
    trusted = dc.load(template, tmp_path / "c", trusted=True)["deep"][0]["v"]
    assert type(trusted) is type(value)
    assert dc.load_common_state_dict(tmp_path / "c", trusted=True).keys() == {"step", "deep"}
    opened = dc.Checkpoint.open(tmp_path / "c")
    assert not opened.trusted
    refuses(lambda: opened.common, file)
    refuses(lambda: opened.metadata, file)
    assert dc.Checkpoint.open(tmp_path / "c", trusted=True).common.keys() == {"step", "deep"}


@BACKEND
def test_an_object_that_load_would_refuse_is_refused_at_save(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    state = {"x": [cell({"a": Settings(5)})]}
    with pytest.raises(dc.UnsupportedFormatError) as raised:
        dc.save(state, tmp_path, backend)
    assert raised.value.findings[0].key == "o"
    assert "state_dict['x'][0]['a']" in str(raised.value)
    assert "Settings" in str(raised.value)
    assert not list(tmp_path.iterdir())
    dc.save(state, tmp_path, backend, trusted=True)
    template = {"x": [cell()]}
    with pytest.raises(dc.UnsupportedFormatError, match="Settings"):
        dc.load(template, tmp_path)
    with pytest.raises(dc.UnsupportedFormatError, match="Settings"):
        _ = dc.Checkpoint.open(tmp_path).objects["o"][0]
    assert dc.load(template, tmp_path, trusted=True) == {"x": [{"a": Settings(5)}]}
    assert dc.Checkpoint.open(tmp_path, trusted=True).objects["o"][0] == {"a": Settings(5)}


def test_everything_that_is_refused_is_named_at_once_on_all_ranks(tmp_path: Path) -> None:
    def save_rank(comm: Comm) -> None:
        cell = dc.ShardedObject(f"o{comm.rank}", Colour.RED, (1,), (0,))
        dc.save(
            {"fine": 1, "a": Settings(), "b": [1, Settings], "o": cell}, tmp_path / "c", comm=comm
        )

    error = the_one_error(2, save_rank, dc.UnsupportedFormatError)
    for place in ("state_dict['a']", "state_dict['b'][1]", "'o0'", "'o1'"):
        assert place in str(error)
    assert "fine" not in str(error)
    assert not (tmp_path / "c").exists()


class Broken:
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise ValueError("by no means")


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: lambda: 1,
    "a lock": threading.Lock,
    "an object that raises": Broken,
}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", UNPICKLABLE)
def test_what_cannot_be_pickled_is_named_before_anything_is_written(
    tmp_path: Path, kind: str, *, trusted: bool
) -> None:
    value = UNPICKLABLE[kind]()
    sharded = cell([value])
    for state, key in (({"a": {"b": value}}, "state_dict['a']['b']"), ({"s": sharded}, "o")):
        with pytest.raises(dc.InvalidShardingError) as raised:
            dc.save(state, tmp_path / "c", trusted=trusted)
        assert raised.value.findings[0].key == key
        assert "cannot be pickled" in str(raised.value)
        assert "LocalNonpersistentObject" in str(raised.value)
        assert not (tmp_path / "c").exists()


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def hostile(marker: Path) -> dict[str, tuple[Any, str]]:
    """Values that would create the file ``marker`` when they are unpickled."""
    touch = f"touch {marker}"
    return {
        "os.system": (Calls(os.system, touch), "system"),
        "getattr": (Calls(getattr, Settings, "depth"), "getattr"),
        "os.system as a default factory": (
            collections.defaultdict(functools.partial(os.system, touch)),
            "partial",
        ),
        "pickle.loads": (Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))), "loads"),
        "deep inside": ({"a": [(1, namespace(x=Calls(os.system, touch)))]}, "system"),
    }


HOSTILE = list(hostile(Path("marker")))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_value_is_refused_and_never_executed(tmp_path: Path, name: str) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "c"
    value, word = hostile(marker)[name]
    template = {"o": cell()}
    dc.save({"o": cell(5), "step": 1}, folder, ("zarr", 2))
    torch.save(value, folder / "o" / "shard_0_1.pt")
    with pytest.raises(dc.UnsupportedFormatError, match=word):
        dc.load(template, folder)
    torch.save({"v": value}, folder / "common.pt")
    with pytest.raises(dc.UnsupportedFormatError, match=word):
        dc.load_common_state_dict(folder)
    with pytest.raises(dc.UnsupportedFormatError, match=word):
        run_ranks(2, lambda comm: dc.load({}, folder, comm=comm))
    # In other formats.
    torch.save({"v": value}, folder / "common.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(dc.CheckpointingException, match=r"common\.pt"):
        dc.load_common_state_dict(folder)
    (folder / "common.pt").write_bytes(pickle.dumps({"v": value}))
    with pytest.raises(dc.CheckpointingException, match=r"common\.pt"):
        dc.load_common_state_dict(folder)
    assert not marker.exists()


class PointersFromBytes:
    """An array of objects whose dtype denies that it has any, so that bytes become pointers."""

    def __reduce__(self) -> tuple[Any, ...]:
        shape, content = (1,), b"A" * 8
        state = (1, shape, LyingDtype(), False, content)
        return np.ndarray.__reduce__(np.empty(0))[0], (np.ndarray, (0,), b"b"), state


class LyingDtype:
    def __reduce__(self) -> tuple[Any, ...]:
        state = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
        return np.dtype, ("V8", False, True), state


class Hiding(io.BytesIO):
    """Pickles as a BytesIO with attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return io.BytesIO, (), (b"bytes", 0, {"hidden": [PointersFromBytes()]})


@pytest.mark.parametrize("value", [[PointersFromBytes()], Hiding()], ids=["plain", "hidden"])
def test_an_array_that_would_take_bytes_for_pointers_is_refused(tmp_path: Path, value: Any) -> None:
    """Looking at its elements would crash the process, or worse."""
    dc.save({"step": 1}, tmp_path)
    torch.save({"v": value}, tmp_path / "common.pt")
    with pytest.raises(dc.CheckpointingException, match=r"common\.pt"):
        dc.load_common_state_dict(tmp_path)


# The allow-list of the process.


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """As most are written today."""

    depth: int
    name: str = "x"


@BACKEND
def test_dataclasses_enums_and_extra_states_of_bytes_are_saved_and_loaded(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    """Classes that the user allowed, and what ``get_extra_state`` of TransformerEngine returns."""
    extra = io.BytesIO()
    torch.save({"scale": torch.ones(3), "history": 1}, extra)
    value = {"cfg": Settings(7), "frozen": Frozen(3, "y"), "c": [Colour.RED], "p": Pair(1, 2)}
    with torch.serialization.safe_globals([Settings, Frozen, Colour, Pair]):
        dc.save({"v": value, "o": cell(value), "e": cell(extra, "extra")}, tmp_path, backend)
        loaded = dc.load({"o": cell(), "e": cell(key="extra")}, tmp_path)
        assert same(loaded.pop("e"), extra)
        assert loaded == {"v": value, "o": value}
        dc.verify_checkpoint(tmp_path)
        assert Settings in torch.serialization.get_safe_globals()
    with pytest.raises(dc.UnsupportedFormatError, match="Settings"):
        dc.load_common_state_dict(tmp_path)


def test_what_the_user_allows_while_others_load_stays_allowed(tmp_path: Path) -> None:
    dc.save({"n": namespace(x=1)}, tmp_path)

    def load(_: int) -> None:
        dc.load_common_state_dict(tmp_path)

    try:
        with ThreadPoolExecutor(2) as pool:
            loads = pool.map(load, range(200))
            for _ in range(50):
                torch.serialization.add_safe_globals([Settings, Colour])
                dc.load_common_state_dict(tmp_path)
                assert {Settings, Colour} <= set(torch.serialization.get_safe_globals())
            assert len([*loads]) == 200
        assert {Settings, Colour} <= set(torch.serialization.get_safe_globals())
        assert argparse.Namespace not in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()


# Sharded leaves that hide.


def hiding_places() -> dict[str, Callable[[Any], Any]]:
    return {
        "a sharded object": lambda leaf: cell({"inner": leaf}),
        "a namespace": lambda leaf: namespace(model=leaf),
        "a simple namespace": lambda leaf: types.SimpleNamespace(model=[leaf]),
        "a deque": lambda leaf: collections.deque([leaf]),
        "an object of a user's class": Settings,
        "an array": lambda leaf: np.array([leaf], dtype=object),
        "deep": lambda leaf: {"a": [{"b": (namespace(x={"y": leaf}),)}]},
    }


LEAVES = [shard("w", torch.ones(2)), cell(5), dc.LocalNonpersistentObject(5)]


@pytest.mark.parametrize("place", hiding_places())
def test_a_leaf_that_hides_in_an_object_is_an_error_at_save_on_all_ranks(
    tmp_path: Path, place: str
) -> None:
    for leaf in LEAVES if place == "deep" else LEAVES[:1]:
        state = {"x": hiding_places()[place](leaf)}
        error = the_one_error(
            2,
            lambda comm: dc.save(state, tmp_path / "c", comm=comm),  # noqa: B023
            dc.InvalidShardingError,
        )
        for words in ("sharded leaf is inside", type(leaf).__name__, "dicts, lists and tuples"):
            assert words in str(error)
        assert not dc.check_is_distributed_checkpoint(tmp_path / "c")


# Ranks that differ.


def test_the_common_state_of_rank_0_is_saved_and_one_warning_names_differences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_rank(comm: Comm) -> None:
        state: dict[str, Any] = {"same": torch.ones(2), "rank": comm.rank, "deep": {"a": [1, 2]}}
        # Nothing is lost with these, which are no error.
        state["loss"] = torch.tensor(float(comm.rank))
        if comm.rank == 0:
            state["mean"] = torch.ones(2)
        if comm.rank == 1:
            state["only here"] = 5
        if comm.rank == 2:
            del state["deep"]["a"][1]
        dc.save(state, tmp_path, comm=comm)

    with caplog.at_level(logging.WARNING):
        run_ranks(3, save_rank)
    numbers = {"rank": 0, "deep": {"a": [1, 2]}, "loss": torch.tensor(0.0), "mean": torch.ones(2)}
    assert same(dc.load_common_state_dict(tmp_path), {"same": torch.ones(2), **numbers})
    (message,) = [record.getMessage() for record in caplog.records]
    lines = message.splitlines()
    assert "only rank 0's are saved" in lines[0]
    assert lines[1:-1] == [
        "  - state_dict['deep']['a'][1]: missing on rank 2",
        "  - state_dict['loss']: another value on ranks 1, 2",
        "  - state_dict['mean']: missing on ranks 1, 2",
        "  - state_dict['only here']: missing on rank 0, so not saved; is on rank 1",
        "  - state_dict['rank']: another value on ranks 1, 2",
    ]
    assert "ShardedObject(key, value" in lines[-1]


@pytest.mark.parametrize("kind", ["other values", "other shape", "only there", "no tensor on 0"])
def test_tensors_that_differ_between_ranks_are_an_error_with_keys_and_ranks(
    tmp_path: Path, kind: str
) -> None:
    def save_rank(comm: Comm) -> None:
        mine = {
            "other values": torch.full((2,), float(comm.rank > 0)),
            "other shape": torch.ones(2 + (comm.rank > 0)),
            "only there": torch.ones(2),
            "no tensor on 0": torch.ones(2) if comm.rank else 5,
        }[kind]
        model: dict[str, Any] = {"same": torch.ones(2), "w": mine}
        if kind == "only there" and comm.rank == 0:
            del model["w"]
        dc.save({"model": model, "step": comm.rank}, tmp_path / "c", comm=comm)

    error = the_one_error(3, save_rank, dc.InvalidShardingError)
    (finding,) = error.findings
    assert finding.key == "state_dict['model']['w']"
    assert finding.ranks == (1, 2)
    assert "ShardedTensor.from_rank_offsets" in str(error)
    assert not (tmp_path / "c").exists()


def test_what_differs_may_be_left_out_of_the_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        same = {"a": [torch.ones(2), namespace(x=1)]}
        return {**same, "rng": torch.full((2,), comm.rank), "time": 0.5 * comm.rank}

    def without_rng(common: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in common.items() if key not in ("rng", "time")}

    save_on(3, state, tmp_path / "a", preprocess_common_before_consistancy_check=without_rng)
    save_on(3, state, tmp_path / "b", validate_access_integrity=False)
    for name in "ab":
        assert dc.load_common_state_dict(tmp_path / name)["rng"].tolist() == [0, 0]
    assert caplog.text.count("another value on ranks 1, 2") == caplog.text.count("['time']")
