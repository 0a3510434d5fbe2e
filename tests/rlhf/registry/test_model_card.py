"""What a model card says, and that it fits into MLflow."""

from __future__ import annotations

from typing import Any

from rlhf.config import compose, validate
from rlhf.models.checkpoints import Manifest
from rlhf.registry.model_card import render
from tests.policies import PARAMS

MANIFEST = Manifest(
    kind="policy",
    source="hf://org/model@main",
    revision="c0ffee",
    parents={"sft": "5f7", "reward": "4e8"},
    params={"ppo": PARAMS.ppo.model_dump()},
    seed=3,
    prompt={"max_tokens": 160},
    stop_token="<|end|>",
    license="apache-2.0",
)
LINEAGE = {"git.commit": "abc", "git.dirty": "false", "dvc.data/prepared/train.parquet": "d1", "dvc.models/sft": "m1"}


def split(n: int, p_value: float) -> dict[str, Any]:
    return {
        "n": n,
        "method": "strict",
        "confidence": 0.95,
        "sft": {"accuracy": 0.3, "low": 0.25, "high": 0.35},
        "policy": {"accuracy": 0.72, "low": 0.7, "high": 0.75},
        "gain": 0.42,
        "gain_low": 0.37,
        "gain_high": 0.47,
        "p_value": p_value,
        "parse_failures": {"sft": 0.5, "policy": 0.015},
        "cut_off": {"sft": 0.5, "policy": 0.02},
    }


def card(manifest: Manifest = MANIFEST, lineage: dict[str, str] = LINEAGE, p: float = 2e-5, *choices: str) -> str:
    evaluation = {"gate": split(400, 3e-6), "test": split(500, p)}
    data = validate(compose(["scale=smoke", *choices])).data
    return render(
        "my-policy",
        manifest=manifest,
        evaluation=evaluation,
        ppo={"best_iteration": 9, "iterations": 12},
        kl=1.25,
        data=data,
        lineage=lineage,
        max_new_tokens=128,
    )


def test_it_says_what_made_the_policy_and_what_it_is_worth():
    text = card()
    assert text.startswith("# my-policy\n")
    for line in (
        "| start | `hf://org/model@main`, revision `c0ffee` |",
        "| checkpoints | reward `4e8`, sft `5f7` |",
        "| license of the start | apache-2.0 |",
        "| data | made by the built-in generator of word problems, Apache-2.0 |",
        "| data files (md5) | data/prepared/train.parquet `d1` |",
        "| code | commit `abc` |",
        "| seed | 3 |",
        "| gate | 400 | 30.0 % [25.0, 35.0] | 72.0 % [70.0, 75.0] | +42.0 [+37.0, +47.0] | 3e-06 |",
        "| test | 500 | 30.0 % [25.0, 35.0] | 72.0 % [70.0, 75.0] | +42.0 [+37.0, +47.0] | 2e-05 |",
        "Cut off by the length limit on test: 2.0 %; without a number on test: 1.5 %; KL to the start on sampled "
        "training prompts: 1.25 nats a sequence.",
        "- It reads questions of at most 160 tokens; it was evaluated with answers of at most 128.",
    ):
        assert line in text.splitlines()
    assert "12 PPO iterations of 8 prompts with 2 responses each, 1 epochs, learning rate 0.0003, all weights" in text
    assert "Kept: iteration 9, the best on validation." in text


def test_what_is_not_known_is_not_made_up():
    text = card(MANIFEST.model_copy(update={"license": None, "revision": None}), {})
    assert "| license of the start | not stated by its source |" in text
    assert "| start | `hf://org/model@main` |" in text
    assert not [row for row in ("| code |", "| data files") if row in text]


def test_a_changed_checkout_is_told():
    assert "| code | commit `abc`, with uncommitted changes |" in card(lineage=LINEAGE | {"git.dirty": "true"})


def test_each_source_of_data_is_named():
    hub = card(MANIFEST, LINEAGE, 2e-5, "data=gsm8k", "data.hub.revision=e53f04")
    assert "| data | openai/gsm8k (main, e53f04) of the hub, under its own license |" in hub
    assert "local files in GSM8K's format" in card(MANIFEST, LINEAGE, 2e-5, "data=files")
    templates = "come from a few templates"
    assert templates in card() and templates not in hub


def test_a_policy_without_a_gain_says_so_first():
    limit = "- No significant gain over its start was found on test."
    assert limit not in card()
    assert card(p=0.2).split("## Limits\n\n")[1].startswith(limit)


def test_a_p_value_that_was_rounded_away_is_no_zero():
    assert "| test | 500 | 30.0 % [25.0, 35.0] | 72.0 % [70.0, 75.0] | +42.0 [+37.0, +47.0] | < 1e-06 |" in card(p=0.0)


def test_it_fits_into_a_description():
    long = MANIFEST.model_copy(update={"source": "x" * 6000})
    assert len(card()) < 4000
    assert len(card(long)) <= 5000
    assert card(long).endswith(" ...\n")
