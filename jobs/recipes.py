"""Recipes: a mapping of named stages with an order, in YAML or as a dict, built into one transform."""

import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from .. import transforms
from ..graph import PlanError
from ..transforms import Transform, chain

_PREFIX = "regauge.transforms."


def packaged_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the library."""
    folder = resources.files(__package__.rpartition(".")[0]) / "conf" / "recipe"
    return tuple(sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")))


def load_recipe(recipe: str | Path | Mapping[str, Any] | Transform) -> tuple[Transform, Mapping[str, Any]]:
    """A transform and the plain mapping that describes it.

    `recipe` is a packaged name ("smooth_w8a8"), a YAML file, a mapping `{order, stages}`, or a transform. Raises
    `PlanError` with every stage that cannot be built.
    """
    if isinstance(recipe, Mapping):
        return build_recipe(recipe), recipe
    if isinstance(recipe, Transform):
        return recipe, describe(recipe)
    mapping = _read(str(recipe))
    return build_recipe(mapping), mapping


def describe(value: Any) -> Any:
    """A transform as plain values for a report: its class and settings; tensors by shape, dtype and hash."""
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return {"tensor": list(value.shape), "dtype": str(value.dtype), "sha256": digest.hexdigest()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        settings = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"_target_": f"{_PREFIX}{type(value).__name__}", **settings}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def build_recipe(recipe: Mapping[str, Any]) -> Transform:
    """The chain of the recipe's stages. Only classes and functions of `regauge.transforms` can be named."""
    known = {"order", "stages"}
    wrong = [key for key in recipe if key not in known]
    if wrong or "stages" not in recipe:
        found = f"unknown key {wrong[0]!r}" if wrong else "no key 'stages'"
        raise PlanError(f"recipe: {found}; a recipe has the keys 'stages' and, optionally, 'order'")
    stages = recipe["stages"]
    if not isinstance(stages, Mapping) or not stages:
        raise PlanError(f"recipe.stages: expected a mapping of names to stages, got {stages!r}")
    order = list(recipe.get("order") or stages)
    problems = [
        f"recipe.order: there is no stage {name!r}; stages: {', '.join(stages)}" for name in order if name not in stages
    ]
    problems += [
        f"recipe.order: stage {name!r} is missing; list it or remove it" for name in stages if name not in order
    ]
    built = []
    for name in order:
        if name in stages:
            try:
                built.append(_build(stages[name], f"recipe.stages.{name}"))
            except PlanError as error:
                problems += error.problems
    if problems:
        raise PlanError(problems)
    return chain(*built)


def _read(name: str) -> Mapping[str, Any]:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise PlanError(f"recipe: {path}: no such file")
        text = path.read_text(encoding="utf-8")
    elif name in packaged_recipes():
        text = (resources.files(__package__.rpartition(".")[0]) / "conf" / "recipe" / f"{name}.yaml").read_text()
    else:
        raise PlanError(f"recipe: {name!r} is neither a .yaml file nor one of {', '.join(packaged_recipes())}")
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"recipe: {name}: not YAML: {error}") from error
    if not isinstance(mapping, Mapping):
        raise PlanError(f"recipe: {name}: expected a mapping with 'stages', got {type(mapping).__name__}")
    return mapping


def _build(value: Any, where: str) -> Any:
    """Build `_target_` mappings inside out; leave everything else as it is."""
    if isinstance(value, Mapping) and "_target_" in value:
        return _instantiate(value, where)
    if isinstance(value, Mapping):
        if where.count(".") == 2:
            raise PlanError(f"{where}: no key '_target_'; name a transform, such as {_PREFIX}SmoothQuant")
        return {key: _build(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_build(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if where.count(".") == 2:
        raise PlanError(f"{where}: expected a mapping with '_target_', got {value!r}")
    return value


def _instantiate(value: Mapping[str, Any], where: str) -> Any:
    target = str(value["_target_"])
    name = target.removeprefix(_PREFIX)
    if not target.startswith(_PREFIX) or name not in _targets():
        raise PlanError(
            f"{where}: _target_ {target!r} is not allowed; known: {', '.join(sorted(_targets()))} under {_PREFIX[:-1]}"
        )
    cls = _targets()[name]
    given = {key: _build(item, f"{where}.{key}") for key, item in value.items() if key not in ("_target_", "_args_")}
    args = _build(list(value.get("_args_", ())), where)
    parameters = inspect.signature(cls).parameters
    for key in given:
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(f"{where}: {name} has no setting {key!r}{hint} (settings: {', '.join(parameters)})")
    try:
        return cls(*args, **given)
    except PlanError as error:
        raise PlanError([f"{where}: {problem}" for problem in error.problems]) from error
    except (ValueError, TypeError) as error:
        raise PlanError(f"{where}: {error}") from error


def _targets() -> dict[str, Any]:
    """What a recipe may name: public transforms of `regauge.transforms`, and the functions that combine them."""
    combine = {name: getattr(transforms, name) for name in ("chain", "select", "partition", "identity")}
    classes = {
        name: value
        for name, value in vars(transforms).items()
        if inspect.isclass(value) and hasattr(value, "plan") and hasattr(value, "__dataclass_fields__")
    }
    return {**classes, **combine}
