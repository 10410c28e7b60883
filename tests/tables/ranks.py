"""Tests on several processes: a function runs on every rank of a gloo group, forked from the test; what they wrote."""

import datetime
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(rank, world, port, timeout, work, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout))
    try:
        work(*args)
    finally:
        dist.destroy_process_group()


def on_ranks(world, work, *args, timeout=120):
    """Run `work(*args)` on `world` ranks; what one of them raises comes out here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_run, (world, port, timeout, work, args), nprocs=world, start_method="fork")


def contents(folder):
    """Name -> bytes of an output folder, but for the report, which holds seconds."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.json"}
