"""Warm-start the fetched checkpoint on the demonstrations of the train split.

    python -m stages.finetune_sft [key=value ...]

With `sft.finetune.steps=0` the same weights go on.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.data.prompts import encode_prompts, encode_response
from rlhf.errors import UserError
from rlhf.models.checkpoints import (
    Manifest,
    checkpoint_hash,
    load_policy,
    load_tokenizer,
    read_manifest,
    save_checkpoint,
)
from rlhf.runtime import device, matmul_dtype, progress
from rlhf.stage import Stage, run_stage
from rlhf.training.sft import Demonstration, finetune


def main(stage: Stage) -> None:
    params, settings = stage.params, stage.params.sft.finetune
    fetched = stage.input("models/fetched")
    train = stage.input("data/prepared/train.parquet")
    tokenizer = load_tokenizer(fetched)
    model = load_policy(fetched).to(device(params.runtime))
    stage.log.log_dataset(train, "train", "training")
    context = model.config.get_text_config().max_position_embeddings
    demonstrations = demonstrate(read_prepared(train), tokenizer, context, stage)
    stage.log.log_metrics({"demonstrations": len(demonstrations)})

    with progress("finetune_sft", settings.steps) as bar:

        def on_step(step: int, numbers: dict[str, float]) -> None:
            stage.log.log_metrics(numbers, step=step + 1)
            bar.advance(1, loss=numbers["loss"])

        finetune(
            model,
            demonstrations,
            settings,
            seed=params.seed,
            pad_id=tokenizer.eos_token_id,
            dtype=matmul_dtype(params.runtime),
            on_step=on_step,
        )
    manifest = Manifest(
        **read_manifest(fetched).model_dump(include={"source", "revision", "license"}),
        kind="sft",
        parents={"fetched": checkpoint_hash(fetched)},
        params=settings.model_dump(),
        seed=params.seed,
        prompt=params.prompt.model_dump(),
        stop_token=tokenizer.eos_token,
    )
    save_checkpoint(stage.output("models/sft"), model, tokenizer, manifest)


def demonstrate(
    problems: list[Problem], tokenizer: PreTrainedTokenizerBase, context: int, stage: Stage
) -> list[Demonstration]:
    """The problems whose prompt and demonstration fit, as tokens; counts the others."""
    prompts = encode_prompts(tokenizer, [p.question for p in problems], stage.params.prompt)
    pairs = [
        Demonstration(prompt, encode_response(tokenizer, problem.demonstration))
        for prompt, problem in zip(prompts, problems, strict=True)
        if prompt is not None
    ]
    fitting = [d for d in pairs if len(d.prompt) + len(d.response) <= context]
    if not fitting:
        raise UserError(f"prompt.max_tokens={stage.params.prompt.max_tokens}: no train problem fits: raise it")
    stage.log.log_metrics({"too_long": len(problems) - len(fitting)})
    return fitting


if __name__ == "__main__":
    run_stage("finetune_sft", main)
