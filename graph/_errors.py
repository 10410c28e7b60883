"""The two errors that users meet. Both are `ValueError`: the input was wrong, not the library."""

from collections.abc import Iterable


class PlanError(ValueError):
    """A transform cannot be planned on these tensors. Lists every problem found, not only the first."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class LayoutError(ValueError):
    """A file, folder, dataset or store does not hold what it should."""
