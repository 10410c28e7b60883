"""Equalize: move a scale per channel from activations into weights, along a symmetry of the model.

Legend: O = output rows, I = input channels, C = channel classes of a symmetry. Every fold keeps the model's function:
producers take 1/s, consumers take s. In exact arithmetic nothing changes; in bf16 each scaled weight is rounded once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..graph import Axis, Graph, PlanError, Symmetry
from ..graph.mappings import resolve_mappings
from ._rows import absmax, in_rows
from ._stats import rescale_stats
from ._types import Params, Stats, Step

KINDS_OF_SYMMETRY = ("norm", "v_o", "up_down", "embed", "head")


def smooth_scale(act_absmax: Tensor, weight_absmax: Tensor, alpha: float | Tensor) -> Tensor:
    """s = a^alpha / w^(1 - alpha), per channel (SmoothQuant, arXiv 2211.10438, eq. 4). Float32, shape (C,)."""
    return act_absmax**alpha / weight_absmax ** (1 - alpha)


def log_scale(act_absmax: Tensor) -> Tensor:
    """s = a / log2(2 + a), per channel (FPTQ, arXiv 2308.15987, eq. 6). Float32, shape (C,)."""
    return act_absmax / torch.log2(2 + act_absmax)


def guard_scale(s: Tensor, act: Tensor, floor: float, bounds: tuple[float, float]) -> Tensor:
    """s within `bounds`, and 1 for channels that are dead or constant: act at most `floor`, or s not finite."""
    dead = (act <= floor) | ~torch.isfinite(s) | ~torch.isfinite(act)
    return torch.where(dead, 1.0, s.clamp(*bounds))


def scale_axis(p: Tensor, axis: Axis, s_C: Tensor, inverse: bool = False) -> Tensor:
    """`p` with the channels of `axis` times s (or divided by s), in float32, rounded once to the dtype of `p`."""
    s_C = s_C.to(p.device)  # given scales may lie elsewhere; the dry run is on meta tensors
    s = spread(per_channel(s_C, axis.classes), axis, p)
    part = in_rows(partial(_scaled, offset=axis.offset, inverse=inverse), p.narrow(axis.dim, axis.start, axis.size), s)
    if axis.size == p.shape[axis.dim]:
        return part
    before = p.narrow(axis.dim, 0, axis.start)
    end = axis.start + axis.size
    return torch.cat((before, part, p.narrow(axis.dim, end, p.shape[axis.dim] - end)), axis.dim)


def _scaled(part: Tensor, s: Tensor, *, offset: float, inverse: bool) -> Tensor:
    wide = part.float() + offset if offset else part.float()
    wide = wide / s if inverse else wide * s
    return (wide - offset if offset else wide).to(part.dtype)


def per_channel(s_C: Tensor, classes: tuple[int, ...] | None, rest: float = 1.0) -> Tensor:
    """The number of each channel: (width,) -> (len(classes),), with `rest` for channels of class -1."""
    if classes is None:
        return s_C
    index = torch.tensor(classes, device=s_C.device)
    if min(classes) < 0:
        s_C = torch.cat((s_C, torch.full_like(s_C[:1], rest)))  # which index -1 picks
    return s_C[index]


def spread(s: Tensor, axis: Axis, p: Tensor) -> Tensor:
    """One number for each channel of `axis`, in a shape that broadcasts over `p`."""
    shape = [1] * p.ndim
    shape[axis.dim] = axis.size
    if axis.stack is None:
        return s.reshape(shape)
    shape[axis.stack] = p.shape[axis.stack]
    s_EC = s.reshape(p.shape[axis.stack], axis.size)
    return (s_EC if axis.stack < axis.dim else s_EC.T).reshape(shape)


def axis_absmax(p: Tensor, axis: Axis, width: int) -> Tensor:
    """max |p| over everything but the channels of `axis`, per class: float32 (width,)."""
    part = p.narrow(axis.dim, axis.start, axis.size)
    if p.ndim == 2 and axis.stack is None:
        return class_max(absmax(part, axis.dim).float(), axis.classes, width)
    if axis.stack is not None:  # slices first, then channels
        part = part.movedim((axis.stack, axis.dim), (0, 1)).flatten(0, 1)
    else:
        part = part.movedim(axis.dim, 0)
    part = part.flatten(1) if part.ndim > 1 else part[:, None]
    peak = torch.maximum(part.amax(1), -part.amin(1)).float()
    return class_max(peak, axis.classes, width)


def class_max(x: Tensor, classes: tuple[int, ...] | None, width: int) -> Tensor:
    """Maximum over the channels of each class: (len(classes),) -> (width,); x >= 0. Class -1 is left out."""
    if classes is None:
        return x
    index = torch.tensor(classes, device=x.device)
    if min(classes) < 0:
        index = torch.where(index < 0, width, index)
    return x.new_zeros(width + 1).scatter_reduce(0, index, x, "amax")[:width]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothQuant:
    """Migrate the difficulty of quantizing activations into weights: s = a^alpha / w^(1 - alpha) per channel.

    Args:
      alpha: migration strength in [0, 1]; a 0-dim tensor to differentiate or `vmap` over it.
      statistic: "absmax", max |x| as in the paper, or "range", max x - min x with 2 max |w|, as SparseML and
        llm-compressor use it (the same up to a constant factor where activations are symmetric).
      kinds: kinds of symmetries to use: "norm" (norm -> linears), "v_o" (values -> attention output), "up_down"
        (linear -> linear), "embed" (embedding -> linear), "head" (norm -> linears outside all blocks, as the head).
        The default is "norm", where activations have outliers; measure before adding others.
      mappings: instead of `kinds`, `[[linear patterns], producer pattern]` pairs, with exact names or `re:` regexes.
      floor: channels whose statistic is at most this get s = 1.
      bounds: lower and upper limit of s.

    Preserves the function exactly in exact arithmetic. Source: Xiao et al., arXiv 2211.10438, eq. 3 and 4.
    """

    alpha: float | Tensor = 0.5
    statistic: str = "absmax"
    kinds: tuple[str, ...] = ("norm",)
    mappings: tuple | None = None
    floor: float = 1e-6
    bounds: tuple[float, float] = (1e-4, 1e4)

    def __post_init__(self):
        if isinstance(self.alpha, Tensor):
            if self.alpha.ndim != 0:
                raise ValueError(f"alpha: expected a number or a 0-dim tensor, got shape {tuple(self.alpha.shape)}")
        elif isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1], got {self.alpha!r}")
        _check_common(self)

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        fn = partial(_smooth, alpha=self.alpha, statistic=self.statistic, floor=self.floor, bounds=self.bounds)
        return _plan_folds("smooth", self, specs, graph, fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEqualize:
    """Compress the outlier channels of activations to a logarithmic scale: s = a / log2(2 + a) per channel.

    After it a channel of peak a has peak log2(2 + a): large channels shrink, and small ones grow to about 1. Weights
    do not enter. Arguments and guarantees as in `SmoothQuant`. Source: FPTQ, Li et al., arXiv 2308.15987, eq. 6.
    """

    statistic: str = "absmax"
    kinds: tuple[str, ...] = ("norm",)
    mappings: tuple | None = None
    floor: float = 1e-6
    bounds: tuple[float, float] = (1e-4, 1e4)

    def __post_init__(self):
        _check_common(self)

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        fn = partial(_log_equalize, statistic=self.statistic, floor=self.floor, bounds=self.bounds)
        return _plan_folds("log_equalize", self, specs, graph, fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Apply given scales along the graph's symmetries: `scales[symmetry.name]` is s, positive, of shape (width,).

    The building block of equalizers that find their scales elsewhere (a learned scale, a search, a random one in a
    test). Preserves the function exactly in exact arithmetic.
    """

    scales: Mapping[str, Tensor]

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        known = {s.name: s for s in graph.symmetries}
        problems = [f"rescale: the graph has no symmetry {name!r}" for name in self.scales if name not in known]
        for name, s in self.scales.items():
            if name in known and tuple(s.shape) != (known[name].width,):
                problems.append(f"rescale: {name}: expected s of shape ({known[name].width},), got {tuple(s.shape)}")
        problems += cut_symmetries("rescale", [known[n] for n in self.scales if n in known], graph)
        if problems:
            raise PlanError(problems)
        return tuple(
            fold_step("rescale", known[name], specs, (), partial(fold, symmetry=known[name], s_C=s))
            for name, s in self.scales.items()
        )


def checked_kinds(kinds: object, known: Sequence[str]) -> tuple[str, ...]:
    """The kinds as a tuple. Raises `ValueError` unless they are some of the known ones."""
    chosen = _listed("kinds", kinds)
    if not chosen or any(kind not in known for kind in chosen):
        raise ValueError(f"kinds: expected some of {', '.join(known)}, got {list(chosen)}")
    return chosen


def checked_bounds(bounds: object) -> tuple[float, float]:
    """The bounds of a scale as a tuple. Raises `ValueError` unless they are a lower and an upper one around 1."""
    pair = _listed("bounds", bounds)
    if len(pair) != 2 or not 0 < pair[0] <= 1 <= pair[1]:
        raise ValueError(f"bounds: expected (low, high) with 0 < low <= 1 <= high, got {pair}")
    return pair[0], pair[1]


def _listed(name: str, value: object) -> tuple:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}: expected a list, got {value!r}")
    return tuple(value)


def _check_common(transform: SmoothQuant | LogEqualize) -> None:
    if transform.statistic not in ("absmax", "range"):
        raise ValueError(f"statistic: expected 'absmax' or 'range', got {transform.statistic!r}")
    object.__setattr__(transform, "kinds", checked_kinds(transform.kinds, KINDS_OF_SYMMETRY))
    object.__setattr__(transform, "bounds", checked_bounds(transform.bounds))
    if not transform.floor >= 0:
        raise ValueError(f"floor: expected a number >= 0, got {transform.floor!r}")


def _plan_folds(label: str, transform: SmoothQuant | LogEqualize, specs: Params, graph: Graph, fn) -> tuple[Step, ...]:
    if transform.mappings is not None:
        symmetries = resolve_mappings(graph, transform.mappings, label)
    else:
        symmetries = chosen_symmetries(label, transform.kinds, graph)
    problems = cut_symmetries(label, symmetries, graph)
    problems += [
        f"{label}[{s.name}]: its activation lies inside {s.linears[0] if s.linears else s.name}, where it cannot be "
        f"observed; leave out kind {s.kind!r}, exclude it by `select`, or use CrossLayerEqualize, which needs no data"
        for s in symmetries
        if s.site is None
    ]
    if problems:
        raise PlanError(problems)
    steps = []
    for s in symmetries:
        needs = (f"{transform.statistic}:{s.site}",)
        steps.append(fold_step(label, s, specs, needs, partial(fn, symmetry=s)))
    return tuple(steps)


def cut_symmetries(label: str, symmetries: Iterable[Symmetry], graph: Graph) -> list[str]:
    """One problem for each symmetry of which a selection leaves some linears out."""
    selected = {graph.ties.get(x.weight, x.weight) for x in graph.linears.values()}
    problems = []
    for symmetry in symmetries:
        axes = (*symmetry.producers, *symmetry.consumers)
        weights = list(dict.fromkeys(a.param for a in axes if len(graph.shapes.get(a.param, ())) > 1))
        left = [name.removesuffix(".weight") for name in weights if name not in selected]
        if left:
            problems.append(
                f"{label}[{symmetry.name}]: {', '.join(left)} is not selected but shares the scale of "
                f"{', '.join(name.removesuffix('.weight') for name in weights)}; select all of them or none"
            )
    return problems


def chosen_symmetries(label: str, kinds: Sequence[str], graph: Graph) -> tuple[Symmetry, ...]:
    """The graph's symmetries of these kinds. Raises `PlanError` for a kind that it has none of, saying why."""
    if graph.untraced is not None:
        raise PlanError(
            f"{label}: no symmetry is known for this model, since {graph.untraced}; give mappings "
            "([[linear patterns], producer pattern]), which are proved on real tensors, or leave this stage out"
        )
    present = {s.kind for s in graph.symmetries}
    problems = [
        f"{label}: no symmetry of kind {kind!r} is known for this model"
        + (f" (kinds found: {', '.join(sorted(present))})" if present else "")
        + "; `regauge job=inspect` shows what was found and why the rest was rejected"
        for kind in kinds
        if kind not in present
    ]
    if problems:
        raise PlanError(problems)
    return tuple(s for s in graph.symmetries if s.kind in kinds)


def fold_step(label: str, symmetry: Symmetry, specs: Params, needs: tuple[str, ...], fn) -> Step:
    names = tuple(dict.fromkeys(axis.param for axis in (*symmetry.producers, *symmetry.consumers)))
    missing = [name for name in names if name not in specs]
    if missing:
        raise PlanError(f"{label}[{symmetry.name}]: tensor {missing[0]} is not in the checkpoint")
    coded = [name for name in names if not specs[name].dtype.is_floating_point]
    if coded:
        raise PlanError(f"{label}[{symmetry.name}]: {coded[0]} holds integer codes; equalize before quantizing")
    return Step(
        name=f"{label}[{symmetry.name}]",
        reads=names,
        writes={name: specs[name] for name in names},
        needs=needs,
        edits=(*(() if symmetry.site is None else (symmetry.site,)), *symmetry.more_sites),
        fn=fn,
    )


def _activation(stats: Stats, symmetry: Symmetry, statistic: str) -> Tensor:
    """The statistic of the symmetry's site as one non-negative number per class."""
    state = stats[f"{statistic}:{symmetry.site}"].float()
    peak = state[1] - state[0] if statistic == "range" else state
    return class_max(peak, symmetry.site_classes, symmetry.width)


def _weight_absmax(params: Params, symmetry: Symmetry) -> Tensor:
    """max |w| over all consumers, per class."""
    peaks = [axis_absmax(params[axis.param], axis, symmetry.width) for axis in symmetry.consumers]
    return torch.stack(peaks).amax(0)


def _smooth(params: Params, stats: Stats, *, symmetry, alpha, statistic, floor, bounds) -> tuple[Params, Stats]:
    act = _activation(stats, symmetry, statistic)
    alpha = alpha.to(act.device) if isinstance(alpha, Tensor) else alpha  # the dry run is on meta tensors
    weight = _weight_absmax(params, symmetry) * (2 if statistic == "range" else 1)
    s_C = guard_scale(smooth_scale(act, weight, alpha), act, floor, bounds)
    return fold(params, stats, symmetry=symmetry, s_C=s_C)


def _log_equalize(params: Params, stats: Stats, *, symmetry, statistic, floor, bounds) -> tuple[Params, Stats]:
    act = _activation(stats, symmetry, statistic)
    return fold(params, stats, symmetry=symmetry, s_C=guard_scale(log_scale(act), act, floor, bounds))


def fold(params: Params, stats: Stats, *, symmetry: Symmetry, s_C: Tensor) -> tuple[Params, Stats]:
    """Fold s: producers / s, consumers * s, statistics of the sites rescaled."""
    out = dict(params)
    for axis in symmetry.producers:
        out[axis.param] = scale_axis(out[axis.param], axis, s_C, inverse=True)
    for axis in symmetry.consumers:
        out[axis.param] = scale_axis(out[axis.param], axis, s_C)
    restated: Stats = {}
    s_site = per_channel(s_C.to(next(iter(out.values())).device), symmetry.site_classes)
    for site in (symmetry.site, *symmetry.more_sites):
        if site is not None:
            restated = {**restated, **rescale_stats(stats, site, s_site)}
    return out, restated
