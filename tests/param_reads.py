"""Which params the code reads, told by types: every attribute taken from a section of `Params`.

A key is known by its section's class and its name (each section has a class of its own), so it does not matter under
which variable a function has the section. mypy tells the types, Python's own parser the rest. What is read from an
untyped variable is not seen: such a read fails the tests that build on this, and its remedy is a type.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mypy.build import BuildSource, build
from mypy.options import Options
from mypy.types import Instance, Type, UnionType, get_proper_type
from pydantic import BaseModel

from rlhf.params import Params

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlhf", "stages", "tasks")
SCHEMA = "rlhf.params"
FRAME = "rlhf.stage"

Position = tuple[int, int, int, int]
"""First line and column, last line and column of an expression."""


@dataclass
class Unit:
    """A function, class or variable of a module, or the rest of it: the keys it reads and the other units it names."""

    reads: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def leaf_keys(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[str]:
    """The dotted name of every key that holds a value."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaf_keys(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def section_prefixes(section: type[BaseModel] = Params, prefix: str = "") -> dict[str, str]:
    """The dotted prefix of the keys of every section's class."""
    found = {f"{section.__module__}.{section.__name__}": prefix}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= section_prefixes(info.annotation, f"{prefix}{name}.")
    return found


def read_anywhere(root: Path = ROOT) -> set[str]:
    """The keys that any code reads, the schema itself apart."""
    return set().union(*(unit.reads for unit in units(root).values()))


def read_by_frame() -> set[str]:
    """The keys that the frame of all stages reads to set a process up."""
    return read_from(within(FRAME), set())


def read_by_stage(stage: str) -> set[str]:
    """The keys that a stage reads in its script and in the library's units that it reaches, but for the frame."""
    return read_from(within(f"stages.{stage}"), within(FRAME))


def within(module: str) -> set[str]:
    """The units of a module."""
    return {name for name in units(ROOT) if f"{name}.".startswith(f"{module}.")}


def read_from(start: Iterable[str], apart: Iterable[str]) -> set[str]:
    """The keys that the units `start` read, and all units that they name however indirectly, but for those `apart`."""
    everything, waiting = units(ROOT), list(start)
    passed, seen = set(apart), set[str]()
    while waiting:
        name = waiting.pop()
        if name in everything and name not in seen | passed:
            seen.add(name)
            waiting += everything[name].names
    return set().union(*(everything[name].reads for name in seen))


@cache
def units(root: Path) -> dict[str, Unit]:
    """Every unit of the stages, of the library and of the tasks by its full name.

    mypy gives one table of types for all files. So that a position names a file, each file is checked behind as many
    empty lines as the files before it have lines.
    """
    sources, offset = [], 0
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        sources.append(BuildSource(str(file), _module(file.relative_to(root)), "\n" * offset + text))
        offset += text.count("\n") + 1
    types = {_mypy_position(node): kind for node, kind in build(sources, _options()).types.items()}
    found: dict[str, Unit] = {}
    for source in sources:
        if not f"{source.module}.".startswith(f"{SCHEMA}."):
            found |= _units_of(source.module, ast.parse(source.text or ""), types)
    return found


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _options() -> Options:
    options = Options()
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.follow_imports = "skip"  # other libraries are nothing to this, and reading them takes minutes
    options.ignore_errors = True
    options.incremental = False
    return options


def _mypy_position(node: object) -> Position:
    return node.line, node.column, node.end_line, node.end_column  # type: ignore[attr-defined]


def _position(node: ast.expr) -> Position:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _units_of(module: str, tree: ast.Module, types: dict[Position, Type]) -> dict[str, Unit]:
    """The units of one file; methods and inner functions belong to the class or function of the module around them."""
    definitions = {name: node for node in tree.body for name in _defined(node)}
    names = dict(_imports(tree)) | {name: f"{module}.{name}" for name in definitions}
    rest = [node for node in tree.body if not list(_defined(node))]
    return {module: _unit(rest, names, types)} | {
        f"{module}.{name}": _unit([node], names, types) for name, node in definitions.items()
    }


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What the imports of a file, wherever they stand in it, call by which full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module gives to a function, a class or a variable."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _unit(nodes: Sequence[ast.stmt], names: dict[str, str], types: dict[Position, Type]) -> Unit:
    unit, prefixes = Unit(), section_prefixes()

    def read(owner: ast.expr, pattern: str) -> None:
        for prefix in (prefixes[kind] for kind in _classes(types.get(_position(owner))) if kind in prefixes):
            unit.reads |= set(fnmatch.filter(leaf_keys(), prefix + pattern))

    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.Name(name) if name in names:
                unit.names.add(names[name])
            case ast.Attribute(owner, name):
                read(owner, name)
                if isinstance(owner, ast.Name) and owner.id in names:
                    unit.names.add(f"{names[owner.id]}.{name}")
            case ast.Call(ast.Name("getattr"), [owner, ast.JoinedStr(parts), *_]):
                read(owner, "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts))
    return unit


def _classes(kind: Type | None) -> list[str]:
    proper = get_proper_type(kind)
    parts = [get_proper_type(part) for part in proper.items] if isinstance(proper, UnionType) else [proper]
    return [part.type.fullname for part in parts if isinstance(part, Instance)]
