"""The words of the library as types: `Params`, `Stats`, `Step`, `Transform`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..graph import Graph

if TYPE_CHECKING:
    from ._scheme import Scheme

Params = Mapping[str, Tensor]
Stats = Mapping[str, Tensor]
StepFn = Callable[[Params, Stats], tuple[Params, Stats]]


def spec(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor's shape and dtype, as a tensor on the meta device."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def specs_of(params: Params) -> dict[str, Tensor]:
    """Shapes and dtypes of a parameter dict, as meta tensors; no data is read."""
    return {name: spec(p.shape, p.dtype) for name, p in params.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One indivisible edit: what it reads, writes, drops and needs, and a small pure function.

    Args:
      name: what it does and where, `"smooth[model.layers.0.input_layernorm]"`.
      reads: names of the tensors that `fn` is given.
      writes: names that `fn` returns, with shape and dtype as meta tensors. May add names.
      drops: names that are gone afterwards.
      needs: statistics that `fn` is given, `"<kind>:<site>"`.
      edits: sites whose activation the step changes. `plan` hands such a step every planned statistic of these sites,
        and `fn` returns them as they are after the edit.
      fn: `(params, stats) -> (changed params, changed stats)`. Pure, on whole tensors; never edits its inputs.
      schemes: linears that the step quantizes, and how.
      fake: the step rounds weights but leaves them as floats.
    """

    name: str
    reads: tuple[str, ...]
    writes: Params
    fn: StepFn
    drops: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    fake: bool = False


@runtime_checkable
class Transform(Protocol):
    """A frozen dataclass that plans edits. Planning reads names and shapes only."""

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        """The steps on tensors of these shapes. Raises `PlanError` listing every problem."""
        ...
