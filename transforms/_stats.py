"""Statistics of an activation as commutative monoids: `init`, `update`, `merge`, and `rescale` under x -> x / s.

Legend: T = tokens, C = channels. Every state is one tensor, so a set of statistics is a plain dict of tensors, can be
saved as safetensors, and is combined over batches or ranks by `merge` in any order. States are float32, token counts
included (exact up to 2^24).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..graph import PlanError


class Kind(Protocol):
    """One kind of statistic. `rescale` raises `NotImplementedError` where the edit has no closed form."""

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool:
        """True where merging in any order gives the same bits."""
        ...

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor: ...
    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor: ...
    def merge(self, a: Tensor, b: Tensor) -> Tensor: ...
    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AbsMax:
    """max_t |x_tc|, shape (C,). Exact: no rounding happens whatever the order."""

    name: str = "absmax"
    exact: ClassVar[bool] = True

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(width, device=device)

    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor:
        if x_TC.shape[0] == 0:
            return state
        # two plain reductions are faster than abs() first, which writes a copy of the activation
        return self.merge(state, torch.maximum(x_TC.amax(0), -x_TC.amin(0)).float())

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor:
        return state / s_C


@dataclass(frozen=True, slots=True)
class Range:
    """Minimum and maximum over tokens, shape (2, C). Exact. An empty state is (+inf, -inf)."""

    name: str = "range"
    exact: ClassVar[bool] = True

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        low = torch.full((1, width), float("inf"), device=device)
        return torch.cat((low, -low))

    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor:
        if x_TC.shape[0] == 0:
            return state
        return self.merge(state, torch.stack((x_TC.amin(0), x_TC.amax(0))).float())

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])))

    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor:
        return state / s_C


@dataclass(frozen=True, slots=True)
class MeanAbs:
    """Sum over tokens of |x_tc|, with the number of tokens last: shape (C + 1,). `mean` divides them."""

    name: str = "meanabs"
    exact: ClassVar[bool] = False

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(width + 1, device=device)

    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor:
        total = x_TC.abs().sum(0, dtype=torch.float32)
        return self.merge(state, torch.cat((total, total.new_full((1,), x_TC.shape[0]))))

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor:
        return torch.cat((state[:-1] / s_C, state[-1:]))

    def mean(self, state: Tensor) -> Tensor:
        """Mean |x| per channel, shape (C,); zero where no token was seen."""
        return state[:-1] / state[-1].clamp(min=1)


@dataclass(frozen=True, slots=True)
class Gram:
    """X^T X over tokens, with the number of tokens in an extra last row: shape (C + 1, C)."""

    name: str = "gram"
    exact: ClassVar[bool] = False

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(width + 1, width, device=device)

    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor:
        x_TC = x_TC.float()
        return self.merge(state, torch.cat((x_TC.T @ x_TC, x_TC.new_full((1, x_TC.shape[1]), x_TC.shape[0]))))

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor:
        return torch.cat((state[:-1] / s_C / s_C[:, None], state[-1:]))


@dataclass(frozen=True, slots=True)
class Sample:
    """`size` rows of x drawn without replacement, the same whatever the batching: shape (size, C + 1).

    A row's number, which follows from its sequence and position, gives it the priority hash(seed, number), and the
    smallest priorities stay. The last column is the priority; an empty slot has priority +inf.
    """

    name: str = "sample"
    exact: ClassVar[bool] = True
    size: int = 256
    seed: int = 0

    def init(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        state = torch.zeros(self.size, width + 1, device=device)
        return torch.cat((state[:, :-1], torch.full_like(state[:, -1:], float("inf"))), 1)

    def update(self, state: Tensor, x_TC: Tensor, rows_T: Tensor) -> Tensor:
        return self.merge(state, torch.cat((x_TC.float(), self._priority(rows_T)[:, None]), 1))

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat((a, b))
        both = both[both[:, 0].argsort(stable=True)]  # equal priorities, which are rare, in an order of their own
        return both[both[:, -1].argsort(stable=True)[: self.size]]

    def rescale(self, state: Tensor, s_C: Tensor) -> Tensor:
        return torch.cat((state[:, :-1] / s_C, state[:, -1:]), 1)

    def rows(self, state: Tensor) -> Tensor:
        """The sampled rows, shape (at most size, C)."""
        return state[state[:, -1] < float("inf"), :-1]

    def _priority(self, rows_T: Tensor) -> Tensor:
        # a multiplicative hash kept below 2^24, so that float32 holds it exactly
        mixed = (rows_T.to(torch.int64) + 1) * 2654435761 + self.seed * 40503
        mixed = (mixed ^ (mixed >> 15)) * 2246822519
        return ((mixed ^ (mixed >> 13)) & 0xFFFFFF).float()


KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (AbsMax(), Range(), MeanAbs(), Gram(), Sample())}


def split_key(key: str) -> tuple[Kind, str]:
    """`"absmax:model.layers.0.mlp.gate_proj"` -> the kind and the site's name. Raises `PlanError`."""
    name, _, site = key.partition(":")
    if name not in KINDS or not site:
        raise PlanError(f"statistic {key!r}: expected '<kind>:<site>' with a kind of {', '.join(KINDS)}")
    return KINDS[name], site


def rescale_stats(stats: Mapping[str, Tensor], site: str, s_C: Tensor) -> dict[str, Tensor]:
    """Every statistic of `site` in `stats`, as it is after the activation x becomes x / s."""
    out = {}
    for key, state in stats.items():
        kind, name = split_key(key)
        if name == site:
            out[key] = kind.rescale(state, s_C)
    return out
