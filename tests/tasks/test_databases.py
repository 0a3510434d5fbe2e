"""Dumping a PostgreSQL that takes its time, and one that freezes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from rlhf import postgresql
from rlhf.errors import UserError
from tasks.databases import database
from tests import postgres
from tests.postgres import Proxy


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(postgresql, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 1.0)
    with postgres.running() as uri, postgres.proxy(uri) as proxy:
        yield proxy


def test_a_dump_may_be_silent_for_long_but_not_a_server(proxy: Proxy, tmp_path: Path) -> None:
    with postgresql.connect(proxy.uri) as connection:
        connection.execute(text("CREATE TABLE things (name text)"))
        connection.execute(text("INSERT INTO things VALUES ('the first')"))
        connection.commit()
        connection.execute(text("LOCK TABLE things"))  # pg_dump waits for it, without a word
        timer = threading.Timer(3, connection.rollback)
        timer.start()
        database(proxy.uri).dump(tmp_path / "whole")
        timer.join()
    assert "the first\n" in (tmp_path / "whole").read_text()
    proxy.freeze(after=2000)  # amidst pg_dump's many questions
    silent = "timeout expired: no answer for 2 s: start PostgreSQL, or correct the URI"
    with pytest.raises(UserError, match=f"^{re.escape(proxy.uri)}: {silent}$"):
        database(proxy.uri).dump(tmp_path / "half")
