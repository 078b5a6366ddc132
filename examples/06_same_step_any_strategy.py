"""One training step, four strategies: DDP, ZeRO-1, ZeRO-2 and ZeRO-3 are three placements each, with equal numbers.

python examples/06_same_step_any_strategy.py
torchrun --standalone --nproc-per-node=2 examples/06_same_step_any_strategy.py
"""

import torch
import torch.nn.functional as F

import dbuf
import dbuf.testing
from dbuf import Partial, Replicate, RowAtomic

BATCH, WIDTH, CLASSES, STEPS, LEARNING_RATE = 24, 8, 5, 10, 1e-2

R, P, S = Replicate(), Partial("sum"), RowAtomic()
STRATEGIES = {  # where parameters rest, where gradients accumulate, where the optimizer works
    "DDP": (R, P, R),
    "ZeRO-1": (R, P, S),
    "ZeRO-2": (R, S, S),
    "ZeRO-3": (S, S, S),
}


def layer(p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(h, p["w"], p["b"]))


def loss_fn(params: dict[str, dbuf.DBuffer], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = dbuf.gathered(layer)(params["first"], x)  # on replicated buffers `gathered` is just the call
    return F.cross_entropy(dbuf.gathered(layer)(params["second"], h), y)


def train(strategy: str, mesh: dbuf.mesh.DeviceMesh) -> tuple[list[float], dict]:
    params_at, grads_at, optim_at = STRATEGIES[strategy]
    torch.manual_seed(0)
    weights = {
        "first": {"w": torch.randn(WIDTH, WIDTH), "b": torch.zeros(WIDTH)},
        "second": {"w": torch.randn(CLASSES, WIDTH), "b": torch.zeros(CLASSES)},
    }
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    mine = x.chunk(mesh.size())[mesh.get_rank()], y.chunk(mesh.size())[mesh.get_rank()]

    params = {name: dbuf.shard(group, mesh, params_at) for name, group in weights.items()}
    optimizer = dbuf.optim.adamw(LEARNING_RATE)
    state = optimizer.init(dbuf.redistribute(params, optim_at))
    losses = []
    for _ in range(STEPS):
        loss, grads = dbuf.value_and_grad(loss_fn)(params, *mine)
        grads = dbuf.redistribute(grads, grads_at)  # with several microbatches: after each of them
        main = dbuf.redistribute(params, optim_at)
        updates, state = optimizer.update(dbuf.redistribute(grads, optim_at), state, main)
        params = dbuf.redistribute(dbuf.optim.apply_updates(main, updates), params_at)
        losses.append(dbuf.pmean(loss, mesh).item())
    return losses, dbuf.tree.map(torch.clone, dbuf.allgather(params))


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    results = {strategy: train(strategy, mesh) for strategy in STRATEGIES}
    losses, params = results["DDP"]
    for strategy, (other_losses, other_params) in results.items():
        dbuf.testing.assert_close(other_losses, losses)
        dbuf.testing.assert_close(other_params, params)
        if mesh.get_rank() == 0:
            print(
                f"{strategy:7} on {mesh.size()} ranks: loss {other_losses[0]:.6f} -> {other_losses[-1]:.6f}", flush=True
            )
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
