# SPDX-License-Identifier: Apache-2.0
"""evenkv in Hugging Face transformers, on a small Qwen3 model with random weights, in fp32 on the CPU."""

import functools

import pytest
import torch
import transformers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import evenkv.hf
import evenkv.torch

STEPS = 64
LENGTHS = (5, 17, 40, 1)


def make_model(dtype=torch.float32, device="cpu", head_dim=32):
    """Weights ten times as large as usual, so that greedy decoding wanders instead of repeating a token."""
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
                         num_attention_heads=8, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=2048,
                         initializer_range=0.2, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    return Qwen3ForCausalLM(config).to(device, dtype).eval()


def make_prompts():
    torch.manual_seed(2)
    return [torch.randint(2, 512, (n,)).tolist() for n in LENGTHS]


def left_padded(prompts, device="cpu"):
    """(input_ids, attention_mask)"""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def continuous_config(page_size=32, num_blocks=64, **keywords):
    name = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    return ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=256, **{name: page_size}, **keywords)


def generate_continuously(model, prompts, steps, **keywords):
    config = GenerationConfig(max_new_tokens=steps, do_sample=False, pad_token_id=0, eos_token_id=-1)
    results = model.generate_batch(prompts, generation_config=config,
                                   continuous_batching_config=continuous_config(**keywords))
    for result in results.values():
        assert result.error is None, result.error
    found = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    return [found[tuple(prompt)] for prompt in prompts]


@pytest.fixture(scope="module")
def model():
    evenkv.hf.register()
    evenkv.hf.register()  # twice is once
    return make_model()


@pytest.fixture
def calls(monkeypatch):
    """Shapes of q of all decode steps that evenkv gets."""
    shapes = []
    original = evenkv.torch.decode

    def spy(q, *arguments, **keywords):
        shapes.append(tuple(q.shape))
        return original(q, *arguments, **keywords)

    monkeypatch.setattr(evenkv.hf, "decode", spy)
    return shapes


@pytest.fixture(scope="module")
def expected(model):
    ids, mask = left_padded(make_prompts())
    model.set_attn_implementation("sdpa")
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)[:, ids.shape[1] :]
    assert all(len(set(row.tolist())) > 20 for row in tokens)  # a wrong attention would show
    return tokens


@pytest.mark.parametrize("keywords", [{}, dict(cache_implementation="static", disable_compile=True)])
def test_generate_is_token_for_token_that_of_sdpa(model, expected, calls, keywords):
    ids, mask = left_padded(make_prompts())
    model.set_attn_implementation("evenkv")
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **keywords)
    assert torch.equal(tokens[:, ids.shape[1] :], expected)
    assert calls == [(len(LENGTHS), 8, 32)] * (3 * (STEPS - 1))  # the first token comes from prefill


def test_generate_without_padding(model, calls):
    ids = torch.tensor([make_prompts()[1]] * 2)
    results = []
    for name in ("sdpa", "evenkv"):
        model.set_attn_implementation(name)
        results.append(model.generate(ids, max_new_tokens=STEPS, do_sample=False))
    assert torch.equal(*results) and calls


def test_one_request(model):
    results = []
    for name in ("sdpa", "evenkv"):
        model.set_attn_implementation(name)
        results.append(model.generate(torch.tensor([make_prompts()[2]]), max_new_tokens=STEPS, do_sample=False))
    assert torch.equal(*results)


def test_continuous_batching_generates_the_same(model, expected, calls):
    model.set_attn_implementation("evenkv")
    assert generate_continuously(model, make_prompts(), STEPS) == expected.tolist()
    assert model.config._attn_implementation == "evenkv"  # gone back to
    assert len(calls) > 100


def test_continuous_batching_by_block_table(model, expected, monkeypatch):
    """transformers keeps the block table to CUDA; here it is let through to the CPU."""
    from transformers.generation.continuous_batching import initialization
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *arguments: None)
    steps = spy_on_block_table(monkeypatch)
    model.set_attn_implementation("evenkv")
    found = generate_continuously(model, make_prompts(), STEPS, max_blocks_per_request=8)
    assert found == expected.tolist() and len(steps) > 100


def spy_on_block_table(monkeypatch):
    """Numbers of requests of all decode steps that take the block table."""
    steps = []
    original = evenkv.hf.flash_attn_with_kvcache

    @functools.wraps(original)  # transformers looks at the signature
    def spy(q, *arguments, **keywords):
        steps.append(len(q))
        return original(q, *arguments, **keywords)

    from transformers import modeling_flash_attention_utils as utils
    monkeypatch.setattr(evenkv.hf, "flash_attn_with_kvcache", spy)
    monkeypatch.setattr(utils, "_loaded_implementation", None)  # to take up the spy
    return steps


def test_teacher_forced_logits(model, expected):
    """Decode steps one by one, over the tokens that were generated."""
    ids, mask = left_padded(make_prompts())
    logits = {}
    for name in ("sdpa", "evenkv"):
        model.set_attn_implementation(name)
        logits[name] = forced_logits(model, ids, mask, expected[:, :16])
    assert (logits["sdpa"] - logits["evenkv"]).abs().max() < 1e-3 * logits["sdpa"].abs().max()


def forced_logits(model, ids, mask, tokens):
    """[batch, tokens, vocabulary]: after each of the tokens, fed one by one."""
    cache, found = None, []
    name = "cache" if "cache" in model.forward.__annotations__ else "past_key_values"
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for step in range(tokens.shape[1] + 1):
            fed = ids if not step else tokens[:, step - 1 : step]
            output = model(fed, attention_mask=mask, position_ids=positions[:, -fed.shape[1] :], use_cache=True,
                           **{name: cache})
            cache = output[name] if name in output else output.past_key_values
            if step:
                found.append(output.logits[:, -1].float())
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
            positions = torch.cat((positions, positions[:, -1:] + 1), 1)
    return torch.stack(found, 1)


def test_prefill_of_several_requests_by_mask():
    """What continuous batching on the CPU uses, against request by request."""
    torch.manual_seed(0)
    q_lens, k_lens = (3, 1, 6), (9, 4, 6)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens))
    q, (k, v) = torch.randn(sum(q_lens) + 2, 4, 64), torch.randn(2, sum(k_lens), 2, 64)  # two rows of padding
    out = evenkv.hf.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 9, softmax_scale=0.2, causal=True)
    assert out.shape == q.shape and torch.isfinite(out).all()
    for b in range(3):
        own_q = q[cu_q[b] : cu_q[b + 1]].transpose(0, 1)
        own_k, own_v = (x[cu_k[b] : cu_k[b + 1]].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        mask = torch.ones(q_lens[b], k_lens[b], dtype=torch.bool).tril(k_lens[b] - q_lens[b])
        alone = torch.nn.functional.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=mask, scale=0.2)
        assert torch.allclose(out[cu_q[b] : cu_q[b + 1]].transpose(0, 1), alone, atol=1e-6)


def test_what_a_model_asks_beyond_is_refused(model):
    layer = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 1, 32), torch.zeros(1, 2, 8, 32)
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(NotImplementedError, match=name):
            evenkv.hf.attention_forward(layer, q, k, k, None, **{name: 1.0})
    with pytest.raises(NotImplementedError, match="attention_mask is torch.float32"):
        evenkv.hf.attention_forward(layer, q, k, k, torch.zeros(1, 1, 1, 8))
    with pytest.raises(NotImplementedError, match="window_size"):
        evenkv.hf.flash_attn_varlen_func(q[0], k[0], k[0], None, None, 1, 1, window_size=(7, 0))


def test_a_sliding_window_is_in_the_mask(model):
    """The mask of a decode step says which tokens count, whatever rule made it."""
    torch.manual_seed(0)
    layer = model.model.layers[0].self_attn
    q, (k, v) = torch.randn(2, 8, 1, 32), torch.randn(2, 2, 2, 30, 32)
    mask = torch.zeros(2, 1, 1, 30, dtype=torch.bool)
    mask[0, ..., 20:], mask[1, ..., 3:9] = True, True
    mine, theirs = (f(layer, q, k, v, mask, scaling=0.2)[0] for f in (
        evenkv.hf.attention_forward, transformers.AttentionInterface()["sdpa"]))
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_a_missing_hook_is_named(monkeypatch):
    from transformers import modeling_flash_attention_utils as utils
    monkeypatch.delattr(utils, "_lazy_imports")
    with pytest.raises(NotImplementedError, match="_lazy_imports"):
        evenkv.hf._hook_flash_functions()


def test_gradients_go_to_sdpa(model):
    layer = model.model.layers[0].self_attn
    q = torch.randn(1, 8, 1, 32, requires_grad=True)
    k = torch.randn(1, 2, 8, 32)
    evenkv.hf.attention_forward(layer, q, k, k, None)[0].sum().backward()
    assert q.grad is not None
