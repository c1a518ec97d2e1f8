"""What must be identical to the published run without its service: questions, log, judge, command lines."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import BASE, seeded_evaluation
from test_metrics import metrics_of, output
from test_prepare_data import SHARED, needs_shared, write_aime25

from data import questions_sha256, read_problems, training_order
from eval import EvalConfig
from prepare_data import PrepareConfig, prepare
from record.cli import Command
from record.log import MetricsLog
from record.run import Run
from reward import Grader
from stats.evaluations import rule_differences, summarise
from stats.published import published_parts
from stats.reported import QUESTIONS_SHA256
from train import TrainConfig

KEY_NAMES = {
    "reward": """base_mean shaped_mean accuracy format_rate""",
    "rollout": """groups train_groups degenerate_groups completions train_completions completion_tokens
        mean_completion_tokens max_completion_tokens mean_sampled_token_surprisal unique_completion_rate""",
    "train": """datums data_cursor_consumed update_skipped learning_rate""",
    "gspo": """loss seq_ratio_mean sequence_clip_fraction token_clip_fraction train_sequences
        normalization_sequences active_sequence_fraction train_tokens normalization_tokens
        active_token_fraction""",
    "time": """step_seconds""",
}
THE_CHAPTERS_KEYS = [f"{group}/{name}" for group, names in KEY_NAMES.items() for name in names.split()]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@needs_shared
def test_a_run_meets_the_published_runs_800_questions_in_their_order(tmp_path):
    raw, aime25 = SHARED / "dapo_math_17k_unique_rows.parquet", write_aime25(tmp_path / "aime.jsonl")
    prepare(PrepareConfig(raw=raw, aime25=aime25, output_dir=tmp_path), Command())
    order = training_order(read_problems(tmp_path / "train.jsonl"), seed=42)
    questions = [problem.question for problem in order]
    first = "05f46bb0 dc87d6c5 cf8100d4 373b01a4 192f5d73 4d543f44 5c70e01e 75769cbf"
    assert " ".join(digest(question)[:8] for question in questions[:8]) == first
    joined = "ced0940c8503d20aa50359a9a5cde085bce900cc6bb1babb9a9dda06929b5689"
    assert digest("\0".join(questions[:800])) == joined == QUESTIONS_SHA256
    assert questions_sha256(order[:800]) == QUESTIONS_SHA256


def test_the_log_has_every_key_of_the_chapter(make_group):
    groups = [make_group([1, 0, 0]), make_group([1, 1, 1], seed=1)]
    skipped = metrics_of(1, groups[1:], []).flat()
    trained = metrics_of(1, groups, [output([0.1, -0.2, 0.4], clipped=[0, 20, 15])]).flat()
    assert set(THE_CHAPTERS_KEYS) <= set(trained)
    assert {key for key in THE_CHAPTERS_KEYS if key not in skipped} == {
        key for key in THE_CHAPTERS_KEYS if key.startswith("gspo/")
    }


def test_swanlab_gets_the_projects_name_and_steps_from_0(make_group, tmp_path, monkeypatch):
    started, logged = {}, []
    run = types.SimpleNamespace(id="i", log=lambda numbers, step: logged.append(step), finish=lambda state: None)
    swanlab = types.SimpleNamespace(init=lambda **options: started.update(options) or run)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    settings = {"swanlab_mode": "offline", "swanlab_project": "mine", "swanlab_workspace": "lab"}
    with MetricsLog(Run(tmp_path), after_step=0, swanlab_id=None, settings=settings) as log:
        for step in (1, 2):
            log.write(metrics_of(step, [make_group([1, 1])], []))
    assert (started["project"], started["workspace"], logged) == ("mine", "lab", [0, 1])
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_flags_of_the_chapter_mean_what_they_mean_there():
    assert TrainConfig(save_every=0).save_every == 0
    assert TrainConfig().swanlab_project == "gspo"
    assert EvalConfig().max_prompt_tokens == 4095
    with pytest.raises(ValueError, match="save_every is -1; it must be at least 0"):
        TrainConfig(save_every=-1)
    with pytest.raises(
        ValueError, match=r"on the chapter's remote service; give the folder of one on this machine"
    ):
        EvalConfig(model_path=Path("trio://runs/1"))


def test_the_chapters_rule_and_ours_are_kept_apart_and_counted():
    with Grader() as grader:
        texts = [r"\boxed{73}", r"\boxed{073}", r"\boxed{73\text{ cm}}", r"\boxed{73} or \boxed{74", "73"]
        scores = grader.score_many([(text, "73") for text in texts])
    assert [score.correct for score in scores] == [True, True, True, False, False]
    assert [score.chapter_correct for score in scores] == [True, True, False, True, False]
    assert [score.chapter_formatted for score in scores] == [True, True, True, True, False]
    evaluation = seeded_evaluation(0, num_problems=1, n=5)
    (problem,) = evaluation.problems
    generations = tuple(
        replace(
            generation,
            answer=score.answer,
            verdict=score.verdict,
            correct=score.correct,
            formatted=score.formatted,
            chapter_correct=score.chapter_correct,
            chapter_formatted=score.chapter_formatted,
        )
        for generation, score in zip(problem.generations, scores, strict=True)
    )
    judged = replace(evaluation, problems=(replace(problem, generations=generations),))
    assert (summarise(judged).num_correct, summarise(judged.by_the_chapters_rule()).num_correct) == (3, 3)
    assert summarise(judged.by_the_chapters_rule()).format_rate.value == 0.8
    (line,) = rule_differences([judged])
    assert "by the chapter's rule 60.0%, by ours 60.0%; 2 of 5 differ: p0: " in line
    assert rule_differences([evaluation]) == []


def test_what_is_held_against_published_numbers_is_judged_by_the_chapters_rule():
    def relabelled(generation):
        return replace(generation, chapter_correct=False, chapter_formatted=False)

    problems = tuple(replace(p, generations=tuple(map(relabelled, p.generations))) for p in BASE.problems)
    text = "\n".join(published_parts([replace(BASE, problems=problems)], "gspo"))
    assert "| base | Average@12 | 0.0 | 41.1 |" in text
    assert "judged by the chapter's own rule" in text
