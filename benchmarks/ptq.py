"""Post-training quantization beside llm-compressor: seconds, memory, size and perplexity of the same recipes.

    python benchmarks/ptq.py --peer-python PEER_VENV/bin/python [--second-domain FILE.txt] [--repeats 3]

The peer lives in an environment of its own (`pip install llmcompressor==0.14.0.1 torch==2.13.0`). Both sides get the
same model, the same 64 x 512 tokens and the same recipe, in turn, each run in a fresh process. A bare bf16 forward of
the decoder body over the same tokens is timed beside them. Without `--peer-python` only our side runs.

Seconds are those of the call: ours reads the checkpoint, calibrates, quantizes, writes and hashes; the peer's has the
model loaded already and does not write. Its saving is a column of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import regauge as rg
import torch
from regauge.jobs.data import batches, sequences
from regauge.jobs.evaluate import load_model, load_tokenizer
from regauge.jobs.smollm2 import smollm2

HERE = Path(__file__).parent
CALIBRATED = (
    ("smooth 0.5 + W8A8", 0.5, "W8A8"),
    ("smooth 0.8 + W8A8", 0.8, "W8A8"),
    ("log + W8A8", "log", "W8A8"),
)
ROUNDED = (
    ("W8A8", None, "W8A8"),
    ("W4A16 g64", None, "W4A16"),
    ("W4A16 g64 asym", None, "W4A16_ASYM"),
)
OFF_GRID = (
    ("W4A16 g64", None, "W4A16"),
    ("W4A16 g64 asym", None, "W4A16_ASYM"),
    ("smooth 0.5 + W4A16 g64", 0.5, "W4A16"),
)


def load_either_way(folder: Path) -> torch.nn.Module:
    """The model; decoded while loading where transformers cannot keep its codes (packed zero points of the peer's)."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    groups = config.get("config_groups", {}).values()
    if any(not group["weights"]["symmetric"] for group in groups) and not config.get("dequantize"):
        decode = CompressedTensorsConfig(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=decode).eval()
    return load_model(folder)


def recipe(equalize, scheme: str) -> dict:
    stages = {}
    if equalize == "log":
        stages["equalize"] = {"_target_": "regauge.transforms.LogEqualize"}
    elif equalize is not None:
        stages["equalize"] = {"_target_": "regauge.transforms.SmoothQuant", "alpha": equalize}
    quantize = {"_target_": "regauge.transforms.Quantize", "scheme": scheme, "ignore": ["lm_head"]}
    stages["quantize"] = quantize if scheme == "W8A8" else {**quantize, "group_size": 64}
    return {"stages": stages}


class Bench:
    def __init__(self, args: argparse.Namespace, work: Path):
        self.peer, self.repeats, self.work = args.peer_python, args.repeats, work
        self.data = {"name": "pydoc", "num_samples": args.samples, "max_seq_length": 512}
        self.domains = {"pydoc": rg.Data(split="test", num_samples=20)}
        if args.second_domain:
            self.domains["second"] = rg.Data(name=args.second_domain, num_samples=40)

    def ours(self, model: Path, case, reuse: bool = False) -> dict:
        output = self.work / "ours"
        settings = {"model": str(model), "data": self.data, "output": str(output), "recipe": recipe(*case[1:])}
        return self._child([sys.executable, str(HERE / "ptq_ours.py")], {**settings, "reuse": reuse}, output)

    def peers(self, model: Path, case) -> dict:
        ids = self.work / "ids.json"
        ids.write_text(json.dumps(sequences(rg.Data(**self.data), load_tokenizer(model))))
        output = self.work / "peer"
        settings = {"model": str(model), "ids": str(ids), "output": str(output)}
        settings |= {"equalize": case[1], "scheme": case[2]}
        return self._child([self.peer, str(HERE / "ptq_peer.py")], settings, output)

    def _child(self, command: list[str], settings: dict, output: Path, cache: str | None = None) -> dict:
        environment = {**os.environ, "REGAUGE_CACHE": cache} if cache else None
        done = subprocess.run([*command, json.dumps(settings)], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{command[-1]} failed:\n{done.stderr[-3000:]}")
        size = sum(p.stat().st_size for p in output.glob("*.safetensors"))
        return {**json.loads(done.stdout.splitlines()[-1]), "size": size}

    def perplexities(self, folder: Path) -> dict[str, float]:
        model = load_either_way(folder)
        tokenizer = load_tokenizer(folder)
        return {name: rg.evaluate(model, data, tokenizer=tokenizer).perplexity for name, data in self.domains.items()}

    def bare_forward(self, model: Path, batch_size: int) -> float:
        ids = sequences(rg.Data(**self.data), load_tokenizer(model))
        body = load_model(model).model
        with torch.inference_mode():
            body(input_ids=torch.tensor(ids[:batch_size]), use_cache=False)  # warm up
            start = time.perf_counter()
            for batch in batches(ids, batch_size):
                body(input_ids=batch.input_ids, use_cache=False)
        return time.perf_counter() - start

    def sweep(self, model: Path) -> tuple[float, float]:
        """Seconds of the first job of a sweep over alpha, and the median of the later ones, in one process."""
        settings = {"model": str(model), "data": self.data, "output": str(self.work / "ours"), "reuse": True}
        settings["sweep"] = [recipe(alpha, "W8A8") for alpha in (0.8, 0.5, 0.6, 0.7)]
        with tempfile.TemporaryDirectory() as cache:
            run = self._child([sys.executable, str(HERE / "ptq_ours.py")], settings, self.work / "ours", cache)
        return run["seconds"][0], statistics.median(run["seconds"][1:])

    def compare(self, model: Path, case) -> list[dict]:
        """Medians over repeats, the two sides in turn; perplexity of the last outputs."""
        runs: dict[str, list[dict]] = {"regauge": [], "llm-compressor": []}
        for _ in range(self.repeats):
            runs["regauge"].append(self.ours(model, case))
            if self.peer:
                runs["llm-compressor"].append(self.peers(model, case))
        rows = []
        for side, folder in (("regauge", "ours"), ("llm-compressor", "peer")):
            if runs[side]:
                row = {k: statistics.median(run.get(k, 0.0) for run in runs[side]) for k in _KEYS}
                rows.append({"case": case[0], "side": side, **row, **self.perplexities(self.work / folder)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # a long benchmark shows what it has
        return rows


_KEYS = ("seconds", "saving", "process", "peak", "size")


def show(title: str, rows: list[dict], domains) -> None:
    print(f"\n{title}\n")
    heads = ["recipe", "by", "seconds", "saving", "process s", "peak MB", "file MB", *(f"ppl {d}" for d in domains)]
    print("| " + " | ".join(heads) + " |")
    print("| " + " | ".join("---" for _ in heads) + " |")
    for row in rows:
        cells = [row["case"], row["side"], f"{row['seconds']:.1f}", f"{row['saving']:.1f}", f"{row['process']:.1f}"]
        cells += [f"{row['peak'] / 1e6:.0f}", f"{row['size'] / 1e6:.1f}", *(f"{row[d]:.3f}" for d in domains)]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment that holds llm-compressor")
    parser.add_argument("--second-domain", help="a text file of another domain to measure on as well")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        model = smollm2()
        original = {"case": "bf16, as it is", "side": "-", **dict.fromkeys(_KEYS, 0.0), **bench.perplexities(model)}
        rows = [original]
        forward = {size: [] for size in (4, 8)}
        for case in CALIBRATED:
            for size, times in forward.items():
                times.append(bench.bare_forward(model, size))
            rows += bench.compare(model, case)
        bench.repeats = 1  # rounding takes a fraction of a second on both sides; what differs is the perplexity
        rows += [row for case in ROUNDED for row in bench.compare(model, case)]
        show(f"SmolLM2-135M, {args.samples} x 512 tokens of pydoc, medians of {args.repeats}", rows, bench.domains)

        bare = {size: statistics.median(times) for size, times in forward.items()}
        smooth = {r["side"]: r for r in rows if r["case"] == "smooth 0.8 + W8A8"}
        print(f"\nbare bf16 forward of the body: {bare[4]:.1f} s at batch 4, {bare[8]:.1f} s at batch 8")
        ours = smooth["regauge"]["seconds"]
        print(f"smooth + W8A8, the whole call / bare forward at batch 8: {ours / bare[8]:.2f}")
        if args.peer_python:
            other = smooth["llm-compressor"]
            print(f"smooth + W8A8, seconds, ours / peer's: {ours / other['seconds']:.2f}")
            print(f"smooth + W8A8, peak memory, ours / peer's: {smooth['regauge']['peak'] / other['peak']:.2f}")
        first, second = bench.sweep(model)
        print(f"in a sweep, a second alpha / the first run: {second / first:.2f} ({second:.1f} s / {first:.1f} s)")

        moved = bench.work / "off-grid"
        subprocess.run(
            [sys.executable, str(HERE / "degrid.py"), str(model), str(moved)], check=True, capture_output=True
        )
        rows = [
            {"case": "bf16, moved off the grid", "side": "-", **dict.fromkeys(_KEYS, 0.0), **bench.perplexities(moved)}
        ]
        rows += [row for case in OFF_GRID for row in bench.compare(moved, case)]
        show("The copy moved off the 4-bit grid (benchmarks/degrid.py), single runs", rows, bench.domains)


if __name__ == "__main__":
    main()
