"""The model that learns: token log-probabilities, gradients, optimizer steps, the adapter on disk.

What a reader could get wrong: the loss is handed in, summed over micro-batches whose denominators are those of the
whole optimizer step. The base is frozen in bfloat16 and never written to; the adapter is float32.

Letters: B sequences, L padded length. Column t of a [B, L-1] tensor speaks of token t + 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data import Datum, require_at_least_one
from engine.batches import Batch, assign_to_ranks, even_micro_batches, halved
from engine.model import add_adapter, load_base
from engine.ranks import Ranks
from engine.sampler import served_rank
from loss import LossFunction, sequence_log_ratios

if TYPE_CHECKING:
    from torch import Tensor


CPU_MICRO_BATCH_TOKENS = 2_048
"""On a CPU larger buffers are taken from the system afresh each time, which can cost as much as the arithmetic."""
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
        require_at_least_one(self, "lora_rank", "lora_alpha", "micro_batch_tokens")
        served_rank(self.lora_rank)
        for name in ("learning_rate", "adam_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer step learns from; each rank computes its own of the micro-batches."""

    own: list[Batch]
    padding_fraction: float
    """Of the positions of all ranks' micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What was computed of S training sequences and their N completion tokens; on the CPU, without gradients."""

    losses: Tensor  # one a micro-batch
    advantages: Tensor  # [S]
    num_tokens: Tensor  # [S]
    num_clipped_tokens: Tensor  # [S]
    log_ratios: Tensor  # [S] nats: log of the sequence ratio that the loss was given, now against its denominator
    mismatch_log_ratios: Tensor  # [S] nats: trainer before its first step on these against sampler
    update_log_ratios: Tensor  # [S] nats: trainer now against trainer before its first step on these
    mismatches: Tensor  # [N] nats: mismatch_log_ratios a token at a time
    entropies: Tensor  # [N] nats

    @classmethod
    def together(cls, outputs: Sequence[SequenceOutput]) -> SequenceOutput:
        """Return the outputs as one."""
        import torch

        return cls(**{f.name: torch.cat([getattr(output, f.name) for output in outputs]) for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """What one optimizer step was taken on."""

    loss: float
    grad_norm: float
    padding_fraction: float
    sequences: SequenceOutput


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
        import torch

        self.config = config
        self.temperature = temperature
        self._ranks = ranks or Ranks()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base, self._served_prefix = load_base(config.base_model, config.revision, self.device)
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        self.model: Any = add_adapter(
            base, config.lora_rank, config.lora_alpha, revision=config.revision, seed=seed
        )
        self.model.train()
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_epsilon,
        )
        self.micro_batch_tokens = config.micro_batch_tokens or CPU_MICRO_BATCH_TOKENS  # less after out of memory
        self._previous: dict[str, Tensor] = {}

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
        from engine.logprobs import head_logprobs

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
        """Score as the base model within the block."""
        return self.model.disable_adapter()

    @contextmanager
    def previous_adapter(self) -> Iterator[None]:
        """Score as the policy before the last update within the block; RuntimeError where there was none."""
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

    def begin_update(self, parts: Sequence[Sequence[Datum]]) -> list[MiniBatch]:
        """Return the mini-batches of a rollout batch, one optimizer step each.

        With several, their sequences are scored first, as the policy of all of them before its first step.
        """
        import torch

        if parts:
            self._previous = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.micro_batch_tokens = min(
            self._ranks.all_gather(self.micro_batch_tokens)
        )  # one may have run out of memory
        mini_batches = [self._mini_batch(data) for data in parts]
        if len(mini_batches) < 2:
            return mini_batches
        with torch.no_grad():
            return [replace(part, own=list(map(self._with_old_logprobs, part.own))) for part in mini_batches]

    def _mini_batch(self, data: Sequence[Datum]) -> MiniBatch:
        num_ranks = self._ranks.world_size
        batches = even_micro_batches(data, max_tokens=self.micro_batch_tokens, num_ranks=num_ranks)
        num_tokens = sum(len(datum.token_ids) for datum in data)
        return MiniBatch(
            own=assign_to_ranks(batches, num_ranks)[self._ranks.rank],
            padding_fraction=1 - num_tokens / sum(batch.num_positions for batch in batches),
        )

    def _with_old_logprobs(self, batch: Batch) -> Batch:
        return replace(batch, old_logprobs=self.token_logprobs(batch)[0].cpu())

    def mismatches(self, mini_batches: Sequence[MiniBatch]) -> Tensor:
        """Return trainer minus sampler at every completion token of scored mini-batches, of all ranks, [N] nats."""
        import torch

        own = [batch.mismatches for part in mini_batches for batch in part.own]
        return torch.cat([mismatches for share in self._ranks.all_gather(own) for mismatches in share])

    def forward_backward(self, mini_batch: MiniBatch, loss: LossFunction) -> TrainOutput:
        """Form the gradient of the loss, summed over all micro-batches and ranks.

        FloatingPointError when loss or gradient are not finite; the weights have not moved.
        """
        import torch

        sums, own = self._gradient_in_memory(mini_batch.own, loss)
        self._ranks.all_reduce(sums)
        for parameter, gradient in zip(self.parameters.values(), sums, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        sequences = SequenceOutput.together([o for share in self._ranks.all_gather(own) for o in share])
        total = float(sequences.losses.sum())
        grad_norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.parameters.values()))
        if not math.isfinite(total) or not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"the loss is {total} and the gradient's norm {grad_norm}")
        return TrainOutput(
            loss=total, grad_norm=grad_norm, padding_fraction=mini_batch.padding_fraction, sequences=sequences
        )

    def optim_step(self) -> None:
        """Move the adapter by the gradient that `forward_backward` formed."""
        self.optimizer.step()

    def dry_run(self, batch: Batch, loss: LossFunction) -> None:
        """Form the gradient of one micro-batch and drop it: what does not fit into memory shows here.

        Meanwhile as much is allocated as Adam's moments and the weights before the last update will take.
        """
        import torch

        numbers = sum(parameter.numel() for parameter in self.parameters.values())
        _later = torch.empty(3 * numbers, device=self.device)
        self._gradient_in_memory([batch], loss)

    def _gradient_in_memory(
        self, batches: Sequence[Batch], loss: LossFunction
    ) -> tuple[list[Tensor], list[SequenceOutput]]:
        """Form the gradient; where memory runs out, once more with every micro-batch halved, from now on."""
        import torch

        divisible = [batch.num_positions for batch in batches if len(batch.advantages) > 1]
        try:
            return self._gradient(batches, loss)
        except torch.OutOfMemoryError:
            if not divisible:
                raise
        # Outside the handler, whose traceback would keep the activations alive.
        self.micro_batch_tokens = max(divisible) // 2
        tqdm.write(f"warning: out of GPU memory; micro_batch_tokens is {self.micro_batch_tokens} from now on")
        torch.cuda.empty_cache()
        return self._gradient(halved(batches), loss)

    def _gradient(self, batches: Sequence[Batch], loss: LossFunction) -> tuple[list[Tensor], list[SequenceOutput]]:
        """Return what these batches add to each parameter's gradient, and what was computed in each batch.

        Sums are in float64: in whatever order they are made, on however many ranks, they then round to the same
        float32, but for one in a hundred million. In float32, the last bit of a gradient decides, by way of the
        sampler's rounding, on which side of so narrow a clip a sequence falls a few steps later.
        """
        import torch

        self.optimizer.zero_grad()
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self.parameters.values()]
        outputs: list[SequenceOutput] = []
        for batch in (batch.each(lambda tensor: tensor.to(self.device)) for batch in batches):
            mask, sampling_logprobs = batch.completion_mask, batch.sampling_logprobs
            logprobs, entropies = self.token_logprobs(batch)
            now = logprobs.detach()
            old_logprobs = now if batch.old_logprobs is None else batch.old_logprobs
            output = loss(logprobs, old_logprobs, sampling_logprobs, mask, batch.advantages)
            output.loss.backward()
            for total, parameter in zip(sums, self.parameters.values(), strict=True):
                total += parameter.grad
                parameter.grad = None
            seen = {
                "losses": output.loss.detach()[None],
                "advantages": batch.advantages,
                "num_tokens": mask.sum(-1),
                "num_clipped_tokens": output.clipped.sum(-1),
                "log_ratios": output.log_ratios,
                "mismatch_log_ratios": sequence_log_ratios(old_logprobs, sampling_logprobs, mask),
                "update_log_ratios": sequence_log_ratios(now, old_logprobs, mask),
                "mismatches": (old_logprobs - sampling_logprobs)[mask],
                "entropies": entropies[mask],
            }
            outputs.append(SequenceOutput(**{name: tensor.cpu() for name, tensor in seen.items()}))
        return sums, outputs

    @property
    def adapter_bytes(self) -> int:
        """Bytes that `save_adapter` writes."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that `save` writes."""
        return CHECKPOINT_BYTES * sum(parameter.numel() for parameter in self.parameters.values())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the adapter, by PEFT's names, and Adam's moments, on the CPU, under their files' names."""
        weights = {name: weight.cpu() for name, weight in self._adapter().items()}
        return {"adapter_model": weights, "optimizer": self._moments()}

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

        state = {name: load_file(folder / f"{name}.safetensors") for name in ("adapter_model", "optimizer")}
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
