"""The loop with the real engines, and every kind of bad input as its user meets it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from made_up import newest_good_checkpoint
from tiny_runs import run_train, tiny_flags

import train
from engine.sampler import Sampler
from record.checkpoint import load_state
from record.run import Run


def refusal(monkeypatch, capfd, *arguments):
    """Return the message with which train.py refuses its arguments, with exit status 2."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as refused:
        train.main()
    assert refused.value.code == 2
    output = capfd.readouterr()
    assert "Traceback" not in output.err
    return " ".join(output.err.replace("│", " ").split())


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
    monkeypatch.setattr("engine.sampler.find_spec", lambda name: None)
    assert "vLLM is not installed; run `make gpu`" in refusal(monkeypatch, capfd, *tiny_flags(tiny_base))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "question": "What', "train.jsonl, line 101: not JSON"),
        ('{"id": "x", "question": "", "answer": "1"}', "train.jsonl, line 101: question must be"),
        ('{"id": "x", "question": "Why?", "answer": " "}', "train.jsonl, line 101: answer must be"),
        (
            r'{"id": "x", "question": "Why?", "answer": "\\frac{1}{"}',
            "train.jsonl cannot be trained on: row 101, id x: no answer can match",
        ),
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
    with Run(Path("runs/t")).lock():
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
    for key in ("rollout/completions", "gspo/normalization_sequences"):
        assert all(line[key] == 12 for line in metrics("whole"))
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
