"""What must hold: nothing sampled is lost or written twice, a continued evaluation equals an uninterrupted one to
the byte, and what cannot be evaluated is refused in one sentence before an engine starts.

The sampler of the quick tests is a stand-in whose every completion depends on the whole block, as a real one's
low-order bits do; the slow ones use the engine.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import eval as evaluation
from data import Completion, Problem, sampling_seed, write_problems
from engine.sampler import Sampler, SamplingConfig
from eval import EvalConfig, carry_out, check_references, main, prepare
from record.checkpoint import TrainState, write_state
from record.run import Run
from reward import Grader
from stats.evaluation_files import BusyError
from stats.evaluations import Evaluation, read_evaluation, summarise

ROOT = Path(__file__).parents[1]
REAL_RESPONSES = ROOT / "../shared/cases/real_responses.jsonl"


class StandIn:
    """Answers "1 + 1 is 2" in a box or not, by a hash of its own seed and of every seed of the block."""

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.dies_after = dies_after
        self.loaded: list[str] = []
        self.num_streamed = 0

    def load_adapter(self, path: Path, *, version: int) -> None:
        self.loaded.append(str(path))

    def unload_adapter(self) -> None:
        self.loaded.append("base")

    def stream(
        self, prompts: Sequence[list[int]], config: SamplingConfig, seeds: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, list[Completion]]]:
        assert len(prompts) == len(seeds)
        order = sorted(range(len(prompts)), key=lambda i: sampling_seed("order", seeds[i]))
        for index in order:
            if self.num_streamed == self.dies_after:
                raise KeyboardInterrupt
            self.num_streamed += 1
            yield index, [self._completion(sampling_seed(seeds, seed)) for seed in seeds[index]]

    def _completion(self, seed: int) -> Completion:
        length = 1 + seed % 7
        text = [r"1 + 1 is \boxed{2}", r"1 + 1 is \boxed{3}", "1 + 1 is"][seed % 3]
        return Completion(
            token_ids=[5] * length,
            logprobs=[-0.5] * length,
            text=text,
            finish_reason="length" if seed % 3 == 2 else "stop",
        )


def as_sampler(stand_in: StandIn) -> Sampler:
    return cast("Sampler", stand_in)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grader: Grader) -> Path:
    """A current folder with a base model's folder, a run of two checkpoints, and 7 problems; no weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "Grader", lambda: nullcontext(grader))  # the real one, started once
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda *_: SimpleNamespace(decode=lambda prompt: ""))
    monkeypatch.setattr(evaluation, "prepare_process", lambda: None)
    monkeypatch.setattr(evaluation, "encode_prompt", lambda tokenizer, question: list(question.encode()))
    for name in ("base", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"name": name}))
    write_problems(
        "sums.jsonl", [Problem(id=f"sum-{i}", question=f"1 + {i}?", answer=str(1 + i)) for i in range(7)]
    )
    fingerprint = evaluation.base_fingerprint(tmp_path / "base")
    for step in (20, 40):
        folder = tmp_path / f"runs/demo/checkpoints/step-{step:06d}"
        (folder / "vllm").mkdir(parents=True)
        adapter = {"base_model_name_or_path": "base", "r": 4}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        (folder / "adapter_model.safetensors").write_text(f"weights of {step}")
        state = TrainState(
            step=step, problems_taken=0, seed=1, base_model="base", base_fingerprint=fingerprint, swanlab_id=None
        )
        write_state(folder, state)
    policy = {"base_model": "base", "revision": None, "lora_rank": 4}
    run = {"settings": {"policy": policy}, "base_fingerprint": fingerprint}
    (tmp_path / "runs/demo/config.json").write_text(json.dumps(run))
    return tmp_path


def settings(**changes: Any) -> EvalConfig:
    """Blocks of 3 problems x 4."""
    plain: dict[str, Any] = {
        "base_model": "base",
        "dataset_path": Path("sums.jsonl"),
        "output": Path("out.jsonl"),
        "val_n": 4,
        "max_num_seqs": 14,
    }
    return EvalConfig(**plain | changes)


def run_settings(**changes: Any) -> EvalConfig:
    return settings(base_model=None, output=None, run=Path("runs/demo"), **changes)


def evaluate(config: EvalConfig, *, sampler: Sampler) -> list[Evaluation]:
    """Check and carry out, as `main` does."""
    plan = prepare(config)
    with evaluation.Grader() as grader:
        check_references(plan, grader)
        return carry_out(plan, grader, sampler)


def test_every_generation_is_kept_with_its_verdict(workplace: Path):
    (result,) = evaluate(settings(), sampler=as_sampler(StandIn()))
    assert result == read_evaluation(Path("out.jsonl"))
    assert [p.id for p in result.problems] == [f"sum-{i}" for i in range(7)]
    generations = [g for p in result.problems for g in p.generations]
    assert len(generations) == 28
    for problem in result.problems:
        for g in problem.generations:
            right = g.text.endswith(f"{{{problem.reference}}}")
            assert (g.correct, g.formatted) == (right, "boxed" in g.text)
            assert g.answer == (g.text[-2] if g.formatted else None)
            assert g.verdict == ("correct" if right else "wrong" if g.formatted else "no_box")
            assert g.truncated == (g.finish_reason == "length") == (not g.formatted)
            assert 1 <= g.completion_tokens <= 7


def test_the_summary_lies_beside_the_file_as_json_without_nan(workplace: Path):
    (result,) = evaluate(settings(val_n=1, limit=1), sampler=as_sampler(StandIn()))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    summary = json.loads(Path("out.summary.json").read_text(), parse_constant=refuse)
    assert summary["num_correct"] == summarise(result).num_correct
    assert summary["mean_tokens"]["low"] is None  # one problem says nothing about others


@pytest.mark.parametrize("num_finished", range(8))
def test_a_killed_evaluation_continues_to_the_very_bytes_of_an_uninterrupted_one(
    workplace: Path, num_finished: int
):
    evaluate(settings(output=Path("whole.jsonl")), sampler=as_sampler(StandIn()))
    if num_finished < 7:
        with pytest.raises(KeyboardInterrupt):
            evaluate(settings(), sampler=as_sampler(StandIn(dies_after=num_finished)))
        partial = read_evaluation(Path("out.jsonl"))
        assert len(partial.problems) == num_finished
        assert not partial.complete
        with Path("out.jsonl").open("ab") as file:
            file.write(b'{"id": "sum-')  # killed in the middle of a line
    again = StandIn()
    evaluate(settings(), sampler=as_sampler(again))
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert again.num_streamed == 7 - num_finished // 3 * 3 if num_finished < 7 else 7


def test_a_finished_evaluation_is_not_sampled_again(workplace: Path):
    evaluate(settings(), sampler=as_sampler(StandIn()))
    before = Path("out.jsonl").read_bytes()
    again = StandIn(dies_after=0)
    evaluate(settings(), sampler=as_sampler(again))
    assert Path("out.jsonl").read_bytes() == before


def test_a_run_is_evaluated_base_first_with_each_adapter_loaded_once(workplace: Path):
    stand_in = StandIn()
    results = evaluate(run_settings(), sampler=as_sampler(stand_in))
    assert stand_in.loaded == [
        "base",
        "runs/demo/checkpoints/step-000020/vllm",
        "runs/demo/checkpoints/step-000040/vllm",
    ]
    assert [e.header.name for e in results] == ["base", "step 20", "step 40"]
    assert [e.header.step for e in results] == [0, 20, 40]
    assert sorted(p.name for p in Path("runs/demo/eval").glob("*.jsonl")) == [
        "base.jsonl",
        "step-000020.jsonl",
        "step-000040.jsonl",
    ]


def test_a_repeat_has_other_seeds_and_another_file_and_touches_nothing(workplace: Path):
    evaluate(run_settings(steps=(0,)), sampler=as_sampler(StandIn()))
    before = Path("runs/demo/eval/base.jsonl").read_bytes()
    (second,) = evaluate(run_settings(steps=(0,), repeat=2), sampler=as_sampler(StandIn()))
    assert Path("runs/demo/eval/base.jsonl").read_bytes() == before
    assert second == read_evaluation(Path("runs/demo/eval/base-repeat-2.jsonl"))
    assert second.header.name == "base, run 2"
    assert second.problems != read_evaluation(Path("runs/demo/eval/base.jsonl")).problems


def test_steps_choose_among_the_checkpoints(workplace: Path):
    assert [t.header.label for t in prepare(run_settings(steps=(40, 0))).targets] == ["base", "step-000040"]
    with pytest.raises(ValueError, match="has no step 30; it has 0, 20, 40"):
        prepare(run_settings(steps=(30,)))


def test_a_checkpoint_brings_its_base_model_and_rank(workplace: Path):
    plan = prepare(settings(base_model=None, model_path=Path("runs/demo/checkpoints/step-000020")))
    assert (plan.sampler.base_model, plan.sampler.lora_rank) == ("base", 4)
    assert plan.targets[0].header.name == "step 20"


def test_the_chapters_defaults(workplace: Path):
    config = EvalConfig()
    assert config.sampling == SamplingConfig(group_size=12, max_prompt_tokens=4095, max_tokens=8192)
    assert config.dataset_path == Path("datasets/aime25.jsonl")
    assert config.max_num_seqs // config.val_n == 5


def test_the_base_model_is_the_chapters_unless_named(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(evaluation, "model_folder", lambda name, revision: asked.append(name) or Path("base"))
    assert prepare(settings(base_model=None)).sampler.base_model == asked[0] == "Qwen/Qwen3.5-4B"


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `main` says on stderr, on one line; it must exit with status 2 and leave no file."""
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(SystemExit) as exit_info:
        main(flags)
    assert exit_info.value.code == 2
    assert sorted(Path.cwd().rglob("*")) == before
    return " ".join(capsys.readouterr().err.replace("│", "").split())


FLAGS = ("--base-model", "base", "--dataset-path", "sums.jsonl", "--output", "out.jsonl")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--base-model", "base"), "no data set datasets/aime25.jsonl: write it with `python prepare_data.py`"),
        (("--base-model", "base", "--problems", "none.jsonl"), "no data set none.jsonl"),
        ((*FLAGS, "--val-n", "0"), "val_n is 0; it must be at least 1"),
        ((*FLAGS, "--limit", "0"), "limit is 0"),
        ((*FLAGS, "--temperature", "0"), "temperature is 0.0"),
        ((*FLAGS, "--max-prompt-tokens", "3"), "'sum-0': its prompt has 6 tokens; raise --max-prompt-tokens"),
        ((*FLAGS, "--run", "runs/demo"), "--run writes into RUN/eval/"),
        (("--run", "runs/none"), "runs/none is not a run: config.json cannot be read"),
        ((*FLAGS, "--steps", "20"), "name the run with --run"),
        ((*FLAGS, "--model-path", "base"), "base is not a checkpoint: it has no adapter_config.json"),
        (
            ("--base-model", "other", "--dataset-path", "sums.jsonl", "--run", "runs/demo"),
            "was trained on the base model base, and other holds other weights",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str
):
    assert expected in refusal(capsys, *flags)


def test_a_foreign_adapter_that_says_too_little_is_refused(workplace: Path, capsys):
    foreign = workplace / "foreign"
    foreign.mkdir()
    (foreign / "adapter_config.json").write_text('{"base_model_name_or_path": null, "r": 4}')
    (foreign / "adapter_model.safetensors").write_text("weights")
    flags = (*FLAGS[2:], "--model-path", "foreign")
    assert "foreign does not say which base model it belongs to; give --base-model" in refusal(capsys, *flags)
    assert prepare(settings(model_path=Path("foreign"))).sampler.lora_rank == 4
    (foreign / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    assert "foreign is not a LoRA adapter: its adapter_config.json names no rank r" in refusal(capsys, *flags)


def test_an_adapter_without_a_state_is_refused_on_a_base_of_another_name(workplace: Path, capsys):
    checkpoint = "runs/demo/checkpoints/step-000020"
    Path(checkpoint, "state.json").unlink()
    said = refusal(capsys, "--base-model", "other", *FLAGS[2:], "--model-path", checkpoint)
    assert "trained on the base model base, and other holds" in said


def test_a_reference_that_nothing_equals_is_refused_and_others_need_not_be_integers(workplace: Path, capsys):
    hard = [r"\frac{1}{2}", "-3", "2.5", r"\sqrt{2}"]
    write_problems("sums.jsonl", [Problem(id=f"p{i}", question="?", answer=a) for i, a in enumerate(hard)])
    assert len(prepare(settings()).prompts) == 4
    write_problems("sums.jsonl", [Problem(id="p", question="?", answer=r"\frac{")])
    refused = refusal(capsys, *FLAGS)
    assert "sums.jsonl cannot be graded" in refused
    assert "row 1, id p: no answer can match the reference" in refused
    with pytest.raises(ValueError, match="id p: no answer can match"):
        evaluate(settings(), sampler=as_sampler(StandIn()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"val_n": 3}, "group_size is 4 there and 3 here"),
        ({"seed": 7}, "seed is 42 there and 7 here"),
        ({"repeat": 2}, "repeat is 1 there and 2 here"),
        ({"temperature": 0.5}, "temperature is 1.0 there and 0.5 here"),
        ({"base_model": "other"}, "base_model is 'base' there and 'other' here"),
        ({"limit": 2}, "dataset_sha256 is "),
        ({"max_num_seqs": 64}, "problems_per_block is 3 there and 16 here"),
    ],
)
def test_other_settings_never_mix_into_a_file(workplace: Path, change: dict[str, Any], named: str):
    evaluate(settings(), sampler=as_sampler(StandIn()))
    before = Path("out.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"out.jsonl holds another evaluation: {named}"):
        prepare(settings(**change))
    assert Path("out.jsonl").read_bytes() == before


def test_a_retrained_checkpoint_never_mixes_into_the_file_of_the_old_one(workplace: Path):
    evaluate(run_settings(), sampler=as_sampler(StandIn()))
    Path("runs/demo/checkpoints/step-000020/adapter_model.safetensors").write_text("other weights")
    with pytest.raises(ValueError, match=r"step-000020\.jsonl holds another evaluation: adapter_sha256"):
        prepare(run_settings())


def test_a_file_is_written_by_one_evaluation_at_a_time(workplace: Path, grader: Grader):
    plan = prepare(settings())

    class Intruder(StandIn):
        def stream(self, prompts: Any, config: Any, seeds: Any) -> Iterator[tuple[int, list[Completion]]]:
            with pytest.raises(BusyError, match="being written by another evaluation"):
                carry_out(plan, grader, as_sampler(StandIn()))
            return super().stream(prompts, config, seeds)

    (result,) = carry_out(plan, grader, as_sampler(Intruder()))
    assert result.complete


def what_ended_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, engine: bool = True
) -> str:
    """What `main` says on stderr of a fault once it has begun, with or before the engine; it must exit with 1."""

    def start(config: Any) -> Any:
        return nullcontext(StandIn()) if engine else pytest.fail("the engine was started")

    monkeypatch.setattr(evaluation, "Sampler", start)
    with pytest.raises(SystemExit) as exit_info:
        main((*FLAGS, "--val-n", "4", "--max-num-seqs", "14", *flags))
    assert exit_info.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_file_that_another_evaluation_writes_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    evaluate(settings(), sampler=as_sampler(StandIn()))
    half = Path("out.jsonl").read_bytes().splitlines(keepends=True)[:3]
    Path("out.jsonl").write_bytes(b"".join(half))
    with Path("out.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = what_ended_it(monkeypatch, capsys, engine=False)
    assert "error: out.jsonl is being written by another evaluation; wait for it to end" in said
    assert Path("out.jsonl").read_bytes() == b"".join(half)


def test_a_place_where_nothing_can_be_written_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = what_ended_it(monkeypatch, capsys, "--output", "sums.jsonl/out.jsonl", engine=False)
    assert "error: sums.jsonl/out.jsonl cannot be written" in said


def test_a_full_disk_is_named_and_loses_no_problem(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The disk is a limit on the size of a file, which falls in the middle of a line."""
    evaluate(settings(), sampler=as_sampler(StandIn()))
    whole = Path("out.jsonl").read_bytes()
    Path("out.jsonl").unlink()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, unlimited[1]))
    try:
        said = what_ended_it(monkeypatch, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "error: out.jsonl cannot be written" in said
    assert Path("out.jsonl").read_bytes() == whole[: len(whole) // 2]
    evaluate(settings(), sampler=as_sampler(StandIn()))
    assert Path("out.jsonl").read_bytes() == whole


def test_a_foreign_file_is_never_written_over(workplace: Path, capsys):
    Path("out.jsonl").write_text("my notes\n")
    assert "out.jsonl, line 1: not an evaluation" in refusal(capsys, *FLAGS)


def test_a_box_of_5000_digits_is_a_verdict_not_a_fault(workplace: Path):
    class Verbose(StandIn):
        def _completion(self, seed: int) -> Completion:
            return Completion(token_ids=[5], logprobs=[-0.5], text=rf"\boxed{{{'7' * 5000}}}", finish_reason="stop")

    (result,) = evaluate(settings(limit=1), sampler=as_sampler(Verbose()))
    assert {g.correct for g in result.problems[0].generations} == {False}
    assert summarise(result).verdicts.get("crash", 0) == 0


@pytest.mark.skipif(not REAL_RESPONSES.exists(), reason="../shared/cases is not on this machine")
def test_real_responses_are_graded_and_summarised_without_a_fault(workplace: Path, grader: Grader):
    cases = [json.loads(line) for line in REAL_RESPONSES.read_bytes().split(b"\n")[:-1]]
    texts = [case["response"] for case in cases]

    class Recorded(StandIn):
        def stream(self, prompts: Sequence[list[int]], config: Any, seeds: Any) -> Any:
            for index in range(len(prompts)):
                text = texts[self.num_streamed]
                self.num_streamed += 1
                yield index, [Completion(token_ids=[5], logprobs=[-0.5], text=text, finish_reason="stop")]

    answers = [case["reference"] for case in cases]
    write_problems("real.jsonl", [Problem(id=f"{i}", question="?", answer=a) for i, a in enumerate(answers)])
    plan = prepare(settings(val_n=1, dataset_path=Path("real.jsonl")))  # with references that `evaluate` refuses
    (result,) = carry_out(plan, grader, as_sampler(Recorded()))
    summary = summarise(result)
    assert summary.num_problems == len(cases) == sum(summary.verdicts.values())
    assert "crash" not in summary.verdicts
    graded = [(p.generations[0], case["correct"]) for p, case in zip(result.problems, cases, strict=True)]
    agree = [g.correct == correct for g, correct in graded if g.formatted]
    assert sum(agree) >= 0.97 * len(agree)  # who is right where they differ is test_reward.py's matter


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys; sys.argv = ['eval.py', '--help']\n"
        "import eval\n"
        "try: eval.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# --- With the real engine, one in a process of its own ---


@pytest.fixture(scope="module")
def real_run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints of the tiny base whose adapters are far from nothing."""
    import torch

    from engine.hub import base_fingerprint
    from engine.policy import Policy, PolicyConfig
    from record.checkpoint import prepare_checkpoint

    run = tmp_path_factory.mktemp("runs") / "demo"
    policy = Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=4, lora_alpha=4), seed=0)
    fingerprint = base_fingerprint(tiny_base)
    for step in (20, 40):
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                if ".lora_B." in name:
                    parameter.normal_(std=0.002 * step)
        state = TrainState(
            step=step,
            problems_taken=0,
            seed=0,
            base_model=str(tiny_base),
            base_fingerprint=fingerprint,
            swanlab_id=None,
        )
        prepare_checkpoint(Run(run).checkpoint_path(step), policy, state)
        Run(run).publish_checkpoint(step)
    policy_settings = {"base_model": str(tiny_base), "revision": None, "lora_rank": 4}
    settings = {"settings": {"policy": policy_settings}, "base_fingerprint": fingerprint}
    (run / "config.json").write_text(json.dumps(settings))
    return run


def command(problems: Path, *flags: object) -> list[str]:
    small = ["--val-n", 4, "--limit", 6, "--max-num-seqs", 12, "--max-tokens", 40, "--max-prompt-tokens", 128]
    return [sys.executable, str(ROOT / "eval.py"), *map(str, ["--dataset-path", problems, *small, *flags])]


@pytest.mark.slow
def test_a_run_evaluated_in_one_engine_survives_a_kill_and_equals_engines_of_their_own(
    real_run: Path, tiny_problems: Path, tmp_path: Path
):
    evaluate_run = command(tiny_problems, "--run", real_run)
    names = ["base.jsonl", "step-000020.jsonl", "step-000040.jsonl"]

    with subprocess.Popen(evaluate_run, stderr=subprocess.PIPE) as process:
        assert process.stderr
        said = b""
        while b"eval step 20" not in said:  # the base is done, the next is being sampled
            chunk = os.read(process.stderr.fileno(), 1000)
            assert chunk, said.decode()
            said += chunk
        process.kill()
    assert read_evaluation(real_run / "eval/base.jsonl").complete
    assert not (real_run / "eval/step-000040.jsonl").exists()
    subprocess.run(evaluate_run, check=True)
    continued = {name: (real_run / "eval" / name).read_bytes() for name in names}

    for name in names:
        (real_run / "eval" / name).unlink()
    table = subprocess.run(evaluate_run, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert {name: (real_run / "eval" / name).read_bytes() for name in names} == continued
    assert [line.split("  ")[0] for line in table.split("\n") if "/24" in line] == ["base", "step 20", "step 40"]

    base, first, second = (read_evaluation(real_run / "eval" / name) for name in names)
    assert base.problems != first.problems != second.problems  # the adapters do something

    alone = tmp_path / "alone.jsonl"
    checkpoint = real_run / "checkpoints/step-000020"
    subprocess.run(command(tiny_problems, "--model-path", checkpoint, "--output", alone), check=True)
    assert read_evaluation(alone).problems == first.problems  # what was loaded before left nothing behind
