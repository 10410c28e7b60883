"""What a store is: a place where named tensors live."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Source(Protocol):
    """Named tensors that can be read. `read` is a context: its tensors must not be used after it ends."""

    def specs(self) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes as meta tensors, in the store's order."""
        ...

    def read(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """The named tensors, whole."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A place to put named tensors, each exactly once."""

    def write(self, params: Mapping[str, Tensor]) -> None: ...
