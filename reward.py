r"""Decide whether the answer in a completion is right: safely, and the same way in training and evaluation.

The answer is what the last `\boxed{...}` holds. A plain number is decided in this process, exactly. Anything else
goes to sympy and math-verify, in a worker process that may be killed.

`wrong` is a judgement; `timeout` and `crash` say that there was none. They all pay 0, and they are never counted as
one another.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from data import DataError, Problem, Score, read_problems, read_records
from grading.answers import decide, explain, unreadable
from grading.chapter import chapter_verdict
from grading.extraction import complete_boxes, find_answer
from grading.workers import Workers


class Grader:
    """Grades completions, with `num_workers` processes between entering and leaving; thread-safe.

    `deadline_seconds` counts from the moment that a worker gets a comparison. `training` chooses between the
    chapter's two rules for `Score.chapter_correct`. Raises RuntimeError on entering if grading does not work where
    it is called from.
    """

    def __init__(self, *, num_workers: int = 2, deadline_seconds: float = 10.0, training: bool = False):
        """Configure only; processes start on entering."""
        if num_workers < 1 or deadline_seconds <= 0:
            raise ValueError(f"num_workers={num_workers} and deadline_seconds={deadline_seconds} must be positive")
        self._workers = Workers(num_workers, deadline_seconds)
        self._training = training
        self.seconds = 0.0
        """What `score_many` has taken so far."""

    def __enter__(self) -> Grader:
        """Start the workers, and check from here that right is told from wrong."""
        try:
            self._workers.start()
            half = r"\boxed{\frac{\sqrt{8}}{4}}"
            for text, reference, expected in [
                (r"\boxed{204}", "204", "correct"),
                (r"\boxed{205}", "204", "wrong"),
                (half, r"\frac{\sqrt{2}}{2}", "correct"),
                (half, r"\frac{\sqrt{3}}{2}", "wrong"),
            ]:
                # Some patience: engines that are starting may take every core for a while.
                tries = (self.score(text, reference).verdict for _ in range(5))
                verdict = next((verdict for verdict in tries if verdict != "timeout"), "timeout")
                if verdict != expected:
                    raise RuntimeError(f"grader self-test: {text} for {reference} is {verdict}, not {expected}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every worker."""
        self._workers.close()

    def score(self, text: str, reference: str, *, prompt: str = "") -> Score:
        """Grade one completion. A reference that cannot be read pays nothing: see `check_references`."""
        return self.score_many([(text, reference)], prompt=prompt)[0]

    def score_many(self, pairs: Iterable[tuple[str, str]], *, prompt: str = "") -> list[Score]:
        """Grade (completion, reference) pairs, in order; what needs a worker is spread over all of them.

        `prompt`, as the model saw it, tells whether the completions begin inside thinking, and what is counted.
        """
        started = time.perf_counter()
        in_thinking = prompt.rfind("<think>") > prompt.rfind("</think>")
        read, open_questions = [], []
        for text, reference in pairs:
            boxes, last_open = complete_boxes(text)
            answer, fault = find_answer(text, boxes, last_open, in_thinking=in_thinking)
            read.append((answer, any(text.startswith(r"\boxed", box.start) for box in boxes)))
            open_questions.append(fault or decide(answer or "", reference, prompt))
            open_questions.append(chapter_verdict(text, boxes, reference, training=self._training))
        try:
            verdicts = self._workers.settle(open_questions)
        finally:
            self.seconds += time.perf_counter() - started
        return [
            Score(
                reward=float(verdict == "correct"),
                answer=answer,
                verdict=verdict,
                chapter_correct=None if chapter in (None, "timeout", "crash") else chapter in (True, "correct"),
                chapter_formatted=boxed,
            )
            for (answer, boxed), verdict, chapter in zip(read, verdicts[::2], verdicts[1::2], strict=True)
        ]

    def check_references(self, problems: Sequence[Problem]) -> None:
        """Raise DataError, a line a problem, if there are references that no answer could match."""
        verdicts = self._workers.settle([unreadable(problem.answer) for problem in problems])
        if faults := [
            f"row {row}, id {problem.id}: no answer can match the reference {_shown(problem.answer)}"
            for row, (problem, verdict) in enumerate(zip(problems, verdicts, strict=True), 1)
            if verdict not in (False, "correct")
        ]:
            raise DataError("\n".join(faults))


# ---- From the shell ----


def main(
    text: Path | None = None, reference: str | None = None, responses: Path | None = None, data: Path | None = None
) -> None:
    """Grade one completion and say why, step by step, or grade a file and count its verdicts.

    Args:
        text: a file that holds one completion.
        reference: the right answer to it.
        responses: JSON Lines with `text` or `response`, `reference` or the `id` of a problem, and perhaps a label,
            `right` or `correct`: the labels that the grader disagrees with are printed.
        data: the problems that the responses answer.
    """
    if (text is None) != (reference is None) or (text is None) == (responses is None):
        _fail("give --text and --reference, or --responses")
    try:
        completion = text.read_text(encoding="utf-8", errors="surrogateescape") if text else ""
        rows = list(_read_rows(responses, read_problems(data) if data else [])) if responses else []
        with Grader() as grader:
            if reference is not None:
                _print_steps(grader, completion, reference)
            else:
                _print_table(grader, rows)
    except OSError as error:
        _fail(f"cannot read {error.filename}: {error.strerror}")
    except DataError as error:
        _fail(str(error))


def _read_rows(path: Path, problems: Sequence[Problem]) -> Iterator[tuple[str, str, str, bool | None]]:
    """Yield the text, reference, question and label of each line."""
    known = {problem.id: problem for problem in problems}
    for number, row in read_records(path):
        problem = known.get(row.get("id", ""))
        text, reference = row.get("text", row.get("response")), row.get("reference", problem and problem.answer)
        if not isinstance(text, str) or not isinstance(reference, str):
            raise DataError(f"{path}, line {number}: a text is missing, or a reference, or an id that --data has")
        right = row.get("right", row.get("correct"))
        yield text, reference, problem.question if problem else "", None if right is None else bool(right)


def _print_steps(grader: Grader, text: str, reference: str) -> None:
    grader.check_references([Problem(id="--reference", question="?", answer=reference)])
    score = grader.score(text, reference)
    print(f"verdict {score.verdict}, reward {score.reward:g}")
    print(f"answer {_shown(score.answer)}, reference {_shown(reference)}")
    for step in explain(score.answer, reference) if score.answer is not None else ():
        print(f"- {step}")


def _print_table(grader: Grader, rows: Sequence[tuple[str, str, str, bool | None]]) -> None:
    table: Counter[tuple[str, str]] = Counter()
    for number, (text, reference, question, right) in enumerate(rows, 1):
        score = grader.score(text, reference, prompt=question)
        label = {True: "right", False: "not right", None: "not labelled"}[right]
        table[score.verdict, label] += 1
        if right is not None and right != score.correct:
            print(f"line {number}: {_shown(score.answer)} for {_shown(reference)} is {score.verdict}, not {label}")
    for (verdict, label), count in table.most_common():
        print(f"{count:8,} {verdict:10} {label}")


def _shown(answer: str | None) -> str:
    return "(none)" if answer is None else repr(answer if len(answer) <= 80 else answer[:77] + "...")


def _fail(message: str) -> NoReturn:
    print(f"reward.py: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
