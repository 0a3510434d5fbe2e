"""The code that each stage of dvc.yaml depends on, read off the import graph.

python -m tests.stage_code    rewrites the code deps in dvc.yaml
"""

from __future__ import annotations

from pathlib import Path

import grimp
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
DVC_FILE = ROOT / "dvc.yaml"


def code_of(graph: grimp.ImportGraph, stage: str) -> set[str]:
    """Files of the stage's script and of the rlhf modules that it imports, however indirectly, and the lock."""
    modules = {f"stages.{stage}"} | graph.find_upstream_modules(f"stages.{stage}")
    return {_file(module) for module in modules} - {""} | {"requirements.lock"}


def build_graph() -> grimp.ImportGraph:
    """The imports among stages and library, those inside functions included."""
    return grimp.build_graph("stages", "rlhf", cache_dir=None)


def is_code(dep: str) -> bool:
    """Whether a dep of dvc.yaml is code rather than data."""
    return dep.endswith((".py", ".j2", ".c", ".lock"))


def _file(module: str) -> str:
    path = Path(*module.split("."))
    if (ROOT / path).is_dir():
        init = path / "__init__.py"
        return str(init) if (ROOT / init).stat().st_size else ""
    return f"{path}.py"


def rewrite() -> None:
    """Puts the code deps of every stage into dvc.yaml, after its data."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    pipeline = yaml.load(DVC_FILE)
    graph = build_graph()
    for stage, block in pipeline["stages"].items():
        data = [dep for dep in block["deps"] if not is_code(dep)]
        templates = {dep for dep in block["deps"] if dep.endswith(".j2")}
        block["deps"] = data + sorted(code_of(graph, stage) | templates)
    yaml.dump(pipeline, DVC_FILE)


if __name__ == "__main__":
    rewrite()
