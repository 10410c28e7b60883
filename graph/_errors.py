"""The two errors that users meet. Both are `ValueError`: the input was wrong, not the library."""

from collections.abc import Iterable


class PlanError(ValueError):
    """A transform cannot be planned on these tensors.

    `problems` holds every problem found, not only the first; the message shows up to twelve of them.
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        hidden = len(self.problems) - 12
        super().__init__("\n".join((*self.problems[:12], *((f"... and {hidden} more",) if hidden > 0 else ()))))


def first_line(error: BaseException) -> str:
    """What an error says, without the advice and the traces that libraries add below."""
    return (str(error).splitlines() or [""])[0]


class LayoutError(ValueError):
    """A file, folder, dataset or store does not hold what it should."""
