"""System programs that some tests want."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skips the test for want of `what`; fails it where REQUIRE_SERVERS says that nothing may be missing."""
    message = f"missing: {what}: make system-deps"
    if os.environ.get("REQUIRE_SERVERS"):
        pytest.fail(message)
    pytest.skip(message)
