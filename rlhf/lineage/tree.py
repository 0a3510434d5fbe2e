"""A history as a tree for the terminal, as indented lines, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text
from rich.tree import Tree

from rlhf.evaluation.wording import accuracy
from rlhf.lineage.history import History, StageRun
from rlhf.tracking import flatten

NOT_KEPT = "not kept with this version"


@dataclass(frozen=True)
class Node:
    """One line, and what belongs to it."""

    label: str
    children: Sequence[Node] = ()


def tree(history: History, usual: Mapping[str, Any]) -> Node:
    """The history in the order in which one asks: what it is, which code, params and data, who ran it, and where.

    `usual` are the params that the commit itself has: those that differ are named.
    """
    aliases = f" ({', '.join(history.aliases)})" if history.aliases else ""
    parts = [
        Node(f"policy {history.policy_hash}", [Node(line) for line in _scores(history)]),
        _gate(history),
        _code(history),
        _params(flatten(history.params), flatten(usual)),
        Node("data" if history.data else f"data: {NOT_KEPT}", _pairs(history.data)),
        _sft(history),
        Node("stages" if history.stages else f"dvc.lock: {NOT_KEPT}", [_stage(run) for run in history.stages]),
        Node("trained on" if history.machine else f"machine: {NOT_KEPT}", _pairs(history.machine)),
    ]
    return Node(f"{history.name} version {history.version}{aliases}", parts)


def as_lines(node: Node, depth: int = 0) -> list[str]:
    """The tree as lines, two spaces a level."""
    return ["  " * depth + node.label, *(line for child in node.children for line in as_lines(child, depth + 1))]


def as_rich(node: Node) -> Tree:
    """The tree as rich draws it."""
    drawn = Tree(Text(node.label))
    for child in node.children:
        drawn.children.append(as_rich(child))
    return drawn


def as_json(history: History) -> str:
    """The whole history, params and diff included."""
    return json.dumps(asdict(history), indent=2, sort_keys=True)


def _scores(history: History) -> list[str]:
    return [
        f"{split}: {accuracy(found['policy'])} right, its start {accuracy(found['sft'])}"
        for split, found in history.evaluation.items()
    ]


def _gate(history: History) -> Node:
    verdict = history.gate.get("verdict", "not judged")
    return Node(f"gate: {verdict}", _pairs({key: text for key, text in history.gate.items() if key != "verdict"}))


def _code(history: History) -> Node:
    if not history.commit:
        return Node("code: in no git repository")
    if history.diff:
        changed = [line.split(" b/", 1)[1] for line in history.diff.splitlines() if line.startswith("diff --git ")]
        masked = " (a secret in them is masked)" if history.is_masked else ""
        return Node(f"code: commit {history.commit} with changes{masked} of", [Node(path) for path in changed])
    rest = ", and files beside it that no stage reads" if history.dirty else ""
    return Node(f"code: commit {history.commit}{rest}")


def _params(flat: Mapping[str, object], usual: Mapping[str, object]) -> Node:
    if not flat:
        return Node(f"params.yaml: {NOT_KEPT}")
    other = {key: value for key, value in flat.items() if not usual or usual.get(key) != value}
    count = f"{len(other)} of {len(flat)} other than the commit's" if usual else f"all {len(flat)}"
    return Node(f"params.yaml: {count}", _pairs(other))


def _sft(history: History) -> Node:
    if not history.sft:
        return Node(f"SFT manifest: {NOT_KEPT}")
    told = {key: history.sft[key] for key in ("source", "revision", "license", "seed", "stop_token")}
    parents = {f"made from {kind}": parent for kind, parent in history.sft["parents"].items()}
    return Node("SFT start", _pairs({key: value for key, value in (told | parents).items() if value is not None}))


def _stage(run: StageRun) -> Node:
    return Node(f"{run.stage}: {f'run {run.run_id}' if run.run_id else 'no run found'}", _pairs(run.outs))


def _pairs(values: Mapping[str, object]) -> list[Node]:
    return [Node(f"{key}: {value}") for key, value in values.items()]
