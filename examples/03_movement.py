"""Movement: one transition table, and a function for each row of it.

    python examples/03_movement.py
    torchrun --standalone --nproc-per-node=2 examples/03_movement.py

Alone, every axis has one rank and nothing is sent; the same lines then only change labels.
"""

import torch

import dbuf
import dbuf.testing
from dbuf import Partial, Replicate, RowAtomic, ShardLayout

ROWS = 12


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()
    rows = torch.arange(float(ROWS)).reshape(ROWS, 1)

    # shard -> Replicate: one all-gather.
    sharded = dbuf.shard({"w": rows}, mesh, RowAtomic())
    whole = dbuf.allgather(sharded)
    assert torch.equal(dbuf.unpack(whole)["w"], rows)

    # Replicate -> shard: no communication; the result is a slice that aliases its source.
    again = dbuf.view(whole, RowAtomic())
    assert torch.equal(again.local, sharded.local)
    assert again.local.untyped_storage().data_ptr() == whole.local.untyped_storage().data_ptr()

    # A Partial buffer holds contributions: here rank r contributes (r + 1) * rows.
    contribution = dbuf.shard({"w": (rank + 1) * rows}, mesh, Partial("sum"))
    total = ranks * (ranks + 1) // 2  # 1 + 2 + ... + ranks

    # Partial -> Replicate: one all-reduce. Partial -> shard: one reduce-scatter, half the bytes.
    assert torch.equal(dbuf.unpack(dbuf.allreduce(contribution))["w"], total * rows)
    reduced = dbuf.reduce_scatter(contribution, RowAtomic())
    assert torch.equal(reduced.local, total * sharded.local)

    # Contributions are no values yet, and nothing reads them as such.
    try:
        dbuf.unpack(contribution)
    except dbuf.PlacementError as error:
        if rank == 0:
            print(error, flush=True)
    else:
        raise AssertionError("a partial buffer was unpacked")

    # `redistribute` walks the table: any placements to any others, and to another layout in one all-to-all.
    assert torch.equal(dbuf.redistribute(contribution, RowAtomic()).local, reduced.local)
    other = dbuf.redistribute(sharded, RowAtomic(), layout=ShardLayout.UNPADDED)
    back = dbuf.redistribute(other, RowAtomic(), layout=sharded.layout)
    dbuf.testing.assert_bitwise(back, sharded)

    # Every movement takes a tree of buffers, and one placement spec for all or a prefix tree of specs.
    tree = {"a": whole, "b": [sharded, sharded]}
    out = dbuf.redistribute(tree, {"a": RowAtomic(), "b": Replicate()})
    assert [buf.placements for buf in (out["a"], *out["b"])] == [(RowAtomic(),), (Replicate(),), (Replicate(),)]
    print(f"rank {rank} of {ranks}: every move gave the expected numbers", flush=True)


if __name__ == "__main__":
    main()
