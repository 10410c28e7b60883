"""`execute` between folders beside `cp -r` of the same bytes: seconds and peak memory.

    python benchmarks/stream.py [--gigabytes 4] [--scheme W8A8] [--repeats 3] [--keep FOLDER]

Makes a Llama-shaped bf16 checkpoint of random weights, shard by shard, then in turn copies it and quantizes it (without
calibration), each in a fresh process, `sync` included on both sides. Peak memory is the resident set of the quantizing
process; the limit beside it is three times the largest cell plus 400 MB of libraries.
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


def make(folder: Path, gigabytes: float) -> None:
    """Layers of 2048 x 5632 until the size is reached, in shards of one gigabyte."""
    import torch
    from regauge.graph.adapters import ShardWriter
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
    per_layer = 2 * (2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 5632)
    layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * 2048) / per_layer))
    config = LlamaConfig(**settings, num_hidden_layers=layers, vocab_size=32000, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    specs = dict(model.named_parameters())
    folder.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    writer = ShardWriter(folder, specs, 1_000_000_000)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 22, generator=generator).mul_(0.02).bfloat16()
    for name, p in specs.items():
        count = -(-p.numel() // block.numel())
        writer.write({name: block.repeat(count)[: p.numel()].reshape(p.shape)})
    writer.close()


def quantize(source: str, target: str, scheme: str) -> dict:
    """One run of `execute`; what it took, and the size of the largest cell."""
    import regauge as rg
    from regauge.jobs.checkpoint import open_checkpoint
    from regauge.jobs.oneshot import plan_output
    from regauge.jobs.report import peak_memory

    checkpoint = open_checkpoint(source)
    plan = plan_output(rg.transforms.Quantize(scheme=scheme, ignore=("lm_head",)), checkpoint)
    sizes = [sum(plan.source[n].nbytes for n in cell.reads) for cell in plan.cells]
    Path(target).mkdir()
    start = time.perf_counter()
    writer = rg.ShardWriter(target, plan.target, 1_000_000_000)
    rg.execute(plan, checkpoint.shards, writer)
    writer.close()
    seconds = time.perf_counter() - start
    peak = peak_memory()
    return {
        "seconds": seconds,
        "peak": peak,
        "cell": max(sizes),
        "written": sum(p.nbytes for p in plan.target.values()),
    }


def copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--scheme", default="W8A8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the checkpoint here and keep it")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(quantize(*args.child)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source, target = args.keep or Path(scratch) / "model", Path(scratch) / "out"
        if shutil.disk_usage(scratch).free < 2.5e9 * args.gigabytes:
            raise SystemExit(f"{scratch}: needs {2.5 * args.gigabytes:.0f} GB of free disk")
        if not source.exists():
            make(source, args.gigabytes)
        size = sum(p.stat().st_size for p in source.iterdir())
        copies, runs = [], []
        for _ in range(args.repeats):
            copies.append(copy(source, target))
            shutil.rmtree(target)
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(source), str(target), args.scheme],
                check=True,
                capture_output=True,
                text=True,
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(target)
    copied, took = statistics.median(copies), statistics.median(run["seconds"] for run in runs)
    peak, cell = max(run["peak"] for run in runs), runs[0]["cell"]
    limit = 3 * cell + 400e6
    written = runs[0]["written"] / 1e9
    print(f"checkpoint {size / 1e9:.2f} GB, {args.scheme} writes {written:.2f} GB, median of {args.repeats}")
    print(f"cp -r    {copied:6.2f} s  {size / copied / 1e9:5.2f} GB/s  ({', '.join(f'{x:.2f}' for x in copies)})")
    each = ", ".join(f"{run['seconds']:.2f}" for run in runs)
    print(f"execute  {took:6.2f} s  {size / took / 1e9:5.2f} GB/s  ({each})")
    print(f"speed of execute / cp: {copied / took:.2f}")
    print(f"peak memory {peak / 1e6:.0f} MB; 3 x largest cell ({cell / 1e6:.0f} MB) + 400 MB = {limit / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
