"""Load a checkpoint part by part: a model whose parameters have no memory yet, filled from a store as they are needed.

The whole model never is in memory: a sharded model is filled and sharded unit by unit, a streamed one is filled and
emptied block by block. What is loaded equals what transformers loads: same dtypes, buffers and ties.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .._errors import LayoutError
from ..skeleton import new_model
from ._base import Source

Places = Mapping[str, tuple[tuple[nn.Module, str], ...]]
"""Stored name -> every module and attribute that holds it: one, or more where parameters are tied."""


def hollow(config: Any, specs: Mapping[str, Tensor]) -> nn.Module:
    """The model of `config` with all parameters on the meta device, frozen, and buffers that hold their numbers.

    Its dtype is the one that the config names, else that of the first float tensor of `specs`, as transformers has it.
    """

    def weightless(_module: nn.Module, _name: str, p: nn.Parameter) -> nn.Parameter:
        return p if p is None or p.is_meta else nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)

    dtype = getattr(config, "dtype", None) or next(p.dtype for p in specs.values() if p.is_floating_point())
    hook = register_module_parameter_registration_hook(weightless)  # type: ignore[arg-type]  # it may return a value
    try:
        model = new_model(config, dtype)
    finally:
        hook.remove()
    initialize: Any = getattr(model, "_init_weights", None)
    for module in model.modules():
        if module._non_persistent_buffers_set and initialize is not None:
            initialize(module)  # tables of positions, in float32 again: the constructor computed in `dtype`
    return model.requires_grad_(False)


def places_of(model: nn.Module) -> Places:
    """Where each stored tensor goes: parameters, and the buffers that checkpoints hold. Take it before wrapping."""
    first: dict[int, str] = {}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            places.setdefault(first.setdefault(id(value), name), []).append((module, leaf))
    return {name: tuple(held) for name, held in places.items()}


def inside(places: Places, modules: Iterable[nn.Module]) -> list[str]:
    """The names of `places` that lie in one of the modules or below them."""
    below = {id(m) for module in modules for m in module.modules()}
    return [name for name, held in places.items() if any(id(module) in below for module, _ in held)]


def fill(model: nn.Module, places: Places, source: Source, names: Iterable[str]) -> None:
    """Read tensors and put each at its places, in the dtype that the model has there."""
    for name in names:
        with source.read([name]) as params:
            held = params[name]
        module, leaf = places[name][0]
        empty = getattr(module, leaf)
        if empty.shape != held.shape:
            raise LayoutError(f"{name}: the model has shape {tuple(empty.shape)}, the file {tuple(held.shape)}")
        _put(places[name], held.to(_dtype(model, name, empty)))


def drop(places: Places, names: Iterable[str]) -> None:
    """Give the memory of tensors back; their places hold shapes only."""
    for name in names:
        module, leaf = places[name][0]
        _put(places[name], getattr(module, leaf).detach().to("meta"))


def _put(held: Iterable[tuple[nn.Module, str]], value: Tensor) -> None:
    shared = nn.Parameter(value, requires_grad=False)
    for module, leaf in held:
        if leaf in module._parameters:
            module._parameters[leaf] = shared
        else:
            module._buffers[leaf] = value


def _dtype(model: nn.Module, name: str, empty: Tensor) -> torch.dtype:
    """The dtype of the place, or float32 where the model's class asks for it."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    wide = (*strict, *(getattr(model, "_keep_in_fp32_modules", None) or ())) if empty.dtype == torch.float16 else strict
    if empty.dtype in (torch.float16, torch.bfloat16) and any(re.search(rf"(^|\.){part}(\.|$)", name) for part in wide):
        return torch.float32
    return empty.dtype


def load_whole(config: Any, source: Source) -> nn.Module:
    """The model of `config` with all numbers of `source`, frozen and in eval mode."""
    model = hollow(config, source.specs())
    places = places_of(model)
    fill(model, places, source, places)
    return model
