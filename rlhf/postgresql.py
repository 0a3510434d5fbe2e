"""Connecting to PostgreSQL, and giving up on a server that takes what it is told and never says a word."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg2.extensions import connection
    from sqlalchemy import URL, Connection

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60.0
"""How long a server may be silent once it was asked something: what MLflow asks is answered in milliseconds."""
PATIENCE = {"PGCONNECT_TIMEOUT": str(CONNECT_SECONDS)}
"""The environment in which PostgreSQL's library and programs give up as soon; without it they wait for ever."""


def connect(url: URL | str, **options: Any) -> Connection:
    """A connection of its own to the database; its URI's own connect_timeout wins. `options` are the engine's.

    From now on it, and every other connection that this process makes, MLflow's too, raises OperationalError where the
    server is silent for ANSWER_SECONDS. Raises SQLAlchemyError where it cannot be reached, ImportError where its driver
    is missing.
    """
    from sqlalchemy import NullPool, create_engine, make_url

    made = make_url(url)
    if made.get_driver_name() == "psycopg2":
        from psycopg2.extensions import set_wait_callback

        set_wait_callback(_wait)
    patience = {} if "connect_timeout" in made.query else {"connect_timeout": CONNECT_SECONDS}
    return create_engine(made, poolclass=NullPool, connect_args=patience, **options).connect()


def _wait(asked: connection) -> None:
    """Waits for an answer, as libpq does, but not for ever: a frozen server's kernel takes every packet.

    So neither keepalives nor TCP_USER_TIMEOUT notice it, and its own statement_timeout is frozen with it. psycopg2
    calls this, also while it connects, and closes the connection where it raises.
    """
    from psycopg2 import OperationalError
    from psycopg2.extensions import POLL_OK, POLL_READ, STATUS_SETUP

    seconds = ANSWER_SECONDS
    if asked.status == STATUS_SETUP:
        seconds = float(asked.get_dsn_parameters().get("connect_timeout", CONNECT_SECONDS))
    while (state := asked.poll()) != POLL_OK:
        waiting = select.poll()
        waiting.register(asked.fileno(), select.POLLIN if state == POLL_READ else select.POLLOUT)
        if not waiting.poll(seconds * 1000 or None):  # 0 is libpq's word for no limit
            raise OperationalError(f"timeout expired: no answer for {seconds:g} s")
