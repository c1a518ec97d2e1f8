"""The whole chapter in miniature, on any machine: build a tiny base model, then prepare, train, evaluate, analyse.

The base is a 1 M-parameter Qwen3.5 (three gated-delta-net layers to one attention layer) that this script
teaches, by supervised steps, to add well and to answer carelessly: often without a box, often rambling, sometimes
past the length limit, sometimes with a slip. Training then has something to select. Nothing is stubbed: vLLM
samples, PEFT trains, the grader grades, and every script runs as its own command, which is printed.
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

from data import Problem, write_problems
from loss import Algorithm
from rollout import INSTRUCTION, encode_prompt

HERE = Path(__file__).parent
RUNNING: list[subprocess.Popen | None] = []
"""The script that is running, if one is; None while it is being started."""
EARLY: list[int] = []
"""Signals that came in that moment."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONCISE = {"boxed": 1, "bare": 1}
CARELESS = {"boxed": 22, "bare": 25, "rambling": 45, "slip": 8}
MUSINGS = ["Let me think.", "Hmm, let me see.", "Wait, I should check that.", "One more time."]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """The miniature; interrupted, it continues where it was."""

    steps: int = 100
    """Training steps of 8 prompts x 8 completions."""
    vision: bool = False
    """Wrap the model as a vision-and-text checkpoint, as the published Qwen3.5-4B is, under runs/tiny-vision."""
    keep: bool = False
    """Keep the base model of a finished miniature; without it a finished one starts again from nothing."""
    compare: tuple[Algorithm, ...] = ()
    """Instead train each of these algorithms on the same seeds, and compare them."""
    seeds: int = 3
    """With --compare: runs an algorithm, of seeds seed, seed + 1, ..."""
    teaching_steps: int = 300
    """Supervised steps that the base is taught for."""
    seed: int = 42

    def __post_init__(self) -> None:
        """Refuse a miniature without steps, and a comparison of one."""
        for name in ("steps", "seeds", "teaching_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if len(self.compare) == 1:
            raise ValueError(f"there is nothing to compare {self.compare[0]} with; name two algorithms")

    @property
    def folder(self) -> Path:
        """Where the base model, the data and the run are kept."""
        return Path("runs", "tiny-vision" if self.vision else "tiny")


def sums(*, seed: int) -> list[Problem]:
    """Return the 100 sums of two one-digit numbers, shuffled."""
    problems = [
        Problem(id=f"sum-{a}-{b}", question=f"What is {a} + {b}?", answer=str(a + b))
        for a in range(10)
        for b in range(10)
    ]
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
    phrases = [
        INSTRUCTION,
        "user\nassistant\n",
        r"What is 1 + 1? The answer is 1. 1 + 1 = 1, so \boxed{1}.",
        *MUSINGS,
    ]
    tokenizer.train_from_iterator(
        phrases * 2,
        trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_base(folder: Path, *, seed: int, steps: int, vision: bool = False) -> None:
    """Teach a fresh tiny Qwen3.5 for some supervised steps and write it to `folder` as a bfloat16 checkpoint.

    Most of the first 60 % of the steps show concise right answers, so that the sums are learnt well; the rest
    show the careless styles.
    """
    import torch
    from tqdm import trange
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()  # that there are faster kernels for GPUs
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
    if vision:
        model = _with_vision(model)
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
    return {
        "input_ids": pad_sequence(input_ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def _with_vision(text_model: Any) -> Any:
    """Return the same language model behind a (random, unused) vision tower, as published Qwen3.5 models come."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    hidden_size = text_model.config.hidden_size
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=text_model.config.to_dict(),
            vision_config={
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 1,
                "out_hidden_size": hidden_size,
                "num_position_embeddings": 16,
            },
            tie_word_embeddings=True,
        )
    )
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    model.tie_weights()
    return model


def run(config: TinyConfig) -> None:
    """Build what is missing, then run train.py, eval.py and analyse.py on it, each as its own command."""
    folder = config.folder
    if (folder / "figures" / "report.html").exists():
        for path in folder.iterdir():
            if path.name != "base" or not config.keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    _build(config)
    _train(config, folder, seed=config.seed)
    _evaluate(config, folder)
    _script("analyse.py", "--runs", folder, "--report")
    _say_what_happened(folder, config.steps)


def run_comparison(config: TinyConfig) -> None:
    """Train every algorithm on every seed from the same base, evaluate the last checkpoints, and compare."""
    _build(config)
    runs = []
    for seed in range(config.seed, config.seed + config.seeds):
        for algorithm in config.compare:
            runs.append(config.folder.with_name(f"{config.folder.name}-{algorithm}-{seed}"))
            _train(config, runs[-1], "--algorithm", algorithm, "--save-every", config.steps, seed=seed)
            _evaluate(config, runs[-1], "--steps", config.steps)
    output = config.folder.with_name(f"{config.folder.name}-compare") / "compare.png"
    _script("compare.py", "--runs", *runs, "--output", output)


def _build(config: TinyConfig) -> None:
    base, data = config.folder / "base", config.folder / "data"
    if not base.exists():
        unfinished = config.folder / "base.unfinished"
        build_base(unfinished, seed=config.seed, steps=config.teaching_steps, vision=config.vision)
        unfinished.rename(base)
    problems = sums(seed=config.seed)
    data.mkdir(exist_ok=True)
    for name, chosen in {"test": problems[:30], "dev": problems[30:40], "train": problems[40:]}.items():
        write_problems(data / f"{name}.jsonl", chosen)


def _train(config: TinyConfig, folder: Path, *extra: object, seed: int) -> None:
    arguments = ["--base-model", config.folder / "base", "--data", config.folder / "data" / "train.jsonl"]
    arguments += ["--run-name", folder.name, "--max-steps", config.steps, "--seed", seed]
    arguments += ["--max-prompt-tokens", 64, "--max-tokens", 64, "--learning-rate", "5e-4"]
    arguments += ["--swanlab-mode", "offline", *extra]
    _script("train.py", *arguments, *(["--resume"] if (folder / "config.json").exists() else []))


def _evaluate(config: TinyConfig, folder: Path, *extra: object) -> None:
    test = config.folder / "data" / "test.jsonl"
    limits = ["--max-tokens", 128, "--max-num-seqs", 180]  # a decode step of 180 costs little more than of 64
    _script("eval.py", "--run", folder, "--dataset-path", test, *limits, *extra)


def _script(name: str, *arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    print(f"\n$ python {name} {' '.join(words)}", flush=True)
    # In a process group of its own, the script hears of a Ctrl-C once, from here, and has time to save.
    RUNNING.append(None)
    with subprocess.Popen([sys.executable, str(HERE / name), *words], process_group=0) as script:
        RUNNING[0] = script
        while EARLY:
            script.send_signal(EARLY.pop())
        status = script.wait()
        RUNNING.clear()
    if status < 0 or status > 128:
        print("\ninterrupted: the same command continues")
    if status:
        sys.exit(status if status > 0 else 128 - status)


def _pass_on(signum: int, frame: object) -> None:
    """Hand a signal to the script that is running; with none, stop here."""
    if not RUNNING:
        raise KeyboardInterrupt
    if RUNNING[0] is None:
        EARLY.append(signum)
    else:
        RUNNING[0].send_signal(signum)


def _say_what_happened(folder: Path, steps: int) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[:10], lines[-10:]
    print(f"\nThe first and the last 10 of {steps} steps:")
    for name, key, form in [
        ("training reward", "reward/accuracy", "{:.1%}"),
        ("format rate", "reward/format_rate", "{:.1%}"),
        ("completion tokens", "rollout/completion_tokens", "{:.1f}"),
    ]:
        before, after = (form.format(sum(line[key] for line in part) / len(part)) for part in (first, last))
        print(f"  {name:18} {before:>7} -> {after:>7}")
    print(f"Open {folder / 'figures' / 'report.html'} for the figures and what they support.")


def main() -> None:
    """Run the miniature, or the comparison."""
    config = tyro.cli(TinyConfig, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _pass_on)
    try:
        run_comparison(config) if config.compare else run(config)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues")
        sys.exit(130)


if __name__ == "__main__":
    main()
