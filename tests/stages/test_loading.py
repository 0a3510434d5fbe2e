"""What is loaded to run a stage: seconds, in each of eight processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "mlflow", "scipy", "pandas", "datasets", "great_expectations", "peft"}


def loaded(module: str) -> set[str]:
    """The heavy packages that importing a module loads."""
    script = f"import {module}, sys; print(*{HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("stage", ["prepare_data", "fetch_sft", "register"])
def test_a_stage_that_trains_and_samples_nothing_loads_what_it_uses_when_it_uses_it(stage: str):
    assert loaded(f"stages.{stage}") == set()


def test_the_flow_loads_no_numerical_library():
    assert loaded("flows.pipeline_flow") & {"torch", "transformers", "scipy", "pandas"} == set()


def test_a_policy_without_an_adapter_loads_no_peft():
    assert "peft" not in loaded("stages.train_ppo")


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_stage_that_is_interrupted_while_it_loads_says_so_unless_it_is_one_of_several_processes(rank: str | None):
    script = "import stages; stages._RUNNING = ['train_ppo']; stages._stop_loading(15, None)"
    environ = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environ |= {"LOCAL_RANK": rank} if rank else {}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True)
    said = (done.returncode, done.stderr)
    assert said == ((143, "") if rank else (1, "train_ppo: interrupted while loading: nothing was written\n"))
