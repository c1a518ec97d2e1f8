"""A run's folder: which checkpoints stay, what a resumed run replaces, who holds it, what it says of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import save_checkpoint

from record.checkpoint import load_state
from record.rollouts import write_rollouts
from record.run import FORMAT, Run, new_record

SUITE = Path(__file__).parent.parent
SETTINGS = {
    "seed": 0,
    "max_steps": 4,
    "save_every": 2,
    "keep_checkpoints": None,
    "groups_per_step": 1,
    "save_rollouts": "all",
    "resume": False,
    "resume_from": None,
    "sampling": {"group_size": 2, "max_tokens": 8},
    "loss": {"algorithm": "gspo", "old_logprobs": "sampler"},
    "policy": {"base_model": "b", "revision": None, "learning_rate": 0.1},
}


def record_with(**changes):
    return new_record(SETTINGS | changes, data={"sha256": "d"}, base_fingerprint="f", objective={})


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "runs/t")


def steps(run):
    """Return the steps of all that lies in the checkpoints' folder."""
    return [int(path.name.removeprefix("step-")) for path in sorted((run.folder / "checkpoints").iterdir())]


def test_a_checkpoint_of_an_interruption_gives_way_to_the_next_and_old_ones_to_the_newest(run):
    save_checkpoint(run, 1)
    save_checkpoint(run, 2, interrupted=True)
    assert steps(run) == list(run.checkpoints) == [1, 2]
    save_checkpoint(run, 3)
    assert steps(run) == [1, 3]
    save_checkpoint(run, 4, keep=2)
    assert steps(run) == [3, 4]


@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_the_newest_so_many_checkpoints_are_kept(run, keep):
    for step in range(1, 9):
        save_checkpoint(run, step, keep=keep)
        assert steps(run) == list(range(max(1, step + 1 - keep), step + 1))


def test_what_a_resumed_run_does_again_is_moved_not_deleted(make_group, run):
    for step in (1, 2, 3):
        save_checkpoint(run, step)
        write_rollouts(run.rollouts_path(step), [make_group([1, 0])])
    (run.folder / "checkpoints/.step-000004.tmp").mkdir()  # what a kill leaves
    evaluations = [
        "base.jsonl",
        "step-000002.jsonl",
        "step-9-mine",
        "step-000003.jsonl",
        "step-000003.z",
    ]
    run.evaluations.mkdir()
    for name in evaluations:
        (run.evaluations / name).touch()
    run.archive(after_step=2)
    assert steps(run) == [1, 2]
    assert list(run.rollouts) == [1, 2]
    assert (run.folder / "replaced/checkpoints/step-000003/weights").exists()
    assert (run.folder / "replaced/rollouts/step-000003.parquet").exists()
    assert sorted(path.name for path in run.evaluations.iterdir()) == evaluations[:3]
    assert sorted(path.name for path in (run.folder / "replaced/eval").iterdir()) == evaluations[3:]
    save_checkpoint(run, 3)
    run.archive(after_step=2)  # a second time
    assert steps(run) == [1, 2]


def test_a_run_is_locked_by_one_process_and_a_dead_ones_lock_holds_nothing(run):
    run.folder.mkdir(parents=True)
    script = f"""
import pathlib, sys
sys.path.insert(0, {str(SUITE)!r})
from record.run import Run
lock = Run(pathlib.Path({str(run.folder)!r})).lock()
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(ValueError, match=f"process {holder.pid} on .* is training in {run.folder}"):
            run.lock()
        holder.kill()
    run.lock().close()


def test_only_whole_names_are_checkpoints_and_rollouts(run):
    for name in ("step-000020", "step-000003", "step-3", "step-000004-mine", ".step-000005.tmp", "step-0000006"):
        (run.folder / "checkpoints" / name).mkdir(parents=True)
    assert list(run.checkpoints) == [3, 20]
    assert run.checkpoints[3] == run.checkpoint_path(3)
    run.rollouts_path(3).parent.mkdir()
    for name in ("step-000003.parquet", "step-000004.jsonl", ".step-000005.parquet.tmp"):
        (run.rollouts_path(3).parent / name).touch()
    assert run.rollouts == {3: run.rollouts_path(3)}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"settings": 3}'])
def test_a_folder_without_a_readable_config_is_no_run(run, text):
    run.folder.mkdir(parents=True)
    if text is not None:
        run.config_path.write_text(text)
    with pytest.raises(ValueError, match=r"runs/t is not a run: config\.json cannot be read"):
        _ = run.record
    assert run.algorithm is None


def test_a_run_says_what_it_was_started_with(run):
    run.folder.mkdir(parents=True)
    run.write_record(record_with())
    assert run.record == record_with()
    assert run.settings == SETTINGS
    assert run.algorithm == "gspo"
    identity = run.identity
    assert identity["policy/learning_rate"] == 0.1
    assert (identity["data sha256"], identity["base weights"]) == ("d", "f")
    assert not {"max_steps", "save_every", "resume", "policy/base_model"} & set(identity)


def test_a_run_of_another_format_has_no_identity_that_could_be_compared(run):
    run.folder.mkdir(parents=True)
    run.write_record(record_with() | {"format": FORMAT - 1})
    with pytest.raises(ValueError, match=f"format {FORMAT - 1} and this suite writes {FORMAT}"):
        _ = run.identity


def test_a_run_is_opened_once_and_its_folder_is_then_taken(run):
    opened = run.open(record_with(), 1000)
    assert (opened.state.step, opened.checkpoint) == (0, None)
    assert json.loads(run.config_path.read_text()) == record_with()
    assert opened.lock
    opened.lock.close()
    again = run.open(record_with(max_steps=9), 1000)  # no step was taken
    assert again.lock
    again.lock.close()
    assert run.settings["max_steps"] == 9
    save_checkpoint(run, 2)
    with pytest.raises(ValueError, match="runs/t exists already; continue it with --resume"):
        run.open(record_with(), 1000)


def test_a_resumed_run_goes_on_from_its_newest_checkpoint_or_the_chosen_one(run):
    for step in (0, 2, 4):
        if step:
            save_checkpoint(run, step)
        else:
            run.folder.mkdir(parents=True)
            run.write_record(record_with())
    opened = run.open(record_with(resume=True, max_steps=8), 1000)
    assert opened.lock
    opened.lock.close()
    assert (opened.state, opened.checkpoint) == (load_state(run.checkpoints[4]), run.checkpoints[4])
    chosen = run.open(record_with(resume_from=str(run.checkpoints[2]), max_steps=8), 1000)
    assert chosen.lock
    chosen.lock.close()
    assert (chosen.state.step, chosen.checkpoint) == (2, run.checkpoint_path(2))
    assert steps(run) == [2]
    assert (run.replaced / "checkpoints/step-000004").is_dir()


def test_a_run_is_not_resumed_under_another_setting_nor_where_there_is_none(run):
    with pytest.raises(ValueError, match=r"there is no run to resume in .*runs/t"):
        run.open(record_with(resume=True), 1000)
    run.folder.mkdir(parents=True)
    run.write_record(record_with())
    changed = record_with(resume=True, policy={"base_model": "c", "revision": "x", "learning_rate": 0.2})
    with pytest.raises(ValueError, match=r"started otherwise \(policy/learning_rate: 0\.1 -> 0\.2\)"):
        run.open(changed, 1000)
    assert run.record == record_with()
