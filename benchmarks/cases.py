"""What is measured, and what should be found."""

from __future__ import annotations

import torch

from behind import open_behind
from conversions import BUDGET_MIB, ROUTES, name_of, open_conversions
from goals import Goal, as_fast, at_most
from incremental import FULL as _FULL, INCREMENTAL as _SHARED, ChangedPart
from object_store import DCP, RAW, open_store
from peers import COPY, EXCHANGE, WITH_COPIES, WITHOUT, open_peers
from planning import PlanCase, flattened_job, model_job, open_cached, pieces_job
from reads import open_repeated_loads, open_slices
from runner import Case
from save_load import SaveLoad
from state import State
from trust import ALL, PLAIN, SAMPLE, open_trust

_SQUARE = (2048, 2048)
_GIB = State(64, _SQUARE)
_OURS, _CHECKED, _DEFAULTS = "tensorstore 1", "tensorstore 1 + checksum", "tensorstore 1, defaults"
_PREAD, _MODEL = "tensorstore 1 (pread)", "safetensors 1"
_RAW, _DCP, _SAFE = "raw", "DCP best", "safetensors"
_ZARRS = ("zarr 2", "zarr 1")
_WAYS_OF_DCP = ("torch_dist 1", "DCPWriter")
_ALL_WAYS = (_DCP, "megatron-core", _OURS, _CHECKED, *_ZARRS, *_WAYS_OF_DCP)
_MOST_MIB, _MOST_BYTES = 64, 200


def _memory(state: State, *ways: str, measures: tuple[str, ...] = ("save", "load")) -> list[Goal]:
    """64 MiB and 200 bytes a tensor beyond the state."""
    limit = _MOST_MIB + _MOST_BYTES * state.num_tensors / 2**20
    return [at_most(way, f"{what} MiB", limit) for way in ways for what in measures]


def _small(state: State, ratio: float) -> list[Goal]:
    """Many small tensors: safetensors' speed, and the price of what is on by default."""
    return [
        as_fast(_OURS, "save s", _SAFE, ratio),
        as_fast(_OURS, "load s", _SAFE, ratio),
        as_fast(_DEFAULTS, "save s", _SAFE, 1 / 1.5),
        as_fast(_DEFAULTS, "load s", _SAFE, 1 / 1.5),
        *_memory(state, _OURS, _CHECKED),
    ]


def _through_dcp(*names: str) -> list[Goal]:
    """Our ways to and from torch DCP are not slower than it."""
    return [as_fast(name, f"{what} s", _DCP) for name in names for what in ("save", "load")]


def _resharding(saved: int, loaded: int, axis: int, mib: int, goals: tuple[Goal, ...]) -> Case:
    cut = ("rows", "columns")[axis]
    state = State(mib // 16, _SQUARE, save_ranks=saved, load_ranks=loaded, axis=axis)
    return Case(
        f"reshard-{saved}-{loaded}-{cut}",
        f"{mib} MiB saved by {saved} ranks, loaded by {loaded}, cut by {cut}",
        SaveLoad(state, (_RAW, _DCP, _OURS, _PREAD), ("load",)),
        ranks=max(saved, loaded),
        seconds=mib / 20,
        goals=goals,
        gib=2,
    )


def _model(ranks: int, axis: int, saved: float, *loads: Goal) -> Case:
    """Saves as safetensors: all ranks write the same files."""
    cut = ("rows", "columns")[axis]
    state = State(32, _SQUARE, save_ranks=ranks, load_ranks=ranks, axis=axis)
    goals = (
        as_fast(_MODEL, "save s", _RAW, saved),
        at_most(_MODEL, "written / state", 1.01),
        *_memory(state, _MODEL),
    )
    return Case(
        f"model-{ranks}-{cut}",
        f"512 MiB in 32 tensors, {ranks} ranks, cut by {cut}, as the files of a model",
        SaveLoad(state, (_RAW, _OURS, _MODEL)),
        ranks=ranks,
        seconds=20,
        goals=(*goals, *loads),
        gib=2,
    )


_BF16 = State(16, (4096, 2048), torch.bfloat16)
_ONE = State(1, (32768, 16384))
_SMALL = State(5000, (1024,))
_MANY = State(100_000, (256,))
_TWO = State(64, _SQUARE, save_ranks=2, load_ranks=2, axis=0)
_SMALL_TWO = State(5000, (1024,), save_ranks=2, load_ranks=2)
_FOUR = State(16, _SQUARE, save_ranks=4, load_ranks=4, axis=0)
_BEHIND = ("ours, copy", "ours, background")
_PEERS_BEHIND = ("DCP, thread", "DCP, process")

SAVES_AND_LOADS = (
    Case(
        "one-rank",
        "1 GiB in 64 tensors, fp32, one rank",
        SaveLoad(_GIB, (_RAW, "memcpy", "torch.save", _SAFE, "DCP default", *_ALL_WAYS)),
        seconds=120,
        goals=(
            as_fast(_OURS, "save s", _RAW, 0.95),
            as_fast(_CHECKED, "save s", _RAW, 0.85),
            as_fast(_OURS, "load s", _RAW, 1),
            as_fast(_OURS, "save s", _DCP, 1.5),
            as_fast(_OURS, "save s", "DCP default", 3),
            as_fast(_OURS, "load s", _DCP, 2),
            as_fast(_OURS, "load s", "DCP default", 2),
            *_through_dcp(*_WAYS_OF_DCP),
            *_memory(_GIB, _OURS, _CHECKED),
        ),
        gib=3,
    ),
    Case(
        "durable",
        "1 GiB in 64 tensors, one rank, durable",
        SaveLoad(
            State(64, _SQUARE, durable=True), (_RAW, _SAFE, _DCP, _CHECKED), ("save",), calls=1
        ),
        rounds=7,
        seconds=50,
        goals=(
            as_fast(_CHECKED, "save s", _RAW, 0.95),
            *_memory(_GIB, _CHECKED, measures=("save",)),
        ),
        gib=3,
    ),
    Case(
        "bf16",
        "256 MiB in 16 tensors, bf16, one rank",
        SaveLoad(_BF16, (_RAW, _DCP, _OURS, "zarr 2")),
        seconds=15,
        goals=(
            as_fast(_OURS, "save s", _RAW, 0.85),
            as_fast(_OURS, "load s", _RAW, 0.85),
            *_memory(_BF16, _OURS),
        ),
    ),
    Case(
        "one-tensor",
        "one tensor of 2 GiB: memory",
        SaveLoad(_ONE, (_OURS, _CHECKED, "zarr 2")),
        rounds=0,
        seconds=12,
        goals=tuple(_memory(_ONE, _OURS, _CHECKED)),
        gib=5,
    ),
    Case(
        "two-ranks",
        "1 GiB in 64 tensors, two ranks",
        SaveLoad(_TWO, (_RAW, _DCP, "megatron-core", _OURS, _CHECKED, *_WAYS_OF_DCP)),
        ranks=2,
        seconds=60,
        goals=(
            as_fast(_OURS, "save s", _RAW, 0.9),
            as_fast(_OURS, "load s", _RAW, 0.9),
            as_fast(_OURS, "save s", _DCP, 1.2),
            as_fast(_OURS, "load s", _DCP, 2),
            *_through_dcp(*_WAYS_OF_DCP),
            *_memory(_TWO, _OURS),
        ),
        gib=3,
    ),
    Case(
        "four-ranks",
        "256 MiB in 16 tensors, four ranks",
        SaveLoad(_FOUR, (_RAW, _DCP, _OURS, "zarr 2")),
        ranks=4,
        seconds=15,
        goals=tuple(_memory(_FOUR, _OURS)),
    ),
    Case(
        "small-tensors",
        "5,000 tensors of 4 KiB, one rank",
        SaveLoad(_SMALL, (_RAW, "torch.save", _SAFE, _DEFAULTS, *_ALL_WAYS)),
        seconds=75,
        goals=(
            *_small(_SMALL, 1),
            as_fast(_OURS, "save s", _DCP, 10),
            as_fast(_OURS, "load s", _DCP, 8),
            *_through_dcp(*_WAYS_OF_DCP),
        ),
    ),
    Case(
        "many-tensors",
        "100,000 tensors of 1 KiB, one rank",
        SaveLoad(_MANY, (_RAW, _SAFE, _DCP, _OURS, _CHECKED, _DEFAULTS)),
        seconds=90,
        goals=tuple(_small(_MANY, 3)),
    ),
    Case(
        "small-two-ranks",
        "5,000 tensors of 4 KiB, two ranks",
        SaveLoad(_SMALL_TWO, (_RAW, _DCP, _OURS)),
        ranks=2,
        seconds=20,
        goals=(at_most(_OURS, "files", 39),),
    ),
    _resharding(
        4,
        2,
        0,
        512,
        (as_fast(_OURS, "load s", _DCP, 3), at_most(_PREAD, "read / needed", 1.05)),
    ),
    _resharding(
        4,
        2,
        1,
        512,
        (as_fast(_OURS, "load s", _DCP, 2.5), at_most(_PREAD, "read / needed", 1.1)),
    ),
    *(_model(ranks, 0, 0.9, as_fast(_MODEL, "load s", _OURS, 0.9)) for ranks in (2, 4)),
    *(_model(ranks, 1, 0.6) for ranks in (2, 4)),
    _resharding(2, 4, 0, 256, (at_most(_PREAD, "read / needed", 1.05),)),
    _resharding(2, 4, 1, 256, (at_most(_PREAD, "read / needed", 1.1),)),
)

READS = (
    Case(
        "slices",
        "2,000 slices of a checkpoint of 100,000 tensors",
        open_slices,
        seconds=30,
        goals=(at_most(_OURS, "a slice us", 50), at_most(_OURS, "kept by the same again MiB", 1)),
    ),
    Case(
        "repeated-loads",
        "loads of a checkpoint of 20,000 tensors, in one process",
        open_repeated_loads,
        seconds=40,
        goals=(at_most(_OURS, "grown MiB", 8),),
    ),
)

BEHIND = Case(
    "async",
    "saves behind a training, 16 MiB tensors, one rank",
    open_behind,
    seconds=110,
    goals=(
        at_most("ours, copy", "blocked / memcpy", 1.25),
        at_most("ours, background", "blocked ms", 20),
        at_most("ours, background", "captured / memcpy", 1.25),
        *(as_fast(way, "behind s", "ours, synchronous save", 0.8) for way in _BEHIND),
        *(at_most(way, "beyond a copy MiB", 160) for way in _BEHIND),
        # Two that do the same come out 5 % apart; a millisecond is nothing to a training.
        *(as_fast("ours, copy", "blocked ms", peer, 0.95) for peer in _PEERS_BEHIND),
        *(
            as_fast("ours, background", "blocked ms", f"{peer}, async staging", 0.95, slack=2)
            for peer in _PEERS_BEHIND
        ),
        *(
            as_fast("ours, background", "captured s", f"{peer}, async staging", 0.95)
            for peer in _PEERS_BEHIND
        ),
    ),
)

PEERS = Case(
    "peer-copies",
    "128 MiB of each of two machines, copied to the other one, and saved behind a training",
    open_peers,
    ranks=2,
    rounds=7,
    seconds=90,
    goals=(
        as_fast(COPY, "copy s", EXCHANGE, 1 / 1.3),
        as_fast(WITH_COPIES, "blocked s", WITHOUT, 0.9),
    ),
    by_name=True,
)

TRUST = Case(
    "trust",
    "512 MiB that two ranks hold as replicas, durable: replicas compared, fingerprints kept",
    open_trust,
    ranks=2,
    rounds=7,
    seconds=60,
    goals=(
        as_fast(SAMPLE, "save s", PLAIN, 1 / 1.01),
        as_fast(ALL, "save s", PLAIN, 1 / 1.1),
    ),
    gib=2,
)

CONVERSIONS = Case(
    "conversions",
    "2 GiB converted from and to every format",
    open_conversions,
    rounds=1,
    seconds=200,
    goals=tuple(at_most(name_of(route), "peak MiB", BUDGET_MIB) for route in ROUTES),
    by_name=True,
    gib=16,
)

STORE = Case(
    "object-store",
    "512 MiB in 32 tensors, saved to an object store and loaded from it",
    open_store,
    seconds=400,
    goals=(
        *(as_fast(_OURS, f"{what} s", RAW, 0.8) for what in ("save", "load")),
        *(as_fast(_OURS, f"{what} s", DCP, 3) for what in ("save", "load")),
        *(as_fast(_OURS, f"{what}, CPU a GiB s", DCP, 3) for what in ("save", "load")),
    ),
    by_name=True,
)

INCREMENTAL = tuple(
    Case(
        f"incremental-{name}",
        f"1 GiB in 400 tensors, durable, saved again when {what} has changed",
        part,
        rounds=7,
        seconds=60,
        goals=goals,
        gib=6,
    )
    for name, what, part, goals in (
        (
            "lora",
            "1 % of it",
            ChangedPart(every=100),
            (
                at_most(_SHARED, "written / state", 0.015),
                as_fast(_SHARED, "save s", _FULL, 1 / 0.15),
            ),
        ),
        (
            "frozen",
            "all but 30 % of it",
            ChangedPart(every=1, frozen=120),
            (at_most(_SHARED, "written / state", 0.705),),
        ),
        ("all", "all of it", ChangedPart(every=1), (as_fast(_SHARED, "save s", _FULL, 1 / 1.05),)),
    )
)

_RANKS = (64, 256, 1024, 4096, 16384)
_AT_1024 = "ours, 1,024 x 1,000"
_FLATTENED, _PIECES, _LARGEST = "ours, 1,024 x 500", "ours, 1 x 100,000", "ours, 16,384 x 5,000"

PLANNING = (
    Case(
        "plan-ranks",
        "ranks x tensors a rank: a model with 8 tensor parallel ranks and 8 stages",
        PlanCase(
            model_job,
            [*((ranks, 1000) for ranks in _RANKS), (100_000, 10)],
            [(ranks, 1000) for ranks in _RANKS[:2]],
        ),
        seconds=120,
        goals=(
            at_most(_AT_1024, "save plan s", 2),
            as_fast("ours, 256 x 1,000", "save plan s", "torch DCP, 256 x 1,000", 20),
            at_most("ours, 16,384 x 1,000", "load plan s", 0.1),
            at_most("ours, 100,000 x 10", "load plan s", 0.1),
            at_most("ours, 16,384 x 1,000", "sent / shard bytes", 16),
            as_fast(_AT_1024, "index bytes", "ours, 64 x 1,000"),
        ),
        planning=True,
    ),
    Case(
        "plan-again",
        "the plan of a second save of 5,000 tensors",
        open_cached,
        rounds=9,
        seconds=5,
        goals=(at_most("ours", "plan ms", 10), at_most("ours", "sent bytes", 64)),
        planning=True,
    ),
    Case(
        "plan-flattened",
        "1,024 ranks of a distributed optimizer x 500 flattened parameters",
        PlanCase(flattened_job, [(1024, 500)], tiny=(8, 5)),
        seconds=60,
        goals=(
            at_most(_FLATTENED, "save plan s", 0.5),
            at_most(_FLATTENED, "read index s", 0.1),
            at_most(_FLATTENED, "load plan s", 0.1),
            at_most(_FLATTENED, "peak MiB", 100),
        ),
        planning=True,
    ),
    Case(
        "plan-pieces",
        "one tensor in 100,000 flattened pieces, and a load of five of them",
        PlanCase(pieces_job, [(100_000,)], tiny=(100,)),
        seconds=30,
        goals=(at_most(_PIECES, "load plan s", 0.02),),
        planning=True,
    ),
    Case(
        "plan-growth",
        "ranks x 5,000 shards a rank: how memory and time of one rank grow",
        PlanCase(model_job, [(ranks, 5000) for ranks in (512, 1024, 2048, 4096, 8192, 16384)]),
        rounds=3,
        seconds=80,
        goals=(at_most(_LARGEST, "save plan s", 10), at_most(_LARGEST, "peak MiB", 1024)),
        planning=True,
    ),
)

CASES = {
    case.name: case
    for case in (
        *SAVES_AND_LOADS,
        *INCREMENTAL,
        *READS,
        BEHIND,
        PEERS,
        TRUST,
        STORE,
        CONVERSIONS,
        *PLANNING,
    )
}

SPEED_ROWS = (
    ("save, page cache, no checksums", "one-rank", _OURS, ("save s",)),
    ("save, page cache, with checksums", "one-rank", _CHECKED, ("save s",)),
    ("save, durable, with checksums", "durable", _CHECKED, ("save s",)),
    ("load into place", "one-rank", _OURS, ("load s",)),
    ("save / load on two ranks", "two-ranks", _OURS, ("save s", "load s")),
    ("load on 2 ranks what 4 saved, cut by rows", "reshard-4-2-rows", _OURS, ("load s",)),
    ("load on 2 ranks what 4 saved, cut by columns", "reshard-4-2-columns", _OURS, ("load s",)),
    ("save / load 5,000 tensors of 4 KiB", "small-tensors", _OURS, ("save s", "load s")),
    ("save / load 100,000 tensors of 1 KiB", "many-tensors", _OURS, ("save s", "load s")),
    ("`torch_dist` backend, save / load", "one-rank", "torch_dist 1", ("save s", "load s")),
    ("`safetensors` on two ranks, cut by rows", "model-2-rows", _MODEL, ("save s", "load s")),
    ("`safetensors` on two ranks, by columns", "model-2-columns", _MODEL, ("save s", "load s")),
    ("`dcp.save` / `dcp.load` through DCPWriter", "one-rank", "DCPWriter", ("save s", "load s")),
)
"""The table of docs/benchmarks.md: label, case, way, metrics."""

SPEED_COLUMNS = (
    (_RAW, "raw I/O"),
    (_DCP, "torch DCP, best"),
    ("DCP default", "torch DCP, defaults"),
    (_SAFE, "safetensors"),
)
