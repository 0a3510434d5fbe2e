"""Several hosts that train together: where they meet, the line that each further one runs, and which one is gone.

    RLHF_HOSTS=2 RLHF_RENDEZVOUS=10.0.0.1:29400 dvc repro

Host 0 serves the store at which all ranks meet, and owns the outputs; the others run the line that it prints. Where a
run takes place decides nothing about its result, so this is in the environment and no param.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.errors import UsageError, UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__

HOSTS, HOST, RENDEZVOUS = "RLHF_HOSTS", "RLHF_HOST", "RLHF_RENDEZVOUS"
JOIN_SECONDS = 600.0
"""How long a host may take to come; people start it."""
LOST_SECONDS = 30.0
"""How long a host that has come may be silent, as one that lost power or its cable is."""
BEAT_SECONDS = 1.0
RUN = "rlhf/run"
"""The store's key with what hosts must agree on before their processes can meet."""
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Hosts:
    """This host's place among those that train together, and the address that host 0 serves the store at."""

    count: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """0 for any."""

    def processes_here(self, processes: int) -> int:
        """How many of all `processes` run on this host; raises UsageError where the hosts cannot share them alike."""
        if processes % self.count:
            raise UsageError(
                f"{HOSTS}={self.count}: distributed.processes={processes} counts the processes of all hosts, and each "
                f"has as many as the others: take a multiple of {self.count}"
            )
        return processes // self.count

    def store(self, processes: int) -> TCPStore:
        """The store of a run of so many processes, served from here on host 0.

        Raises UserError where it cannot be had, host 0 has another number of processes, or this host has come before.
        """
        return self._serve(processes) if self.number == 0 else self._join(processes)

    def _serve(self, processes: int) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            listening = socket.create_server((self.address, self.port), family=family)
        except OSError as error:
            fault = f"cannot be served from here ({error.strerror}): take an address of this host and a free port"
            raise UserError(f"{self._rendezvous}: {fault}") from None
        port = listening.getsockname()[1]  # torch by itself would listen on every interface
        store = TCPStore(
            self.address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        store.set(RUN, self._run(processes))
        return store

    def _join(self, processes: int) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._await_host_0()
        try:
            store = TCPStore(self.address, self.port, is_master=False)
            theirs = store.get(RUN).decode()
        except RuntimeError:
            raise UserError(f"{self._rendezvous}: what answers there is not host 0: check the address") from None
        if theirs != (ours := self._run(processes)):
            raise UserError(f"host 0 runs {theirs}, and this host {ours}: give all hosts the same")
        if store.add(_beat(self.number), 1) > 1:
            raise UserError(f"{HOST}={self.number} has come before: number hosts apart, or start all again")
        return store

    def _run(self, processes: int) -> str:
        return f"distributed.processes={processes} with {HOSTS}={self.count}"

    @property
    def _rendezvous(self) -> str:
        return f"{RENDEZVOUS}={self.address}:{self.port}"

    def _await_host_0(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while True:  # torch would wait as well, deaf to Ctrl-C
            try:
                socket.create_connection((self.address, self.port), timeout=BEAT_SECONDS).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    fault = f"host 0 does not answer within {JOIN_SECONDS:g} s: start it, or check the network"
                    raise UserError(f"{self._rendezvous}: {fault}") from None
                time.sleep(BEAT_SECONDS)

    def lines(self, command: Sequence[str]) -> list[str]:
        """What the further hosts run, in a checkout of the same commit with the same params and inputs."""
        further = range(1, self.count)
        return [f"{HOSTS}={self.count} {HOST}={number} {self._rendezvous} {shlex.join(command)}" for number in further]


def from_environment() -> Hosts:
    """What RLHF_HOSTS, RLHF_HOST and RLHF_RENDEZVOUS say; one host where they are unset. Raises UsageError."""
    count, number = _number(HOSTS, "1"), _number(HOST, "0")
    if count < 1 or number >= count:
        raise UsageError(f"{HOST}={number} {HOSTS}={count}: hosts are numbered from 0 to {HOSTS} - 1")
    if count == 1:
        return Hosts()
    given = os.environ.get(RENDEZVOUS, "")
    address, _, port = given.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"{RENDEZVOUS}={given}: write the address of host 0 and a free port there: 10.0.0.1:29400")
    return Hosts(count, number, address.strip("[]"), int(port))


def _number(variable: str, default: str) -> int:
    given = os.environ.get(variable) or default
    if not given.isdecimal():
        raise UsageError(f"{variable}={given}: not a number")
    return int(given)


class Watch:
    """Tells the other hosts that this one lives, and notices when they do not: host 0 watches all, the others host 0.

    A thread talks to the store, for a call may hang as long as the network does.
    """

    def __init__(self, hosts: Hosts, store: TCPStore) -> None:
        self._hosts, self._store = hosts, store
        self._watched = range(1, hosts.count) if hosts.number == 0 else range(1)
        now = time.monotonic()
        self._beats = dict.fromkeys(self._watched, 0)
        self._heard = dict.fromkeys(self._watched, now)
        self._over, self._done = threading.Event(), False
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError that names a host which never came, or is gone."""
        for host in self._watched:
            came = host == 0 or self._beats[host] > 0  # or there would be no store
            allowed = LOST_SECONDS if came else JOIN_SECONDS
            if time.monotonic() - self._heard[host] > allowed:
                fault = "is gone: no sign of it for" if came else "did not come within"
                remedy = "look there, and start all again to go on" if came else "run the line printed for it there"
                raise UserError(f"host {host} of {self._hosts.count} {fault} {allowed:g} s: {remedy}")

    def stop(self, done: bool) -> None:
        """Falls silent, and tells the others so if this host has `done` its part; else they will find it gone."""
        self._done = done
        self._over.set()
        self._thread.join(BEAT_SECONDS * 2)

    def _talk(self) -> None:
        try:
            while not self._over.wait(BEAT_SECONDS):
                self._store.add(_beat(self._hosts.number), 1)
                for host in self._watched:
                    beats = self._store.add(_beat(host), 0)
                    if beats != self._beats[host] or self._store.add(_done(host), 0):
                        self._beats[host], self._heard[host] = beats, time.monotonic()
            if self._done:
                self._store.add(_done(self._hosts.number), 1)
        except RuntimeError:
            return  # the store is gone, and host 0 with it: `check` will say so if the ranks do not


def _beat(host: int) -> str:
    return f"rlhf/beat/{host}"


def _done(host: int) -> str:
    return f"rlhf/done/{host}"


def require_alike(found: Sequence[Mapping[str, object]], remedy: str) -> None:
    """Raises UserError with the `remedy` where processes do not work on the same, and names in what they differ."""
    differing = [name for name, value in found[0].items() if any(each[name] != value for each in found)]
    if differing:
        raise UserError(f"the processes of this run differ in {', '.join(differing)}: {remedy}")


def interface_towards(address: str) -> str | None:
    """The name of the network interface by which this host reaches `address`; None where it cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            return next((name for _, name in socket.if_nameindex() if _address(probe, name) == own), None)
    except OSError:  # as with IPv6 alone
        return None


def _address(probe: socket.socket, interface: str) -> bytes | None:
    """The interface's IPv4 address, if it has one: netdevice(7)."""
    request = struct.pack("256s", interface.encode())
    try:
        return fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]
    except OSError:
        return None
