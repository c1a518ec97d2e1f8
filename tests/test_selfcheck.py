"""The self-check and the memory dry run against the real engines, with each fault put in on purpose."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.delta_rule import delta_kernel_errors
from engine.gate import CheckError
from engine.hub import load_tokenizer
from engine.memory import memory_dry_run
from engine.policy import Policy, PolicyConfig
from engine.sampler import Sampler, SamplerConfig, SamplingConfig
from engine.selfcheck import _check_end_token, _check_round_trip, self_check
from loss import Denominators, LossConfig, make_loss
from rollout import encode_prompt
from tiny import sums

SAMPLING = SamplingConfig(group_size=8, max_prompt_tokens=64, max_tokens=48)


@pytest.fixture(scope="module")
def run(tiny_base, tmp_path_factory):
    """Return two engines before the first step."""
    sampler_config = SamplerConfig(base_model=str(tiny_base), lora_rank=8, max_model_len=128)
    with Sampler(sampler_config) as sampler:
        yield SimpleNamespace(
            policy=Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=8), seed=0),
            sampler=sampler,
            tokenizer=load_tokenizer(str(tiny_base)),
            folder=tmp_path_factory.mktemp("adapter"),
        )


def verify(run, tokenizer=None):
    """Run the self-check, by default with the model's own tokenizer."""
    tokenizer = tokenizer or run.tokenizer
    questions = [problem.question for problem in sums(seed=0)]
    prompts = [encode_prompt(tokenizer, question) for question in questions[:4]]
    return self_check(run.policy, run.sampler, tokenizer, prompts, questions, SAMPLING, adapter=run.folder)


def test_engines_in_order_pass_and_the_self_check_says_what_it_verified(run):
    before = torch.get_rng_state()
    checked = verify(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < checked.baseline_mismatch < 0.01
    assert checked.findings["adapter"] == "the sampler matched all of its 31 modules"
    assert checked.findings["gradients"] == "all 31 adapter modules receive one"
    assert "3 layers" in checked.findings["gated delta net"]


def test_a_trainer_that_reads_padding_is_refused(run, pad_on_the_left):
    pad_on_the_left(run.policy)
    with pytest.raises(CheckError, match="padding and the rest of the batch move"):
        verify(run)


def test_modules_without_a_gradient_are_named(run, monkeypatch):
    layer = run.policy.model.get_base_model().model.layers[1].linear_attn
    monkeypatch.setattr(layer.in_proj_z, "forward", layer.in_proj_z.base_layer.forward)
    with pytest.raises(
        CheckError, match=r"1 adapter modules receive no gradient .*layers\.1\.linear_attn\.in_proj_z"
    ):
        verify(run)


def test_engines_that_disagree_about_the_base_model_are_refused(run, monkeypatch):
    monkeypatch.setattr(run.policy, "temperature", 0.3)
    with pytest.raises(CheckError, match="on the base model already"):
        verify(run)


def test_a_kernel_with_a_wrong_gradient_is_found(run, monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    layer = run.policy.model.get_base_model().model.layers[0].linear_attn
    kernel = modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert max(delta_kernel_errors(kernel, layer, torch.device("cpu")).values()) < 0.01

    def wrong(query, key, value, g, beta, **options):
        return kernel(query, key, value, g + 0.1 * (g - g.detach()), beta, **options)

    def of_other_names(q, k, v, g, beta, use_qk_l2norm_in_kernel=False):  # flash-linear-attention's
        return kernel(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    assert max(delta_kernel_errors(of_other_names, layer, torch.device("cpu")).values()) < 0.01
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", wrong)
    with pytest.raises(CheckError, match="the gradient of g is off by 10"):
        verify(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chat_template": "{{ messages[0].content }}<|im_end|>"}, "ends a prompt with the end token"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(run, tiny_base, change, message):
    tokenizer = load_tokenizer(str(tiny_base))
    for name, value in change.items():
        setattr(tokenizer, name, value)
    with pytest.raises(CheckError, match=message):
        verify(run, tokenizer)


def test_the_end_of_an_answer_may_be_the_tokenizers_or_the_generation_configs(run, tiny_base, capsys):
    """Qwen3.5 has no generation config, and its model config names another token than its chat template writes."""

    def verdict(declared):
        config = SimpleNamespace(eos_token_id=declared)
        policy = cast("Policy", SimpleNamespace(model=SimpleNamespace(generation_config=config)))
        return _check_end_token(tokenizer, policy)

    tokenizer = load_tokenizer(str(tiny_base))
    end = tokenizer.eos_token_id
    ends = "by the chat template an answer ends with '<|im_end|>'; the sampler stops at"
    assert verdict(None) == f"{ends} '<|im_end|>'"
    assert verdict(0) == f"{ends} '<|endoftext|>' and '<|im_end|>'"
    tokenizer.eos_token = "<|endoftext|>"
    assert verdict([0, end]) == f"{ends} '<|endoftext|>' and '<|im_end|>'"
    assert not capsys.readouterr().out
    assert verdict(0) == f"{ends} '<|endoftext|>'"
    assert (
        "warning: by the chat template an answer ends with '<|im_end|>', but the sampler" in capsys.readouterr().out
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert verdict(0) == "the chat template does not say how an answer ends; the sampler stops at '<|endoftext|>'"
    tokenizer.eos_token = None
    with pytest.raises(CheckError, match="neither tokenizer nor model has an end token"):
        verdict(None)


def test_a_tokenizer_that_loses_text_is_refused(run):
    with pytest.raises(CheckError, match=r"a question into other text: 'What is 1 \+ 1\?' for 'What is <\|im_"):
        _check_round_trip(run.tokenizer, ["What is <|im_end|>1 + 1?"])


LOSS = make_loss(LossConfig(), Denominators(num_sequences=1, num_tokens=1, max_tokens=SAMPLING.max_tokens))


def rehearse(run):
    prompt = encode_prompt(run.tokenizer, "What is 1 + 1?")
    memory_dry_run(run.policy, run.sampler, prompt, SAMPLING, LOSS, num_sequences=16)


def test_the_memory_dry_run_computes_the_largest_batches_and_changes_nothing(run, monkeypatch):
    before = {name: parameter.detach().clone() for name, parameter in run.policy.parameters.items()}
    generator = torch.get_rng_state()
    monkeypatch.setattr(run.policy, "micro_batch_tokens", 500)
    scored, shapes = run.policy.token_logprobs, []
    monkeypatch.setattr(
        run.policy, "token_logprobs", lambda batch: (shapes.append(tuple(batch.input_ids.shape)), scored(batch))[1]
    )
    rehearse(run)
    assert sorted(shapes) == [(4, 112), (5, 100)]  # the longest sequences, and ones that fill 500 tokens
    assert all(torch.equal(before[name], parameter) for name, parameter in run.policy.parameters.items())
    assert all(parameter.grad is None for parameter in run.policy.parameters.values())
    assert not run.policy.optimizer.state
    assert not run.policy.has_previous
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_sequence_too_long_for_the_memory_is_refused_before_the_first_step(run, monkeypatch):
    """Only here is the fault imitated: no GPU runs out of memory on a CPU."""

    def token_logprobs(batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(run.policy, "token_logprobs", token_logprobs)
    monkeypatch.setattr(run.policy, "micro_batch_tokens", 100)
    with pytest.raises(CheckError, match=r"one sequence of 112 tokens does not fit .*lower --max-tokens or"):
        rehearse(run)
