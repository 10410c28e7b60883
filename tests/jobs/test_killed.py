"""Runs that are killed at any moment: what they leave is recognised, and the same call makes the undisturbed folder."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time

import pytest
import regauge as rg
import torch
from ranks import contents
from regauge.graph.skeleton import load_config
from regauge.transforms import LogEqualize, Quantize, chain
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=640,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=0,
)
RECIPE = chain(LogEqualize(), Quantize(scheme="W8A8", ignore=("lm_head",)))
FORK = multiprocessing.get_context("fork")  # with torch loaded and the model's graph at hand: a run takes a second


@pytest.fixture(scope="module")
def folder(make_folder_of, tmp_path_factory):
    made = make_folder_of(CONFIG, tmp_path_factory.mktemp("killed"))
    rg.build_graph(load_config(made), cache=made)  # kept in memory, which the runs are forked from
    return made


def quantize(folder, out, text, environment, placement):
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the other rank's complaint of the one that was killed
    rg.oneshot(
        folder, text, out, RECIPE, max_shard_size=500_000, num_calibration_samples=6, max_seq_length=48,
        placement=placement, plots=False, reuse_statistics=placement != "fsdp2",
    )  # fmt: skip


def start(folder, out, text, ranks, placement):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    jobs = []
    for rank in range(ranks):
        settings = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        environment = {name: str(value) for name, value in settings.items()} | {"MASTER_PORT": port}
        jobs.append(FORK.Process(target=quantize, args=(folder, out, text, environment, placement)))
        jobs[-1].start()
    return jobs


def finish(jobs):
    for job in jobs:
        job.join(60)
        assert job.exitcode is not None, "a rank hangs"
    return [job.exitcode for job in jobs]


def check_kills(folder, tmp_path, text, ranks, placement, seed, moments):
    """Runs killed at moments drawn over the whole of a run, and over the part in which it writes, in turn."""
    for name in ("first", "whole"):  # the second finds the statistics in the cache, as those after it do
        begin = time.perf_counter()
        assert finish(start(folder, tmp_path / name, text, ranks, placement)) == [0] * ranks
        seconds = time.perf_counter() - begin
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in expected) > 4
    draw, cut, resumed = random.Random(seed), 0, 0
    for number in range(moments):
        out = tmp_path / f"out{number}"
        partial = out.with_name(out.name + ".partial")
        jobs = start(folder, out, text, ranks, placement)
        if number % 2:
            while not partial.exists() and not out.exists():
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.3 * seconds))
        else:
            time.sleep(draw.uniform(0, seconds))
        for job in draw.choice([jobs, [draw.choice(jobs)]]):  # all ranks, or one of them
            os.kill(job.pid, signal.SIGKILL)
        finish(jobs)
        if out.exists():  # it was faster than the kill
            marks = {name for name in contents(out) if name.startswith(".regauge-")}
            assert contents(out).keys() - marks == expected.keys()
            continue
        cut += 1
        assert not (partial / "config.json").exists() or (partial / ".regauge-partial").exists()
        assert finish(start(folder, out, text, ranks, placement)) == [0] * ranks
        assert contents(out) == expected, number
        assert not partial.exists()
        resumed += json.loads((out / "report.json").read_text())["cells_resumed"] > 0
    print(f"{seconds:.2f} s undisturbed, {cut} of {moments} cut short, {resumed} of them with finished cells")
    return cut, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "placement"), [(1, "stream"), (2, "fsdp2"), (2, "stream")])
def test_runs_killed_at_thirty_moments_are_taken_up_again(folder, tmp_path, text, ranks, placement):
    cut, resumed = check_kills(folder, tmp_path, text, ranks, placement, seed=ranks, moments=30)
    assert cut >= 15
    assert resumed >= 5
