"""The head while it is trained: F32 parameters, BF16 products, and the frozen router at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from huorn.predictor.bank_files.spec import FeatureContract


@dataclass(frozen=True, eq=False)
class RouterFit:
    """Least-squares map from a layer's MoE input to its router logits: weight f32 [E, D], bias f32 [E]; error is the mean square
    residual over the variance of the logits."""

    weight: Tensor
    bias: Tensor
    error: float


def fit_router(hidden: Tensor, logits: Tensor) -> RouterFit:
    """hidden f16 [N, D], logits f16 [N, E] of the same tokens and layer. Normal equations in float64, with a ridge of 1e-6 of
    their mean diagonal, which decides where fewer rows than inputs were seen."""
    inputs, experts = hidden.shape[1], logits.shape[1]
    gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
    right = torch.zeros(inputs + 1, experts, dtype=torch.float64)
    for x, y in zip(hidden.split(8192), logits.split(8192), strict=True):
        rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        gram += rows.T @ rows
        right += rows.T @ y.double()
    gram += 1e-6 * gram.diagonal().mean() * torch.eye(inputs + 1, dtype=torch.float64)
    solution = torch.linalg.solve(gram, right)
    weight, bias = solution[:-1].T.float().contiguous(), solution[-1].float()
    some = slice(0, 65536)
    rest = F.linear(hidden[some].float(), weight, bias) - logits[some].float()
    return RouterFit(weight, bias, float(rest.square().mean() / logits[some].float().var()))


class Head(nn.Module):
    """u = silu(W_in x + b_in); [direct; forecast] = W_out u + b_out; z_g = direct_g + W_router (base + forecast) + b_router."""

    def __init__(
        self, contract: FeatureContract, scale: Tensor, trunk: int, groups: int, router: RouterFit
    ) -> None:
        """`scale` f32 [F] brings every input near unit size while training; `folded` puts it into W_in."""
        super().__init__()
        experts, hidden = router.weight.shape
        self.groups, self.experts, self.contract = groups, experts, contract
        self.w_in = nn.Parameter(torch.empty(trunk, len(scale)))
        self.b_in = nn.Parameter(torch.zeros(trunk))
        self.w_out = nn.Parameter(torch.zeros(groups * experts + hidden, trunk))
        self.b_out = nn.Parameter(torch.zeros(groups * experts + hidden))
        nn.init.normal_(self.w_in, std=len(scale) ** -0.5)
        self.scale: Tensor
        self.w_router: Tensor
        self.b_router: Tensor
        self.register_buffer("scale", scale)
        self.register_buffer("w_router", router.weight)
        self.register_buffer("b_router", router.bias)

    def forward(self, x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, F] and base [R, D] in BF16 -> scores f32 [R, G, E], forecast hidden state f32 [R, D]."""
        low = torch.bfloat16
        u = F.silu(F.linear(x, (self.w_in * self.scale).to(low), self.b_in.to(low)).float()).to(low)
        both = F.linear(u, self.w_out.to(low), self.b_out.to(low))
        forecast = base + both[:, self.groups * self.experts :]
        routed = F.linear(forecast, self.w_router.to(low), self.b_router.to(low)).float()
        direct = both[:, : self.groups * self.experts].float().unflatten(1, (self.groups, self.experts))
        return direct + routed[:, None], forecast.float()

    def folded(self) -> dict[str, Tensor]:
        """F32 tensors of a bank's head: the scale is part of w_in."""
        with torch.no_grad():
            return {
                "w_in": (self.w_in * self.scale).clone(), "b_in": self.b_in.clone(), "w_out": self.w_out.clone(),
                "b_out": self.b_out.clone(), "w_router": self.w_router.clone(), "b_router": self.b_router.clone(),
            }  # fmt: skip
