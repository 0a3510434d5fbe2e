"""docs/ppo.md names functions and params: all of them exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from rlhf.config import describe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ppo.md").read_text()
MODULES = ("advantages", "curriculum", "guards", "kl", "losses", "rewards", "rollout", "trainer", "update")
KEYS = {key for key, _ in describe()}
SECTIONS = {key.split(".")[-2] for key in KEYS if "." in key}


def exists(module: str, path: str) -> bool:
    thing: object = import_module(module)
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing is not None


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"(rlhf/[\w/]+)\.py:(\w+)", PAGE))))
def test_a_function_of_a_file_exists(file: str, name: str) -> None:
    assert exists(file.replace("/", "."), name)


@pytest.mark.parametrize(
    ("module", "name"), sorted(set(re.findall(rf"\b({'|'.join(MODULES)})\.(?!py\b)([\w.]*\w)", PAGE)))
)
def test_a_name_behind_a_dot_is_a_function_or_a_param(module: str, name: str) -> None:
    assert exists(f"rlhf.ppo.{module}", name) or f"ppo.{module}.{name}" in KEYS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:rlhf|tests)/[\w/]+(?:\.py)?)", PAGE))))
def test_a_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+\.[a-z_]+)(?:=[^`]*)?`", PAGE))))
def test_a_param_of_a_section_exists(name: str) -> None:
    section, _, rest = name.partition(".")
    if section in SECTIONS and not exists("rlhf.ppo.kl", rest):
        assert {name, f"ppo.{name}"} & KEYS


def test_the_page_names_every_param_of_ppo() -> None:
    """But for those that say only how much is computed at once."""
    sizes = {"ppo.iterations", "ppo.sampling.batch_size", "ppo.reward.reads"}
    named = {key for key in KEYS if re.search(rf"\b{re.escape(key.removeprefix('ppo.'))}\b", PAGE)}
    assert {key for key in KEYS if key.startswith(("ppo.", "distributed."))} - named <= sizes
