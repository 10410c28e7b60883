"""What a model is, as plain data: linears, sites, symmetries, ties and blocks.

A `Graph` holds names and shapes only, no tensors, so it is cheap to build, print, cache and test. Providers make one:
`regauge.graph.build` from a config, by tracing the forward of its model on fake tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A run of channels of one parameter: `size` channels from `start` on along `dim`.

    `classes[i]` is the channel class of the i-th of them; channels of one class must be scaled alike (the query heads
    that share a key-value head, say), and channels of class -1 are left alone. None means that channel i is class i.
    `offset` is for parameters that are used as `offset + w`, such as the `1 + w` norms of Gemma. In a stack of matrices
    with scales of their own, such as experts, `stack` is the dim of the slices: `classes` then holds those of slice 0,
    then those of slice 1, and so on.
    """

    param: str
    dim: int
    size: int
    start: int = 0
    classes: tuple[int, ...] | None = None
    offset: float = 0.0
    stack: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A parameter contracted with an activation. `weight` is (out, in), or (in, out) where `transposed` (Conv1D).

    A stack of experts is one linear with a weight of three dims. An embedding is a linear that reads one-hot vectors:
    `cls` is "Embedding" and it has no site. `cls` is the class of the module that owns the weight; quantization schemes
    target it.
    """

    name: str
    weight: str
    shape: tuple[int, ...]
    cls: str = "Linear"
    bias: str | None = None
    site: str | None = None
    block: int | None = None
    transposed: bool = False

    @property
    def column_dim(self) -> int:
        """The dim of the weight that is contracted with the activation."""
        return len(self.shape) - (2 if self.transposed else 1)

    @property
    def fan_in(self) -> int:
        """How many channels it reads."""
        return self.shape[self.column_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An activation of `width` channels that every linear in `linears` reads. It has the name of the first of them.

    `module` is where it can be observed, as the first argument of that module; None where it is inside a module's
    forward. `producer` is the module whose output it is, where that is known.
    """

    name: str
    width: int
    linears: tuple[str, ...]
    producer: str | None = None
    block: int | None = None
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetry:
    """A rescaling that leaves the function unchanged: producers times 1/s, consumers times s, per channel class.

    `width` is the number of classes, that is the length of s; `linears` are those that consumers belong to. The
    activation at `site` becomes x / s[site_classes], and so do those at `more_sites`. `site` is None where no linear
    reads the scaled activation (queries and keys), or where it cannot be observed (inside a stack of experts).

    Kinds: "norm" (norm -> linears), "v_o" (values -> attention output), "up_down" (linear -> linear), "q_k" (queries
    with keys), "embed" (embedding -> linear), "head" (norm -> linears outside all blocks).
    """

    name: str
    kind: str
    width: int
    producers: tuple[Axis, ...]
    consumers: tuple[Axis, ...]
    linears: tuple[str, ...]
    site: str | None = None
    site_classes: tuple[int, ...] | None = None
    more_sites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A producer whose channels cannot be rescaled, and the operators that forbid it, the widest first."""

    name: str
    kind: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much the output moves along the orbit of a symmetry, beside how much it moves when half of it is applied.

    `change` and `control` are norms of the derivative relative to that of the output ("jvp"), or of a finite change
    ("finite"). `error` says why there are no figures.
    """

    method: str
    change: float = float("nan")
    control: float = float("nan")
    error: str | None = None

    @property
    def holds(self) -> bool:
        """The output stands still along the orbit, and it does move when only the consumers are scaled."""
        return self.error is None and 1e-6 < self.control < math.inf and self.change <= 1e-9 * self.control

    @property
    def reason(self) -> str:
        """In words, for a table or an error."""
        if self.error is not None:
            return f"not proved: {self.error}"
        return f"{self.method}: the output moves by {self.change:.1e}, by {self.control:.1e} if half of it is applied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Linears and sites by name, proved symmetries, ties (alias -> the name that is stored), blocks by prefix.

    `modules` maps every module to its class name, `shapes` every stored parameter to its shape, `proofs` the names of
    symmetries (proved or not) to their proofs, `rejected` lists the producers that have none. `untraced` says why the
    forward could not be traced: sites and symmetries are then not known, each linear has a site of its own. `prove`
    takes a producer and linears that a user gives, and returns their symmetry if it is one, with the proof.
    """

    linears: Mapping[str, Linear]
    sites: Mapping[str, Site]
    symmetries: tuple[Symmetry, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    untraced: str | None = None
    prove: Callable[[str, tuple[str, ...]], tuple[Symmetry | None, Proof]] | None = field(
        default=None, repr=False, compare=False
    )

    def restrict(self, keep: Callable[[Linear], bool]) -> "Graph":
        """The part whose linears satisfy `keep`; a symmetry stays when any of its linears does. Sites stay whole."""
        linears = {name: linear for name, linear in self.linears.items() if keep(linear)}
        kept = tuple(s for s in self.symmetries if any(name in linears for name in s.linears))
        return replace(self, linears=linears, symmetries=kept)

    def block_of(self, module: str) -> int | None:
        """The index of the block that holds the module, None outside all blocks."""
        for index, prefix in enumerate(self.blocks):
            if module == prefix or module.startswith(prefix + "."):
                return index
        return None
