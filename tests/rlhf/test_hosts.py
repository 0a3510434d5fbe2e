"""Where hosts meet, as the environment says it."""

from __future__ import annotations

import pytest

from rlhf import hosts
from rlhf.errors import UsageError
from rlhf.hosts import Hosts


def test_without_variables_there_is_one_host_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (hosts.HOSTS, hosts.HOST, hosts.RENDEZVOUS):
        monkeypatch.delenv(variable, raising=False)
    assert hosts.from_environment() == Hosts(1, 0, "127.0.0.1", 0)
    assert hosts.from_environment().lines(["python"]) == []


@pytest.mark.parametrize(
    ("count", "number", "rendezvous", "fault"),
    [
        ("two", "0", "10.0.0.1:29400", "RLHF_HOSTS=two: not a number"),
        ("2", "2", "10.0.0.1:29400", "RLHF_HOST=2 RLHF_HOSTS=2: hosts are numbered"),
        ("2", "0", "", "RLHF_RENDEZVOUS=: write the address"),
        ("2", "0", "10.0.0.1", "RLHF_RENDEZVOUS=10.0.0.1: write the address"),
        ("2", "1", "10.0.0.1:70000", "RLHF_RENDEZVOUS=10.0.0.1:70000: write the address"),
    ],
)
def test_a_place_that_makes_no_sense_is_one_line(
    monkeypatch: pytest.MonkeyPatch, count: str, number: str, rendezvous: str, fault: str
) -> None:
    given = {hosts.HOSTS: count, hosts.HOST: number, hosts.RENDEZVOUS: rendezvous}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as raised:
        hosts.from_environment()
    assert str(raised.value).startswith(fault)


def test_each_further_host_has_a_line_of_its_own() -> None:
    assert Hosts(3, 0, "10.0.0.1", 29400).lines(["python", "-m", "stages.train_ppo", "ppo.note=a b"]) == [
        f"RLHF_HOSTS=3 RLHF_HOST={k} RLHF_RENDEZVOUS=10.0.0.1:29400 python -m stages.train_ppo 'ppo.note=a b'"
        for k in (1, 2)
    ]


def test_hosts_have_equally_many_processes() -> None:
    assert Hosts(2, 0, "10.0.0.1", 29400).processes_here(4) == 2
    with pytest.raises(UsageError, match="take a multiple of 2"):
        Hosts(2, 0, "10.0.0.1", 29400).processes_here(3)


def test_loopback_is_reached_by_its_own_interface() -> None:
    assert hosts.interface_towards("127.0.0.1") == "lo"
