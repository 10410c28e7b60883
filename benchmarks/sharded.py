"""SmolLM2-135M on two FSDP ranks beside one process: equal bytes, equal perplexity, and the memory of each rank.

    python benchmarks/sharded.py [--layers 8]

Every process loads from files straight into its units, calibrates, writes SmoothQuant 0.8 + W8A8 into the common
folder, applies it in place (weights fake-quantized, activations rounded in front of the linears), and measures
perplexity. One thread each, so that the bits can be compared.

Parameter memory is counted by tensors: the shards and what is gathered, at every layer of every forward. Resident
memory is the growth of the process over what it had when its libraries were loaded, as the operating system counts it,
through loading and calibration; activations and buffers of the network are in it. `malloc` is told to give freed
memory back (MALLOC_MMAP_THRESHOLD_), which by itself it keeps.

With `--layers N` the model is a generated one of Llama-7B's shape with N layers, which is not measured: the embedding
of SmolLM2 is a fifth of it, which hides what becomes of the layers.
"""

import argparse
import ctypes
import gc
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

import regauge as rg
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from large import make
from regauge.graph.adapters import load_whole
from regauge.graph.adapters.fsdp import canonical
from regauge.graph.skeleton import load_config
from regauge.jobs.data import batches, sequences
from regauge.jobs.evaluate import compare, load_tokenizer
from regauge.jobs.report import peak_memory
from regauge.jobs.smollm2 import smollm2
from regauge.transforms import Quantize, SmoothQuant
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

SMOOTH, HEAD = SmoothQuant(alpha=0.8), ("lm_head",)
RECIPE = rg.chain(SMOOTH, Quantize(scheme="W8A8", ignore=HEAD))
IN_PLACE = rg.chain(SMOOTH, Quantize(scheme="W8A8", ignore=HEAD, form="fake"))


def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def held(model):
    """Bytes of the parameters that this process holds now, shards and gathered ones, each storage once."""
    tensors = list(model.parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for p in group.fsdp_params if group else ():
                tensors += [p._sharded_param_data, getattr(p, "_unsharded_param", None)]
                tensors += list(p.all_gather_outputs)
        elif isinstance(module, FullyShardedDataParallel) and module._handle:
            flat = module._handle.flat_param
            tensors += [flat, getattr(flat, "_local_shard", None), getattr(flat, "_full_param_padded", None)]
    tensors = [getattr(t, "_local_tensor", t) for t in tensors if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors if not t.is_meta}.values())


def run_rank(rank, world, how, folder, out, port, measured, say):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    config, source, tokenizer = load_config(folder), rg.Shards(folder), load_tokenizer(smollm2())
    graph = rg.build_graph(config, cache=folder)
    data = [rg.Data(name="pydoc", num_samples=n, max_seq_length=256, split=s) for n, s in ((8, "train"), (16, "test"))]
    texts = [sequences(d, tokenizer) for d in data]
    # the generated model has a smaller vocabulary
    calibration, held_out = ([[i % config.vocab_size for i in ids] for ids in text] for text in texts)
    plan = rg.plan(RECIPE, source.specs(), graph)
    mine = list(batches(calibration, 2))[rank::world]
    before, peaks, begin = resident(), [], time.perf_counter()

    if how == "whole":
        model = load_whole(config, source)
    else:
        model = rg.load_sharded(config, source, rg.Sharding(version=int(how[-1])))
    shards = held(model)
    hooks = [
        module.register_forward_pre_hook(lambda *_: peaks.append(held(model)))
        for name, module in model.named_modules()
        if re.search(r"layers\.\d+\.mlp$", canonical(name))
    ]
    if how == "whole":
        stats = rg.observe(model, mine, plan.needs, graph)
    else:
        stats = rg.observe_sharded(model, mine, plan.needs, graph)
    for hook in hooks:
        hook.remove()
    grown = peak_memory() - before
    rg.execute_sharded(plan, source if how == "whole" else rg.Fsdp(model), out, stats, max_shard_size=50_000_000)
    seconds = time.perf_counter() - begin
    cell = max(sum(plan.source[name].nbytes for name in cell.reads) for cell in plan.cells)
    quality = perplexity(model, how, plan, stats, graph, held_out) if measured else float("nan")
    say.put((f"{how}, rank {rank}", shards, max(peaks), cell, grown, seconds, quality))
    dist.destroy_process_group()


def perplexity(model, how, plan, stats, graph, held_out):
    """Of the model that has been edited in place."""
    if how == "whole":
        params = {name: p.detach() for name, p in model.named_parameters()}
        edited = rg.plan(IN_PLACE, params, graph)
        model.load_state_dict(rg.apply(edited, params, stats), strict=False)
    else:
        rg.apply_sharded(IN_PLACE, model, stats, graph=graph)
    inner = {canonical(name): module for name, module in model.named_modules()}
    with rg.quantized_activations(Named(inner), plan.schemes):
        return compare(model, held_out, batch_size=2).perplexity


class Named:
    """Modules by the checkpoint's names."""

    def __init__(self, modules):
        self.get_submodule = modules.__getitem__


def run(how, world, folder, out, port, measured):
    say = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(run_rank, (world, how, folder, out, port, measured, say), nprocs=world, start_method="spawn")
    return sorted(say.get() for _ in range(world))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of a generated model of Llama-7B's shape, instead of SmolLM2")
    layers = parser.parse_args().layers
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # of the processes to come
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model" if layers else smollm2()
        if layers:
            make(folder, layers)
        outs, whole = {}, None
        print("| | shards MB | of one | peak of parameters MB | limit MB | resident growth MB | seconds | perplexity |")
        print("|---|---|---|---|---|---|---|---|")
        for port, (how, world) in enumerate((("whole", 1), ("fsdp1", 2), ("fsdp2", 2)), 29611):
            outs[how] = Path(work) / how
            outs[how].mkdir()
            rows = run(how, world, folder, outs[how], port, not layers)
            for label, shards, peak, cell, grown, seconds, quality in rows:
                whole = whole or shards
                limit = whole if how == "whole" else 0.55 * whole + cell
                figures = f"{shards / 1e6:.1f} | {shards / whole:.2f} | {peak / 1e6:.1f} | {limit / 1e6:.1f}"
                print(f"| {label} | {figures} | {grown / 1e6:.0f} | {seconds:.1f} | {quality:.6f} |", flush=True)
        hashes = {how: {p.name: hash_of(p) for p in out.iterdir()} for how, out in outs.items()}
        print("bytes equal:", {how: files == hashes["whole"] for how, files in hashes.items()})


def hash_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
