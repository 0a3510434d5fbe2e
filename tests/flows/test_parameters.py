"""The forms' choices are those of conf/, and become the command line's overrides."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from flows.parameters import Choices
from rlhf.config import CONF_DIR, compose

NIGHT = datetime(2026, 12, 2, 2, tzinfo=UTC)


@pytest.mark.parametrize("group", ["scale", "reward", "critic", "kl"])
def test_the_choices_are_those_of_conf(group: str) -> None:
    offered = get_args(Choices.model_fields[group].annotation)
    assert set(offered) == {path.stem for path in (CONF_DIR / group).glob("*.yaml")}


def test_the_problems_are_the_scales_own_or_those_of_the_word() -> None:
    offered = set(get_args(Choices.model_fields["data"].annotation))
    assert offered == {"of_scale"} | {path.stem for path in (CONF_DIR / "data").glob("*.yaml")}

    def data(**choices: Any) -> dict[str, Any]:
        found: dict[str, Any] = compose(Choices.model_validate(choices).hydra(NIGHT))["data"]
        return found

    assert data(scale="smollm2-135m")["source"] == "hub"
    assert data(scale="smollm2-135m", data="generator")["source"] == "generator"
    assert data(scale="tiny", data="gsm8k")["source"] == "hub"
    files = data(scale="tiny", data="files", overrides=["data.reads=/data/gsm8k"])
    assert (files["source"], files["reads"]) == ("files", "/data/gsm8k")


def test_the_defaults_are_those_of_the_command_line() -> None:
    assert compose(Choices().hydra(NIGHT)) == compose()


def test_every_field_says_what_it_is() -> None:
    assert all(field.description for field in Choices.model_fields.values())


def test_choices_become_overrides_of_which_the_last_wins() -> None:
    choices = Choices(scale="smoke", reward="mixture", overrides=["ppo.kl.coef=0.07"], seed="from_date")
    raw = compose(choices.hydra(NIGHT))
    assert raw["seed"] == 20261202
    assert raw["ppo"]["kl"]["coef"] == 0.07
    assert raw["ppo"]["reward"]["source"] == "mixture"
    assert raw["data"]["generator"]["seed"] == compose()["data"]["generator"]["seed"]


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"scale": "huge"}, "scale"),
        ({"colour": "blue"}, "colour"),
        ({"overrides": ["no assignment"]}, "overrides.0"),
        ({"revision": "--upload-pack=x"}, "revision"),
        ({"revision": "v1", "allow_dirty": True}, "allow_dirty puts uncommitted changes on HEAD"),
        ({"seed": "from_date", "overrides": ["seed=3"]}, "take one of them"),
        ({"data": "files"}, "name their directory on the worker's host by its absolute path"),
        ({"data": "files", "overrides": ["data.reads=data/gsm8k"]}, "data.reads=/absolute/path"),
    ],
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Choices.model_validate(wrong)
    named = [".".join(map(str, error["loc"])) for error in refusal.value.errors()]
    assert fault in named or fault in str(refusal.value)
