"""The policy on a CPU: exact in float64, and the same after a round trip through the disk."""

import json
import math
import shutil
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file

from bench.update import take_steps
from data import training_data
from engine.batches import Batch, collate, micro_batches
from engine.lora import LoraLinear
from engine.memory import model_needs
from engine.policy import Policy, PolicyConfig
from loss import LossConfig


@pytest.fixture
def policy(tiny_base):
    return make_policy(tiny_base)


def make_policy(base, **settings):
    """Return a float64 policy whose B is not 0, so that arithmetic can be checked tightly."""
    settings = {"lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-3, "gradient_checkpointing": False} | settings
    policy = Policy(PolicyConfig(base_model=str(base), **settings), seed=0)
    policy.model.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if ".lora_B." in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return policy


def update(policy, groups, *, epsilon_low=0.999, epsilon_high=1e9, **choices):
    """Take the optimizer steps of a rollout batch, by default without clipping."""
    config = LossConfig(epsilon_low=epsilon_low, epsilon_high=epsilon_high, **choices)
    return take_steps(policy, groups, config, max_tokens=100)


def one_batch(groups) -> Batch:
    """Return the sequences that teach as one batch, longest first."""
    (batch,) = micro_batches(training_data(groups), max_tokens=1000)
    return batch


def gradients(policy, groups, **choices):
    """Return the gradient that an update would apply, without applying it."""
    policy.optimizer.step = lambda: None
    update(policy, groups, **choices)
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items()}


def test_logprobs_equal_those_of_the_whole_models_logits(policy, make_group):
    batch = one_batch([make_group([1, 0, 0])])
    logprobs, entropies = policy.token_logprobs(batch)
    full = torch.log_softmax(policy.model(input_ids=batch.input_ids).logits[:, :-1], -1)
    expected = full.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1) * batch.completion_mask
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-9)
    expected = -(full.exp() * full).sum(-1) * batch.completion_mask
    torch.testing.assert_close(entropies, expected, rtol=0, atol=1e-9)


def test_every_adapted_layer_is_one_with_the_samplers_arithmetic(policy):
    layers = [module for module in policy.model.modules() if isinstance(module, Linear)]
    assert {type(layer) for layer in layers} == {LoraLinear}
    assert 2 * len(layers) == len(policy.parameters)


def test_padding_does_not_move_logprobs(policy, make_group):
    group = make_group([1, 0, 0], lengths=[3, 70, 5])
    together = one_batch([group])
    padded, _ = policy.token_logprobs(together)
    for row, alone in enumerate(micro_batches(training_data([group]), max_tokens=1)):
        logprobs, _ = policy.token_logprobs(alone)
        torch.testing.assert_close(padded[row, : logprobs.shape[1]], logprobs[0], rtol=0, atol=1e-9)


def test_any_micro_batching_gives_the_gradient_of_one_batch(tiny_base, make_group):
    groups = [make_group([1, 0, 0, 1], seed=seed) for seed in range(3)]
    whole = gradients(make_policy(tiny_base), groups)
    for max_tokens in (1, 40):
        parts = gradients(make_policy(tiny_base, micro_batch_tokens=max_tokens), groups)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dr-grpo", "dapo"])
def test_neither_order_nor_micro_batching_nor_padding_changes_an_algorithms_gradient(
    tiny_base, make_group, algorithm
):
    groups = [make_group([1, 0, 0, 1], seed=seed, prompt_length=4 + seed) for seed in range(3)]
    groups.append(make_group([1, 1], seed=9, lengths=[4, 30]))  # degenerate
    whole = gradients(make_policy(tiny_base), groups, algorithm=algorithm)
    parts = gradients(make_policy(tiny_base, micro_batch_tokens=30), groups[::-1], algorithm=algorithm)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-6, atol=1e-11)  # the delta rule is float32


def test_gradient_checkpointing_changes_no_gradient(tiny_base, make_group):
    groups = [make_group([1, 0, 0, 1])]
    plain = gradients(make_policy(tiny_base), groups)
    recomputed = gradients(make_policy(tiny_base, gradient_checkpointing=True), groups)
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name], rtol=1e-9, atol=1e-15)


def test_degenerate_groups_stay_in_the_denominator_and_do_nothing_else(tiny_base, make_group):
    alone = gradients(make_policy(tiny_base), [make_group([1, 0])])
    beside = gradients(make_policy(tiny_base), [make_group([1, 0]), make_group([1, 1], seed=1)])
    for name in alone:
        torch.testing.assert_close(beside[name], alone[name] / 2, rtol=1e-9, atol=1e-15)


def test_a_step_of_degenerate_groups_changes_nothing(policy, make_group):
    before = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    assert update(policy, [make_group([0, 0]), make_group([1, 1])], mini_batches=2) == []
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.parameters.items())
    assert not policy.optimizer.state


def test_an_update_reports_what_it_saw(policy, make_group):
    groups = [make_group([1, 0, 0]), make_group([1, 1, 1], seed=1)]
    batch = one_batch(groups)
    logprobs, _ = policy.token_logprobs(batch)
    mismatches = (logprobs - batch.sampling_logprobs)[batch.completion_mask].detach()
    (output,) = update(policy, groups, epsilon_low=1e-9, epsilon_high=1e-9)
    found = output.sequences
    torch.testing.assert_close(found.mismatches, mismatches)
    assert found.num_tokens.tolist() == [7, 5, 3]
    assert found.advantages.tolist() == batch.advantages.tolist()
    torch.testing.assert_close(found.log_ratios, found.mismatch_log_ratios, rtol=0, atol=0)
    assert found.update_log_ratios.count_nonzero() == 0
    away = (found.log_ratios.sign() == found.advantages.sign()).tolist()
    assert (found.num_clipped_tokens == found.num_tokens).tolist() == away
    assert min(output.grad_norm, found.entropies.min()) > 0
    assert output.loss == pytest.approx(float(found.losses.sum()), abs=1e-12)


def test_with_the_policys_old_logprobs_the_first_steps_ratios_are_exactly_one(policy, make_group):
    groups = [make_group([1, 0, 0], seed=seed) for seed in range(4)]
    first, second = (output.sequences for output in update(policy, groups, old_logprobs="policy", mini_batches=2))
    assert first.log_ratios.count_nonzero() == 0
    assert second.log_ratios.count_nonzero() == 6
    torch.testing.assert_close(second.log_ratios, second.update_log_ratios, rtol=0, atol=0)
    assert first.mismatch_log_ratios.count_nonzero() == 6


def test_with_the_samplers_old_logprobs_a_ratio_is_mismatch_and_movement_together(policy, make_group):
    groups = [make_group([1, 0, 0], seed=seed) for seed in range(4)]
    for output in update(policy, groups, mini_batches=2):
        parts = output.sequences.mismatch_log_ratios + output.sequences.update_log_ratios
        torch.testing.assert_close(output.sequences.log_ratios, parts, rtol=0, atol=1e-9)


def test_mini_batches_are_steps_on_whole_groups_with_their_own_denominators(tiny_base, make_group):
    groups = [make_group([1, 0, 0], seed=seed) for seed in range(4)]
    together = make_policy(tiny_base)
    update(together, groups, mini_batches=2)
    apart = make_policy(tiny_base)
    update(apart, groups[0::2])
    update(apart, groups[1::2])
    for name, parameter in together.parameters.items():
        torch.testing.assert_close(apart.parameters[name], parameter, rtol=0, atol=1e-12)


def test_a_reward_raises_the_probability_of_what_earned_it_over_the_rest(policy, make_group):
    group = make_group([1, 0], lengths=[6, 6])
    batch = one_batch([group])
    right = batch.advantages > 0
    before = policy.token_logprobs(batch)[0].sum(-1)
    for _ in range(5):
        update(policy, [group])
    change = policy.token_logprobs(batch)[0].sum(-1) - before
    assert change[right] > change[~right] + 0.1


def test_an_old_policy_that_is_the_policy_itself_is_not_computed_twice(policy, make_group, monkeypatch):
    scored, batches = policy.token_logprobs, []
    monkeypatch.setattr(policy, "token_logprobs", lambda batch: (batches.append(batch), scored(batch))[1])
    (output,) = update(policy, [make_group([1, 0, 0, 1])], old_logprobs="policy")
    assert sum(len(batch.advantages) for batch in batches) == 4
    assert output.sequences.log_ratios.tolist() == [0, 0, 0, 0]
    assert output.sequences.mismatch_log_ratios.abs().min() > 0.1  # the sampler's log-probabilities are made up


@pytest.mark.parametrize(("algorithm", "mismatch_weight"), [("grpo", "token"), ("gspo", "sequence")])
def test_a_sampler_that_is_off_by_the_same_everywhere_scales_the_gradient(
    policy, make_group, algorithm, mismatch_weight
):
    """Where the policy's probability of each token is 1.5 times the sampler's, so is the weight."""
    group = make_group([1, 0, 0, 1])
    for datum, completion in zip(training_data([group]), group.completions, strict=True):
        alone = collate([datum])
        logprobs = policy.token_logprobs(alone)[0][alone.completion_mask] - math.log(1.5)
        completion.logprobs[:] = logprobs.tolist()
    choices = {"algorithm": algorithm, "old_logprobs": "policy"}
    plain = gradients(policy, [group], **choices)
    weighted = gradients(policy, [group], **choices, mismatch_weight=mismatch_weight)
    for name, gradient in weighted.items():
        torch.testing.assert_close(gradient, 1.5 * plain[name], rtol=1e-4, atol=1e-6)


def test_out_of_memory_in_an_update_halves_the_micro_batches_once_and_changes_nothing_else(
    tiny_base, make_group, monkeypatch, capfd
):
    """Only here is the fault imitated: no GPU runs out of memory on a CPU."""
    in_two = {"old_logprobs": "policy", "mini_batches": 2}
    for choices, count, fitting in (({}, 3, 2), ({"old_logprobs": "policy"}, 3, 2), (in_two, 4, 1)):
        groups = [make_group([1, 0, 0, 1], seed=seed) for seed in range(count)]
        policy = make_policy(tiny_base)
        expected = gradients(make_policy(tiny_base), groups, **choices)
        scored = policy.token_logprobs

        def token_logprobs(batch, scored=scored, fitting=fitting):
            if len(batch.advantages) > fitting and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return scored(batch)

        monkeypatch.setattr(policy, "token_logprobs", token_logprobs)
        found = gradients(policy, groups, **choices)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
        half = (fitting + 1) * 14 // 2  # one sequence more, of 14 tokens, went together
        assert policy.micro_batch_tokens == half
        assert f"out of GPU memory; micro_batch_tokens is {half} from now on" in capfd.readouterr().out


def test_one_sequence_that_does_not_fit_into_memory_stops_the_run(policy, make_group, monkeypatch):
    def token_logprobs(batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(policy, "token_logprobs", token_logprobs)
    with pytest.raises(torch.OutOfMemoryError):
        update(policy, [make_group([1, 0])])


def test_the_policy_can_be_its_former_self_and_the_base_for_a_while(policy, make_group):
    groups = [make_group([1, 0])]
    batch = one_batch(groups)
    first = policy.token_logprobs(batch)[0]
    with pytest.raises(RuntimeError, match="no update yet"), policy.previous_adapter():
        pass
    update(policy, groups)
    second = policy.token_logprobs(batch)[0]
    assert not torch.equal(second, first)
    with policy.previous_adapter():
        assert torch.equal(policy.token_logprobs(batch)[0], first)
    with policy.without_adapter():
        based = policy.token_logprobs(batch)[0]
    assert not torch.equal(based, first)
    assert torch.equal(policy.token_logprobs(batch)[0], second)


def test_the_adapters_size_is_known_before_the_weights_are_loaded(tiny_base, tiny_vision_base, policy):
    expected = sum(parameter.numel() for parameter in policy.parameters.values())
    for base in (tiny_base, tiny_vision_base):
        assert model_needs(PolicyConfig(base_model=str(base), lora_rank=4)).num_adapter_parameters == expected


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_weights(policy, make_group):
    before = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    group = make_group([1, 0])
    group.completions[0].logprobs[0] = float("nan")
    with pytest.raises(FloatingPointError, match="loss is"):
        update(policy, [group])
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.parameters.items())


def test_lora_covers_every_linear_layer_of_both_mixing_kinds(policy):
    assert policy.coverage() == (
        "LoRA rank 4 on 31 modules: down_proj x4, gate_proj x4, in_proj_a x3, in_proj_b x3, in_proj_qkv x3, "
        "in_proj_z x3, k_proj x1, o_proj x1, out_proj x3, q_proj x1, up_proj x4, v_proj x1"
    )


def test_a_saved_policy_continues_exactly_as_if_it_had_not_stopped(tiny_base, make_group, tmp_path):
    groups = [make_group([1, 0, 0]), make_group([0, 1, 1], seed=1)]
    config = PolicyConfig(base_model=str(tiny_base), lora_rank=4, learning_rate=1e-3)
    straight, stopped, resumed = (Policy(config, seed=0) for _ in range(3))
    update(straight, groups)
    update(straight, groups)
    update(stopped, groups)
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    update(resumed, groups)
    for name, parameter in straight.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name


def test_peft_loads_the_saved_adapter_and_computes_the_same(tiny_base, make_group, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = make_policy(tiny_base)
    policy.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, tmp_path).double()
    input_ids = torch.tensor([[5, 6, 7, 8]])
    expected = policy.model(input_ids=input_ids).logits
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, expected, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize(("fixture", "prefix"), [("tiny_base", ""), ("tiny_vision_base", "language_model.")])
def test_the_copy_for_the_sampler_has_its_module_names(fixture, prefix, request, tmp_path):
    policy = Policy(PolicyConfig(base_model=str(request.getfixturevalue(fixture)), lora_rank=4), seed=0)
    policy.save(tmp_path)
    own, served = (
        load_file(tmp_path / "adapter_model.safetensors"),
        load_file(tmp_path / "vllm/adapter_model.safetensors"),
    )
    assert len(own) == 62
    start = "base_model.model.model."
    torch.testing.assert_close(
        {name.replace(start, start + prefix): weight for name, weight in own.items()}, served, rtol=0, atol=0
    )
    torch.testing.assert_close(policy.state()["adapter_model"], own, rtol=0, atol=0)


def test_the_logarithms_of_decays_are_as_exact_as_the_checkpoint_has_them(tiny_base, tmp_path):
    """Qwen3.5 stores them in float32, and vLLM keeps them so."""
    shutil.copytree(tiny_base, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    exact = {name: weight.float() + 1e-4 for name, weight in weights.items() if name.endswith(".A_log")}
    save_file(weights | exact, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(Policy(PolicyConfig(base_model=str(tmp_path)), seed=0).model.get_base_model().named_parameters())
    assert len(exact) == 3
    assert all(torch.equal(loaded[name], weight) for name, weight in exact.items())
    frozen = {name: p.dtype for name, p in loaded.items() if ".lora_" not in name and name not in exact}
    assert set(frozen.values()) == {torch.bfloat16}


def test_an_adapter_says_which_revision_of_its_base_it_belongs_to(tiny_base, tmp_path):
    Policy(PolicyConfig(base_model=str(tiny_base), revision="abc"), seed=0).save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["revision"] == "abc"


def test_an_adapter_of_another_rank_is_refused(tiny_base, tmp_path):
    Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=4), seed=0).save(tmp_path)
    with pytest.raises(ValueError, match="another rank than this run"):
        Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=8), seed=0).load(tmp_path)


def test_saving_asks_the_hub_for_nothing(policy, tmp_path, monkeypatch):
    """PEFT would look up the base model there, at every step."""
    asked = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *names: asked.append(names))
    policy.model.peft_config["default"].base_model_name_or_path = "somebody/something"
    policy.save(tmp_path)
    policy.state()
    assert not asked


def model_with_dropout(kind, folder):
    """Write a small causal model of another architecture, with dropout, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

    shape: dict[str, Any] = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(0)
    model: Any = {
        "attention": lambda: LlamaForCausalLM(LlamaConfig(**shape, attention_dropout=0.1)),
        "hidden": lambda: PhiForCausalLM(PhiConfig(**shape, resid_pdrop=0.1, embd_pdrop=0.1)),
    }[kind]()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["attention", "hidden"])
def test_a_model_with_dropout_scores_the_same_twice_and_as_it_samples(kind, tmp_path, make_group, monkeypatch):
    base = model_with_dropout(kind, tmp_path)
    batch = one_batch([make_group([1, 0, 0])])

    def scores(policy):
        assert policy.model.training
        return [policy.token_logprobs(batch)[0].detach() for _ in range(2)]

    policy = make_policy(base)
    first, second = scores(policy)
    assert torch.equal(first, second)
    policy.model.eval()
    assert torch.equal(first, policy.token_logprobs(batch)[0])
    monkeypatch.setattr("engine.model._switch_dropout_off", lambda model: None)
    first, second = scores(make_policy(base))
    assert not torch.equal(first, second)
