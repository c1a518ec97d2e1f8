"""vLLM behind a few verbs: stream completions, load an adapter, sleep, wake.

What a reader could get wrong: `logprobs` of a completion are of the distribution that was sampled from
(temperature applied), the end token is one of its tokens, and vLLM accepts an adapter that matches none of
its modules without a word, so `Sampler.load_adapter` counts.

Letters: P prompt tokens, T completion tokens, G completions in a group.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import Completion, require_at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn; the defaults are the reported run's."""

    group_size: int = 8
    """Completions per prompt."""
    max_prompt_tokens: int = 2048
    """Questions with a longer prompt are left out when the data is loaded."""
    max_tokens: int = 4096
    """Longest completion, the end token included."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        """Refuse values that no engine can sample with."""
        require_at_least_one(self, "group_size", "max_prompt_tokens", "max_tokens")
        if not 0 < self.temperature <= 10:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 and at most 10")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be -1 (off) or at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """What the engine is started with."""

    base_model: str
    revision: str | None = None
    lora_rank: int | None = None
    """None starts an engine without adapters."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = 64
    """Completions decoded at once."""
    memory_fraction: float = 0.4
    """Share of the GPU's memory that vLLM may take; ignored on a CPU."""
    may_sleep: bool = False
    """Let `sleep` hand the GPU's memory over between rollouts; ignored on a CPU."""


def require_engine() -> None:
    """Raise ValueError where vLLM is not installed."""
    if not find_spec("vllm"):
        raise ValueError("vLLM is not installed; run `make gpu`, or on a machine without a GPU `make cpu`")


class AdapterError(RuntimeError):
    """The sampler does not hold the adapter that it was given."""


class Sampler:
    """A vLLM engine that lives in this process for a whole run, with at most one adapter.

    A context manager. Prefix caching is off: with LoRA it can reuse the states of an earlier adapter, and on
    gated-delta-net layers it hardly ever hits.
    """

    def __init__(self, config: SamplerConfig) -> None:
        """Start the engine, in a process that `prepare_process` has prepared.

        That takes seconds on a CPU, a minute or two for a 4 B model on a GPU.
        """
        import torch
        from vllm import LLM

        on_gpu = torch.cuda.is_available()
        self._llm: LLM | None = LLM(
            model=config.base_model,
            revision=config.revision,
            tokenizer_revision=config.revision,
            dtype="bfloat16",
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            gpu_memory_utilization=config.memory_fraction if on_gpu else 0.9,
            enable_lora=config.lora_rank is not None,
            max_lora_rank=served_rank(config.lora_rank or 1),
            max_loras=1,
            logprobs_mode="processed_logprobs",  # the default ignores the temperature
            enable_prefix_caching=False,
            enable_chunked_prefill=on_gpu,  # vLLM cannot rewind a CPU's seeded generator after part of a prompt
            mamba_ssm_cache_dtype="float32",  # a recurrent state in bfloat16 drifts from the trainer's
            enable_sleep_mode=config.may_sleep and on_gpu,
            enforce_eager=not on_gpu,
            gdn_prefill_backend="triton" if on_gpu else None,  # FlashInfer's compiles, and its failure is not shown
            language_model_only=True,
            skip_mm_profiling=True,
            disable_log_stats=False,  # the progress bar reads the engine's token counter
            use_tqdm_on_load=False,
            seed=0,  # unused: every request brings its own
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._adapter: Any = None
        self._asleep = False

    def __enter__(self) -> Sampler:
        """Return the running sampler."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop the engine and free its memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    @property
    def engine(self) -> Any:
        """The vLLM `LLM`; RuntimeError once the sampler is closed."""
        if self._llm is None:
            raise RuntimeError("the sampler is closed")
        return self._llm

    def stream(
        self, prompts: Sequence[list[int]], config: SamplingConfig, seeds: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (prompt index, its completions in the order of its seeds) as soon as all of them have ended.

        Args:
            prompts: token ids, one list a prompt.
            config: temperature, lengths and cut-offs; `group_size` is not read, the seeds count.
            seeds: one row a prompt, one seed a completion.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.engine.llm_engine
        for index, (prompt, row) in enumerate(zip(prompts, seeds, strict=True)):
            for member, seed in enumerate(row):
                params = SamplingParams(
                    seed=seed,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    max_tokens=config.max_tokens,
                    logprobs=0,  # of the sampled token alone
                    flat_logprobs=True,
                    detokenize=False,  # decoded once, below
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(
                    f"{index}/{member}",
                    TokensPrompt(prompt_token_ids=prompt),
                    params,
                    lora_request=self._adapter,
                )
        waiting = {index: len(row) for index, row in enumerate(seeds)}
        done: dict[int, dict[int, Completion]] = {index: {} for index in waiting}
        try:
            with _RolloutBar(self.engine, total=sum(waiting.values())) as bar:
                while engine.has_unfinished_requests():
                    outputs = engine.step()
                    bar.update(len(outputs))
                    for output in outputs:
                        index, member = map(int, output.request_id.split("/"))
                        done[index][member] = self._completion(output.outputs[0])
                        if len(done[index]) == waiting[index]:
                            yield index, [done[index][member] for member in range(waiting[index])]
        finally:
            if engine.has_unfinished_requests():  # the caller stopped early
                engine.abort_request([f"{i}/{m}" for i, n in waiting.items() for m in range(n) if m not in done[i]])

    def load_adapter(self, path: str | Path, *, version: int) -> int:
        """Sample from the adapter in `path` from now on, and return how many modules of the engine it reached.

        What the engine holds afterwards is compared with the file: every module, and the sum of |B| over them.

        Args:
            path: a folder in PEFT's format with vLLM's module names (`policy.save_adapter` writes one).
            version: names the adapter in the engine, so that no version is mistaken for another.

        Raises:
            AdapterError: the engine matched fewer modules than the folder holds, or holds other weights.
        """
        from safetensors import safe_open
        from vllm.lora.request import LoRARequest

        self.unload_adapter()
        request = LoRARequest(f"policy-{version}", version + 1, str(path))
        self.engine.llm_engine.add_lora(request)
        with safe_open(Path(path, "adapter_model.safetensors"), framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith(".lora_B.weight")]  # noqa: SIM118
            sizes = sum(_sum_of_sizes(tensors.get_tensor(name).bfloat16()) for name in names)
        sent, expected = len(names), _scaling(Path(path, "adapter_config.json")) * sizes
        ((matched, found),) = self.engine.collective_rpc(_what_the_engine_holds, args=(request.lora_int_id,))
        if matched != sent:
            raise AdapterError(
                f"the sampler matched {matched} of the {sent} modules of adapter {path}; the others would be "
                "sampled from the base model. The module names do not fit the sampler's architecture."
            )
        if abs(found - expected) > 1e-6 * expected:
            raise AdapterError(
                f"the sampler holds another adapter than {path}: the sizes of B sum to {found:.9g} there and to "
                f"{expected:.9g} in the file"
            )
        self._adapter = request
        return matched

    def unload_adapter(self) -> None:
        """Sample from the base model from now on."""
        if self._adapter is not None:
            self.engine.llm_engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    def sleep(self) -> None:
        """Hand the GPU's memory over, if the sampler may: weights go to the host, the KV cache is dropped."""
        if self.engine.llm_engine.model_config.enable_sleep_mode:
            self.engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Take the memory back after `sleep`; the adapter has to be loaded again."""
        if self._asleep:
            self.engine.wake_up()
            self._asleep = False

    def _completion(self, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=list(output.logprobs.logprobs),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=output.finish_reason,
        )


class _RolloutBar(tqdm):
    """Completions done, and the tokens a second of all that are under way, from the engine's own counter."""

    def __init__(self, engine: Any, *, total: int) -> None:
        self._engine = engine
        self._tokens_before = self._tokens()
        options = {"leave": False, "dynamic_ncols": True, "mininterval": 0.5, "miniters": 0, "disable": None}
        super().__init__(total=total, desc="rollout", unit="completion", **options)

    def _tokens(self) -> int:
        return sum(m.value for m in self._engine.get_metrics() if m.name == "vllm:generation_tokens")

    def refresh(self, *args: Any, **kwargs: Any) -> bool | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if elapsed := self.format_dict["elapsed"]:
            tokens = self._tokens() - self._tokens_before
            self.set_postfix_str(f"{tokens / elapsed:,.0f} tokens/s", refresh=False)
        return super().refresh(*args, **kwargs)


def served_rank(rank: int) -> int:
    """Return the smallest maximal rank that vLLM offers for an adapter of this rank; ValueError where none is."""
    offered = [1, 8, 16, 32, 64, 128, 256, 320, 512]
    fitting = [size for size in offered if size >= rank]
    if not fitting:
        raise ValueError(f"lora_rank is {rank}; vLLM serves at most {offered[-1]}")
    return fitting[0]


def _what_the_engine_holds(worker: Any, adapter_id: int) -> tuple[int, float]:
    """Return, in vLLM's worker, how many modules the adapter found (a packed layer counts its parts), and sum |B|.

    The sum is over the memory that the layers read when they compute, not over a copy.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter, slot = manager.get_adapter(adapter_id), manager.lora_index_to_id.index(adapter_id)
    matched, total = 0, 0.0
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(adapter, name)
        if weights is not None:
            parts = weights.lora_b if isinstance(weights.lora_b, list) else [weights.lora_b]
            matched += sum(part is not None for part in parts)
            total += sum(_sum_of_sizes(stacked[slot]) for stacked in module.lora_b_stacked)
    return matched, total


def _scaling(config: Path) -> float:
    """Return what an adapter's B is multiplied by, or nan where that rounds or differs from module to module."""
    settings = json.loads(config.read_text())
    scaling = settings["lora_alpha"] / settings["r"]
    uniform = not any(settings.get(key) for key in ("rank_pattern", "alpha_pattern", "use_rslora"))
    return scaling if uniform and math.frexp(scaling)[0] == 0.5 else math.nan  # a power of two


def _sum_of_sizes(tensor: Any) -> float:
    return float(tensor.abs().double().sum())
