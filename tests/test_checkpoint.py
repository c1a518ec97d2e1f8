"""Rollouts on disk; checkpoints are tested with the loop that writes them."""

from checkpoint import read_rollouts, write_rollouts


def test_rollouts_come_back_as_they_were(make_group, tmp_path):
    groups = [make_group([1, 0, 0]), make_group([1, 1], seed=1)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", groups)
    assert read_rollouts(tmp_path / "rollouts" / "step-000001.parquet") == groups
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000001.parquet"]
