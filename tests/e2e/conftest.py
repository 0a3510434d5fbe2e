"""The operation that all tests against real servers look at: one for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import operation as operations
from tests.e2e.operation import Operation


@pytest.fixture(scope="session")
def operation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operation]:
    with operations.running(tmp_path_factory.mktemp("operation")) as found:
        yield found
