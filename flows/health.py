"""Whether the pipeline can run here: the servers that it is told to use answer, and it may write where it has to.

    python -m flows.health

Says nothing and exits with 0 where all is well. The container image's health check.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flows import servers
from rlhf import access, anchors
from rlhf.errors import UserError, run_command

SERVERS = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
"""The variables that may name a server, each with /health below it."""


def main(arguments: Sequence[str] = ()) -> int:
    """The command line; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(prog="health", description=__doc__, formatter_class=style).parse_args(arguments)
    return run_command("health", check)


def check() -> None:
    """Raises UserError for the first thing that is missing."""
    for place in (anchors.CHECKOUT, anchors.main_checkout(), anchors.state_dir()):
        if place.exists() and not os.access(place, os.W_OK):
            raise UserError(f"{place}: cannot be written: let user {os.getuid()} write there")
    access.past_proxies()
    for variable in SERVERS:
        address = os.environ.get(variable, "")
        if anchors.is_remote(address):
            servers.require_answer(address, variable, is_well=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
