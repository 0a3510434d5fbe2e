"""A PostgreSQL that freezes after it was connected to: nothing waits for it for ever. A real one, behind a proxy."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from rlhf import postgresql
from rlhf.errors import UserError
from rlhf.locks import advisory
from rlhf.registry import champion
from tests import postgres
from tests.postgres import Proxy
from tests.registered import add_version, candidate, decide

SILENT = "timeout expired: no answer for 1 s"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres.running() as uri:
        yield uri


@pytest.fixture
def proxy(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(postgresql, "CONNECT_SECONDS", 2)
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")
    with postgres.proxy(database) as proxy:
        yield proxy


def freeze_before(step: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the proxy freeze when `champion` comes to that step."""
    go_on: Callable[..., object] = getattr(champion, step)

    def freeze(*arguments: object) -> object:
        monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 1.0)
        proxy.freeze()
        return go_on(*arguments)

    monkeypatch.setattr(champion, step, freeze)


def test_a_statement_gets_its_answer_however_long_the_connection_was_idle(proxy: Proxy) -> None:
    with postgresql.connect(proxy.uri) as connection:
        assert connection.scalar(text("SELECT 1 + 1")) == 2


def test_a_statement_that_nobody_answers_is_given_up(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 1.0)
    with postgresql.connect(proxy.uri) as connection:
        proxy.freeze()
        with pytest.raises(OperationalError, match=SILENT) as caught:
            connection.scalar(text("SELECT 1"))
    assert caught.value.connection_invalidated


@pytest.mark.parametrize(("options", "seconds"), [("", 2), ("?connect_timeout=1", 1)])
def test_so_is_a_connection(proxy: Proxy, options: str, seconds: int) -> None:
    proxy.freeze()
    with pytest.raises(OperationalError, match=f"timeout expired: no answer for {seconds} s"):
        postgresql.connect(proxy.uri + options)


def test_the_lock_of_another_is_waited_for_however_long_but_not_a_frozen_server(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 1.0)
    taken, free = threading.Event(), threading.Event()

    def hold() -> None:
        with advisory(proxy.uri, "mine"):
            taken.set()
            free.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    timer = threading.Timer(3, free.set)  # longer than a server may be silent
    timer.start()
    with advisory(proxy.uri, "mine", "moves the champion"):
        assert free.is_set()
        assert capsys.readouterr().err == "waiting for another process, which moves the champion\n"
        threading.Timer(1, proxy.freeze).start()
        with pytest.raises(UserError, match=rf"no lock to be had \({SILENT}\)"), advisory(proxy.uri, "mine"):
            pytest.fail("held twice")
    holder.join()


def test_no_move_of_the_champion_hangs(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wherever it freezes: MLflow's own connections are given up as well, and one line says of which server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    for policy, right in {"a": 60, "b": 80}.items():
        decide(add_version("m", policy), candidate(right))
    silent = "timeout expired: no answer for [12] s"  # to the statement, or to the connection that is made after it
    line = f"^MLflow at {re.escape(proxy.uri)}: .*{silent}: start it, or set MLFLOW_TRACKING_URI$"
    freeze_before("require_files", proxy, monkeypatch)
    with pytest.raises(UserError, match=line):
        champion.rollback("m", "why")
    with pytest.raises(UserError, match="no lock to be had .timeout expired: no answer for 2 s"):
        champion.promote("m", "1", "why")
    assert "Traceback" not in capfd.readouterr().err
