"""Models of transformers: what ranks have saved is what ``from_pretrained`` reads, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_checkpointing import Recipe, load
from dist_checkpointing.interop import TorchState
from dist_checkpointing.planning import Dequantize, Quantize
from dist_checkpointing.tools.convert import convert
from real_ranks import run_script

transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: make test-trainers"
)
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_saved_by_ranks_and_read_by_transformers_and_back(tmp_path: Path) -> None:
    from hf_models import MODELS, make

    for name in MODELS:
        make(name, seed=1).save_pretrained(tmp_path / f"{name}-theirs", max_shard_size="60KB")
    script = Path(__file__).with_name("hf_models_rank.py")
    reports = run_script(4, script, tmp_path, reports=tmp_path / "reports", timeout_seconds=200)
    for report in reports:
        assert all(differing == [] for differing in report.values()), report
    for name in MODELS:
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        expected = make(name, seed=1).state_dict()
        assert ours.state_dict().keys() == expected.keys()
        for key, tensor in ours.state_dict().items():
            assert torch.equal(tensor, expected[key]), (name, key)


def mxfp4(own: torch.Tensor) -> dict[str, torch.Tensor]:
    experts, inputs, outputs = own.shape
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return {
        "_blocks": blocks,
        "_scales": torch.randint(100, 140, shape, dtype=torch.uint8),
    }


def fp8(own: torch.Tensor) -> dict[str, torch.Tensor]:
    counts = [extent // 16 for extent in own.shape]
    codes = (own.float() * 20).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": torch.rand(counts)}


QUANTIZED: dict[str, Any] = {
    "mxfp4": (
        {"quant_method": "mxfp4"},
        lambda: transformers.Mxfp4Config(dequantize=True),
        lambda key: mxfp4 if key.endswith(("gate_up_proj", "down_proj")) else None,
        lambda: transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda: transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16)),
        lambda key: fp8 if key.endswith("_proj.weight") else None,
        lambda: transformers.LlamaConfig(**SMALL),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_models_are_what_transformers_makes_of_them(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    stored_as, dequantizing, quantizes, config = QUANTIZED[method]
    make_model = transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(1)
    model = make_model(config(), dtype=dtype)
    stored: dict[str, torch.Tensor] = {}
    for key, own in model.state_dict().items():
        change = quantizes(key)
        parts = {"": own.clone()} if change is None else change(own)
        stored |= {key + end: part for end, part in parts.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {**model.config.to_dict(), "quantization_config": stored_as}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    theirs = (
        type(model)
        .from_pretrained(tmp_path, quantization_config=dequantizing(), dtype=dtype)
        .state_dict()
    )
    ours = make_model(config(), dtype=dtype)
    recipe = Recipe(Dequantize(dtype=str(dtype), block=[16, 16]))
    load(TorchState(ours), tmp_path, recipe=recipe)
    assert ours.state_dict().keys() == theirs.keys()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs[key].to(dtype)), key
        assert tensor.dtype == dtype


def test_models_that_are_quantized_here_are_read_by_transformers(tmp_path: Path) -> None:
    """It takes all blocks of a tensor to be alike, so none is cut off at an edge."""
    sizes = {**SMALL, "intermediate_size": 96}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    linears = r"model\.layers\.{i}\.(self_attn|mlp)\..*proj.*\.weight"
    recipe = Recipe(Quantize(linears, [32, 32]))
    convert(tmp_path / "bf16", tmp_path / "fp8", "safetensors", recipe=recipe)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert said["weight_block_size"] == [32, 32]
    assert {*said["modules_to_not_convert"]} == {"lm_head", "model.embed_tokens"}
    how = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=how, dtype=torch.bfloat16
    ).state_dict()
    ours = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    load(TorchState(ours), tmp_path / "fp8", recipe=Recipe(Dequantize(block=[32, 32])))
    changed = 0
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs[key]), key
        before = model.state_dict()[key]
        changed += not torch.equal(tensor, before)
        assert ((tensor - before).abs() <= before.abs().max() / 20).all(), key
    assert changed == 14
