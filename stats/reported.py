"""The reported run's settings and numbers, each beside a run's own.

What a reader could get wrong: settings that the publication does not give (LoRA alpha and modules, Adam's epsilon,
weight decay) are not compared; nobody outside knows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from stats.curves import TrainedRun
from stats.evaluations import Evaluation
from stats.measures import Comparison, Measure
from stats.page import listed, plain, table
from stats.published import PUBLISHED

QUESTIONS_TAKEN = 800
"""By the reported run's 100 steps of eight."""
QUESTIONS_SHA256 = "ced0940c8503d20aa50359a9a5cde085bce900cc6bb1babb9a9dda06929b5689"
"""Of these questions, stripped, in their order, joined by NUL."""
STEPS, STEP_SECONDS, COST = 100, 85, "155.80 yuan"
MEAN_CLIPPED, LAST_CLIPPED = 0.1311, 0.0625


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the reported run, and where config.json has a run's own."""

    name: str
    path: str
    published: Any
    binding: bool = True  # another value makes another experiment
    default: str = ""  # where the value is if `path` has none

    def of(self, record: dict[str, Any]) -> Any:
        """Return a run's own value; None where config.json does not give it."""
        for path in filter(None, (self.path, self.default)):
            value = reduce(lambda found, key: (found or {}).get(key), path.split("/"), record)
            if value is not None:
                return value
        return None

    def agrees(self, record: dict[str, Any]) -> bool:
        """Whether the run has the published value, or leaves it unset."""
        value = self.of(record)
        if value and self.name == "base model":  # a folder may hold the hub's model
            return value.rstrip("/").rpartition("/")[2] == self.published.rpartition("/")[2]
        return value is None or value == self.published


SETTINGS = (
    Setting("base model", "settings/policy/base_model", "Qwen/Qwen3.5-4B"),
    Setting("LoRA rank", "settings/policy/lora_rank", 32),
    Setting("learning rate", "settings/policy/learning_rate", 4e-5),
    Setting("Adam beta1", "settings/policy/beta1", 0.9),
    Setting("Adam beta2", "settings/policy/beta2", 0.95),
    Setting("algorithm", "settings/loss/algorithm", "gspo"),
    Setting("ratio", "objective/ratio", "sequence"),
    Setting("clip range below 1", "objective/epsilon_low", 3e-4),
    Setting("clip range above 1", "objective/epsilon_high", 4e-4),
    Setting("average over", "objective/average", "sequences"),
    Setting("advantage divided by std", "objective/divide_by_std", True),
    Setting("the ratio's denominator", "settings/loss/old_logprobs", "sampler"),
    Setting("mismatch weight", "settings/loss/mismatch_weight", "none"),
    Setting("optimizer steps a batch", "settings/loss/mini_batches", 1),
    Setting("groups a step", "settings/groups_per_step", 8),
    Setting("completions a group", "settings/sampling/group_size", 8),
    Setting("longest prompt", "settings/sampling/max_prompt_tokens", 2048),
    Setting("longest completion", "settings/sampling/max_tokens", 4096),
    Setting("temperature", "settings/sampling/temperature", 1.0),
    Setting("top-p", "settings/sampling/top_p", 1.0),
    Setting("top-k", "settings/sampling/top_k", -1),
    Setting("data seed", "settings/data_seed", 42, default="settings/seed"),
    Setting("seed", "settings/seed", 42, binding=False),  # another engine draws otherwise under the same seed
    Setting("steps", "settings/max_steps", STEPS, binding=False),
    Setting("steps between checkpoints", "settings/save_every", 20, binding=False),
)


def differences(run: TrainedRun) -> list[str]:
    """Return what makes a run another experiment than the reported one, in words; nothing where it is the same."""
    if not run.record:
        return ["its settings are not on record, since its folder has no config.json"]
    found = [
        f"{setting.name} is {setting.of(run.record)}, published {setting.published}"
        for setting in SETTINGS
        if setting.binding and not setting.agrees(run.record)
    ]
    data = run.record.get("data", {})
    if data.get("questions_sha256") != QUESTIONS_SHA256:
        found.append(f"its first {QUESTIONS_TAKEN} questions are not the published run's")
    return found


def reported_parts(
    runs: Sequence[TrainedRun], evaluations: Sequence[Evaluation], price_per_hour: float | None
) -> Iterator[str]:
    """Yield the report's section on the chapter's other numbers: Markdown tables, each beside the published ones.

    Args:
        runs: their training; none where only evaluations are at hand.
        evaluations: finished, base first.
        price_per_hour: of the machine that trained, in any currency; None leaves the cost out.
    """
    if runs:
        heads = ["", *(plain(run.name) for run in runs), "published"]
        columns = [_training_numbers(run, price_per_hour) for run in runs]
        rows = [
            [name, *(column[name] for column in columns), value] for name, value in _published_numbers().items()
        ]
        yield table(heads, rows)
        yield (
            "Clipped: of all completions of a step, degenerate groups included. The time is that of the steps, "
            "without start, evaluations and interruptions. The published run's was a remote service's, which has "
            "another price and another clock: the last two rows say what each cost, not which is better."
        )
    comparison = Comparison([evaluation.by_the_chapters_rule() for evaluation in evaluations])
    rows = list(_repeat_rows(comparison)) + list(_best_rows(comparison))
    if rows:
        yield table(["", "here", "published"], rows)
        yield (
            "The best of several checkpoints is favoured by the choice; what the differences support is said "
            "above. Of tokens, the fewest count as best."
        )
    known = [run for run in runs if run.record]
    if known:
        settings = [
            [setting.name, *(_mark(setting, run.record) for run in known), str(setting.published)]
            for setting in SETTINGS
        ]
        yield table(["setting", *(plain(run.name) for run in known), "published"], settings)
        yield "Bold: not as published. A dash: not set or not on record."


def _mark(setting: Setting, record: dict[str, Any]) -> str:
    value = setting.of(record)
    text = "-" if value is None else plain(str(value))
    return text if setting.agrees(record) else f"**{text}**"


def _training_numbers(run: TrainedRun, price_per_hour: float | None) -> dict[str, str]:
    """Return the run's numbers by the names of `_published_numbers`."""
    clipped = run.metrics.get("gspo/sequence_clip_fraction", [])
    if "format" not in run.record:  # the share was of the training sequences then
        clipped = []
    clipped = [value for value in clipped if not math.isnan(value)]
    seconds = run.metrics.get("time/step_seconds", [])
    hours = sum(seconds) / 3600
    cost = "-" if price_per_hour is None else f"{hours * price_per_hour:,.2f} at {price_per_hour:g} an hour"
    return dict(
        zip(
            _published_numbers(),
            [
                str(len(run.metrics["step"])),
                f"{sum(clipped) / len(clipped):.2%}" if clipped else "-",
                f"{clipped[-1]:.2%}" if clipped else "-",
                f"{sum(seconds) / len(seconds):.1f}" if len(seconds) else "-",
                _duration(sum(seconds)) if len(seconds) else "-",
                cost if len(seconds) else "-",
            ],
            strict=True,
        )
    )


def _published_numbers() -> dict[str, str]:
    return {
        "steps done": str(STEPS),
        "clipped sequences, mean": f"{MEAN_CLIPPED:.2%}",
        "clipped sequences, last step": f"{LAST_CLIPPED:.2%}",
        "seconds a step": str(STEP_SECONDS),
        "time of all steps": _duration(STEPS * STEP_SECONDS),
        "cost": COST,
    }


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def _repeat_rows(comparison: Comparison) -> Iterator[list[str]]:
    """Yield how far the second evaluation of the base is from the first, measure by measure."""
    first, second = (row.values for row in PUBLISHED[:2])
    for measure in comparison.measures:
        theirs = measure.show(second[measure.field] - first[measure.field], "+")
        ours = "evaluated once"
        if comparison.base[0].header.label != "base":
            ours = "not evaluated"
        elif len(comparison.base) > 1:
            before, again = (float(measure.per_problem(e).mean()) for e in comparison.base[:2])
            ours = measure.show(again - before, "+")
        unit = ", points" if measure.unit == "points" else ""
        yield [f"base evaluated twice: {measure.title}{unit}", ours, theirs]


def _best_rows(comparison: Comparison) -> Iterator[list[str]]:
    """Yield the best checkpoint by each measure."""
    published = {row.name: row.values for row in PUBLISHED if not row.name.startswith("base")}
    for measure in comparison.measures if comparison.checkpoints else []:
        ours = {e.header.name: float(measure.per_problem(e).mean()) for e in comparison.checkpoints}
        theirs = {name: values[measure.field] for name, values in published.items()}
        yield [f"best checkpoint by {measure.title}", _best(measure, ours), _best(measure, theirs)]


def _best(measure: Measure, values: dict[str, float]) -> str:
    best = (min if measure.unit == "tokens" else max)(values.values())
    names = [plain(name) for name, value in values.items() if math.isclose(value, best, rel_tol=1e-12)]
    return f"{listed(names)} ({measure.show(best)})"
