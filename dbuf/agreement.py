"""Whether all ranks have the same buffers: asked before anything runs that would hang if they had not."""

from __future__ import annotations

from typing import Any

from dbuf import mesh as meshes
from dbuf import tree as trees
from dbuf.buffer import DBuffer, is_buffer
from dbuf.errors import TreeError, explain
from dbuf.mesh import DeviceMesh
from dbuf.placement import describe

__all__ = ["check"]


def check(bufs: Any, where: str = "dbuf.check") -> None:
    """Compare the specs of a tree of buffers across ranks; every rank gets the same verdict, and none hangs.

    Args:
        bufs: A pytree of DBuffers, such as parameters or a training state.
        where: The function named in the message.

    Raises:
        TreeError: Some rank has another tree, shape, key order, layout, placement or dtype; the message names the
            first difference and the rank. Raised on every rank of the mesh.

    Communication:
        One exchange of digests, 32 bytes a rank, over the widest mesh, and over those that it does not hold; where they
        differ, one of descriptions; the verdict is passed on over each of several meshes. Outside any trace.
    """
    named = trees.flatten_with_paths(bufs, is_leaf=is_buffer)[0]
    held = [(path, leaf) for path, leaf in named if isinstance(leaf, DBuffer)]
    found = {buf.mesh: _ranks_of(buf.mesh) for _, buf in held}
    # The widest first, whatever the order of the buffers: a rank with another order would wait elsewhere.
    asked: list[DeviceMesh] = []
    for mesh in sorted(found, key=lambda mesh: (-mesh.size(), mesh.mesh_dim_names or ())):
        if not any(set(found[other]).issuperset(found[mesh]) for other in asked):
            asked.append(mesh)
    refusal = ""
    for mesh in asked:
        inside = [(path, buf) for path, buf in held if set(found[mesh]).issuperset(found[buf.mesh])]
        # Who is to have the same lines, and what they are about.
        mine: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for path, buf in inside:
            mine.setdefault((found[buf.mesh], "buffers"), []).extend(_describe(path, buf))
        mine[found[mesh], "order"] = [_mesh_line(path, buf) for path, buf in inside]
        here = _difference(
            mine, found[mesh], mesh, where
        )  # asked of every mesh: a rank that has seen enough is awaited
        refusal = refusal or here
    # Ranks of one mesh have one verdict. Of several meshes, such as the axes of a grid, each passes it on.
    for mesh in asked if len(asked) > 1 else ():
        if not meshes.same_everywhere(refusal, mesh):
            refusal = next(filter(None, meshes.gather_objects(refusal, mesh)))
    if refusal:
        raise TreeError(refusal)


def _difference(
    mine: dict[tuple[tuple[int, ...], str], list[str]], on: tuple[int, ...], mesh: DeviceMesh, where: str
) -> str:
    """The message about the first line that ranks of a mesh do not share, or nothing."""
    # Descriptions grow with tensors, and all of them with ranks: they travel where the ranks' digests differ. Which
    # slice of the mesh a buffer is on differs by right.
    if meshes.same_everywhere(repr(list(mine.values())), mesh):
        return ""
    everyone = dict(zip(on, meshes.gather_objects(mine, mesh), strict=True))
    for ranks, topic in dict.fromkeys(key for theirs in everyone.values() for key in theirs):
        first, *others = [(rank, everyone[rank].get((ranks, topic), [])) for rank in ranks]
        for other in others:
            if other[1] != first[1]:
                return _message(first, other, where)
    return ""


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def _mesh_line(path: str, buf: DBuffer) -> str:
    return f"{_name(path)}: mesh {buf.mesh.mesh_dim_names} {buf.spec.mesh_shape()}"


def _name(path: str) -> str:
    return f"buffer {path}" if path else "the buffer"


def _describe(path: str, buf: DBuffer) -> list[str]:
    spec = buf.spec
    name = _name(path)
    tensors = [f"{name}{p}: {tuple(s)}" for p, s in zip(spec.tree.paths, spec.layout.tensor_shapes, strict=True)]
    layout = f"offsets {spec.layout.tensor_to_offset}, size {spec.layout.size}, cuts {spec.layout.rank_to_offset}"
    return [
        *tensors,
        f"{name}: placements {describe(spec.placements)}, {buf.dtype}, mesh {spec.mesh_shape()}",
        f"{name}: layout {layout}, align {spec.layout.align}, row_dims {spec.layout.row_dims}",
    ]


def _message(first: tuple[int, list[str]], other: tuple[int, list[str]], where: str) -> str:
    (rank, lines), (other_rank, theirs) = first, other
    pairs = zip([*lines, *[""] * len(theirs)], [*theirs, *[""] * len(lines)], strict=False)
    a, b = next((a, b) for a, b in pairs if a != b)
    return explain(
        where,
        "ranks disagree about the buffers.",
        got=f"rank {rank}: {a or '(nothing more)'}\nrank {other_rank}: {b or '(nothing more)'}",
        need="the same tree, shapes, dtype, placements and layout on every rank of the mesh",
        fix="build the buffers from the same model code and the same arguments on every rank",
    )
