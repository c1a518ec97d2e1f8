"""Time a run's evaluations in one engine against as many processes of their own.

`python bench/one_engine.py RUN DATASET [flags of eval.py]` evaluates the base and every checkpoint of the run both
ways, from nothing, into a folder that is thrown away, and compares the generations. Seconds of processor time are
given beside those of the clock, since another job on the machine stretches only the latter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stats.evaluations import read_evaluation  # noqa: E402


def timed(*flags: object) -> tuple[float, float]:
    """Run eval.py; return seconds by the clock and of processor time."""
    started, before = time.perf_counter(), os.times()
    command = [sys.executable, str(ROOT / "eval.py"), *map(str, flags)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, used


def main(run: Path, dataset: Path, *flags: str) -> None:
    """Time both ways and print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "run")
        shutil.copytree(run, copy, ignore=lambda folder, names: {"eval", "base", "rollouts"} & set(names))
        common = ["--dataset-path", dataset, *flags]
        together = timed("--run", copy, *common)
        files = sorted(copy.glob("eval/*.jsonl"))
        apart = []
        for file in files:
            step = int(file.stem.removeprefix("step-")) if file.stem != "base" else 0
            first = file.rename(file.with_suffix(".together"))
            apart.append(timed("--run", copy, "--steps", step, *common))
            assert read_evaluation(first).problems == read_evaluation(file).problems, f"{file.stem} differs"
    clock, used = (sum(seconds) for seconds in zip(*apart, strict=True))
    print(f"{len(files)} evaluations, the same generations both ways")
    print(f"one engine          {together[0]:6.1f} s   {together[1]:6.1f} s of processor time")
    print(f"{len(files)} separate engines  {clock:6.1f} s   {used:6.1f} s of processor time")
    print(f"share               {together[0] / clock:6.1%}   {together[1] / used:6.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
