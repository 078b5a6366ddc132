"""Gradients: each placement has a dual, and sharded gradients equal those of a single process.

python examples/04_gradients.py
torchrun --standalone --nproc-per-node=2 examples/04_gradients.py
"""

import torch
import torch.nn.functional as F

import dbuf
import dbuf.testing
from dbuf import Partial, Replicate, RowAtomic

BATCH, WIDTH, CLASSES = 12, 8, 5  # BATCH divides by 1, 2, 3, 4 and 6 ranks


def loss_of(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(torch.tanh(F.linear(x, p["w"])), p["out"], p["bias"]), y)


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)  # the same weights and the same whole batch on every rank
    full = {"w": torch.randn(WIDTH, WIDTH), "out": torch.randn(CLASSES, WIDTH), "bias": torch.zeros(CLASSES)}
    x, y = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))

    # A single process, the whole batch.
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in full.items()}
    expected = dict(zip(leaves, torch.autograd.grad(loss_of(leaves, x, y), list(leaves.values())), strict=True))

    # Each rank: its share of the weights, its share of the batch.
    loss_fn = dbuf.gathered(loss_of)
    share = (x.chunk(ranks)[rank], y.chunk(ranks)[rank])

    # The gradient of a sharded buffer is sharded alike: reduced, averaged over the ranks, ready for the optimizer.
    sharded = dbuf.shard(full, mesh, RowAtomic())
    loss, grads = dbuf.value_and_grad(loss_fn)(sharded, *share)
    assert grads.spec == sharded.spec
    dbuf.testing.assert_close(dbuf.unpack(dbuf.allgather(grads)), expected)

    # The gradient of a replicated buffer is Partial: this rank's contribution, for the caller to reduce.
    replicated = dbuf.shard(full, mesh, Replicate())
    grads = dbuf.grad(loss_fn)(replicated, *share)
    assert grads.placements == (Partial("sum"),)
    dbuf.testing.assert_close(dbuf.unpack(dbuf.allreduce(grads)), expected)

    # The loss is this rank's own. Averaged over the ranks it is that of the whole batch.
    dbuf.testing.assert_close(dbuf.pmean(loss, mesh), loss_of(full, x, y))

    # reduction="sum" does not average: for losses that are sums already.
    summed = dbuf.grad(loss_fn, reduction="sum")(sharded, *share)
    dbuf.testing.assert_close(summed.local / ranks, dbuf.grad(loss_fn)(sharded, *share).local)
    print(f"rank {rank} of {ranks}: own loss {loss:.4f}, gradients as in a single process", flush=True)


if __name__ == "__main__":
    main()
