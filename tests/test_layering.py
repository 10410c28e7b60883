"""Imports run one way, packages are listed, and nothing at the root shadows the standard library."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("conf", "graph", "jobs", "transforms")
NOT_PACKAGED = {"tests", "benchmarks", "docs", "examples", "build", "dist", "outputs", "multirun"}
OUTSIDE = {
    "transforms": {"torch"},
    "graph": {"torch", "transformers", "safetensors"},
    "jobs": {"torch", "transformers", "safetensors", "tqdm", "yaml", "matplotlib", "datasets", "pydoc_data"},
    "conf": {"hydra", "omegaconf"},
    "": set(),  # the root's own modules
}
# graph and transforms lean on each other's plain types, never on each other's machinery
INSIDE = {
    "transforms": {"graph", "graph.mappings", "graph.patterns"},
    "graph": {"graph", "transforms"},
    "jobs": {"graph", "transforms"},
    "conf": {"graph", "transforms", "jobs"},
}
FILES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
SOURCES = [*sorted(ROOT.glob("*.py")), *FILES]


def package_of(path):
    return path.relative_to(ROOT).parts[0] if path.parent != ROOT else ""


def imported(path):
    """Absolute imports by their full names, and relative ones as paths from the root; inside functions too."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((None, ".".join((*base, name))) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((str(arg.value), None) for arg in node.args[:1] if isinstance(arg, ast.Constant))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    package = package_of(path)
    allowed = OUTSIDE[package] | set(sys.stdlib_module_names)
    for outside, inside in imported(path):
        if outside is not None:
            assert outside.split(".")[0] in allowed, f"{package} must not import {outside}"
        elif package and inside.split(".")[0] != package:
            target = inside if package == "transforms" else inside.split(".")[0]
            assert target in INSIDE[package], f"{package} must not import {inside}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_adapters_may_know_other_processes(path):
    if "adapters" not in path.parts:
        distributed = [name for name, _ in imported(path) if name and name.startswith("torch.distributed")]
        assert not distributed
        assert "torch.distributed." not in path.read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.distributed as dist", [("torch.distributed", None)]),
        ("from torch import distributed", [("torch.distributed", None)]),
        ("def f():\n    import hydra", [("hydra", None)]),
        ("from ..jobs import oneshot", [(None, "jobs")]),
        ("from .. import jobs", [(None, "jobs")]),
        ("from . import _plan", [(None, "transforms._plan")]),
        ("from ._plan import plan", [(None, "transforms._plan")]),
        ("importlib.import_module('hydra')", [("hydra", None)]),
    ],
)
def test_the_reader_of_imports_sees_every_kind(monkeypatch, text, expected):
    path = ROOT / "transforms" / "x.py"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert list(imported(path)) == expected


def packages_in_the_tree():
    """Every folder with modules or configs, as a package of the wheel."""
    for path in (*ROOT.rglob("*.py"), *ROOT.rglob("*.yaml")):
        folders = path.relative_to(ROOT).parts[:-1]
        if not folders:
            yield "regauge"
        elif not (folders[0] in NOT_PACKAGED or any(f.startswith(".") or f.endswith(".egg-info") for f in folders)):
            yield ".".join(("regauge", *folders))


def test_every_package_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(set(packages_in_the_tree())) == sorted(listed)


def test_every_package_of_the_tree_has_its_imports_checked():
    assert {name.split(".")[1] for name in packages_in_the_tree() if "." in name} == set(PACKAGES)


def test_nothing_at_the_root_has_the_name_of_a_standard_module():
    names = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p.is_dir() and list(p.glob("*.py")))}
    assert {"graph", "transforms", "__init__"} <= names
    assert not names & set(sys.stdlib_module_names)


def test_the_library_is_imported_without_hydra_and_without_plots():
    """In a process of its own, since other tests of this one import them."""
    code = "import sys, regauge; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stdout.split())
    assert "regauge" in loaded
    assert not loaded & {"hydra", "omegaconf", "matplotlib", "datasets"}


def test_the_public_names_are_what_they_say():
    import regauge

    for name in ("plan", "apply", "execute", "observe", "oneshot", "evaluate", "chain", "select", "partition"):
        assert callable(getattr(regauge, name))
