"""Download or read DAPO-Math-17k and AIME25, clean and audit them, and write them as JSON Lines in one schema.

    python prepare_data.py                                            # downloads the two pinned revisions
    python prepare_data.py --raw dapo.parquet --aime25 aime25.jsonl   # reads local files, needs no network

The hub's DAPO file repeats some 17,900 rows a hundred times. Copies of a question differ in blanks (one copy is
kept) and sometimes in the answer (no copy is kept, since none is known to be right). No text is repaired: the
question is the source's, without DAPO's outer template. Order and repetition of rows change only the audit.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data import DataError, Problem, read_records, write_problems, write_whole
from record.cli import Command, run_command
from record.disk import writing

DAPO = (
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    "data/dapo-math-17k.parquet",
)
"""Data set, revision and file on the Hugging Face hub."""
DAPO_SIZE = 17_176
"""Number of questions kept."""
AIME25 = (
    "yentinglin/aime_2025",
    "6f71d77b0b89b9dabe07ab466c51df33f514df7f",
    "data/train-00000-of-00001-243207c6c994e1bd.parquet",
)
AIME25_SIZE = 30

PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # Unicode's Cc without tab and line ends
SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What to read and where to write; the defaults are the reported run's."""

    raw: Path | None = None
    """DAPO-Math-17k as a local parquet file, instead of the download."""
    aime25: Path | None = None
    """AIME25 as a local .jsonl or .parquet file, instead of the download."""
    output_dir: Path = Path("datasets")
    """Folder for train.jsonl, dev.jsonl and aime25.jsonl."""
    dev_size: int = 50
    """Number of questions in dev.jsonl, which train.jsonl lacks."""
    seed: int = 42
    """Seed of the shuffle before the split."""
    force_aime25: bool = False
    """Download AIME25 even if the output folder has a good copy."""
    audit: Path | None = None
    """JSON file for the audit, with the ids of the rows that it counts."""

    def __post_init__(self) -> None:
        """Raise DataError for an empty dev.jsonl."""
        if self.dev_size < 1:
            raise DataError(f"--dev-size must be at least 1, not {self.dev_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The valid rows with one prompt and answer, equal to the character."""

    content: str
    answer: str
    id: str  # the smallest of the rows' ids, compared as text
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What cleaning found; num_rows = invalid + duplicate + conflicting + kept."""

    num_rows: int
    invalid: dict[str, int]  # rows by id: no id, question or answer, several messages, or another template
    num_duplicate: int  # rows beyond the first of their question
    conflicting: list[list[str]]  # ids of the copies of each question whose copies differ in the answer
    num_kept: int
    control_characters: list[str]  # ids of kept questions with one other than tab and line end
    answers_not_integers: list[str]  # ids of kept questions
    longest_prompt: dict[str, int]  # characters of the longest kept question, by its id

    def __str__(self) -> str:
        """Return the counts as lines for the terminal."""
        rows = {
            "rows read": self.num_rows,
            "- invalid": sum(self.invalid.values()),
            "- duplicate": self.num_duplicate,
            "- conflicting": len(self.conflicting),
            "= questions kept": self.num_kept,
            "with control characters": len(self.control_characters),
            "with answers not integers": len(self.answers_not_integers),
            "longest prompt, characters": max(self.longest_prompt.values(), default=0),
        }
        return "\n".join(f"  {name:<28}{count:>10,}" for name, count in rows.items())


def read_dapo(path: Path) -> tuple[list[Copies], Counter[str]]:
    """Return the distinct rows of a parquet file in DAPO's layout, and the number of malformed rows by id.

    The memory holds the distinct rows and one batch: the hub's 1,791,700 rows are over a gigabyte of text. Raises
    DataError for a file that is missing, damaged or has another layout.
    """
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"there is no file {path}")
    message = pl.col("prompt").list.get(0, null_on_oob=True).struct
    columns = {
        "content": message.field("content"),
        "answer": pl.col("reward_model").struct.field("ground_truth"),
        "id": pl.col("extra_info").struct.field("index").cast(pl.String),
        "whole": (pl.col("prompt").list.len() == 1) & (message.field("role") == "user"),
    }
    whole = pl.all_horizontal(pl.all().is_not_null()) & pl.col("whole")
    # Grouping by 128 bits of hash is faster than by the prompt; two prompts collide once in 1e29 such files.
    content, key = pl.col("content"), ["hash0", "hash1", "answer"]
    merge = [content.first(), pl.col("id").min(), pl.col("num_rows").sum()]
    groups, malformed = pl.DataFrame(), Counter[str]()
    try:
        # Polars decodes whole row groups, here 2 GB; pyarrow decodes a batch. Without a buffer size pyarrow reads
        # a whole column chunk.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            for batch in file.iter_batches(32_768, columns=["prompt", "reward_model", "extra_info"]):
                rows = pl.DataFrame(batch).select(**columns)
                if wrong := [name for name in ("content", "answer") if rows.schema[name] != pl.String]:
                    raise DataError(f"{path} has DAPO's columns, but {' and '.join(wrong)} not as text")
                malformed.update(rows.filter(~whole)["id"].fill_null("(no id)"))
                rows = rows.filter(whole).select(
                    content,
                    "answer",
                    "id",
                    num_rows=pl.lit(1, pl.Int64),
                    hash0=content.hash(0),
                    hash1=content.hash(1),
                )
                groups = pl.concat([groups, rows], how="diagonal").group_by(key).agg(merge)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path} is not laid out like DAPO-Math-17k: {_first_line(error)}") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {_first_line(error)}") from error
    groups = groups.drop("hash0", "hash1", strict=False)  # absent from a file without rows
    return [Copies(**group) for group in groups.iter_rows(named=True)], malformed


def clean(groups: Iterable[Copies], malformed: Counter[str]) -> tuple[list[Problem], Audit]:
    """Return a problem for each question whose copies have one answer, sorted by question, and the audit.

    Rows are copies if their questions are equal once every run of blanks is a single space. The copy with the
    smallest id (compared as text) is kept. Raises DataError if two kept questions have one id.
    """
    invalid = Counter(malformed)
    num_valid = 0
    copies: defaultdict[str, list[Problem]] = defaultdict(list)
    for group in groups:
        question = group.content[len(PREFIX) : -len(SUFFIX)]
        try:
            if PREFIX + question + SUFFIX != group.content:
                raise DataError("another template")
            problem = Problem(id=group.id, question=question, answer=group.answer)
        except DataError:
            invalid[group.id] += group.num_rows
            continue
        num_valid += group.num_rows
        copies[_key(question)].append(problem)

    agreed = {key: same for key, same in copies.items() if len({copy.answer for copy in same}) == 1}
    conflicting = [sorted(copy.id for copy in same) for key, same in copies.items() if key not in agreed]
    # Of equal ids the smaller text is kept, so that the order of rows changes nothing.
    kept = [min(agreed[key], key=lambda copy: (copy.id, copy.question)) for key in sorted(agreed)]
    if repeated := [id for id, count in Counter(problem.id for problem in kept).items() if count > 1]:
        raise DataError(f"{len(repeated)} ids stand for several questions, the first is {min(repeated)!r}")
    longest = max(kept, key=lambda problem: len(problem.question), default=None)
    return kept, Audit(
        num_rows=num_valid + sum(invalid.values()),
        invalid=dict(sorted(invalid.items())),
        num_duplicate=num_valid - len(copies),
        conflicting=sorted(conflicting),
        num_kept=len(kept),
        control_characters=sorted(p.id for p in kept if CONTROL.search(p.question)),
        answers_not_integers=sorted(p.id for p in kept if not re.fullmatch("-?[0-9]+", p.answer)),
        longest_prompt={longest.id: len(longest.question)} if longest else {},
    )


def _key(question: str) -> str:
    return " ".join(question.split())


def split(problems: list[Problem], *, dev_size: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Shuffle; return train, and dev (the first `dev_size`); raises DataError for an empty train."""
    if dev_size >= len(problems):
        raise DataError(f"--dev-size {dev_size} leaves nothing to train on: {len(problems)} questions are kept")
    shuffled = list(problems)
    random.Random(seed).shuffle(shuffled)
    return shuffled[dev_size:], shuffled[:dev_size]


def read_aime25(path: Path) -> list[Problem]:
    """Return the 30 problems of a .parquet or JSON Lines file with columns id, problem (or question) and answer.

    Raises DataError, with the number of the row from 1, for a row that is incomplete, repeats another or has an
    answer that is no integer from 0 to 999; and for any other number of rows.
    """
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, row in _read_parquet(path) if path.suffix == ".parquet" else read_records(path):
        question = row.get("problem", row.get("question", ""))
        try:
            if missing := [name for name in ("id", "answer") if row.get(name) is None]:
                raise DataError(f"{' and '.join(missing)} missing")
            if not re.fullmatch("[0-9]{1,3}", str(row["answer"])):
                raise DataError(f"the answer must be an integer from 0 to 999, not {row['answer']!r}")
            problem = Problem(id=str(row["id"]), question=question, answer=str(row["answer"]))
            if not seen.isdisjoint(marks := {f"id {problem.id}", _key(question)}):
                raise DataError("the id or the question is an earlier row's too")
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from None
        seen |= marks
        problems.append(problem)
    if len(problems) != AIME25_SIZE:
        raise DataError(f"{path} ends at row {len(problems)}, and AIME25 has {AIME25_SIZE} rows")
    return problems


def _read_parquet(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    import polars as pl

    try:
        return enumerate(pl.read_parquet(path).to_dicts(), start=1)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path} cannot be read as parquet: {_first_line(error)}") from error


def download(source: tuple[str, str, str], flag: str) -> Path:
    """Return the file at its pinned revision in the Hugging Face cache; DataError says what to do without it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    repo, revision, name = source
    cached = try_to_load_from_cache(repo, name, revision=revision, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    print(f"downloading {repo} at {revision[:8]}")
    try:
        # Without a network this fails at once; hf_hub_download retries for half a minute.
        get_hf_file_metadata(hf_hub_url(repo, name, revision=revision, repo_type="dataset"))
        return Path(hf_hub_download(repo, name, revision=revision, repo_type="dataset"))
    except Exception as error:  # the HTTP client's errors share no public base class
        raise DataError(
            f"{repo} could not be downloaded ({type(error).__name__}: {_first_line(error)}): where there is a "
            f"network, fetch {name} at revision {revision}, and pass it as {flag} FILE"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def prepare(config: PrepareConfig, command: Command) -> None:
    """Write train.jsonl, dev.jsonl and aime25.jsonl; raises DataError or OSError.

    The input is checked before the first file is written, except that AIME25 is downloaded last: where that fails,
    train.jsonl and dev.jsonl are new and aime25.jsonl is as before.
    """
    aime25_path = config.output_dir / "aime25.jsonl"
    aime25 = None
    if config.aime25:
        aime25 = read_aime25(config.aime25)
    elif aime25_path.exists() and not config.force_aime25:
        try:
            aime25 = read_aime25(aime25_path)
        except DataError as error:
            print(f"a new copy is needed: {error}")

    problems, audit = clean(*read_dapo(config.raw or download(DAPO, "--raw")))
    if config.raw is None and len(problems) != DAPO_SIZE:
        raise DataError(
            f"{DAPO[0]} at revision {DAPO[1][:8]} has {DAPO_SIZE:,} questions to keep, and {len(problems):,} were "
            "found: its file in the Hugging Face cache is not what was published; delete it there, and try again"
        )
    train, dev = split(problems, dev_size=config.dev_size, seed=config.seed)
    print(f"DAPO-Math-17k\n{audit}")
    config.output_dir.mkdir(parents=True, exist_ok=True)
    if config.audit:
        write_whole(config.audit, json.dumps(asdict(audit), ensure_ascii=False, indent=2) + "\n")
    command.begin("the same command writes every file again")
    _write(config.output_dir / "train.jsonl", train)
    _write(config.output_dir / "dev.jsonl", dev)
    if aime25 is None:
        try:
            aime25 = read_aime25(download(AIME25, "--aime25"))
        except DataError as error:
            state = "left as it was" if aime25_path.exists() else "missing"
            raise DataError(f"{error} (train.jsonl and dev.jsonl are written, aime25.jsonl is {state})") from error
    _write(aime25_path, aime25)


def _write(path: Path, problems: list[Problem]) -> None:
    with writing(path):
        write_problems(path, problems)
    print(f"{path}: {len(problems):,} problems")


def main() -> None:
    """Prepare the data as the flags say."""
    import tyro

    flags = {"description": __doc__, "config": (tyro.conf.FlagCreatePairsOff,)}
    run_command(lambda command: prepare(tyro.cli(PrepareConfig, **flags), command))


if __name__ == "__main__":
    main()
