"""Write docs/architectures.md: what is found for each architecture of the tests, how it is proved, how long it takes.

python benchmarks/architectures.py > docs/architectures.md
python benchmarks/architectures.py --sizes      its last part alone: real configs; nothing is downloaded
python benchmarks/architectures.py --all        every model type of transformers with a small config; takes minutes
"""

import argparse
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import regauge as rg
import torch
import transformers
from regauge.graph.discovery.trace import trace_forward
from regauge.graph.skeleton import example_inputs, skeleton

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "tables"))
from architectures import ARCHITECTURES, GQA

KINDS = ("norm", "v_o", "up_down", "q_k", "embed", "head")
SIZES = {
    "SmolLM2-135M": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
        },
    ),
    "Llama 3 70B": (
        "llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Mixtral 8x7B": ("mixtral", {}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "head_dim": 128,
        },
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "Whisper large": (
        "whisper",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
    ),
}


def timed_graph(config):
    start = time.perf_counter()
    graph = rg.build_graph(config)
    return graph, time.perf_counter() - start


def proof_cells(graph):
    """Method, largest change and smallest control over all proofs of a graph."""
    proofs = [graph.proofs[s.name] for s in graph.symmetries]
    if not proofs:
        return "", "", ""
    methods = ", ".join(sorted({p.method for p in proofs}))
    return methods, f"{max(p.change for p in proofs):.0e}", f"{min(p.control for p in proofs):.0e}"


def table():
    print(
        "# Architectures\n\n"
        f"Written by `python benchmarks/architectures.py`, with torch {torch.__version__.split('+')[0]} and "
        f"transformers {transformers.__version__}. Each row is a config with few channels and two layers; the groups "
        "are compared with what is written down from reading the model's code (`tests/tables/architectures.py`), and "
        "all of them together with random scales keep the function. *Change* is the largest derivative of the output "
        "along the orbit of a group, relative to it; *control* is the smallest one when only the consumers are "
        "scaled.\n\n"
        "| architecture | class | " + " | ".join(f"`{k}`" for k in KINDS) + " | proof | change | control | seconds |\n"
        "|---|---|" + "---|" * (len(KINDS) + 4)
    )
    missed = []
    timed_graph(transformers.LlamaConfig(**{**GQA, "vocab_size": 95}))  # so that imports are not counted
    for name, architecture in ARCHITECTURES.items():
        graph, seconds = timed_graph(architecture.config)
        counts = Counter(s.kind for s in graph.symmetries)
        cls = type(skeleton(architecture.config)).__name__
        cells = [str(counts[k] or "") for k in KINDS]
        print(f"| {name} | {cls} | " + " | ".join((*cells, *proof_cells(graph))) + f" | {seconds:.1f} |")
        missed += [(name, reason) for reason in architecture.missed]
    print("\n## Missed\n\nRescalings that keep the function and are not found.\n")
    print("| architecture | group, and why |\n|---|---|")
    for name, reason in missed:
        print(f"| {name} | {reason} |")
    for name, reason in GENERAL:
        print(f"| {name} | {reason} |")


GENERAL = (
    (
        "vision transformers with layer scale",
        "output projection -> the vector that scales it, which is no linear and takes no scale up",
    ),
    ("all", "the whole residual stream: norms without an epsilon would allow it, real ones do not exactly"),
    ("all", "rotations and permutations of channels, which are not rescalings"),
    (
        "experts in a loop over those that were hit",
        "the loop depends on data; models that offer `grouped_mm` to transformers are traced with it instead",
    ),
)


def sizes():
    print(
        "\n## Real sizes\n\nConfigs of real models with all their layers; *total* is trace, search and proofs, in one "
        "process with two threads.\n\n| model | operators | trace, s | groups | total, s |\n|---|---|---|---|---|"
    )
    for name, (kind, settings) in SIZES.items():
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = skeleton(config)
        start = time.perf_counter()
        trace = trace_forward(model, example_inputs(model))
        traced = time.perf_counter() - start
        graph, seconds = timed_graph(config)
        print(f"| {name} | {len(trace.nodes):,} | {traced:.1f} | {len(graph.symmetries)} | {seconds:.1f} |", flush=True)


LIMIT = 60


def _too_long(*_):
    raise TimeoutError


def everything():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    autos = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification")
    mappings = [getattr(transformers, f"AutoModelFor{name}")._model_mapping for name in autos]
    outcomes: Counter = Counter()
    signal.signal(signal.SIGALRM, _too_long)
    for kind, cls in CONFIG_MAPPING.items():
        if not any(cls in mapping for mapping in mappings):
            continue
        signal.alarm(LIMIT)
        try:
            config = transformers.AutoConfig.for_model(kind, **GQA)
            graph, seconds = timed_graph(config)
            signal.alarm(0)
        except TimeoutError:
            outcome, detail = f"over {LIMIT} s", "its config has sizes that are not set"
        except Exception as error:  # a config or model that refuses these sizes, or wants another package
            outcome = "not built at these sizes"
            detail = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        else:
            failed = [name for name, proof in graph.proofs.items() if not proof.holds]
            counts = dict(Counter(s.kind for s in graph.symmetries))
            outcome, detail = "found" if counts else "nothing found", f"{counts} {seconds:.1f} s"
            if failed:
                outcome, detail = "proof failed", f"{failed[0]}: {graph.proofs[failed[0]].reason}"
            if graph.untraced:
                outcome, detail = "not traced", graph.untraced
        outcomes[outcome] += 1
        print(f"{outcome:<24} {kind:<28} {detail[:200]}", flush=True)
    print(dict(outcomes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.ERROR)
    if arguments.sizes:
        sizes()
    elif arguments.all:
        everything()
    else:
        table()
        sizes()


if __name__ == "__main__":
    main()
