"""Transforms made of transforms: `chain`, `select`, `partition`, `identity`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..graph import Graph, Linear, PlanError
from ..graph.patterns import check_patterns, matches, unmatched
from ._types import Params, Step, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Changes nothing; the neutral element of `chain`."""

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Transforms in order, each planned on the tensors that the one before leaves. Made by `chain`."""

    transforms: tuple[Transform, ...]

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        steps: list[Step] = []
        problems: list[str] = []
        left = dict(specs)
        for transform in self.transforms:
            try:
                new = transform.plan(left, graph)
            except PlanError as error:
                problems += error.problems
                continue
            for step in new:
                for name in step.drops:
                    left.pop(name, None)
                left.update(step.writes)
            steps += new
        if problems:
            raise PlanError(problems)
        return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """A transform on the linears whose module matches `include` and not `exclude`. Made by `select`."""

    transform: Transform
    include: tuple[str, ...] = ("re:",)
    exclude: tuple[str, ...] = ()

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        where = f"select({type(self.transform).__name__})"
        patterns = (*self.include, *self.exclude)
        problems = check_patterns(patterns, where) or unmatched(patterns, graph.modules, where)
        if problems:
            raise PlanError(problems)

        def keep(linear: Linear) -> bool:
            named = [any(matches(p, linear.name, linear.cls) for p in ps) for ps in (self.include, self.exclude)]
            return named[0] and not named[1]

        return self.transform.plan(specs, graph.restrict(keep))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Each linear under the transform of its label. Made by `partition`."""

    transforms: Mapping[str, Transform]
    labels: Callable[[Linear], str] | Mapping[str, str]

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        label = {name: self._label(linear) for name, linear in graph.linears.items()}
        unknown = sorted({str(x) for x in label.values() if x not in self.transforms})
        unused = sorted(set(self.transforms) - set(label.values()))
        if unknown or unused:
            raise PlanError(
                f"partition: labels in use {sorted({str(x) for x in label.values()})}, transforms given for "
                f"{sorted(self.transforms)}; each label needs a transform and each transform a linear"
            )
        parts = [_Part(transform=transform, label=name, labels=label) for name, transform in self.transforms.items()]
        return Chain(transforms=tuple(parts)).plan(specs, graph)

    def _label(self, linear: Linear) -> str | None:
        if callable(self.labels):
            return self.labels(linear)
        return next((to for p, to in self.labels.items() if matches(p, linear.name, linear.cls)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    transform: Transform
    label: str
    labels: Mapping[str, str | None]

    def plan(self, specs: Params, graph: Graph) -> tuple[Step, ...]:
        return self.transform.plan(specs, graph.restrict(lambda linear: self.labels[linear.name] == self.label))


def identity() -> Identity:
    """The transform that changes nothing."""
    return Identity()


def chain(*transforms: Transform) -> Chain:
    """Apply transforms in order. `chain()` is the identity; chains nest.

    >>> from regauge.transforms import LogEqualize, Quantize, chain
    >>> recipe = chain(LogEqualize(), Quantize(scheme="W8A8", ignore=("lm_head",)))
    """
    return Chain(transforms=tuple(transforms))


def select(transform: Transform, include=("re:",), exclude=()) -> Select:
    """Restrict a transform to linears by name: exact, `re:` regex, or class. The default includes everything.

    Raises `PlanError` at plan time for a pattern that matches no module, and, in transforms that
    scale along symmetries, for a choice that would cut through one.
    """
    return Select(transform=transform, include=_patterns(include), exclude=_patterns(exclude))


def partition(transforms: Mapping[str, Transform], labels: Callable[[Linear], str] | Mapping[str, str]) -> Partition:
    """Apply to each linear the transform of its label.

    `labels` is a function of the `Linear`, or a mapping from patterns to labels of which the first match counts.
    """
    return Partition(transforms=dict(transforms), labels=labels)


def _patterns(patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
