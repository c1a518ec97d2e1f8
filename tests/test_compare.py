"""Matched runs, on metrics made by hand."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from compare import compare_text, paired_difference, read_matched_runs
from engine.sampler import SamplingConfig
from stats.evaluations import EvalHeader, Generation, ProblemResult
from stats.figures import comparison_figure


@pytest.fixture
def make_run(tmp_path):
    def make(algorithm, seed, *, reward=0.5, steps=20, name=None, learning_rate=1e-3, loss=None, settings=None):
        folder = tmp_path / (name or f"{algorithm}-{seed}")
        folder.mkdir()
        own = {
            "policy": {"learning_rate": learning_rate},
            "loss": {"algorithm": algorithm} | (loss or {}),
            "seed": seed,
            "data_seed": None,
            "run_name": folder.name,
        }
        record = {"format": 2, "settings": own | (settings or {}), "data": {"sha256": "d"}, "base_fingerprint": "b"}
        (folder / "config.json").write_text(json.dumps(record))
        keys = ["reward/accuracy", "reward/format_rate"]
        keys += ["rollout/mean_completion_tokens", "update/token_clip_fraction"]
        lines = [{"step": step} | dict.fromkeys(keys, reward) for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


def figure_of(runs):
    return comparison_figure({name: [run.metrics for run in group] for name, group in runs.items()})


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
    assert len(figure_of(runs).axes) == 4


def test_one_pair_supports_nothing(make_run):
    runs = read_matched_runs([make_run("gspo", 1, reward=0.2), make_run("grpo", 1, reward=0.9)])
    assert "nothing can be concluded" in compare_text(runs)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"algorithm": "grpo", "seed": 1, "learning_rate": 2e-3},
            "do not match: they differ in policy/learning_rate",
        ),
        ({"algorithm": "grpo", "seed": 1, "steps": 19}, "they differ in steps taken"),
        ({"algorithm": "grpo", "seed": 2}, "each algorithm needs one run of each pair of seed and data seed"),
        ({"algorithm": "gspo", "seed": 2}, "at least two objectives; these are all gspo"),
    ],
)
def test_runs_that_do_not_match_are_refused(make_run, second, message):
    with pytest.raises(ValueError, match=message):
        read_matched_runs([make_run("gspo", 1, name="first"), make_run(**second, name="second")])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        read_matched_runs([tmp_path])


def evaluate_by_hand(run, step, num_correct, *, num_problems=5, finished=None, max_tokens=32):
    """Write an evaluation of a run's checkpoint in which so many of the problems were answered right."""
    header = EvalHeader(
        suite_version="0", engine="none", label=f"step-{step:06d}", step=step, repeat=1, seed=0, base_model="b",
        revision=None, base_fingerprint="b", adapter_sha256="a", dataset="test.jsonl",
        dataset_sha256=str(num_problems), problem_ids=tuple(map(str, range(num_problems))), problems_per_block=8,
        sampling=SamplingConfig(group_size=1, max_tokens=max_tokens),
    )  # fmt: skip
    lines = [asdict(header)]
    for number in range(num_problems if finished is None else finished):
        right = number < num_correct
        generation = Generation(
            answer="1", verdict="correct" if right else "wrong", correct=right, formatted=True,
            completion_tokens=3, finish_reason="stop", text="",
        )  # fmt: skip
        lines.append(asdict(ProblemResult(id=str(number), reference="1", generations=(generation,))))
    (run / "eval").mkdir(exist_ok=True)
    path = run / "eval" / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def four_runs(make_run):
    return [make_run(name, seed) for name in ("gspo", "grpo") for seed in (1, 2)]


def test_held_out_accuracy_is_compared_at_the_newest_step_that_all_have_finished(four_runs):
    for run, num_correct in zip(four_runs, (1, 2, 3, 5), strict=True):
        evaluate_by_hand(run, 10, num_correct)
    evaluate_by_hand(four_runs[0], 20, 5)
    evaluate_by_hand(four_runs[1], 20, 5, finished=3)
    evaluate_by_hand(four_runs[2], 20, 0, finished=0)
    text = compare_text(read_matched_runs(four_runs))
    assert (
        "| algorithm | seed | data seed | training reward over the last 10 steps | held-out accuracy at step 10 |"
        in text
    )
    assert "| grpo | 2 | 2 | 50.00% | 100.00% |" in text
    assert "+50.0 points in held-out accuracy at step 10 (grpo minus gspo, 2 matched seeds" in text


def test_without_a_step_in_common_held_out_accuracy_is_not_compared(four_runs):
    for number, run in enumerate(four_runs):
        evaluate_by_hand(run, 10 + number, 2)
    text = compare_text(read_matched_runs(four_runs))
    assert "No step has a finished evaluation in every run" in text
    assert "points in held-out" not in text


@pytest.mark.parametrize("other", [{"num_problems": 4}, {"max_tokens": 64}])
def test_evaluations_that_do_not_match_are_refused(four_runs, other):
    evaluate_by_hand(four_runs[0], 10, 2)
    evaluate_by_hand(four_runs[3], 10, 2, **other)
    for run in four_runs[1:3]:
        evaluate_by_hand(run, 10, 2)
    evaluate_by_hand(four_runs[1], 5, 2, num_problems=3)  # not compared
    with pytest.raises(ValueError, match=r"gspo-1 and .*grpo-2 cannot be compared: step 10 was evaluated on other"):
        compare_text(read_matched_runs(four_runs))


def test_pairs_without_a_spread_support_nothing(make_run):
    runs = [make_run(name, seed, reward=r) for name, r in (("gspo", 0.2), ("grpo", 0.9)) for seed in (1, 2, 3)]
    assert "nothing is known of seed noise" in compare_text(read_matched_runs(runs))


def test_variants_of_an_algorithm_are_compared_and_never_pooled(make_run):
    runs = [make_run("gspo", 1), make_run("gspo", 1, name="wide", loss={"epsilon_low": 0.1, "mini_batches": 4})]
    assert list(read_matched_runs(runs)) == ["gspo", "gspo, epsilon low 0.1, mini batches 4"]
    with pytest.raises(ValueError, match="each algorithm needs one run of each pair of seed and data seed"):
        read_matched_runs([*runs, make_run("gspo", 2)])
    same = make_run("gspo", 2, name="same", loss={"epsilon_low": 3e-4, "ratio": "sequence"})  # the algorithm's own
    with pytest.raises(ValueError, match="at least two objectives; these are all gspo"):
        read_matched_runs([runs[0], same])


def test_what_a_resumed_run_may_change_may_differ(make_run):
    runs = [make_run("gspo", 1), make_run("grpo", 1, settings={"resume_from": 2, "sampler_memory_fraction": 0.3})]
    assert len(read_matched_runs(runs)) == 2


def test_every_algorithm_gets_a_line_of_its_own(make_run):
    names = ("gspo", "gspo-token", "grpo", "dr-grpo", "dapo")
    figure = figure_of(read_matched_runs([make_run(name, 1) for name in names]))
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)


def test_seeds_that_share_the_problems_order_are_said_to(make_run):
    def runs(name, settings):
        return [make_run(a, s, name=f"{name}-{a}-{s}", settings=settings) for a in ("gspo", "grpo") for s in (1, 2)]

    shared, own = runs("shared", {"data_seed": 42}), runs("own", {})
    assert "All runs meet the same problems in the same order" in compare_text(read_matched_runs(shared))
    assert "A seed sets the order of the problems" in compare_text(read_matched_runs(own))
    with pytest.raises(ValueError, match="pair of seed and data seed"):
        read_matched_runs([shared[0], own[2]])
