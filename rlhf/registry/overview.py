"""What the registry holds of a model, as lines for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.evaluation.wording import percent, signed_points
from rlhf.registry.champion import GATE, REASONS, WITHDRAWN, moves
from rlhf.registry.lookup import find_model
from rlhf.registry.server import server

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

HEAD = ("version", "alias", "gate", "gain on gate", "right on test", "why")


def overview(name: str) -> str:
    """Every version of the model `name`, the latest one first, and every move of its champion.

    Raises UserError where nothing is registered under that name.
    """
    with server() as registry:
        model = find_model(registry, name)
        versions = sorted(registry.search_model_versions(f"name='{name}'"), key=lambda item: -int(item.version))
    held: dict[str, list[str]] = {}
    for alias, number in sorted(model.aliases.items()):
        held.setdefault(str(number), []).append(alias)
    rows = [HEAD, *(_row(version, held.get(str(version.version), [])) for version in versions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([name, *lines, "", *moves(model)]).rstrip()


def _row(version: ModelVersion, aliases: list[str]) -> tuple[str, ...]:
    tags = version.tags
    state = "withdrawn" if WITHDRAWN in tags else tags.get(GATE, "")
    gain = signed_points(float(tags["gate.gain"])) if "gate.gain" in tags else ""
    right = percent(float(tags["test.policy_accuracy"])) if "test.policy_accuracy" in tags else ""
    return str(version.version), ", ".join(aliases), state, gain, right, tags.get(WITHDRAWN) or tags.get(REASONS, "")
