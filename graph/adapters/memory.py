"""Tensors in a dict."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from .._errors import LayoutError
from .fsdp import is_sharded


class Memory:
    """A dict of tensors as a store; tied parameters appear once, under the name that a checkpoint stores."""

    def __init__(self, params: Mapping[str, Tensor] | None = None):
        self.params: dict[str, Tensor] = dict(params or {})

    @classmethod
    def of(cls, model: nn.Module) -> "Memory":
        """The parameters of a module, detached and shared with it. Never edited in place by this library.

        Raises `LayoutError` for a model that FSDP wraps, whose parameters are shards.
        """
        if is_sharded(model):
            raise LayoutError(f"{type(model).__name__} is sharded by FSDP, and holds parts only; use Fsdp(model)")
        return cls({name: p.detach() for name, p in model.named_parameters()})

    def specs(self) -> dict[str, Tensor]:
        return {name: p.to("meta") for name, p in self.params.items()}

    @contextmanager
    def read(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        wanted = list(names)
        missing = [name for name in wanted if name not in self.params]
        if missing:
            raise LayoutError(f"memory: no tensor {missing[0]}")
        yield {name: self.params[name] for name in wanted}

    def write(self, params: Mapping[str, Tensor]) -> None:
        self.params.update(params)
