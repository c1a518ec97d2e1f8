"""Several ranks: the same experiment as on one, whole or not at all.

What ranks tell each other goes through real gloo groups, between threads where that is enough and between processes
that `torchrun` starts, each with its own vLLM engine, where it is not.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Lock

import pytest
import torch
from made_up import newest_good_checkpoint
from safetensors.torch import load_file
from torch.distributed import HashStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from bench.update import take_steps
from engine.policy import Policy, PolicyConfig
from engine.ranks import LAUNCHER_VARIABLES, RankError, Ranks
from loss import LossConfig
from record.checkpoint import load_state
from record.rollouts import read_rollouts
from record.run import Run

SUITE = Path(__file__).parent.parent


LOADING = Lock()
"""transformers changes the whole process while it loads a model."""


def make_policy(base, ranks, **changes):
    with LOADING:
        return Policy(PolicyConfig(base_model=str(base), lora_rank=4, **changes), seed=ranks.rank, ranks=ranks)


def on_ranks(count, work):
    """Return what `work(ranks)` returns on each of so many ranks, which are threads."""
    store = HashStore()

    def run(rank):
        with Ranks(rank, count, ProcessGroupGloo(store, rank, count, timedelta(seconds=60))) as ranks:
            return work(ranks)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_hold_every_item_once_and_come_back_in_order(count):
    items = list(range(7))
    shards = on_ranks(count, lambda ranks: ranks.shard(items))
    assert sorted(item for shard in shards for item in shard) == items
    assert on_ranks(count, lambda ranks: ranks.unshard(ranks.shard(items))) == [items] * count
    assert on_ranks(count, lambda ranks: ranks.unshard(ranks.shard([]))) == [[]] * count


def test_values_of_any_size_reach_every_rank():
    values = [{"rank": rank, "text": "x" * 10**rank} for rank in range(3)]
    assert on_ranks(3, lambda ranks: ranks.all_gather(values[ranks.rank])) == [values] * 3
    assert on_ranks(3, lambda ranks: ranks.broadcast(values[ranks.rank])) == [values[0]] * 3


def test_ranks_agree_only_where_all_hold_the_same_value():
    assert on_ranks(3, lambda ranks: ranks.agree("same")) == [True] * 3
    assert on_ranks(3, lambda ranks: ranks.agree(min(ranks.rank, 1))) == [False] * 3
    assert Ranks().agree("alone")


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    for name in filter(LAUNCHER_VARIABLES.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    ranks = Ranks.init()
    assert (ranks.rank, ranks.world_size, ranks.is_main, ranks.launcher) == (0, 1, True, "python")


def test_sums_are_the_same_to_the_bit_on_every_rank():
    parts = [torch.randn(3, 1001, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def work(ranks):
        tensors = [parts[ranks.rank][0].clone(), parts[ranks.rank][1:].clone()]
        ranks.all_reduce(tensors)
        return torch.cat([tensors[0][None], tensors[1]])

    first, *others = on_ranks(3, work)
    torch.testing.assert_close(first, sum(parts))
    assert all(torch.equal(other, first) for other in others)


def test_a_rank_that_has_ended_is_noticed_by_the_others():
    """Also by one that is waiting for another that has noticed."""

    def work(ranks):
        if ranks.rank == 1:
            raise ValueError("its own fault")
        with pytest.raises(RankError, match="another rank has ended"):
            ranks.all_gather(None)

    with pytest.raises(ValueError, match="its own fault"):
        on_ranks(4, work)


def test_the_launchers_variables_are_known_by_name():
    launched = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    launched += "ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE"
    assert all(LAUNCHER_VARIABLES.fullmatch(name) for name in launched.split())
    assert not any(LAUNCHER_VARIABLES.fullmatch(name) for name in ("PATH", "OMP_NUM_THREADS", "RANKED", "MY_RANK"))


def test_every_rank_of_a_machine_takes_a_gpu_of_its_own(monkeypatch):
    """The GPUs are imagined: there are three, of which the user has hidden others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,7")
    Ranks().take_a_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4, 5,7"
    last = Ranks(rank=11, world_size=12, local_rank=2, local_world_size=3)
    last.take_a_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(ValueError, match="4 ranks were started here for 3 GPUs"):
        Ranks(rank=1, world_size=4, local_rank=1, local_world_size=4).take_a_gpu()


@pytest.mark.parametrize("choices", [{}, {"mini_batches": 2, "old_logprobs": "policy"}])
@pytest.mark.parametrize("num_groups", [4, 1])
def test_any_number_of_ranks_takes_the_same_step(tiny_base, make_group, choices, num_groups):
    """One group of two sequences leaves two of four ranks without any."""
    groups = [make_group([1, 0, 0] if num_groups > 1 else [1, 0], seed=seed) for seed in range(num_groups)]
    groups.append(make_group([1, 1], seed=9))  # teaches nothing

    def work(ranks):
        policy = make_policy(tiny_base, ranks, learning_rate=1e-3)  # not even the same start
        policy.restore(ranks.broadcast(policy.state()))
        updates = [take_steps(policy, groups, LossConfig(**choices), max_tokens=32) for _ in range(2)]
        state = policy.state()
        return updates, state["adapter_model"] | state["optimizer"]

    ((expected, learnt),) = on_ranks(1, work)
    for count in (2, 4):
        for updates, also_learnt in on_ranks(count, work):
            assert [name for name, tensor in learnt.items() if not torch.equal(also_learnt[name], tensor)] == []
            for found, one in zip(updates, expected, strict=True):
                assert [len(step.sequences.advantages) for step in found] == [
                    len(step.sequences.advantages) for step in one
                ]
                for step, reference in zip(found, one, strict=True):
                    assert step.loss == pytest.approx(reference.loss, abs=1e-7)  # of terms that nearly cancel
                    assert step.grad_norm == pytest.approx(reference.grad_norm, rel=1e-9)
                    assert step.padding_fraction == reference.padding_fraction
                    mismatches, expected_mismatches = step.sequences.mismatches, reference.sequences.mismatches
                    assert sorted(mismatches.tolist()) == sorted(expected_mismatches.tolist())


def test_a_step_that_teaches_nothing_is_skipped_by_all(tiny_base, make_group):
    def work(ranks):
        policy = make_policy(tiny_base, ranks)
        return take_steps(policy, [make_group([1, 1]), make_group([0, 0])], LossConfig(), max_tokens=32)

    assert on_ranks(2, work) == [[], []]


def flags(base, data, **changes):
    settings = {
        "base_model": base, "data": data, "run_name": "t", "max_steps": 3, "save_every": 2,
        "groups_per_step": 4, "group_size": 4, "max_prompt_tokens": 64, "max_tokens": 16,
        "lora_rank": 8, "learning_rate": 1e-3, "swanlab_mode": "disabled",
    } | changes  # fmt: skip
    return [str(word) for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


def start(folder, *words):
    """Start Python on these words in `folder`, with one thread a rank."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip


def launch(num_ranks, folder, script, *arguments):
    """Run a script in `folder` on so many ranks; return the finished process."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--"] if num_ranks > 1 else []
    process = start(folder, *launcher, script, *arguments)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def trained(folder, steps=3):
    """Return the groups of each step, and the adapter at the end, of the run in `folder`."""
    run = Run(folder / "runs/t")
    rollouts = [read_rollouts(run.rollouts[step]) for step in range(1, steps + 1)]
    return rollouts, load_file(run.checkpoints[steps] / "adapter_model.safetensors")


def launch_nodes(folders, script, *arguments):
    """Run a script on one rank in each of the folders, which stand for machines of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for number, folder in enumerate(folders):
        launcher = ["--nnodes", len(folders), "--node-rank", number, "--master-addr", "127.0.0.1"]
        words = ["-m", "torch.distributed.run", *launcher, "--master-port", port, "--nproc-per-node", 1, "--"]
        nodes.append(start(folder, *words, script, *arguments))
    return [node.communicate()[1] for node in nodes], [node.returncode for node in nodes]


@pytest.fixture(scope="module")
def on_one_and_two_ranks(tmp_path_factory, tiny_base, tiny_problems, paid_train):
    """Return the folders of the same three steps on one rank, and on two of which the other has no data."""
    one, two, other = (tmp_path_factory.mktemp(name) for name in ("one", "two", "other"))
    for folder in (one, two):
        shutil.copy(tiny_problems, folder / "sums.jsonl")
    done = launch(1, one, paid_train, *flags(tiny_base, "sums.jsonl"))
    assert done.returncode == 0, done.stderr[-3000:]
    errors, statuses = launch_nodes([two, other], paid_train, *flags(tiny_base, "sums.jsonl"))
    assert statuses == [0, 0], errors
    assert [str(path.relative_to(other)) for path in sorted(other.rglob("*"))] == [
        "runs", "runs/t", "runs/t/rank-1", "runs/t/rank-1/adapter", "runs/t/rank-1/adapter/adapter_config.json",
        "runs/t/rank-1/adapter/adapter_model.safetensors", "runs/t/rank-1/log.txt",
    ]  # fmt: skip
    assert "LoRA rank 8 on 31 modules" in (other / "runs/t/rank-1/log.txt").read_text()
    return one, two


def _first_tokens(groups):
    """Return the first token of each completion, which its seed decides, and its log-probability."""
    completions = [completion for group in groups for completion in group.completions]
    return [(completion.token_ids[0], completion.logprobs[0]) for completion in completions]


def assert_the_same_experiment(one, other):
    (rollouts, adapter), (other_rollouts, other_adapter) = trained(one), trained(other)
    firsts, other_firsts = (_first_tokens(groups[0]) for groups in (rollouts, other_rollouts))
    assert [token for token, _ in firsts] == [token for token, _ in other_firsts]
    if firsts != other_firsts:  # though nothing has been learnt yet
        pytest.skip("on this machine, vLLM's rounding depends on what is sampled together")
    for groups, other_groups in zip(rollouts, other_rollouts, strict=True):
        assert [group.problem for group in groups] == [group.problem for group in other_groups]
        for group, other_group in zip(groups, other_groups, strict=True):
            assert group.scores == other_group.scores
            assert group.policy_version == other_group.policy_version
            for completion, other_completion in zip(group.completions, other_group.completions, strict=True):
                assert completion.token_ids == other_completion.token_ids
    for name, weight in adapter.items():
        torch.testing.assert_close(other_adapter[name], weight, rtol=0, atol=1e-6)
    assert max(float(weight.abs().max()) for name, weight in adapter.items() if ".lora_B." in name) > 1e-3


@pytest.mark.slow
def test_two_ranks_with_their_engines_run_the_experiment_of_one(on_one_and_two_ranks):
    assert_the_same_experiment(*on_one_and_two_ranks)
    run = on_one_and_two_ranks[1] / "runs/t"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "adapter", "checkpoints", "config.json", "metrics.jsonl", "rollouts",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_is_resumed_on_another_number_of_ranks(
    on_one_and_two_ranks, tmp_path, tiny_base, paid_train, before, after
):
    copy = shutil.copytree(on_one_and_two_ranks[before - 1], tmp_path / "copy")
    resume = ["--resume-from", "runs/t/checkpoints/step-000002"]
    done = launch(after, copy, paid_train, *flags(tiny_base, "sums.jsonl"), *resume)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (copy / "runs/t/replaced/checkpoints/step-000003").is_dir()
    assert_the_same_experiment(on_one_and_two_ranks[0], copy)


@pytest.mark.slow
def test_an_evaluation_on_two_ranks_writes_the_file_of_one(on_one_and_two_ranks, tmp_path):
    """Three blocks of two problems, for the base and two checkpoints."""
    written = []
    for num_ranks in (1, 2):
        copy = shutil.copytree(on_one_and_two_ranks[0], tmp_path / str(num_ranks))
        shape = ["--val-n", 3, "--limit", 5, "--max-tokens", 16, "--max-num-seqs", 6]
        done = launch(num_ranks, copy, SUITE / "eval.py", "--run", "runs/t", "--problems", "sums.jsonl", *shape)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("95 % intervals") == 1
        written.append({path.name: path.read_bytes() for path in sorted((copy / "runs/t/eval").glob("*.json*"))})
    assert len(written[0]) == 6
    assert written[0] == written[1]


@pytest.fixture
def faulty_train(tmp_path):
    """Return a script that is train.py, except that its rank 1 does `fault` at the gate of step 2."""

    def make(fault):
        script = tmp_path / "train.py"
        script.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(SUITE)!r})
rank = os.environ["RANK"]
import train
from engine.gate import CheckError, Gate
gate = Gate.check
calls = []
def faulty(self, data):
    calls.append(1)
    if rank == "1" and len(calls) == 2:
        {fault}
    return gate(self, data)
Gate.check = faulty
if __name__ == "__main__":
    train.main()
""")
        return script

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "last_words"),
    [
        ('raise CheckError("rank 1 went wrong on purpose")', "error: rank 1 went wrong on purpose"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9"),
    ],
)
def test_a_rank_that_fails_brings_all_down_and_is_heard_last(
    tmp_path, tiny_base, tiny_problems, faulty_train, fault, last_words
):
    """With one group a step, of which rank 1 has none."""
    arguments = flags(tiny_base, tiny_problems, groups_per_step=1, max_steps=500, save_every=500)
    done = launch(2, tmp_path, faulty_train(fault), *arguments)
    assert done.returncode == 1
    *_, root_cause = done.stderr.split("Root Cause (first observed failure):")
    assert last_words in root_cause
    assert re.search(r"rank +: 1 ", root_cause)
    assert "python train.py" not in done.stderr
    assert re.search(
        r"continue from the newest checkpoint: torchrun --nproc-per-node 2 -- \S*train.py .*--resume", done.stderr
    )
    newest = newest_good_checkpoint(tmp_path / "runs/t")
    assert newest
    assert newest == tmp_path / "runs/t/checkpoints/step-000001"
    assert load_state(newest).interrupted


@pytest.mark.slow
def test_ctrl_c_saves_once_and_says_how_to_go_on(tmp_path, tiny_base, tiny_problems):
    arguments = flags(tiny_base, tiny_problems, max_steps=500, save_every=500)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--", SUITE / "train.py"]
    process = start(tmp_path, *words, *arguments)
    metrics = tmp_path / "runs/t/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
            process.wait(timeout=0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    newest = newest_good_checkpoint(tmp_path / "runs/t")
    assert newest
    assert newest.name == f"step-{metrics.read_text().count(chr(10)):06d}"
    assert load_state(newest).interrupted
    assert errors.count("continue from the newest checkpoint") == 1


@pytest.mark.slow
def test_bad_input_is_refused_once(tmp_path, tiny_base, tiny_problems):
    done = launch(2, tmp_path, SUITE / "train.py", *flags(tiny_base, tmp_path / "nowhere.jsonl"))
    assert done.returncode == 1
    message = f"the data file {tmp_path}/nowhere.jsonl does not exist"
    before_the_launchers, *_ = done.stderr.split("Traceback")
    assert before_the_launchers.count(f"error: {message}") == 1
    assert f": error: {message}" in done.stderr.split("Root Cause (first observed failure):")[1]
    assert not (tmp_path / "runs").exists()
