"""What must hold: figures show the numbers of their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from made_up import SEVEN, seeded_evaluation, write_metrics
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from numpy.testing import assert_allclose

from record.run import Run
from stats.curves import moving_average, read_metrics
from stats.evaluations import summarise
from stats.figures import benchmark_figure, pass_at_k_figure, problems_figure, training_figure
from stats.published import PUBLISHED


def drawn(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=np.float64)


def test_bars_and_whiskers_are_the_summaries_numbers():
    summaries = [summarise(e) for e in SEVEN]
    figure = benchmark_figure(summaries)
    left, right, lengths = figure.axes
    heights = [bar.get_height() for container in left.containers[1::2] for bar in container]
    assert_allclose(heights, [100 * s.average.value for s in summaries] + [100 * s.passed.value for s in summaries])
    whiskers = cast("LineCollection", left.collections[0]).get_segments()
    assert_allclose(np.array(whiskers[0])[:, 1], [100 * summaries[0].average.low, 100 * summaries[0].average.high])
    assert_allclose(
        [bar.get_height() for bar in right.containers[1]], [100 * s.format_rate.value for s in summaries]
    )
    assert_allclose(drawn(lengths.lines[0]), [s.mean_tokens.value for s in summaries])


def test_the_published_rows_are_marked_where_ours_have_the_same_name():
    figure = benchmark_figure([summarise(e) for e in SEVEN[:3]], PUBLISHED)
    marks = next(line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert_allclose(drawn(marks), [100 * row.num_correct / 360 for row in PUBLISHED[:3]])


def test_training_curves_show_every_step_faint_and_its_average_bold(tmp_path: Path):
    columns = read_metrics(Run(write_metrics(tmp_path / "a", 8)))
    figure = training_figure({"a": columns, "b": read_metrics(Run(write_metrics(tmp_path / "b", 5)))})
    faint, bold, other_faint, other_bold = figure.axes[0].lines
    assert_allclose(drawn(faint), columns["reward/accuracy"])
    assert_allclose(drawn(bold), moving_average(columns["reward/accuracy"], 3))
    assert len(drawn(other_faint)) == 5
    assert bold.get_linestyle() != other_bold.get_linestyle()  # told apart without colour
    assert len(figure.axes) == 9


def test_pass_at_k_has_a_panel_a_checkpoint_with_the_base_in_each():
    summaries = [summarise(e) for e in SEVEN]
    figure = pass_at_k_figure(summaries)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [s.name for s in summaries[1:]]
    base, own = panels[0].lines
    assert_allclose(drawn(base), [100 * e.value for e in summaries[0].pass_at_k])
    assert_allclose(drawn(own), [100 * e.value for e in summaries[1].pass_at_k])
    assert len(panels[0].collections) == 2
    (alone,) = pass_at_k_figure(summaries[:1]).axes
    assert len(alone.lines) == len(alone.collections) == 1


def test_the_problem_picture_has_each_count_once():
    figure = problems_figure(SEVEN)
    counts = sorted(int(text.get_text()) for text in figure.axes[0].texts)
    assert counts == sorted(int(c) for e in SEVEN for c in e.table("correct").sum(1))
    many = problems_figure([seeded_evaluation(0, num_problems=100)])
    assert not many.axes[0].texts
