"""The lock between processes: one holder, named to the others, and free once the holder is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.locks import exclusive

HOLDER = """
import sys, time
from pathlib import Path
from rlhf.locks import exclusive
with exclusive(Path(sys.argv[1]), ""):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_who_has_it_and_gets_it_once_that_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "made" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"^process {holder.pid} is at it: wait$"),
            exclusive(path, "is at it: wait"),
        ):
            pytest.fail("two hold it")
    finally:
        holder.kill()
        holder.wait()
    with exclusive(path, "is at it"):
        assert path.read_text() == str(os.getpid())
