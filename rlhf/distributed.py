"""Several processes that train together: what a rank knows, and how those of one host start and end.

Either `torchrun` starts the ranks, or `launch` does so by the same protocol (the variables RANK, LOCAL_RANK, WORLD_SIZE
and a store that outlives them); CPU tensors meet over gloo, a GPU's over NCCL. All ranks end when one fails, and the
one that failed first says why.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlhf import hosts
from rlhf.errors import UsageError, UserError
from rlhf.hosts import Hosts

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__

T = TypeVar("T")

LIFELINE = "RLHF_LIFELINE"
"""Number of the descriptor that reaches end-of-file when the launching process is gone."""
SPOKEN = "rlhf/spoken"
"""The store's key that counts a host's ranks with something to say about a failure; the host's number follows."""
INTERRUPTED = 128 + signal.SIGTERM
GRACE_SECONDS, POLL_SECONDS = 10.0, 0.05
LAST_WORDS_SECONDS = 2.0
"""How long a rank that lost another leaves it to that one, or to who started both, to say why."""
PATIENCE = timedelta(days=1)
"""How long a rank waits for another: a fault ends all ranks at once, so that only slow work is waited for."""
LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "TCPStore")
"""What torch says to a rank when another one is gone."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together; every method but `share` is for all ranks to call."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, tracks and speaks."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This rank's contiguous part of `count` things; parts differ by one at most and may be empty."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, part: T) -> list[T]:
        """Every rank's `part`, in the order of ranks; tensors should be on the CPU."""
        if self.size == 1:
            return [part]
        import torch.distributed as dist

        parts: list[T | None] = [None] * self.size
        dist.all_gather_object(parts, part)
        return parts  # type: ignore[return-value]  # each is filled

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over ranks, in float64."""
        return self._reduce(values, "SUM")

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each over ranks."""
        return self._reduce(values, "MAX")

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self.sum([0.0])

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, getattr(dist.ReduceOp, how))
        return reduced.tolist()


ALONE = Ranks()


def tells_of_a_lost_rank(error: Exception) -> bool:
    """Whether the error only says that another rank is gone, whose own error it is."""
    return is_rank() and isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return "LOCAL_RANK" in os.environ


@contextmanager
def joined(size: int, gpu: bool) -> Iterator[Ranks]:
    """Takes part among the `size` processes; with one, nothing is set up.

    Other ranks than the first print nothing. Raises UsageError where torchrun started another number of processes or
    there are fewer GPUs, and UserError where another rank is gone.
    """
    started = int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    if started != size:
        raise UsageError(
            f"distributed.processes={size}, but torchrun started {started}: give it --nproc_per_node={size}, "
            "or start the stage with plain python"
        )
    if size == 1:
        yield ALONE
        return
    with _lost_ranks_told(), ExitStack() as held:
        ranks = _join(gpu)
        if not ranks.first:
            held.enter_context(redirect_stdout(held.enter_context(Path(os.devnull).open("w"))))
        yield ranks
        _leave()


def _join(gpu: bool) -> Ranks:
    import torch
    import torch.distributed as dist

    if LIFELINE in os.environ:
        threading.Thread(target=_die_with_the_launcher, args=[int(os.environ[LIFELINE])], daemon=True).start()
    if gpu:
        here, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if local >= here:
            raise UsageError(f"distributed.processes: each takes a GPU, and there are {here}: lower it")
        torch.cuda.set_device(local)
    _talk_by_the_interface_to(os.environ["MASTER_ADDR"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size())


def _talk_by_the_interface_to(address: str) -> None:
    """Has gloo and NCCL take the interface that leads to host 0, which is loopback where all ranks are on one host.

    By itself gloo takes the one that this host's name leads to, if any.
    """
    if interface := hosts.interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _die_with_the_launcher(lifeline: int) -> None:
    """Waits for the launcher's end; there is nobody left to say anything to."""
    os.read(lifeline, 1)
    os._exit(INTERRUPTED)


@contextmanager
def _lost_ranks_told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if tells_of_a_lost_rank(error):
            time.sleep(LAST_WORDS_SECONDS)
            raise UserError(f"another process of this run is gone ({str(error).splitlines()[0]})") from error
        raise


def has_last_word() -> bool:
    """Whether this process is the one to say why all of them end: on each host the first that asks.

    From here on TERM, which now comes for all ranks, has nothing to tell one that ends anyway.
    """
    if not is_rank():
        return True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        return store.add(_spoken(int(os.environ["GROUP_RANK"])), 1) == 1
    except (RuntimeError, KeyError):
        return True  # better twice than never


def _spoken(host: int) -> str:
    return f"{SPOKEN}/{host}"


def launch(command: Sequence[str], size: int, among: Hosts) -> int:
    """Runs `command` as this host's part of `size` ranks; returns the exit code of the first that fails, or 0.

    When one fails, or this process is interrupted, all end: TERM, and KILL after `GRACE_SECONDS`. When this process is
    killed, they end by themselves. Raises UserError where a signal ended a rank, which could then not say so, and where
    the hosts did not meet or one is gone.
    """
    here = among.processes_here(size)
    store = among.store(size)
    read_end, write_end = os.pipe()
    common = {
        "MASTER_ADDR": among.address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the store is served from here
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(among.number),
        LIFELINE: str(read_end),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    watch = hosts.Watch(among, store)
    try:
        for rank in range(here):
            own = {"RANK": str(among.number * here + rank), "LOCAL_RANK": str(rank)}
            started = subprocess.Popen(
                command,
                env={**os.environ, **common, **own},
                stdin=subprocess.DEVNULL,
                pass_fds=[read_end],
                process_group=0,  # a terminal's Ctrl-C is for this process, which passes it on
            )
            ranks.append(started)
        codes = _codes_at_the_first_failure(ranks, watch)
    finally:
        _end(ranks)
        watch.stop(done=codes == [0] * here)
        os.close(read_end)
        os.close(write_end)
    killed = [(rank, code) for rank, code in enumerate(codes) if code is not None and (code < 0 or code == INTERRUPTED)]
    if killed and not _has_spoken(store, among):
        rank, code = killed[0]
        name = signal.Signals(-code if code < 0 else code - 128).name
        number = among.number * here + rank + 1
        raise UserError(
            f"process {number} of {size} was ended by {name}: if memory ran out, lower ppo.micro_batch_size; "
            "run it again to go on"
        )
    return next((abs(code) for code in codes if code), 0)


def _has_spoken(store: TCPStore, among: Hosts) -> bool:
    """Whether one of this host's ranks has said why; no where the store is gone with host 0."""
    try:
        return bool(store.add(_spoken(among.number), 0))
    except RuntimeError:
        return False


def _codes_at_the_first_failure(ranks: Sequence[subprocess.Popen[bytes]], watch: hosts.Watch) -> list[int | None]:
    """The exit codes once one is not 0, or all are; None for a rank that still runs. Raises UserError as `check`."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return codes
        watch.check()
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.terminate()  # does nothing to one that has ended
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
