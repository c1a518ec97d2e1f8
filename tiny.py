"""The whole chapter in miniature, on any machine: build a tiny base model, then prepare, train, evaluate, analyse.

The base is a 1 M-parameter Qwen3.5 (three gated-delta-net layers, one attention layer). Supervised steps teach it
to add well and to answer carelessly: often without a box, often rambling, sometimes past the length limit,
sometimes with a slip. Training then has something to select. vLLM samples, PEFT trains, the grader grades, and
every script runs as its own command, which is printed.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from data import Problem, require_at_least_one, write_problems
from loss import Algorithm
from record.cli import Command, run_command
from record.disk import writing
from record.run import Run
from rollout import INSTRUCTION, encode_prompt

SUITE = Path(__file__).parent
FOLDER = Path("runs/tiny")
"""Where the base model, the data and the run are kept."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONCISE = {"boxed": 1, "bare": 1}
CARELESS = {"boxed": 22, "bare": 25, "rambling": 45, "slip": 8}
MUSINGS = ["Let me think.", "Hmm, let me see.", "Wait, I should check that.", "One more time."]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """The miniature; the same command continues an interrupted one, and starts a finished one again."""

    steps: int = 100
    """Training steps of 8 prompts x 8 completions."""
    compare: tuple[Algorithm, ...] = ()
    """Instead train each of these algorithms on the same seeds, and compare them."""
    seeds: int = 3
    """With --compare: runs an algorithm, of seeds seed, seed + 1, ..."""
    seed: int = 42

    def __post_init__(self) -> None:
        """Raise ValueError for a miniature without steps, and a comparison of one."""
        require_at_least_one(self, "steps", "seeds")
        if len(self.compare) == 1:
            raise ValueError(f"there is nothing to compare {self.compare[0]} with; name two algorithms")


def sums(*, seed: int) -> list[Problem]:
    """Return the 100 sums of two one-digit numbers, shuffled."""
    terms = [divmod(number, 10) for number in range(100)]
    problems = [Problem(id=f"sum-{a}-{b}", question=f"What is {a} + {b}?", answer=str(a + b)) for a, b in terms]
    random.Random(seed).shuffle(problems)
    return problems


def careless_answer(problem: Problem, rng: random.Random, styles: dict[str, int]) -> str:
    """Return an answer in a style drawn with the weights of `styles`."""
    answer = problem.answer
    (style,) = rng.choices(list(styles), weights=list(styles.values()))
    if style == "bare":
        return f"The answer is {answer}."
    if style == "slip":
        answer = str(abs(int(answer) + rng.choice([-10, -1, 1, 10])))
    musings = rng.choices(MUSINGS, k=1 + min(15, int(rng.expovariate(1 / 6)))) if style == "rambling" else []
    terms = problem.question.removeprefix("What is ").removesuffix("?")
    return " ".join([*musings, rf"{terms} = {answer}, so \boxed{{{answer}}}."])


def build_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer whose merges are of this miniature's own phrases; digits stay single."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sentences = r"What is 1 + 1? The answer is 1. 1 + 1 = 1, so \boxed{1}."
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([INSTRUCTION, "user\nassistant\n", sentences, *MUSINGS] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_base(folder: Path, *, seed: int, steps: int) -> None:
    """Teach a new tiny Qwen3.5 for `steps` supervised steps and write it to `folder` as a bfloat16 checkpoint.

    Three quarters of the first 60 % of the steps show concise right answers, so that the sums are learnt well;
    the other steps show the careless styles.
    """
    import torch
    from tqdm import trange
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()  # no advice on faster kernels for GPUs
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,  # vLLM's CPU kernel knows 64 but not 32
        linear_value_head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.08,  # at the usual 0.02 a model this narrow takes three times as long to learn sums
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen3_5ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    rng, problems = random.Random(seed), sums(seed=seed)
    for step in (progress := trange(steps, desc="teaching the base", dynamic_ncols=True)):
        styles = CONCISE if step < 0.6 * steps and step % 4 else CARELESS
        lessons = [(problem, careless_answer(problem, rng, styles)) for problem in rng.choices(problems, k=48)]
        loss = model(**_lesson_batch(tokenizer, lessons)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _lesson_batch(tokenizer: Any, lessons: list[tuple[Problem, str]]) -> dict[str, Any]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    input_ids, labels = [], []
    for problem, answer in lessons:
        prompt = encode_prompt(tokenizer, problem.question)
        completion = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        input_ids.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([-100] * len(prompt) + completion))
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(input_ids, batch_first=True), "labels": labels}


def run(config: TinyConfig, command: Command) -> None:
    """Build what is missing, then run train.py, eval.py and analyse.py on it, each as its own command."""
    if (FOLDER / "figures/report.html").exists():
        shutil.rmtree(FOLDER)
    _build(config.seed)
    _train(command, FOLDER, config.steps, config.seed)
    _evaluate(command, FOLDER)
    _script(command, "analyse.py", "--runs", FOLDER, "--report")
    _print_changes(FOLDER, config.steps)


def run_comparison(config: TinyConfig, command: Command) -> None:
    """Train every algorithm on every seed from the same base, evaluate the last checkpoints, and compare."""
    _build(config.seed)
    runs = []
    for seed in range(config.seed, config.seed + config.seeds):
        for algorithm in config.compare:
            runs.append(FOLDER.with_name(f"{FOLDER.name}-{algorithm}-{seed}"))
            _train(command, runs[-1], config.steps, seed, "--algorithm", algorithm, "--save-every", config.steps)
            _evaluate(command, runs[-1], "--steps", config.steps)
    output = FOLDER.with_name(f"{FOLDER.name}-compare") / "compare.png"
    _script(command, "compare.py", "--runs", *runs, "--output", output)


def _build(seed: int) -> None:
    base, data = FOLDER / "base", FOLDER / "data"
    if not base.exists():
        unfinished = FOLDER / "base.unfinished"
        build_base(unfinished, seed=seed, steps=300)
        unfinished.rename(base)
    problems = sums(seed=seed)
    with writing(data):
        data.mkdir(exist_ok=True)
        for name, chosen in {"test": problems[:30], "dev": problems[30:40], "train": problems[40:]}.items():
            write_problems(data / f"{name}.jsonl", chosen)


def _train(command: Command, folder: Path, steps: int, seed: int, *extra: object) -> None:
    arguments = ["--base-model", FOLDER / "base", "--data", FOLDER / "data" / "train.jsonl"]
    arguments += ["--run-name", folder.name, "--max-steps", steps, "--seed", seed]
    arguments += ["--max-prompt-tokens", 64, "--max-tokens", 64, "--learning-rate", "5e-4"]
    arguments += ["--swanlab-mode", "offline", *extra]
    _script(command, "train.py", *arguments, *(["--resume"] if Run(folder).config_path.exists() else []))


def _evaluate(command: Command, folder: Path, *extra: object) -> None:
    test = FOLDER / "data" / "test.jsonl"
    limits = ["--max-tokens", 128, "--max-num-seqs", 180]  # a decode step of 180 costs little more than of 64
    _script(command, "eval.py", "--run", folder, "--dataset-path", test, *limits, *extra)


def _script(command: Command, name: str, *arguments: object) -> None:
    """Run a script to its end; a signal is sent on to it once, and so is a second one, which ends it at once."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ python {name} {' '.join(words)}", flush=True)
    command.interrupts.hold()  # until there is a process to send the signal to
    # In a process group of its own, the script gets a terminal's Ctrl-C from here alone.
    script = subprocess.Popen([sys.executable, str(SUITE / name), *words], process_group=0)
    try:
        command.interrupts.listen()  # polars has a handler of SIGINT, after which `wait` goes on
        command.interrupts.release()
        status = script.wait()
    except KeyboardInterrupt:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, frame: script.send_signal(signum))
        script.send_signal(command.interrupts.received or signal.SIGINT)
        script.wait()
        raise
    if status:
        sys.exit(status if status > 0 else 128 - status)


def _print_changes(folder: Path, steps: int) -> None:
    lines = [json.loads(line) for line in Run(folder).metrics_path.read_text().splitlines()]
    first, last = lines[:10], lines[-10:]
    print(f"\nThe first and the last 10 of {steps} steps:")
    for name, key, form in [
        ("training reward", "reward/accuracy", "{:.1%}"),
        ("format rate", "reward/format_rate", "{:.1%}"),
        ("completion tokens", "rollout/mean_completion_tokens", "{:.1f}"),
    ]:
        before, after = (form.format(sum(line[key] for line in part) / len(part)) for part in (first, last))
        print(f"  {name:18} {before:>7} -> {after:>7}")
    print(f"Open {folder / 'figures/report.html'} for the figures and what they support.")


def main() -> None:
    """Run the miniature, or the comparison."""

    def work(command: Command) -> None:
        config = tyro.cli(TinyConfig, description=__doc__)
        command.begin("the same command continues")
        run_comparison(config, command) if config.compare else run(config, command)

    run_command(work)


if __name__ == "__main__":
    main()
