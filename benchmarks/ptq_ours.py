"""One run of `regauge.oneshot` in a process of its own; prints one line of JSON. Started by `ptq.py`."""

import json
import re
import sys
import time

began = time.perf_counter()

import regauge as rg  # noqa: E402 (the import is part of what is timed)


def peak_memory() -> int:
    """Peak resident bytes of this program; getrusage would count the parent's from before it was loaded."""
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", file.read())[1])


def main(settings: dict) -> dict:
    if "sweep" in settings:
        return {"seconds": [one({**settings, "recipe": recipe})["seconds"] for recipe in settings["sweep"]]}
    return one(settings)


def one(settings: dict) -> dict:
    start = time.perf_counter()
    report = rg.oneshot(
        settings["model"],
        rg.Data(**settings["data"]),
        settings["output"],
        settings["recipe"],
        overwrite_output_dir=True,
        reuse_statistics=settings["reuse"],
        plots=False,
    )
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "process": end - began,
        "phases": dict(report.seconds),
        "peak": peak_memory(),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
