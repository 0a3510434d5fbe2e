"""The PPO stage on two hosts: the policy of two processes on one, and one line on each where the other is gone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ppo_workspace
from tests.network import Host, two_hosts

pytestmark = pytest.mark.servers  # makes the network of its hosts

TWO = "distributed.processes=2"
STAGE = [sys.executable, "-m", "stages.train_ppo", TWO]
SECONDS = 180
OUTPUTS = (
    "models/policy/model.safetensors",
    "models/policy/value_head.safetensors",
    "metrics/ppo.json",
    "plots/ppo.csv",
)
IMPATIENT = (
    "import rlhf.hosts as h, rlhf.distributed as d; h.JOIN_SECONDS = h.LOST_SECONDS = 4.0; d.GRACE_SECONDS = 1.0; "
    "from stages import train_ppo as t; t.run_stage('train_ppo', t.main, processes=t.processes)"
)


@pytest.fixture(scope="module")
def hosts(checkouts: list[Path]) -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkouts with the same inputs, at smoke scale."""
    return [ppo_workspace.fill(tmp_path_factory.mktemp(name) / "checkout") for name in ("first", "second")]


def start(checkout: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    environ = os.environ | {"RLHF_STATE_DIR": str(checkout / "state"), "RLHF_JOURNAL_DIR": str(checkout / "journal")}
    environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{checkout}/mlflow.db"} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=checkout, env=environ, **pipes)  # type: ignore[call-overload]


def outputs(checkout: Path) -> dict[str, bytes]:
    """What the stage has written to runs/, which is taken away."""
    (place,) = (checkout / "runs" / "train_ppo").iterdir()
    found = {name: (place / name).read_bytes() for name in OUTPUTS}
    shutil.rmtree(checkout / "runs")
    return found


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def alone(checkouts: list[Path]) -> dict[str, bytes]:
    """What two processes on one host write."""
    assert finish(start(checkouts[0], STAGE))[0] == 0
    return outputs(checkouts[0])


def test_two_hosts_write_the_policy_of_one_on_the_first(
    checkouts: list[Path], hosts: tuple[Host, Host], alone: dict[str, bytes]
) -> None:
    address = f"{hosts[0].address}:29400"
    first = start(checkouts[0], hosts[0].command(*STAGE), RLHF_HOSTS="2", RLHF_RENDEZVOUS=address)
    assert first.stdout is not None
    (line,) = re.findall(r"^on host 1, .* inputs: (.*)$", first.stdout.readline(), re.MULTILINE)
    assert line == f"RLHF_HOSTS=2 RLHF_HOST=1 RLHF_RENDEZVOUS={address} {sys.executable} -m stages.train_ppo {TWO}"
    second = start(checkouts[1], hosts[1].command("sh", "-c", line))
    assert finish(second) == (0, "", "")
    code, out, err = finish(first)
    assert (code, err) == (0, "")
    assert out.count("best validation accuracy") == 1
    assert outputs(checkouts[0]) == alone
    assert not (checkouts[1] / "runs").exists() and not (checkouts[1] / "journal").exists()


def test_torchrun_on_two_hosts_writes_it_as_well(
    checkouts: list[Path], hosts: tuple[Host, Host], alone: dict[str, bytes]
) -> None:
    both = []
    for number, host in enumerate(hosts):
        words = ["-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1"]
        words += [f"--master_addr={hosts[0].address}", "--master_port=29401", "-m", "stages.train_ppo", TWO]
        both.append(start(checkouts[number], host.command(sys.executable, *words)))
    assert [finish(process)[0] for process in both] == [0, 0]
    assert outputs(checkouts[0]) == alone
    assert not (checkouts[1] / "runs").exists()


def long_run(checkouts: list[Path], hosts: tuple[Host, Host]) -> list[subprocess.Popen[str]]:
    """A run of many iterations in the midst of them, with little patience for a silent host."""
    command = [sys.executable, "-c", IMPATIENT]
    place = {"RLHF_HOSTS": "2", "RLHF_RENDEZVOUS": f"{hosts[0].address}:29402"}
    place |= {"RLHF_STATE_DIR": str(checkouts[0] / "shared")}  # or a run that goes on is refused
    both = [
        start(checkouts[k], host.command(*command, TWO, "ppo.iterations=100000"), RLHF_HOST=str(k), **place)
        for k, host in enumerate(hosts)
    ]
    assert both[0].stdout is not None
    for line in both[0].stdout:
        if "/100000" in line:
            break
    return both


@pytest.mark.parametrize("fate", ["killed", "unplugged"])
def test_where_a_host_is_gone_each_of_the_others_says_so_in_one_line(
    checkouts: list[Path], hosts: tuple[Host, Host], fate: str
) -> None:
    both = long_run(checkouts, hosts)
    try:
        if fate == "killed":
            both[1].send_signal(signal.SIGKILL)
            code, _, err = finish(both[0])
            assert (code, err.count("\n")) == (1, 1), err
            assert err.startswith("train_ppo: another process of this run is gone (")
        else:
            hosts[1].pull_the_cable()
            for k, (code, _, err) in enumerate(map(finish, both)):
                gone = f"host {1 - k} of 2 is gone: no sign of it for 4 s: look there, and start all again to go on"
                assert (code, err) == (1, f"train_ppo: {gone}\n")
    finally:
        for process in both:
            process.kill()
            process.communicate()
