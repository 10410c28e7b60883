"""SmoothQuant + W8A8 of a checkpoint of Llama-7B's shape by `oneshot` with given statistics, beside `cp -r`.

    python benchmarks/large.py [--layers 32] [--repeats 1] [--folder FOLDER]

Makes the checkpoint (13.5 GB of random bf16, file by file) and removes it afterwards. `cp` and the run take turns, each
in a fresh process, `sync` included on both sides. Peak memory is the resident set of the process, which does not count
the page cache. Skipped, with a message, where the disk has less than 45 GB (for 32 layers).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stream import copy

GIGABYTE = 1e9


def make(folder: Path, layers: int) -> None:
    """Llama-7B's shape, in files of two gigabytes; and statistics of every site."""
    import regauge as rg
    import torch
    from regauge.graph.skeleton import load_config, skeleton
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=layers, dtype="bfloat16")  # whose defaults are 7B's
    config.architectures = ["LlamaForCausalLM"]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    specs = {name: p.to(torch.bfloat16) for name, p in skeleton(config).named_parameters()}
    writer = rg.ShardWriter(folder, specs, 2_000_000_000)
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for name, p in specs.items():
        count = -(-p.numel() // block.numel())
        writer.write({name: block.repeat(count)[: p.numel()].reshape(p.shape)})
    writer.close()
    graph = rg.build_graph(load_config(folder), cache=folder)
    generator = torch.Generator().manual_seed(1)
    peaks = {f"absmax:{n}": torch.rand(s.width, generator=generator) * 8 + 0.1 for n, s in graph.sites.items()}
    save_file(peaks, folder.parent / "statistics.safetensors")


def quantize(source: str, target: str) -> dict:
    import regauge as rg
    from regauge.jobs.report import peak_memory

    start = time.perf_counter()
    given = Path(source).parent / "statistics.safetensors"
    report = rg.oneshot(source, output_dir=target, recipe="smooth_w8a8", statistics=given, plots=False)
    return {
        "seconds": time.perf_counter() - start,
        "phases": dict(report.seconds),
        "peak": peak_memory(),
        "written": report.bytes_after,
        "linears": len(report.linears),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work, instead of the system's temporary folder")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(quantize(*args.child)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        needed = 45 * (args.layers * 0.405 + 0.525) / 13.5
        free = shutil.disk_usage(scratch).free / GIGABYTE
        if free < needed:
            print(f"skipped: {scratch} has {free:.0f} GB free, {needed:.0f} GB are needed")
            return
        source, target = Path(scratch) / "model", Path(scratch) / "out"
        make(source, args.layers)
        size = sum(p.stat().st_size for p in source.iterdir())
        copies, runs = [], []
        for _ in range(args.repeats):
            copies.append(copy(source, target))
            shutil.rmtree(target)
            command = [sys.executable, __file__, "--child", str(source), str(target)]
            begin = time.perf_counter()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            subprocess.run(["sync", "-f", scratch], check=True)
            runs.append({**json.loads(done.stdout.splitlines()[-1]), "whole": time.perf_counter() - begin})
            shutil.rmtree(target)
    copied, took = statistics.median(copies), statistics.median(run["whole"] for run in runs)
    run = runs[len(runs) // 2]
    phases = ", ".join(f"{name} {value:.1f}" for name, value in run["phases"].items())
    print(f"checkpoint {size / GIGABYTE:.2f} GB, {run['linears']} linears, writes {run['written'] / GIGABYTE:.2f} GB")
    print(f"cp -r    {copied:6.1f} s  ({', '.join(f'{x:.1f}' for x in copies)})")
    each = ", ".join(f"{r['whole']:.1f}" for r in runs)
    print(f"oneshot  {took:6.1f} s  ({each}); {phases}")
    print(f"oneshot / cp: {took / copied:.2f}; write / cp: {run['phases']['write'] / copied:.2f}")
    print(f"peak memory {max(r['peak'] for r in runs) / 1e6:.0f} MB of 2000 MB")


if __name__ == "__main__":
    main()
