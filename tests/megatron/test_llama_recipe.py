"""Megatron's own GPT computes what a model of Hugging Face does whose weights a recipe loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import load, save
from dist_checkpointing.planning import megatron_to_llama, megatron_to_mixtral
from megatron_rank import TP_SIZES, WORLD_SIZE
from real_ranks import run_script
from states import blanks, wholes
from test_real_models import FOLDERS
from tiny_llama import GROUPS, HEADS, hf_logits, hf_weights

SCRIPT = Path(__file__).with_name("llama_rank.py")

pytestmark = [
    pytest.mark.skipif(
        not FOLDERS, reason="megatron-core is missing: make test-megatron installs it"
    ),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("megatron", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])
def test_megatron_computes_the_same_and_gives_it_back(
    megatron: Path, kind: str, tmp_path: Path
) -> None:
    weights = hf_weights(has_biases=kind != "llama", has_experts=kind == "mixtral")
    save(wholes(weights), tmp_path / "hf")
    arguments = (megatron.absolute(), tmp_path, kind)
    reports = run_script(
        WORLD_SIZE, SCRIPT, *arguments, reports=tmp_path / "reports", timeout_seconds=280
    )
    largest = float(hf_logits(weights).abs().max())
    for report in reports:
        assert all(report[str(tp_size)] < 1e-5 * largest for tp_size in TP_SIZES), report
    for tp_size in TP_SIZES:
        make = megatron_to_mixtral if kind == "mixtral" else megatron_to_llama
        recipe = make(HEADS, GROUPS)
        folder = tmp_path / f"megatron-{tp_size}"
        found: Any = load(blanks(weights), folder, recipe=recipe)
        assert all(torch.equal(found[key], own) for key, own in weights.items())
