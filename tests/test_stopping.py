"""Every misfortune that stops a run: signals, kills, a terminal that closes, a disk that fills up."""

import fcntl
import json
import os
import pty
import random
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import newest_good_checkpoint
from tiny_runs import SUITE, run_train, tiny_flags

from bench.kills import command, kill_and_resume, what_it_left
from record.checkpoint import load_state


def start_train(*arguments):
    """Start train.py in a process group of its own, with its output in files."""
    command = [sys.executable, str(SUITE / "train.py"), *map(str, arguments)]
    with Path("out").open("wb") as out, Path("err").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, process_group=0)


def wait_for_steps(process, count, run="t"):
    metrics = Path("runs", run, "metrics.jsonl")
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
            process.wait(timeout=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_last_whole_step_and_says_how_to_go_on(in_folder, tiny_base, signum, status):
    process = start_train(*tiny_flags(tiny_base, max_steps=500, save_every=500))
    wait_for_steps(process, 2)
    os.killpg(process.pid, signum)
    assert process.wait() == status
    steps = Path("runs/t/metrics.jsonl").read_text().count("\n")
    checkpoint = Path(f"runs/t/checkpoints/step-{steps:06d}")
    assert newest_good_checkpoint(Path("runs/t")) == checkpoint
    assert load_state(checkpoint).interrupted
    *_, last = Path("err").read_text().splitlines()
    advice = "continue from the newest checkpoint: python "
    assert last.startswith(advice)
    assert last.endswith(" --resume")
    assert "Traceback" not in Path("err").read_text()
    words = [f"{steps + 1}" if word == "500" else word for word in last.removeprefix(advice).split()]
    assert subprocess.run([sys.executable, *words], check=False).returncode == 0
    assert [path.name for path in Path("runs/t/checkpoints").iterdir()] == [f"step-{steps + 1:06d}"]


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once_and_the_last_checkpoint_is_good(in_folder, tiny_base):
    process = start_train(*tiny_flags(tiny_base, max_steps=500, save_every=1))
    wait_for_steps(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    while "ends it at once now" not in Path("err").read_text():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.005)
    os.killpg(process.pid, signal.SIGINT)  # it is saving, and closing its engine
    assert process.wait(timeout=60) == -signal.SIGINT
    assert newest_good_checkpoint(Path("runs/t"))


@pytest.mark.slow
@pytest.mark.parametrize("under_a_shell", [False, True])
def test_a_terminal_that_closes_amid_an_update_costs_no_step(in_folder, tiny_base, paid_train, under_a_shell):
    """What the run prints fails from then on; under a shell, two hang-ups come."""
    Path("hung.py").write_text(f"""
{paid_train.read_text().partition("if __name__")[0]}
import signal, time
from pathlib import Path
from engine.policy import Policy
step = Policy.optim_step
def until_the_terminal_is_gone(self):
    step(self)
    Path("moved").touch()
    while signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        time.sleep(0.01)
if __name__ == "__main__":
    Policy.optim_step = until_the_terminal_is_gone
    train.main()
""")
    words = [sys.executable, "hung.py", *tiny_flags(tiny_base, max_steps=500, save_every=500)]
    leader, terminal = pty.fork()
    if leader == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's is inherited
            os.environ["HISTFILE"] = "/dev/null"
            os.execvp(*("bash", ["bash", "--norc", "-i"]) if under_a_shell else (words[0], words))
        finally:
            os._exit(127)
    if under_a_shell:
        os.write(terminal, f"{shlex.join(words)}; exit\n".encode())
    while not Path("moved").exists():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    os.waitpid(leader, 0)
    with Path("runs/t/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the run has ended
    steps = Path("runs/t/metrics.jsonl").read_text().count("\n")
    checkpoint = Path(f"runs/t/checkpoints/step-{steps:06d}")
    assert newest_good_checkpoint(Path("runs/t")) == checkpoint
    assert load_state(checkpoint).interrupted


@pytest.mark.slow
def test_a_run_that_stops_before_its_first_step_may_be_started_again_with_other_settings(in_folder, tiny_base):
    Path("too_much.py").write_text(f"""
import sys
sys.path.insert(0, {str(SUITE)!r})
import train
from engine.gate import CheckError
def too_much(*_, **__):
    raise CheckError("too much; lower --max-tokens")
if __name__ == "__main__":
    train.memory_dry_run = too_much
    train.main()
""")
    done = run_train(*tiny_flags(tiny_base), script=Path("too_much.py"))
    assert done.returncode == 1
    assert "error: too much; lower --max-tokens" in done.stderr
    assert (
        "before the first step; nothing is lost, and runs/t may be started anew, with other settings too"
        in done.stderr
    )
    assert "--resume" not in done.stderr
    again = run_train(*tiny_flags(tiny_base, max_steps=1, max_tokens=8))
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads(Path("runs/t/config.json").read_text())["settings"]["sampling"]["max_tokens"] == 8


@pytest.mark.slow
def test_kills_at_random_moments_leave_no_trace(tmp_path, tiny_base, tiny_problems, paid_train):
    """One in the start, one between steps, one in the writing of a checkpoint; bench/kills.py does 20."""
    whole, killed = (command(tiny_base, tiny_problems, name, 20, paid_train) for name in ("whole", "killed"))
    assert subprocess.run(whole, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    kill_and_resume(killed, tmp_path / "runs/killed", kills=3, rng=random.Random(1))
    expected, found = what_it_left(tmp_path / "runs/whole"), what_it_left(tmp_path / "runs/killed")
    assert [name for name in expected | found if expected.get(name) != found.get(name)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("adapters", "what"), [(0, "adapter"), (2, "checkpoints/step-000002")])
def test_a_disk_that_fills_up_stops_the_run_with_a_sentence_and_a_good_checkpoint(
    in_folder, tiny_base, adapters, what
):
    """On a real file system, which something else fills after the first checkpoint, but for so many adapters."""
    (in_folder / "full.py").write_text(f"""
import os, shutil, sys
sys.path.insert(0, {str(SUITE)!r})
import train
from record.run import Run
publish = Run.publish_checkpoint
def publish_and_fill(*arguments, **flags):
    publish(*arguments, **flags)
    with open("runs/full", "wb") as file:
        left = {adapters} * os.path.getsize("runs/t/adapter/adapter_model.safetensors")
        file.write(bytes(shutil.disk_usage("runs").free - left))
if __name__ == "__main__":
    Run.publish_checkpoint = publish_and_fill
    train.main()
""")
    flags = " ".join(tiny_flags(tiny_base, save_every=1, keep_checkpoints=1))
    newest = "import made_up, pathlib; print(made_up.newest_good_checkpoint(pathlib.Path('runs/t')))"
    script = f"""
        mkdir runs && mount -t tmpfs -o size=20m tmpfs runs || exit 77
        {sys.executable} full.py {flags}; echo "status $?"
        ls -A runs/t/checkpoints
        {sys.executable} -c "{newest}"
    """
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": f"{SUITE}:{SUITE}/tests"},
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    status, *files, newest = done.stdout[done.stdout.index("status") :].splitlines()
    assert status == "status 1", done.stderr[-2000:]
    assert re.search(rf"error: runs/t/{what} cannot be written \(.*No space left on device", done.stderr)
    assert re.search(r"It needs about \S+ MB\. 0(\.\d+)? MB are free\.", done.stderr)
    assert files == ["step-000001"]  # alone: nothing half-written beside it
    assert newest == "runs/t/checkpoints/step-000001"
