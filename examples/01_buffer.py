"""A buffer: many tensors as one flat tensor, of which each rank holds a part.

python examples/01_buffer.py
torchrun --standalone --nproc-per-node=2 examples/01_buffer.py
"""

import torch

import dbuf
import dbuf.testing

SHAPES = {"w": (6, 4), "b": (3,), "v": (2, 6)}


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()

    # Every rank has the full tensors here, and keeps its own part of them.
    torch.manual_seed(0)
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    buf = dbuf.shard(full, mesh, dbuf.RowAtomic())

    # A buffer is two things: one flat tensor, and a static description that is equal on all ranks.
    assert buf.local.ndim == 1
    assert buf.local.numel() == buf.layout.size // ranks
    assert dbuf.shapes(buf) == {name: torch.Size(shape) for name, shape in SHAPES.items()}

    # `unpack` gives the tree back as this rank holds it: whole rows, as views of the flat tensor.
    mine = dbuf.unpack(buf)
    rows = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    print(f"rank {rank} of {ranks}: {buf.local.numel()} of {buf.layout.size} elements, {rows}", flush=True)
    assert mine["w"].shape[1:] == full["w"].shape[1:]

    # `pack` is its inverse.
    dbuf.testing.assert_bitwise(dbuf.pack(mine, like=buf), buf)

    # A buffer is a pytree whose one leaf is `local`: element-wise code runs on the flat tensor.
    doubled = dbuf.tree.map(lambda x: 2 * x, buf)
    assert torch.equal(doubled.local, 2 * buf.local)

    # After a gather every rank holds the whole buffer, and `unpack` gives the full tensors.
    whole = dbuf.unpack(dbuf.allgather(doubled))
    for name in SHAPES:
        assert torch.equal(whole[name], 2 * full[name])
    print(f"rank {rank}: the gathered tensors are the full ones", flush=True)


if __name__ == "__main__":
    main()
