"""Seconds a whole training step takes here and in TRL, side by side, on the same model, problems and group shape.

Both train LoRA of the same rank on the same modules with GSPO's objective and clip range. Both grade with the same
grader, and are then paid 1 and 0 in turn, so that no group is degenerate and both train every sequence. TRL's
GRPOTrainer generates with transformers, which is what works on a CPU, and trains in the micro-batches that were its
fastest of 16, 32 and 64 sequences. Two sizes, since an engine's overhead a step hides everything on a toy: the
miniature, and a randomly initialised Qwen3.5 of 100 M parameters.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

SUITE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SUITE))

from bench.gpu import build  # noqa: E402
from data import read_problems, write_problems  # noqa: E402
from rollout import INSTRUCTION  # noqa: E402
from tiny import build_base, sums  # noqa: E402

FIRST = 2  # steps that warm up, left out of the mean
PARTS = ("rollout", "grading", "gate", "update", "sync")


def ours(base: Path, data: Path, max_tokens: int, steps: int) -> dict[str, float]:
    """Return mean seconds of a step of train.py, whole and by part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ours", "--base-model", base, "--data", data]
        command += ["--max-steps", steps, "--max-prompt-tokens", 64, "--max-tokens", max_tokens]
        command += ["--learning-rate", "5e-4", "--swanlab-mode", "disabled", "--no-gradient-checkpointing"]
        _run(command, cwd=folder)
        lines = [json.loads(line) for line in Path(folder, "runs/gspo/metrics.jsonl").read_text().splitlines()]
    parts = {part: statistics.mean(line[f"time/{part}_seconds"] for line in lines[FIRST:]) for part in PARTS}
    return {"whole": statistics.mean(line["time/step_seconds"] for line in lines[FIRST:])} | parts


def trl(base: Path, data: Path, max_tokens: int, steps: int, micro_batch: int) -> dict[str, float]:
    """Return mean seconds of a step of TRL's GRPOTrainer, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "seconds.json")
        _run([sys.executable, __file__, "--trl", base, data, max_tokens, steps, micro_batch, output], cwd=folder)
        return {"whole": statistics.mean(json.loads(output.read_text())[FIRST:])}


def _run(command: list[Any], cwd: str) -> None:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stderr[-3000:]}")


def run_trl(base: Path, data: Path, max_tokens: int, steps: int, micro_batch: int, output: Path) -> None:
    """Train with TRL, and write the seconds of each step to `output`."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    from reward import Grader

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    head = model.get_output_embeddings()
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    targets = sorted({name.rpartition(".")[2] for name in linears})
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    rows = [
        {"prompt": [{"role": "user", "content": f"{p.question}\n\n{INSTRUCTION}"}], "answer": p.answer}
        for p in read_problems(data)
    ]
    with Grader() as grader, tempfile.TemporaryDirectory() as folder:

        def reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
            texts = [completion[0]["content"] for completion in completions]
            grader.score_many(zip(texts, answer, strict=True))
            return [float(number % 2) for number in range(len(texts))]

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            processing_class=AutoTokenizer.from_pretrained(base),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(r=32, lora_alpha=32, target_modules=targets),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                max_steps=steps,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=64 // micro_batch,
                num_generations=8,
                max_completion_length=max_tokens,
                temperature=1.0,
                beta=0.0,
                importance_sampling_level="sequence",
                loss_type="grpo",
                epsilon=3e-4,
                epsilon_high=4e-4,
                learning_rate=5e-4,
                adam_beta1=0.9,
                adam_beta2=0.95,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        started = time.perf_counter()
        trainer.train()
    output.write_text(json.dumps([after - before for before, after in zip([started, *ends], ends)]))  # noqa: B905


def run_ours() -> None:
    """Run train.py on the remaining arguments, paid in turn."""
    import reward
    import train
    from data import Score

    score_many = reward.Grader.score_many

    def in_turn(self: reward.Grader, pairs: Any, *, prompt: str = "") -> list[Score]:
        return [replace(score, reward=float(n % 2)) for n, score in enumerate(score_many(self, pairs))]

    reward.Grader.score_many = in_turn
    del sys.argv[1]
    train.main()


def main() -> None:
    """Print a table a size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_problems(folder / "sums.jsonl", sums(seed=0)[:60])
        build_base(folder / "tiny", seed=42, steps=300)
        build(folder / "large", "100 M")
        for size, max_tokens, steps, micro_batch in (("tiny", 96, 10, 64), ("large", 64, 4, 16)):
            mine = ours(folder / size, folder / "sums.jsonl", max_tokens, steps)
            theirs = trl(folder / size, folder / "sums.jsonl", max_tokens, steps, micro_batch)
            print(f"\n{size}, 64 x at most {max_tokens} tokens, mean of {steps - FIRST} steps")
            print(f"  TRL        {theirs['whole']:7.2f} s a step")
            print(f"  train.py   {mine['whole']:7.2f} s a step, {mine['whole'] / theirs['whole']:.2f} of TRL's")
            print("             " + ", ".join(f"{part} {mine[part]:.2f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        run_ours()
    elif sys.argv[1:2] == ["--trl"]:
        base, data, max_tokens, steps, micro_batch, output = sys.argv[2:]
        run_trl(Path(base), Path(data), int(max_tokens), int(steps), int(micro_batch), Path(output))
    else:
        tyro.cli(main)
