import torch
from torch import Tensor


def quantise(weight):
    n, k = weight.shape
    kp = -(-k // 128) * 128
    w = torch.zeros(n, kp)
    w[:, :k] = weight.float()
    w = w.view(n, kp // 128, 128)
    s = w.abs().amax(2) / 127
    inv = torch.where(s > 0, 1 / s, 0)
    return (w / torch.where(s > 0, s, 1)[..., None]).round().to(torch.int8).view(n, kp), s


def dequantise(codes, scale):
    return (codes.view(*scale.shape, 128).float() * scale[..., None]).view(codes.shape)
