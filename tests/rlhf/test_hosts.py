"""Where hosts meet, as the environment says it, and the one line where they do not."""

from __future__ import annotations

import socket
import time

import pytest

from rlhf import hosts
from rlhf.errors import UsageError, UserError
from rlhf.hosts import Hosts, Watch


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


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Hosts]:
    """Two hosts on loopback that have little patience."""
    for name, seconds in (("BEAT_SECONDS", 0.05), ("JOIN_SECONDS", 0.5), ("LOST_SECONDS", 0.5)):
        monkeypatch.setattr(hosts, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [Hosts(2, number, "127.0.0.1", port) for number in range(2)]


def fault_of(watch: Watch, seconds: float = 10.0) -> str | None:
    """What the watch finds within so many seconds, if anything."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            watch.check()
            time.sleep(0.01)
    except UserError as error:
        return str(error)
    return None


def test_the_store_is_served_at_the_address_that_was_given_alone(two: list[Hosts]) -> None:
    store = two[0].store(2)
    with socket.create_connection(("127.0.0.1", store.port)), pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port))


def test_an_address_that_is_taken_or_of_another_host_is_one_line(two: list[Hosts]) -> None:
    port = two[0].port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError) as raised:
        two[0].store(2)
    assert str(raised.value).startswith(f"RLHF_RENDEZVOUS=127.0.0.1:{port}: cannot be served from here (")
    with pytest.raises(UserError, match="take an address of this host and a free port"):
        Hosts(2, 0, "192.0.2.1", port).store(2)


def test_a_host_that_finds_no_host_0_says_so(two: list[Hosts]) -> None:
    with pytest.raises(UserError, match=f"127.0.0.1:{two[1].port}: host 0 does not answer within 0.5 s: start it"):
        two[1].store(2)


def test_hosts_with_another_number_of_processes_do_not_meet(two: list[Hosts]) -> None:
    first = two[0].store(2)
    with pytest.raises(UserError) as raised:
        two[1].store(4)
    assert str(raised.value) == (
        "host 0 runs distributed.processes=2 with RLHF_HOSTS=2, and this host distributed.processes=4 with "
        "RLHF_HOSTS=2: give all hosts the same"
    )
    assert two[1].store(2).port == first.port


def test_a_number_comes_once(two: list[Hosts]) -> None:
    stores = [host.store(2) for host in two]
    with pytest.raises(UserError, match="RLHF_HOST=1 has come before: number hosts apart, or start all again"):
        two[1].store(2)
    assert len(stores) == 2


def test_a_host_that_never_comes_is_named(two: list[Hosts]) -> None:
    watch = Watch(two[0], two[0].store(2))
    assert fault_of(watch) == "host 1 of 2 did not come within 0.5 s: run the line printed for it there"
    watch.stop(done=False)


def test_host_0_is_gone_where_it_falls_silent_at_once(two: list[Hosts]) -> None:
    stores = [host.store(2) for host in two]
    watch = Watch(two[1], stores[1])
    assert fault_of(watch) == "host 0 of 2 is gone: no sign of it for 0.5 s: look there, and start all again to go on"
    watch.stop(done=False)


def test_hosts_that_live_or_are_done_are_not_missed_and_one_that_falls_silent_is(two: list[Hosts]) -> None:
    stores = [host.store(2) for host in two]
    first, second = (Watch(host, store) for host, store in zip(two, stores, strict=True))
    assert fault_of(first, 1.0) is None and fault_of(second, 1.0) is None
    first.stop(done=True)
    assert fault_of(second, 1.0) is None
    second.stop(done=False)
    again = Watch(two[0], stores[0])
    assert fault_of(again) == "host 1 of 2 is gone: no sign of it for 0.5 s: look there, and start all again to go on"
    again.stop(done=False)


def test_processes_that_do_not_work_on_the_same_are_told_in_what() -> None:
    one = {"params": {"seed": 0}, "code": {"rlhf/hosts.py": "5f7"}, "torch": ["2.9", 1]}
    hosts.require_alike([one, dict(one)], "give all hosts the same")
    with pytest.raises(UserError) as raised:
        hosts.require_alike([one, one | {"params": {"seed": 1}, "code": {}}], "give all hosts the same")
    assert str(raised.value) == "the processes of this run differ in params, code: give all hosts the same"
