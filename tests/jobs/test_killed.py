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
        placement=placement, plots=False,
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


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.json"}


def check_kills(folder, tmp_path, text, ranks, placement, seed, moments):
    start_time = time.perf_counter()
    assert finish(start(folder, tmp_path / "whole", text, ranks, placement)) == [0] * ranks
    seconds = time.perf_counter() - start_time
    expected = contents(tmp_path / "whole")
    assert len(expected) > 8
    assert sum(name.endswith(".safetensors") for name in expected) > 4
    draw, resumed, cut = random.Random(seed), 0, 0
    for number in range(moments):
        out = tmp_path / f"out{number}"
        jobs = start(folder, out, text, ranks, placement)
        time.sleep(draw.uniform(0, seconds))
        # one rank, or all of them
        for job in draw.choice([jobs, [draw.choice(jobs)]]):
            os.kill(job.pid, signal.SIGKILL)
        finish(jobs)
        if out.exists():  # it was faster than the kill
            assert contents(out).keys() - {p for p in contents(out) if p.startswith(".regauge-")} == expected.keys()
            continue
        cut += 1
        partial = out.with_name(out.name + ".partial")
        assert not (partial / "config.json").exists() or (partial / ".regauge-partial").exists()
        assert finish(start(folder, out, text, ranks, placement)) == [0] * ranks
        assert contents(out) == expected, number
        assert not partial.exists()
        resumed += json.loads((out / "report.json").read_text())["cells_resumed"] > 0
    print(f"{seconds:.2f} s undisturbed, {cut} cut short, {resumed} of them with finished cells")
    return cut, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "placement"), [(1, "whole"), (2, "fsdp2")])
def test_runs_killed_at_thirty_moments_are_taken_up_again(folder, tmp_path, text, ranks, placement):
    cut, resumed = check_kills(folder, tmp_path, text, ranks, placement, seed=ranks, moments=30)
    assert cut >= 15
    assert resumed >= 3
