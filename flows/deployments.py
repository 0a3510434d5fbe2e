"""The deployments of prefect.yaml: registered for a worker of the process pool, or served without a pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.flows import load_flow_from_entrypoint
from prefect.schedules import Cron

from rlhf.anchors import CHECKOUT
from rlhf.errors import UserError
from tasks.processes import run_lines

FILE = CHECKOUT / "prefect.yaml"
POOL = "gsm8k-rlhf"


def entries(file: Path = FILE) -> list[dict[str, Any]]:
    """The deployments as prefect.yaml writes them; raises UserError where it cannot be read."""
    try:
        found: list[dict[str, Any]] = yaml.safe_load(file.read_text())["deployments"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read: {reason}: take it from the repository again") from None
    return found


def flow_of(entry: dict[str, Any]) -> Flow[Any, Any]:
    """The flow that a deployment runs."""
    return load_flow_from_entrypoint(str(CHECKOUT / entry["entrypoint"]))


def full_name(entry: dict[str, Any]) -> str:
    """The deployment's name on the server: flow/deployment."""
    return f"{flow_of(entry).name}/{entry['name']}"


def served(entry: dict[str, Any]) -> RunnerDeployment:
    """The same deployment for `prefect.serve`: its schedules, limit and parameters, no work pool."""
    limit = entry.get("concurrency_limit")
    deployment: Any = flow_of(entry).to_deployment(
        name=entry["name"],
        description=entry["description"],
        parameters=entry.get("parameters", {}),
        schedules=[Cron(given["cron"], timezone=given["timezone"]) for given in entry.get("schedules", [])],
        concurrency_limit=ConcurrencyLimitConfig(**limit) if limit else None,
    )
    return deployment


def register() -> list[str]:
    """Registers the pool and those deployments that the configured server does not have; returns their names.

    What the server has stays as a person may have changed it there, its schedule for instance. Raises UserError.
    """
    with get_client(sync_client=True) as client:
        known = {f"{client.read_flow(each.flow_id).name}/{each.name}" for each in client.read_deployments()}
        pools = {pool.name for pool in client.read_work_pools()}
    missing = [name for name in map(full_name, entries()) if name not in known]
    if POOL not in pools:
        _prefect("work-pool", "create", POOL, "--type", "process")
    if missing:
        _prefect("deploy", "--prefect-file", str(FILE), *(word for name in missing for word in ("--name", name)))
    return missing


def _prefect(*arguments: str) -> None:
    """Runs Prefect's command line; raises UserError with what it said where it fails."""
    said: list[str] = []
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    if run_lines(command, said.append, directory=CHECKOUT, environ={}):
        words = " ".join(" ".join(said).split())
        raise UserError(f"prefect {' '.join(arguments[:2])}: {words[-300:]}: look at prefect.yaml and the server")
