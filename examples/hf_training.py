"""A tiny GPT-2 trained with the Trainer of transformers, which resumes by itself.

pip install transformers accelerate
python examples/hf_training.py DIR --steps 8
python examples/hf_training.py DIR --steps 16     # continues at step 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dist_checkpointing import Retention
from dist_checkpointing.interop.hf_trainer import TrainerCheckpoints


class Squares(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token follows from the one before it."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = [index % 31 + 1]
        for _ in range(15):
            tokens.append(tokens[-1] ** 2 % 31 + 1)
        ids = torch.tensor(tokens)
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and resume with a Trainer.")
    parser.add_argument("run", type=Path, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=16, help="number of steps to reach")
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=str(given.run / "output"),
        max_steps=given.steps,
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=4,
        logging_steps=2,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Squares())
    TrainerCheckpoints(given.run / "checkpoints", retention=Retention(keep_last=2)).train(trainer)
    print(f"ended at step {trainer.state.global_step}")
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']}")


if __name__ == "__main__":
    main()
