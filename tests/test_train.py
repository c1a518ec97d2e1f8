"""The loop with the real engines, and every kind of bad input as its user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train
from checkpoint import load_state, newest_good_checkpoint

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


def run_train(*arguments):
    command = [sys.executable, str(HERE / "train.py"), *map(str, arguments)]
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
    ],
)
def test_bad_settings_are_refused_in_one_sentence(in_folder, tiny_base, monkeypatch, capfd, flags, message):
    assert message in refusal(monkeypatch, capfd, *tiny_flags(tiny_base, **flags))
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
    (in_folder / "runs/file").write_text("")
    assert "runs/file" in refusal(monkeypatch, capfd, *tiny_flags(tiny_base, run_name="file"))
    assert "there is no run to resume in runs/new" in refusal(
        monkeypatch, capfd, *tiny_flags(tiny_base, run_name="new"), "--resume"
    )


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(in_folder, tiny_base, monkeypatch, capfd):
    """Three steps at once; then two, stop, one more: same metrics, same weights, to the bit."""
    whole = run_train(*tiny_flags(tiny_base, run_name="whole"))
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "step    3  reward" in whole.stdout
    first = run_train(*tiny_flags(tiny_base, run_name="parts", max_steps=2))
    assert first.returncode == 0, first.stderr[-2000:]
    with Path("runs/parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half')  # what a kill leaves
    second = run_train(*tiny_flags(tiny_base, run_name="parts"), "--resume")
    assert second.returncode == 0, second.stderr[-2000:]

    def metrics(name):
        lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]

    assert metrics("whole") == metrics("parts")
    assert [line["step"] for line in metrics("whole")] == [1, 2, 3]
    assert all(line["gspo/normalization_sequences"] == 12 for line in metrics("whole"))
    assert all(line["gap/token_mean"] < 0.01 for line in metrics("whole") if line["gspo/train_sequences"])
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
