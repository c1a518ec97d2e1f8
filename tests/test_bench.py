"""The script prepared for a machine with a GPU, in the form that runs without one."""

import json
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parent.parent


def test_the_gpu_bench_runs_a_tiny_shape_here_and_says_which_numbers_are_missing(tmp_path):
    command = [sys.executable, str(SUITE / "bench/gpu.py"), "--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sequences"] == 64
    assert all(error < 0.03 for name, error in found.items() if name.startswith("delta rule"))
    missing = [name for name, value in found.items() if value is None]
    assert missing in ([], ["share of peak FLOPs"], ["share of peak FLOPs", "peak memory, GB"])
    assert done.stdout.count("missing: needs a GPU") == len(missing)
