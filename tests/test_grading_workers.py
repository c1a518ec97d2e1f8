"""The processes that compare: nothing that hangs, nothing left behind, and every calling context."""

import asyncio
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading import workers
from grading.answers import MAX_CHARS, decide
from grading.extraction import complete_boxes, find_answer
from reward import Grader

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 10.0


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(deadline_seconds=DEADLINE) as grader:
        yield grader


def boxed(answer: str) -> str:
    return rf"Adding up, I get \boxed{{{answer}}}."


def last_boxed(text: str) -> str | None:
    return find_answer(text, *complete_boxes(text))[0]


def children() -> set[int]:
    """Process ids of this process's children, zombies too."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == os.getpid():
            pids.add(int(stat.parent.name))
    return pids


# ---- Hostile text ----

FRAGMENTS = [*"0123456789.,'{}()[]^_/*+-=<>! \n$&%|\\:;?eé½²", r"\boxed{", r"\frac{", r"\text{", r"\sqrt", r"\quad"]
FRAGMENTS += [
    r"\equiv",
    r"\approx",
    r"\left",
    r"\overline{",
    r"\mathrm{",
    r"\{",
    "}{",
    "mod",
    "answer is ",
    "个",
    "🎉",
]
FRAGMENTS += ["apples", "\ud800", "\u202e", "\x00", "שלום", "<think>", "</think>", r"\\", r"\pm", " or ", "seven"]


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text: str):
    last_boxed(text)
    decide(text, "73")


@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=1000 * (DEADLINE + 1))
def test_no_mixture_of_mathematics_raises_or_hangs(pool: list[str], data: st.DataObject):
    text = "".join(data.draw(st.lists(st.sampled_from(pool), max_size=400)))
    last_boxed(text)
    decide(text[:MAX_CHARS], "73")
    decide("73", text)


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "\\\\boxed{",
        "\\boxed ",
        "\\boxed{}",
        "\\boxed{7}",
        "\\boxed{{",
        "<think>",
        "</think>",
        " ",
    ],
)
def test_a_megabyte_of_anything_is_read_once(grader: Grader, piece: str):
    text = piece * (2**20 // len(piece))
    start = time.monotonic()
    assert grader.score(text + r" \boxed{8", "8").verdict == "unclosed"
    assert grader.score(r"\boxed{7}" + text, "8").reward == 0
    assert time.monotonic() - start < DEADLINE + 1


GATED = [
    "10^{10^{10}}", "9^{9^{9^9}}", "1000000000!", "73!!", r"e^{e^{e^{37.0}}}", r"\sqrt{10^{9999}}", "2^2^2^2^2",
    "7" * 5000, "7" * 900, "1e999999999", "(" * 300 + ")" * 300, r"\sqrt{" * 200 + "2" + "}" * 200, "|" * 80,
    r"\frac{1}{" * 60 + "2" + "}" * 60, "73 answer " * 90, r"4^{\frac{111111111111111111111}{2222222222222}}",
    "$1$ or " * 100, r"\prod_{k=1}^{100000000} k", "\ud800", "🎉" * 900, r"\int_0^1 \sin(\cos(\tan(x^{x^x}))) dx",
    r"\\quad" * 150 + "x", r"\begin{pmatrix}" + " & ".join("9" * 60) + r"\end{pmatrix}^{-1}",
]  # fmt: skip
SLOW = [r"\sin(" * 10 + "1" + ")" * 10, r"(\sqrt{2}+\sqrt{3})^{9999}", r"\binom{10^9}{10^8}"]  # past the gate
HOSTILE = [*[GATED[i % len(GATED)] for i in range(294)], *SLOW, *SLOW]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_300_hostile_strings_leave_nothing_behind():
    before = children()
    with Grader(deadline_seconds=1.0) as grader:
        gc.collect()
        memory = resident_bytes(os.getpid())
        scores = grader.score_many([(boxed(answer), "73") for answer in HOSTILE])
        assert {score.reward for score in scores} == {0}
        assert "timeout" in {score.verdict for score in scores}  # some do get through to the deadline
        assert grader.score(boxed(r"\frac{\sqrt{8}}{2}"), r"\sqrt{2}").correct
        assert grader.score(boxed("73"), "73").correct
        assert len(children() - before) == 2
        gc.collect()
        assert resident_bytes(os.getpid()) - memory < 20e6
        assert all(resident_bytes(pid) < 400e6 for pid in children() - before)
    assert children() == before


def test_a_worker_that_hangs_or_dies_is_replaced_and_named():
    slow = r"\binom{10^9}{10^8}"
    with Grader(num_workers=1, deadline_seconds=1.0) as grader:
        first = children()
        assert grader.score(boxed(slow), "73").verdict == "timeout"
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "correct"
        second = children()
        assert len(second) == len(first)
        assert second != first
        os.kill((second - first).pop(), signal.SIGKILL)
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "crash"
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "correct"


def test_workers_are_recycled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_MAX_TASKS", 3)
    with Grader(num_workers=1) as grader:
        first = children()
        assert {grader.score(boxed(r"\sqrt{4}"), "2").verdict for _ in range(4)} == {"correct"}
        assert children() != first


# ---- Where it is called from ----


def test_a_grader_that_cannot_tell_right_from_wrong_refuses_to_start(monkeypatch: pytest.MonkeyPatch):
    before = children()
    monkeypatch.setattr(workers.Worker, "compare", lambda *_: "wrong")
    with pytest.raises(RuntimeError, match="self-test"), Grader():
        pass
    assert children() == before


def test_outside_its_block_a_grader_says_so():
    with pytest.raises(RuntimeError, match="with Grader"):
        Grader().score(boxed(r"\sqrt{4}"), "2")


PAIRS = [(boxed("73"), "73"), (boxed(r"\sqrt{16}"), "4"), (boxed(r"\sqrt{16}"), "5"), ("none", "5")]
VERDICTS = ["correct", "correct", "wrong", "no_box"]


def verdicts(grader: Grader) -> list[str]:
    return [score.verdict for score in grader.score_many(PAIRS)]


def test_it_works_on_a_worker_thread_and_started_there():
    found = []

    def work():
        with Grader() as grader:
            found.extend(verdicts(grader))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == VERDICTS


def test_many_threads_may_share_it(grader: Grader):
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(verdicts(grader))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [VERDICTS] * 8


def test_it_works_inside_asyncio():
    async def work():
        with Grader() as grader:
            here = verdicts(grader)
            return here, *await asyncio.gather(*[asyncio.to_thread(verdicts, grader) for _ in range(3)])

    assert asyncio.run(work()) == (VERDICTS,) * 4


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "main_script.py"
    path.write_text(f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom reward import Grader\n{body}")
    return path


def test_it_works_under_torchrun_and_workers_do_not_run_the_main_script(tmp_path: Path):
    # Unguarded on purpose: a worker that imported the main script would start graders without end.
    body = f"""open(r"{tmp_path}/runs", "a").write("run\\n")
with Grader(num_workers=1) as grader:
    found = [score.verdict for score in grader.score_many({PAIRS!r})]
open(rf"{tmp_path}/{{os.environ['RANK']}}", "w").write(" ".join(found))
"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, script(tmp_path, body)], check=True, capture_output=True, timeout=120)
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [VERDICTS] * 2
    assert (tmp_path / "runs").read_text() == "run\n" * 2


def start_and_list_workers(tmp_path: Path, busy: bool) -> tuple[subprocess.Popen[str], list[int], int]:
    """Return a process that grades, its workers, and a child that it forked, which holds all its pipes open."""
    slow = r"\boxed{\binom{10^9}{10^8}}"
    body = f"""import signal
with Grader() as grader:
    engine = os.fork()
    if engine == 0:
        os.closerange(0, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pause()
    print(engine, *[worker.process.pid for worker in grader._workers.running], flush=True)
    while {busy}:
        grader.score_many([({slow!r}, "73")] * 50)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    engine, *workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers, engine


def gone(pid: int, seconds: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, busy: bool):
    process, workers, engine = start_and_list_workers(tmp_path, busy)
    process.kill()
    process.communicate()
    try:
        assert all(gone(pid, 2 * DEADLINE) for pid in workers)
    finally:
        os.kill(engine, signal.SIGKILL)


def test_ctrl_c_ends_grading_at_once_and_the_workers_too(tmp_path: Path):
    process, workers, engine = start_and_list_workers(tmp_path, busy=True)
    os.killpg(process.pid, signal.SIGINT)
    start = time.monotonic()
    _, error = process.communicate(timeout=60)
    os.kill(engine, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - start < DEADLINE + 1
    assert error.count("\nKeyboardInterrupt\n") == 1  # the workers' own would confuse
    assert all(gone(pid, 1) for pid in workers)
