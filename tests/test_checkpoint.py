"""What is on disk: rollouts, checkpoints, and what a full disk leaves of them."""

from types import SimpleNamespace

import pytest
from made_up import save_checkpoint

from record.checkpoint import load_state, read_state
from record.disk import DiskError, require_space
from record.rollouts import read_rollouts, write_rollouts
from record.run import Run


def test_rollouts_come_back_as_they_were(make_group, tmp_path):
    groups = [make_group([1, 0, 0]), make_group([1, 1], seed=1)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", groups)
    assert read_rollouts(tmp_path / "rollouts" / "step-000001.parquet") == groups
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000001.parquet"]


def test_an_answer_after_many_completions_without_one_is_kept(make_group, tmp_path):
    groups = [make_group([0] * 150), make_group([0, 1])]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", groups)
    assert read_rollouts(tmp_path / "rollouts" / "step-000001.parquet") == groups


def test_a_changed_state_and_another_base_model_are_refused_by_name(tmp_path):
    run = Run(tmp_path)
    save_checkpoint(run, 1)
    save_checkpoint(run, 2)
    folder = run.checkpoints[2]
    with pytest.raises(ValueError, match=r"step-000002 belongs to another base model \(f, here g\)"):
        load_state(folder, base_fingerprint="g")
    whole = (folder / "state.json").read_text()
    (folder / "state.json").write_text(whole.replace('"problems_taken": 0', '"problems_taken": 8'))
    for read in (load_state, read_state):
        with pytest.raises(ValueError, match=r"step-000002 is damaged: state\.json is not what was written there"):
            read(folder)
    assert run.checkpoint_to_resume(None, base_fingerprint="f") == run.checkpoints[1]
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be used"):
        run.checkpoint_to_resume(None, base_fingerprint="g")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("v")])
def test_a_file_that_is_missing_or_changed_is_named(tmp_path, damage):
    run = Run(tmp_path)
    save_checkpoint(run, 1)
    damage(run.checkpoints[1] / "weights")
    with pytest.raises(ValueError, match="step-000001 is damaged: weights is missing or not what was written"):
        load_state(run.checkpoints[1])
    assert read_state(run.checkpoints[1]).step == 1  # which does not look at the other files


def test_a_checkpoint_that_cannot_be_written_names_path_and_space_and_leaves_the_others(tmp_path):
    def save_half(folder):
        (folder / "weights").write_text("w")
        raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    save_checkpoint(run, 1)
    full = SimpleNamespace(checkpoint_bytes=2_000_000, save=save_half)
    with pytest.raises(DiskError, match=r"step-000002 cannot be written .*about 2 MB\. \S+ MB are free"):
        save_checkpoint(run, 2, policy=full)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert run.checkpoint_to_resume(None, base_fingerprint="f") == run.checkpoints[1]


def test_a_run_that_the_disk_cannot_hold_is_refused(tmp_path):
    require_space(tmp_path / "runs" / "new", 1)
    with pytest.raises(DiskError, match=r"would write up to 1,000,000\.00 GB .* --keep-checkpoints N"):
        require_space(tmp_path / "runs" / "new", 10**15)
