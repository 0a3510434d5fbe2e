"""The code that each stage of dvc.yaml depends on, read off the import graph.

python -m tests.stage_code    rewrites the code deps in dvc.yaml
"""

from __future__ import annotations

import re
from pathlib import Path

import grimp
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
DVC_FILE = ROOT / "dvc.yaml"


def code_of(graph: grimp.ImportGraph, stage: str) -> set[str]:
    """Files of the stage's script and of the rlhf modules that it imports, however indirectly, and the lock.

    A file that a module names as its neighbour (`Path(__file__).with_name("...")`) counts as imported by it.
    """
    modules, waiting = set[str](), {f"stages.{stage}"}
    files = {"requirements.lock"}
    while waiting:
        modules |= waiting
        reached = waiting.union(*(graph.find_upstream_modules(module) for module in waiting))
        neighbours = {file for module in reached for file in _neighbours(module)}
        files |= neighbours
        waiting = {_module(file) for file in neighbours if file.endswith(".py")} - modules
        modules |= reached
    return files | ({_file(module) for module in _with_packages(modules)} - {""})


def build_graph() -> grimp.ImportGraph:
    """The imports among stages and library, those inside functions included."""
    return grimp.build_graph("stages", "rlhf", cache_dir=None)


def is_code(dep: str) -> bool:
    """Whether a dep of dvc.yaml is code rather than data."""
    return dep.endswith((".py", ".j2", ".c", ".cpp", ".h", ".lock"))


def _with_packages(modules: set[str]) -> set[str]:
    """The modules and the packages around them, whose `__init__.py` runs first."""
    parts = [module.split(".") for module in modules]
    return {".".join(names[:length]) for names in parts for length in range(1, len(names) + 1)}


def _file(module: str) -> str:
    """The file of a module; empty for a package with nothing in its `__init__.py`."""
    path = Path(*module.split("."))
    if (ROOT / path).is_dir():
        init = path / "__init__.py"
        return str(init) if (ROOT / init).stat().st_size else ""
    return f"{path}.py"


def _module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts)


def _neighbours(module: str) -> set[str]:
    """The files beside a module that it names."""
    file = _file(module)
    text = (ROOT / file).read_text(encoding="utf-8") if file else ""
    return {str(Path(file).with_name(name)) for name in re.findall(r'Path\(__file__\)\.with_name\("(.+?)"\)', text)}


def rewrite() -> None:
    """Puts the code deps of every stage into dvc.yaml, after its data."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    pipeline = yaml.load(DVC_FILE)
    graph = build_graph()
    for stage, block in pipeline["stages"].items():
        data = [dep for dep in block["deps"] if not is_code(dep)]
        block["deps"] = data + sorted(code_of(graph, stage))
    yaml.dump(pipeline, DVC_FILE)


if __name__ == "__main__":
    rewrite()
