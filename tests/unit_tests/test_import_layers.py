"""Import layering: a file imports from its own room and from lower ones, and never in a circle."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms from the lowest up, with their contents. A file belongs to the room with the longest prefix
# of its name.
ROOMS: list[tuple[set[str], str]] = [
    ({"megatron.installation"}, "runs before any other import"),
    ({"megatron.core"}, "devices, lanes, memory, files, process groups"),
    ({"megatron.core.low_precision"}, "operands of 8 and 4 bits"),
    ({"megatron.core.transformer"}, "layers, ignorant of sharding"),
    (
        {"megatron.core.models", "megatron.core.compiled_layers", "megatron.core.layer_execution"},
        "models, their Hugging Face families, and how their layers are executed",
    ),
    ({"megatron.core.datasets"}, "token files and samples"),
    ({"megatron.core.distributed.fsdp"}, "sharding"),
    ({"megatron.core.distributed"}, "the engines' settings, expert parallelism"),
    ({"megatron.core.optimizer.kernels"}, "Adam over flat arrays"),
    ({"megatron.core.optimizer"}, "optimizers on the device and in host memory"),
    ({"megatron.core.dist_checkpointing"}, "checkpoints"),
    ({"megatron.training"}, "runs"),
]
LEVELS = {name: level for level, (names, _) in enumerate(ROOMS) for name in names}


# The path of every module. A separate test below checks the `__init__` files.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in (ROOT / "megatron").rglob("*.py")
    if path.name != "__init__.py"
}


def level(module: str) -> int:
    """Returns the index in ROOMS. Raises KeyError for a file outside of all rooms."""
    name = module
    while name not in LEVELS:
        if "." not in name:
            raise KeyError(module)
        name = name.rpartition(".")[0]
    return LEVELS[name]


def project_imports(tree: ast.AST) -> list[str]:
    """The project's modules that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [name if name in FILES else module for name in names]
    return [name for name in found if name.split(".")[0] in ("megatron", "megatron_hybrid")]


def forbidden_imports(module: str, imports: list[str]) -> list[str]:
    """Imports from higher rooms, of packages instead of files, and of programs."""
    return [name for name in imports if name not in FILES or level(name) > level(module)]


def check_order(imports: Mapping[str, list[str]]) -> None:
    """Raises CycleError if imports form a cycle."""
    TopologicalSorter(imports).prepare()


IMPORTS = {
    module: project_imports(ast.parse(path.read_text(encoding="utf-8")))
    for module, path in FILES.items()
}


def test_every_file_belongs_to_a_room_and_every_room_has_files():
    assert {level(module) for module in FILES} == set(range(len(ROOMS)))
    with pytest.raises(KeyError):
        level("megatron.elsewhere.file")


def test_files_import_only_from_their_room_and_lower_ones():
    found = {module: forbidden_imports(module, imports) for module, imports in IMPORTS.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_imports_have_no_cycles():
    check_order(IMPORTS)


def test_an_import_from_a_higher_room_or_in_a_cycle_is_detected():
    tree = ast.parse("def f():\n    from megatron.training.loop import Loop\n")
    imports = project_imports(tree)
    assert forbidden_imports("megatron.core.log", imports) == ["megatron.training.loop"]
    assert forbidden_imports("megatron.training.step", imports) == []
    assert forbidden_imports("megatron.training.step", ["megatron_hybrid.charts"]) != []
    with pytest.raises(CycleError):
        check_order({"a": ["b"], "b": ["c"], "c": ["a"]})


# The packages whose users import from the package itself.
PUBLIC_PACKAGES = {
    "megatron.core.distributed.fsdp",
    "megatron.core.optimizer",
    "megatron.core.optimizer.cpu_offloading",
}
# Packages that check for another project's files before other imports.
GUARDS = {"megatron", "megatron.training"}
GUARD = "from megatron.installation import check_installation\n\ncheck_installation()"


def test_packages_have_no_code_but_the_names_that_they_export():
    for path in (ROOT / "megatron").rglob("__init__.py"):
        docstring, *rest = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), path
        package = ".".join(path.parent.relative_to(ROOT).parts)
        if package == "megatron.core.optimizer":  # imports its exported names on first use
            module = importlib.import_module(package)
            assert [getattr(module, name).__name__ for name in module.__all__] == module.__all__
            assert not hasattr(module, "Unknown")
        elif package in PUBLIC_PACKAGES:
            *imports, names = rest
            assert all(isinstance(statement, ast.ImportFrom) for statement in imports)
            assert all(
                name.startswith(package) for name in project_imports(ast.Module(imports, []))
            )
            assert isinstance(names, ast.Assign), "of __all__"
        elif package in GUARDS:
            assert ast.unparse(ast.Module(rest, [])) == ast.unparse(ast.parse(GUARD)), path
        else:
            assert not rest, path


def test_no_project_import_is_inside_a_function():
    for module, path in FILES.items():
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert not [name for function in functions for name in project_imports(function)], module


def test_only_drivers_py_and_the_help_of_device_name_cuda():
    naming = [module for module, path in FILES.items() if "cuda" in path.read_text()]
    assert sorted(naming) == ["megatron.core.config", "megatron.core.drivers"]
