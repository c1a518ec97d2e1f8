"""The training loop: configure, collect, update, log, checkpoint, resume.

`python train.py` without flags is the reported run. What a reader could get wrong: a step's policy version is the
number of steps before it; with one optimizer step a batch the sampler's weights are the policy's, so a ratio
other than 1 measures the mismatch of two engines. Under `torchrun` every rank runs this loop in step with the
others, on its share of the groups and of the micro-batches, and rank 0 alone keeps the run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm

from data import (
    DataError,
    Group,
    Problem,
    ProblemStream,
    questions_sha256,
    read_problems,
    require_at_least_one,
    sha256,
    training_data,
    training_order,
)
from engine.gate import CheckError, Gate
from engine.hub import base_fingerprint, load_tokenizer, model_folder
from engine.memory import CARDS_GB, describe, memory_dry_run, model_needs, settings_here
from engine.policy import Policy, PolicyConfig, TrainOutput
from engine.process import prepare_process
from engine.ranks import Ranks
from engine.sampler import AdapterError, Sampler, SamplerConfig, SamplingConfig, require_engine
from engine.selfcheck import SelfCheck, self_check
from loss import Denominators, LossConfig, make_loss
from record.cli import Command, run_command
from record.disk import writing
from record.interrupts import Interrupts
from record.log import MetricsLog, NoLog
from record.metrics import StepClock, step_metrics
from record.mirror import SwanlabMode
from record.progress import Progress
from record.rollouts import write_rollouts
from record.run import OpenedRun, Run, fresh_state, new_record
from reward import Grader
from rollout import collect_groups, encode_prompt, fitting_problems, mini_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run; the defaults are the reported one."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: Path = Path("datasets/train.jsonl")
    """Training problems, as prepare_data.py writes them."""
    max_train_samples: int | None = None
    """Use only the first problems of the shuffled file."""
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
    """Steps between checkpoints; the last step is always saved, and with 0 no other."""
    keep_checkpoints: int | None = None
    """Keep only the newest so many; by default all, which eval.py compares."""
    seed: int = 42
    """Of the problems' order, the adapter's initial weights and the sampling."""
    data_seed: int | None = None
    """Of the problems' order alone, so that runs of several seeds meet the same problems; by default the seed."""
    save_rollouts: Literal["all", "none"] = "all"
    """Keep each step's completions in runs/NAME/rollouts; `analyse.py --replay` scores them again."""
    swanlab_mode: SwanlabMode = "online"
    swanlab_project: str = "gspo"
    swanlab_workspace: str | None = None
    """By default the one of the SwanLab login."""
    sampler_memory_fraction: float | None = None
    """Share of the GPU's memory that vLLM may take; by default as planned from the model's config."""
    sampler_sleep: Literal["auto", "on", "off"] = "auto"
    """Let vLLM hand its GPU memory over during the update; by default where the plan needs it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, or would be trained wrongly."""
        require_at_least_one(self, "max_steps", "groups_per_step", "max_train_samples", "keep_checkpoints")
        if self.save_every < 0:
            raise ValueError(f"save_every is {self.save_every}; it must be at least 0")
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
    def run(self) -> Run:
        """Where the run is kept."""
        return Run(Path("runs", self.run_name))

    def sequences_at_once(self, num_ranks: int) -> int:
        """Return the most that one of so many ranks samples in a step."""
        return -(-self.groups_per_step // num_ranks) * self.sampling.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What `prepare` found to be in order."""

    config: TrainConfig
    problems: list[Problem]
    tokenizer: Any
    opened: OpenedRun


def train(setup: Setup, grader: Grader, interrupts: Interrupts, ranks: Ranks) -> None:
    """Run the steps that are left; every way out saves the last whole one."""
    config, run = setup.config, setup.config.run
    ranks.log_to(run.rank_folder(ranks.rank))
    problems = ProblemStream(setup.problems, num_taken=setup.opened.state.problems_taken)
    with start_sampler(config, ranks) as sampler, start_log(setup, ranks) as log:
        interrupts.listen()  # SwanLab's handler would upload first
        policy = start_policy(setup, ranks)
        gate = prove(setup, policy, sampler, ranks)
        with Progress(setup.opened, policy, log, interrupts) as progress:
            for step in progress.steps():
                clock, outputs = StepClock(grader), list[TrainOutput]()
                with clock("sync"):
                    sampler.wake()
                    load_adapter(policy, sampler, run.rank_folder(ranks.rank) / "adapter", step, ranks)
                with clock("rollout"):
                    own_groups = collect_groups(
                        sampler.stream,
                        grader,
                        setup.tokenizer,
                        ranks.shard(list(enumerate(problems.take(config.groups_per_step)))),
                        config.sampling,
                        seed=config.seed,
                        step=step,
                        divide_by_std=config.loss.objective.divide_by_std,
                    )
                    groups = ranks.unshard(own_groups)
                with clock("gate"), interrupts.deferred():
                    if config.save_rollouts == "all" and ranks.is_main:
                        write_rollouts(run.rollouts_path(step), groups)
                    sampler.sleep()
                    reading = gate.check(training_data(own_groups, degenerate=True))
                with clock("update"):
                    parts = mini_batches(groups, config.loss.mini_batches)
                    batches = policy.begin_update([training_data(part) for part in parts])
                    if len(batches) > 1:
                        gate.check_update(policy.mismatches(batches))
                    for part, batch in zip(parts, batches, strict=True):
                        loss = make_loss(config.loss, denominators(part, config))
                        outputs.append(policy.forward_backward(batch, loss))
                        if len(batches) == 1:
                            gate.check_update(outputs[0].sequences.mismatches)
                        progress.weights_move()
                        policy.optim_step()
                with clock("checkpoint"):
                    progress.prepare_checkpoint(problems_taken=problems.num_taken)
                metrics = step_metrics(
                    step,
                    groups,
                    outputs,
                    reading,
                    clock.times,
                    problems_taken=problems.num_taken,
                    learning_rate=config.policy.learning_rate,
                    mismatch_weight=config.loss.mismatch_weight,
                )
                progress.commit(metrics)


def load_adapter(policy: Policy, sampler: Sampler, folder: Path, step: int, ranks: Ranks) -> None:
    """Write the adapter and load it into the sampler; CheckError where the ranks hold different ones."""
    with writing(folder, num_bytes=policy.adapter_bytes):
        policy.save_adapter(folder)
    sampler.load_adapter(folder, version=step - 1)
    if ranks.world_size > 1 and not ranks.agree(sha256(folder / "adapter_model.safetensors")):
        raise CheckError("the ranks hold different adapters: the update went otherwise on one of them")


def denominators(groups: Sequence[Group], config: TrainConfig) -> Denominators:
    """Return what the loss of an optimizer step divides by, degenerate groups included."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    return Denominators.of(lengths, max_tokens=config.sampling.max_tokens)


def start_sampler(config: TrainConfig, ranks: Ranks) -> Sampler:
    """Start the engine that samples."""
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


def start_log(setup: Setup, ranks: Ranks) -> MetricsLog | NoLog:
    """Open the run's log, which rank 0 alone keeps."""
    run, state, settings = setup.config.run, setup.opened.state, setup.opened.record["settings"]
    if not ranks.is_main:
        return NoLog()
    return MetricsLog(run, after_step=state.step, swanlab_id=state.swanlab_id, settings=settings)


def start_policy(setup: Setup, ranks: Ranks) -> Policy:
    """Load the policy, from the checkpoint that rank 0 resumes from where there is one."""
    config = setup.config
    policy = Policy(config.policy, seed=config.seed, temperature=config.sampling.temperature, ranks=ranks)
    if setup.opened.checkpoint:
        policy.load(setup.opened.checkpoint)
    if ranks.world_size > 1:
        policy.restore(ranks.broadcast(policy.state()))
    tqdm.write(policy.coverage())
    return policy


def prove(setup: Setup, policy: Policy, sampler: Sampler, ranks: Ranks) -> Gate:
    """Check both engines and the memory, record what was found, and return the gate for the steps."""
    config = setup.config
    checked = check_engines(setup, policy, sampler, config.run.rank_folder(ranks.rank) / "adapter")
    memory_dry_run(
        policy,
        sampler,
        encode_prompt(setup.tokenizer, setup.problems[0].question),
        config.sampling,
        make_loss(config.loss, Denominators(num_sequences=1, num_tokens=1, max_tokens=config.sampling.max_tokens)),
        num_sequences=config.sequences_at_once(ranks.world_size),
    )
    if ranks.is_main:
        config.run.write_record(setup.opened.record | {"self_check": checked.findings})
    if config.loss.old_logprobs == "policy" and config.loss.mini_batches == 1:
        tqdm.write("the old policy is the policy itself, once a batch: every ratio is exactly 1, nothing clips")
    return Gate(policy, baseline_mismatch=max(ranks.all_gather(checked.baseline_mismatch)))


def check_engines(setup: Setup, policy: Policy, sampler: Sampler, adapter: Path) -> SelfCheck:
    """Run the self-check on the first problems."""
    questions = [problem.question for problem in setup.problems[:20]]
    prompts = [encode_prompt(setup.tokenizer, question) for question in questions[:4]]
    return self_check(policy, sampler, setup.tokenizer, prompts, questions, setup.config.sampling, adapter=adapter)


def check(setup: Setup, ranks: Ranks) -> None:
    """Run the self-check alone, on every rank, and print what rank 0 verified."""
    with start_sampler(setup.config, ranks) as sampler, tempfile.TemporaryDirectory() as folder:
        policy = start_policy(setup, Ranks())
        findings = check_engines(setup, policy, sampler, Path(folder)).findings
    width = max(map(len, findings))
    for name, finding in findings.items() if ranks.is_main else ():
        print(f"{name:{width}}  {finding}")


# --- Checks before anything starts ---


def prepare(config: TrainConfig, grader: Grader, ranks: Ranks) -> Setup:
    """Check everything that can be wrong before an engine starts, and write the run's `config.json`.

    ValueError or OSError, in one sentence, naming what is missing and what to do; nothing has been written then.
    The data, the checkpoints and the run itself are rank 0's; the base model is each rank's own.
    """
    require_engine()
    _require_files(config, ranks)
    problems = _problems_in_order(config, grader) if ranks.is_main else []
    fingerprint = base_fingerprint(model_folder(config.policy.base_model, config.policy.revision))
    needs = model_needs(config.policy)
    tokens, memory_fraction, sleep = settings_here(
        needs,
        config.sampling,
        num_sequences=config.sequences_at_once(1),  # whatever the number of ranks: micro-batches follow from it
        micro_batch_tokens=config.policy.micro_batch_tokens,
        memory_fraction=config.sampler_memory_fraction,
        sleep=config.sampler_sleep,
    )
    if ranks.is_main and memory_fraction:
        print(f"micro-batch tokens {tokens}, sampler's share of the GPU {memory_fraction}, sampler sleep {sleep}")
    policy = replace(config.policy, micro_batch_tokens=tokens)
    config = replace(config, policy=policy, sampler_memory_fraction=memory_fraction, sampler_sleep=sleep)
    tokenizer = load_tokenizer(config.policy.base_model, config.policy.revision)
    if not ranks.agree(fingerprint):  # all have come this far, so that a run may be begun
        raise ValueError(
            f"the ranks hold different weights or tokenizers under the name {config.policy.base_model}"
        )
    if ranks.is_main:
        fitting = fitting_problems(problems, tokenizer, config.sampling.max_prompt_tokens)
        if num_left_out := len(problems) - len(fitting):
            print(f"{num_left_out} questions exceed {config.sampling.max_prompt_tokens} tokens: left out")
        record = new_record(
            json.loads(json.dumps(asdict(config), default=str)),
            data={
                "sha256": sha256(config.data),
                "problems": len(fitting),
                "left_out_for_length": num_left_out,
                "questions_sha256": questions_sha256(fitting[: config.max_steps * config.groups_per_step]),
            },
            base_fingerprint=fingerprint,
            objective=asdict(config.loss.objective),
        )
        if config.check:
            opened = OpenedRun(run=config.run, record=record, state=fresh_state(record))
        else:
            opened = config.run.open(record, needs.num_adapter_parameters)
        ranks.broadcast((fitting, opened.record, opened.state))
    else:
        fitting, record, state = ranks.broadcast(None)
        opened = OpenedRun(run=config.run, record=record, state=state)
    return Setup(config=config, problems=fitting, tokenizer=tokenizer, opened=opened)


def _require_files(config: TrainConfig, ranks: Ranks) -> None:
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


def _problems_in_order(config: TrainConfig, grader: Grader) -> list[Problem]:
    problems = read_problems(config.data)
    try:
        grader.check_references(problems)
    except DataError as error:
        raise DataError(f"{config.data} cannot be trained on:\n{error}") from error
    order = training_order(problems, seed=config.seed if config.data_seed is None else config.data_seed)
    return order[: config.max_train_samples]


def main() -> None:
    """Parse flags, check, train."""
    config = tyro.cli(
        TrainConfig, description=__doc__, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    )

    def work(command: Command) -> None:
        if config.plan:
            needs, sequences = model_needs(config.policy), config.sequences_at_once(1)
            print(describe(needs, config.sampling, num_sequences=sequences, cards=CARDS_GB))
            return
        with command.init_ranks() as ranks, Grader(training=True) as grader:  # its workers start before any engine
            ranks.take_a_gpu()
            prepare_process()
            setup = prepare(ranks.broadcast(config), grader, ranks)
            if config.check:
                check(setup, ranks)
            elif setup.opened.state.step < config.max_steps:
                command.begin(lambda: config.run.how_to_go_on(ranks.launcher))
                train(setup, grader, command.interrupts, ranks)
            elif ranks.is_main:
                taken = setup.opened.state.step
                print(f"{config.run.folder} has its {taken} steps already; raise --max-steps to go on")

    run_command(work, AdapterError, CheckError)


if __name__ == "__main__":
    main()
