"""Classes of channels that must be scaled alike, and which way.

A channel i has two literals: 2 i, "scaled by 1/s", and 2 i + 1, "scaled by s". A label is an integer tensor that
broadcasts to a value of the trace and holds the literal of each element, -1 where it is not scaled. Merging two labels
makes their channels one class; merging a label with the opposite of another makes one class whose members are scaled in
opposite ways (queries and keys). A class that would have to equal its own opposite can only be s = 1, and is pinned.
"""

import torch
from torch import Tensor

UNSCALED = -1


class Classes:
    """Disjoint sets of literals. Roots are the smallest member of each set."""

    def __init__(self, count: int):
        self.root = torch.arange(2 * count)
        self.pinned = torch.zeros(2 * count, dtype=torch.bool)  # by root
        self.paired = torch.zeros(2 * count, dtype=torch.bool)  # by root: an opposite was merged

    def canonical(self, label: Tensor) -> Tensor:
        """The label with roots in place of literals, and -1 where the class is pinned."""
        root = self.root[label.clamp(min=0)]
        return torch.where((label < 0) | self.pinned[root], UNSCALED, root)

    def is_free(self, label: Tensor) -> bool:
        return bool((self.canonical(label) >= 0).any())

    def merge(self, a: Tensor, b: Tensor, opposite: bool = False) -> None:
        """Make a and b, elementwise, one class; where one of them is unscaled the other is pinned."""
        a, b = (x.reshape(-1) for x in torch.broadcast_tensors(self.canonical(a), self.canonical(b)))
        self.pin(torch.cat((a[b < 0], b[a < 0])))
        both = (a >= 0) & (b >= 0)
        pairs = (a[both] * len(self.root) + b[both]).unique()
        a, b = pairs // len(self.root), pairs % len(self.root)
        if opposite:
            b = b ^ 1
        self._union(torch.cat((a, a ^ 1)), torch.cat((b, b ^ 1)))
        if opposite:
            self.paired[self.root[torch.cat((a, a ^ 1))]] = True

    def _union(self, a: Tensor, b: Tensor) -> None:
        root = self.root
        while not torch.equal(root[a], root[b]):
            low = torch.minimum(root[a], root[b])
            root = root.scatter_reduce(0, root[a], low, "amin").scatter_reduce(0, root[b], low, "amin")
            while not torch.equal(root, root[root]):
                root = root[root]
        for flag in (self.pinned, self.paired):
            members = flag[self.root]  # every member of a flagged class flags the class that it is in now
            flag.zero_()
            flag[root[members]] = True
        self.root = root
        literals = torch.arange(0, len(root), 2)
        self.pin(literals[root[literals] == root[literals + 1]])

    def pin(self, label: Tensor) -> int:
        """Fix the classes of a label at s = 1. Returns how many were not before."""
        free = self.canonical(label).unique()
        free = free[free >= 0]
        self.pinned[free] = True
        self.pinned[self.root[free ^ 1]] = True
        return len((free // 2).unique())

    def group(self, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class, opposite or not, and paired or not, of each element; class -1 where unscaled."""
        root = self.canonical(label)
        free = root.clamp(min=0)
        mirrored = self.root[free ^ 1]
        low = torch.minimum(free, mirrored)
        return torch.where(root < 0, UNSCALED, low), mirrored < free, self.paired[free]


def narrow(label: Tensor) -> Tensor:
    """The label with every dim along which it is constant cut to size one."""
    for d in range(label.ndim):
        if label.shape[d] > 1 and bool((label == label.narrow(d, 0, 1)).all()):
            label = label.narrow(d, 0, 1)
    return label
