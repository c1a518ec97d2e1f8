import json
import os
import random
import subprocess
import sys
import threading
import unicodedata
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import polars as pl
import pytest

import prepare_data
from data import read_problems
from prepare_data import PREFIX, SUFFIX, PrepareConfig, prepare
from record.cli import Command

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not at ../shared/data")


def row(question, answer, id, *, prefix=PREFIX, suffix=SUFFIX, role="user", num_messages=1):
    message = {"content": prefix + question + suffix, "role": role}
    return {
        "prompt": [message] * num_messages,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": id},
    }


def sums(count):
    return [row(f"What is {n} + {n}?", str(2 * n), f"sum-{n:03}") for n in range(count)]


def write_parquet(path, rows):
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
    return path


def write_aime25(path, **changed):
    """Thirty invented rows in AIME25's layout; `changed` overrides fields of row 7."""
    rows = [{"id": n, "problem": f"Find {n} + 100.", "answer": str(n + 100)} for n in range(30)]
    rows[6] |= changed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder, rows, *, dev_size=1, seed=42):
    """Prepare hand-made rows; the folder then holds what the user's would."""
    prepare(
        PrepareConfig(
            raw=write_parquet(folder / "raw.parquet", rows),
            aime25=write_aime25(folder / "aime.jsonl"),
            output_dir=folder / "datasets",
            audit=folder / "audit.json",
            dev_size=dev_size,
            seed=seed,
        ),
        Command(),
    )
    problems = {name: read_problems(folder / "datasets" / f"{name}.jsonl") for name in ("train", "dev", "aime25")}
    return problems, json.loads((folder / "audit.json").read_text())


def run_command(*flags, **environment):
    """The script as a user starts it, with a Hugging Face cache of its own."""
    return subprocess.run(
        [sys.executable, "prepare_data.py", *map(str, flags)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def fails(capsys, monkeypatch, *flags):
    """Run main in this process; return its one sentence on stderr after checking exit status 2."""
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, flags)])
    with pytest.raises(SystemExit) as caught:
        prepare_data.main()
    assert caught.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1, f"one line was expected: {sentence}"
    return sentence


def kept(problems):
    return sorted(problems["train"] + problems["dev"], key=lambda problem: problem.id)


# Cleaning


def test_the_template_is_stripped_and_the_text_between_is_the_source_s(tmp_path):
    question = "  1\x0c+ 1\u2028 =\t?\n\n(Hint: 2 digits.) "
    problems, audit = run(tmp_path, [row(question, "2", "b"), *sums(3)])
    assert kept(problems)[0].question == question
    assert audit["control_characters"] == ["b"], "U+000C counts, tab and line end do not"


def test_control_characters_are_unicode_s_but_for_tab_and_line_ends():
    controls = {chr(code) for code in range(0x11000) if unicodedata.category(chr(code)) == "Cc"}
    assert set(prepare_data.CONTROL.findall("".join(map(chr, range(0x11000))))) == controls - set("\t\n\r")


def test_copies_are_found_by_blanks_alone_and_the_smallest_id_in_text_order_is_kept(tmp_path):
    rows = [row("1 + 1?", "2", "9"), row("1  +\n1? ", "2", "10"), row("1 + 1?", "2", "9"), row("1 + 1 ?", "2", "8")]
    problems, audit = run(tmp_path, [*rows, *sums(3)])
    assert [(p.id, p.question) for p in kept(problems)[:2]] == [("10", "1  +\n1? "), ("8", "1 + 1 ?")]
    assert audit["num_duplicate"] == 2
    assert audit["num_rows"] == 7


def test_a_question_whose_copies_disagree_is_dropped_whole(tmp_path):
    rows = [row("1 + 1?", "2", "a"), row("1 +  1?", "3", "b"), row("1 + 1?", "2", "c")]
    rows += [row("1 + 2?", "3", "e"), row("1 + 2?", "4", "d"), *sums(3)]
    problems, audit = run(tmp_path, rows)
    assert [p.id for p in kept(problems)] == ["sum-000", "sum-001", "sum-002"]
    assert audit["conflicting"] == [["a", "b"], ["d", "e"]], "a stands for c, the same text and answer"
    assert audit["num_rows"] == 8 == audit["num_duplicate"] + len(audit["conflicting"]) + audit["num_kept"]


INVALID = {
    "other prefix": row("1 + 1?", "2", "bad", prefix="Solve: "),
    "one other word in the prefix": row("1 + 1?", "2", "bad", prefix=PREFIX.replace("Solve", "Prove")),
    "one other word in the suffix": row("1 + 1?", "2", "bad", suffix=SUFFIX.replace("own", "new")),
    "a blank before the prefix": row("1 + 1?", "2", "bad", prefix=" " + PREFIX),
    "no suffix": row("1 + 1?", "2", "bad", suffix=""),
    "template twice around nothing": row("", "2", "bad", prefix=PREFIX.rstrip("\n")),
    "empty question": row(" \n", "2", "bad"),
    "empty answer": row("1 + 1?", " ", "bad"),
    "no answer": row("1 + 1?", None, "bad"),
    "no reward model": row("1 + 1?", "2", "bad") | {"reward_model": None},
    "two messages": row("1 + 1?", "2", "bad", num_messages=2),
    "no message": row("1 + 1?", "2", "bad", num_messages=0),
    "no prompt": row("1 + 1?", "2", "bad") | {"prompt": None},
    "a message that is null": row("1 + 1?", "2", "bad") | {"prompt": [None]},
    "a message without content": row("1 + 1?", "2", "bad") | {"prompt": [{"content": None, "role": "user"}]},
    "a message of the assistant": row("1 + 1?", "2", "bad", role="assistant"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_row_is_counted_by_id_and_left_out_with_its_neighbours_untouched(tmp_path, name):
    problems, audit = run(tmp_path, [*sums(2), INVALID[name], INVALID[name], *sums(4)])
    assert kept(problems) == kept(run(tmp_path, sums(4))[0])
    assert audit["invalid"] == {"bad": 2}
    assert (audit["num_rows"], audit["num_duplicate"], audit["num_kept"]) == (8, 2, 4)


def test_a_row_without_id_is_invalid(tmp_path):
    _, audit = run(tmp_path, [row("1 + 1?", "2", None), row("2 + 2?", "4", " "), *sums(2)])
    assert audit["invalid"] == {"(no id)": 1, " ": 1}


def test_the_audit_names_answers_that_are_no_integers_and_the_longest_question(tmp_path, capsys):
    rows = [row("1 - 2?", "-1", "a"), row("1 / 2?", "1/2", "b"), row("1e0?", "1.0", "c"), row("0" * 5000, "0", "d")]
    _, audit = run(tmp_path, rows)
    assert audit["answers_not_integers"] == ["b", "c"]
    assert audit["longest_prompt"] == {"d": 5000}
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["longest", "prompt,", "characters", "5,000"] in printed
    assert ["with", "answers", "not", "integers", "2"] in printed


def test_integer_ids_are_read_as_text(tmp_path):
    problems, _ = run(tmp_path, [row("1 + 1?", "2", 10), row("1 + 1?", "2", 9), row("2 + 2?", "4", 1)])
    assert [p.id for p in kept(problems)] == ["1", "10"]


def test_row_order_and_repetition_change_no_byte_of_the_files(tmp_path):
    rows = [
        row(" " * (n % 3) + f"What is {n % 40} + 1?", str(n % 40 + (n == 77)), f"id-{n * 7 % 100:02}")
        for n in range(100)
    ]
    seen = set()
    for trial, repeats in enumerate([1, 1, 5]):
        folder = tmp_path / str(trial)
        folder.mkdir()
        mixed = rows * repeats
        random.Random(trial).shuffle(mixed)
        _, audit = run(folder, mixed, dev_size=5)
        assert (audit["num_rows"], audit["num_kept"]) == (100 * repeats, 39)
        seen.add(tuple((folder / "datasets" / name).read_bytes() for name in ("train.jsonl", "dev.jsonl")))
    assert len(seen) == 1


def test_rows_beyond_one_batch_are_grouped_together(tmp_path):
    # 40,000 rows are three batches; the smallest id stands in the last.
    rows = [row(f"What is {n % 10} + 1?", str(n % 10 + 1), f"{99_999 - n}") for n in range(40_000)]
    problems, audit = run(tmp_path, rows)
    assert [p.id for p in kept(problems)] == [str(id) for id in range(60_000, 60_010)]
    assert audit["num_rows"] == 40_000


def test_dev_is_the_head_of_the_seeded_shuffle_of_the_sorted_questions(tmp_path):
    expected = sorted(f"What is {n} + {n}?" for n in range(20))
    random.Random(42).shuffle(expected)
    problems, _ = run(tmp_path, sums(20), dev_size=6)
    assert [p.question for p in problems["dev"]] == expected[:6]
    assert [p.question for p in problems["train"]] == expected[6:]
    other, _ = run(tmp_path, sums(20), dev_size=6, seed=43)
    assert other["dev"] != problems["dev"]


@needs_shared
def test_the_source_gives_17126_and_50_questions_in_any_order_and_repeated(tmp_path):
    raw = SHARED / "dapo_math_17k_unique_rows.parquet"
    mixed = pl.concat([pl.read_parquet(raw)] * 3).sample(fraction=1.0, shuffle=True, seed=1)
    mixed.write_parquet(tmp_path / "mixed.parquet", row_group_size=5_000)
    files = []
    for path in (raw, tmp_path / "mixed.parquet"):
        output = tmp_path / path.stem
        prepare(PrepareConfig(raw=path, aime25=SHARED / "aime25.jsonl", output_dir=output), Command())
        files.append({file.name: file.read_bytes() for file in output.iterdir()})
    assert files[0] == files[1]
    assert {name: content.count(b"\n") for name, content in files[0].items()} == {
        "train.jsonl": 17_126,
        "dev.jsonl": 50,
        "aime25.jsonl": 30,
    }
    groups, malformed = prepare_data.read_dapo(raw)
    problems, audit = prepare_data.clean(groups, malformed)
    assert (audit.num_rows, audit.num_kept, len(audit.conflicting), len(audit.invalid)) == (17_917, 17_176, 12, 0)
    assert sum("\x0c" in problem.question for problem in problems) > 600


# AIME25


@needs_shared
def test_aime25_keeps_the_source_s_texts(tmp_path):
    source = [json.loads(line) for line in (SHARED / "aime25.jsonl").read_text("utf-8").split("\n") if line]
    problems = prepare_data.read_aime25(SHARED / "aime25.jsonl")
    assert [(p.id, p.question, p.answer) for p in problems] == [
        (str(row["id"]), row["problem"], row["answer"]) for row in source
    ]


def test_aime25_is_read_from_parquet_and_from_its_own_output_too(tmp_path):
    problems, _ = run(tmp_path, sums(3))
    assert [p.answer for p in problems["aime25"]] == [str(n + 100) for n in range(30)]
    parquet = write_parquet(
        tmp_path / "aime.parquet", [{"id": n, "problem": f"Find {n} + 100.", "answer": n + 100} for n in range(30)]
    )
    assert prepare_data.read_aime25(parquet) == problems["aime25"]
    assert prepare_data.read_aime25(tmp_path / "datasets" / "aime25.jsonl") == problems["aime25"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"answer": "x"}, "row 7: the answer must be an integer from 0 to 999, not 'x'"),
        ({"answer": "1.0"}, "row 7: the answer must be an integer"),
        ({"answer": " 1"}, "row 7: the answer must be an integer"),
        ({"answer": 12.0}, "row 7: the answer must be an integer"),
        ({"answer": 1000}, "row 7: the answer must be an integer"),
        ({"answer": None}, "row 7: answer missing"),
        ({"id": None, "answer": None}, "row 7: id and answer missing"),
        ({"problem": " "}, "row 7: question must be a non-empty string"),
        ({"problem": None}, "row 7: question must be a non-empty string"),
        ({"id": 3}, "row 7: the id or the question is an earlier row's too"),
        ({"problem": "Find  3 + 100. "}, "row 7: the id or the question is an earlier row's too"),
    ],
)
def test_a_bad_row_of_aime25_is_named_before_anything_is_written(tmp_path, capsys, monkeypatch, changed, complaint):
    raw = write_parquet(tmp_path / "raw.parquet", sums(3))
    aime25 = write_aime25(tmp_path / "aime.jsonl", **changed)
    output = tmp_path / "datasets"
    sentence = fails(capsys, monkeypatch, "--raw", raw, "--aime25", aime25, "--output-dir", output, "--dev-size", 1)
    assert complaint in sentence
    assert not output.exists()


def test_a_wrong_number_of_aime25_rows_names_the_last_row(tmp_path):
    lines = write_aime25(tmp_path / "aime.jsonl").read_text().splitlines(keepends=True)
    for count, extra in ((29, []), (31, ['{"id": 30, "problem": "Find 1 + 1.", "answer": "2"}\n'])):
        (tmp_path / "other.jsonl").write_text("".join(lines[:count] + extra))
        with pytest.raises(ValueError, match=f"ends at row {count}, and AIME25 has 30 rows"):
            prepare_data.read_aime25(tmp_path / "other.jsonl")


def test_a_good_copy_of_aime25_is_kept_without_a_network_and_a_local_file_replaces_it(tmp_path, monkeypatch):
    run(tmp_path, sums(3))
    monkeypatch.setattr(prepare_data, "download", lambda *_: pytest.fail("there was no need to download"))
    config = {"raw": tmp_path / "raw.parquet", "output_dir": tmp_path / "datasets", "dev_size": 1}
    copy = tmp_path / "datasets" / "aime25.jsonl"
    before = read_problems(copy)
    prepare(PrepareConfig(**config), Command())
    assert read_problems(copy) == before
    write_aime25(tmp_path / "aime.jsonl", answer="999")
    prepare(PrepareConfig(**config, aime25=tmp_path / "aime.jsonl"), Command())
    assert [p.answer for p in read_problems(copy)].count("999") == 1


# Input that cannot be used


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--raw", "absent.parquet"], "there is no file absent.parquet"),
        (["--raw", "text.parquet"], "text.parquet cannot be read as parquet"),
        (["--raw", "cut.parquet"], "cut.parquet cannot be read as parquet"),
        (
            ["--raw", "other.parquet"],
            'other.parquet is not laid out like DAPO-Math-17k: unable to find column "reward_model"',
        ),
        (["--raw", "flat.parquet"], "flat.parquet is not laid out like DAPO-Math-17k"),
        (["--raw", "numbers.parquet"], "numbers.parquet has DAPO's columns, but answer not as text"),
        (["--raw", "clash.parquet"], "1 ids stand for several questions, the first is 'a'"),
        (["--dev-size", "3"], "--dev-size 3 leaves nothing to train on: 3 questions are kept"),
        (["--aime25", "absent.jsonl"], "absent.jsonl"),
        (["--aime25", "text.parquet"], "text.parquet cannot be read as parquet"),
        (["--output-dir", "text.parquet/out"], "text.parquet"),
        (["--audit", "absent/audit.json"], "absent"),
    ],
)
def test_what_cannot_be_used_ends_in_one_sentence_and_leaves_the_old_files(
    tmp_path, capsys, monkeypatch, flags, complaint
):
    run(tmp_path, sums(3))
    before = {path.name: path.read_bytes() for path in (tmp_path / "datasets").iterdir()}
    monkeypatch.chdir(tmp_path)
    Path("text.parquet").write_text("no parquet")
    Path("cut.parquet").write_bytes(Path("raw.parquet").read_bytes()[:-100])
    write_parquet(Path("other.parquet"), [{"prompt": [{"content": "a", "role": "user"}]}])
    write_parquet(Path("flat.parquet"), [row("1 + 1?", "2", "a") | {"prompt": "1 + 1?"}])
    write_parquet(Path("numbers.parquet"), [row("1 + 1?", 2, "a")])
    write_parquet(Path("clash.parquet"), [row("1 + 1?", "2", "a"), row("1 + 2?", "3", "a")])
    usual = {"--raw": "raw.parquet", "--aime25": "aime.jsonl", "--dev-size": "1", "--seed": "7"}
    usual |= dict(zip(flags[::2], flags[1::2], strict=True))
    assert complaint in fails(capsys, monkeypatch, *(part for flag in usual.items() for part in flag))
    assert {path.name: path.read_bytes() for path in (tmp_path / "datasets").iterdir()} == before


def test_a_dev_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="--dev-size must be at least 1, not 0"):
        PrepareConfig(dev_size=0)


# The download


@pytest.fixture
def hub(tmp_path):
    """A server that answers as the hub does for the files put in `files`, and the environment to reach it."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("X-Repo-Commit", self.path.split("/")[5] if body else "")
            self.send_header("ETag", '"etag"')
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    yield (
        files,
        {"HF_ENDPOINT": host, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"},
    )
    server.shutdown()
    server.server_close()


def hub_path(source):
    repo, revision, name = source
    return f"/datasets/{repo}/resolve/{revision}/{name}"


def test_both_files_are_downloaded_at_their_revisions_and_read_from_the_cache_later(tmp_path, hub):
    files, environment = hub
    raw = write_parquet(tmp_path / "raw.parquet", sums(prepare_data.DAPO_SIZE))
    files[hub_path(prepare_data.DAPO)] = raw.read_bytes()
    rows = [{"id": n, "problem": f"Find {n} + 100.", "answer": str(n + 100)} for n in range(30)]
    files[hub_path(prepare_data.AIME25)] = write_parquet(tmp_path / "aime.parquet", rows).read_bytes()
    output = tmp_path / "datasets"
    # The progress bar needs a terminal; this setting of the hub's shows it in a pipe as well.
    done = run_command("--output-dir", output, **environment, TQDM_POSITION="-1")
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr, "a progress bar was expected"
    assert [len(read_problems(output / f"{name}.jsonl")) for name in ("train", "dev", "aime25")] == [17_126, 50, 30]
    files.clear()
    again = run_command("--output-dir", tmp_path / "again", "--force-aime25", **environment)
    assert again.returncode == 0, again.stderr


def test_a_download_that_is_not_the_published_one_is_refused(tmp_path, hub):
    files, environment = hub
    files[hub_path(prepare_data.DAPO)] = write_parquet(tmp_path / "raw.parquet", sums(5)).read_bytes()
    refused = run_command("--output-dir", tmp_path / "datasets", **environment)
    assert refused.returncode == 2
    assert "17,176 questions to keep, and 5 were found" in refused.stderr
    assert not (tmp_path / "datasets").exists()


def test_without_a_network_one_sentence_names_the_local_files_that_help(tmp_path, hub):
    _, environment = hub
    output = tmp_path / "datasets"
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # Nothing listens there.
    failed = run_command("--output-dir", output, **environment)
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1, "neither a traceback nor retries were expected"
    assert "pass it as --raw FILE" in failed.stderr
    assert not output.exists()


def test_a_failed_download_of_aime25_keeps_the_good_copy_and_says_what_is_written(tmp_path, hub):
    files, environment = hub
    run(tmp_path, sums(3))
    output = tmp_path / "datasets"
    before = (output / "aime25.jsonl").read_bytes()
    files[hub_path(prepare_data.AIME25)] = b"no parquet"
    raw = write_parquet(tmp_path / "raw.parquet", sums(9))
    for remedy in ("cannot be read as parquet", "pass it as --aime25 FILE"):
        failed = run_command("--raw", raw, "--output-dir", output, "--dev-size", 4, "--force-aime25", **environment)
        assert failed.returncode == 1
        assert remedy in failed.stderr
        assert failed.stderr.endswith("the same command writes every file again\n")
        assert "train.jsonl and dev.jsonl are written, aime25.jsonl is left as it was" in failed.stderr
        assert (output / "aime25.jsonl").read_bytes() == before
        assert len(read_problems(output / "dev.jsonl")) == 4
        files.clear()
        environment["HF_HOME"] = str(tmp_path / "empty")
