"""Serves the deployments of prefect.yaml without a work pool, until Ctrl-C; runs start in child processes.

    python -m flows.serve

A Prefect server that is configured (PREFECT_API_URL) is used; otherwise one is started, with its page on loopback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from flows import servers, ui
from rlhf import anchors, process
from rlhf.errors import run_command


def main(arguments: Sequence[str] = ()) -> int:
    """Serves until Ctrl-C or SIGTERM; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(prog="serve", description=__doc__, formatter_class=style).parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)
    return run_command("serve", _serve)


def _serve() -> None:
    with suppress(KeyboardInterrupt), ExitStack() as running:
        os.chdir(anchors.CHECKOUT)  # Prefect writes the flows' files down relative to where it runs
        print("starting, which takes half a minute ...", flush=True)
        name, address, own = ui.start_prefect(running)
        if own:
            own.wait()
            running.enter_context(servers.configured(address))
        print(f"{name:8} {address}", flush=True)
        from prefect import serve

        from flows import deployments

        serve(*map(deployments.served, deployments.entries()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
