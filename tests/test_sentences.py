"""What must hold: no sentence of a report contradicts its tables, whatever the tables; a false one is found.

The checker knows the form of every sentence that speaks of numbers, reads the numbers out of it, and compares them
with the tables of the same report. A sentence that it does not know counts as a contradiction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from made_up import PICTURES, chapter_evaluation, seeded_evaluation

from stats.curves import TrainedRun
from stats.evaluations import Evaluation
from stats.measures import measures
from stats.published import PUBLISHED, Published, supported_by_counts
from stats.report import report_markdown

NUMBER = r"[-+]?[\d,]+(?:\.\d+)?"
CELL = re.compile(rf"\**({NUMBER}) \((?:({NUMBER}) to ({NUMBER})|alike on every problem|- to -)\)\**")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def tables(text: str) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Heads and rows of every Markdown table by the heading or sentence before it."""
    found, before, lines = {}, "", text.split("\n")
    for index, line in enumerate(lines):
        if line.startswith("| --- |"):
            rows = []
            for row in lines[index + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
            found[before] = ([cell.strip() for cell in lines[index - 1].strip("|").split("|")], rows)
        elif line and not line.startswith(("|", "!")):
            before = line
    return found


def contradictions(text: str) -> Iterator[str]:
    """Yield what the report's sentences say and its tables do not."""
    by_heading = tables(text)
    names = [row[0] for row in by_heading["## The table"][1]]
    changes = next((table for name, table in by_heading.items() if name.startswith("## Differences")), None)
    detectable = by_heading.get("### How large a difference can be seen")
    bullets = text.partition("## In short\n\n")[2].partition("\n\n## ")[0].split("\n")
    spoken_of = []
    for bullet in bullets:
        if found := re.fullmatch(
            r"- \*\*(.+?)(?: changed\*\*: supported at (.+?)\.|: no change is supported\.\*\*) "
            r"The largest difference from (.+) is (.+?) (points|tokens), at (.+?)\.(.*)", bullet
        ):  # fmt: skip
            title, supported, _, change, _, at, rest = found.groups()
            assert changes
            column = [head[:1].upper() + head[1:] for head in changes[0]].index(title)
            cells = {row[0]: row[column] for row in changes[1]}
            spoken_of.append(title)
            bold = [name for name, cell in cells.items() if "**" in cell]
            if (supported.split(", ") if supported else []) != bold:
                yield f"{bullet} -> bold are {bold}"
            if cells[at].strip("*") != change:
                yield f"{bullet} -> at {at} the table has {cells[at]}"
            sizes = {name: abs(number(CELL.fullmatch(cell)[1])) for name, cell in cells.items()}  # pyright: ignore[reportOptionalSubscript]
            if sizes[at] < max(sizes.values()):
                yield f"{bullet} -> the largest is {max(sizes, key=lambda name: sizes[name])}"
            if unseen := re.search(r"a true difference below (\S+) ", rest):
                assert detectable
                (row,) = (row for row in detectable[1] if row[0].partition(",")[0].lower() == title.lower())
                if row[3] != unseen[1]:
                    yield f"{bullet} -> the table has {row[3]}"
            elif not supported and not re.search(
                "too few problems to say how|problems that all agree, the data do not", rest
            ):
                yield f"unknown: {bullet}"
        elif found := re.fullmatch(
            r"- \*\*(\d+) problems are too few\*\* for any interval here to be relied on\.", bullet
        ):
            if not text.startswith(f"# What {found[1]} problems") or int(found[1]) >= 10:
                yield bullet
        elif found := re.fullmatch(
            r"- \*\*Noise, seen directly\*\*: (.+) differs from (.+) by (.+), by seeds alone\.", bullet
        ):
            rows = {row[0]: row for row in by_heading["## The table"][1]}
            again, first = (rows[found[1]], rows["base"])
            for gap, column in zip(
                re.findall(rf"({NUMBER}) (?:points|tokens) in", found[3]), range(1, 5), strict=True
            ):
                after, before = (number(row[column].partition(" ")[0].strip("%")) for row in (again, first))
                if abs(number(gap) - (after - before)) > 0.11 + 0.5 * (abs(after - before) >= 100):
                    yield f"{bullet} -> {after - before}"
        elif bullet == "- There is one model here, so nothing can be said about a change; its own numbers follow.":
            if len({name.partition(", run")[0] for name in names}) > 1:
                yield bullet
        else:
            yield f"unknown: {bullet}"
    if changes and len(spoken_of) != 4:
        yield f"only {spoken_of} are spoken of"
    for name, (_, rows) in by_heading.items():
        for row in rows:
            for cell in row:
                found = CELL.fullmatch(cell)
                if found and found[2] and "%" not in cell and ("Differences" in name or "How much" in name):
                    low, high = number(found[2]), number(found[3])
                    if ("**" in cell and (low < 0 < high)) or ("**" not in cell and (low > 0 or high < 0)):
                        yield f"{row}: {cell}"
    if found := re.search(
        rf"At (.+?) Format has moved by ({NUMBER}) points, of which ({NUMBER} \(.+?\)) are", text
    ):
        _, rows = by_heading["## How much of the change of Format is fewer cut-off completions"]
        if [found[1], found[2], found[3]] != [rows[-1][0], rows[-1][1], rows[-1][2].strip("*")]:
            yield found[0]
    yield from _published(text, by_heading)
    yield from _training(text)


def _published(text: str, by_heading: dict) -> Iterator[str]:
    rows = by_heading.get("## Beside the published table", ([], []))[1]
    for row in (
        rows if rows and len(rows[0]) == 7 and rows[0][-1].strip("*").startswith(("inside", "outside")) else []
    ):
        ours, theirs, difference = map(number, row[2:5])
        noise = number(row[5].removeprefix("± ")) if row[5] != "± -" else np.inf
        rough = 1.0 if row[1] == "mean tokens" else 0.11
        if abs(ours - theirs - difference) > 1.5 * rough:
            yield f"{row}: {ours} - {theirs}"
        if abs(abs(difference) - noise) > rough and (abs(difference) > noise) != ("outside" in row[6]):
            yield f"{row}"
    counts = {of: int(k) for k, of in re.findall(r"(\d+) of \d+ differences of (the base|checkpoints)", text)}
    outside = [row for row in rows if len(row) == 7 and "outside" in row[6]]
    if counts and sum(counts.values()) != len(outside):
        yield f"{counts} -> {len(outside)} are outside"
    if counts and counts.get("the base", 0) != sum(row[0].startswith("base") for row in outside):
        yield f"{counts}"


def _training(text: str) -> Iterator[str]:
    for found in re.finditer(
        r"- \S+: (\d+) steps; reward (\S+) over the first (\d+) and (\S+) over the last", text
    ):
        if int(found[3]) != min(10, int(found[1])):
            yield found[0]


def made_tables(seed: int) -> tuple[list[Evaluation], list[TrainedRun]]:
    """One to five evaluations of any size, some of them perfect, empty or equal, and perhaps a run."""
    rng = np.random.default_rng(seed)
    size = {"num_problems": int(rng.choice([1, 2, 3, 6, 12])), "n": int(rng.integers(1, 5)), "seed": seed}
    evaluations = [seeded_evaluation(0, **size)]
    if rng.random() < 0.4:
        evaluations.append(seeded_evaluation(0, repeat=2, **size))
    evaluations += [seeded_evaluation(step, **size) for step in (20, 60, 100)[: rng.integers(0, 4)]]
    steps = int(rng.integers(1, 30))
    columns = {"step": np.arange(1.0, steps + 1, dtype=np.float64), "reward/accuracy": rng.random(steps)}
    return evaluations, [TrainedRun("made", {}, columns)] if rng.random() < 0.3 else []


def test_no_sentence_contradicts_its_table_in_a_thousand_reports():
    for seed in range(1000):
        text = report_markdown(*made_tables(seed), PICTURES)
        assert list(contradictions(text)) == [], f"seed {seed}"


def test_no_sentence_contradicts_a_table_beside_the_published_one():
    for seed in range(40):
        rng = np.random.default_rng(seed)

        def drawn(step: int, repeat: int = 1, *, rng=rng) -> Evaluation:
            rights = rng.binomial(12, rng.beta(0.3, 0.45, size=30)).tolist()
            return chapter_evaluation(step, rights, repeat=repeat, boxes=int(rng.integers(13)), tokens=6000)

        evaluations = [drawn(0), drawn(0, 2), drawn(20), drawn(100)]
        repeats = [[drawn(100)]] * (seed % 3)
        text = report_markdown(evaluations, [], PICTURES, repeats=repeats)
        assert list(contradictions(text)) == [], f"seed {seed}"
        assert "**Nothing can be compared.**" not in text


def counted(seed: int) -> tuple[Published, ...]:
    """A table of counts like the published one, with one to seven checkpoints."""
    rng = np.random.default_rng(seed)
    center = rng.integers(0, 361)
    names = ["base", "base, run 2", *(f"step {20 * i}" for i in range(1, int(rng.integers(2, 9))))]
    rows = []
    for name in names:
        correct = int(np.clip(center + rng.integers(-30, 31) * rng.integers(0, 2), 0, 360))
        passed, boxed = rng.integers(-(-correct // 12), min(30, correct) + 1), rng.integers(correct, 361)
        rows.append(Published(name, correct, int(passed), int(boxed), float(rng.uniform(100, 8000))))
    return tuple(rows)


def count_contradictions(text: str, rows: tuple[Published, ...]) -> Iterator[str]:
    """Yield what `supported_by_counts` says and its rows do not."""
    form = re.compile(
        r"What the published counts support by themselves, with drawing noise at its largest\. Its two runs of "
        rf"one base differ by ({NUMBER}) points in Pass@12; up to (\d+) can be noise, so (.+?)\. Average@12 of "
        rf"both base runs together is ({NUMBER})%; the checkpoints are (.+?)\. (At .+?\. )(At .+?\. )Mean tokens "
        rf"are ({NUMBER}) % there; the two base runs differ by ({NUMBER}) %\."
    )
    found = form.fullmatch(text)
    if not found:
        yield f"unknown: {text}"
        return
    first, second, *steps = rows
    values = [row.values for row in rows]
    apart, noise, gain, both, where, average, boxed, tokens, base_tokens = found.groups()
    passes = [100 * value["passed"] for value in values]
    if abs(number(apart) - abs(passes[1] - passes[0])) > 0.06:
        yield f"{apart} points in Pass@12"
    gaining = {
        row.name
        for row, value in zip(steps, passes[2:], strict=True)
        if value - min(passes[:2]) > number(noise) + 0.5
    }
    least = {
        row.name
        for row, value in zip(steps, passes[2:], strict=True)
        if value - min(passes[:2]) > number(noise) - 0.5
    }
    said = set(re.findall(r"step \d+", gain))
    if not gaining <= said <= least or (not said) != (gain == "no Pass@12 tells a gain"):
        yield gain
    base = (first.num_correct + second.num_correct) / 720
    if abs(number(both) - 100 * base) > 0.006:
        yield both
    sides = dict(re.findall(r"(above|equal to|below) it at ((?:(?:, | and )?step \d+)+)", where))
    for side, sign in (("above", 1), ("equal to", 0), ("below", -1)):
        true = [
            row.name
            for row in steps
            if np.sign(2 * row.num_correct - first.num_correct - second.num_correct) == sign
        ]
        if re.findall(r"step \d+", sides.get(side, "")) != true:
            yield f"{side}: {sides.get(side)}"
    for sentence, title, field, rate in (
        (average, "Average@12", "average", base),
        (boxed, "Format", "format_rate", (first.num_formatted + second.num_formatted) / 720),
    ):
        change = 100 * (values[-1][field] - rate)
        parts = re.fullmatch(
            rf"At (.+) {title} is ({NUMBER}) points (above|below|from) both base runs together, (no more|more) "
            rf"than the ({NUMBER}) that (?:noise explains at one look(?: and less than the ({NUMBER}) that "
            r"picking the largest of (\d+) asks: a (gain|loss) is suggested, not established)?|picking the largest "
            r"of (\d+) asks: a (gain|loss) beyond drawing noise)\. ", sentence
        )  # fmt: skip
        if not parts:
            yield f"unknown: {sentence}"
            continue
        side = "above" if change > 0 else "below" if change < 0 else "from"
        more = abs(change) > number(parts[5])
        near = abs(abs(change) - number(parts[5])) < 0.06
        if parts[1] != rows[-1].name or parts[3] != side or abs(number(parts[2]) - abs(change)) > 0.06:
            yield sentence
        if not near and more != (parts[4] == "more"):
            yield sentence
        if {parts[8], parts[10]} - {None, "gain" if change > 0 else "loss"}:
            yield sentence
        if {parts[7], parts[9]} - {None, str(len(steps))} or (parts[6] and abs(change) > number(parts[6]) + 0.06):
            yield sentence
    length = (first.mean_tokens + second.mean_tokens) / 2
    if abs(number(tokens) - 100 * (rows[-1].mean_tokens / length - 1)) > 0.51:
        yield tokens
    if abs(number(base_tokens) - 100 * abs(first.mean_tokens - second.mean_tokens) / length) > 0.06:
        yield base_tokens


def test_no_sentence_contradicts_its_counts_in_a_thousand_tables():
    for seed in range(1000):
        rows = counted(seed)
        assert list(count_contradictions(supported_by_counts(rows), rows)) == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("no Pass@12 tells a gain", "a gain over the lower of the two shows only at step 20"),
        ("above it at step 20 and below it at step 40", "below it at step 20, step 40"),  # "Average@12 never rises"
        ("a loss is suggested", "a gain is suggested"),
        ("is 6.9 points below", "is 7.9 points below"),
        ("a gain beyond drawing noise", "a loss beyond drawing noise"),
        ("-48 % there", "-38 % there"),
        ("Mean tokens", "Average@12 never rises. Mean tokens"),
    ],
)
def test_a_false_sentence_about_the_published_counts_is_found(true: str, false: str):
    text = supported_by_counts(PUBLISHED)
    assert list(count_contradictions(text, PUBLISHED)) == []
    assert true in text
    assert list(count_contradictions(text.replace(true, false), PUBLISHED))


EXAMPLE = report_markdown(
    [
        seeded_evaluation(step, repeat=repeat, num_problems=12)
        for step, repeat in ((0, 1), (0, 2), (20, 1), (100, 1))
    ],
    [],
    PICTURES,
)


@pytest.mark.parametrize(
    ("pattern", "false"),
    [
        (r"\*\*Format changed\*\*: supported at step 100", "**Format changed**: supported at step 20"),
        (r"\*\*Average@4: no change is supported\.\*\*", "**Average@4 changed**: supported at step 20."),
        (r"at step 100\.", "at step 20."),
        (r"a true difference below \S+ ", "a true difference below 0.1 "),
        (r"differs from the base by \S+", "differs from the base by +77.0"),
        (r"Format has moved by \S+", "Format has moved by +0.3"),
        (r"## The table", "- Average@4 never rises.\n\n## The table"),
    ],
)
def test_a_false_sentence_of_a_report_is_found(pattern: str, false: str):
    assert list(contradictions(EXAMPLE)) == []
    changed = re.sub(pattern, lambda _: false, EXAMPLE, count=1)
    if false.startswith("- "):
        changed = EXAMPLE.replace("\n\n## The table", f"\n{false}", 1)
    assert changed != EXAMPLE
    assert list(contradictions(changed))


def test_a_false_verdict_beside_the_published_table_is_found():
    rights = [0] * 10 + [3] * 5 + [6] * 5 + [9] * 5 + [12] * 5
    text = report_markdown([chapter_evaluation(0, rights), chapter_evaluation(100, rights)], [], PICTURES)
    assert list(contradictions(text)) == []
    for true, false in ((" inside |", " **outside** |"), ("differences of the base", "differences of checkpoints")):
        assert true in text
        assert list(contradictions(text.replace(true, false, 1)))


def test_the_published_average_rises_once():
    text = supported_by_counts(PUBLISHED)
    assert (
        "40.83%; the checkpoints are above it at step 20 and below it at step 40, step 60, step 80 and step 100"
        in text
    )
    assert measures(12)[0].title in text
