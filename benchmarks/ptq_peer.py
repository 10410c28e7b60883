"""One run of llm-compressor's `oneshot` in a process of its own; prints one line of JSON. Started by `ptq.py`.

Runs in the environment of the peer: it imports nothing of this project.
"""

import json
import re
import sys
import time
import warnings

began = time.perf_counter()
warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def recipe(settings: dict) -> list:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "dynamic": False}
    schemes = {
        "W8A8": {"scheme": "W8A8", "targets": "Linear"},
        "W4A16": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}}},
        "W4A16_ASYM": {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": False}}}
        },
    }
    modifiers = []
    if settings["equalize"] == "log":
        modifiers.append(SmoothQuantModifier(algorithm="log_equalization"))
    elif settings["equalize"] is not None:
        modifiers.append(SmoothQuantModifier(smoothing_strength=settings["equalize"]))
    return [*modifiers, QuantizationModifier(ignore=["lm_head"], **schemes[settings["scheme"]])]


def peak_memory() -> int:
    """Peak resident bytes of this program; getrusage would count the parent's from before it was loaded."""
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", file.read())[1])


def main(settings: dict) -> dict:
    with open(settings["ids"]) as file:
        ids = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    calibration = {}
    if settings["equalize"] is not None:
        rows = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
        calibration = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": len(ids),
            "max_seq_length": len(ids[0]),
        }
    start = time.perf_counter()
    oneshot(model=model, recipe=recipe(settings), tokenizer=tokenizer, **calibration)
    middle = time.perf_counter()
    model.save_pretrained(settings["output"], save_compressed=True)
    tokenizer.save_pretrained(settings["output"])
    end = time.perf_counter()
    return {
        "seconds": middle - start,
        "saving": end - middle,
        "process": end - began,
        "peak": peak_memory(),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
