"""One Prefect task a DVC stage: `dvc repro --single-item` in a child process, its lines in the run's log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from rlhf import anchors, config, locks, tracking
from rlhf.environments import interpreter, programs_of
from rlhf.errors import UserError
from rlhf.params import REGISTERED, RUN, Params, on_hub
from rlhf.redaction import redact, redacted_errors
from rlhf.registry import records
from tasks.artifacts import ProgressArtifact, show_results
from tasks.devices import lock_files
from tasks.events import announce_refusal
from tasks.processes import Terms, over_limit, run_lines, without_a_word
from tasks.supervisor import OWN_LINE, TIMED_OUT

RETRIES = 2
RETRY_DELAY_SECONDS = 10.0

RUNNING = re.compile(r"Running stage '.*':")
RESTORED = re.compile(r"Stage '.*' is cached - skipping run, checking out outputs")
CHATTER = re.compile(
    r"|> .*|Stage '.*' didn't change, skipping|(Generating|Updating) lock file '.*'|Data and pipelines are up to date\."
    r"|WARNING: Process .* in RWLock-file .* had been killed\. Auto removed it from the lock file\."
    r"|Use `dvc push` .*|To track the changes with git, run:|\s*git add .*"
    r"|To enable auto staging, run:|\s*dvc config .*"
)
"""DVC's own lines, which say nothing to somebody who watches a stage."""
FAILED = "ERROR: "
TRACKING = "tracking: "
"""How lines about the tracking server begin, which come when a stage has had its word."""


class StageFailedError(UserError):
    """A stage ended with an error; the message is the stage's own last line."""


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: `ran` is false where DVC found its outputs unchanged, or restored them from its cache."""

    stage: str
    ran: bool
    last_line: str
    """The stage's last word; empty where it did not run."""


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
@redacted_errors()
def run_stage(name: str, parent: str, workspace: Path = anchors.CHECKOUT) -> Outcome:
    """Brings the stage `name` of `workspace`'s dvc.yaml up to date, below the tracked run with the key `parent`.

    It waits for the devices that the stage computes on, and ends the stage when its time limit is over. Raises
    StageFailedError with the stage's last line. However this task ends, no process of the stage is left.
    """
    logger = get_run_logger()
    terms = stage_terms(name, workspace, flow_run.name or "")
    output, progress = _Output(), ProgressArtifact(name)

    def on_line(line: str) -> None:
        if shown := output.read(line):
            logger.info(shown)
            progress.show(shown)

    python = interpreter(workspace)
    command = [str(python), "-m", "dvc", "repro", "--single-item", name]
    environ = {**anchors.environment(), **programs_of(python), tracking.PARENT_VARIABLE: parent}
    with closing(progress):
        code = run_lines(command, on_line, directory=workspace, environ=environ, terms=terms)
    if code == TIMED_OUT:
        raise StageFailedError(f"{name}: {over_limit(name, terms)}")
    if code:
        raise StageFailedError(output.fault(name, code))
    outs = locked_outs(workspace / "dvc.lock", name)
    if not output.ran:
        logger.info("restored from the cache" if output.restored else "unchanged")
        tracking.cached_child(parent, name, outs)
    if name == "register" and announce_refusal(output.stage_line):
        logger.info("told the automations that the gate refused this policy")
    show_results(name, _paths(_stages(workspace / "dvc.yaml")[name], "metrics"), workspace, outs)
    return Outcome(name, output.ran, output.stage_line)


@dataclass
class _Output:
    """What DVC and the stage below it have printed so far."""

    ran: bool = False
    restored: bool = False
    stage_line: str = ""
    _errors: list[str] = field(default_factory=list)

    def read(self, line: str) -> str:
        """Takes the next line and returns what of it a person wants to see."""
        if RUNNING.fullmatch(line):
            self.ran = True
        elif RESTORED.fullmatch(line):
            self.restored = True
        elif line.startswith(FAILED):
            self._errors.append(line.removeprefix(FAILED))
        elif self._errors and not self.ran:  # DVC's errors may go over several lines: who is in the way, and what to do
            self._errors[-1] += f" {line.strip()}"
        elif line.startswith(OWN_LINE):
            return line.removeprefix(OWN_LINE)
        elif not CHATTER.fullmatch(line):
            if not line.startswith(TRACKING):
                self.stage_line = line
            return line
        return ""

    def fault(self, name: str, code: int) -> str:
        """The one line that says why the stage failed: its own last one, or DVC's error where it did not get to run."""
        reason = self.stage_line if self.ran else " ".join(next(iter(self._errors), self.stage_line).split())
        reason = reason or without_a_word(code)
        return reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"


def stage_terms(name: str, workspace: Path, run_name: str = "") -> Terms:
    """The devices that the stage `name` of `workspace` holds while it runs, and how long it may take."""
    params = config.load((), workspace / config.PARAMS_FILE)
    declared = _paths(_stages(workspace / "dvc.yaml")[name], "params")
    holder = redact(f"{name} of {run_name}") if run_name else name
    limit = getattr(params.limits, f"{name}_seconds", 0)
    return Terms(locks=lock_files(declared, params), holder=holder, limit=limit)


def mend_rwlock(workspace: Path) -> None:
    """Removes DVC's list of paths in use where a killed DVC left it half-written: every later one would refuse to run.

    Raises UserError where a living DVC is writing it.
    """
    listing = workspace / ".dvc" / "tmp" / "rwlock"
    if _is_json(listing):
        return
    with locks.exclusive(listing.with_name("rwlock.lock"), "is running DVC here: wait for it"):  # DVC's own guard
        if not _is_json(listing):
            listing.unlink()


def _is_json(path: Path) -> bool:
    """Whether the file holds JSON, or is not there."""
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return True


def retries(name: str, params: Params, is_tracked: bool) -> int:
    """How often to try the stage again: only where it reads or writes over the network.

    Not `is_tracked` says that the tracking server was out of reach already when the pipeline started.
    """
    source, has_server = params.sft.source, is_tracked and anchors.is_remote(anchors.tracking_uri())
    over_network = {
        "prepare_data": params.data.source == "hub",
        "collect_preferences": on_hub(params.preferences.source) is not None,
        "fetch_sft": has_server if source.startswith((REGISTERED, RUN)) else "://" in source,
        "register": has_server,
    }
    return RETRIES if over_network.get(name) else 0


def upstream(dvc_yaml: Path, raw_params: Mapping[str, Any]) -> dict[str, list[str]]:
    """The stages of `dvc_yaml` in the order of the file, each with the stages whose outputs it depends on."""
    stages = _stages(dvc_yaml)
    writers = {path: name for name, stage in stages.items() for path in _paths(stage, "outs", "metrics", "plots")}
    graph = {}
    for name, stage in stages.items():
        deps = [_resolve(path, raw_params) for path in _paths(stage, "deps")]
        needed = [writer for path, writer in writers.items() if any(f"{dep}/".startswith(f"{path}/") for dep in deps)]
        graph[name] = list(dict.fromkeys(needed))
    return graph


def locked_outs(lock: Path, stage: str) -> dict[str, str]:
    """The md5 of each output of `stage` in `lock` by its path; empty where the lock has none."""
    return records.hashes(records.read_lock(lock).get(stage, {}).get("outs", []))


def _stages(dvc_yaml: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(dvc_yaml.read_text())["stages"]


def _paths(stage: Mapping[str, Any], *kinds: str) -> list[str]:
    """The paths that a stage lists under `kinds`; an entry is a path, or a path with options."""
    entries = [entry for kind in kinds for entry in stage.get(kind, [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def _resolve(path: str, raw_params: Mapping[str, Any]) -> str:
    """Replaces DVC's `${dotted.key}` by the param's value."""

    def value(match: re.Match[str]) -> str:
        found: Any = raw_params
        for part in match[1].split("."):
            found = found[part]
        return str(found)

    return re.sub(r"\$\{(.+?)\}", value, path)
