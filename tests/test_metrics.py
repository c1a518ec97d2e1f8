"""What a step reports, against numbers worked by hand, and where it goes."""

import json
import math
import resource
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from engine.gate import GateReading
from engine.policy import SequenceOutput, TrainOutput
from loss import MismatchWeight
from record.disk import DiskError
from record.log import MetricsLog, alarms
from record.metrics import TimeMetrics, step_metrics
from record.run import Run

SUITE = Path(__file__).parent.parent
SETTINGS = {"seed": 1, "swanlab_mode": "disabled", "swanlab_project": "gspo", "swanlab_workspace": None}
TIME = TimeMetrics(
    sync_seconds=0.5,
    rollout_seconds=2.0,
    grading_seconds=0.1,
    gate_seconds=0.0,
    update_seconds=1.0,
    checkpoint_seconds=0.25,
    step_seconds=3.75,
)


def output(log_ratios, *, clipped, mismatch=None):
    log_ratios = torch.tensor(log_ratios)
    mismatch = log_ratios if mismatch is None else torch.tensor(mismatch)
    return TrainOutput(
        loss=0.5,
        grad_norm=2.0,
        padding_fraction=0.125,
        sequences=SequenceOutput(
            losses=torch.tensor([0.2, 0.3]),
            advantages=torch.tensor([1.5, -0.5, -0.5]),
            num_tokens=torch.tensor([10, 20, 30]),
            num_clipped_tokens=torch.tensor(clipped),
            log_ratios=log_ratios,
            mismatch_log_ratios=mismatch,
            update_log_ratios=log_ratios - mismatch,
            mismatches=torch.tensor([0.1, -0.1, 0.0, 0.2]),
            entropies=torch.tensor([1.0, 3.0]),
        ),
    )


def metrics_of(step, groups, outputs, *, mismatch_weight: MismatchWeight = "none"):
    return step_metrics(
        step,
        groups,
        outputs,
        GateReading(),
        TIME,
        problems_taken=16 * step,
        learning_rate=4e-5,
        mismatch_weight=mismatch_weight,
    )


def open_log(folder, *, after_step=0, swanlab_id=None, mode="disabled"):
    settings = SETTINGS | {"swanlab_mode": mode}
    return MetricsLog(Run(folder), after_step=after_step, swanlab_id=swanlab_id, settings=settings)


def test_a_steps_numbers_equal_those_worked_by_hand(make_group):
    groups = [make_group([1, 0, 0], lengths=[10, 20, 30]), make_group([1, 1, 1], lengths=[1, 2, 57], seed=1)]
    flat = metrics_of(7, groups, [output([0.1, -0.2, 0.4], clipped=[0, 20, 15])]).flat()
    surprisals = [-logprob for group in groups for c in group.completions for logprob in c.logprobs]
    expected = {
        "step": 7,
        "reward/base_mean": 4 / 6,
        "reward/shaped_mean": 4 / 6,
        "reward/accuracy": 4 / 6,
        "reward/format_rate": 4 / 6,
        "verdict/correct": 4,
        "verdict/no_box": 2,
        "rollout/groups": 2,
        "rollout/train_groups": 1,
        "rollout/degenerate_groups": 1,
        "rollout/completions": 6,
        "rollout/train_completions": 3,
        "rollout/completion_tokens": 120,
        "rollout/mean_completion_tokens": 20.0,
        "rollout/max_completion_tokens": 57,
        "rollout/mean_sampled_token_surprisal": sum(surprisals) / 120,
        "rollout/unique_completion_rate": 1 / 3,
        "rollout/mean_prompt_tokens": 5.0,
        "rollout/truncated_fraction": 0.0,
        "train/datums": 3,
        "train/data_cursor_consumed": 112,
        "train/update_skipped": 0,
        "train/learning_rate": 4e-5,
        "gspo/loss": 0.5,
        "gspo/seq_ratio_mean": (math.exp(0.1) + math.exp(-0.2) + math.exp(0.4)) / 3,
        "gspo/sequence_clip_fraction": 1 / 6,
        "gspo/token_clip_fraction": 20 / 120,
        "gspo/train_sequences": 3,
        "gspo/normalization_sequences": 6,
        "gspo/active_sequence_fraction": 0.5,
        "gspo/train_tokens": 60,
        "gspo/normalization_tokens": 120,
        "gspo/active_token_fraction": 0.5,
        "update/optimizer_steps": 1,
        "update/grad_norm": 2.0,
        "update/entropy": 2.0,
        "update/sequence_clip_fraction": 1 / 3,
        "update/token_clip_fraction": 35 / 60,
        "update/padding_fraction": 0.125,
        "gap/token_mean": 0.1,
        "gap/token_max": 0.2,
        "gap/kl": (math.exp(0.1) + math.exp(-0.1) + 1 + math.exp(0.2) - 4 - 0.2) / 4,
        "positive/train_sequences": 1,
        "positive/clip_fraction": 0.0,
        "positive/log_ratio_mean": 0.1,
        "negative/train_sequences": 2,
        "negative/clip_fraction": 0.5,
        "negative/log_ratio_mean": 0.1,
        "negative/log_ratio_std": 0.3,
        "negative/update_log_ratio_mean": 0.0,
        "time/checkpoint_seconds": 0.25,
        "time/step_seconds": 3.75,
    }
    assert {key: flat[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert not any(key.startswith("mini_batch") for key in flat)


def test_log_ratios_are_split_into_the_engines_mismatch_and_the_policys_movement(make_group):
    steps = [
        output([0.1, -0.2, 0.4], clipped=[0, 0, 0]),
        output([0.3, 0.0, 0.0], clipped=[10, 0, 0], mismatch=[0.1, -0.2, 0.4]),
    ]
    flat = metrics_of(1, [make_group([1, 0, 0])] * 2, steps).flat()
    assert flat["positive/engine_log_ratio_mean"] == pytest.approx(0.1)
    assert flat["positive/update_log_ratio_mean"] == pytest.approx(0.1)  # 0 and 0.2
    assert flat["negative/update_log_ratio_mean"] == pytest.approx(-0.05)  # 0, 0, 0.2 and -0.4
    assert flat["mini_batch/2/sequence_clip_fraction"] == pytest.approx(1 / 3)
    assert flat["update/optimizer_steps"] == 2


def test_a_step_in_which_nothing_was_trained_says_so(make_group):
    metrics = metrics_of(3, [make_group([0, 0])], [])
    flat = metrics.flat()
    assert not any(key.startswith("gspo") for key in flat)
    assert flat["update/grad_norm"] is flat["gap/kl"] is flat["positive/clip_fraction"] is None
    assert (flat["train/update_skipped"], flat["update/optimizer_steps"]) == (1, 0)
    assert (flat["train/datums"], flat["rollout/train_completions"], flat["rollout/completions"]) == (0, 0, 2)
    assert "skipped: every group was degenerate" in metrics.summary()


@pytest.mark.parametrize(
    ("kind", "mean", "truncated"),
    [
        ("none", None, None),
        ("token", (math.exp(0.1) + math.exp(-0.1) + 1 + math.exp(0.2)) / 4, 0),
        ("sequence", (math.exp(0.1) + math.exp(-0.2) + 2) / 3, 1 / 3),
    ],
)
def test_mismatch_weights_are_logged_and_an_average_far_from_1_is_an_alarm(make_group, kind, mean, truncated):
    update = output([0.1, -0.2, 0.9], clipped=[0, 0, 0])
    metrics = metrics_of(1, [make_group([1, 0, 0])], [update], mismatch_weight=kind)
    expected = (mean and pytest.approx(mean, rel=1e-6), truncated and pytest.approx(truncated))
    assert (metrics.mismatch.weight_mean, metrics.mismatch.truncated_fraction) == expected
    assert any("mismatch weights average 1.31" in alarm for alarm in alarms([metrics])) == (kind == "sequence")


def test_the_log_keeps_one_line_a_step_and_archives_what_a_resumed_run_writes_again(make_group, tmp_path):
    def write(after_step, steps):
        with open_log(tmp_path, after_step=after_step) as log:
            for step in steps:
                log.write(metrics_of(step, [make_group([1, 0, 0])], []))

    write(0, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    write(2, [3, 4])
    write(1, [2, 3])

    def steps(path):
        return [json.loads(line)["step"] for line in (tmp_path / path).read_text().splitlines()]

    assert steps("metrics.jsonl") == [1, 2, 3]
    assert steps("replaced/metrics.jsonl") == [3, 2, 3, 4]


def test_completions_that_could_not_be_graded_are_a_warning_not_a_wrong_answer(make_group, tmp_path, capfd):
    metrics = metrics_of(1, [make_group([1] + [0] * 7)], [])
    hung = replace(metrics, verdict=replace(metrics.verdict, timeout=1))
    with open_log(tmp_path) as log:
        log.write(metrics)
        log.show()
        assert "could not be graded" not in capfd.readouterr().out
        log.write(hung)
        log.show()
        assert "1 of 8 completions could not be graded (timeout 1, crash 0)" in capfd.readouterr().out


def steps_like(make_group, *rewards, **rollout):
    """Return one StepMetrics for each list of rewards; a step trains when they differ."""
    steps = []
    for number, step_rewards in enumerate(rewards, start=1):
        degenerate = len(set(step_rewards)) == 1
        updates = [] if degenerate else [output([0.0, 0.0, 0.0], clipped=[0, 0, 0])]
        metrics = metrics_of(number, [make_group(step_rewards)], updates)
        steps.append(replace(metrics, rollout=replace(metrics.rollout, **rollout)))
    return steps


def sounded(steps):
    """Return the alarms of each step of a run, in order."""
    return [alarms(steps[: number + 1]) for number in range(len(steps))]


def test_alarms_sound_once_when_what_they_warn_of_has_lasted(make_group):
    fine, wrong, right = [1, 0], [0, 0], [1, 1]
    assert sounded(steps_like(make_group, fine, right, fine, right, right, fine)) == [[]] * 6
    found = sounded(steps_like(make_group, fine, *[wrong] * 7))
    assert [len(step) for step in found] == [0, 1, 0, 1, 0, 1, 0, 0]
    assert "no completion has a whole \\boxed{}" in found[1][0]
    assert "every group has been degenerate for 3 steps" in found[3][0]
    assert "no completion has been right for 5 steps" in found[5][0]
    assert len(sounded(steps_like(make_group, wrong, fine, wrong))[2]) == 1  # again, after a pause
    cut = sounded(steps_like(make_group, fine, fine, truncated_fraction=1.0))
    assert [len(step) for step in cut] == [1, 0]
    assert "cut off at max_tokens" in cut[0][0]


def test_a_number_that_is_not_finite_is_a_warning_and_null_in_the_file(make_group, tmp_path, capfd):
    (metrics,) = steps_like(make_group, [1, 0])
    with open_log(tmp_path) as log:
        log.write(replace(metrics, update=replace(metrics.update, entropy=math.inf)))
        log.show()
    assert "warning: not a finite number: update/entropy" in capfd.readouterr().out
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["update/entropy"] is None


def test_a_line_that_does_not_fit_on_the_disk_is_written_whole_or_not_at_all(make_group, tmp_path):
    (metrics,) = steps_like(make_group, [1, 0])
    with open_log(tmp_path) as log:
        log.write(metrics)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, unlimited[1]))
        try:
            with pytest.raises(DiskError, match=r"metrics\.jsonl cannot be written"):
                log.write(metrics)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size


def test_without_a_login_swanlab_records_offline_with_one_line_of_notice(make_group, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_log(tmp_path, mode="online") as log:
        log.write(metrics_of(1, [make_group([1, 0, 0])], []))
        assert log.swanlab_id
    assert capfd.readouterr().out.count("SwanLab is not reachable") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert any((tmp_path / "swanlog").iterdir())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SWANLAB_PORT = free_port()  # SwanLab remembers it for as long as a process lives


@pytest.fixture
def swanlab_server(monkeypatch, tmp_path):
    """Return a server that answers SwanLab well enough for a run, and remembers what was asked of it."""
    counts = {"experiments": 1, "contributors": 1, "children": 1, "collaborators": 1}
    user, date = {"username": "u", "name": "u"}, "2030-01-01T00:00:00.000Z"
    answer = {
        "sid": "s",
        "expiredAt": date,
        "userInfo": user,
        "username": "u",
        "name": "gspo",
        "cuid": "c",
        "slug": "s",
    }
    answer |= {"path": "u/gspo", "_count": counts, "group": user, "createdAt": date, "visibility": "PRIVATE"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            self.server.requests.append((self.path, body.decode()))  # pyright: ignore[reportAttributeAccessIssue]
            reply = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_PUT = do_POST  # noqa: N815

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", SWANLAB_PORT), Handler)
    server.requests = []  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("SWANLAB_API_HOST", "SWANLAB_WEB_HOST"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{SWANLAB_PORT}")
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield server
    server.shutdown()
    server.server_close()


def test_an_interrupted_run_is_closed_as_such_and_continues_under_its_id(tmp_path, swanlab_server):
    def interrupted(swanlab_id):
        with open_log(tmp_path, mode="online", swanlab_id=swanlab_id) as log:
            used.append(log.swanlab_id)
            raise KeyboardInterrupt

    used = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(used[-1] if used else None)
        path, body = swanlab_server.requests[-1]
        assert path.endswith("/state")
        assert json.loads(body)["state"] == "ABORTED"
    assert used[0] == used[1]


def test_a_server_that_goes_away_costs_neither_the_run_nor_more_than_a_minute(tmp_path, swanlab_server):
    script = f"""
import pathlib, sys
sys.path.insert(0, {str(SUITE)!r})
import record.mirror
from record.log import MetricsLog
from record.run import Run
record.mirror.FINISH_SECONDS = 2
run = Run(pathlib.Path({str(tmp_path)!r}))
with MetricsLog(run, after_step=0, swanlab_id=None, settings={SETTINGS | {"swanlab_mode": "online"}!r}) as log:
    print("online", log.swanlab_id, flush=True)
    input()
    log._mirror(lambda run: run.log({{"a": 1.0}}, step=1))
print("done")
"""
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as run:
        assert run.stdout
        while not (line := run.stdout.readline()).startswith("online"):
            assert line, "it never came online"
        swanlab_server.shutdown()
        swanlab_server.server_close()
        output, _ = run.communicate("\n", timeout=60)
    assert run.returncode == 0
    assert "SwanLab stopped (not uploaded within 2 s; `swanlab sync` does it later)" in output
    assert output.endswith("done\n")


def test_a_closed_port_at_the_start_means_offline(tmp_path, swanlab_server, capfd):
    swanlab_server.shutdown()
    swanlab_server.server_close()
    with open_log(tmp_path, mode="online") as log:
        assert log.swanlab_id
    assert "it records offline" in capfd.readouterr().out
