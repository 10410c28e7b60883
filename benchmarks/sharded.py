"""SmoothQuant 0.8 + W8A8 of SmolLM2-135M on two FSDP ranks beside one process: equal bytes, memory of each rank.

    python benchmarks/sharded.py

Parameter memory is counted by tensors after sharding. Resident memory is the peak of each process from then on, as the
operating system counts it: loading, which is the script's own affair, is left out by resetting the counter.
"""

import argparse
import ctypes
import gc
import os
import tempfile
import time
from pathlib import Path

import regauge as rg
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from regauge.graph.skeleton import load_config
from regauge.jobs.data import batches, sequences
from regauge.jobs.evaluate import load_model, load_tokenizer
from regauge.jobs.report import peak_memory
from regauge.jobs.smollm2 import smollm2
from regauge.transforms import Quantize, SmoothQuant

RECIPE = rg.chain(SmoothQuant(alpha=0.8), Quantize(scheme="W8A8", ignore=("lm_head",)))


def samples(folder):
    data = rg.Data(name="pydoc", num_samples=8, max_seq_length=256)
    return batches(sequences(data, load_tokenizer(folder)), 2)


def largest_cell(plan):
    return max(sum(plan.source[name].nbytes for name in cell.reads) for cell in plan.cells)


def alone(folder, out, say):
    config = load_config(folder)
    model, graph = load_model(folder), rg.build_graph(config)
    params = {name: p.detach() for name, p in model.named_parameters()}
    plan = rg.plan(RECIPE, params, graph)
    mine = list(samples(folder))
    reset_peak()
    stats = rg.observe(model, mine, plan.needs, graph)
    writer = rg.ShardWriter(out, plan.target, 50_000_000)
    rg.execute(plan, rg.Memory(params), writer, stats)
    writer.close()
    say.put(("one process", sum(p.nbytes for p in params.values()), largest_cell(plan), peak_memory()))


def wrapped(model, how):
    layers = model.model.layers
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(layers[0])})
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def reset_peak():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rank_of(rank, how, folder, out, port, say):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = wrapped(load_model(folder), how)
    store, graph = rg.Fsdp(model), rg.build_graph(load_config(folder))
    plan = rg.plan(RECIPE, store.specs(), graph)
    mine = list(samples(folder))[rank::2]
    reset_peak()
    stats = rg.observe_sharded(model, mine, plan.needs, graph)
    rg.execute_sharded(plan, store, out, stats, max_shard_size=50_000_000)
    held = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    say.put((f"{how}, rank {rank}", held, largest_cell(plan), peak_memory()))
    dist.destroy_process_group()


def run(target, args, count):
    context = mp.get_context("spawn")
    say = context.Queue()
    jobs = [context.Process(target=target, args=(*((n,) if count > 1 else ()), *args, say)) for n in range(count)]
    start = time.perf_counter()
    for job in jobs:
        job.start()
    rows = [say.get() for _ in jobs]
    for job in jobs:
        job.join()
    return sorted(rows), time.perf_counter() - start


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = smollm2()
    with tempfile.TemporaryDirectory() as work:
        outs = {}
        print("| | parameters held, MB | of one process | largest cell, MB | peak resident, MB | seconds |")
        print("|---|---|---|---|---|---|")
        whole = None
        for port, how in enumerate(("alone", "fsdp1", "fsdp2"), 29611):
            outs[how] = Path(work) / how
            outs[how].mkdir()
            if how == "alone":
                rows, seconds = run(alone, (folder, outs[how]), 1)
            else:
                rows, seconds = run(rank_of, (how, folder, outs[how], port), 2)
            whole = whole or rows[0][1]
            for label, held, cell, peak in rows:
                figures = f"{held / 1e6:.1f} | {held / whole:.2f} | {cell / 1e6:.1f} | {peak / 1e6:.0f}"
                print(f"| {label} | {figures} | {seconds:.1f} |", flush=True)
        read = {how: {p.name: p.read_bytes() for p in out.iterdir()} for how, out in outs.items()}
        print("bytes equal:", {how: files == read["alone"] for how, files in read.items()})


if __name__ == "__main__":
    main()
