"""What dbuf is compared with: two floors, DDP, FSDP1 and FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _model import GPT, Group, Size, Tensors, loss_fn, weights
from torch.distributed.device_mesh import DeviceMesh

Step = Callable[[torch.Tensor], torch.Tensor]
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a line is built from."""

    size: Size
    mesh: DeviceMesh
    device: str
    dtype: torch.dtype  # of compute, and on the wire

    @property
    def rank(self) -> int:
        return self.mesh.get_rank()

    @property
    def ranks(self) -> int:
        return self.mesh.size()


# Floors.


def compute_only(setup: Setup, share: bool) -> Step:
    """The model's compute and AdamW in one compiled program, no communication; AdamW on a rank's share or on all."""
    groups = weights(setup.size, setup.device)
    cut = setup.ranks if share else 1
    leaves = [(g, name) for g in groups for name in groups[g]]
    parts = [groups[g][name].view(-1)[: groups[g][name].numel() // cut] for g, name in leaves]
    mu, nu = [torch.zeros_like(p) for p in parts], [torch.zeros_like(p) for p in parts]
    count = torch.zeros((), device=setup.device)

    def loss(groups: dict[str, Tensors], batch: torch.Tensor) -> torch.Tensor:
        low = {g: {n: t.to(setup.dtype) for n, t in tensors.items()} for g, tensors in groups.items()}
        return loss_fn(low, batch, setup.size.heads)

    @torch.compile(fullgraph=True)
    def step(groups: Any, mu: Any, nu: Any, count: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        grads, value = torch.func.grad_and_value(loss)(groups, batch)
        count += 1
        for (g, name), m, v in zip(leaves, mu, nu, strict=True):
            adamw_(groups[g][name].view(-1)[: m.numel()], grads[g][name].view(-1)[: m.numel()], m, v, count)
        return value

    return lambda batch: step(groups, mu, nu, count, batch)


def adamw_(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> None:
    """One tensor's update in place: the same formula as `torch.optim.AdamW`."""
    b1, b2 = ADAMW["betas"]
    m.lerp_(g.to(m.dtype), 1 - b1)
    v.mul_(b2).add_((1 - b2) * g.to(v.dtype).square())
    size = ADAMW["lr"] / (1 - b1**count)
    p.mul_(1 - ADAMW["lr"] * ADAMW["weight_decay"])
    p.sub_(size * m / ((v / (1 - b2**count)).sqrt() + ADAMW["eps"]))


def raw_collectives(setup: Setup) -> Step:
    """What a ZeRO-3 step sends, and nothing else: two gathers and a reduce-scatter a group, all started in turn."""
    sizes = [sum(t.numel() for t in group.values()) for group in weights(setup.size, setup.device).values()]
    shares = [torch.zeros(size // setup.ranks, dtype=setup.dtype, device=setup.device) for size in sizes]
    wholes = [torch.zeros(share.numel() * setup.ranks, dtype=setup.dtype, device=setup.device) for share in shares]
    loss = torch.zeros((), device=setup.device)

    def step(batch: torch.Tensor) -> torch.Tensor:
        for whole, share in zip(wholes, shares, strict=True):
            dist.all_gather_into_tensor(whole, share)
        for whole, share in reversed(list(zip(wholes, shares, strict=True))):
            dist.all_gather_into_tensor(whole, share)
            dist.reduce_scatter_tensor(share, whole)
        return loss

    return step


# What torch has.


def ddp(setup: Setup, compiled: bool, optimizer: str) -> Step:
    model = GPT(weights(setup.size, setup.device), setup.size.heads)
    device_ids = [torch.device(setup.device).index or 0] if setup.device.startswith("cuda") else None
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)
    return _train(setup, wrapped, torch.compile(wrapped) if compiled else wrapped, optimizer)


def fsdp1(setup: Setup, compiled: bool, optimizer: str, reshard: bool) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model: Any = FullyShardedDataParallel(
        GPT(weights(setup.size, setup.device), setup.size.heads),
        sharding_strategy=ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Group}),
        mixed_precision=MixedPrecision(param_dtype=setup.dtype, reduce_dtype=torch.float32),
        device_id=torch.device(setup.device),
        use_orig_params=True,
    )
    return _train(setup, model, torch.compile(model) if compiled else model, optimizer)


def fsdp2(setup: Setup, compiled: str, optimizer: str, reshard: bool, prefetch: bool = False) -> Step:
    """`fully_shard` on every group; `compiled` is `"no"`, `"blocks"` (each group by itself) or `"model"`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=torch.float32)
    model: Any = GPT(weights(setup.size, setup.device), setup.size.heads)
    groups: list[Any] = list(model.groups())
    for group in groups:
        if compiled == "blocks":
            group.compile()
        fully_shard(group, mesh=setup.mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=setup.mesh, reshard_after_forward=reshard, mp_policy=policy)
    if prefetch:
        for one, other in itertools.pairwise(groups):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    return _train(setup, model, torch.compile(model) if compiled == "model" else model, optimizer)


def _train(setup: Setup, model: torch.nn.Module, forward: Callable[..., torch.Tensor], optimizer: str) -> Step:
    adamw = torch.optim.AdamW(model.parameters(), **ADAMW, fused=optimizer == "fused", foreach=optimizer == "foreach")

    # FSDP casts by itself; DDP has torch.autocast.
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    low = (
        torch.autocast(torch.device(setup.device).type, setup.dtype)
        if is_ddp and setup.dtype != torch.float32
        else None
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        with low or contextlib.nullcontext():
            loss = forward(batch)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def _lines() -> dict[str, Callable[[Setup], Step]]:
    lines: dict[str, Callable[[Setup], Step]] = {
        "floor": functools.partial(compute_only, share=True),
        "floor, whole optimizer": functools.partial(compute_only, share=False),
        "raw collectives": raw_collectives,
    }
    for optimizer in ("fused", "foreach"):
        for compiled in (False, True):
            lines[f"DDP{' compiled' * compiled} {optimizer}"] = functools.partial(
                ddp, compiled=compiled, optimizer=optimizer
            )
    for compiled in (False, True):
        for reshard in (True, False):
            name = f"FSDP1{' compiled' * compiled} fused{'' if reshard else ', kept'}"
            lines[name] = functools.partial(fsdp1, compiled=compiled, optimizer="fused", reshard=reshard)
    for how, word in (("no", ""), ("blocks", " blocks"), ("model", " compiled")):
        for optimizer in ("fused", "foreach"):
            for reshard in (True, False):
                name = f"FSDP2{word} {optimizer}{'' if reshard else ', kept'}"
                lines[name] = functools.partial(fsdp2, compiled=how, optimizer=optimizer, reshard=reshard)
    lines["FSDP2 fused, prefetch"] = functools.partial(
        fsdp2, compiled="no", optimizer="fused", reshard=True, prefetch=True
    )
    return lines


LINES = _lines()
