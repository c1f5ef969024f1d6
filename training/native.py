"""The fused C++ kernels of training as autograd functions.

`kernels/seedling.cpp` is compiled on first use with g++ into the cache folder and loaded with ctypes; every function
here has a backward pass that tests/training/test_native.py compares with float64 autograd of the plain formula.
Activations are BF16 wherever they feed a matrix product, F32 elsewhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).parent / "kernels" / "seedling.cpp"
FLAGS = ["-O3", "-march=native", "-ffast-math", "-std=c++20", "-shared", "-fPIC"]
HEAD_SIZE = 64  # compile-time head size of the delta rule in seedling.cpp
SCAN_CHUNK = 32  # states kept per this many tokens, as in seedling.cpp


@cache
def library() -> ctypes.CDLL:
    """Compile the kernels (two seconds) unless this source was compiled before, and load them."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huorn-training"
    built = folder / f"seedling-{key}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            target = Path(scratch) / "seedling.so"
            subprocess.run(["g++", *FLAGS, str(SOURCE), "-o", str(target)], check=True)
            target.replace(built)
    return ctypes.CDLL(str(built))


def call(name: str, *arguments: Tensor | int | float) -> None:
    """Call kernel `name`; tensors go as pointers and must be contiguous, ints as int64, floats as f32."""
    converted: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not argument.is_contiguous():
                raise ValueError(f"{name}: a tensor of shape {tuple(argument.shape)} is not contiguous")
            converted.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, int):
            converted.append(ctypes.c_int64(argument))
        else:
            converted.append(ctypes.c_float(argument))
    getattr(library(), name)(*converted)


def fused(function: type[torch.autograd.Function], *arguments: Tensor | float) -> Tensor:
    """Run one of the functions below; torch leaves `apply` untyped."""
    out: Tensor = function.apply(*arguments)
    return out


class RMSNorm(torch.autograd.Function):
    """x [N, D] f32, w [D] f32 -> x / rms(x) * (1 + w) as BF16 [N, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        n, d = x.shape
        y, rstd = torch.empty(n, d, dtype=torch.bfloat16), torch.empty(n)
        call("rms_norm", x, w, y, rstd, n, d, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        call("rms_norm_backward", x, w, rstd, grads[0].contiguous(), dx, dw, *x.shape)
        return dx, dw, None


class ConvSilu(torch.autograd.Function):
    """Causal depthwise convolution, then SiLU. x [B, S, C] bf16, w [C, taps] f32 -> [B, S, C] bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x, transposed = x.contiguous(), w.t().contiguous()
        pre, y = torch.empty_like(x), torch.empty_like(x)
        call("conv_silu", x, transposed, pre, y, *x.shape, w.shape[1])
        ctx.save_for_backward(x, transposed, pre)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, transposed, pre = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(transposed)
        call(
            "conv_silu_backward",
            x,
            transposed,
            pre,
            grads[0].contiguous(),
            dx,
            dw,
            *x.shape,
            transposed.shape[0],
        )
        return dx, dw.t()


class GatedNorm(torch.autograd.Function):
    """o [R, V] f32, z [R, V] bf16, w [V] f32 -> o / rms(o) * w * silu(z) as BF16 [R, V]."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, z: Tensor, w: Tensor, eps: float) -> Tensor:
        z = z.contiguous()
        y, rstd = torch.empty_like(z), torch.empty(o.shape[0])
        call("gated_norm", o, z, w, y, rstd, *o.shape, eps)
        ctx.save_for_backward(o, z, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, z, w, rstd = ctx.saved_tensors
        d_o, dz, dw = torch.empty_like(o), torch.empty_like(z), torch.zeros_like(w)
        call("gated_norm_backward", o, z, w, rstd, grads[0].contiguous(), d_o, dz, dw, *o.shape)
        return d_o, dz, dw, None


class DeltaScan(torch.autograd.Function):
    """Gated delta rule: q, k [B, S, Hk, 64] f32 (normalised), v [B, S, Hv, 64] bf16, g, beta [B, S, Hv] f32
    -> o [B, S, Hv, 64] f32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (tensor.contiguous() for tensor in (q, k, v, g, beta))
        b, s, hk, size = q.shape
        hv = v.shape[2]
        if size != HEAD_SIZE or v.shape[3] != HEAD_SIZE:
            raise ValueError(f"the scan is compiled for heads of {HEAD_SIZE}, not {size} and {v.shape[3]}")
        o = torch.empty(b, s, hv, HEAD_SIZE)
        saved = torch.empty(b, hv, -(-s // SCAN_CHUNK), HEAD_SIZE, HEAD_SIZE)
        call("delta_scan", q, k, v, g, beta, o, saved, b, s, hk, hv)
        ctx.save_for_backward(q, k, v, g, beta, saved)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, saved = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.empty_like(v)
        dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
        b, s, hk, _ = q.shape
        call(
            "delta_scan_backward",
            q,
            k,
            v,
            g,
            beta,
            saved,
            grads[0].contiguous(),
            dq,
            dk,
            dv,
            dg,
            dbeta,
            b,
            s,
            hk,
            v.shape[2],
        )
        return dq, dk, dv, dg, dbeta


class RoutedExperts(torch.autograd.Function):
    """The routed half of a MoE block: pairs sorted by expert, one matrix product per expert and projection.

    x [N, D] bf16, ids [N, K] int64, weights [N, K] f32, gate_up [E, 2I, D] f32, down [E, D, I] f32 -> [N, D] f32.
    Each expert's rows are padded to a multiple of `PAD`: oneDNN makes a new kernel per shape, and rows that come in
    128s keep the number of shapes small.
    """

    PAD = 128

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        (n, d), (experts, _, width), k = x.shape, down.shape, ids.shape[1]
        pad = RoutedExperts.PAD
        counts = torch.bincount(ids.reshape(-1), minlength=experts)
        padded = (counts + pad - 1) // pad * pad
        starts = padded.cumsum(0) - padded
        order = ids.reshape(-1).argsort(stable=True)  # pairs by expert
        first = counts.cumsum(0) - counts
        rows = torch.arange(n * k) - (first - starts).repeat_interleave(
            counts
        )  # padded place of each sorted pair
        place = torch.empty(n * k, dtype=torch.int64).scatter_(0, order, rows)  # pair -> padded row
        total = int(padded.sum())
        token = torch.zeros(total, dtype=torch.int64).scatter_(0, rows, order // k)
        weight = torch.zeros(total).scatter_(0, rows, weights.detach().reshape(-1)[order])
        gu, dn = gate_up.to(torch.bfloat16), down.to(torch.bfloat16)
        spans = [
            (e, s, s + c) for e, (s, c) in enumerate(zip(starts.tolist(), padded.tolist(), strict=True)) if c
        ]

        gathered = x.index_select(0, token)
        h, out = x.new_empty(total, 2 * width), x.new_empty(total, d)
        for e, start, end in spans:
            torch.mm(gathered[start:end], gu[e].t(), out=h[start:end])
        a = x.new_empty(total, width)
        call("swiglu", h, weight, a, total, width)
        for e, start, end in spans:
            torch.mm(a[start:end], dn[e].t(), out=out[start:end])
        y = torch.empty(n, d)
        call("sum_pairs", out, place, y, n, k, d)
        ctx.save_for_backward(gathered, h, a, weight, token, place, gu, dn)
        ctx.spans, ctx.k = spans, k
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, h, a, weight, token, place, gu, dn = ctx.saved_tensors
        (total, d), width, n = gathered.shape, a.shape[1], grads[0].shape[0]
        d_out = grads[0].to(torch.bfloat16).index_select(0, token)
        # Padding rows repeat token 0 with weight 0: their activations are 0, so down's gradient ignores them, and
        # dh below is scaled by that weight, so gate_up's does too.
        da, d_gathered = torch.empty_like(a), torch.empty_like(gathered)
        d_down, d_gate_up = torch.zeros(dn.shape), torch.zeros(gu.shape)
        for e, start, end in ctx.spans:
            torch.mm(d_out[start:end], dn[e], out=da[start:end])
            d_down[e] = torch.mm(d_out[start:end].t(), a[start:end])
        dh, d_weight = torch.empty_like(h), torch.empty(total)
        call("swiglu_backward", h, weight, da, dh, d_weight, total, width)
        for e, start, end in ctx.spans:
            torch.mm(dh[start:end], gu[e], out=d_gathered[start:end])
            d_gate_up[e] = torch.mm(dh[start:end].t(), gathered[start:end])
        dx = torch.empty(n, d)
        call("sum_pairs", d_gathered, place, dx, n, ctx.k, d)
        return dx.to(torch.bfloat16), None, d_weight[place].view(n, ctx.k), d_gate_up, d_down


class CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of hidden [N, D] bf16 against head [V, D] f32, logits made and dropped 1,024 rows at a time."""

    ROWS = 1024

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        n, v = hidden.shape[0], head.shape[0]
        loss, weight = torch.empty(n), head.to(torch.bfloat16)
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head)
        for start in range(0, n, CrossEntropy.ROWS):
            block = hidden[start : start + CrossEntropy.ROWS]
            logits = block @ weight.t()
            rows = logits.shape[0]
            call(
                "cross_entropy",
                logits,
                target[start : start + rows],
                loss[start : start + rows],
                rows,
                v,
                1.0 / n,
            )
            torch.mm(logits, weight, out=d_hidden[start : start + rows])
            d_head += logits.t() @ block
        ctx.save_for_backward(d_hidden, d_head)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0], d_head * grads[0], None
