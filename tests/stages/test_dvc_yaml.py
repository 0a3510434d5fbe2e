"""The pipeline's graph: which stage depends on which code and params, and what DVC reruns when they change."""

from __future__ import annotations

import re
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import config, tracking
from tests import param_reads, stage_code

ROOT = Path(__file__).resolve().parents[2]
PIPELINE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES, ARTIFACTS = PIPELINE["stages"], PIPELINE["artifacts"]
KEYS = list(param_reads.leaf_keys())
TEMPLATES = {
    "data.reads": "prepare_data",
    "sft.reads": "fetch_sft",
    "preferences.reads": "collect_preferences",
    "ppo.reward.reads": "train_ppo",
}
"""Keys that name a dep, and the stage that has it."""

ORDER = list(STAGES)

DIRECT = {
    "seed": "fetch_sft finetune_sft collect_preferences train_reward train_ppo",
    "runtime": "finetune_sft collect_preferences train_reward train_ppo evaluate",
    "generation": "collect_preferences train_reward train_ppo evaluate",
    "prompt": "fetch_sft finetune_sft collect_preferences train_reward train_ppo evaluate",
    "verifier": "collect_preferences train_ppo evaluate",
    "data": "prepare_data",
    "data.hub": "prepare_data register",
    "data.source": "prepare_data register",
    "sft.source": "fetch_sft",
    "sft.reads": "fetch_sft",
    "sft.chat_template": "fetch_sft",
    "sft.eos_token": "fetch_sft",
    "sft.tiny": "fetch_sft",
    "sft.finetune": "finetune_sft",
    "preferences": "collect_preferences",
    "preferences.max_new_tokens": "fetch_sft collect_preferences",
    "reward_model": "train_reward",
    "ppo": "train_ppo",
    "ppo.micro_batch_size": "train_ppo evaluate",
    "ppo.sampling": "train_reward train_ppo",
    "ppo.sampling.temperature": "train_reward train_ppo evaluate",
    "ppo.sampling.max_new_tokens": "fetch_sft train_reward train_ppo evaluate register",
    "ppo.sampling.stop": "collect_preferences train_reward train_ppo evaluate",
    "distributed": "train_ppo",
    "evaluation": "evaluate",
    "evaluation.batch_size": "train_ppo evaluate",
    "evaluation.confidence": "train_reward evaluate",
    "registry": "register",
    "gate": "register",
    "limits": "",
    "tracking": "",
}
"""Which stages a changed key reruns by itself; the longest prefix counts. What depends on their outputs follows."""


def covered(key: str, declared: list[str]) -> bool:
    return any(key == entry or key.startswith(f"{entry}.") for entry in declared)


def outs(block: dict[str, Any]) -> list[str]:
    entries = [*block.get("outs", []), *block.get("metrics", []), *block.get("plots", [])]
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


# --- what dvc.yaml says


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_of_a_stage_is_what_it_imports(stage):
    """Renew it with python -m tests.stage_code."""
    named = {dep for dep in STAGES[stage]["deps"] if stage_code.is_code(dep)}
    assert named == stage_code.code_of(stage_code.build_graph(), stage)


def test_files_that_a_module_names_as_neighbours_are_its_code():
    graph = stage_code.build_graph()
    assert "rlhf/evaluation/report.html.j2" in stage_code.code_of(graph, "evaluate")
    assert "rlhf/registry/served_policy.py" in stage_code.code_of(graph, "register")
    assert "rlhf/evaluation/report.html.j2" not in stage_code.code_of(graph, "train_ppo")


@pytest.mark.parametrize("stage", STAGES)
def test_every_dep_is_there_or_made_by_a_stage(stage):
    made = [out for block in STAGES.values() for out in outs(block)]
    for dep in STAGES[stage]["deps"]:
        is_made = any(dep == out or dep.startswith(f"{out}/") for out in made)
        assert is_made or dep.startswith("${") or (ROOT / dep).is_file(), dep


def test_every_declared_param_is_a_key_or_a_section():
    for stage, block in STAGES.items():
        for entry in block["params"]:
            assert any(covered(key, [entry]) for key in KEYS), f"{stage}: {entry}"


def test_no_param_is_declared_twice():
    for stage, block in STAGES.items():
        for entry in block["params"]:
            others = [other for other in block["params"] if other != entry]
            assert block["params"].count(entry) == 1, f"{stage}: {entry}"
            assert not covered(entry, others), f"{stage}: {entry}"


def test_templates_are_the_reads_keys():
    found = {
        name: stage
        for stage, block in STAGES.items()
        for text in [block["cmd"], *block["deps"], *outs(block)]
        for name in re.findall(r"\$\{(.*?)\}", text)
    }
    assert found == TEMPLATES
    assert {key for key in KEYS if key.endswith(".reads")} == set(TEMPLATES)


def test_every_key_has_its_row_in_the_table():
    """The table of this test against `params` and templates of dvc.yaml, key by key."""
    for key in KEYS:
        row = max((prefix for prefix in DIRECT if covered(key, [prefix])), key=len)
        found = {stage for stage, block in STAGES.items() if covered(key, block["params"])}
        found |= {TEMPLATES[key]} if key in TEMPLATES else set()
        assert found == set(DIRECT[row].split()), key


def test_a_stages_commands_and_outs():
    for stage, block in STAGES.items():
        assert block["cmd"] == f"python -m stages.{stage}"
        assert (ROOT / "stages" / f"{stage}.py").is_file()
    assert STAGES["register"].get("always_changed") is True
    assert outs(STAGES["register"]) == []
    assert [stage for stage, block in STAGES.items() if block.get("always_changed")] == ["register"]


def test_the_models_that_stages_make_are_named_for_dvcs_registry():
    made = {path: stage for stage, block in STAGES.items() for path in outs(block)}
    assert {name: made[model["path"]] for name, model in ARTIFACTS.items()} == {
        "sft": "finetune_sft",
        "reward": "train_reward",
        "policy": "train_ppo",
    }
    for model in ARTIFACTS.values():
        assert model["type"] == "model" and model["desc"] and "gsm8k" in model["labels"]


def test_a_stages_run_shows_the_params_that_the_stage_depends_on():
    raw = config.compose()
    for stage, block in STAGES.items():
        shown = tracking.flatten(tracking.params_of(stage, raw))
        assert {key for key in KEYS if key in shown} == {key for key in KEYS if covered(key, block["params"])}, stage


# --- what the code reads


def test_every_key_is_read():
    assert set(KEYS) - param_reads.read_anywhere() - set(TEMPLATES) == set()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_the_params_that_it_declares_and_no_others(stage):
    """An undeclared read would miss a rerun; a declared key that nothing reads would rerun for nothing."""
    declared = {key for key in KEYS if covered(key, STAGES[stage]["params"])}
    read = param_reads.read_by_stage(stage) & set(KEYS)
    assert read - declared == set()
    assert declared - read - param_reads.read_by_frame() - set(TEMPLATES) == set()


# --- what DVC does


class Pipeline:
    """A copy of the pipeline in a repository of its own, each command replaced by one that hashes what it reads."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in (".gitignore", ".dvcignore", "params.yaml", ".dvc/config", ".dvc/.gitignore", "conf/nothing"):
            self._write(name, (ROOT / name).read_text())
        for dep in {dep for block in STAGES.values() for dep in block["deps"] if stage_code.is_code(dep)}:
            self._write(dep, dep)
        self._write("made.sh", MADE)
        stages = {name: block | {"cmd": self._command(name, block)} for name, block in STAGES.items()}
        self._write("dvc.yaml", yaml.safe_dump(PIPELINE | {"stages": stages}))
        for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm start"):
            subprocess.run(["git", *command.split()], cwd=place, check=True)

    def change(self, *overrides: str) -> None:
        """Lays overrides on params.yaml, as composing would."""
        from omegaconf import OmegaConf

        path = self.place / "params.yaml"
        config.write(
            OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist([*overrides]))), path
        )  # type: ignore[arg-type]
        config.load((), path)

    def status(self) -> set[str]:
        """The stages that `dvc status` shows as changed."""
        from dvc.repo import Repo

        with chdir(self.place), Repo() as repo:
            return set(repo.status())

    def repro(self) -> list[str]:
        """The stages that `dvc repro` ran, in the pipeline's order."""
        from dvc.repo import Repo

        log = self.place / "ran.log"
        log.unlink(missing_ok=True)
        with chdir(self.place), Repo() as repo:
            repo.reproduce()
        ran = log.read_text().split()
        assert len(ran) == len(set(ran))
        return sorted(ran, key=ORDER.index)

    def git_status(self) -> str:
        return self.git("status", "--porcelain")

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=self.place, check=True, capture_output=True, text=True).stdout

    def _write(self, name: str, text: str) -> None:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @staticmethod
    def _command(stage: str, block: dict[str, Any]) -> str:
        return " ".join(["sh made.sh", stage, *block["deps"], "--", *outs(block)])


MADE = """# made.sh STAGE DEPS -- OUTS: writes a hash of deps and params to every out.
echo $1 >> ran.log; shift
read=params.yaml
while [ "$1" != -- ]; do read="$read $1"; shift; done; shift
hash=$(for path in $read; do find $path -type f | LC_ALL=C sort | xargs cat; done | cksum)
for out; do
  mkdir -p $(dirname $out)
  case $out in
    *.json) echo "{\\"hash\\": \\"$hash\\"}" > $out;;
    *.html) echo $hash > $out;;
    *.csv) echo "hash" > $out; echo "$hash" >> $out;;
    data/prepared)
      mkdir -p $out
      for split in train validation gate test; do echo $split $hash > $out/$split.parquet; done;;
    *) mkdir -p $out; echo $hash > $out/file;;
  esac
done
"""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Pipeline:
    return Pipeline(tmp_path_factory.mktemp("pipeline"))


def after(*stages: str) -> list[str]:
    """The stages and all that depend on their outputs, in the pipeline's order."""
    changed = set(stages)
    for stage in ORDER:
        made = [out for other in changed for out in outs(STAGES[other])]
        deps = [dep for dep in STAGES[stage]["deps"] if not dep.startswith("${")]
        if any(dep == out or dep.startswith(f"{out}/") for dep in deps for out in made):
            changed.add(stage)
    return sorted(changed | {"register"}, key=ORDER.index)


def test_dvc_reruns_what_a_change_concerns(pipeline):
    """One story, because each step needs the state that the steps before it left."""
    everything = ORDER
    assert pipeline.repro() == everything
    assert pipeline.repro() == ["register"]
    assert pipeline.git_status() == "?? dvc.lock\n?? ran.log\n"

    story: list[tuple[list[str], list[str]]] = [
        (["evaluation.samples=11"], ["evaluate", "register"]),
        (["registry.name=other"], ["register"]),
        (["gate.max_kl=5"], ["register"]),
        (["ppo.lr=0.0004"], ["train_ppo", "evaluate", "register"]),
        (["reward_model.lr=0.002"], ["train_reward", "register"]),
        (
            ["ppo.reward.source=reward_model", "ppo.reward.reads=models/reward"],
            ["train_ppo", "evaluate", "register"],
        ),
        (["reward_model.lr=0.003"], ["train_reward", "train_ppo", "evaluate", "register"]),
        (["preferences.samples=5"], ["collect_preferences", "train_reward", "train_ppo", "evaluate", "register"]),
        (["data.generator.seed=1"], [stage for stage in everything if stage != "fetch_sft"]),
        (["sft.tiny.layers=2"], [stage for stage in everything if stage != "prepare_data"]),
    ]
    for overrides, expected in story:
        pipeline.change(*overrides)
        assert pipeline.repro() == expected, overrides
    assert pipeline.repro() == ["register"]


def test_dvc_gets_a_registered_model_by_its_name(pipeline, tmp_path):
    """As for a team that commits its lock file: a version is a tag of git."""
    from dvc.repo.artifacts import Artifacts

    pipeline.repro()
    pipeline.git("add", "-f", "dvc.lock")
    pipeline.git("commit", "-qm", "locked")
    for name, model in ARTIFACTS.items():
        pipeline.git("tag", "-am", "first", f"{name}@v1.0.0")
        Artifacts.get(str(pipeline.place), name, out=str(tmp_path / name))
        assert (tmp_path / name / "file").read_bytes() == (pipeline.place / model["path"] / "file").read_bytes()
    pipeline.git("rm", "-q", "--cached", "dvc.lock")


def test_what_follows_a_stage_is_told_by_the_graph():
    """With reward=verifier, whose reward model nobody reads but its own stage."""
    assert after("train_reward") == ["train_reward", "register"]
    assert after("train_ppo") == ["train_ppo", "evaluate", "register"]
    assert after("prepare_data") == [stage for stage in ORDER if stage != "fetch_sft"]
    assert after("fetch_sft") == [stage for stage in ORDER if stage != "prepare_data"]


@pytest.mark.parametrize(
    "path",
    [
        "rlhf/ppo/losses.py",
        "rlhf/models/checkpoints.py",
        "requirements.lock",
        "stages/evaluate.py",
        "rlhf/registry/gate.py",
    ],
)
def test_changed_code_reruns_the_stages_that_import_it(pipeline, path):
    users = {stage for stage, block in STAGES.items() if path in block["deps"]}
    assert users
    pipeline.repro()
    file = pipeline.place / path
    file.write_text(file.read_text() + "\nchanged\n")
    assert pipeline.status() == users | {"register"}
