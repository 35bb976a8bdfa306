"""Tensors that are quantized as they are read or saved. The oracle goes block by block."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import (
    CastTo,
    Concat,
    Dequantize,
    Drop,
    Quantize,
    Rename,
    Resize,
    Rule,
    Split,
    Transpose,
)
from dist_checkpointing.serialization import preview_recipe
from dist_checkpointing.testing import assert_same_bits, failures_on, run_ranks
from dist_checkpointing.tools.convert import ConvertOptions, convert
from quantized import Tensors, check_parts, of_blocks, written
from states import between, blanks, shard, wholes
from tiers import examples

FP8 = torch.float8_e4m3fn
BLOCK = (16, 16)


def quantized(values: torch.Tensor, *block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, of one block after the other."""
    block = (*[1] * (values.ndim - len(block)), *block)
    counts = [-(-n // size) for n, size in zip(values.shape, block, strict=True)]
    codes, scales = torch.empty(values.shape, dtype=FP8), torch.empty(counts)
    for index in itertools.product(*map(range, counts)):
        axes = zip(index, block, strict=True)
        place = tuple(slice(i * size, (i + 1) * size) for i, size in axes)
        own = values[place].to(torch.float32)
        finite = own[own.isfinite()].abs().numpy()
        scale = np.max(finite, initial=np.float32(0)) / np.float32(448)
        scales[index] = scale = float(scale) or 1.0
        numbers = (own / scale).clamp(-448, 448)
        codes[place] = torch.where(own.isfinite(), numbers, math.nan).to(FP8)
    return codes, scales


def named(key: str, values: torch.Tensor, *block: int) -> Tensors:
    codes, scales = quantized(values, *(block or BLOCK))
    return {key: codes, f"{key}_scale_inv": scales}


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of many magnitudes, with a block of zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    powers = torch.randint(-12, 4, shape, generator=generator)
    values = torch.ldexp(torch.randn(shape, generator=generator), powers)
    values[..., :16, 16:32] = 0
    return values.to(dtype)


STORED: Tensors = {
    "up.weight": weights(70, 45),
    "gate.weight": weights(25, 45),
    "down.weight": weights(33, 64, dtype=torch.float16),
    "experts.weight": weights(3, 40, 24, dtype=torch.float32),
    "norm.weight": weights(45, 45)[0].contiguous(),
    "old.weight": quantized(weights(20, 20), 8, 8)[0],
    "old.weight_scale_inv": quantized(weights(20, 20), 8, 8)[1],
    "empty.weight": torch.empty(0, 16),
    "ids": torch.arange(40).reshape(2, 20),
}
KEPT = ("norm.weight", "old.weight", "old.weight_scale_inv", "empty.weight", "ids")
QUANTIZED = [key for key in STORED if key not in KEPT]


def all_of(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for key, own in tensors.items():
        made |= {key: own} if key in KEPT else named(key, own)
    return made


def changed(**tensors: torch.Tensor) -> Tensors:
    """All that is made if some tensors take the place of the first two."""
    others = {key: own for key, own in STORED.items() if key not in ("up.weight", "gate.weight")}
    return all_of(others) | tensors


OLD = of_blocks(STORED["old.weight"], STORED["old.weight_scale_inv"], 8, 8).bfloat16()
JOINED = torch.cat([STORED["up.weight"], STORED["gate.weight"]])
UP, GATE = (quantized(STORED[f"{name}.weight"], *BLOCK) for name in ("up", "gate"))
QUANTIZE = Quantize("{x*}", BLOCK)
CASES: dict[str, tuple[list[Rule], Tensors]] = {
    "alone": ([QUANTIZE], all_of(STORED)),
    "joined before": (
        [Concat(["up.weight", "gate.weight"], "j"), QUANTIZE],
        changed(**named("j", JOINED)),
    ),
    "turned before": (
        [Transpose("experts.weight"), QUANTIZE],
        all_of(STORED | {"experts.weight": STORED["experts.weight"].permute(2, 1, 0)}),
    ),
    "cast before": (
        [CastTo("experts.weight", "bfloat16"), QUANTIZE],
        all_of(STORED | {"experts.weight": STORED["experts.weight"].bfloat16()}),
    ),
    "filled before": (
        [Resize("up.weight", size=140), QUANTIZE],
        all_of(STORED | {"up.weight": torch.cat([STORED["up.weight"], torch.zeros(70, 45)])}),
    ),
    "quantized before, in other blocks": (
        [Dequantize("old.weight", block=(8, 8)), QUANTIZE],
        all_of(STORED) | named("old.weight", OLD),
    ),
    "joined and turned after": (
        [
            QUANTIZE,
            Concat(["up.weight", "gate.weight"], "j"),
            Concat(["up.weight_scale_inv", "gate.weight_scale_inv"], "j_scales"),
            Transpose("j.*"),
        ],
        changed(j=torch.cat([UP[0].float(), GATE[0].float()]).to(FP8).T,
                j_scales=torch.cat([UP[1], GATE[1]]).T),
    ),
    "cut after": (
        [QUANTIZE, Resize("up.weight", size=20), Split("gate.weight", ["a", "b"], 1, [1, 2])],
        {
            **{k: v for k, v in all_of(STORED).items() if k != "gate.weight"},
            "up.weight": UP[0][:20],
            "a": GATE[0][:, :15],
            "b": GATE[0][:, 15:],
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("hf"), STORED)


def assert_holds(path: Path, expected: Tensors) -> None:
    found = dc.load_plain_tensors(path)
    for key, own in expected.items():
        assert_same_bits(found.pop(key), own.contiguous(), key)
    assert not found


@examples(50)
@given(
    case=st.sampled_from(sorted(CASES)),
    cut=st.sampled_from(["rows", "columns", "flat"]),
    at=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    world_size=st.integers(1, 4),
    shares=st.booleans(),
)
def test_any_sharding_is_a_part_of_the_whole(
    folder: Path, *, case: str, cut: str, at: list[float], world_size: int, shares: bool
) -> None:
    rules, full = CASES[case]

    check_parts(
        folder, full, dc.Recipe(*rules), cut=cut, at=at, world_size=world_size, shares=shares
    )


@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_conversions(tmp_path: Path, folder: Path, number: int) -> None:
    """Of each case into files, or into chunks of another size of another backend."""
    rules, full = [*CASES.values()][number]
    to = ["safetensors", "tensorstore", "zarr:1", "zarr", "torch_dist"][number % 5]
    reshard = f"axis=0,parts={1 + 5 * number};axis=1,parts={1 + number}"
    options = ConvertOptions(reshard=[reshard] if number % 5 else [], lossy=True)

    def on_rank(comm: Comm) -> None:
        convert(folder, tmp_path / "m", to, options=options, recipe=dc.Recipe(*rules), comm=comm)

    run_ranks(1 + number % 3, on_rank)
    assert_holds(tmp_path / "m", full)


def test_there_and_back(tmp_path: Path) -> None:
    """In the blocks of DeepSeek, with blocks at the edges."""
    own = weights(300, 200)
    source = written(tmp_path / "bf16", {"a.weight": own, "norm": STORED["norm.weight"]})
    convert(source, tmp_path / "fp8", "safetensors", recipe=dc.Recipe(Quantize("{x*}.weight")))
    codes, scales = quantized(own, 128, 128)
    assert scales.shape == (3, 2)
    found = dc.load_plain_tensors(tmp_path / "fp8")
    assert_same_bits(found["a.weight"], codes, "codes")
    assert_same_bits(found["a.weight_scale_inv"], scales, "scales")
    want = of_blocks(codes, scales, 128, 128)
    for dtype in (torch.bfloat16, torch.float32):
        ours = blanks({"a.weight": want.to(dtype)})
        dc.load(ours, tmp_path / "fp8", recipe=dc.Recipe(Dequantize(dtype=str(dtype))))
        assert_same_bits(ours["a.weight"].data, want.to(dtype), "back")
    # Where there are values near the largest one, they lose three bits of the mantissa at most.
    near = own.float().abs() > of_blocks(torch.ones_like(codes), scales, 128, 128)
    assert ((want - own.float()).abs() <= own.float().abs() / 16)[near].all()


SPECIAL = {
    "zeros": [0.0, -0.0],
    "smallest": [2**-149, -(2**-149), 2**-126],
    "an infinite one": [math.inf, 1.0, -2.0],
    "a NaN": [math.nan, 1.0, -4.0],
    "nothing finite": [math.inf, -math.inf, math.nan],
}


@pytest.mark.parametrize("case", SPECIAL)
def test_values_that_have_no_scale(tmp_path: Path, case: str) -> None:
    """They change no other value of their block, and no other block."""
    values = torch.ones(4, 8)
    numbers = torch.tensor(SPECIAL[case])
    values[:, :4] = numbers.repeat(16)[:16].reshape(4, 4)
    source = written(tmp_path / "hf", {"w": values})
    made = dc.load(
        blanks(named("w", values, 4, 4)), source, recipe=dc.Recipe(Quantize("w", [4, 4]))
    )
    codes, scales = made["w"], made["w_scale_inv"]
    assert_same_bits(codes, quantized(values, 4, 4)[0], "codes")
    assert_same_bits(scales, quantized(values, 4, 4)[1], "scales")
    assert scales.isfinite().all()
    assert (scales > 0).all()
    back, finite = of_blocks(codes, scales, 4, 4), values.isfinite()
    assert back[:, 4:].eq(1).all()
    assert torch.equal(back.isnan(), ~finite)
    assert (back[finite].sign() * values[finite].sign() >= 0).all()
    if case not in ("zeros", "smallest"):
        assert torch.allclose(back[finite], values[finite])


def test_a_save_does_not_quantize(tmp_path: Path) -> None:
    """It is refused by all ranks, and the checkpoint that was there stays."""
    own = STORED["up.weight"]
    dc.save(wholes({"w": own}), tmp_path / "c")

    def on_rank(comm: Comm) -> None:
        state = {"w": between("up.weight", own, *[(0, 32), (32, 70)][comm.rank])}
        dc.save(state, tmp_path / "c", recipe=dc.Recipe(QUANTIZE), overwrite=True, comm=comm)

    for error in failures_on(2, on_rank):
        assert isinstance(error, dc.StateMismatchError)
        assert "'up.weight': a save neither quantizes nor dequantizes" in str(error)
        assert "save without Quantize, and convert with it afterwards" in str(error)
    assert_holds(tmp_path / "c", {"w": own})


def test_a_conversion_holds_a_few_blocks_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for scales, one of which is made of 16,384 values."""
    own = weights(2052, 4000)
    source = written(tmp_path / "hf", {"w": own})
    read = dc.Checkpoint.read
    sizes = []

    def noting(self: dc.Checkpoint, wanted: Any) -> Any:
        sizes.append(sum(box.num_elements * 2 for _, box in wanted))
        return read(self, wanted)

    monkeypatch.setattr(dc.Checkpoint, "read", noting)
    with torch.profiler.profile(profile_memory=True) as profiled:
        convert(source, tmp_path / "fp8", "safetensors", recipe=dc.Recipe(Quantize("w")))
    assert 2**22 < max(sizes) <= 2**23
    assert sum(sizes) <= 2.1 * 2**24
    allocated = [event.self_cpu_memory_usage for event in profiled.events() or ()]
    # The codes, in boxes as large as those of any conversion.
    assert max(allocated) <= own.numel()
    want = named("w", own, 128, 128)
    assert_holds(tmp_path / "fp8", want)
    with torch.inference_mode():
        found = dc.load(blanks(want), source, recipe=dc.Recipe(Quantize("w")))
    for key in want:
        assert_same_bits(found[key], want[key], key)


def test_recipes_in_files_and_what_they_say(tmp_path: Path, folder: Path) -> None:
    text = '- quantize: "(up|down|gate|experts).weight"\n  block: [16, 16]\n'
    (tmp_path / "rules.yaml").write_text(text)
    (tmp_path / "rules.json").write_text(json.dumps([{"quantize": "{x*}", "block": [16, 16]}]))
    convert(folder, tmp_path / "new", "safetensors", recipe=dc.Recipe.read(tmp_path / "rules.yaml"))
    assert_holds(tmp_path / "new", all_of(STORED))
    made = preview_recipe(dc.Recipe.read(tmp_path / "rules.json"), folder)
    assert str(made.counts[0][0]) == "quantize '{x*}', block=[16, 16]"
    assert made.rounded_from("up.weight") == ["bfloat16"]
    assert made.origin("up.weight_scale_inv") == "up.weight"
    assert {key.removesuffix("_scale_inv") for key in made.changed} == {*QUANTIZED}
    assert (made.left_out, made.cut) == ([], {})
    rules = [Resize("up.weight", size=35), QUANTIZE]
    assert preview_recipe(dc.Recipe(*rules), folder).cut == {"up.weight": (35 * 45, 70 * 45)}


def test_what_does_not_fit(folder: Path) -> None:
    scales = Rename("norm.weight", "up.weight_scale_inv")
    filled = Resize("up.weight", size=80, fill="template")
    for rule, text in (
        (scales, "'up.weight_scale_inv': several tensors would have this name"),
        (filled, "'up.weight': only the template holds some of its values. Fill with zeros."),
    ):
        with pytest.raises(dc.StateMismatchError) as caught:
            preview_recipe(dc.Recipe(rule, QUANTIZE), folder)
        assert text in str(caught.value)
        assert "rule 2 of the recipe does not fit: quantize '{x*}'" in str(caught.value)


def test_the_configuration_of_a_quantized_model_says_so(tmp_path: Path) -> None:
    """Or readers would take codes for values; also by way of another format, and back again."""
    folder = tmp_path / "model"
    names = ("layer.proj.weight", "lm_head.weight")
    dc.save({key: shard(key, torch.ones(32, 48)) for key in names}, folder, "safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')

    def said_after(start: str, name: str, rule: Rule) -> Any:
        convert(tmp_path / start, tmp_path / name, "safetensors", recipe=dc.Recipe(rule))
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert said.pop("model_type") == "llama"
        return said.get("quantization_config")

    convert(folder, tmp_path / "zarr", "zarr", recipe=dc.Recipe(Quantize("layer.{x*}", BLOCK)))
    expected = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head"],
    }
    # What stays quantized says so, and what does not is named.
    assert said_after("zarr", "fp8", Drop("nothing")) == expected
    more = said_after("fp8", "all", Quantize("lm_head.{x*}", BLOCK))
    assert more == expected | {"modules_to_not_convert": []}
    assert said_after("all", "some", Dequantize("lm_head.{x*}", block=BLOCK)) == expected
    assert said_after("fp8", "back", Dequantize(block=BLOCK)) is None
