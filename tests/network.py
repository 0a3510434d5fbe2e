"""Two hosts as the kernel has them: network namespaces of their own, with one cable between."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace, the one end of the cable that is in it, and its address there."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def pull_the_cable(self) -> None:
        """Nothing arrives from now on, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where `ip` is missing or may make no network namespaces; those made are gone afterwards."""
    if not shutil.which("ip"):
        pytest.skip("missing: ip (iproute2)")
    names = [f"rlhf-{os.getpid()}-{number}" for number in range(2)]
    first, second = (Host(name, f"cable{number}", f"10.77.0.{number + 1}") for number, name in enumerate(names))
    try:
        try:
            _connect(first, second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here, as without root: {error.stderr.strip()}")
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _connect(first: Host, second: Host) -> None:
    for host in (first, second):
        _ip("netns", "add", host.namespace)
    peer = ["peer", "name", second.interface, "netns", second.namespace]
    _ip("-n", first.namespace, "link", "add", first.interface, "type", "veth", *peer)
    for host in (first, second):
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _ip("-n", host.namespace, "link", "set", interface, "up")
        subprocess.run(host.command("true"), check=True, capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
