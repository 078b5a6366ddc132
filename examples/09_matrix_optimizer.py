"""A matrix optimizer of your own in a few lines: tensor code for one matrix, and dbuf finds it an owner.

python examples/09_matrix_optimizer.py
torchrun --standalone --nproc-per-node=2 examples/09_matrix_optimizer.py
"""

from typing import Any

import torch
import torch.nn.functional as F

import dbuf
import dbuf.testing
from dbuf import optim

BATCH, WIDTH, CLASSES, STEPS, RATE = 24, 8, 5, 30, 0.05
DECAY, EPS = 0.9, 1e-8


# The optimizer: what it remembers of one matrix, and one step. It never learns of ranks, buffers or collectives.


def init_matrix(w: torch.Tensor) -> Any:
    return {"rows": w.new_zeros(w.shape[0]), "columns": w.new_zeros(w.shape[1])}


def update_matrix(grad: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Gradients over the root of their mean square, which rows and columns explain (Adafactor, arXiv:1804.04235)."""
    squares = grad.square() + EPS
    rows = DECAY * state["rows"] + (1 - DECAY) * squares.mean(1)
    columns = DECAY * state["columns"] + (1 - DECAY) * squares.mean(0)
    explained = rows[:, None] * columns[None, :] / rows.mean()
    return grad / explained.sqrt(), {"rows": rows, "columns": columns}


def factored(rate: optim.LearningRate) -> optim.GradientTransformation:
    return optim.chain(optim.by_owner(init_matrix, update_matrix), optim.scale_by_learning_rate(rate))


# A step: matrices to the new optimizer, biases to AdamW, in one program.


def make_optimizer() -> optim.GradientTransformation:
    rate = optim.warmup_cosine(RATE, warmup_steps=3, total_steps=STEPS)
    return optim.partition(
        {"factored": factored(rate), "adamw": optim.adamw(rate)},
        lambda path, shape: "factored" if optim.is_matrix(path, shape) else "adamw",
    )


def layer(p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(h, p["w"], p["b"]))


def loss_fn(params: dict[str, dbuf.DBuffer], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = dbuf.gathered(layer)(params["first"], x)
    return F.cross_entropy(dbuf.gathered(layer)(params["second"], h), y)


def train(mesh: dbuf.DeviceMesh, placements: dbuf.RowAtomic | dbuf.Replicate) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    weights = {
        "first": {"w": torch.randn(WIDTH, WIDTH), "b": torch.zeros(WIDTH)},
        "second": {"w": torch.randn(CLASSES, WIDTH), "b": torch.zeros(CLASSES)},
    }
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    mine = x.chunk(mesh.size())[mesh.get_rank()], y.chunk(mesh.size())[mesh.get_rank()]
    params = {name: dbuf.shard(group, mesh, placements) for name, group in weights.items()}
    optimizer = make_optimizer()
    state = optimizer.init(params)

    @dbuf.jit
    def step(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(loss_fn)(params, x, y)
        grads = dbuf.redistribute(grads, (placements,))
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, dbuf.pmean(loss, mesh)

    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, *mine)
        losses.append(loss.item())
    if mesh.get_rank() == 0:
        collectives = dbuf.inspect(step, params, state, *mine).collectives
        print(f"{placements!r:12} loss {losses[0]:.4f} -> {losses[-1]:.4f}   {collectives}", flush=True)
    return losses, dbuf.tree.map(torch.clone, {k: dbuf.unpack(dbuf.allgather(buf)) for k, buf in params.items()})


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    sharded, replicated = train(mesh, dbuf.RowAtomic()), train(mesh, dbuf.Replicate())
    dbuf.testing.assert_close(sharded, replicated)
    assert sharded[0][-1] < sharded[0][0]


if __name__ == "__main__":
    main()
