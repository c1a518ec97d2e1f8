"""The model that learns: LoRA, token log-probabilities, micro-batches, optimizer, adapter on disk.

What a reader could get wrong: sequences are padded on the right and no attention mask is passed, because every
layer looks only to the left, so a real token never sees padding (padding on the left would run through the
recurrent state of the gated-delta-net layers). The base is frozen in bfloat16 and never written to; the
adapter is float32.

Letters: B sequences, L padded length. Column t of a [B, L-1] tensor speaks of token t + 1.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from loss import LossConfig, StepTotals, mismatch_weights, policy_loss, sequence_log_ratios
from ranks import Ranks
from rollout import Group, served_rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CPU_MICRO_BATCH_TOKENS = 2_048
"""On a CPU larger buffers are taken from the system afresh each time, which can cost as much as the arithmetic."""
SHARES = 4
"""Micro-batches of an update at the least, so that one, two and four ranks find the same ones."""
MAX_PADDING = 0.1
"""Of the positions of an update's micro-batches."""
CHECKPOINT_BYTES = 16
"""An adapter parameter in a checkpoint: the adapter twice and Adam's two moments, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The base model, its adapter and the optimizer; the defaults are the reported run's where it names them."""

    base_model: str = "Qwen/Qwen3.5-4B"
    """A model on the Hugging Face hub or a local folder."""
    revision: str | None = None
    """Commit of the base model on the hub."""
    lora_rank: int = 32
    lora_alpha: int = 32
    learning_rate: float = 4e-5
    beta1: float = 0.9
    beta2: float = 0.95
    adam_epsilon: float = 1e-8
    micro_batch_tokens: int | None = None
    """Tokens, padding included, that go through the model at one time; a longer sequence goes alone. By default as
    many as the GPU has memory for, and 2,048 on a CPU; the sequences of a step are spread evenly over a multiple of
    four micro-batches, which may hold fewer."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: a third more time for a fraction of the memory."""

    def __post_init__(self) -> None:
        """Refuse values that cannot train."""
        for name in ("lora_rank", "lora_alpha", "micro_batch_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        served_rank(self.lora_rank)
        for name in ("learning_rate", "adam_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences that go through the model together, padded on the right."""

    input_ids: Tensor  # [B, L]
    completion_mask: Tensor  # [B, L-1] bool: the token that this column predicts is the completion's
    sampling_logprobs: Tensor  # [B, L-1] nats, 0 outside the completion
    advantages: Tensor  # [B]
    start_logprobs: Tensor | None = None
    """[B, L-1] nats, of the policy before it took any step on these rollouts; None where it has taken none."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` applied to each of its tensors: a device, or a choice of rows."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    token_ids: list[int]
    sampling_logprobs: list[float]  # of the last len(sampling_logprobs) tokens
    advantage: float


def _sequences(groups: Sequence[Group], *, degenerate_too: bool = False) -> list[_Sequence]:
    return [
        _Sequence(
            token_ids=group.prompt_ids + rollout.completion.token_ids,
            sampling_logprobs=rollout.completion.logprobs,
            advantage=rollout.advantage,
        )
        for group in groups
        if degenerate_too or not group.degenerate
        for rollout in group.rollouts
    ]


def micro_batches(groups: Sequence[Group], *, max_tokens: int, degenerate_too: bool = False) -> Iterator[Batch]:
    """Yield the groups' sequences, longest first, at most `max_tokens` with padding at a time.

    Degenerate groups teach nothing and are left out, unless they are asked for.
    """
    chosen = _sequences(groups, degenerate_too=degenerate_too)
    sequences = sorted(chosen, key=lambda s: len(s.token_ids), reverse=True)
    while sequences:
        count = max(1, max_tokens // len(sequences[0].token_ids))
        yield _collate(sequences[:count])
        sequences = sequences[count:]


def even_micro_batches(groups: Sequence[Group], *, max_tokens: int, num_ranks: int = 1) -> list[Batch]:
    """Return micro-batches of about equally many tokens, as few as max_tokens and MAX_PADDING allow.

    Their number is a multiple of that of the ranks, and SHARES at the least, where there are so many sequences.
    Rounding depends on what is computed together, so that a gradient is the same on any number of ranks only if
    its micro-batches are.
    """
    lengths = sorted((len(sequence.token_ids) for sequence in _sequences(groups)), reverse=True)

    def starts(tokens: int) -> list[int]:
        found = [0]
        while (following := found[-1] + max(1, tokens // lengths[found[-1]])) < len(lengths):
            found.append(following)
        return found

    step = num_ranks * -(-SHARES // num_ranks)
    for wanted in range(step, len(lengths) + step, step) if lengths else ():
        tokens = bisect_left(range(sum(lengths)), -wanted, key=lambda tokens: -len(starts(tokens)))
        padded = sum(lengths[a] * (b - a) for a, b in pairwise([*starts(tokens), len(lengths)]))
        if tokens <= max_tokens and padded - sum(lengths) <= MAX_PADDING * padded:
            return list(micro_batches(groups, max_tokens=tokens))
    return []


def deal(batches: Sequence[Batch], num_ranks: int) -> list[list[Batch]]:
    """Deal the batches out, the largest first, each to the rank that has the fewest tokens so far."""
    shares: list[list[Batch]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for batch in sorted(batches, key=lambda b: b.input_ids.numel(), reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(batch)
        loads[rank] += batch.input_ids.numel()
    return shares


def _collate(sequences: Sequence[_Sequence]) -> Batch:
    import torch

    length = max(len(sequence.token_ids) for sequence in sequences)
    input_ids = torch.zeros(len(sequences), length, dtype=torch.long)
    completion_mask = torch.zeros(len(sequences), length - 1, dtype=torch.bool)
    sampling_logprobs = torch.zeros(len(sequences), length - 1)
    for row, sequence in enumerate(sequences):
        end = len(sequence.token_ids)
        completion = slice(end - len(sequence.sampling_logprobs) - 1, end - 1)
        input_ids[row, :end] = torch.tensor(sequence.token_ids)
        completion_mask[row, completion] = True
        sampling_logprobs[row, completion] = torch.tensor(sequence.sampling_logprobs)
    return Batch(
        input_ids=input_ids,
        completion_mask=completion_mask,
        sampling_logprobs=sampling_logprobs,
        advantages=torch.tensor([sequence.advantage for sequence in sequences]),
    )


def step_totals(groups: Sequence[Group], *, max_tokens: int) -> StepTotals:
    """Return the denominators of an optimizer step on these groups, degenerate ones included."""
    return StepTotals(
        num_sequences=sum(len(group.rollouts) for group in groups),
        num_tokens=sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts),
        max_tokens=max_tokens,
    )


def adapted_layers(model: Any) -> dict[str, Any]:
    """Return what the adapter is laid over, by name: every linear layer of a causal language model but its head."""
    import torch

    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}


def delta_layers(model: Any) -> list[Any]:
    """Return a model's or a block's gated-delta-net layers."""
    return [module for module in model.modules() if hasattr(module, "head_k_dim")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one optimizer step saw, over its S training sequences and their N completion tokens."""

    loss: float
    grad_norm: float
    advantages: Tensor  # [S]
    num_tokens: Tensor  # [S]
    num_clipped_tokens: Tensor  # [S]
    log_ratios: Tensor  # [S] nats: log of the sequence ratio, new policy against old
    engine_log_ratios: (
        Tensor  # [S] nats: the policy that sampled, by the trainer's arithmetic against the sampler's
    )
    update_log_ratios: Tensor  # [S] nats: the policy now against the policy that sampled
    token_gaps: Tensor  # [N] nats: engine_log_ratios a token at a time
    entropies: Tensor  # [N] nats
    padding_fraction: float
    """Of the positions that went through the model."""


def _no_check(token_gaps: Tensor) -> None:
    """Let a step be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """What one optimizer step learns from."""

    groups: Sequence[Group]
    batches: Sequence[Batch]  # of their sequences, over all ranks
    mine: Sequence[Batch]  # this rank's of the batches


class Policy:
    """A frozen base model with a LoRA adapter, and the Adam optimizer that moves the adapter."""

    def __init__(
        self, config: PolicyConfig, *, seed: int, temperature: float = 1.0, ranks: Ranks | None = None
    ) -> None:
        """Load the base model in bfloat16 and lay a fresh adapter (B = 0) over every linear layer but the head.

        Args:
            config: model, adapter, optimizer.
            seed: of the adapter's initial A.
            temperature: the sampler's; log-probabilities are of the distribution that was sampled from.
            ranks: that update the same policy together, each with a copy.
        """
        # On Hopper flash-linear-attention prefers TileLang where it can compile, against CUDA headers that need not
        # fit. Triton's gradients, wrong there from 3.4 on, are right since 3.7.1; with those between it refuses.
        os.environ.setdefault("FLA_TILELANG", "0")
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, logging

        from lora import LoraLinear

        self.config = config
        self.temperature = temperature
        self._ranks = ranks or Ranks()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            logging.set_verbosity_error()  # that there are faster kernels for GPUs
        logging.disable_progress_bar()
        checkpoint = AutoConfig.from_pretrained(config.base_model, revision=config.revision)
        # A vision-and-text checkpoint is trained as its text half, but served whole: other module names.
        wrapped = checkpoint.get_text_config() is not checkpoint
        self._served_prefix = "base_model.model." + ("model.language_model." if wrapped else "model.")
        PreTrainedModel._keep_in_fp32_modules_strict = {"A_log"}  # the logarithm of a decay, as vLLM keeps it
        base: Any = AutoModelForCausalLM.from_pretrained(
            config.base_model, revision=config.revision, dtype=torch.bfloat16
        )
        base.to(self.device)
        base.requires_grad_(False)
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        targets = sorted({name.rpartition(".")[2] for name in adapted_layers(base)})
        adapter = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets, revision=config.revision
        )
        adapter._register_custom_module({torch.nn.Linear: LoraLinear})
        torch.manual_seed(seed)
        self.model: Any = get_peft_model(base, adapter)
        # PEFT keeps a set, whose order on disk would differ from process to process.
        self.model.peft_config["default"].target_modules = targets
        self.model.train()
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_epsilon,
        )
        self.micro_batch_tokens = config.micro_batch_tokens or CPU_MICRO_BATCH_TOKENS
        """As configured, or less after the GPU ran out of memory."""
        self._previous: dict[str, Tensor] = {}
        self._random_states = _random_states(self.device)

    def coverage(self) -> str:
        """Return which modules the adapter covers, in one line."""
        counts = Counter(
            name.split(".lora_B.")[0].rpartition(".")[2] for name in self.parameters if ".lora_B." in name
        )
        covered = ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))
        return f"LoRA rank {self.config.lora_rank} on {sum(counts.values())} modules: {covered}"

    def token_logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each token's log-probability and the entropy at its position, both [B, L-1] nats.

        Outside the completions both are 0. Only completion positions go through the head.
        """
        from logprobs import head_logprobs

        base = self.model.get_base_model()
        input_ids, mask = batch.input_ids.to(self.device), batch.completion_mask.to(self.device)
        hidden = base.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, L, H]
        logprobs, entropies = head_logprobs(
            hidden[:, :-1][mask],
            base.get_output_embeddings(),
            input_ids[:, 1:][mask],
            temperature=self.temperature,
            softcap=getattr(base.config, "final_logit_softcapping", None),
        )
        blank = logprobs.new_zeros(mask.shape)
        return blank.masked_scatter(mask, logprobs), blank.masked_scatter(mask, entropies)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Be the base model for a while."""
        return self.model.disable_adapter()

    @contextmanager
    def previous_adapter(self) -> Iterator[None]:
        """Be the policy before the last update for a while; RuntimeError where there was none."""
        if not self._previous:
            raise RuntimeError("there has been no update yet")
        now = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self._previous[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = now[name]

    @property
    def has_previous(self) -> bool:
        """Whether there has been an update since the model was loaded."""
        return bool(self._previous)

    def update(
        self,
        groups: Sequence[Group],
        config: LossConfig,
        *,
        max_tokens: int,
        before_step: Callable[[Tensor], None] = _no_check,
    ) -> list[UpdateResult]:
        """Take one optimizer step on each mini-batch of whole groups that has something to teach.

        Args:
            groups: the rollout batch; degenerate groups count in the denominators and are not computed.
            config: the objective, the old policy and the number of mini-batches.
            max_tokens: the longest completion that sampling allows.
            before_step: called once, with the `token_gaps` of the whole batch, before the weights move; may raise.

        Returns:
            One result a step taken; none, and nothing changed, when every group is degenerate.

        Raises:
            FloatingPointError: the loss or a gradient is not finite; the weights are as before that step.
        """
        import torch

        self.micro_batch_tokens = min(self._ranks.gather(self.micro_batch_tokens))  # one may have run out of memory
        parts = [self._mini_batch(groups[start :: config.mini_batches]) for start in range(config.mini_batches)]
        parts = [part for part in parts if part.batches]
        if len(parts) > 1:  # logprobs and gaps of all before the first step
            parts = [replace(part, mine=[self._begun(batch) for batch in part.mine]) for part in parts]
            gaps = [_token_gaps(batch) for part in parts for batch in part.mine]
            before_step(torch.cat([gap for share in self._ranks.gather(gaps) for gap in share]))
        if parts:
            self._previous = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        check = before_step if len(parts) == 1 else _no_check
        results = [self._step(part, config, max_tokens, check) for part in parts]
        self._random_states = _random_states(self.device)
        return results

    def _mini_batch(self, groups: Sequence[Group]) -> _MiniBatch:
        num_ranks = self._ranks.world_size
        batches = even_micro_batches(groups, max_tokens=self.micro_batch_tokens, num_ranks=num_ranks)
        return _MiniBatch(groups=groups, batches=batches, mine=deal(batches, num_ranks)[self._ranks.rank])

    def _begun(self, batch: Batch) -> Batch:
        import torch

        with torch.no_grad():
            return replace(batch, start_logprobs=self.token_logprobs(batch)[0].cpu())

    def _step(
        self, part: _MiniBatch, config: LossConfig, max_tokens: int, before_step: Callable[[Tensor], None]
    ) -> UpdateResult:
        import torch

        totals = step_totals(part.groups, max_tokens=max_tokens)
        sums, seen = self._gradient_in_memory(part.mine, config, totals)
        self._ranks.add_up(sums)
        for parameter, gradient in zip(self.parameters.values(), sums, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        seen = [batch for share in self._ranks.gather(seen) for batch in share]
        facts = {name: torch.cat([batch[name] for batch in seen]) for name in seen[0]}
        loss = float(facts.pop("loss").sum())
        grad_norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.parameters.values()))
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"the loss is {loss} and the gradient's norm {grad_norm}")
        before_step(facts["token_gaps"])
        self.optimizer.step()
        num_real = sum(len(sequence.token_ids) for sequence in _sequences(part.groups))
        padding_fraction = 1 - num_real / sum(batch.input_ids.numel() for batch in part.batches)
        return UpdateResult(loss=loss, grad_norm=grad_norm, padding_fraction=padding_fraction, **facts)

    def rehearse(self, groups: Sequence[Group], config: LossConfig, *, max_tokens: int) -> None:
        """Form the gradient of one micro-batch and drop it: what does not fit into memory shows here.

        Meanwhile as much is allocated as Adam's moments and the weights before the last update will take.
        """
        import torch

        numbers = sum(parameter.numel() for parameter in self.parameters.values())
        later = torch.empty(3 * numbers, device=self.device)
        totals = StepTotals(num_sequences=1, num_tokens=1, max_tokens=max_tokens)
        batch = next(micro_batches(groups, max_tokens=self.micro_batch_tokens))
        self._gradient_in_memory([batch], config, totals)
        del later

    def _gradient_in_memory(
        self,
        batches: Sequence[Batch],
        config: LossConfig,
        totals: StepTotals,
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Form the gradient; where memory runs out, once more with every micro-batch halved, from now on."""
        import torch

        divisible = [batch.input_ids.numel() for batch in batches if len(batch.advantages) > 1]
        try:
            return self._gradient(batches, config, totals)
        except torch.OutOfMemoryError:
            if not divisible:
                raise
        # Outside the handler, whose traceback would keep the activations alive.
        self.micro_batch_tokens = max(divisible) // 2
        tqdm.write(f"warning: out of GPU memory; micro_batch_tokens is {self.micro_batch_tokens} from now on")
        torch.cuda.empty_cache()
        return self._gradient(_halved(batches), config, totals)

    def _gradient(
        self,
        batches: Sequence[Batch],
        config: LossConfig,
        totals: StepTotals,
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return what these batches add to each parameter's gradient, and what was seen in each batch.

        Sums are in float64: in whatever order they are made, on however many ranks, they then round to the same
        float32, but for one in a hundred million. In float32, the last bit of a gradient decides, by way of the
        sampler's rounding, on which side of so narrow a clip a sequence falls a few steps later.
        """
        import torch

        self.optimizer.zero_grad()
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self.parameters.values()]
        seen: list[dict[str, Tensor]] = []
        for batch in (batch.each(lambda tensor: tensor.to(self.device)) for batch in batches):
            mask, advantages, sampling_logprobs = batch.completion_mask, batch.advantages, batch.sampling_logprobs
            policy_logprobs, entropies = self.token_logprobs(batch)
            start_logprobs = policy_logprobs.detach() if batch.start_logprobs is None else batch.start_logprobs
            old_logprobs = start_logprobs if config.old_logprobs == "policy" else sampling_logprobs
            output = policy_loss(
                policy_logprobs,
                old_logprobs,
                mask,
                advantages,
                objective=config.objective,
                totals=totals,
                weights=mismatch_weights(config.mismatch_weight, start_logprobs, sampling_logprobs, mask),
            )
            output.loss.backward()
            for total, parameter in zip(sums, self.parameters.values(), strict=True):
                total += parameter.grad
                parameter.grad = None
            seen.append(
                {
                    "loss": output.loss.detach()[None],
                    "advantages": advantages,
                    "num_tokens": mask.sum(-1),
                    "num_clipped_tokens": output.clipped.sum(-1),
                    "log_ratios": sequence_log_ratios(policy_logprobs.detach(), old_logprobs, mask),
                    "engine_log_ratios": sequence_log_ratios(start_logprobs, sampling_logprobs, mask),
                    "update_log_ratios": sequence_log_ratios(policy_logprobs.detach(), start_logprobs, mask),
                    "token_gaps": (start_logprobs - sampling_logprobs)[mask],
                    "entropies": entropies[mask],
                }
            )
        return sums, [{name: tensor.cpu() for name, tensor in batch.items()} for batch in seen]

    @property
    def adapter_bytes(self) -> int:
        """Bytes that `save_adapter` writes."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that `save` writes."""
        return CHECKPOINT_BYTES * sum(parameter.numel() for parameter in self.parameters.values())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return everything that learns, on the CPU, by the name of its file in a checkpoint.

        `adapter_model` has PEFT's module names, `optimizer` Adam's moments and step counts, `random` the states of
        PyTorch's generators after the last update, for base models with dropout.
        """
        weights = {name: weight.cpu() for name, weight in self._adapter().items()}
        return {"adapter_model": weights, "optimizer": self._moments(), "random": self._random_states}

    def _adapter(self) -> dict[str, Tensor]:
        """Return what `get_peft_model_state_dict` would, which searches the whole model for it."""
        return {name.replace(".default.", "."): p.detach() for name, p in self.parameters.items()}

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value.cpu()
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def save(self, folder: Path) -> None:
        """Write `state` into `folder`, and in `folder`/vllm the adapter with the sampler's module names."""
        from safetensors.torch import save_file

        # By default PEFT looks, on the hub if need be, whether the base model's embeddings are new.
        self.model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        self.save_adapter(folder / "vllm")
        save_file(self._moments(), folder / "optimizer.safetensors")
        save_file(self._random_states, folder / "random.safetensors")

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in PEFT's format with the sampler's module names."""
        from safetensors.torch import save_file

        folder.mkdir(exist_ok=True)
        prefix = "base_model.model.model."
        served = {name.replace(prefix, self._served_prefix, 1): w for name, w in self._adapter().items()}
        save_file(served, folder / "adapter_model.safetensors")
        self.model.peft_config["default"].save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; ValueError when the adapter has other modules or shapes."""
        from safetensors.torch import load_file

        names = ("adapter_model", "optimizer", "random")
        state = {name: load_file(folder / f"{name}.safetensors") for name in names}
        shapes = {name: tuple(w.shape) for name, w in state["adapter_model"].items()}
        expected = {name: tuple(w.shape) for name, w in self._adapter().items()}
        if shapes != expected:
            raise ValueError(
                f"the adapter in {folder} has other modules or another rank than this run "
                f"({len(shapes)} tensors against {len(expected)}, lora_rank {self.config.lora_rank})"
            )
        self.restore(state)

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a `state` of the same adapter."""
        import torch
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, state["adapter_model"])
        moments = state["optimizer"]
        for name, parameter in self.parameters.items():
            of_this = {
                key: moments[f"{name}.{key}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{name}.{key}" in moments
            }
            if of_this:
                self.optimizer.state[parameter] = of_this
        self._random_states = state["random"]
        torch.set_rng_state(self._random_states["cpu"])
        if "cuda" in self._random_states and self.device.type == "cuda":
            torch.cuda.set_rng_state(self._random_states["cuda"])


def _random_states(device: torch.device) -> dict[str, Tensor]:
    import torch

    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def _token_gaps(batch: Batch) -> Tensor:
    assert batch.start_logprobs is not None
    return (batch.start_logprobs - batch.sampling_logprobs)[batch.completion_mask]


def _halved(batches: Sequence[Batch]) -> list[Batch]:
    """Return every batch cut in two; one of a single sequence stays whole."""
    halves = []
    for batch in batches:
        middle = (len(batch.advantages) + 1) // 2
        halves += [
            batch.each(lambda tensor, rows=rows: tensor[rows]) for rows in (slice(middle), slice(middle, None))
        ]
    return [half for half in halves if len(half.advantages)]
