# SPDX-License-Identifier: Apache-2.0
"""What the tests compare with, and the random problems that they try."""

import dataclasses
import math

import numpy as np


# Unit roundoff of each type.
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Expected(np.ndarray):
    """Outputs in double precision with `spread`: the mean of |V| by the same weights."""


def attention(q, k_cache, v_cache, table, seq_lens, scale=None, rows=None):
    """(out, natural LSE) in double precision.  q: [batch, q_heads, head_dim]; caches: [pages, page_size, kv_heads,
    head_dim]; table: [rows, width]; all NumPy, of any floating type."""
    q, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache))
    batch, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    out, spread = np.zeros(q.shape).view(Expected), np.zeros(q.shape)
    lse = np.full((batch, q_heads), -np.inf)
    for b in range(batch):
        n = int(seq_lens[b])
        if not n:
            continue
        pages = np.asarray(table)[b if rows is None else rows[b]][: -(-n // k_cache.shape[1])]
        k, v = (cache[pages].reshape(-1, kv_heads, head_dim)[:n].repeat(q_heads // kv_heads, 1)
                for cache in (k_cache, v_cache))
        scores = np.einsum("hd,nhd->hn", q[b], k) * (scale or 1 / math.sqrt(head_dim))
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(1, keepdims=True)
        out[b] = np.einsum("hn,nhd->hd", weights, v) / total
        spread[b] = np.einsum("hn,nhd->hd", weights, np.abs(v)) / total
        lse[b] = top[:, 0] + np.log(total[:, 0])
    out.spread = spread
    return out, lse


def bound(out, spread, dtype):
    """Largest error of an output.  It is rounded to its type once, and so are the weights where a kernel multiplies
    them in the type of V: u |out| and u spread.  In fp32 scores below 16 round by 16 * 2^-24 (weights by as much,
    relatively), sums of head_dim products and of tokens by some 2^-24 more.  dtype: name."""
    return ROUNDOFF[dtype] * (abs(out) + spread) + 64 * ROUNDOFF["float32"] * (spread + 1)


def close(result, expected, dtype):
    """Whether a NumPy result is within the bound, no NaN."""
    return bool(np.all(np.abs(np.asarray(result, np.float64) - expected) <= bound(expected, expected.spread, dtype)))


def close_lse(result, expected, base2=False):
    """Sums of fp32, within 1e-4 of their size."""
    expected = expected * math.log2(math.e) if base2 else expected
    result = np.asarray(result, np.float64)
    finite = np.isfinite(expected)
    return bool(np.array_equal(result[~finite], expected[~finite])
                and np.all(np.abs(result[finite] - expected[finite]) <= 1e-4 * (1 + np.abs(expected[finite]))))


@dataclasses.dataclass
class Problem:
    """A random batch in fp32 NumPy; pages that no request has are NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    seq_lens: np.ndarray
    seed: int

    @property
    def csr(self):
        """(indptr, indices, last_page_len) of the same page table."""
        page_size = self.k.shape[1]
        pages = -(-self.seq_lens // page_size)
        indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
        indices = np.concatenate([row[:n] for row, n in zip(self.table, pages)] + [np.zeros(0, np.int32)])
        return indptr, indices.astype(np.int32), np.where(pages, self.seq_lens - (pages - 1) * page_size, 0).astype(
            np.int32)

    def attention(self, scale=None):
        return attention(self.q, self.k, self.v, self.table, self.seq_lens, scale)


def problem(seed, *, head_dims=(64, 128), max_len=600, max_batch=9, groups=(1, 2, 4, 8), page_sizes=(1, 7, 16, 64),
            rounded=None):
    """rounded: a type whose values the floats take, so that a test in it starts from what the reference has."""
    draw = np.random.default_rng(seed)
    batch = int(draw.integers(1, max_batch + 1))
    kv_heads = int(draw.integers(1, 5))
    head_dim, page_size = int(draw.choice(head_dims)), int(draw.choice(page_sizes))
    q_heads = kv_heads * int(draw.choice(groups))
    seq_lens = np.where(draw.random(batch) < 0.15, 0, draw.integers(1, max_len + 1, batch)).astype(np.int32)
    if draw.random() < 0.5:
        seq_lens[draw.integers(batch)] = max_len * 4  # one long request
    pages = -(-seq_lens // page_size)
    width = max(int(pages.max()), 1) + int(draw.integers(0, 3))
    spare = 5
    order = draw.permutation(int(pages.sum()) + spare)
    table = np.full((batch, width), -1, np.int32)
    begin = 0
    for b in range(batch):
        table[b, : pages[b]] = order[begin : begin + pages[b]]
        begin += pages[b]
    shape = (len(order), page_size, kv_heads, head_dim)
    k, v = (draw.standard_normal(shape, np.float32) for _ in range(2))
    q = draw.standard_normal((batch, q_heads, head_dim), np.float32)
    if rounded is not None:
        q, k, v = (x.astype(rounded).astype(np.float32) for x in (q, k, v))
    for cache in (k, v):
        cache[order[begin:]] = np.nan
        for b in range(batch):
            if seq_lens[b] % page_size:
                cache[table[b, pages[b] - 1], seq_lens[b] % page_size :] = np.nan
    return Problem(q, k, v, table, seq_lens, seed)
