"""Opening the tracking database."""

from __future__ import annotations

import subprocess
import sys

OPEN = """
import sys
from rlhf.tracking.server import client, quiet_mlflow

quiet_mlflow()
import mlflow.store.tracking.sqlalchemy_store
print("loaded", flush=True)
sys.stdin.readline()
print([experiment.name for experiment in client(sys.argv[1]).search_experiments()])
"""


def test_processes_that_open_a_new_database_at_once_all_find_its_tables(tmp_path):
    command = [sys.executable, "-c", OPEN, f"sqlite:///{tmp_path}/mlflow.db"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    openers = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "loaded\n"
    for opener in openers:  # all of them before the first one is waited for
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    for opener in openers:
        said, error = opener.communicate(timeout=120)
        assert said == "['Default']\n", error
