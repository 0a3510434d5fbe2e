"""Registers the policy in MLflow: a version with its scores and its lineage, which becomes the candidate.

    python -m stages.register [key=value ...]          for example registry.name=mine

Writes nothing that DVC hashes. A policy that is registered already stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf import registry, tracking
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import Manifest, read_manifest
from rlhf.stage import Stage, run_stage

SPLITS = ("gate", "test")
MAKERS = {"models/policy": "train_ppo", "metrics/evaluation.json": "evaluate"}
"""The outputs by whose hash the runs that made this version are found, and their stages."""


def main(stage: Stage) -> None:
    name, policy = stage.params.registry.name, stage.input("models/policy")
    metrics = stage.read_json("metrics/evaluation.json", scores)
    metrics |= {"ppo.best_iteration": stage.read_json("metrics/ppo.json", lambda ppo: int(ppo["best_iteration"]))}
    version = registry.find_version(name, policy)
    if version:
        candidate = registry.candidate_number(name)
        elsewhere = f"; {registry.ALIAS} version: {candidate or 'none'}" if candidate != version.number else ""
        state = f"already registered{elsewhere}"
    else:
        version = registry.register_policy(
            policy,
            name=name,
            metrics=metrics,
            lineage=lineage(stage, read_manifest(policy)),
            max_new_tokens=stage.params.ppo.sampling.max_new_tokens,
            run=stage.log,
        )
        state = f"registered, {registry.ALIAS}"
    print(f"register: {version.name} version {version.number} ({state}), policy {version.policy_hash[:12]}")


def scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """What decides about a version: accuracies and paired gain on gate and test."""
    flat: dict[str, float] = {}
    for split in SPLITS:
        result = evaluation[split]
        flat |= {f"{split}.{model}_accuracy": float(result[model]["accuracy"]) for model in ("sft", "policy")}
        flat |= {f"{split}.{key}": float(result[key]) for key in ("gain", "gain_low", "p_value")}
    return flat


def lineage(stage: Stage, manifest: Manifest) -> dict[str, object]:
    """Code, data, checkpoints, params, seed and runs that made the policy."""
    tags: dict[str, object] = {"seed": manifest.seed, "source": manifest.source}
    tags |= {key.removeprefix("mlflow.source."): value for key, value in tracking.git_tags().items()}
    tags |= {f"{kind}_hash": parent for kind, parent in manifest.parents.items()}
    tags |= {f"params.{key}": json.dumps(value, sort_keys=True) for key, value in manifest.params.items()}
    tags |= {f"dvc.{path}": md5 for path, md5 in trained_on(stage.workspace).items()}
    for path, maker in MAKERS.items():
        run_id = tracking.find_run_by_outs(maker, {path: dvc_md5(stage.input(path))})
        tags |= {f"{maker}_run_id": run_id} if run_id else {}
    return tags


def trained_on(workspace: Path) -> dict[str, str]:
    """Hashes of the data and checkpoints that `train_ppo` read, if `dvc.lock` tells of this very policy."""
    import yaml

    lock = workspace / "dvc.lock"
    if not lock.is_file():
        return {}
    entry = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"].get("train_ppo", {})
    made = {out["path"]: out["md5"] for out in entry.get("outs", [])}
    if made.get("models/policy") != dvc_md5(workspace / "models/policy"):
        return {}
    return {dep["path"]: dep["md5"] for dep in entry["deps"] if dep["path"].startswith(("data/", "models/"))}


if __name__ == "__main__":
    run_stage("register", main)
