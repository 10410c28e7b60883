"""The examples of the documentation run, its recipes build, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml
from regauge.jobs import build_recipe

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# a text fence right below a python fence: the latter's output
SHOWN = re.compile(r"^```python\n((?:(?!^```).)*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
named = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def fences(page, language):
    return [body for head, body in FENCE.findall(page.read_text()) if head.strip() == language]


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p, "python")], ids=lambda p: p.name)
def test_python_examples_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for number, body in enumerate(fences(page, "python")):
        exec(compile(body, f"{page.name}[{number}]", "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if SHOWN.search(p.read_text())], ids=lambda p: p.name)
def test_output_shown_below_an_example_is_what_it_prints(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    text = page.read_text()
    shown = {match[1]: match[2] for match in SHOWN.finditer(text)}
    for body in fences(page, "python"):
        capsys.readouterr()
        exec(compile(body, page.name, "exec"), namespace)
        if body in shown:
            assert capsys.readouterr().out == shown[body]


@named
def test_recipes_in_the_text_build(page):
    for body in fences(page, "yaml"):
        recipe = yaml.safe_load(body)
        if "stages" in recipe:
            build_recipe(recipe)


@named
def test_relative_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link
