"""What a plan does, as one hash: to compare plans between ranks, and a new run with one that was cut short."""

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ._plan import Plan
from ._types import Stats


def signature(plan: Plan, stats: Stats) -> tuple[str, bool]:
    """sha256 over the steps with their settings, the shapes and dtypes that they map, and the statistics they need.

    The second value is False where a step's function cannot be described by its name and settings (a lambda, a
    closure): two plans of one hash may differ then.
    """
    digest, exact = hashlib.sha256(), True
    for step in plan.steps:
        text, whole = _describe(step.fn)
        exact &= whole
        schemes = _describe(step.schemes)[0]
        facts = (step.name, step.reads, sorted(step.writes), step.needs, step.drops, schemes, step.fake, text)
        digest.update(repr(facts).encode())
    for specs in (plan.source, plan.target):
        digest.update(repr([(name, str(p.dtype), tuple(p.shape)) for name, p in specs.items()]).encode())
    for key in plan.needs:
        digest.update(f"{key} {_bytes(stats[key])}".encode())
    return digest.hexdigest(), exact


def _describe(value: object) -> tuple[str, bool]:
    """The value in words, and whether equal words mean equal values."""
    if isinstance(value, partial):
        parts = (_describe(value.func), _describe(value.args), _describe(value.keywords))
        return " ".join(text for text, _ in parts), all(whole for _, whole in parts)
    if isinstance(value, Tensor):
        return _bytes(value), True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        text, whole = _describe(fields)
        return f"{type(value).__qualname__} {text}", whole
    if isinstance(value, Mapping):
        pairs = [(str(key), *_describe(item)) for key, item in value.items()]
        return repr([(key, text) for key, text, _ in pairs]), all(whole for _, _, whole in pairs)
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return repr(value), True  # classes of channels, which are long
    if isinstance(value, list | tuple):
        items = [_describe(item) for item in value]
        return repr([text for text, _ in items]), all(whole for _, whole in items)
    if isinstance(value, str | int | float | bool | bytes | torch.dtype | None):
        return repr(value), True
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return name, callable(value) and "<" not in name and not hasattr(value, "__self__")


def _bytes(p: Tensor) -> str:
    data = p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if p.numel() else b""
    return f"{p.dtype} {tuple(p.shape)} {hashlib.sha256(data).hexdigest()}"
