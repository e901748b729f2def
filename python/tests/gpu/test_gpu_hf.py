# SPDX-License-Identifier: Apache-2.0
"""evenkv in Hugging Face transformers on a CUDA device: a small Qwen3 model with random weights, in bf16."""

import pytest
import torch

import evenkv.hf
import test_hf

pytestmark = pytest.mark.gpu

STEPS = 32


@pytest.fixture(scope="module")
def model():
    evenkv.hf.register()
    return test_hf.make_model(torch.bfloat16, "cuda", head_dim=64)


def rounding(logits):
    """What bf16 may change: the two implementations round sums of the same numbers at other places, in 3 layers; 2^-8
    for each of about 4 roundings a layer."""
    return 3 * 4 * 2.0**-8 * logits.abs().amax(-1, keepdim=True)


def test_teacher_forced_logits(model):
    prompts = test_hf.make_prompts()
    ids, mask = test_hf.left_padded(prompts, "cuda")
    model.set_attn_implementation("sdpa")
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)[:, ids.shape[1] :]
    logits = {}
    for name in ("sdpa", "evenkv", "eager"):
        model.set_attn_implementation(name)
        logits[name] = test_hf.forced_logits(model, ids, mask, tokens)
    error, of_eager = ((logits[name] - logits["sdpa"]).abs() for name in ("evenkv", "eager"))
    print(f"largest difference from sdpa: evenkv {error.max():.4f}, eager {of_eager.max():.4f}, of logits up to "
          f"{logits['sdpa'].abs().max():.1f}")
    # or what two implementations of transformers' own differ by
    assert torch.all(error <= torch.maximum(rounding(logits["sdpa"]), 3 * of_eager.max()))


@pytest.mark.parametrize("graphs", [False, True])
def test_continuous_batching(model, monkeypatch, graphs):
    """Each token that it generates is one that sdpa, fed with the tokens before it, ranks first within rounding."""
    steps = test_hf.spy_on_block_table(monkeypatch)
    prompts = test_hf.make_prompts()
    model.set_attn_implementation("evenkv")
    found = test_hf.generate_continuously(model, prompts, STEPS, max_blocks_per_request=8, use_cuda_graph=graphs)
    assert len(steps) >= 3, "no decode step took the block table"
    print(f"{len(steps)} layers of decode steps from Python")
    model.set_attn_implementation("sdpa")
    for prompt, tokens in zip(prompts, found):
        assert len(tokens) == STEPS
        ids = torch.tensor([prompt + tokens], device="cuda")
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])
        assert torch.all(logits.amax(1, keepdim=True) - chosen <= 2 * rounding(logits))


def test_prefill_of_several_requests():
    """Torch's FlashAttention aligns causal masks as the one by mask does."""
    torch.manual_seed(0)
    q_lens, k_lens = (3, 1, 60), (90, 4, 60)
    cu_q, cu_k = (torch.tensor([0, *lens], device="cuda").cumsum(0).int() for lens in (q_lens, k_lens))
    q = torch.randn(sum(q_lens), 4, 64, device="cuda").bfloat16()
    k, v = torch.randn(2, sum(k_lens), 2, 64, device="cuda").bfloat16()
    by_flash = evenkv.hf.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 60, 90, causal=True)
    by_mask = evenkv.hf._varlen_by_mask(q, k, v, cu_q, cu_k, None, True)
    assert torch.all((by_flash - by_mask).abs() <= 2.0**-6 * (1 + by_mask.abs()))


def test_generate(model):
    prompts = test_hf.make_prompts()
    ids, mask = test_hf.left_padded(prompts, "cuda")
    model.set_attn_implementation("evenkv")
    for keywords in ({}, dict(cache_implementation="static", disable_compile=True)):
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **keywords)
        assert tokens.shape == (len(prompts), ids.shape[1] + STEPS)
