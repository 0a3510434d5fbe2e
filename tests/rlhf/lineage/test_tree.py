"""A tree as rich draws it, and what it says of code and params."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from rlhf.lineage.history import History
from rlhf.lineage.tree import Node, as_lines, as_rich, tree

BARE = History(
    name="m", version="2", aliases=(), policy_hash="f00d", gate={}, commit="c1", dirty=False, diff="",
    is_masked=False, params={}, data={}, sft={}, stages=(), machine={}, evaluation={},
)  # fmt: skip


def drawn(node: Node) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    console.print(as_rich(node))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_rich_draws_every_line_as_it_is():
    node = Node("m version 2", [Node("a: [b]x[/b]", [Node("c")]), Node("d")])
    assert drawn(node) == ["m version 2", "├── a: [b]x[/b]", "│   └── c", "└── d"]
    assert as_lines(node) == ["m version 2", "  a: [b]x[/b]", "    c", "  d"]


def line(history: History, start: str, usual: dict[str, object] | None = None) -> str:
    (found,) = [line.strip() for line in as_lines(tree(history, usual or {})) if line.strip().startswith(start)]
    return found


def test_the_code_says_whether_its_commit_is_all():
    assert line(BARE, "code") == "code: commit c1"
    assert line(replace(BARE, dirty=True), "code") == "code: commit c1, and files beside it that no stage reads"


def test_changes_that_held_a_secret_are_said_to_be_masked():
    changed = replace(BARE, diff="diff --git a/x.py b/x.py\n+***\n")
    assert line(changed, "code") == "code: commit c1 with changes of"
    masked = replace(changed, is_masked=True)
    assert line(masked, "code") == "code: commit c1 with changes (a secret in them is masked) of"


def test_params_are_compared_with_the_commits():
    history = replace(BARE, params={"ppo": {"lr": 0.5, "epochs": 3}, "seed": 0})
    assert line(history, "params", {"ppo": {"lr": 0.1, "epochs": 3}, "seed": 0}) == (
        "params.yaml: 1 of 3 other than the commit's"
    )
    assert line(history, "ppo.lr", {"ppo": {"lr": 0.1, "epochs": 3}, "seed": 0}) == "ppo.lr: 0.5"
    assert line(history, "params") == "params.yaml: all 3"


def test_a_version_that_a_person_took_back_says_so():
    taken = replace(BARE, gate={"verdict": "passed", "withdrawn": "wrong units"})
    assert line(taken, "withdrawn") == "withdrawn: wrong units"
