"""The update alone on 1, 2 and 4 ranks with fixed rollouts: is it the same gradient, and what is sent for it?

The gradient of the first update is compared with that of one rank. The bytes that went over the loopback device
meanwhile are compared with those of the adapter's gradient in float64, of which each of N ranks in a ring sends
2 (N - 1) / N. Every rank has one thread, so that on N free cores, and only there, the seconds are a speed-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

SUITE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SUITE))

from bench.gpu import build, rollout_like_the_chapters  # noqa: E402
from bench.update import take_steps  # noqa: E402
from engine.policy import Policy, PolicyConfig  # noqa: E402
from engine.ranks import Ranks  # noqa: E402
from loss import LossConfig  # noqa: E402


def work(base: Path, output: Path) -> None:
    """Be one rank; rank 0 writes what it found to `output`, and the gradient beside it."""
    from safetensors.torch import save_file

    with Ranks.init() as ranks:
        policy = Policy(PolicyConfig(base_model=str(base), gradient_checkpointing=False), seed=0, ranks=ranks)
        groups = rollout_like_the_chapters(64, prompt_tokens=16)
        ranks.all_gather(None)
        before, started = _loopback_bytes(), time.perf_counter()
        take_steps(policy, groups, LossConfig(), max_tokens=64)
        ranks.all_gather(None)
        found = {
            "seconds": time.perf_counter() - started,
            "sent": _loopback_bytes() - before,
            "gradient": 8 * sum(parameter.numel() for parameter in policy.parameters.values()),
        }
        if ranks.is_main:
            gradients = {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}
            save_file(gradients, output.with_suffix(".safetensors"))
            output.write_text(json.dumps(found))


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counts,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counts[8])  # transmitted


def main(shape: str = "100 M") -> None:
    """Print a table.

    Args:
        shape: a model of bench/gpu.py.
    """
    import torch
    from safetensors.torch import load_file

    gradients = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "base", shape)
        print("ranks  seconds  gradient off by  each sends  of which a ring needs")
        for count in (1, 2, 4):
            output = folder / f"{count}.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(count),
                "--",
                __file__,
            ]
            done = subprocess.run(
                [*command, "--rank", str(folder / "base"), str(output)],
                env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{count} ranks ended with status {done.returncode}:\n{done.stderr[-3000:]}")
            found = json.loads(output.read_text())
            loaded = load_file(output.with_suffix(".safetensors"))
            gradients[count] = torch.cat([loaded[name].flatten() for name in sorted(loaded)]).double()
            error = float((gradients[count] - gradients[1]).norm() / gradients[1].norm())
            sent, expected = found["sent"] / count / 1e6, 2 * (count - 1) / count * found["gradient"] / 1e6
            print(
                f"{count:5d}  {found['seconds']:7.1f}  {error:15.1e}  {sent:7.2f} MB  {expected:.2f} MB", flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        tyro.cli(main)
