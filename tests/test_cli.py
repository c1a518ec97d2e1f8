"""One exit protocol: every signal, a fault before the start and one after it, in every script.

Each script is a process of its own. A signal is sent once the script has printed a line or written a file.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import write_metrics
from test_prepare_data import sums, write_aime25, write_parquet

from record.run import FORMAT, Run
from stats.evaluations import read_evaluation

SUITE = Path(__file__).parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(*words, cwd=None) -> Any:
    """Start Python on these words in a process group of its own, with SIGHUP as in a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(SUITE)},
        )
    finally:
        signal.signal(signal.SIGHUP, before)


def command_script(folder: Path, body: str) -> Path:
    """Return a script that does `body` under `run_command`; `ready()` prints a line to wait for."""
    script = folder / "script.py"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script.write_text(f"""
import os, signal, sys
from data import DataError
from engine.ranks import RankError, Ranks
from record.cli import run_command
from record.disk import DiskError
class OwnError(RuntimeError):
    pass
def ready():
    print("ready", flush=True)
    while True:
        signal.pause()
def work(command):
{lines}
run_command(work, OwnError)
""")
    return script


def ended(folder: Path, body: str) -> tuple[int, str]:
    process = start(command_script(folder, body))
    _, error = process.communicate()
    return process.returncode, error


ADVICE = "the same command continues"


@pytest.mark.parametrize("fault", ["ValueError('bad')", "OSError('bad')", "DataError('bad')", "OwnError('bad')"])
def test_a_fault_before_the_start_is_one_line_and_status_2(tmp_path, fault):
    assert ended(tmp_path, f"raise {fault}") == (2, "error: bad\n")


@pytest.mark.parametrize("fault", ["DiskError", "DataError", "FloatingPointError", "OwnError"])
def test_a_fault_after_the_start_is_its_message_with_notes_and_advice_and_status_1(tmp_path, fault):
    body = f"command.begin('{ADVICE}')\nfault = {fault}('bad')\nfault.add_note('in step 3')\nraise fault"
    assert ended(tmp_path, body) == (1, f"\nerror: bad\nin step 3\n{ADVICE}\n")


def test_the_advice_is_asked_for_at_the_end(tmp_path):
    body = "kept = []\ncommand.begin(lambda: f'{kept} is kept')\nkept.append(7)\nraise OwnError('bad')"
    assert ended(tmp_path, body) == (1, "\nerror: bad\n[7] is kept\n")


@pytest.mark.parametrize(
    ("start_it", "advice"), [("", "before the start; nothing is lost"), (f"command.begin('{ADVICE}')", ADVICE)]
)
@pytest.mark.parametrize("fault", ["KeyError", "RuntimeError"])
def test_an_unexpected_fault_keeps_its_traceback_with_the_advice_below(tmp_path, start_it, advice, fault):
    status, error = ended(tmp_path, f"{start_it}\nraise {fault}('odd')")
    assert status == 1
    assert error.startswith("Traceback")
    assert error.endswith(f"'odd'\n{advice}\n" if fault == "KeyError" else f"odd\n{advice}\n")


def test_a_value_error_after_the_start_is_no_bad_input(tmp_path):
    status, error = ended(tmp_path, f"command.begin('{ADVICE}')\nraise ValueError('odd')")
    assert status == 1
    assert error.startswith("Traceback")
    assert error.endswith(f"ValueError: odd\n{ADVICE}\n")


@pytest.mark.parametrize(
    ("start_it", "advice"), [("", "before the start; nothing is lost"), (f"command.begin('{ADVICE}')", ADVICE)]
)
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_with_its_status_and_the_advice(tmp_path, signum, start_it, advice):
    process = start(command_script(tmp_path, f"{start_it}\nready()"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, error = process.communicate()
    assert process.returncode == 128 + signum
    assert error == f"\nstopping; Ctrl-C or SIGTERM ends it at once now\n\ninterrupted\n{advice}\n"


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_waits_for_the_end_of_what_defers_it(tmp_path, signum):
    body = """
signal.signal(signal.SIGALRM, lambda *_: None)
with command.interrupts.deferred():
    print("ready", flush=True)
    while command.interrupts.received is None:
        signal.pause()
    print("done", flush=True)
print("never")
"""
    process = start(command_script(tmp_path, body))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    output, _ = process.communicate()
    assert (process.returncode, output) == (128 + signum, "done\n")


def test_a_fault_while_signals_are_deferred_leaves_them_deferred_for_its_cleanup(tmp_path):
    body = """
try:
    with command.interrupts.deferred():
        raise OwnError("bad")
except OwnError:
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", flush=True)
    raise
"""
    process = start(command_script(tmp_path, body))
    output, error = process.communicate()
    assert (process.returncode, output) == (2, "saved\n")
    assert error.endswith("error: bad\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path, signum):
    process = start(command_script(tmp_path, "command.interrupts.hold()\nready()"))
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signum)
        while "at once now" not in process.stderr.readline() and process.poll() is None:
            pass
    assert process.wait(timeout=60) == -signum


def test_a_terminal_that_hangs_up_twice_is_one_signal(tmp_path):
    body = "try:\n    ready()\nfinally:\n    os.kill(os.getpid(), signal.SIGHUP)"
    process = start(command_script(tmp_path, body))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 128 + signal.SIGHUP


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    script = command_script(tmp_path, "os.kill(os.getpid(), signal.SIGHUP)\nprint('still here')")
    words = [sys.executable, str(script)]
    nohup = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = start("-c", f"{nohup}; os.execv({words[0]!r}, {words!r})")
    assert process.communicate() == ("still here\n", "")
    assert process.returncode == 0


def test_handlers_that_a_library_replaced_are_installed_again(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command.interrupts.listen()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert ended(tmp_path, body)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("deferred", [False, True])
def test_a_closed_terminal_gives_the_status_of_the_hang_up_whatever_is_printed(tmp_path, deferred):
    body = f"""
command.begin("{ADVICE}")
command.interrupts.holding = {deferred}
try:
    while command.interrupts.received is None:
        print("working")
    print("more")
finally:
    sys.stdout.write("half a line, for the flush at exit")
"""
    script = command_script(tmp_path, body)
    leader, terminal = pty.fork()
    if leader == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.environ["PYTHONPATH"] = str(SUITE)
            os.environ.pop("PYTHONUNBUFFERED", None)
            os.execv(sys.executable, [sys.executable, str(script)])
        finally:
            os._exit(127)
    assert b"working" in os.read(terminal, 100)
    os.close(terminal)
    _, status = os.waitpid(leader, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP


def test_only_rank_0_gives_advice_and_every_rank_reports(tmp_path):
    for rank in (0, 1):
        body = f"command.ranks = Ranks({rank}, 2)\ncommand.ranks._error_file = '{tmp_path}/error'\n"
        status, error = ended(tmp_path, body + f"command.begin('{ADVICE}')\nraise OwnError('bad')")
        assert (status, error) == (1, "\nerror: bad\n" + f"{ADVICE}\n" * (rank == 0))
        assert "error: bad" in (tmp_path / "error").read_text()


def test_a_rank_that_ends_because_of_another_says_so_only_after_the_start(tmp_path):
    body = "command.ranks.give_way = lambda: print('gave way', file=sys.stderr)\n"
    assert ended(tmp_path, f"{body}raise RankError('gone')") == (2, "gave way\n")
    body += f"command.begin('{ADVICE}')\n"
    assert ended(tmp_path, f"{body}raise RankError('gone')") == (1, f"\nerror: gone\n{ADVICE}\ngave way\n")


# The scripts


def wait(process, reached) -> None:
    """Wait until `reached` holds, while the process runs."""
    while not reached():
        with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
            process.wait(timeout=0.05)


def is_read(pipe: Path) -> bool:
    """Whether a process has opened the named pipe; it then waits for what nobody writes."""
    try:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # stays open to the end of the tests
        return True
    except OSError:
        return False


TINY = {"group_size": 4, "groups_per_step": 3, "max_prompt_tokens": 64, "max_tokens": 16, "lora_rank": 8}


def train_flags(base, problems, **flags) -> list[object]:
    flags = TINY | {"base_model": base, "data": problems, "run_name": "t", "swanlab_mode": "disabled"} | flags
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]


def eval_flags(base, problems, *flags) -> list[object]:
    small = ["--val-n", 4, "--max-num-seqs", 4, "--max-tokens", 40, "--max-prompt-tokens", 128]
    return ["--base-model", base, "--dataset-path", problems, *small, *flags]


WAITING = {
    "analyse.py": (["--result-dir", "."], "base.jsonl"),
    "compare.py": (["--runs", ".", "."], "config.json"),
    "prepare_data.py": (["--aime25", "aime25.jsonl"], "aime25.jsonl"),
}
"""Flags, and the file that the script reads first."""


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("script", WAITING)
def test_a_signal_ends_a_script_that_reads(tmp_path, script, signum):
    flags, name = WAITING[script]
    os.mkfifo(tmp_path / name)
    process = start(SUITE / script, *flags, cwd=tmp_path)
    wait(process, lambda: is_read(tmp_path / name))
    process.send_signal(signum)
    _, error = process.communicate()
    assert process.returncode == 128 + signum
    assert error.endswith("\ninterrupted\nbefore the start; nothing is lost\n")
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_training_with_the_last_step_saved(tmp_path, tiny_base, tiny_problems, signum):
    flags = train_flags(tiny_base, tiny_problems, max_steps=500, save_every=500)
    process = start(SUITE / "train.py", *flags, cwd=tmp_path)
    run = Run(tmp_path / "runs/t")
    wait(process, lambda: run.has_begun)
    process.send_signal(signum)
    _, error = process.communicate()
    assert process.returncode == 128 + signum
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("continue from the newest checkpoint: python ")
    assert list(run.checkpoints) == [run.metrics_path.read_bytes().count(b"\n")]


@pytest.mark.slow
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_an_evaluation_with_whole_lines(tmp_path, tiny_base, tiny_problems, signum):
    process = start(SUITE / "eval.py", *eval_flags(tiny_base, tiny_problems), cwd=tmp_path)
    output = tmp_path / "runs/eval/base.jsonl"
    wait(process, lambda: output.exists() and output.read_bytes().count(b"\n") > 2)
    process.send_signal(signum)
    _, error = process.communicate()
    assert process.returncode == 128 + signum
    assert "Traceback" not in error
    assert error.endswith("\ninterrupted\nthe same command goes on with the problems that are left\n")
    assert 2 <= len(read_evaluation(output).problems) < 100


@pytest.mark.slow
@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("while_training", [False, True])
def test_a_signal_ends_the_miniature_and_its_running_script_once(tmp_path, tiny_base, signum, while_training):
    run = Run(tmp_path / "runs/tiny")
    if while_training:
        shutil.copytree(tiny_base, run.folder / "base")
    process = start(SUITE / "tiny.py", "--steps", 500, cwd=tmp_path)
    if while_training:
        wait(process, lambda: run.has_begun)
    else:
        said = b""
        while b"teaching the base" not in said:
            said += (chunk := os.read(process.stderr.fileno(), 1000))
            assert chunk, said.decode()
    process.send_signal(signum)
    _, error = process.communicate()
    assert process.returncode == 128 + signum
    assert "Traceback" not in error
    assert error.endswith("\ninterrupted\nthe same command continues\n")
    if while_training:
        assert error.count("continue from the newest checkpoint") == 1
        assert list(run.checkpoints)[-1] == run.metrics_path.read_bytes().count(b"\n")


def test_bad_input_ends_every_script_with_one_sentence_and_status_2(tmp_path, tiny_base, tiny_problems):
    ends = {
        "train.py": (train_flags(tiny_base, "none.jsonl"), "the data file none.jsonl does not exist"),
        "eval.py": (["--dataset-path", "none.jsonl"], "there is no data set none.jsonl"),
        "tiny.py": (["--steps", 0], "steps is 0; it must be at least 1"),
        "analyse.py": ([], "there is no finished evaluation in runs/eval"),
        "compare.py": (["--runs", "."], "config.json cannot be read"),
        "prepare_data.py": (["--raw", "none.parquet"], "there is no file none.parquet"),
    }
    for script, (flags, sentence) in ends.items():
        process = start(SUITE / script, *flags, cwd=tmp_path)
        _, error = process.communicate()
        assert (script, process.returncode) == (script, 2)
        assert sentence in error
        assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.fixture
def in_the_way(tmp_path, tiny_base, tiny_problems) -> dict[str, tuple[str, list[object]]]:
    """For each script, a file where it makes a folder or a folder (with "/") where it writes a file; its flags."""
    run = write_metrics(tmp_path / "run", 3)
    runs = [shutil.copytree(run, tmp_path / name) for name in ("gspo", "grpo")]
    for folder in runs:
        settings = {"loss": {"algorithm": folder.name}, "seed": 1, "data_seed": None, "run_name": folder.name}
        record = {"format": FORMAT, "settings": settings, "data": {"sha256": "d"}, "base_fingerprint": "b"}
        (folder / "config.json").write_text(json.dumps(record))
    shutil.copytree(tiny_base, tmp_path / "runs/tiny/base")
    write_parquet(tmp_path / "raw.parquet", sums(3))
    write_aime25(tmp_path / "aime25.jsonl")
    return {
        "eval.py": ("file", eval_flags(tiny_base, tiny_problems, "--output", "file/out.jsonl")),
        "tiny.py": ("runs/tiny/data", []),
        "analyse.py": ("run/figures/results-training.png/", ["--runs", run]),
        "compare.py": ("compare.png/", ["--runs", *runs, "--output", "compare.png"]),
        "prepare_data.py": (
            "datasets/train.jsonl/",
            ["--raw", "raw.parquet", "--aime25", "aime25.jsonl", "--dev-size", 1],
        ),
        "train.py": ("runs/t/rollouts", train_flags(tiny_base, tiny_problems)),
    }


@pytest.mark.parametrize(
    "script",
    [
        "eval.py",
        "tiny.py",
        "analyse.py",
        "compare.py",
        "prepare_data.py",
        pytest.param("train.py", marks=pytest.mark.slow),
    ],
)
def test_a_fault_after_the_start_is_one_sentence_with_advice_and_status_1(tmp_path, in_the_way, script):
    obstacle, flags = in_the_way[script]
    path = tmp_path / obstacle
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if obstacle.endswith("/") else path.touch()
    process = start(SUITE / script, *flags, cwd=tmp_path)
    _, error = process.communicate()
    assert process.returncode == 1, error
    assert "Traceback" not in error
    *_, sentence, advice = [line for line in error.splitlines() if line and not line.startswith("in step")]
    assert sentence.startswith("error: ")
    assert "cannot be written" in sentence
    assert "the same command" in advice or "nothing is lost" in advice
