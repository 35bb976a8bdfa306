"""Models of transformers: what ranks have saved is what ``from_pretrained`` reads, and back."""

from pathlib import Path

import pytest
import torch

from real_ranks import run_script

transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: make test-trainers"
)
pytestmark = pytest.mark.filterwarnings("ignore")


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
