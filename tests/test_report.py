"""What must hold: the page's numbers are the evaluations', by hand; no sentence claims more than they support."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from estimates import Z95, drawing_error, pass_drawing_error
from report import PUBLISHED, Comparison, Measure, excludes_zero, measures, report_markdown, report_page
from results import EvalHeader, Evaluation, Generation, ProblemResult
from rollout import SamplingConfig

PICTURES = {name: f"{name}.png" for name in ("benchmark", "pass-at-k", "problems", "training")}


def evaluation(step: int, rights: list[int], *, repeat: int = 1, boxes: int = 12, tokens: int = 100) -> Evaluation:
    """30 problems x 12 in the chapter's setting: so many right on each problem, the first `boxes` boxed."""
    results = []
    for i, right in enumerate(rights):
        generations = tuple(
            Generation(
                answer="7" if j < right else "8" if j < boxes else None,
                verdict="correct" if j < right else "wrong" if j < boxes else "no_box",
                correct=j < right,
                formatted=j < max(boxes, right),
                completion_tokens=tokens + j,
                finish_reason="stop" if j < max(boxes, right) else "length",
                text="so it is",
            )
            for j in range(12)
        )
        results.append(ProblemResult(id=f"p{i}", reference="7", generations=generations))
    header = EvalHeader(
        suite_version="0.1.0",
        engine="vllm 1",
        label=f"step-{step:06d}" if step else "base",
        step=step,
        repeat=repeat,
        seed=42,
        base_model="Qwen/Qwen3.5-4B",
        revision=None,
        base_fingerprint="f",
        adapter_sha256=None,
        dataset="aime25.jsonl",
        dataset_sha256="d",
        problem_ids=tuple(result.id for result in results),
        problems_per_block=5,
        sampling=SamplingConfig(group_size=12, max_tokens=8192),
    )
    return Evaluation(header=header, problems=tuple(results))


BASE_RIGHTS = [0] * 10 + [3] * 5 + [6] * 5 + [9] * 5 + [12] * 5
BASE = evaluation(0, BASE_RIGHTS, boxes=6, tokens=6000)
AVERAGE, PASS, FORMAT, TOKENS = measures(12)


def another_base(*evaluations: Evaluation) -> list[Evaluation]:
    return [replace(e, header=replace(e.header, base_model="runs/tiny/base")) for e in evaluations]


def test_a_measure_is_the_mean_of_its_problems():
    assert_allclose(AVERAGE.per_problem(BASE), np.array(BASE_RIGHTS) / 12, rtol=1e-12)
    assert_allclose(PASS.per_problem(BASE), [0] * 10 + [1] * 20, rtol=1e-12)
    assert_allclose(FORMAT.per_problem(BASE), np.maximum(BASE_RIGHTS, 6) / 12, rtol=1e-12)
    assert_allclose(TOKENS.per_problem(BASE), 6005.5, rtol=1e-12)


def test_noise_against_a_published_cell_is_that_of_two_runs_of_our_kind():
    correct = BASE.table("correct")
    rate, theirs = correct.mean(), 148 / 360
    share = drawing_error(correct) ** 2 / (rate * (1 - rate) / 360)
    pooled = (rate + theirs) / 2
    assert_allclose(
        AVERAGE.null_error(BASE, theirs), math.sqrt(2 * share * pooled * (1 - pooled) / 360), rtol=1e-12
    )
    share = pass_drawing_error(correct) ** 2 / (2 / 3 * 1 / 3 / 30)
    pooled = (2 / 3 + 17 / 30) / 2
    assert_allclose(PASS.null_error(BASE, 17 / 30), math.sqrt(2 * share * pooled * (1 - pooled) / 30), rtol=1e-12)
    within = np.arange(12).var(ddof=1)
    assert_allclose(TOKENS.null_error(BASE, 6489.8), math.sqrt(2 * within / 12 / 30), rtol=1e-12)


def test_repeats_of_the_base_are_averaged_problem_by_problem():
    second = evaluation(0, BASE_RIGHTS[::-1], repeat=2)
    step = evaluation(20, [6] * 30)
    comparison = Comparison.of([BASE, second, step])
    by_hand = 0.5 - (np.array(BASE_RIGHTS) + BASE_RIGHTS[::-1]) / 24
    assert_allclose(comparison.differences(AVERAGE)[:, 0], by_hand, rtol=1e-12, atol=1e-15)
    (change,) = comparison.changes(AVERAGE)
    assert_allclose(change.value, by_hand.mean(), rtol=1e-12)


def test_a_change_that_is_supported_is_said_to_be_and_one_that_is_not_is_not():
    step = evaluation(20, BASE_RIGHTS, boxes=12, tokens=3000)
    text = report_markdown([BASE, step], {}, PICTURES)
    assert "**Format changed**: supported at step 20" in text
    assert "**Mean tokens changed**" in text
    assert "**Average@12: no change is supported.**" in text
    assert "**Pass@12: no change is supported.**" in text
    assert "does not show that nothing changed" in text


def test_the_best_of_several_needs_more_than_the_best_of_one():
    rng = np.random.default_rng(0)
    steps = [evaluation(s, list(rng.binomial(12, 0.45, size=30))) for s in (20, 40, 60, 80, 100)]
    alone, together = Comparison.of([BASE, steps[0]]), Comparison.of([BASE, *steps])
    assert together.changes(AVERAGE)[0].high > alone.changes(AVERAGE)[0].high
    assert_allclose(alone.changes(AVERAGE)[0].value, together.changes(AVERAGE)[0].value, rtol=1e-12)


def test_the_detectable_difference_counts_the_bases_repeats():
    step = evaluation(20, BASE_RIGHTS)
    one = Comparison.of([BASE, step]).detectable(AVERAGE)[0]
    two = Comparison.of([BASE, evaluation(0, BASE_RIGHTS, repeat=2), step]).detectable(AVERAGE)[0]
    error = drawing_error(BASE.table("correct"))
    assert_allclose(one, 2.8015853 * math.sqrt(2) * error, rtol=1e-6)
    assert_allclose(two / one, math.sqrt(1.5 / 2), rtol=1e-12)


def test_where_no_problem_differs_an_interval_still_has_width_and_tokens_are_called_alike():
    perfect = [evaluation(step, [12] * 30) for step in (0, 20, 40)]
    comparison = Comparison.of(perfect)
    for change in comparison.changes(PASS):
        assert change.low < change.value == 0 < change.high < 0.15
    assert 0.05 < comparison.detectable(PASS)[1] < comparison.detectable(PASS)[2] < 0.2
    assert not any(excludes_zero(change) for change in comparison.changes(TOKENS))
    text = report_markdown(perfect, {}, PICTURES)
    assert "| +0.0 (alike on every problem) |" in text
    (detectable,) = (line for line in text.split("\n") if line.startswith("| Pass@12, points |"))
    assert detectable.endswith("| - |")  # counts of 30/30 bound nothing


def test_every_published_cell_is_compared_for_the_chapters_model():
    text = report_markdown([BASE, evaluation(100, BASE_RIGHTS, boxes=12, tokens=3358)], {}, PICTURES)
    noise = 100 * Z95 * AVERAGE.null_error(BASE, 148 / 360)
    ours = 100 * sum(BASE_RIGHTS) / 360
    assert f"| base | Average@12 | {ours:.1f} | 41.1 | {ours - 4111 / 100:+.1f} | ± {noise:.1f} | inside |" in text
    assert "| base | mean tokens | 6,006 | 6,490 | -484 |" in text
    assert text.count("| **outside** |") + text.count("| inside |") == 8
    assert "Nothing can be compared" not in text


def test_checkpoints_of_another_algorithm_are_not_held_against_the_published_ones():
    evaluations = [BASE, evaluation(100, BASE_RIGHTS)]
    text = report_markdown(evaluations, {}, PICTURES, algorithm="grpo")
    assert text.count("| **outside** |") + text.count("| inside |") == 4
    assert "trained with GSPO. These were trained with grpo, and are not compared" in text


def test_what_is_not_known_of_the_training_is_said():
    text = report_markdown([BASE, evaluation(100, BASE_RIGHTS)], {}, PICTURES, algorithm=None)
    assert text.count("| **outside** |") + text.count("| inside |") == 8
    assert "not on record here; they are taken to be GSPO's" in text
    assert "not on record" not in report_markdown([BASE], {}, PICTURES, algorithm=None)
    assert "No row of the published table" in report_markdown(
        [evaluation(100, BASE_RIGHTS)], {}, PICTURES, algorithm="grpo"
    )


def test_without_a_base_no_checkpoint_is_called_one():
    text = report_markdown([evaluation(20, BASE_RIGHTS), evaluation(40, BASE_RIGHTS)], {}, PICTURES)
    assert "## Differences from step 20, on the same problems" in text
    assert "from the base" not in text


@pytest.mark.parametrize(
    "changed",
    [
        {"base_model": "runs/tiny/base"},
        {"dataset": "aime24.jsonl"},
        {"sampling": SamplingConfig(group_size=12, max_tokens=4096)},
        {"sampling": SamplingConfig(group_size=12, max_tokens=8192, temperature=0.6)},
        {"sampling": SamplingConfig(group_size=12, max_tokens=8192, top_k=20)},
    ],
)
def test_nothing_is_compared_with_the_published_table_for_another_setting(changed: dict):
    text = report_markdown([replace(BASE, header=replace(BASE.header, **changed))], {}, PICTURES)
    assert "**Nothing can be compared.**" in text
    assert "inside" not in text.partition("Beside the published table")[2].partition("What the published")[0]
    for row in PUBLISHED:
        assert f"| {row.name} | {row.values['average']:.2%} |" in text


def test_the_published_table_by_itself_suggests_a_loss_and_establishes_none():
    """(148 + 146)/720 - 122/360 = 6.94 points; its largest drawing error 3.10: 6.1 at one look, 8.0 for five."""
    text = report_markdown(another_base(BASE), {}, PICTURES)
    assert "10.0 points in Pass@12" in text
    assert "6.9 points below both base runs together" in text
    assert "more than the 6.1 that" in text
    assert "less than the 8.0 that" in text


def test_one_evaluation_says_that_nothing_can_be_said_about_a_change():
    text = report_markdown(another_base(BASE), {}, PICTURES)
    assert "nothing can be said about a change" in text
    assert "changed**" not in text


def test_few_problems_are_called_too_few():
    few = [replace(e, problems=e.problems[:4], header=replace(e.header, problem_ids=("p0", "p1", "p2", "p3")))
           for e in (BASE, evaluation(20, BASE_RIGHTS))]  # fmt: skip
    assert "**4 problems are too few**" in report_markdown(few, {}, PICTURES)


def test_training_is_summed_up_with_its_first_and_last_ten_steps():
    columns = {"step": np.arange(1.0, 31.0), "reward/accuracy": np.repeat([0.1, 0.5, 0.9], 10)}
    text = report_markdown(another_base(BASE), {"demo": columns}, PICTURES)
    assert "demo: 30 steps; reward 0.10 over the first 10 and 0.90 over the last" in text
    assert "](training.png)" in text


def test_the_page_is_one_file_that_asks_for_nothing_else():
    markdown = report_markdown(another_base(BASE), {}, PICTURES)
    page = report_page(markdown, {f"{name}.png": b"\x89PNG picture" for name in PICTURES})
    assert page.count("<img src=") == page.count('<img src="data:image/png;base64,iVBORyBwaWN0dXJl') == 3
    assert "http" not in page
    assert page.count('<div class="scroll"><table>') == markdown.count("\n| --- |")
    assert "<title>What 30 problems x 12 completions support</title>" in page


def test_names_cannot_break_the_page():
    odd = "a|b <script>alert(1)</script> *x* [y](z)"
    evaluations = another_base(BASE, replace(BASE, header=replace(BASE.header, label=odd, step=20)))
    page = report_page(report_markdown(evaluations, {}, PICTURES), {})
    assert "<script>" not in page
    assert "<script>" not in report_page("# Title\n\n<script>alert(1)</script>\n", {})
    assert "<td>a|b &lt;script&gt;alert(1)&lt;/script&gt; *x* [y](z)</td>" in page


def test_no_interval_is_shown_where_none_is_defined():
    lonely = replace(BASE, problems=BASE.problems[:1], header=replace(BASE.header, problem_ids=("p0",)))
    text = report_markdown(
        another_base(lonely, replace(lonely, header=replace(lonely.header, label="x"))), {}, PICTURES
    )
    assert "nan" not in text
    assert "no interval" in text
    assert Measure(field="f", title="t", column="correct").show(math.nan) == "-"
