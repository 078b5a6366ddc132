"""One training step, six strategies: DDP, ZeRO-1, -2, -3, HSDP and HFSDP are three placement tuples each.

python examples/06_same_step_any_strategy.py
torchrun --standalone --nproc-per-node=2 examples/06_same_step_any_strategy.py
"""

import torch
import torch.nn.functional as F

import dbuf
import dbuf.testing
from dbuf.placement import describe
from dbuf.train import Strategy, init, make_train_step

BATCH, WIDTH, CLASSES, STEPS, LEARNING_RATE = 24, 8, 5, 10, 1e-2

STRATEGIES = {
    "DDP": Strategy.ddp(),
    "ZeRO-1": Strategy.zero1(),
    "ZeRO-2": Strategy.zero2(),
    "ZeRO-3": Strategy.zero3(),
    "HSDP": Strategy.hsdp(),
    "HFSDP": Strategy.hfsdp(),
}


def layer(p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(h, p["w"], p["b"]))


def loss_fn(params: dict[str, dbuf.DBuffer], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    h = dbuf.gathered(layer)(params["first"], x)  # on replicated buffers `gathered` is just the call
    return F.cross_entropy(dbuf.gathered(layer)(params["second"], h), y)


def train(strategy: Strategy, ranks: int, rank: int) -> tuple[list[float], dict]:
    # Two axes, one of size 1, for strategies that treat them differently; on a cluster, nodes and GPUs of a node.
    mesh = dbuf.init_mesh(("outer", "inner")[-strategy.ndim :], (1, ranks)[-strategy.ndim :])
    torch.manual_seed(0)
    weights = {
        "first": {"w": torch.randn(WIDTH, WIDTH), "b": torch.zeros(WIDTH)},
        "second": {"w": torch.randn(CLASSES, WIDTH), "b": torch.zeros(CLASSES)},
    }
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    mine = x.chunk(ranks)[rank], y.chunk(ranks)[rank]

    params = {
        name: dbuf.shard(group, mesh, strategy.optim, dp_size=strategy.dp_size(mesh)) for name, group in weights.items()
    }
    optimizer = dbuf.optim.adamw(LEARNING_RATE)
    state = init(params, optimizer, strategy)
    step = make_train_step(loss_fn, optimizer, strategy, microbatches=2, clip_norm=1.0)  # dbuf.jit compiles it
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, mine)
        losses.append(metrics["loss"].item())
    whole = {name: dbuf.unpack(dbuf.allgather(buf)) for name, buf in state.params.items()}
    return losses, dbuf.tree.map(torch.clone, whole)


def main() -> None:
    world = dbuf.init_mesh()
    results = {name: train(strategy, world.size(), world.get_rank()) for name, strategy in STRATEGIES.items()}
    losses, params = results["DDP"]
    for name, strategy in STRATEGIES.items():
        other_losses, other_params = results[name]
        dbuf.testing.assert_close(other_losses, losses)
        dbuf.testing.assert_close(other_params, params)
        if world.get_rank() == 0:
            where = " / ".join(describe(at) for at in (strategy.params, strategy.grads, strategy.optim))
            print(f"{name:7} loss {other_losses[0]:.6f} -> {other_losses[-1]:.6f}   {where}", flush=True)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
