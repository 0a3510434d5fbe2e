"""Sample answers from the SFT policy, label them with the verifier, pair right with wrong; or read judged pairs.

python -m stages.collect_preferences [preferences.source=FILE] [key=value ...]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from shutil import rmtree

import numpy as np

from rlhf.data import human_preferences
from rlhf.data.answers import is_correct
from rlhf.data.expectations import evaluate
from rlhf.data.gsm8k import SPLITS, Problem, read_prepared
from rlhf.data.preferences import Pair, make_pairs, split_pairs, write_pairs
from rlhf.data.prompts import decode_response, encode_prompts, sequence_length
from rlhf.data.token_suites import tokenised
from rlhf.errors import UserError
from rlhf.generation.responses import sample_responses
from rlhf.models.actor_critic import sampling_copy
from rlhf.models.checkpoints import context_length, load_policy, load_tokenizer
from rlhf.params import NOTHING, SAMPLED
from rlhf.runtime import device, matmul_dtype, progress
from rlhf.stage import Stage, run_stage
from rlhf.streams import Purpose, shuffled_slice, token_uniforms


def main(stage: Stage) -> None:
    settings = stage.params.preferences
    pairs = sampled_pairs(stage) if settings.source == SAMPLED else judged_pairs(stage)
    training, validation = split_pairs(pairs, settings.validation_share)
    if not training or not validation:
        raise UserError(
            f"preferences.validation_share={settings.validation_share}: {len(pairs)} pairs leave one side "
            "empty: raise preferences.questions"
        )
    check(stage, {"train": training, "validation": validation})
    directory = stage.output("data/preferences")
    directory.mkdir()
    write_pairs(directory / "train.parquet", training)
    write_pairs(directory / "validation.parquet", validation)
    origins = Counter(pair.origin for pair in pairs)
    counts = {"train_pairs": len(training), "validation_pairs": len(validation), "gold_pairs": origins["gold"]}
    stage.log.log_metrics(counts)
    count = len({pair.question for pair in pairs})
    print(f"collect_preferences: {len(pairs)} pairs from {count} questions, {origins['gold']} with the gold rationale")


def check(stage: Stage, sides: Mapping[str, list[Pair]]) -> None:
    """Lets the data gate decide on the prompts of all splits and on the pairs; raises UserError where it refuses."""
    sft, params = stage.input("models/sft"), stage.params
    questions = {split: prepared_questions(stage, split) for split in SPLITS}
    room = params.preferences.max_new_tokens
    suites = tokenised(load_tokenizer(sft), params.prompt, context_length(sft), room, questions, sides)
    docs = stage.scratch("data_docs")
    verdict = evaluate(suites, docs)
    stage.log.log_artifact(docs)
    stage.log.log_text(verdict.summary(), "data_summary.md")
    verdict.refuse_failures(docs)
    stage.after_publishing(lambda: rmtree(docs))


def prepared_questions(stage: Stage, split: str) -> list[str]:
    return [problem.question for problem in read_prepared(stage.input(f"data/prepared/{split}.parquet"))]


def judged_pairs(stage: Stage) -> list[Pair]:
    """The pairs of `preferences.source` that can be trained on; counts the others by cause."""
    settings, sft = stage.params.preferences, stage.input("models/sft")
    if settings.reads != NOTHING:
        stage.log.log_dataset(stage.input(settings.reads), "judged_pairs", "preferences")
    tokenizer, context = load_tokenizer(sft), context_length(sft)

    def fits(pair: Pair) -> bool:
        prompt, answers = stage.params.prompt, (pair.chosen, pair.rejected)
        is_short = encode_prompts(tokenizer, [pair.question], prompt) != [None]
        return is_short and sequence_length(tokenizer, pair.question, answers, prompt) <= context

    pairs, left_out = human_preferences.keep(
        human_preferences.read(settings),
        [question for split in SPLITS[1:] for question in prepared_questions(stage, split)],
        fits,
        max_pairs=settings.max_pairs,
        max_questions=settings.questions,
    )
    stage.log.log_metrics({f"left_out.{cause}": count for cause, count in left_out.items()})
    told = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in left_out.items() if count) or "none"
    if not pairs:
        raise UserError(f"preferences.source={settings.source}: no pair is left; left out: {told}")
    print(f"collect_preferences: pairs left out: {told}")
    return pairs


def sampled_pairs(stage: Stage) -> list[Pair]:
    """Pairs of the SFT policy's own answers to train questions, told apart by the verifier."""
    settings = stage.params.preferences
    train = stage.input("data/prepared/train.parquet")
    stage.log.log_dataset(train, "train", "sampling")
    problems = [problem for problem in read_prepared(train) if problem.gold is not None]
    count = min(settings.questions, len(problems))
    order = shuffled_slice(stage.params.seed, Purpose.SHUFFLE_QUESTIONS, 0, count, len(problems))
    chosen = [problems[number] for number in order]
    answers = sample_answers(stage, chosen, order)
    pairs = [pair for problem, texts in zip(chosen, answers, strict=True) for pair in label(stage, problem, texts)]
    if not pairs:
        raise UserError(
            f"preferences: {count} questions with {settings.samples} samples each gave no pair of a right and a wrong "
            "answer: raise preferences.questions or preferences.samples, or set preferences.gold_stand_in=true"
        )
    return pairs


def sample_answers(stage: Stage, problems: list[Problem], numbers: np.ndarray) -> list[list[str]]:
    """`preferences.samples` responses a problem, cut-off ones left out."""
    settings, seed, dtype = stage.params.preferences, stage.params.seed, matmul_dtype(stage.params.runtime)
    sft = stage.input("models/sft")
    tokenizer = load_tokenizer(sft)
    model = sampling_copy(load_policy(sft).to(device(stage.params.runtime)), dtype)
    prompts = encode_prompts(tokenizer, [problem.question for problem in problems], stage.params.prompt)
    rows = [row for row, prompt in enumerate(prompts) if prompt is not None for _ in range(settings.samples)]
    which = np.arange(len(rows)) % settings.samples
    with progress("collect_preferences", len(rows)) as bar:
        samples = sample_responses(
            model,
            tokenizer,
            [prompts[row] or [] for row in rows],
            token_uniforms(seed, Purpose.PREFERENCES, 0, numbers[rows], which, settings.max_new_tokens),
            temperature=settings.temperature,
            batch_size=settings.batch_size,
            stop=stage.params.ppo.sampling.stop,
            on_rows=bar.advance,
            sampler=stage.params.generation.sampler,
        )
    texts: list[list[str]] = [[] for _ in problems]
    for row, sample in zip(rows, samples, strict=True):
        if sample.finished:
            texts[row].append(decode_response(tokenizer, sample.tokens))
    return texts


def label(stage: Stage, problem: Problem, texts: list[str]) -> list[Pair]:
    """The pairs of one problem."""
    settings, method = stage.params.preferences, stage.params.verifier.method
    right = [text for text in texts if is_correct(text, problem.gold, method)]
    wrong = [text for text in texts if not is_correct(text, problem.gold, method)]
    return make_pairs(
        problem.question,
        right,
        wrong,
        problem.answer,
        max_pairs=settings.max_pairs,
        gold_stand_in=settings.gold_stand_in,
    )


if __name__ == "__main__":
    run_stage("collect_preferences", main)
