"""Chains of rules over every dtype, backend and sharding. The oracle is plain torch.

Each element of the oracle carries its source too, so that the dry run can be compared with it.
"""

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st

from dist_checkpointing import Checkpoint, Recipe, ShardedTensor, load
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import ELEMENT_TYPES, FLOATING
from dist_checkpointing.mapping import as_numpy
from dist_checkpointing.planning import (
    CastTo,
    Concat,
    Derivation,
    Drop,
    Keep,
    Missing,
    Rename,
    Resize,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
    derived_tensors,
)
from dist_checkpointing.serialization import get_default_load_sharded_strategy, preview_recipe
from dist_checkpointing.strategies import FullyParallelLoadStrategyWrapper
from dist_checkpointing.strategies.safetensors import model_files
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools import convert
from states import BACKENDS, cell, flat, save_on, shard, wholes
from tiers import examples

DTYPES = [row.name for row in ELEMENT_TYPES if row.name not in ("uint16", "uint32", "uint64")]
IN_SAFETENSORS = {*model_files.DTYPE_NAMES.values()}
KEPT = 8.0
"""What a template holds; every dtype has it, and bool makes True of it."""
ZEROS, TEMPLATE = 0, -1
"""Sources of the elements that nothing stored fills; others count from 1."""


@dataclass(frozen=True)
class Full:
    """A full tensor: values (exact: floats as float64), their sources, and the dtype it has."""

    values: torch.Tensor
    origin: torch.Tensor
    dtype: str

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Full":
        return replace(self, values=change(self.values), origin=change(self.origin))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def tensor(self) -> torch.Tensor:
        return self.values.to(getattr(torch, self.dtype)).contiguous()


def joined(parts: list[Full], how: Callable[[list[torch.Tensor]], torch.Tensor]) -> "Full":
    return replace(
        parts[0], values=how([p.values for p in parts]), origin=how([p.origin for p in parts])
    )


State = dict[str, Full]
Step = tuple[list[Rule], State]


def grown(own: Full, axis: int, size: int, source: int, value: float = 0) -> Full:
    shape = (*own.shape[:axis], size - own.shape[axis], *own.shape[axis + 1 :])
    more = torch.full(shape, value, dtype=torch.float64).to(own.values.dtype)
    rows = Full(more, torch.full(shape, source), own.dtype)
    return joined([own, rows], lambda parts: torch.cat(parts, axis))


def unflattened(tensor: torch.Tensor, axis: int, *extents: int) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:axis], *extents, *tensor.shape[axis + 1 :])


def stems(full: State) -> dict[str, dict[int, Full]]:
    """Keys are ``STEM.NUMBER``: the tensors by both."""
    found: dict[str, dict[int, Full]] = {}
    for key, own in full.items():
        stem, _, number = key.partition(".")
        found.setdefault(stem, {})[int(number)] = own
    return found


def chosen(draw: st.DrawFn, full: State) -> tuple[str, list[str]]:
    """A pattern of a random kind with the group ``m`` (the stem), and the keys that it matches."""
    some = draw(st.sampled_from(sorted(full)))
    stem, _, number = some.partition(".")
    stem2 = draw(st.sampled_from(sorted(stems(full))))
    kinds: dict[str, Callable[[str, str], bool]] = {
        rf"(?P<m>{stem})\.{number}": lambda s, n: (s, n) == (stem, number),
        f"{{m}}.{number}": lambda _, n: n == number,
        rf"(?P<m>{stem}|{stem2})\.\d+": lambda s, _: s in (stem, stem2),
        "{m}.{i}": lambda *_: True,
        rf"(?P<m>(?!{stem}\.).*)\.(\d+)": lambda s, _: s != stem,
    }
    pattern = draw(st.sampled_from(sorted(kinds)))
    return pattern, [key for key in full if kinds[pattern](*key.split("."))]


# Random rules, each with what it makes of the full tensors.


def rename(draw: st.DrawFn, full: State, new: str) -> Step | None:
    by_stem = sorted(stems(full))
    if len(by_stem) > 1 and draw(st.booleans()):  # two stems change places
        a, b = draw(st.permutations(by_stem))[:2]
        names = {a: b, b: a}
        rules: list[Rule] = [
            Rename(f"{a}.{{i}}", to=f"{new}.{{i}}"),
            Rename(rf"{b}\.(\d+)", to=rf"{a}.\1"),
            Rename(rf"{new}\.(?P<own>.+)", to=rf"{b}.\g<own>"),
        ]
    else:
        a = draw(st.sampled_from(by_stem))
        names, rules = {a: new}, [Rename(f"({a}).{{i}}", to=new + ".{i}")]
    parts = [(key.partition("."), own) for key, own in full.items()]
    return rules, {f"{names.get(s, s)}.{n}": own for (s, _, n), own in parts}


def drop(draw: st.DrawFn, full: State, _: str) -> Step | None:
    pattern, keys = chosen(draw, full)
    if not 0 < len(keys) < len(full):
        return None
    if draw(st.booleans()):
        return [Keep([pattern, "nothing"])], {key: full[key] for key in keys}
    return [Drop(["nothing", pattern])], {k: own for k, own in full.items() if k not in keys}


def cast(draw: st.DrawFn, full: State, _: str) -> Step | None:
    pattern, keys = chosen(draw, full)
    dtype = draw(st.sampled_from(sorted(FLOATING)))
    changed = {k: replace(full[k], dtype=dtype) for k in keys if full[k].dtype in FLOATING}
    return [CastTo(pattern, draw(st.sampled_from(["", "torch."])) + dtype)], {**full, **changed}


def transpose(draw: st.DrawFn, full: State, _: str) -> Step | None:
    pattern, keys = chosen(draw, full)
    order = None
    if draw(st.booleans()):
        if len({len(full[k].shape) for k in keys}) != 1:
            return None
        order = draw(st.permutations(range(len(full[keys[0]].shape))))
    turned = {
        k: full[k].each(lambda t: t.permute([*reversed(range(t.ndim))] if order is None else order))
        for k in keys
    }
    return [Transpose(pattern, order)], {**full, **turned}


def resize(draw: st.DrawFn, full: State, _: str) -> Step | None:
    pattern, keys = chosen(draw, full)
    ndim = min((len(full[k].shape) for k in keys), default=0)
    if not ndim:
        return None
    axis, size = draw(st.integers(-ndim, ndim - 1)), draw(st.integers(0, 7))

    def resized(own: Full) -> Full:
        place = axis % len(own.shape)
        if size <= own.shape[place]:
            return own.each(lambda t: t.narrow(place, 0, size))
        return grown(own, place, size, ZEROS)

    return [Resize(pattern, axis, size)], {**full, **{key: resized(full[key]) for key in keys}}


def split(draw: st.DrawFn, full: State, new: str) -> Step | None:
    stem, own = draw(st.sampled_from(sorted(stems(full).items())))
    ndim = min(len(part.shape) for part in own.values())
    ways = [
        (axis, groups, sizes)
        for axis, groups, sizes in itertools.product(
            range(ndim), (1, 2, 3), ((1, 1), (2, 1), (1, 2, 1), (3, 1, 1))
        )
        if all(part.shape[axis] % (groups * sum(sizes)) == 0 for part in own.values())
    ]
    if not ways:
        return None
    axis, groups, sizes = draw(st.sampled_from(ways))
    names = [f"{new}{'abc'[place]}" for place in range(len(sizes))]
    state = {key: rest for key, rest in full.items() if key.partition(".")[0] != stem}
    for number, part in own.items():
        for place, name in enumerate(names):

            def rows(t: torch.Tensor, place: int = place) -> torch.Tensor:
                # [groups, sum(sizes), unit] rows, of which each name has its own.
                unit = t.shape[axis] // groups // sum(sizes)
                cut = unflattened(t, axis, groups, sum(sizes), unit)
                return cut.narrow(axis + 1, sum(sizes[:place]), sizes[place]).flatten(
                    axis, axis + 2
                )

            state[f"{name}.{number}"] = part.each(rows)
    into = [f"{name}.{{i}}" for name in names]
    given = None if sizes == (1, 1) and draw(st.booleans()) else sizes
    return [Split(f"{stem}.{{i}}", into, axis, given, groups)], state


def concat(draw: st.DrawFn, full: State, new: str) -> Step | None:
    by_stem = stems(full)
    ways = []
    for a, b in itertools.permutations(by_stem, 2):
        if by_stem[a].keys() != by_stem[b].keys():
            continue
        ndim = min(len(part.shape) for part in (*by_stem[a].values(), *by_stem[b].values()))
        for axis, groups in itertools.product(range(ndim), (1, 2, 3)):
            pairs = [(by_stem[a][n], by_stem[b][n]) for n in by_stem[a]]
            if all(
                (x.dtype, *x.shape[:axis], 0, *x.shape[axis + 1 :])
                == (y.dtype, *y.shape[:axis], 0, *y.shape[axis + 1 :])
                and not (x.shape[axis] % groups or y.shape[axis] % groups)
                for x, y in pairs
            ):
                ways.append((a, b, axis, groups))
    if not ways:
        return None
    a, b, axis, groups = draw(st.sampled_from(ways))

    def woven(parts: list[torch.Tensor]) -> torch.Tensor:
        cut = [unflattened(t, axis, groups, t.shape[axis] // groups) for t in parts]
        return torch.cat(cut, axis + 1).flatten(axis, axis + 1)

    state = {key: own for key, own in full.items() if key.partition(".")[0] not in (a, b)}
    for number in by_stem[a]:
        state[f"{new}.{number}"] = joined([by_stem[a][number], by_stem[b][number]], woven)
    given = axis - draw(st.sampled_from([0, len(by_stem[a][min(by_stem[a])].shape)]))
    if len({len(part.shape) for part in by_stem[a].values()}) > 1:
        given = axis
    return [Concat([f"{a}.{{i}}", f"{b}.{{i}}"], f"{new}.{{i}}", given, groups)], state


def stack(draw: st.DrawFn, full: State, new: str) -> Step | None:
    fits = [
        stem
        for stem, own in sorted(stems(full).items())
        if sorted(own) == [*range(len(own))]
        and len({(part.shape, part.dtype) for part in own.values()}) == 1
    ]
    if not fits:
        return None
    stem = draw(st.sampled_from(fits))
    own = stems(full)[stem]
    state = {key: rest for key, rest in full.items() if key.partition(".")[0] != stem}
    state[f"{new}.5"] = joined([own[n] for n in range(len(own))], torch.stack)
    return [Stack(rf"{stem}.{{i}}", into=f"{new}.5")], state


def unstack(draw: st.DrawFn, full: State, new: str) -> Step | None:
    fits = sorted(key for key, own in full.items() if own.shape and 0 < own.shape[0] < 6)
    if not fits:
        return None
    key = draw(st.sampled_from(fits))
    state = {k: own for k, own in full.items() if k != key}
    for number in range(full[key].shape[0]):
        state[f"{new}.{number}"] = full[key].each(lambda t, n=number: t[n])  # type: ignore[misc]
    return [Unstack(key, into=f"{new}.{{i}}")], state


STEPS = [rename, drop, cast, transpose, resize, split, split, concat, concat, stack, unstack]


def random_values(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    seed = draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATING:
        # Small and huge ones: what overflows where it is cast is inf or NaN in both.
        scale = 10.0 ** torch.randint(-6, 7, shape, generator=generator)
        values = torch.randn(shape, generator=generator) * scale
        return values.to(getattr(torch, dtype))
    own: torch.dtype = getattr(torch, dtype)
    most = 2 if dtype == "bool" else 120
    bits = torch.randint(0, most, (math.prod(shape) * own.itemsize,), generator=generator)
    return bits.to(torch.uint8).view(own).reshape(shape)


def exact(values: torch.Tensor, number: int) -> Full:
    dtype = str(values.dtype).removeprefix("torch.")
    kept = values.double() if dtype in FLOATING else values
    return Full(kept, torch.full(values.shape, number), dtype)


@dataclass(frozen=True)
class Case:
    """Stored tensors, a recipe without what needs a template, and what it makes of them."""

    stored: dict[str, torch.Tensor]
    rules: list[Rule]
    full: State


@st.composite
def cases(draw: st.DrawFn) -> Case:
    extents = st.integers(0, 4) | st.sampled_from([4, 6, 8, 12])
    stored: dict[str, torch.Tensor] = {}
    for stem in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(extents, max_size=3)))
        dtype = draw(st.sampled_from([*sorted(FLOATING), *DTYPES]))
        for number in range(draw(st.integers(1, 3))):
            stored[f"{stem}.{number}"] = random_values(draw, shape, dtype)
        if draw(st.booleans()):  # what can be joined with it
            for key in [key for key in stored if key[0] == stem]:
                stored[f"twin{key}"] = random_values(draw, shape, dtype)
    full = {key: exact(own, n) for n, (key, own) in enumerate(stored.items(), 1)}
    rules: list[Rule] = []
    for number in range(draw(st.integers(1, 8))):
        step = draw(st.sampled_from(STEPS))(draw, full, f"n{number}")
        if step is not None and step[1]:
            rules += step[0]
            full = step[1]
    # A cast is done at the end, once.
    return Case(stored, rules, full)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit; a NaN may be another NaN."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if str(found.dtype).removeprefix("torch.") in FLOATING:
        a, b = found.double(), expected.double()
        nan = a.isnan() & b.isnan()
        return bool(((a == b) & (a.signbit() == b.signbit()) | nan).all())
    return as_numpy(found).tobytes() == as_numpy(expected).tobytes()


# Random shardings.


def leaves(
    rng: torch.Generator, key: str, own: torch.Tensor, comm: Comm, *, saved: bool, kinds: list[str]
) -> tuple[ShardedTensor, torch.Tensor]:
    """A shard of this rank, and its values; ``rng`` draws the same on all ranks."""

    def drawn(stop: int) -> int:
        return int(torch.randint(0, stop, (), generator=rng))

    def ends(extent: int) -> list[int]:
        """Where the part of this rank begins and ends."""
        cuts = sorted(drawn(extent + 1) for _ in range(count - 1))
        return [0, *cuts, extent][rank : rank + 2]

    kind = kinds[drawn(len(kinds))] if own.ndim else "whole"
    count, rank = comm.world_size, comm.rank
    if kind == "rows":
        axis = drawn(own.ndim)
        start, stop = ends(own.shape[axis])
        offset = [start if place == axis else 0 for place in range(own.ndim)]
        return leaf(key, own.narrow(axis, start, stop - start), own, offset)
    if kind == "flat":
        start, stop = ends(own.numel())
        return flat(key, own, start, stop), own.reshape(-1)[start:stop]
    if kind == "prepended" and own.shape[0] and (not saved or own.shape[0] == count):
        row = rank if saved else drawn(own.shape[0])
        part = own[row]
        return shard(key, part.clone(), (0, row, own.shape[0]), prepend_axis_num=1), part
    if kind == "box":
        starts = [drawn(extent + 1) for extent in own.shape]
        stops = [a + drawn(e - a + 1) for a, e in zip(starts, own.shape, strict=True)]
        box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        return leaf(key, own[box], own, starts)
    return leaf(key, own, own, [0] * own.ndim, rank)


def leaf(
    key: str, part: torch.Tensor, own: torch.Tensor, offset: list[int], replica: int = 0
) -> tuple[ShardedTensor, torch.Tensor]:
    made = ShardedTensor.from_offset(key, part.clone(), own.shape, offset, replica_id=replica)
    return made, part


def written(
    case: Case, folder: Path, backend: Any, world: int, seed: int, recipe: Recipe | None = None
) -> None:
    def state(comm: Comm) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(seed)
        tensors = {
            key: leaves(rng, key, own, comm, saved=True, kinds=SAVED_KINDS)[0]
            for key, own in case.stored.items()
        }
        return {**tensors, "rng": cell("a.rng", comm.rank, comm), "step": 3}

    save_on(world, state, folder, backend, recipe=recipe)


SAVED_KINDS = ["whole", "rows", "rows", "flat", "prepended"]
LOADED_KINDS = ["whole", "rows", "rows", "flat", "prepended", "box", "box"]


@examples(50)
@given(
    case=cases(),
    backend=st.sampled_from(BACKENDS),
    worlds=st.tuples(*[st.integers(1, 3)] * 2),
    seed=st.integers(0, 10**6),
    verify=st.sampled_from([True, False]),
    given_memory=st.sampled_from([True, True, False]),
    turned=st.booleans(),
    shares=st.booleans(),
    more=st.lists(st.sampled_from(["zeros", "template"]), max_size=2),
    few=st.sampled_from([0, 32]),
)
def test_a_load_is_what_torch_makes(
    *,
    case: Case,
    backend: Any,
    worlds: tuple[int, int],
    seed: int,
    verify: bool,
    given_memory: bool,
    turned: bool,
    shares: bool,
    more: list[str],
    few: int,
) -> None:
    rules: list[Rule] = [*case.rules]
    full = dict(case.full)
    for number, fill in enumerate(more):  # what the template has more
        rules.append(Missing(f"missing{number}.{{i}}", fill=fill))  # type: ignore[arg-type]
        source, value = (ZEROS, 0.0) if fill == "zeros" else (TEMPLATE, KEPT)
        nothing = Full(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64), "bfloat16")
        full[f"missing{number}.0"] = grown(nothing, 0, 2, source, value)
        key = sorted(case.full)[number % len(case.full)]
        if number < len(case.full) and full[key].shape:  # more rows, as many as the template has
            axis = len(full[key].shape) - 1
            full[key] = grown(full[key], axis, full[key].shape[axis] + number, source, value)
            rules.append(Resize(key, axis, fill=fill))  # type: ignore[arg-type]
    expected = {key: own.tensor() for key, own in full.items()}
    with (
        tempfile.TemporaryDirectory(prefix="recipes") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(derived_tensors, "_FEW", few)  # above which pieces are found in columns
        folder = Path(name) / "ckpt"
        written(case, folder, backend, worlds[0], seed)

        def on_rank(comm: Comm) -> None:
            rng = torch.Generator().manual_seed(seed + 1)
            template: dict[str, Any] = {}
            wanted: dict[str, torch.Tensor] = {}
            for key, own in expected.items():
                leaf, wanted[key] = leaves(rng, key, own, comm, saved=False, kinds=LOADED_KINDS)
                template[key] = leaf
                is_given = given_memory or "template" in more
                leaf.data = filled(wanted[key], turned=turned) if is_given else None
            strategy = None
            if shares:
                reading: Any = get_default_load_sharded_strategy(str(folder))
                strategy = FullyParallelLoadStrategyWrapper(reading, comm, min_shared_bytes=0)
            found: Any = load(
                template, folder, strategy, comm=comm, recipe=Recipe(*rules), verify=verify,
                strict="raise_unexpected",
            )  # fmt: skip
            for key, own in wanted.items():
                assert same(found[key], own), (key, rules, found[key], own)
                assert template[key].data is None or found[key] is template[key].data
            assert found["step"] == 3

        run_ranks(worlds[1], on_rank)
        made = preview_recipe(Recipe(*rules), folder, wholes(expected))
        assert_says(made, case.stored, full)


def filled(like: torch.Tensor, *, turned: bool) -> torch.Tensor:
    """Memory to fill, which holds what stays where nothing is stored."""
    memory = torch.full(like.shape, KEPT, dtype=torch.float64).to(like.dtype)
    return memory.mT.contiguous().mT if turned and memory.ndim > 1 else memory


def assert_says(made: Derivation, stored: dict[str, torch.Tensor], full: State) -> None:
    """The dry run says what the load has done."""
    shapes = {key: (own.shape, own.dtype.name) for key, own in made.tensors.items()}
    assert shapes == {key: (own.shape, own.dtype) for key, own in full.items()}
    names = dict(enumerate(stored, 1))
    used: dict[str, int] = {}
    for key, own in full.items():
        by_number = Counter(own.origin.flatten().tolist())
        for number, count in by_number.items():
            if number > 0:
                used[names[number]] = used.get(names[number], 0) + count
        tensor = made.tensors[key]
        assert {*tensor.sources} == {names[number] for number in by_number if number > 0}
        fills = {"zeros" if number == ZEROS else "template" for number in by_number if number < 1}
        assert {piece.fill for piece in tensor.pieces if piece.key is None} == fills
    sizes = {key: own.numel() for key, own in stored.items()}
    assert {*made.left_out} == {key for key in stored if sizes[key] and key not in used}
    assert made.cut == {
        key: (sizes[key] - count, sizes[key]) for key, count in used.items() if count < sizes[key]
    }


def assert_made(folder: Path, case: Case) -> Checkpoint:
    source = Checkpoint.open(folder)
    assert sorted(source.index) == sorted(case.full)
    for key, own in case.full.items():
        assert same(source[key][...], own.tensor()), (key, case.rules)
    return source


@examples(25)
@given(
    case=cases(),
    backend=st.sampled_from(BACKENDS),
    world=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    to=st.sampled_from(
        ["tensorstore", "zarr", "zarr:1", "torch_dist", "safetensors", "torch_file"]
    ),
)
def test_a_conversion_is_what_torch_makes(
    case: Case, backend: Any, world: int, seed: int, to: str
) -> None:
    # The format has no name for some dtypes, which is refused before anything is written.
    assume(to != "safetensors" or {own.dtype for own in case.full.values()} <= IN_SAFETENSORS)
    with tempfile.TemporaryDirectory(prefix="recipes") as name:
        folder, out = Path(name) / "ckpt", Path(name) / "out"
        written(case, folder, backend, world, seed)
        lossy = convert.ConvertOptions(lossy=True)
        done = convert.convert(folder, out, to, recipe=Recipe(*case.rules), options=lossy)
        assert_made(out, case)
        is_empty = not any(own.numel() for own in case.stored.values())
        assert (done.not_verified is None) != is_empty


@examples(35)
@given(
    case=cases(),
    backend=st.sampled_from([*BACKENDS, ("safetensors", 1)]),
    world=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_a_save_is_what_torch_makes(case: Case, backend: Any, world: int, seed: int) -> None:
    is_model = backend[0] == "safetensors"
    assume(not is_model or {own.dtype for own in case.full.values()} <= IN_SAFETENSORS)
    recipe = Recipe(*case.rules, *([Drop("{x*}.rng")] if is_model else []))
    with tempfile.TemporaryDirectory(prefix="recipes") as name:
        written(case, Path(name) / "ckpt", backend, world, seed, recipe)
        source = assert_made(Path(name) / "ckpt", case)
        if not is_model:
            assert source.common == {"step": 3}
            assert {handle.shape for handle in source.objects.values()} <= {(world,)}
