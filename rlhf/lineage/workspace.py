"""A workspace in which a version is made again: its commit, changes, params and lock, and nothing of the checkout's.

It is a clone, so its DVC cache, tracking database and training state are its own, and it registers nothing. The same
command goes on where it was stopped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf import anchors, environments
from rlhf.errors import UserError
from rlhf.hashes import dvc_md5
from rlhf.lineage.compare import Made
from rlhf.lineage.history import History
from rlhf.machine import of_tags
from rlhf.registry import records
from rlhf.registry.lookup import SOURCE_VARIABLE
from rlhf.tracking.server import client

MARK = ".git/reproduces"
"""The file that says which policy is made here."""
LAST_STAGE = "evaluate"
GRACE_SECONDS = 30.0
CHECKOUTS_OWN = ("RLHF_", "MLFLOW_", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that name the places of another checkout: without them a clone has its own."""


def prepare(history: History, found: Mapping[str, bytes], directory: Path) -> None:
    """Makes the workspace whole or not at all, or finds the one that was made for the same policy before.

    Raises UserError where something else is there, or where the version does not say, or not whole, what it was made
    from.
    """
    mark = directory / MARK
    if mark.is_file() and mark.read_text() == history.policy_hash:
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is in use: name a new directory, or one where this version was begun")
    missing = [name for name in (records.LOCK, records.PARAMS) if name not in found]
    if missing or not history.commit:
        what = " and ".join([*missing, *([] if history.commit else ["its commit"])])
        raise UserError(f"{history.name} version {history.version} did not keep {what}: take another version")
    if history.is_masked:
        raise UserError(
            f"{history.name} version {history.version}: its code held a secret, which its {records.DIFF} has masked: "
            "it cannot be made again: move the secret to an environment variable, and register another version"
        )
    if anchors.git("cat-file", "-e", f"{history.commit}^{{commit}}", directory=anchors.CHECKOUT) is None:
        raise UserError(f"commit {history.commit} is not in {anchors.CHECKOUT}: git fetch it, and run this again")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _clone(history.commit, found, partial)
        (partial / MARK).write_text(history.policy_hash)
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clone(commit: str, found: Mapping[str, bytes], place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    _git("clone", "--quiet", "--no-checkout", str(anchors.CHECKOUT), str(place))
    _git("-C", str(place), "checkout", "--quiet", "--detach", commit)
    if diff := found.get(records.DIFF):
        _git("-C", str(place), "apply", "--whitespace=nowarn", "-", given=diff)
    for name in (records.LOCK, records.PARAMS):
        (place / name).write_bytes(found[name])
    (place / ".dvc/config.local").write_text("[cache]\n    dir = cache\n")  # whatever the user's own settings say


def require_same_inputs(found: Mapping[str, bytes], workspace: Path) -> None:
    """Raises UserError for the first code or source file in the workspace that is not what the lock file names."""
    entries = records.lock_stages(found).values()
    made = {path for entry in entries for path in records.hashes(entry.get("outs", []))}
    for path, md5 in sorted(
        {key: md5 for entry in entries for key, md5 in records.hashes(entry["deps"]).items()}.items()
    ):
        if any(f"{path}/".startswith(f"{out}/") for out in made):
            continue
        if not (workspace / path).exists():
            raise UserError(f"{workspace / path} is missing: the version was made from it: copy it there (md5 {md5})")
        if dvc_md5(workspace / path) != md5:
            raise UserError(
                f"{path}: not what the version was made from (md5 {md5}): its records do not fit its commit"
            )


def environment(workspace: Path) -> tuple[Path, list[str]]:
    """The Python that has the packages of the workspace's lock file, and those that the running one lacks.

    Where there are any, an environment is made in the workspace.
    """
    missing = lock_differences(_text(anchors.CHECKOUT), _text(workspace))
    return environments.make(workspace, lambda command: run(command, workspace, {})), missing


def _text(checkout: Path) -> str:
    return (checkout / "requirements.lock").read_text(encoding="utf-8")


def lock_differences(running: str, wanted: str) -> list[str]:
    """Where two lock files differ, by package: "torch 2.15.0 here, 2.14.1 there"; empty where they are equal."""
    if running == wanted:
        return []
    here, there = (dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)) for text in (running, wanted))
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    found = [f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} there" for name in names]
    return found or ["the hashes alone"]


def make_again(python: Path, workspace: Path) -> None:
    """Runs `dvc repro` up to the evaluation in the workspace: every stage for real, nothing from a cache."""
    environ = {**environments.programs_of(python), "DO_NOT_TRACK": "true", SOURCE_VARIABLE: anchors.tracking_uri()}
    run([str(python), "-m", "dvc", "repro", "--no-run-cache", LAST_STAGE], workspace, environ)


def run(command: Sequence[str], workspace: Path, environ: dict[str, str]) -> None:
    """Runs `command` in the workspace, its output on standard error; it ends when this process is interrupted.

    Raises UserError where it fails.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(CHECKOUTS_OWN)}
    process = subprocess.Popen(
        command, cwd=workspace, env=inherited | environ, stdout=sys.stderr, start_new_session=True
    )
    try:
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if code:
        raise UserError(
            f"{workspace}: {' '.join(command[1:4])} failed with {code}, see above: the same command goes on"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a session: DVC alone would leave its stage behind."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def made(workspace: Path) -> Made:
    """What is made in the workspace now, by its files, its metrics and its own tracking database.

    What the policy does not depend on, such as a reward model beside a verifier's score, is not made again.
    """
    entries = records.lock_stages({records.LOCK: (workspace / records.LOCK).read_bytes()})
    paths = [path for entry in entries.values() for path in records.hashes(entry.get("outs", []))]
    outs = {path: dvc_md5(workspace / path) for path in paths if (workspace / path).exists()}
    evaluation = json.loads((workspace / "metrics/evaluation.json").read_bytes())
    return Made(outs, _machine(workspace), evaluation)


def _machine(workspace: Path) -> dict[str, str]:
    registry = client(f"sqlite:///{workspace / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in registry.search_experiments()]
    runs = registry.search_runs(experiments, "tags.stage = 'train_ppo' and attributes.status = 'FINISHED'")
    return of_tags(runs[0].data.tags) if runs else {}


def _git(*arguments: str, given: bytes | None = None) -> None:
    done = subprocess.run(
        ["git", *arguments], check=False, env=anchors.git_environment(), input=given, capture_output=True
    )
    if done.returncode:
        fault = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"git {' '.join(word for word in arguments if word.isalpha())}: {fault}")
