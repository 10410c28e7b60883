"""The partial folder: one run at a time, recognised, taken up again, never mistaken for a finished one."""

import json
import multiprocessing
import os

import pytest
import regauge as rg
import torch
from regauge import LayoutError
from regauge.graph.adapters import Partial, digest_of, execute_sharded
from regauge.graph.adapters.partial import tidy
from regauge.transforms import Quantize, signature
from transformers import LlamaConfig

FORK = multiprocessing.get_context("fork")
CONFIG = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=32)


def test_it_is_renamed_at_the_end_and_leaves_no_marks(tmp_path):
    partial = Partial(tmp_path / "out", "key")
    (partial.folder / "a.safetensors").write_bytes(b"a")
    partial.note(3, "hash", rows=[1.5])
    assert not (tmp_path / "out").exists()
    partial.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a.safetensors"]


def test_the_journal_survives_and_a_line_cut_short_does_not_count(tmp_path):
    partial = Partial(tmp_path / "out", "key")
    partial.note(0, "x", rows=["a"])
    partial.note(1, "y")
    partial.close()
    journal = next((tmp_path / "out.partial").glob(".regauge-journal*"))
    journal.write_bytes(journal.read_bytes() + b'{"cell": 2, "sha2')
    again = Partial(tmp_path / "out", "key")
    assert {n: r["sha256"] for n, r in again.finished().items()} == {0: "x", 1: "y"}
    again.note(2, "z")
    assert again.finished()[2]["sha256"] == "z"
    again.close()


@pytest.mark.parametrize("key", ["other", None])
def test_what_a_run_of_other_inputs_left_is_made_anew(tmp_path, key):
    partial = Partial(tmp_path / "out", key and "key")
    partial.note(0, "x")
    (partial.folder / "model.safetensors").write_bytes(b"old")
    partial.close()
    again = Partial(tmp_path / "out", key)
    assert again.finished() == {}
    assert not (again.folder / "model.safetensors").exists()
    again.close()


def test_files_beside_the_tensors_are_made_anew_on_resuming(tmp_path):
    partial = Partial(tmp_path / "out", "key")
    for name in ("config.json", "config.json.tmp", "model.safetensors"):
        (partial.folder / name).write_text("half")
    (partial.folder / "sub").mkdir()
    partial.close()
    again = Partial(tmp_path / "out", "key")
    assert [p.name for p in again.folder.iterdir() if not p.name.startswith(".")] == ["model.safetensors"]
    again.close()


def test_two_runs_exclude_each_other(tmp_path):
    first = Partial(tmp_path / "out", "key")
    with pytest.raises(LayoutError, match=rf"another run is writing .*out\.partial \(process {os.getpid()} on "):
        Partial(tmp_path / "out", "key")
    other_rank = Partial(tmp_path / "out", "key", rank=1)
    first.close()
    with pytest.raises(LayoutError, match="another run is writing"):  # a rank of the first run is still alive
        Partial(tmp_path / "out", "key")
    other_rank.close()
    Partial(tmp_path / "out", "key").finish()


def _hold(path, ready, done):
    partial = Partial(path, "key")
    ready.set()
    done.wait()
    partial.note(0, "x")
    os._exit(9)  # as if killed: nothing is closed


def test_the_lock_of_a_process_that_died_is_free(tmp_path):
    ready, done = FORK.Event(), FORK.Event()
    job = FORK.Process(target=_hold, args=(tmp_path / "out", ready, done))
    job.start()
    assert ready.wait(30)
    with pytest.raises(LayoutError, match=f"process {job.pid} on "):
        Partial(tmp_path / "out", "key")
    done.set()
    job.join()
    again = Partial(tmp_path / "out", "key")
    assert list(again.finished()) == [0]
    again.close()


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").touch()
    with pytest.raises(LayoutError, match="is not ours"):
        Partial(tmp_path / "out", "key")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.txt").touch()
    with pytest.raises(LayoutError, match="exists; choose another"):
        Partial(tmp_path / "new", "key")
    with pytest.raises(LayoutError, match="not a folder that this program wrote"):
        Partial(tmp_path / "new", "key", overwrite=True)
    assert (tmp_path / "new" / "thesis.txt").exists()
    assert (tmp_path / "out.partial" / "thesis.txt").exists()


def test_an_old_output_is_replaced_only_at_the_end(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "regauge.json").write_text("{}")
    (tmp_path / "out.old").mkdir()  # the user's own
    partial = Partial(tmp_path / "out", "key", overwrite=True)
    (partial.folder / "new.safetensors").touch()
    assert (tmp_path / "out" / "regauge.json").exists()
    partial.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new.safetensors"]


@pytest.mark.parametrize("call", ["rename", "unlink", "rmtree"])
def test_a_kill_while_it_is_renamed(tmp_path, monkeypatch, call):
    """At every call that changes names: the old output or the new one is there, and a second run ends well."""
    import pathlib
    import shutil

    owner = {"rename": os, "unlink": pathlib.Path, "rmtree": shutil}[call]
    real = getattr(owner, call)
    for at in range(6):
        target = tmp_path / f"out{at}"
        target.mkdir()
        (target / "regauge.json").write_text("old")
        partial = Partial(target, "key", overwrite=True)
        (partial.folder / "regauge.json").write_text("new")
        calls = []

        def cut(*args, calls=calls, at=at, **settings):
            calls.append(1)
            if len(calls) == at + 1:
                raise KeyboardInterrupt
            return real(*args, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, cut)
            try:
                partial.finish()
            except KeyboardInterrupt:
                partial.close()
        if target.exists() and (target / "regauge.json").read_text() == "new":
            tidy(target)
            assert [p.name for p in target.iterdir()] == ["regauge.json"]
        else:
            again = Partial(target, "key", overwrite=True)
            (again.folder / "regauge.json").write_text("new")
            again.finish()
        assert (target / "regauge.json").read_text() == "new"
        assert not target.with_name(target.name + ".partial").exists()


@pytest.fixture(scope="module")
def planned():
    from regauge.graph.skeleton import new_model

    torch.manual_seed(0)
    params = {name: p.detach() for name, p in new_model(CONFIG, torch.bfloat16).named_parameters()}
    return rg.plan(Quantize(ignore=("lm_head",)), params, rg.build_graph(CONFIG)), params


def run(planned, folder, done=None):
    """Write the plan into the folder; the cells that were computed, and all that were written, with their hashes."""
    plan, params = planned
    computed, written = [], {}
    kept = execute_sharded(
        plan, rg.Memory(params), folder, max_shard_size=4000, done=done,
        on_step=lambda step, *_: computed.append(step.name),
        on_cell=lambda number, tensors: written.update({number: digest_of(tensors)}),
    )  # fmt: skip
    return computed, written, kept


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_cells_whose_bytes_are_there_are_not_done_again(planned, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir(), part.mkdir()
    computed, written, kept = run(planned, whole)
    assert len(computed) == 21
    assert kept == frozenset()
    run(planned, part)
    expected = contents(whole)
    # damage two cells, and lose the record of a third
    files = sorted(part.glob("*.safetensors"))
    for path in files[:2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    first = min(written)
    done = {number: digest for number, digest in written.items() if number != first}
    again, _, kept = run(planned, part, done)
    assert contents(part) == expected
    assert 0 < len(again) < len(computed) / 2
    assert first not in kept
    assert 10 < len(kept) < len(done)
    assert run(planned, part, written)[0] == []  # all is there: nothing is computed
    assert contents(part) == expected
    files[2].unlink()  # which holds the scales of all
    assert len(run(planned, part, written)[0]) == 21
    assert contents(part) == expected


def test_files_of_another_layout_are_made_anew(planned, tmp_path):
    _, written, _ = run(planned, tmp_path)
    expected = contents(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-3])
    computed, _, kept = run(planned, tmp_path, written)
    assert len(computed) == 21
    assert kept == frozenset()
    assert contents(tmp_path) == expected


@pytest.mark.parametrize(("call", "allowed"), [("posix_fallocate", 2), ("pwrite", 20)])
def test_a_full_disk_is_told_and_leaves_what_is_done(planned, tmp_path, monkeypatch, call, allowed):
    (tmp_path / "whole").mkdir()
    run(planned, tmp_path / "whole")
    real, calls = getattr(os, call), []

    def full(*args):
        calls.append(1)
        if len(calls) > allowed:
            raise OSError(28, "No space left on device")
        return real(*args)

    partial = Partial(tmp_path / "out", "key")
    noted = lambda number, tensors: partial.note(number, digest_of(tensors))  # noqa: E731
    plan, params = planned
    monkeypatch.setattr(os, call, full)
    with pytest.raises(LayoutError, match="No space left on device"):
        execute_sharded(plan, rg.Memory(params), partial.folder, max_shard_size=4000, on_cell=noted)
    monkeypatch.undo()
    partial.close()
    assert not (tmp_path / "out").exists()
    again = Partial(tmp_path / "out", "key")
    done = {number: record["sha256"] for number, record in again.finished().items()}
    kept = execute_sharded(plan, rg.Memory(params), again.folder, max_shard_size=4000, done=done)
    assert kept == set(done)
    again.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_signatures_tell_settings_and_statistics_apart(planned):
    plan, params = planned
    graph = rg.build_graph(CONFIG)
    stats = {f"absmax:{name}": torch.ones(site.width) for name, site in graph.sites.items()}
    smooth = [rg.plan(rg.transforms.SmoothQuant(alpha=alpha), params, graph) for alpha in (0.5, 0.5, 0.6)]
    texts = [signature(p, stats)[0] for p in smooth]
    assert texts[0] == texts[1] != texts[2]
    other = {**stats, smooth[0].needs[0]: torch.full_like(stats[smooth[0].needs[0]], 2.0)}
    assert signature(smooth[0], other)[0] != texts[0]
    assert signature(plan, {}) != signature(rg.plan(Quantize(scheme="W8A16", ignore=("lm_head",)), params, graph), {})
    assert signature(smooth[0], stats)[1]


def test_a_closure_cannot_be_told_apart(planned):
    from dataclasses import replace

    plan, _ = planned
    step = replace(plan.steps[0], fn=lambda params, stats: (params, stats))
    text, exact = signature(replace(plan, steps=(step,)), {})
    assert not exact
    assert json.dumps(text)
