"""Matched runs, on metrics made by hand."""

import json

import numpy as np
import pytest

from compare import compare_figure, compare_text, paired_difference, read_matched_runs


@pytest.fixture
def make_run(tmp_path):
    def make(algorithm, seed, *, reward=0.5, steps=20, name=None, learning_rate=1e-3):
        folder = tmp_path / (name or f"{algorithm}-{seed}")
        folder.mkdir()
        settings = {
            "policy": {"learning_rate": learning_rate},
            "loss": {"algorithm": algorithm},
            "seed": seed,
            "run_name": folder.name,
        }
        record = {"settings": settings, "data": {"sha256": "d"}, "base_fingerprint": "b"}
        (folder / "config.json").write_text(json.dumps(record))
        keys = ["reward/accuracy", "reward/format_rate", "rollout/completion_tokens", "gspo/token_clip_fraction"]
        lines = [{"step": step} | dict.fromkeys(keys, reward) for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


def test_the_interval_is_students_t_over_the_pairs():
    change = paired_difference([0.5, 0.6, 0.7], [0.6, 0.8, 1.0])  # differences .1 .2 .3: mean .2, sd .1
    arm = 4.302653 * 0.1 / np.sqrt(3)
    assert (change.value, change.low, change.high) == pytest.approx((0.2, 0.2 - arm, 0.2 + arm), abs=1e-6)


def test_a_difference_larger_than_seed_noise_is_called_one_and_a_smaller_is_not(make_run):
    rewards = {"gspo": (0.50, 0.52, 0.54), "grpo": (0.70, 0.73, 0.74), "dapo": (0.60, 0.45, 0.56)}
    folders = [make_run(name, seed, reward=r) for name, row in rewards.items() for seed, r in enumerate(row)]
    runs = read_matched_runs(folders)
    text = compare_text(runs)
    assert "+20.3 points in training reward over the last 10 steps (grpo minus gspo, 3 matched seeds" in text
    assert text.count("exceeds seed noise on this model, data and budget") == 1
    assert "does not exceed seed noise. That does not show the algorithms to be equal" in text
    assert len(compare_figure(runs).axes) == 4


def test_one_pair_supports_nothing(make_run):
    runs = read_matched_runs([make_run("gspo", 1, reward=0.2), make_run("grpo", 1, reward=0.9)])
    assert "nothing can be concluded" in compare_text(runs)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"algorithm": "grpo", "seed": 1, "learning_rate": 2e-3}, "do not match: they differ in policy"),
        ({"algorithm": "grpo", "seed": 1, "steps": 19}, "they differ in steps taken"),
        ({"algorithm": "grpo", "seed": 2}, "each algorithm needs one run of each seed"),
        ({"algorithm": "gspo", "seed": 2}, "runs of at least two algorithms"),
    ],
)
def test_runs_that_do_not_match_are_refused(make_run, second, message):
    with pytest.raises(ValueError, match=message):
        read_matched_runs([make_run("gspo", 1, name="first"), make_run(**second, name="second")])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run"):
        read_matched_runs([tmp_path])
