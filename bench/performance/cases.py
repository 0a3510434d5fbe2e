"""What is measured: each row sets contenders side by side on the same work, the peers' and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from bench.performance import floors
from bench.performance.floors import Peaks, Shape

DTYPES = ("float32", "bfloat16")
LENGTH = 256
"""Tokens a row where the number of tokens is what grows."""


class Floor(NamedTuple):
    """The least seconds for a case's work, and for its decoding alone; None where they are not worked out."""

    seconds: float | None = None
    decode: float | None = None


FloorOf = Callable[[Shape, Sequence[int], Peaks], Floor]
"""From the model's shape, the lengths of the prompts and the machine's peaks."""


class Case(NamedTuple):
    """One contender's share of a row.

    Attributes:
        contender: its name in the row.
        program: the module in bench.performance.measured that does the work.
        settings: what that is told, beside what all programs are.
        peer: whether it runs in the peers' environment.
        against: contenders that it is compared with.
        size: what grows from case to case, in a row about scaling.
    """

    contender: str
    program: str
    settings: dict[str, Any]
    peer: bool = False
    against: tuple[str, ...] = ()
    floor: FloorOf | None = None
    size: int | None = None


class Row(NamedTuple):
    """Cases that take turns; `once` where a single round has to do."""

    name: str
    title: str
    cases: list[Case]
    once: bool = False


@dataclass(frozen=True)
class Scale:
    """How large all of it is."""

    words: tuple[str, ...] = ("scale=smollm2-135m", "data=generator")
    rollouts: tuple[int, ...] = (32, 16, 64)
    new_tokens: int = 128
    rows: int = 8
    problems: int = 128
    batch: int = 64
    epochs: tuple[int, ...] = (1, 4)
    tokens: tuple[int, ...] = (8192, 16384, 32768, 65536)
    responses: tuple[int, ...] = (64, 256, 1024)
    batches: tuple[int, ...] = (1, 4, 8, 16)
    shapes: tuple[str, ...] = ("tiny", "135M", "500M")


FULL = Scale()
TRY = Scale(
    words=("scale=smoke",),
    rollouts=(4,),
    new_tokens=8,
    rows=4,
    problems=8,
    batch=4,
    epochs=(1,),
    tokens=(512, 1024),
    responses=(8, 16),
    batches=(1, 2),
    shapes=("tiny",),
)
"""Seconds a row: whether everything runs, not how fast."""


def rows(scale: Scale) -> list[Row]:
    """All rows, what matters most first."""
    first, *more = scale.rollouts
    first_epochs, *more_epochs = scale.epochs
    return [
        rollout(scale, first, all_samplers=True),
        update(scale),
        iteration(scale, first_epochs),
        evaluation(scale),
        *(iteration(scale, epochs) for epochs in more_epochs),
        *(rollout(scale, prompts) for prompts in more),
        *scaling(scale),
    ]


def rollout(scale: Scale, prompts: int, all_samplers: bool = False) -> Row:
    """Our engine and transformers' generate, every response as long as the others."""
    common = {"rows": prompts, "new_tokens": scale.new_tokens}
    theirs = [
        Case(
            f"{name}, {dtype}",
            "rollouts",
            {**common, "engine": engine, "dtype": dtype},
            floor=partial(rollout_floor, scale.new_tokens, dtype),
        )
        for dtype in DTYPES
        for engine, name in (("generate", "generate"), ("generate-static", "generate, static cache"))
    ]
    slower = [("transformers", "bfloat16")] if all_samplers else []
    ours = [
        Case(
            f"ours, {engine}, {dtype}",
            "rollouts",
            {**common, "engine": engine, "dtype": dtype},
            against=tuple(f"generate, {other}" for other in DTYPES),
            floor=partial(rollout_floor, scale.new_tokens, dtype),
        )
        for engine, dtype in (*(("native", dtype) for dtype in DTYPES), *slower)
    ]
    title = f"Rollout: {prompts} prompts × {scale.new_tokens} tokens"
    return Row(f"rollout-{prompts}", title, theirs + ours)


def update(scale: Scale) -> Row:
    """Our update and the plain one."""
    cases = [
        Case(
            f"{name}, {dtype}",
            "updates",
            {"way": way, **update_settings(scale.rows, scale.new_tokens, dtype)},
            against=(f"full logits, {dtype}",) if way == "ours" else (),
            floor=partial(update_floor, scale.new_tokens, dtype),
        )
        for dtype in DTYPES
        for way, name in (("full_logits", "full logits"), ("ours", "ours"))
    ]
    return Row("update", f"Update: one pass over {scale.rows} prompts × {scale.new_tokens} tokens", cases)


def iteration(scale: Scale, epochs: int) -> Row:
    """PPO iterations of TRL and of ours, with what each of them has by default and with the same four models."""
    work = {"rows": scale.rows, "new_tokens": scale.new_tokens}
    theirs = [
        Case(f"TRL, {dtype}", "trl_iteration", {**work, "epochs": epochs, "dtype": dtype}, peer=True)
        for dtype in DTYPES
    ]
    four = ["critic=separate", "reward=reward_model", "ppo.critic.warmup_iterations=0"]
    choices = [
        (choice, words, dtype) for choice, words in (("shared critic", []), ("four models", four)) for dtype in DTYPES
    ]
    choices += [("LoRA", ["ppo.lora.rank=16"], dtype) for dtype in DTYPES]
    if epochs > 1:  # what takes longest and says little beside one epoch
        choices = [each for each in choices if each[0] == "shared critic" or each[::2] == ("four models", "bfloat16")]
    ours = [
        Case(
            f"ours, {choice}, {dtype}",
            "iterations",
            {**work, "overrides": iteration_words(scale, epochs, dtype) + words},
            against=tuple(case.contender for case in theirs),
            # With frozen weights the backward pass is cheaper than the floor counts it.
            floor=None
            if choice == "LoRA"
            else partial(iteration_floor, scale.new_tokens, dtype, epochs, 4 if words else 2),
        )
        for choice, words, dtype in choices
    ]
    name = f"PPO iteration: {scale.rows} prompts × {scale.new_tokens} tokens, {counted(epochs, 'epoch')}"
    return Row(f"iteration-{epochs}", name, theirs + ours)


def evaluation(scale: Scale) -> Row:
    """Greedy answers of lm-evaluation-harness and of ours, to the same problems and in the same batches."""
    common = {"rows": scale.problems, "new_tokens": scale.new_tokens}
    cases = []
    for dtype in DTYPES:
        harness, ours = f"lm-evaluation-harness, {dtype}", f"ours, {dtype}"
        settings = {**common, "dtype": dtype, "batch_size": scale.batch}
        cases.append(Case(harness, "harness_evaluation", settings, peer=True))
        words = [f"ppo.sampling.max_new_tokens={scale.new_tokens}", f"evaluation.batch_size={scale.batch}"]
        words += ["generation.sampler=native"]
        cases.append(Case(ours, "evaluations", {**common, "dtype": dtype, "overrides": words}, against=(harness,)))
    title = f"Evaluation: {scale.problems} problems, up to {scale.new_tokens} tokens each, greedy"
    return Row("evaluation", title, cases)


def scaling(scale: Scale) -> Iterator[Row]:
    """How time grows: with tokens, response length, batch, model and processes; all of it ours, in bfloat16."""
    dtype = "bfloat16"

    def updates(rows: int, new_tokens: int, **more: Any) -> dict[str, Any]:
        return {"way": "ours", **update_settings(rows, new_tokens, dtype, micro=scale.rows), **more}

    def rollouts(rows: int, new_tokens: int, **more: Any) -> dict[str, Any]:
        return {"rows": rows, "new_tokens": new_tokens, "engine": "native", "dtype": dtype, **more}

    yield Row(
        "scaling-tokens",
        f"Update: tokens, in rows of {LENGTH}",
        [
            Case(f"{size} tokens", "updates", updates(size // LENGTH, LENGTH // 2, length=LENGTH), size=size)
            for size in scale.tokens
        ],
        once=True,
    )
    yield Row(
        "scaling-response",
        f"Update: response length, {scale.rows} rows",
        [Case(f"{size} tokens", "updates", updates(scale.rows, size), size=size) for size in scale.responses],
    )
    yield Row(
        "scaling-batch",
        f"Rollout: prompts at once × {scale.new_tokens} tokens",
        [
            Case(counted(size, "prompt"), "rollouts", rollouts(size, scale.new_tokens), size=size)
            for size in scale.batches
        ],
    )
    yield Row(
        "scaling-model",
        f"Model size: {scale.rows} prompts × {scale.new_tokens} tokens",
        [
            Case(f"{shape}, {what}", program, settings(scale.rows, scale.new_tokens, shape=shape))
            for shape in scale.shapes
            for what, program, settings in (("rollout", "rollouts", rollouts), ("update", "updates", updates))
        ],
    )
    work = {"rows": scale.rows, "new_tokens": scale.new_tokens}
    alone, words = "one process, all cores", iteration_words(scale, 1, dtype)
    two = {**work, "processes": 2, "overrides": [*words, "distributed.processes=2"]}
    yield Row(
        "scaling-processes",
        "PPO iteration: one process and two, the cores shared out",
        [
            Case(alone, "iterations", {**work, "overrides": words}),
            Case("two processes", "iterations", two, against=(alone,)),
        ],
    )


def update_settings(rows: int, new_tokens: int, dtype: str, micro: int | None = None) -> dict[str, Any]:
    """One step of the optimiser over so many rows."""
    words = [f"runtime.dtype={dtype}", "ppo.epochs=1", "ppo.minibatches=1", f"ppo.micro_batch_size={micro or rows}"]
    return {"rows": rows, "new_tokens": new_tokens, "overrides": words}


def iteration_words(scale: Scale, epochs: int, dtype: str) -> list[str]:
    """The params of one iteration: a response a prompt, one step of the optimiser an epoch."""
    sizes = {"prompts_per_iteration": scale.rows, "micro_batch_size": scale.rows, "epochs": epochs}
    sizes |= {"sampling.max_new_tokens": scale.new_tokens, "sampling.batch_size": scale.rows}
    sizes |= {"iterations": 1, "samples_per_prompt": 1, "minibatches": 1, "warmup_iterations": 0}
    words = [f"ppo.{name}={size}" for name, size in sizes.items()]
    return [*words, f"runtime.dtype={dtype}", "generation.sampler=native"]


def rollout_floor(new_tokens: int, dtype: str, shape: Shape, prompts: Sequence[int], peaks: Peaks) -> Floor:
    """Of a rollout."""
    work = shape, prompts, new_tokens, dtype, peaks
    return Floor(floors.rollout_seconds(*work), floors.decode_seconds(*work))


def update_floor(new_tokens: int, dtype: str, shape: Shape, prompts: Sequence[int], peaks: Peaks) -> Floor:
    """Of an update."""
    return Floor(floors.update_seconds(shape, prompts, new_tokens, dtype, peaks))


def iteration_floor(
    new_tokens: int, dtype: str, epochs: int, models: int, shape: Shape, prompts: Sequence[int], peaks: Peaks
) -> Floor:
    """Of an iteration."""
    work = shape, prompts, new_tokens, dtype, peaks
    return Floor(floors.iteration_seconds(*work, epochs=epochs, models=models))


def counted(count: int, noun: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
