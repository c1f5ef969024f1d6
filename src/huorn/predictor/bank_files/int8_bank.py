"""placeholder"""

import torch
import torch.nn.functional as F
from torch import Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    kp = -(-k // 128) * 128
    w = torch.zeros(n, kp)
    w[:, :k] = weight.float()
    w = w.view(n, kp // 128, 128)
    s = w.abs().amax(2) / 127
    return (w / torch.where(s > 0, s, 1)[..., None]).round().to(torch.int8).view(n, kp), s


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.view(*scale.shape, 128).float() * scale[..., None]).view(codes.shape)


def score(t: dict[str, Tensor], x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for h in range(len(x)):

        def lin(n: str, v: Tensor) -> Tensor:
            w = dequantise(t[f"w_{n}.codes"][h], t[f"w_{n}.scale"][h])[:, : v.shape[-1]]
            return F.linear(v.to(torch.bfloat16).float(), w, t[f"b_{n}"][h]).to(torch.bfloat16)

        E = t["b_router"].shape[1]
        G = t["a"].shape[1]
        u = F.silu(lin("in", x[h]).float()).to(torch.bfloat16)
        o = lin("out", u)
        r = lin("router", base[h].to(torch.bfloat16) + o[G * E :]).float()
        out.append(o[: G * E].float().view(G, E) + r)
    z = torch.stack(out)
    return z, torch.sigmoid(z * t["a"][..., None] + t["b"][..., None])
