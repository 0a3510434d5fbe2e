"""One iteration of TRL's PPOTrainer, in the peers' environment: four models, `rows` prompts, `new_tokens` each."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

from bench.performance.measured import meter


def main(settings: meter.Settings) -> meter.Numbers:
    """What is not named here is as TRL has it; of its config, `bf16` and `gradient_checkpointing` change nothing: its
    own Accelerator looks at the environment."""
    torch.set_num_threads(settings["threads"])
    os.environ["ACCELERATE_MIXED_PRECISION"] = {"float32": "no", "bfloat16": "bf16"}[settings["dtype"]]
    data, rows = Path(settings["data"]), settings["rows"]
    # Reward models pad with another token than the end of the sequence, which chat prompts hold as well.
    tokenizer = AutoTokenizer.from_pretrained(data / "reward", padding_side="left")
    prompts = json.loads((data / "prompts.json").read_text())[:rows]
    with tempfile.TemporaryDirectory() as place:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=place,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                num_sample_generations=0,
                total_episodes=rows,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=1,
                num_mini_batches=1,
                response_length=settings["new_tokens"],
                temperature=1.0,
                stop_token=None,
                num_ppo_epochs=settings["epochs"],
            ),
            processing_class=tokenizer,
            model=policy(data),
            ref_model=policy(data),
            reward_model=scores(data),
            value_model=scores(data),
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
        )
        return {**meter.timed(trainer.train), "tokens": rows * settings["new_tokens"]}


def policy(data: Path) -> Any:
    """The language model, as float32."""
    return AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32)


def scores(data: Path) -> Any:
    """The reward model, as float32."""
    return AutoModelForSequenceClassification.from_pretrained(data / "reward", dtype=torch.float32)


if __name__ == "__main__":
    meter.run(main)
