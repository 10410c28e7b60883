"""Imports run one way, packages are listed, and nothing at the root shadows the standard library."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("conf", "graph", "jobs", "transforms")
OUTSIDE = {
    "transforms": {"torch"},
    "graph": {"torch", "transformers", "safetensors"},
    "jobs": {"torch", "transformers", "safetensors", "tqdm", "yaml", "matplotlib", "datasets", "pydoc_data"},
    "conf": {"hydra", "omegaconf"},
}
# graph and transforms lean on each other's plain types, never on each other's machinery
INSIDE = {
    "transforms": {"graph", "graph.patterns"},
    "graph": {"graph", "transforms"},
    "jobs": {"graph", "transforms"},
    "conf": {"graph", "transforms", "jobs"},
}
FILES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def imported(path):
    """Absolute top-level names, and relative imports as paths from the root."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).split(".")[0], None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((None, ".".join((*base, name))) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = OUTSIDE[package] | set(sys.stdlib_module_names)
    for outside, inside in imported(path):
        if outside is not None:
            assert outside in allowed, f"{package} must not import {outside}"
        elif inside.split(".")[0] != package:
            target = inside if package == "transforms" else inside.split(".")[0]
            assert target in INSIDE[package], f"{package} must not import {inside}"


def test_every_package_is_listed_for_the_wheel():
    configs = sorted((ROOT / "conf").rglob("*.yaml"))
    found = {"regauge"} | {f"regauge.{'.'.join(p.relative_to(ROOT).parts[:-1])}" for p in (*FILES, *configs)}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(found) == sorted(listed)


def test_nothing_at_the_root_has_the_name_of_a_standard_module():
    names = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p.is_dir() and list(p.glob("*.py")))}
    assert not names & set(sys.stdlib_module_names)


def test_the_public_names_are_what_they_say():
    import regauge

    for name in ("plan", "apply", "execute", "observe", "oneshot", "evaluate", "chain", "select", "partition"):
        assert callable(getattr(regauge, name))
