"""Cross-layer equalization: give the rows of one linear and the columns of the next the same range, without data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..graph import Axis, Graph, PlanError, Symmetry
from ._smooth import axis_absmax, checked_bounds, checked_kinds, chosen_symmetries, cut_symmetries, fold, fold_step
from ._types import Params, Stats, Step

KINDS = ("v_o", "up_down", "q_k")
_USUAL = ("v_o", "up_down")


def cross_layer_scale(first_C: Tensor, second_C: Tensor) -> Tensor:
    """s = sqrt(r1 / r2) per channel (Nagel et al., arXiv 1906.04721, eq. 11). Float32, shape (C,).

    After it r1 / s = r2 s = sqrt(r1 r2).
    """
    return (first_C / second_C).sqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossLayerEqualize:
    """Equalize the ranges max |w| of output channels of one linear and input channels of the next: s = sqrt(r1 / r2).

    Needs no data. Rows take 1/s (with their biases), columns take s; in fused parameters only the rows that belong to
    the symmetry, in stacks of experts each expert for itself. Since every channel is in one symmetry of these kinds,
    one pass is the fixed point that the paper iterates to; biases are not absorbed, which needs batch norm.

    Args:
      kinds: "v_o" (values -> attention output), "up_down" (linear -> linear), "q_k" (queries with keys). None takes
        those of "v_o" and "up_down" that the model has.
      bounds: lower and upper limit of s. Channels that are zero on either side get s = 1.

    Preserves the function exactly in exact arithmetic. Source: Nagel et al., arXiv 1906.04721, section 4.1.
    """

    kinds: tuple[str, ...] | None = None
    bounds: tuple[float, float] = (1e-4, 1e4)

    def __post_init__(self):
        if self.kinds is not None:
            object.__setattr__(self, "kinds", checked_kinds(self.kinds, KINDS))
        object.__setattr__(self, "bounds", checked_bounds(self.bounds))

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        present = {s.kind for s in graph.symmetries}
        kinds = self.kinds or tuple(kind for kind in _USUAL if kind in present) or _USUAL
        symmetries = chosen_symmetries("cross_layer", kinds, graph)
        problems = cut_symmetries("cross_layer", symmetries, graph)
        if problems:
            raise PlanError(problems)
        return tuple(
            fold_step("cross_layer", s, specs, (), partial(_equalize, symmetry=s, bounds=self.bounds))
            for s in symmetries
        )


def _equalize(params: Params, stats: Stats, *, symmetry: Symmetry, bounds: tuple[float, float]) -> tuple[Params, Stats]:
    first, second = (_ranges(params, symmetry, side) for side in (symmetry.producers, symmetry.consumers))
    s = cross_layer_scale(first, second)
    s_C = torch.where((first > 0) & (second > 0) & torch.isfinite(s), s.clamp(*bounds), 1.0)
    return fold(params, stats, symmetry=symmetry, s_C=s_C)


def _ranges(params: Params, symmetry: Symmetry, axes: Sequence[Axis]) -> Tensor:
    """max |w| per class over matrices; over vectors where there are no matrices (norms of queries and keys)."""
    rank = max(params[axis.param].ndim for axis in axes)
    peaks = [axis_absmax(params[a.param], a, symmetry.width) for a in axes if params[a.param].ndim == rank]
    return torch.stack(peaks).amax(0)
