"""What a model is, as plain data: linears, sites, symmetries, ties and blocks.

A `Graph` holds names and shapes only, no tensors, so it is cheap to build, print, cache and test. Providers make one:
`regauge.graph.build` from module classes, names and one forward on meta tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A run of channels of one parameter: `size` channels from `start` on along `dim`.

    `classes[i]` is the channel class of the i-th of them; channels of one class must be scaled alike (the query heads
    that share a key-value head, say). None means that channel i is class i. `offset` is for parameters that are used as
    `offset + w`, such as the `1 + w` norms of Gemma.
    """

    param: str
    dim: int
    size: int
    start: int = 0
    classes: tuple[int, ...] | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A parameter contracted with an activation. `weight` is (out, in), or (in, out) where `transposed` (Conv1D).

    `rows` is the range of output rows when several linears are fused in one parameter. An embedding is a linear that
    reads one-hot vectors: `cls` is "Embedding" and it has no site.
    """

    name: str
    weight: str
    shape: tuple[int, ...]
    cls: str = "Linear"
    bias: str | None = None
    site: str | None = None
    block: int | None = None
    transposed: bool = False
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An activation of `width` channels that every linear in `linears` reads. It has the name of the first of them."""

    name: str
    width: int
    linears: tuple[str, ...]
    producer: str | None = None  # the module whose output this is, where one is known
    block: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetry:
    """A rescaling that leaves the function unchanged: producers times 1/s, consumers times s, per channel class.

    `width` is the number of classes, that is the length of s. The activation at `site` becomes x / s[site_classes].
    """

    name: str
    kind: str  # "norm", "v_o" or "up_down"
    width: int
    producers: tuple[Axis, ...]
    consumers: tuple[Axis, ...]
    linears: tuple[str, ...]
    site: str
    site_classes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Linears and sites by name, symmetries, ties (alias -> the name that the checkpoint stores), blocks by prefix.

    `modules` maps every module to its class name, `shapes` every stored parameter to its shape, `offsets` the norm
    weights that are used as `offset + w`. `family` is None where no symmetries are known for the architecture.
    """

    linears: Mapping[str, Linear]
    sites: Mapping[str, Site]
    symmetries: tuple[Symmetry, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)
    family: str | None = None

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
