"""Many forwards of one model side by side, each in a thread of its own, with the modules' work done in the main thread.

A forward is suspended at every module that was handed over, and goes on when its result is given. One thread runs at
a time, so the order of all work is that of the caller. Nothing is assumed about what flows between modules.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Call:
    """A module's forward that a lane waits for."""

    module: nn.Module
    run: Callable[[], Any]


class _Ended(BaseException):
    """Raised in a lane whose rest does not matter."""


class Lane:
    """One forward. `step` lets it run to its next call, which is returned, or to its end, which is None."""

    def __init__(self, forward: Callable[[], object]):
        self._inbox: SimpleQueue = SimpleQueue()
        self._outbox: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(forward,), daemon=True, name="lane")
        self._thread.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def step(self, value: Any = None) -> Call | None:
        """Give the result of the last call (at first anything). Raises what the forward raises."""
        self._inbox.put(value)
        said = self._outbox.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def wait(self, call: Call) -> Any:
        """In the lane's own thread: hand a call over and wait for its result."""
        self._outbox.put(call)
        result = self._inbox.get()
        if isinstance(result, _Ended):
            raise result
        return result

    def end(self) -> None:
        """Give up the rest of the forward."""
        self._inbox.put(_Ended())
        self._thread.join()

    def _work(self, forward: Callable[[], object]) -> None:
        try:
            # a pool of threads for each lane would be too many; heavy work is done in the main thread
            torch.set_num_threads(1)
            if not isinstance(self._inbox.get(), _Ended):
                forward()
            self._outbox.put(None)
        except BaseException as error:
            self._outbox.put(None if isinstance(error, _Ended) else error)


@contextlib.contextmanager
def lanes(forwards: Sequence[Callable[[], object]], handed: Sequence[nn.Module]) -> Iterator[list[Lane]]:
    """A lane for each forward; those of the modules `handed` become calls. At the end all lanes are ended."""
    threads = torch.get_num_threads()
    made: list[Lane] = []
    by_thread: dict[int | None, Lane] = {}

    def handing(module: nn.Module) -> Callable[..., Any]:
        real = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            lane = by_thread.get(threading.get_ident())
            return real(*args, **kwargs) if lane is None else lane.wait(Call(module, lambda: real(*args, **kwargs)))

        return forward

    for module in handed:
        module.forward = handing(module)
    try:
        for forward in forwards:
            made.append(Lane(forward))
            by_thread[made[-1].ident] = made[-1]
        yield made
    finally:
        for lane in made:
            lane.end()
        for module in handed:
            del module.forward  # the class's own again
        torch.set_num_threads(threads)  # which new threads take over
