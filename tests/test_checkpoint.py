"""What is on disk: rollouts, the lock, what a resumed run replaces, what is dropped."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint import (
    DiskError,
    TrainState,
    load_state,
    lock_run,
    newest_good_checkpoint,
    read_rollouts,
    require_space,
    save_checkpoint,
    set_aside,
    write_rollouts,
)

POLICY = SimpleNamespace(checkpoint_bytes=100, save=lambda folder: (folder / "weights").write_text("w"))


def save(run, step, *, keep=None, interrupted=False, policy: Any = POLICY):
    state = TrainState(
        step=step,
        problems_taken=0,
        seed=0,
        base_model="b",
        base_fingerprint="f",
        swanlab_id=None,
        interrupted=interrupted,
    )
    save_checkpoint(run / "checkpoints" / f"step-{step:06d}", policy, state, keep=keep)


def steps(run):
    return [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").iterdir())]


def test_rollouts_come_back_as_they_were(make_group, tmp_path):
    groups = [make_group([1, 0, 0]), make_group([1, 1], seed=1)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", groups)
    assert read_rollouts(tmp_path / "rollouts" / "step-000001.parquet") == groups
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000001.parquet"]


def test_an_answer_after_many_completions_without_one_is_kept(make_group, tmp_path):
    groups = [make_group([0] * 150), make_group([0, 1])]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", groups)
    assert read_rollouts(tmp_path / "rollouts" / "step-000001.parquet") == groups


def test_a_checkpoint_of_an_interruption_gives_way_to_the_next_and_old_ones_to_the_newest(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, interrupted=True)
    assert steps(tmp_path) == [1, 2]
    save(tmp_path, 3)
    assert steps(tmp_path) == [1, 3]
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_the_newest_so_many_checkpoints_are_kept(tmp_path, keep):
    for step in range(1, 9):
        save(tmp_path, step, keep=keep)
        assert steps(tmp_path) == list(range(max(1, step + 1 - keep), step + 1))


def test_a_changed_state_and_another_base_model_are_refused_by_name(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints/step-000002"
    with pytest.raises(ValueError, match=r"step-000002 belongs to another base model \(f, here g\)"):
        load_state(folder, base_fingerprint="g")
    whole = (folder / "state.json").read_text()
    (folder / "state.json").write_text(whole.replace('"problems_taken": 0', '"problems_taken": 8'))
    with pytest.raises(ValueError, match=r"step-000002 is damaged: state\.json is not what was written there"):
        load_state(folder)
    assert newest_good_checkpoint(tmp_path) == tmp_path / "checkpoints/step-000001"
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be used"):
        newest_good_checkpoint(tmp_path, base_fingerprint="g")


def test_a_checkpoint_that_cannot_be_written_names_path_and_space_and_leaves_the_others(tmp_path):
    def save_half(folder):
        (folder / "weights").write_text("w")
        raise OSError(28, "No space left on device")

    save(tmp_path, 1)
    full = SimpleNamespace(checkpoint_bytes=2_000_000, save=save_half)
    with pytest.raises(DiskError, match=r"step-000002 cannot be written .*about 2 MB\. \S+ MB are free"):
        save(tmp_path, 2, policy=full)
    assert steps(tmp_path) == [1]
    assert newest_good_checkpoint(tmp_path) == tmp_path / "checkpoints/step-000001"


def test_what_a_resumed_run_does_again_is_moved_not_deleted(make_group, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
        write_rollouts(tmp_path / "rollouts" / f"step-{step:06d}.parquet", [make_group([1, 0])])
    (tmp_path / "checkpoints/.step-000004.tmp").mkdir()  # what a kill leaves
    evaluations = [
        "base.jsonl",
        "step-000002.jsonl",
        "step-9-mine",
        "step-000003.jsonl",
        "step-000003.z",
    ]
    (tmp_path / "eval").mkdir()
    for name in evaluations:
        (tmp_path / "eval" / name).touch()
    set_aside(tmp_path, after_step=2)
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "replaced/checkpoints/step-000003/weights").exists()
    assert (tmp_path / "replaced/rollouts/step-000003.parquet").exists()
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == evaluations[:3]
    assert sorted(path.name for path in (tmp_path / "replaced/eval").iterdir()) == evaluations[3:]
    save(tmp_path, 3)
    set_aside(tmp_path, after_step=2)  # a second time
    assert steps(tmp_path) == [1, 2]


def test_a_run_is_locked_by_one_process_and_a_dead_ones_lock_holds_nothing(tmp_path):
    script = f"""
import checkpoint, pathlib, sys
lock = checkpoint.lock_run(pathlib.Path({str(tmp_path)!r}))
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(ValueError, match=f"process {holder.pid} on .* is training in {tmp_path}"):
            lock_run(tmp_path)
        holder.kill()
    lock_run(tmp_path).close()


def test_a_run_that_the_disk_cannot_hold_is_refused(tmp_path):
    require_space(tmp_path / "runs" / "new", 1)
    with pytest.raises(DiskError, match=r"would write up to 1,000,000\.00 GB .* --keep-checkpoints N"):
        require_space(tmp_path / "runs" / "new", 10**15)
