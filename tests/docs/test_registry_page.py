"""docs/registry.md against the params: every param of the gate has its row, with its default."""

from __future__ import annotations

import re

from rlhf.anchors import CHECKOUT
from rlhf.config import compose


def test_the_gates_params_are_told_with_their_defaults():
    page = (CHECKOUT / "docs/registry.md").read_text()
    rows = re.findall(r"^\| `gate\.(\w+)` \| (\S+) \|", page, re.MULTILINE)
    assert {key: float(default) for key, default in rows} == compose()["gate"]
