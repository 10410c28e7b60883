"""Plan a transform on shapes, and apply the plan to tensors in memory."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..graph import Graph, LayoutError, PlanError
from ._scheme import Scheme
from ._stats import split_key
from ._types import Params, Stats, Step, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Steps that share tensors, closed: the unit that is streamed. A cell without steps copies one tensor."""

    steps: tuple[Step, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Checked steps from tensors shaped `source` to tensors shaped `target`, and the statistics they need."""

    steps: tuple[Step, ...]
    source: Params
    target: Params
    needs: tuple[str, ...]
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Connected components of steps over tensor and statistic names, in the order of the source's names."""
        return _cells(self)


def plan(transform: Transform, specs: Params, graph: Graph) -> Plan:
    """Plan `transform` on `specs` (real tensors will do) and run every step once on meta tensors.

    Raises `PlanError` with all problems at once: names, shapes, dtypes, group sizes, patterns that match nothing,
    statistics without a site, statistics that do not survive an earlier edit.
    """
    _refuse_shards(specs)
    source = {name: _meta(p) for name, p in specs.items()}
    steps = transform.plan(source, graph)
    needs = tuple(dict.fromkeys(key for step in steps for key in step.needs))
    steps = tuple(_with_edited(step, needs) for step in steps)
    stats, problems = _stat_specs(needs, graph)
    planned = dict(stats)
    target = dict(source)
    checked: set[Hashable] = set()
    for index, step in enumerate(steps):
        pattern = _pattern(step, target, graph)
        if pattern is not None and pattern in checked:
            _fold_specs(step, target, step.writes)
            continue
        found = _dry_run(step, target, stats, steps[index + 1 :])
        problems += found
        if not found and pattern is not None:
            checked.add(pattern)
    if problems:
        raise PlanError(problems)
    schemes = {name: scheme for step in steps for name, scheme in step.schemes.items()}
    return Plan(steps=steps, source=source, target=target, needs=needs, schemes=schemes, stats=planned)


def apply(plan: Plan, params: Params, stats: Stats | None = None) -> dict[str, Tensor]:
    """Run the plan's steps on tensors in memory; untouched tensors are returned by identity, inputs stay as they are.

    Differentiable where the steps are (`torch.func.grad`), and works under `torch.func.vmap`. Raises `LayoutError`
    when a tensor or a statistic is missing or has another shape than was planned.
    """
    check_inputs(plan, params, stats or {})
    out, known = dict(params), dict(stats or {})
    for step in plan.steps:
        run_step(step, out, known)
    return out


def run_step(step: Step, params: dict[str, Tensor], stats: dict[str, Tensor]) -> Params:
    """Run one step on the dicts that the caller owns: replaces their entries, never edits a tensor.

    Returns what the step changed.
    """
    changed, restated = step.fn({n: params[n] for n in step.reads}, {k: stats[k] for k in step.needs if k in stats})
    for name in step.drops:
        del params[name]
    params.update(changed)
    stats.update(restated)
    return changed


def check_inputs(plan: Plan, params: Params, stats: Stats) -> None:
    """Raise `LayoutError` unless `params` and `stats` are what `plan` was made for."""
    _refuse_shards(params)
    problems = [f"tensor {name} is missing" for name in plan.source if name not in params]
    for name, want in plan.source.items():
        got = params.get(name)
        if got is not None and (got.shape != want.shape or got.dtype != want.dtype):
            problems.append(f"{name}: planned for {_show(want)}, got {_show(got)}; plan again on these tensors")
    for key, want in plan.stats.items():
        got = stats.get(key)
        first = 1 if key.startswith("sample:") else 0  # a sample may hold more rows than planned
        if got is not None and (got.ndim != want.ndim or got.shape[first:] != want.shape[first:]):
            problems.append(f"statistic {key!r}: planned for {_show(want)}, got {_show(got)}")
    missing = [key for key in plan.needs if key not in stats]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problems.append(
            f"statistic {missing[0]!r}{more} is missing; collect it by observe(model, batches, plan.needs, graph)"
        )
    if problems:
        raise LayoutError("\n".join(problems))


def _refuse_shards(params: Params) -> None:
    for name, p in params.items():
        if type(p).__name__ in ("DTensor", "FlatParameter"):  # told by name: torch.distributed is the adapters' own
            raise LayoutError(
                f"{name} is a {type(p).__name__}, a shard of a wrapped model; use apply_sharded(transform, model), or "
                "plan on Fsdp(model).specs()"
            )


def _meta(p: Tensor) -> Tensor:
    return torch.empty(tuple(p.shape), dtype=p.dtype, device="meta")


def _show(p: Tensor) -> str:
    return f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}"


def _with_edited(step: Step, needs: tuple[str, ...]) -> Step:
    """The step with every planned statistic of the sites that it edits among its needs."""
    if not step.edits:
        return step
    edited = tuple(key for key in needs if key.partition(":")[2] in step.edits)
    return replace(step, needs=tuple(dict.fromkeys((*step.needs, *edited))))


def _stat_specs(needs: tuple[str, ...], graph: Graph) -> tuple[dict[str, Tensor], list[str]]:
    stats, problems = {}, []
    for key in needs:
        kind, site = split_key(key)
        if site in graph.sites:
            stats[key] = kind.init(graph.sites[site].width, device="meta")
        else:
            problems.append(f"statistic {key!r}: the graph has no site {site!r}")
    return stats, problems


def _dry_run(step: Step, params: dict[str, Tensor], stats: dict[str, Tensor], later: tuple[Step, ...]) -> list[str]:
    """Run one step on meta tensors, check what it returns against its declaration, fold its specs into `params`."""
    missing = [name for name in (*step.reads, *step.drops) if name not in params]
    if missing:
        return [f"{step.name}: tensor {name} does not exist at this point" for name in missing]
    try:
        changed, restated = step.fn({n: params[n] for n in step.reads}, {k: stats[k] for k in step.needs if k in stats})
    except PlanError as error:
        return [f"{step.name}: {problem}" for problem in error.problems]
    except NotImplementedError as error:
        return [_no_closed_form(step, later, error)]
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        return [f"{step.name}: fails on these shapes: {error}"]
    problems = []
    if set(changed) != set(step.writes):
        problems.append(f"{step.name}: declares {sorted(step.writes)}, returns {sorted(changed)}")
    for name, got in changed.items():
        want = step.writes.get(name, got)
        if got.shape != want.shape or got.dtype != want.dtype:
            problems.append(f"{step.name}: {name}: declares {_show(want)}, returns {_show(got)}")
    _fold_specs(step, params, changed)
    stats.update(restated)
    return problems


def _fold_specs(step: Step, params: dict[str, Tensor], changed: Params) -> None:
    for name in step.drops:
        del params[name]
    params.update({name: _meta(p) for name, p in changed.items()})


def _pattern(step: Step, params: Params, graph: Graph) -> Hashable | None:
    """What a dry run depends on, with the block's prefix taken out of all names: blocks that are alike run once.

    None where that cannot be told: outside blocks, for a function that is not a partial of a module's function, and
    for settings that are tensors.
    """
    block = graph.block_of(step.reads[0]) if step.reads else None
    if block is None or not isinstance(step.fn, partial) or _holds_tensor(tuple(step.fn.keywords.values())):
        return None
    if any(name not in params for name in (*step.reads, *step.drops)):
        return None
    prefix = graph.blocks[block] + "."
    shapes = [(name, _show(params[name])) for name in step.reads]
    shapes += [(name, _show(p)) for name, p in step.writes.items()]
    widths = [(key, graph.sites[split_key(key)[1]].width) for key in step.needs if split_key(key)[1] in graph.sites]
    text = repr((shapes, widths, step.drops, step.needs, step.edits, step.fn.args, step.fn.keywords))
    return step.fn.func, text.replace(prefix, "*.")


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, tuple | list) and any(_holds_tensor(item) for item in value)


def _no_closed_form(step: Step, later: tuple[Step, ...], error: Exception) -> str:
    users = [s.name for s in later if any(key.partition(":")[2] in step.edits for key in s.needs)]
    user = users[0] if users else step.name
    return (
        f"{step.name} changes an activation whose statistics {user} needs, and they have no closed form under this "
        f"edit ({error}); run {user} in a second recipe, calibrated on the output of the first"
    )


def _cells(plan: Plan) -> tuple[Cell, ...]:
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for step in plan.steps:
        # a statistic that a step edits ties it to later users of it; one that is only read does not
        tied = [*step.reads, *step.writes, *step.drops]
        tied += [f"stat {key}" for key in step.needs if _is_edited(key, plan)]
        for name in tied[1:]:
            parent[root(name)] = root(tied[0])
    members: dict[str, list[str]] = {}
    for name in dict.fromkeys((*plan.source, *plan.target)):
        members.setdefault(root(name), []).append(name)
    steps: dict[str, list[Step]] = {}
    for step in plan.steps:
        steps.setdefault(root((*step.reads, *step.writes)[0]), []).append(step)
    return tuple(
        Cell(
            steps=tuple(steps.get(key, ())),
            reads=tuple(name for name in names if name in plan.source),
            writes=tuple(name for name in names if name in plan.target),
        )
        for key, names in members.items()
    )


def _is_edited(key: str, plan: Plan) -> bool:
    return any(key.partition(":")[2] in step.edits for step in plan.steps)
