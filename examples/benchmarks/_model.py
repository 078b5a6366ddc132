"""The model that every line of `step.py` trains: a byte GPT of pure functions, and the same functions as modules.

Shapes: b batch, t context, w width, h heads, d = w / h, v = 256 byte values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model, and of one rank's batch."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    batch: int = 4
    context: int = 128


def embed(p: Tensors, x_bt: torch.Tensor) -> torch.Tensor:
    return F.embedding(x_bt, p["bytes"]) + p["positions"]


def block(p: Tensors, h_btw: torch.Tensor, heads: int) -> torch.Tensor:
    qkv = F.linear(normed(h_btw, p["attention_norm"]), p["qkv"]).chunk(3, dim=-1)
    q_bhtd, k_bhtd, v_bhtd = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in qkv)
    a_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
    h_btw = h_btw + F.linear(a_bhtd.transpose(1, 2).flatten(2), p["attention_out"])
    return h_btw + F.linear(F.gelu(F.linear(normed(h_btw, p["mlp_norm"]), p["mlp_up"])), p["mlp_down"])


def head(p: Tensors, h_btw: torch.Tensor) -> torch.Tensor:
    return F.linear(normed(h_btw, p["norm"]), p["logits"]).float()


def normed(h_btw: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h_btw, scale_w.shape, scale_w)


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def loss_fn(groups: Any, window_bt: torch.Tensor, heads: int, use: Callable[..., Any] = as_it_is) -> torch.Tensor:
    """Mean cross entropy of the next byte; `use` makes functions of tensors into functions of what `groups` holds."""
    h_btw = use(embed)(groups["embed"], window_bt[:, :-1])
    for name in groups:
        if name.startswith("block"):
            h_btw = use(block)(groups[name], h_btw, heads)
    logits_btv = use(head)(groups["head"], h_btw)
    return F.cross_entropy(logits_btv.flatten(0, 1), window_bt[:, 1:].flatten())


def weights(size: Size, device: str) -> dict[str, Tensors]:
    """The first weights of each group, the same on every rank and for every line."""
    generator = torch.Generator().manual_seed(0)

    def matrix(out: int, fan_in: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(out, fan_in, generator=generator) * (scale / math.sqrt(fan_in))).to(device)

    w, small = size.width, 1 / math.sqrt(2 * size.layers)
    ones = torch.ones(w, device=device)
    blocks = {
        f"block{i}": {
            "attention_norm": ones.clone(),
            "qkv": matrix(3 * w, w),
            "attention_out": matrix(w, w, small),
            "mlp_norm": ones.clone(),
            "mlp_up": matrix(4 * w, w),
            "mlp_down": matrix(w, 4 * w, small),
        }
        for i in range(size.layers)
    }
    first = {"bytes": matrix(256, w, 0.3), "positions": matrix(size.context, w, 0.3)}
    return {"embed": first, **blocks, "head": {"norm": ones.clone(), "logits": matrix(256, w, 0.3)}}


def batches(size: Size, rank: int, device: str, number: int = 8) -> list[torch.Tensor]:
    """Windows of this folder's sources, (b, t + 1), other ones for each rank."""
    text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1 + rank)
    starts = torch.randint(len(data) - size.context, (number, size.batch), generator=generator)
    offsets = torch.arange(size.context + 1)
    return [data[at[:, None] + offsets].long().to(device) for at in starts]


class Group(torch.nn.Module):
    """One group's weights and its function, for what works on modules."""

    def __init__(self, fn: Callable[..., torch.Tensor], tensors: Tensors) -> None:
        super().__init__()
        self.fn = fn
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.clone()))

    def forward(self, *args: Any) -> torch.Tensor:
        return self.fn(dict(self.named_parameters(recurse=False)), *args)


class GPT(torch.nn.Module):
    """The groups in a row; called with a batch it returns the loss."""

    def __init__(self, groups: dict[str, Tensors], heads: int) -> None:
        super().__init__()
        self.heads = heads
        functions = {"embed": embed, "head": head}
        for name, tensors in groups.items():
            self.add_module(name, Group(functions.get(name, block), tensors))

    def groups(self) -> Iterator[Group]:
        yield from (module for module in self.children() if isinstance(module, Group))

    def forward(self, window_bt: torch.Tensor) -> torch.Tensor:
        h_btw = self.embed(window_bt[:, :-1])
        for name, module in self.named_children():
            if name.startswith("block"):
                h_btw = module(h_btw, self.heads)
        return F.cross_entropy(self.head(h_btw).flatten(0, 1), window_bt[:, 1:].flatten())
