"""What the loop's parts are refused to be built from, in one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.errors import UserError
from rlhf.models.checkpoints import MANIFEST
from rlhf.models.reward_model import Normalisation
from rlhf.models.tiny import make_tiny
from rlhf.params import Tiny
from rlhf.ppo import setup

PROBLEMS = [
    Problem(question, "#### 1", "1", "#### 1", 1, "test") for question in ("1 + 0 = ?", "Tom has an apple. " * 9)
]


def reward_model(directory: Path, extra: dict[str, Any]) -> Path:
    """A checkpoint's manifest and no more."""
    text = {"kind": "reward", "source": "tiny:", "seed": 0, "stop_token": "<e>", "files": {}, "extra": extra}
    (directory / MANIFEST).write_text(json.dumps(text))
    return directory


def test_the_normalisation_is_the_manifests(tmp_path: Path) -> None:
    made = reward_model(tmp_path, {"normalisation": {"mean": 0.5, "std": 2.0}})
    assert setup.normalisation(made) == Normalisation(mean=0.5, std=2.0)


@pytest.mark.parametrize("extra", [{}, {"normalisation": None}, {"normalisation": {"mean": 0.5}}])
def test_a_reward_model_without_its_normalisation_is_named(tmp_path: Path, extra: dict[str, Any]) -> None:
    fault = f"{tmp_path / MANIFEST}: extra.normalisation lacks the score's mean and std: run dvc repro train_reward"
    with pytest.raises(UserError) as caught:
        setup.normalisation(reward_model(tmp_path, extra))
    assert str(caught.value) == fault


def test_a_validation_of_too_long_prompts_is_refused_and_one_that_fits_is_enough() -> None:
    """With all answers counted as wrong no iteration could be selected; a mean score would be that of none."""
    _, tokenizer = make_tiny(Tiny(hidden_size=8, layers=1, heads=2, intermediate_size=8, context=64, vocabulary=300), 0)
    params = validate(compose(["scale=smoke", "prompt.max_tokens=24"]))
    setup.validation(PROBLEMS, tokenizer, None, params)
    with pytest.raises(UserError, match="^prompt.max_tokens=24: no validation problem fits: raise it$"):
        setup.validation(PROBLEMS[1:], tokenizer, None, params)
