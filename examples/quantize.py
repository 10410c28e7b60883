"""Log equalization and int8 weights, on one process or on many: python, torchrun and accelerate launch run it alike."""

import os
import sys

import regauge as rg
from regauge.transforms import LogEqualize, Quantize

model, output_dir = sys.argv[1:] or ("smollm2", "smollm2-log-w8")
weights = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
recipe = rg.chain(LogEqualize(), Quantize(scheme={"weights": weights}, ignore=("lm_head",)))

report = rg.oneshot(model=model, dataset="pydoc", output_dir=output_dir, recipe=recipe, overwrite_output_dir=True)
if os.environ.get("RANK", "0") == "0":
    print(report.table())
