"""Quantized tensors, dequantized while they are read. The oracle goes block by block.

That transformers makes the same of its models: tests/trainers/test_hf_models.py.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.planning import Concat, Dequantize, Rename, Resize, Rule, Transpose, Unstack
from dist_checkpointing.serialization import preview_recipe
from dist_checkpointing.testing import assert_same_bits
from dist_checkpointing.tools.convert import convert
from quantized import Tensors, check_parts, of_blocks, written
from scripts import run_fresh
from states import BACKEND, blanks, shard, wholes
from tiers import examples

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_VALUES = torch.tensor(FP4 + [-value for value in FP4])
DTYPES = [torch.bfloat16, torch.float32]


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every value that E4M3 has, but NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    return (codes | signs).view(torch.float8_e4m3fn)


def scales_of(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator) * 1e-2 + 1e-4


def octets(*shape: int, least: int = 0, most: int = 255) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + least)
    return torch.randint(least, most + 1, shape, generator=generator, dtype=torch.uint8)


def of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values in float32: the low half of a byte comes before the high one."""
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return torch.ldexp(FP4_VALUES[halves], scales.int()[..., None] - 127).flatten(-2)


STORED: Tensors = {
    "layers.0.mlp.weight": fp8(70, 45),
    "layers.0.mlp.weight_scale_inv": scales_of(5, 3),
    "layers.0.experts.up_blocks": octets(3, 6, 4, 16),
    "layers.0.experts.up_scales": octets(3, 6, 4),
    "layers.0.rows.weight": fp8(9, 20, seed=1),
    "layers.0.rows.weight_scale": scales_of(9, 1).bfloat16(),
    "layers.0.columns.weight": fp8(9, 20, seed=2).float().to(torch.float8_e5m2),
    "layers.0.columns.weight_scale": scales_of(1, 20),
    "layers.0.whole.weight": fp8(9, 20, seed=3),
    "layers.0.whole.weight_scale": scales_of(1),
    "layers.0.norm.weight": scales_of(40).bfloat16(),
    "batch": octets(3),
}
VALUES: Tensors = {
    "layers.0.mlp.weight": of_blocks(
        STORED["layers.0.mlp.weight"], STORED["layers.0.mlp.weight_scale_inv"], 16, 16
    ),
    "layers.0.experts.up": of_mxfp4(
        STORED["layers.0.experts.up_blocks"], STORED["layers.0.experts.up_scales"]
    ).transpose(1, 2),
    **{
        f"layers.0.{name}.weight": of_blocks(
            STORED[f"layers.0.{name}.weight"], STORED[f"layers.0.{name}.weight_scale"], *block
        )
        for name, block in {"rows": (1, 20), "columns": (9, 1), "whole": ()}.items()
    },
    "layers.0.norm.weight": STORED["layers.0.norm.weight"],
    "batch": STORED["batch"],
}
BLOCK = (16, 16)


def expected(dtype: torch.dtype) -> Tensors:
    kept = ("layers.0.norm.weight", "batch")
    return {key: own if key in kept else own.to(dtype) for key, own in VALUES.items()}


def test_blocks_and_scales_of_other_kinds(tmp_path: Path) -> None:
    """Experts in one tensor, powers of two for scales, one scale a row; codes that stay."""
    codes, exponents = fp8(2, 10, 24), octets(2, 5, 3, least=100, most=140)
    stored = {"up.w": codes, "up.scale": exponents, "a.w": fp8(4, 4), "a.scale": scales_of(4)}
    folder = written(tmp_path / "hf", {**stored, "b": fp8(2)})
    recipe = dc.Recipe(
        Rename("{m*}.scale", "{m}.w_scale"),
        Dequantize("up.w", "float32", block=[2, 8]),
        Dequantize("a.w", "float32"),
    )
    assert sorted(preview_recipe(recipe, folder).tensors) == ["a.w", "b", "up.w"]
    want = {
        "up.w": of_blocks(codes, torch.exp2(exponents.float() - 127), 1, 2, 8),
        "a.w": of_blocks(fp8(4, 4), scales_of(4)[:, None], 1, 4),
    }
    found = dc.load(blanks(want), folder, recipe=recipe)
    for key, own in want.items():
        assert_same_bits(found[key], own, key)


CHAINS: dict[str, tuple[list[Rule], Callable[[Tensors], Tensors]]] = {
    "alone": ([], lambda own: own),
    "turned": ([Transpose(r".*\.(weight|up)")], lambda own: {
        key: value.permute(*reversed(range(value.ndim))) for key, value in own.items()
    }),
    "joined": (
        [Concat([f"layers.0.{n}.weight" for n in ("rows", "columns", "whole")], "j", 1)],
        lambda own: {
            "j": torch.cat([own[f"layers.0.{n}.weight"] for n in ("rows", "columns", "whole")], 1)
        },
    ),
    "apart": (
        [Unstack("layers.0.experts.up", "up.{i}"), Rename("layers.0.mlp.weight", "m")],
        lambda own: {
            "m": own["layers.0.mlp.weight"],
            **{f"up.{i}": value for i, value in enumerate(own.get("layers.0.experts.up", ()))},
        },
    ),
}  # fmt: skip


@examples(50)
@given(
    chain=st.sampled_from(sorted(CHAINS)),
    cut=st.sampled_from(["rows", "columns", "flat"]),
    at=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    world_size=st.integers(1, 4),
    dtype=st.sampled_from([*DTYPES, torch.float16, torch.float64, torch.float8_e5m2, torch.int32]),
    shares=st.booleans(),
)
def test_any_sharding_is_a_part_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    chain: str,
    cut: str,
    at: list[float],
    world_size: int,
    dtype: torch.dtype,
    shares: bool,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "quantized"
    if not folder.exists():
        written(folder, STORED)
    rules, change = CHAINS[chain]
    recipe = dc.Recipe(Dequantize(block=BLOCK), *rules)
    quantized = {key: own for key, own in VALUES.items() if own.dtype == torch.float32}
    if not dtype.is_floating_point:  # no integer is as large as the values of MXFP4
        quantized.pop("layers.0.experts.up", None)
    # Values are converted once, to the dtype of the memory.
    full = {key: own.to(dtype) for key, own in change(quantized).items()}

    check_parts(
        folder, full, recipe, cut=cut, at=at, world_size=world_size, shares=shares, cast="any"
    )


@BACKEND
def test_what_other_backends_have_stored(tmp_path: Path, backend: Any) -> None:
    """With two leaves in one memory, also where they keep rows of the template."""
    dc.save({**wholes(STORED), "step": 1}, tmp_path / "ckpt", backend)
    rules = [Dequantize(block=BLOCK), Resize("layers.0.mlp.weight", size=72, fill="template")]
    kept = ("layers.0.norm.weight", "batch")
    want = {key: own for key, own in expected(torch.bfloat16).items() if key not in kept}
    more = torch.ones(2, 45, dtype=torch.bfloat16)
    want["layers.0.mlp.weight"] = torch.cat([want["layers.0.mlp.weight"], more])
    for verify in (False, True, "restored"):
        template: dict[str, Any] = wholes({k: torch.ones_like(own) for k, own in want.items()})
        for name in ("rows", "mlp"):
            key = f"layers.0.{name}.weight"
            template[f"tied {name}"] = shard(key, template[key].data)
        dc.load(template, tmp_path / "ckpt", recipe=dc.Recipe(*rules), verify=verify)
        for key, own in want.items():
            assert_same_bits(template[key].data, own.contiguous(), key)


def test_values_are_computed_in_bounded_memory(tmp_path: Path) -> None:
    """Codes are read to where their values belong: nothing is as large as they are."""
    shape = (4, 2048, 1024)
    tensors = {
        "up_blocks": octets(4, 1024, 64, 16),
        "up_scales": octets(4, 1024, 64),
    }
    folder = written(tmp_path / "hf", tensors)
    memory = torch.empty(shape, dtype=torch.bfloat16)
    odd = memory[:, 1:]
    template = {"own": dc.ShardedTensor.from_offset("up", odd, shape, [0, 1, 0])}
    with torch.profiler.profile(profile_memory=True) as profiled:
        dc.load(template, folder, recipe=dc.Recipe(Dequantize()))
    allocated = [event.self_cpu_memory_usage for event in profiled.events() or ()]
    assert 2**19 < max(allocated) < 2**22 < odd.nbytes / 3


def test_damage_of_scales_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    dc.save(wholes(STORED), folder, ("zarr", 1))
    (chunk,) = (folder / "layers.0.mlp.weight_scale_inv").glob("[0-9]*")
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    template = blanks({"layers.0.mlp.weight": expected(torch.bfloat16)["layers.0.mlp.weight"]})
    recipe = dc.Recipe(Dequantize(block=BLOCK))
    dc.load(template, folder, recipe=recipe)
    with pytest.raises(dc.CorruptCheckpointError, match=r"mlp\.weight_scale_inv"):
        dc.load(template, folder, recipe=recipe, verify=True)


def test_conversions_and_files(tmp_path: Path) -> None:
    """A file may name rules and recipes that the process has not imported."""
    folder = written(tmp_path / "hf", STORED)
    rules = [
        {"dequantize": "layers.{x*}", "dtype": "bfloat16", "block": [*BLOCK]},
        {"use": "llama_to_megatron", "num_query_groups": 1},
    ]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    command = ["-m", "dist_checkpointing", "convert", "hf", "new", "--to", "zarr"]
    done = run_fresh(*command, "--recipe", "rules.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dc.load_plain_tensors(tmp_path / "new")
    for key, own in expected(torch.bfloat16).items():
        assert_same_bits(found.pop(key), own.contiguous(), key)
    assert not found
    made = preview_recipe(dc.Recipe.read(tmp_path / "rules.json"), folder)
    assert (made.left_out, made.cut) == ([], {})
    assert (
        made.origin("layers.0.experts.up")
        == "layers.*.experts.up_blocks, layers.*.experts.up_scales"
    )
    assert made.rounded_from("layers.0.mlp.weight") == ["float32"]
    made = preview_recipe(dc.Recipe(Dequantize(dtype="float32", block=BLOCK)), folder)
    assert made.rounded_from("layers.0.mlp.weight") == []


def test_a_dequantized_folder_does_not_say_that_it_is_quantized(tmp_path: Path) -> None:
    """So that transformers reads the values as they are; by way of another format."""
    folder = written(tmp_path / "hf", STORED)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}, "é": 1.5}
    (folder / "config.json").write_text(json.dumps(config))
    recipe = dc.Recipe(Dequantize(block=BLOCK))
    convert(folder, tmp_path / "zarr", "zarr", recipe=recipe)
    convert(tmp_path / "zarr", tmp_path / "back", "safetensors")
    del config["quantization_config"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    # What stays quantized says so, byte for byte.
    convert(folder, tmp_path / "same", "safetensors")
    same = (tmp_path / "same" / "config.json").read_bytes()
    assert same == (folder / "config.json").read_bytes()
    (folder / "config.json").write_text("{")
    with pytest.raises(dc.CorruptCheckpointError, match=r"configuration .* cannot be read"):
        convert(folder, tmp_path / "new", "safetensors", recipe=recipe)
    assert not (tmp_path / "new").exists()


WRONG: dict[str, tuple[Tensors, list[Rule], list[str]]] = {
    "no scales": (
        {"a.weight": fp8(4, 4), "b.weight_scale": scales_of(1)},
        [],
        ["'a.weight': its scales are missing", "a.weight_scale_inv or"],
    ),
    "no scales of bytes": ({"up_blocks": octets(2, 3, 4)}, [], ["'up_blocks': ", "up_scales"]),
    "scales of bfloat16": (
        {"a.weight": scales_of(4, 4).bfloat16(), "a.weight_scale_inv": scales_of(1)},
        [],
        ["'a.weight': it has a.weight_scale_inv, but no codes", "float8_e4m3fn", "found bfloat16"],
    ),
    "dtypes": (
        {"a.weight": fp8(4, 4), "a.weight_scale_inv": scales_of(1).long(),
         "up_blocks": octets(2, 3, 4), "up_scales": scales_of(2, 3)},
        [],
        ["'a.weight': wrong dtype of a.weight_scale_inv", "or float32 or", "found int64",
         "'up_blocks': wrong dtype of up_scales", "expected float8_e8m0fnu or uint8"],
    ),
    "shapes": (
        {"a.weight": fp8(200, 300), "a.weight_scale_inv": scales_of(3, 2),
         "b.weight": fp8(4), "b.weight_scale_inv": scales_of(1, 1, 1),
         "up_blocks": octets(2, 3, 4), "up_scales": octets(2, 1)},
        [],
        ["'a.weight': wrong shape of a.weight_scale_inv; expected (2, 3); found (3, 2)",
         "'b.weight': wrong shape", "expected (1,); found (1, 1, 1)",
         "'up_blocks': wrong shape of up_scales; expected (2, 3); found (2, 1)"],
    ),
    "a rule before": (
        {"a.weight": fp8(4, 4), "a.weight_scale_inv": scales_of(1)},
        [Transpose("a.weight")],
        ["'a.weight': an earlier rule has changed the layout of a.weight", "Put this rule before"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_found_before_a_byte_is_read(tmp_path: Path, case: str) -> None:
    tensors, rules, texts = WRONG[case]
    folder = written(tmp_path / "hf", tensors)
    for path in folder.glob("*.safetensors"):  # what is not there cannot be read
        size = path.stat().st_size
        os.truncate(path, int.from_bytes(path.read_bytes()[:8], "little") + 8)
        os.truncate(path, size)
    memory = torch.ones(4, 4)
    recipe = dc.Recipe(*rules, Dequantize())
    with pytest.raises(dc.StateMismatchError) as caught:
        dc.load({"a": shard("a.weight", memory)}, folder, recipe=recipe)
    for text in [*texts, f"rule {len(recipe.rules)} of the recipe", "dequantize '{name*}'"]:
        assert text in str(caught.value)
    assert (memory == 1).all()
