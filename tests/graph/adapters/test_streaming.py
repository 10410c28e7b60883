"""Calibration block by block: the same statistics to the bit, one block in memory, each tensor read once."""

import copy
import functools
import threading

import pytest
import regauge as rg
import torch
from architectures import ARCHITECTURES
from regauge import LayoutError, PlanError
from regauge.graph.adapters import load_whole
from regauge.graph.skeleton import is_causal_lm, new_model
from transformers import LlamaConfig

KINDS = ("absmax", "range", "meanabs", "gram", "sample")
NAMES = [n for n, case in ARCHITECTURES.items() if n != "llama4" and is_causal_lm(case.config)]


class Counting:
    """A store that notes what is read, and asks `watch` each time."""

    def __init__(self, params, watch=lambda: None):
        self.store, self.names, self.watch = rg.Memory(params), [], watch

    def specs(self):
        return self.store.specs()

    def read(self, names):
        self.names += names
        self.watch()
        return self.store.read(names)


def stored(config, dtype):
    torch.manual_seed(0)
    model = new_model(config, dtype)
    kept = set(model.state_dict())
    params = {name: p.detach() for name, p in model.named_parameters()}
    return params | {name: b for name, b in model.named_buffers() if name in kept}


def batches(last=7, vocabulary=40):
    """Three, with padding in the first two and a last one that is smaller."""
    made, generator = [], torch.Generator().manual_seed(0)
    for number, (rows, length) in enumerate(((2, 12), (2, 12), (1, last))):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:, 9:] = 0
        made.append(rg.Batch(input_ids=ids, attention_mask=mask, index=torch.arange(rows) + 2 * number))
    return made


def keys_of(graph, kinds=KINDS):
    return [f"{kind}:{name}" for name, site in graph.sites.items() if site.module for kind in kinds]


@functools.cache
def graph_of(name):
    return rg.build_graph(ARCHITECTURES[name].config)  # which does not depend on the dtype


def no_lanes():
    return not [thread for thread in threading.enumerate() if thread.name == "lane"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_statistics_are_those_of_the_whole_model(name, dtype):
    config = copy.deepcopy(ARCHITECTURES[name].config)
    config.dtype = dtype
    graph, source = graph_of(name), Counting(stored(config, dtype))
    keys = keys_of(graph)
    streamed = rg.observe_streamed(config, source, batches(), keys, graph)
    assert equal(streamed, rg.observe(load_whole(config, source.store), batches(), keys, graph))
    assert no_lanes()


CONFIG = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)


@pytest.fixture(scope="module")
def graph():
    return rg.build_graph(CONFIG)


def test_each_tensor_is_read_once_and_one_block_is_held(graph, monkeypatch):
    from regauge.graph.adapters import streaming

    models = []
    real = streaming.hollow
    monkeypatch.setattr(streaming, "hollow", lambda *args: models.append(real(*args)) or models[0])
    held = []

    def watch():
        filled = {n.split(".")[2] for n, p in models[0].named_parameters() if ".layers." in n and not p.is_meta}
        held.append(len(filled))

    source = Counting(stored(CONFIG, torch.float32), watch)
    # a site of the last layer but one: the last, the final norm's output and the head are not needed
    rg.observe_streamed(CONFIG, source, batches(), ["absmax:model.layers.2.mlp.down_proj"], graph)
    assert len(source.names) == len(set(source.names))
    assert max(held) == 1
    assert not [n for n in source.names if ".layers.3." in n or n == "lm_head.weight"]
    assert all(p.is_meta for n, p in models[0].named_parameters() if ".layers." in n)


def test_another_token_gives_other_statistics(graph):
    source, keys = rg.Memory(stored(CONFIG, torch.float32)), keys_of(graph)
    first, other = batches(), batches()
    other[2].input_ids[0, 3] += 1
    assert not equal(
        rg.observe_streamed(CONFIG, source, first, keys, graph), rg.observe_streamed(CONFIG, source, other, keys, graph)
    )


def test_progress_adds_up_to_the_sequences(graph):
    source, told = rg.Memory(stored(CONFIG, torch.float32)), []
    rg.observe_streamed(CONFIG, source, batches(), keys_of(graph), graph, progress=told.append)
    assert sum(told) == 5
    assert len(told) > 2
    assert min(told) > 0


def broken(model, args):
    raise ZeroDivisionError("in a block")


def interrupted(_count):
    raise KeyboardInterrupt


def too_long():
    made = batches(vocabulary=60)
    made[1].input_ids[0, 0] = 64  # not in the vocabulary
    return made


@pytest.mark.parametrize("fault", ["block", "batch", "interrupt", "nan"])
def test_faults_come_out_and_leave_no_thread(graph, fault, monkeypatch):
    params, keys = stored(CONFIG, torch.float32), keys_of(graph)
    given, progress, expected = batches(), None, ZeroDivisionError
    if fault == "block":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        monkeypatch.setattr(LlamaDecoderLayer, "forward", broken)
        expected = TypeError
    elif fault == "batch":
        given, expected = too_long(), IndexError
    elif fault == "interrupt":
        progress, expected = interrupted, KeyboardInterrupt
    else:
        params["model.layers.1.mlp.up_proj.weight"][3] = float("nan")
        expected = LayoutError
    with pytest.raises(expected):
        rg.observe_streamed(CONFIG, rg.Memory(params), given, keys, graph, progress=progress)
    assert no_lanes()
    assert rg.observe_streamed(CONFIG, rg.Memory(params), [], [], graph) == {}


def test_bad_keys_and_no_batches_are_refused(graph):
    source = rg.Memory(stored(CONFIG, torch.float32))
    with pytest.raises(PlanError, match="no site"):
        rg.observe_streamed(CONFIG, source, batches(), ["absmax:nothing"], graph)
    with pytest.raises(LayoutError, match="no batch"):
        rg.observe_streamed(CONFIG, source, [], ["absmax:lm_head"], graph)


def test_blocks_in_another_order_and_twice(graph, monkeypatch):
    """A model that skips a block for some batches and runs another twice: nothing hangs, and the numbers are its own."""
    from transformers.models.llama.modeling_llama import LlamaModel

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        x = self.embed_tokens(input_ids)
        places = torch.arange(input_ids.shape[1])[None]
        rotary = self.rotary_emb(x, position_ids=places)
        order = [0, 2, 1, 1] if input_ids.shape[0] == 2 else [1, 3]
        for index in order:
            x = self.layers[index](x, attention_mask=None, position_ids=places, position_embeddings=rotary)
        return self.norm(x)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    source = rg.Memory(stored(CONFIG, torch.float32))
    whole = [
        rg.Batch(input_ids=b.input_ids, attention_mask=torch.ones_like(b.input_ids), index=b.index) for b in batches()
    ]
    keys = [f"absmax:model.layers.{i}.mlp.down_proj" for i in range(4)]
    streamed = rg.observe_streamed(CONFIG, source, whole, keys, graph)
    assert equal(streamed, rg.observe(load_whole(CONFIG, source), whole, keys, graph))
    assert no_lanes()
