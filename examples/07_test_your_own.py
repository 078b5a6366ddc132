"""Test your own code on several ranks: `dbuf.testing.run`, from a script, a test or a notebook.

    python examples/07_test_your_own.py

`run` starts its ranks itself (gloo on the CPU), keeps them for the next call, and returns what each rank returned. A
rank that raises or hangs is an error here, with its traceback.
"""

import torch

import dbuf
import dbuf.testing

WORLD_SIZES = (3, 2, 1)  # the largest first: its ranks are started once
SHAPES = {"w": (5, 4), "b": (3,)}


def clip(grads: dict[str, dbuf.DBuffer], limit: float) -> dict[str, dbuf.DBuffer]:
    """The function under test: scale all gradients so that their common norm is at most `limit`."""
    factor = torch.clamp(limit / dbuf.global_norm(grads), max=1.0)
    return dbuf.tree.map(lambda g: g * factor, grads)


def clipped_whole() -> dict[str, torch.Tensor]:
    """Runs on every rank: clip sharded gradients, and give back whole tensors to compare."""
    mesh = dbuf.init_mesh(("dp",))
    full = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    grads = {"layer": dbuf.shard(full, mesh, dbuf.RowAtomic())}
    return dbuf.unpack(dbuf.allgather(clip(grads, limit=1.0)["layer"]))


def main() -> None:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    expected = {name: torch.full(shape, numel**-0.5) for name, shape in SHAPES.items()}
    for world_size in WORLD_SIZES:
        results = dbuf.testing.run(clipped_whole, world_size=world_size)
        assert len(results) == world_size
        dbuf.testing.assert_same_on_all_ranks(results)
        dbuf.testing.assert_close(results[0], expected)
        print(f"{world_size} ranks: the clipped gradients are right, and equal on all of them", flush=True)


if __name__ == "__main__":
    main()
