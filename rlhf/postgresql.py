"""Connecting to PostgreSQL, and giving up on a host that takes the connection and never says a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

CONNECT_SECONDS = 10
PATIENCE = {"PGCONNECT_TIMEOUT": str(CONNECT_SECONDS)}
"""The environment in which PostgreSQL's library and programs give up as soon; without it they wait for ever."""


def connect(url: URL | str, **options: Any) -> Connection:
    """A connection of its own to the database; its URI's own connect_timeout wins. `options` are the engine's.

    Raises SQLAlchemyError where it cannot be reached, ImportError where its driver is missing.
    """
    from sqlalchemy import NullPool, create_engine, make_url

    made = make_url(url)
    patience = {} if "connect_timeout" in made.query else {"connect_timeout": CONNECT_SECONDS}
    return create_engine(made, poolclass=NullPool, connect_args=patience, **options).connect()
