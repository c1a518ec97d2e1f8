"""Time and peak memory of prepare_data.py against a plain Python loop, on a file of the hub's full size.

The file is the shared 17,917 distinct rows, tiled a hundred times in a temporary folder. Each side runs alone in
a process of its own; seconds are from start to exit (CPU seconds of all threads vary less on a shared machine),
memory is the peak resident size. The loop is the obvious script: the same columns, batches of 10,000 rows as
dictionaries, one pass of `dict` and `split`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
NUM_REPEATS = 100


def tile(source: Path, target: Path) -> None:
    """Write the source's rows a hundred times over, with pyarrow's own row groups (a million rows)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.concat_tables([pq.read_table(source)] * NUM_REPEATS), target)


def plain_loop(raw: Path) -> None:
    """Count what the chapter's rules keep, one row at a time."""
    import pyarrow.parquet as pq

    sys.path.insert(0, str(ROOT))
    from prepare_data import PREFIX, SUFFIX

    copies: dict[str, dict[str, tuple[str, str]]] = {}
    for batch in pq.ParquetFile(raw).iter_batches(10_000, columns=["prompt", "reward_model", "extra_info"]):
        for row in batch.to_pylist():
            (message,) = row["prompt"]
            question = message["content"][len(PREFIX) : -len(SUFFIX)]
            if message["role"] != "user" or message["content"] != PREFIX + question + SUFFIX:
                continue
            answers = copies.setdefault(" ".join(question.split()), {})
            answer, candidate = row["reward_model"]["ground_truth"], (row["extra_info"]["index"], question)
            answers[answer] = min(answers.get(answer, candidate), candidate)
    print(sum(len(answers) == 1 for answers in copies.values()))


def measure(*command: str | Path) -> tuple[tuple[float, float, float], str]:
    """(Wall seconds, CPU seconds, peak gigabytes of 1e9 bytes) and output; raises when the command fails."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{command[0]} failed with status {os.waitstatus_to_exitcode(status)}")
    seconds = time.perf_counter() - start
    return (seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9), output


def main() -> None:
    """Run both sides three times, alternately, and print the median time and the highest memory of each."""
    source = SHARED / "dapo_math_17k_unique_rows.parquet"
    if not source.is_file():
        sys.exit("bench/prepare_data.py needs ../shared/data/dapo_math_17k_unique_rows.parquet, which is absent")
    with tempfile.TemporaryDirectory() as folder:
        raw, output = Path(folder) / "tiled.parquet", Path(folder) / "datasets"
        subprocess.run([sys.executable, __file__, "tile", source, raw], check=True)
        ours = ["prepare_data.py", "--raw", raw, "--aime25", SHARED / "aime25.jsonl", "--output-dir", output]
        runs = [(measure(__file__, "plain", raw), measure(*ours)) for _ in range(3)]
        kept = {int(loop[1]) for loop, _ in runs}
        num_train, num_dev = ((output / name).read_bytes().count(b"\n") for name in ("train.jsonl", "dev.jsonl"))
        print(f"{raw.stat().st_size / 1e6:.0f} MB of parquet, 1,791,700 rows, {os.cpu_count()} cores")
    print(f"{'':<18}{'seconds':>9}{'CPU s':>9}{'peak GB':>9}")
    for name, side in (("plain loop", 0), ("prepare_data.py", 1)):
        seconds, cpu_seconds = (sorted(run[side][0][column] for run in runs)[1] for column in (0, 1))
        print(f"{name:<18}{seconds:>9.1f}{cpu_seconds:>9.1f}{max(run[side][0][2] for run in runs):>9.2f}")
    ratios = [sorted(ours[0][column] / loop[0][column] for loop, ours in runs)[1] for column in (0, 1)]
    print(f"{'ratio':<18}{ratios[0]:>9.2f}{ratios[1]:>9.2f}")
    print(f"{num_train:,} train and {num_dev} dev questions on both sides")
    if kept != {num_train + num_dev}:
        sys.exit(f"the plain loop keeps {kept}, prepare_data.py {num_train + num_dev}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["tile"]:
        tile(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["plain"]:
        plain_loop(Path(sys.argv[2]))
    else:
        main()
