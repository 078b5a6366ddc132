"""The same training by torch's own DDP and FSDP2: losses and parameters, in fp32 and with a bf16 wire."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dbuf
import models
import training
from dbuf import testing, tree
from dbuf.train import Strategy, init, make_train_step

STEPS, RATE = 10, 0.02


class Part(torch.nn.Module):
    """One group of weights and the pure function that reads them."""

    def __init__(self, tensors: dict[str, torch.Tensor], fn: Any) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({key: torch.nn.Parameter(t.clone()) for key, t in tensors.items()})
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.fn(self.weights, *args)  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    """The language model of `models.py` as a module."""

    def __init__(self) -> None:
        super().__init__()
        groups = models.weights(training.LAYERS)
        functions = {"embed": models.embed, "head": models.head}
        self.parts = torch.nn.ModuleDict({g: Part(ts, functions.get(g, models.block)) for g, ts in groups.items()})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.parts["embed"](tokens[:, :-1])
        for name, part in self.parts.items():
            h = part(h) if name.startswith("block") else h
        logits = self.parts["head"](h)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _peer(kind: str, dtype: torch.dtype | None) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    model: Any = Model()
    if kind == "ddp":
        model = run = DistributedDataParallel(model)
        model = model.module
    else:
        # Gathers carry every weight, a 0-d one too: FSDP2 wants a dimension to shard.
        for part in model.parts.values():
            for key, weight in list(part.weights.items()):
                if weight.ndim == 0:
                    part.weights[key] = torch.nn.Parameter(weight.detach().reshape(1))
        policy = (
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
        )
        for part in model.parts.values():
            fully_shard(part, mesh=mesh, mp_policy=policy)
        run = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = run(training.batch_of(mesh, i))
        loss.backward()
        optimizer.step()
        losses.append(dbuf.pmean(loss.detach().float(), mesh))
    order = models.weights(training.LAYERS)  # ParameterDict sorts its keys
    weights = {g: {key: model.parts[g].weights[key] for key in ts} for g, ts in order.items()}
    full = tree.map(lambda w: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().clone(), weights)
    return {"losses": losses, "params": full}


def _ours(name: str, dtype: torch.dtype | None) -> dict[str, Any]:
    optimizer = dbuf.optim.adamw(RATE, weight_decay=0.1)
    mesh, strategy, state = training.start((2,), name, optimizer, compute_dtype=dtype)
    step = make_train_step(models.language_loss(), optimizer, strategy, compute_dtype=dtype)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, training.batch_of(mesh, i))
        losses.append(metrics["loss"])
    return {"losses": losses, "params": models.whole(state.params)}


def _flat(params: Any) -> Any:
    return tree.map(lambda w: w.reshape(-1), params)


def _both(kind: str, name: str, dtype: torch.dtype | None) -> Any:
    return _peer(kind, dtype), _ours(name, dtype)


def test_ddp() -> None:
    for peer, ours in testing.run(_both, "ddp", "ddp", None, world_size=2):
        testing.assert_close(ours, peer)


def test_fsdp2() -> None:
    for peer, ours in testing.run(_both, "fsdp2", "zero3", None, world_size=2):
        testing.assert_close(ours["losses"], peer["losses"])
        testing.assert_close(_flat(ours["params"]), _flat(peer["params"]))


def test_fsdp2_with_a_bf16_wire() -> None:
    """The same casts in the same places: bf16 weights and activations, gradients reduced and kept in fp32."""
    for peer, ours in testing.run(_both, "fsdp2", "zero3", torch.bfloat16, world_size=2):
        for a, b in zip(ours["losses"], peer["losses"], strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=2e-2)
        exact = [torch.equal(a, b) for a, b in zip(ours["losses"][:1], peer["losses"][:1], strict=True)]
        assert exact == [True]
        for a, b in zip(tree.leaves(_flat(ours["params"])), tree.leaves(_flat(peer["params"])), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=STEPS * RATE * 0.1)


def _state_dtypes() -> Any:
    optimizer = dbuf.optim.adamw(RATE)
    mesh = dbuf.init_mesh(("dp",))
    strategy = Strategy.zero1()
    params = models.shard_groups(models.weights(1), mesh, strategy.optim, dp_size=strategy.dp_size(mesh))
    low = dbuf.cast(params, torch.bfloat16)
    state = init(low, optimizer, strategy, compute_dtype=torch.bfloat16)
    return state.params["head"].dtype, state.opt_state[0].mu["head"].dtype, state.weights["head"].dtype


def test_main_weights_and_state_are_fp32_and_resting_weights_are_not() -> None:
    for dtypes in testing.run(_state_dtypes, world_size=2):
        assert dtypes == (torch.float32, torch.float32, torch.bfloat16)
