# SPDX-License-Identifier: Apache-2.0
"""Random batches on the GPU, and torch's own attention of them."""

import dataclasses

import torch

import reference


@dataclasses.dataclass
class Case:
    """Tensors on the GPU; pages that nobody has, and tokens past an end, are NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    csr: tuple

    @property
    def arguments(self):
        return self.q, self.k, self.v, self.table, self.seq_lens


def make(seed, dtype=torch.bfloat16, **limits):
    problem = reference.problem(seed, **(dict(head_dims=(64, 128, 256), groups=(1, 2, 3, 8, 16)) | limits))
    floats = (torch.from_numpy(x).cuda().to(dtype) for x in (problem.q, problem.k, problem.v))
    table, seq_lens, *csr = (torch.from_numpy(x).cuda() for x in (problem.table, problem.seq_lens, *problem.csr))
    return Case(*floats, table, seq_lens, tuple(csr))


def sdpa(case, seq_lens=None, scale=None):
    """(out, spread, natural LSE) in fp32 by scaled_dot_product_attention, request by request; spread as in
    reference.bound."""
    seq_lens = case.seq_lens if seq_lens is None else seq_lens
    out = torch.zeros(case.q.shape, device="cuda")
    spread, lse = torch.zeros_like(out), torch.full(out.shape[:2], -torch.inf, device="cuda")
    group = case.q.shape[1] // case.k.shape[2]
    scale = scale or case.q.shape[2] ** -0.5
    for b, n in enumerate(seq_lens.tolist()):
        if not n:
            continue
        pages = case.table[b, : -(-n // case.k.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[:n].float().repeat_interleave(group, 1).transpose(0, 1)
                for x in (case.k, case.v))
        q = case.q[b, :, None].float()
        for target, values in ((out, v), (spread, v.abs())):
            target[b] = torch.nn.functional.scaled_dot_product_attention(q, k, values, scale=scale)[:, 0]
        lse[b] = ((q * scale) @ k.transpose(1, 2)).logsumexp(2)[:, 0]
    return out, spread, lse


def check(result, case, seq_lens=None, scale=None, lse=None, what=""):
    """Asserts that result is attention, within reference.bound."""
    out, spread, natural = sdpa(case, seq_lens, scale)
    error = (result.float() - out).abs()
    allowed = reference.bound(out, spread, str(result.dtype).removeprefix("torch."))
    assert torch.all(error <= allowed), f"{what}: {(error / allowed).max().item():.2f} of the bound"
    if lse is not None:
        assert torch.equal(torch.isinf(lse), torch.isinf(natural)), what
        finite = torch.isfinite(natural)
        assert torch.all((lse - natural)[finite].abs() <= 1e-4 * (1 + natural[finite].abs())), what
