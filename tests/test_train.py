"""The loop with the real engines, and every kind of bad input and misfortune as its user meets it."""

import fcntl
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from bench.kills import command, kill_and_resume, what_it_left
from checkpoint import load_state, lock_run, newest_good_checkpoint
from rollout import Sampler

HERE = Path(__file__).parent.parent


@pytest.fixture
def in_folder(tmp_path, monkeypatch, tiny_base, tiny_problems):
    """Work in an empty folder that holds a data file and a base model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/train.jsonl").write_bytes(tiny_problems.read_bytes())
    return tmp_path


def refusal(monkeypatch, capfd, *arguments):
    """Return the message with which train.py refuses its arguments, with exit status 2."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as refused:
        train.main()
    assert refused.value.code == 2
    output = capfd.readouterr()
    assert "Traceback" not in output.err
    return " ".join(output.err.replace("│", " ").split())


def tiny_flags(base, **flags):
    settings = {
        "base_model": base, "run_name": "t", "max_steps": 3, "groups_per_step": 3, "group_size": 4,
        "max_prompt_tokens": 64, "max_tokens": 16, "lora_rank": 8, "learning_rate": 1e-2, "save_every": 2,
        "swanlab_mode": "disabled",
    }  # fmt: skip
    return [
        word for name, value in (settings | flags).items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def run_train(*arguments, script=HERE / "train.py"):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_chapters_own_command_line_parses_and_says_what_is_missing(in_folder, monkeypatch, capfd):
    command = ["--max-steps", 100, "--groups-per-step", 8, "--group-size", 8]
    command += ["--max-prompt-tokens", 2048, "--max-tokens", 4096]
    message = refusal(monkeypatch, capfd, *command)
    assert "Qwen/Qwen3.5-4B is not a folder on this machine, and there is no GPU" in message
    assert "make tiny" in message
    (in_folder / "datasets/train.jsonl").unlink()
    message = refusal(monkeypatch, capfd, *command)
    assert "datasets/train.jsonl does not exist: run `python prepare_data.py`" in message
    assert "there is no GPU" in message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"group_size": 0}, "group_size is 0; it must be at least 1"),
        ({"group_size": 1}, "an advantage compares at least 2 completions"),
        ({"groups_per_step": 0}, "groups_per_step is 0; it must be at least 1"),
        ({"top_p": 0.9}, "biases every ratio"),
        ({"top_k": 20}, "biases every ratio"),
        ({"run_name": "a/b"}, "must be a plain folder name"),
        ({"base_model": "nowhere"}, "nowhere is not a folder on this machine"),
        ({"max_prompt_tokens": 4}, "no question fits into max_prompt_tokens = 4"),
        ({"lora_rank": 1024}, "lora_rank is 1024; vLLM serves at most 512"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0; it must be at least 1"),
        ({"max_steps": 10**9}, "the run would write up to"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(in_folder, tiny_base, monkeypatch, capfd, flags, message):
    assert message in refusal(monkeypatch, capfd, *tiny_flags(tiny_base, **flags))
    assert not Path("runs").exists()


def test_without_vllm_nothing_is_begun(in_folder, tiny_base, monkeypatch, capfd):
    monkeypatch.setattr("rollout.find_spec", lambda name: None)
    assert "vLLM is not installed; run `make gpu`" in refusal(monkeypatch, capfd, *tiny_flags(tiny_base))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "question": "What', "train.jsonl, line 101: not JSON"),
        ('{"id": "x", "question": "", "answer": "1"}', "train.jsonl, line 101: question must be"),
        ('{"id": "x", "question": "Why?", "answer": " "}', "train.jsonl, line 101: answer must be"),
        (r'{"id": "x", "question": "Why?", "answer": "\\frac{1}{"}', "train.jsonl, line 101: the reference answer"),
    ],
)
def test_bad_data_is_refused_by_file_and_line(in_folder, tiny_base, monkeypatch, capfd, line, message):
    with (in_folder / "datasets/train.jsonl").open("a") as file:
        file.write(line + "\n")
    assert message in refusal(monkeypatch, capfd, *tiny_flags(tiny_base))


def test_a_used_run_name_and_a_run_folder_that_cannot_be_written_are_refused(
    in_folder, tiny_base, monkeypatch, capfd
):
    used = in_folder / "runs/t/config.json"
    used.parent.mkdir(parents=True)
    used.write_text("mine")
    assert "the run runs/t exists already; continue it with --resume" in refusal(
        monkeypatch, capfd, *tiny_flags(tiny_base)
    )
    assert used.read_text() == "mine"
    used.write_text('{"settings": {}}')
    (used.parent / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "the run runs/t exists already" in refusal(monkeypatch, capfd, *tiny_flags(tiny_base))
    (in_folder / "runs/file").write_text("")
    assert "runs/file" in refusal(monkeypatch, capfd, *tiny_flags(tiny_base, run_name="file"))
    assert "there is no run to resume in runs/new" in refusal(
        monkeypatch, capfd, *tiny_flags(tiny_base, run_name="new"), "--resume"
    )


def test_the_check_alone_says_what_it_verified_and_writes_nothing(in_folder, tiny_base):
    done = run_train(*tiny_flags(tiny_base), "--check")
    assert done.returncode == 0, done.stderr[-2000:]
    for finding in (
        "chat template",
        "end token",
        "tokenizer",
        "gated delta net",
        "engines",
        "padding",
        "gradients",
    ):
        assert f"\n{finding}" in f"\n{done.stdout}"
    assert "the sampler matched all of its 31 modules" in done.stdout
    assert not Path("runs").exists()


def start_train(*arguments):
    """Start train.py in a process group of its own, with its output in files."""
    command = [sys.executable, str(HERE / "train.py"), *map(str, arguments)]
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
from policy import Policy
step = Policy._step
def until_the_terminal_is_gone(*arguments):
    result = step(*arguments)
    Path("moved").touch()
    while signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        time.sleep(0.01)
    return result
if __name__ == "__main__":
    Policy._step = until_the_terminal_is_gone
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
sys.path.insert(0, {str(HERE)!r})
import check, train
def rehearse(*_, **__):
    raise check.CheckError("too much; lower --max-tokens")
if __name__ == "__main__":
    train.rehearse = rehearse
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
sys.path.insert(0, {str(HERE)!r})
import train
save = train.save_checkpoint
def save_and_fill(*arguments, **flags):
    save(*arguments, **flags)
    with open("runs/full", "wb") as file:
        left = {adapters} * os.path.getsize("runs/t/adapter/adapter_model.safetensors")
        file.write(bytes(shutil.disk_usage("runs").free - left))
if __name__ == "__main__":
    train.save_checkpoint = save_and_fill
    train.main()
""")
    flags = " ".join(tiny_flags(tiny_base, save_every=1, keep_checkpoints=1))
    newest = "import checkpoint, pathlib; print(checkpoint.newest_good_checkpoint(pathlib.Path('runs/t')))"
    script = f"""
        mkdir runs && mount -t tmpfs -o size=20m tmpfs runs || exit 77
        {sys.executable} full.py {flags}; echo "status $?"
        ls -A runs/t/checkpoints
        {sys.executable} -c "{newest}"
    """
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(HERE)},
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    status, *files, newest = done.stdout[done.stdout.index("status") :].splitlines()
    assert status == "status 1", done.stderr[-2000:]
    assert re.search(rf"error: runs/t/{what} cannot be written \(.*No space left on device", done.stderr)
    assert re.search(r"It needs about \S+ MB\. 0(\.\d+)? MB are free\.", done.stderr)
    assert files == ["step-000001"]  # alone: nothing half-written beside it
    assert newest == "runs/t/checkpoints/step-000001"


def test_a_gate_that_closes_stops_the_run_in_that_step(in_folder, tiny_base, monkeypatch, capfd):
    def load_only_the_first(self, path, *, version):
        if version <= 1:
            load(self, path, version=version)

    load = Sampler.load_adapter
    monkeypatch.setattr(Sampler, "load_adapter", load_only_the_first)
    flags = tiny_flags(tiny_base, max_steps=9, groups_per_step=8, group_size=8)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, flags)])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 1
    error = capfd.readouterr().err
    assert "error: the sampler runs the " in error  # which of the two is a matter of what the first step taught
    assert "continue from the newest checkpoint: python train.py" in error
    steps = Path("runs/t/metrics.jsonl").read_text().count("\n")
    assert newest_good_checkpoint(Path("runs/t")) == Path(f"runs/t/checkpoints/step-{steps:06d}")


def test_what_cannot_be_resumed_is_refused_by_name(in_folder, tiny_base, monkeypatch, capfd):
    done = run_train(*tiny_flags(tiny_base, max_steps=4))
    assert done.returncode == 0, done.stderr[-2000:]
    flags = tiny_flags(tiny_base, max_steps=6)
    with lock_run(Path("runs/t")):
        message = refusal(monkeypatch, capfd, *flags, "--resume")
        assert f"process {os.getpid()} on " in message
        assert "is training in runs/t" in message
    message = refusal(monkeypatch, capfd, *flags, "--resume-from", "runs/t/checkpoints/step-000003")
    assert "runs/t/checkpoints/step-000003 is not a checkpoint of the run runs/t" in message
    shutil.copy("datasets/train.jsonl", in_folder / "sums.jsonl")
    with Path("datasets/train.jsonl").open("a") as file:
        file.write('{"id": "new", "question": "What is 1?", "answer": "1"}\n')
    assert "data sha256: " in refusal(monkeypatch, capfd, *flags, "--resume")
    shutil.copy(in_folder / "sums.jsonl", "datasets/train.jsonl")
    before = Path("runs/t/config.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny_flags(tiny_base, max_steps=2), "--resume"])
    train.main()
    assert "runs/t has its 4 steps already; raise --max-steps to go on" in capfd.readouterr().out
    assert Path("runs/t/config.json").read_bytes() == before
    state = Path("runs/t/checkpoints/step-000004/state.json")
    state.write_text(state.read_text()[:40])
    message = refusal(monkeypatch, capfd, *flags, "--resume-from", state.parent)
    assert "checkpoint runs/t/checkpoints/step-000004 has no readable state.json" in message
    assert "--resume takes the newest one that is whole" in message


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(in_folder, tiny_base, paid_train, monkeypatch, capfd):
    """Three steps at once; then two, stop, one more: same metrics, same weights, to the bit."""
    whole = run_train(*tiny_flags(tiny_base, run_name="whole"), script=paid_train)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "step    3  reward" in whole.stdout
    first = run_train(*tiny_flags(tiny_base, run_name="parts", max_steps=2), script=paid_train)
    assert first.returncode == 0, first.stderr[-2000:]
    with Path("runs/parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half')  # what a kill leaves
    second = run_train(*tiny_flags(tiny_base, run_name="parts"), "--resume", script=paid_train)
    assert second.returncode == 0, second.stderr[-2000:]

    def metrics(name):
        lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]

    assert metrics("whole") == metrics("parts")
    assert [line["step"] for line in metrics("whole")] == [1, 2, 3]
    assert all(line["gspo/normalization_sequences"] == 12 for line in metrics("whole"))
    assert all(0 < line["gap/token_mean"] < 0.01 for line in metrics("whole"))
    rollouts = [sorted(Path("runs", name, "rollouts").iterdir()) for name in ("whole", "parts")]
    assert [path.read_bytes() for path in rollouts[0]] == [path.read_bytes() for path in rollouts[1]]
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        ends = [Path("runs", name, "checkpoints/step-000003", file).read_bytes() for name in ("whole", "parts")]
        assert ends[0] == ends[1]

    assert "(policy/learning_rate: 0.01 -> 0.02)" in refusal(
        monkeypatch, capfd, *tiny_flags(tiny_base, run_name="parts", learning_rate=0.02), "--resume"
    )

    newest, before = Path("runs/whole/checkpoints/step-000003"), Path("runs/whole/checkpoints/step-000002")
    assert newest_good_checkpoint(Path("runs/whole")) == newest
    weights = bytearray((newest / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"damaged: adapter_model\.safetensors"):
        load_state(newest)
    assert newest_good_checkpoint(Path("runs/whole")) == before
