"""A ZeRO-3 step as one compiled program, and a report of what it does.

python examples/05_zero3_step.py
torchrun --standalone --nproc-per-node=2 examples/05_zero3_step.py
"""

import torch
import torch.nn.functional as F

import dbuf

BLOCKS, BATCH, WIDTH, CLASSES, STEPS = 3, 32, 16, 10, 20


def block(p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return h + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])


def head(p: dict[str, torch.Tensor], h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, p["out"]), y)


def loss_fn(params: dict[str, dbuf.DBuffer], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x
    for i in range(BLOCKS):
        h = dbuf.gathered(block)(params[f"block{i}"], h)  # gathered here, and again in the backward
    return dbuf.gathered(head)(params["head"], h, y)


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)
    weights = {
        f"block{i}": {"up": torch.randn(4 * WIDTH, WIDTH) / 4, "down": torch.randn(WIDTH, 4 * WIDTH) / 8}
        for i in range(BLOCKS)
    }
    weights["head"] = {"out": torch.randn(CLASSES, WIDTH) / 4}
    params = {name: dbuf.shard(group, mesh, dbuf.RowAtomic()) for name, group in weights.items()}
    optimizer = dbuf.optim.adamw(3e-3)
    state = optimizer.init(params)
    torch.manual_seed(1 + rank)  # a batch of its own for each rank
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))

    def step(params, state, x, y):
        loss, grads = dbuf.value_and_grad(loss_fn)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state, dbuf.pmean(loss, mesh)

    # Donated: the new params and state are written into the memory of the old ones, which may not be used again.
    step = dbuf.jit(step, donate_argnums=(0, 1))
    address = params["block0"].local.data_ptr()
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(loss.item())
    assert params["block0"].local.data_ptr() == address

    # What the step does, read from its graph; nothing is run.
    report = dbuf.inspect(step, params, state, x, y)
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps on {ranks} ranks\n{report}", flush=True)
    groups = BLOCKS + 1
    expected = {"all_gather": 2 * groups, "reduce_scatter": groups} if ranks > 1 else {}  # alone, nothing is sent
    assert report.collectives == expected
    assert (report.compiles, report.graph_breaks) == (1, 0)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
