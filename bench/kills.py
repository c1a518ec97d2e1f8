"""Kill a small run with SIGKILL at random moments, resume it each time, and compare it with an undisturbed one.

A third of the kills falls into the start, a third between two steps, a third into the writing of a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import write_problems
from tiny import build_base, sums

SUITE = Path(__file__).parent.parent


def command(base: Path, data: Path, name: str, steps: int, script: Path = SUITE / "train.py") -> list[str]:
    """Return the command line of a run of `steps` small steps with a checkpoint at every second."""
    flags = {
        "base_model": base, "data": data, "run_name": name, "max_steps": steps, "save_every": 2,
        "groups_per_step": 4, "group_size": 4, "max_prompt_tokens": 64, "max_tokens": 24,
        "lora_rank": 8, "learning_rate": 1e-3, "swanlab_mode": "disabled",
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [sys.executable, str(script), *words]


def kill_and_resume(words: list[str], run: Path, *, kills: int, rng: random.Random) -> None:
    """Start and kill the run `kills` times, then let it finish; RuntimeError when a process outlives its kill."""
    for number in range(kills):
        kind = ("start", "step", "checkpoint")[number % 3]
        process = _start(words, run)
        before = _num_steps(run)
        if kind == "start":
            _until(process, lambda: False, seconds=rng.uniform(0, 15))
        elif kind == "step":
            _until(process, lambda before=before: _num_steps(run) > before)
            _until(process, lambda: False, seconds=rng.uniform(0, 2))
        else:
            _until(process, lambda: any(run.glob("checkpoints/.step-*.tmp")))
            _until(process, lambda: False, seconds=rng.uniform(0, 0.03))
        if process.poll() is not None:
            raise RuntimeError(
                f"the run ended with status {process.returncode} before it could be killed:\n{_log(run)}"
            )
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while survivors := _session(process.pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"still there 30 seconds after the kill: {survivors}")
        print(f"kill {number + 1:2d}, {kind:10s} at step {_num_steps(run)}", flush=True)
    if status := _start(words, run).wait():
        raise RuntimeError(f"the last part of the run ended with status {status}:\n{_log(run)}")


def _start(words: list[str], run: Path) -> subprocess.Popen:
    resume = ["--resume"] if (run / "config.json").exists() else []
    run.parent.mkdir(exist_ok=True)
    with run.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*words, *resume], cwd=run.parent.parent, stdout=log, stderr=log, start_new_session=True
        )


def _log(run: Path) -> str:
    return run.with_suffix(".log").read_text()[-2000:]


def _until(process: subprocess.Popen, reached: Callable[[], bool], *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def _num_steps(run: Path) -> int:
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0


def _session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(session) == leader and state != "Z":
            alive.append(int(stat.parent.name))
    return alive


def what_it_left(run: Path) -> dict[str, Any]:
    """Return all that a finished run leaves, by file: metrics without times, the rest as bytes."""
    left: dict[str, object] = {
        str(path.relative_to(run)): path.read_bytes()
        for part in ("checkpoints", "rollouts")
        for path in sorted((run / part).rglob("*"))
        if path.is_file()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left["metrics.jsonl"] = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    return left


def main(kills: int = 20, steps: int = 40, seed: int = 0) -> None:
    """Print how many of the kills left no trace.

    Args:
        kills: how often the run is killed.
        steps: length of the run.
        seed: of the moments of the kills.
    """
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_base(folder / "base", seed=0, steps=300)  # gets some sums right, or nothing would be learnt
        write_problems(folder / "sums.jsonl", sums(seed=0))
        runs = folder / "runs"
        whole, killed = (command(folder / "base", folder / "sums.jsonl", n, steps) for n in ("whole", "killed"))
        started = time.monotonic()
        if status := _start(whole, runs / "whole").wait():
            sys.exit(f"the undisturbed run ended with status {status}:\n{_log(runs / 'whole')}")
        undisturbed = time.monotonic() - started
        kill_and_resume(killed, runs / "killed", kills=kills, rng=random.Random(seed))
        expected, found = what_it_left(runs / "whole"), what_it_left(runs / "killed")
        differing = [name for name in expected | found if expected.get(name) != found.get(name)]
        total = time.monotonic() - started - undisturbed
        updates = sum(line["update/optimizer_steps"] for line in expected["metrics.jsonl"])
    if differing:
        sys.exit(f"after {kills} kills these differ from the undisturbed run: {', '.join(differing)}")
    print(
        f"{kills} of {kills} kills left no trace: metrics, {steps} rollout files and {steps // 2} checkpoints are "
        f"equal byte for byte after {updates} updates\n"
        f"{undisturbed:.0f} s undisturbed, {total:.0f} s with the kills"
    )


if __name__ == "__main__":
    tyro.cli(main)
