"""The one door to process groups: making a mesh, and naming the group of one axis or of several.

A mesh is torch's own `DeviceMesh`. Groups over several axes, which moves between layouts need, are made here with
the mesh: making one inside a traced step is impossible, and making it late would be a collective that only some
ranks might reach.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuf.compat import flatten_mesh, register_constant
from dbuf.errors import PlacementError, explain

__all__ = [
    "DeviceMesh",
    "MeshSum",
    "axis_group",
    "gather_objects",
    "init_mesh",
    "prepare",
    "runs_together",
    "same_everywhere",
    "shape_of",
    "suffix_group",
    "sum_over",
    "world",
]


def init_mesh(
    axis_names: Sequence[str] = ("dp",),
    shape: int | Sequence[int] | None = None,
    *,
    device_type: str | None = None,
) -> DeviceMesh:
    """Make a mesh over all processes: torchrun's, or this one alone.

    Starts `torch.distributed` when nobody has: from torchrun's environment if there is one (NCCL on GPU, gloo on
    CPU), otherwise as a world of one process. A group that is running already is used as it is.

    Args:
        axis_names: Names of the mesh axes, outermost first.
        shape: Ranks along each axis; at most one entry may be -1 and takes what is left. By default the first
            axis takes all.
        device_type: `"cuda"` or `"cpu"`; by default cuda where there is one.

    Returns:
        The mesh, with the groups of every suffix of its axes.

    Raises:
        PlacementError: The shape does not multiply up to the number of processes.

    Communication:
        Collective: every process calls it alike. Starting a world and its groups is a rendezvous.

    Example:
        >>> init_mesh(("dp",)).mesh_dim_names
        ('dp',)
    """
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    _start_world(device)
    sizes = _fill_shape(tuple(axis_names), shape, dist.get_world_size())
    return prepare(init_device_mesh(device, sizes, mesh_dim_names=tuple(axis_names)))


def _start_world(device: str) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _fill_shape(names: tuple[str, ...], shape: int | Sequence[int] | None, world: int) -> tuple[int, ...]:
    if isinstance(shape, int):
        shape = (shape,)
    sizes = list(shape) if shape is not None else [-1] + [1] * (len(names) - 1)
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    if sizes.count(-1) == 1 and known > 0 and world % known == 0:
        sizes[sizes.index(-1)] = world // known
        known = world
    if len(sizes) != len(names) or known != world or min(sizes, default=1) < 1:
        raise PlacementError(
            explain(
                "dbuf.init_mesh",
                "the mesh does not cover the processes.",
                got=f"axes {names} with shape {tuple(shape) if shape is not None else None}, {world} processes",
                need="one size an axis, with product equal to the number of processes",
                fix=f"dbuf.init_mesh({names!r}, {(world,) + (1,) * (len(names) - 1)!r})",
            )
        )
    return tuple(sizes)


def prepare(mesh: DeviceMesh) -> DeviceMesh:
    """Make the groups over every suffix of two or more axes, and return the mesh.

    `init_mesh` has done it; a `DeviceMesh` made by torch needs it before a layout changes on several sharded axes.
    """
    names = _names(mesh)
    for count in range(2, len(names) + 1):
        suffix = names[-count:]
        flatten_mesh(mesh, suffix, "_".join(suffix))
    return mesh


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise PlacementError(
            explain(
                "dbuf",
                "the mesh has no axis names.",
                got=repr(mesh),
                need="a DeviceMesh with mesh_dim_names",
                fix='dbuf.init_mesh(("dp",))',
            )
        )
    return tuple(mesh.mesh_dim_names)


def shape_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Ranks along each axis, outermost first."""
    return tuple(mesh.shape)


def runs_together(mesh: DeviceMesh) -> bool:
    """Whether two collectives may be under way at once: gloo then crashes now and then, or loses a message."""
    return dist.get_backend(mesh.get_group(0)) != "gloo"


def world() -> Any:
    """The default process group, another object in each world that a process starts; None outside of one."""
    return dist.group.WORLD


def axis_group(mesh: DeviceMesh, axis: int) -> str:
    """The name of this rank's group along one axis, as the functional collectives take it."""
    return _group_name(mesh.get_group(axis))


def suffix_group(mesh: DeviceMesh, count: int) -> str:
    """The name of this rank's group over the last `count` axes; its ranks are in row-major order of those axes."""
    if count == 1:
        return axis_group(mesh, mesh.ndim - 1)
    return _group_name(mesh.get_group("_".join(_names(mesh)[-count:])))


def _group_name(group: Any) -> str:
    return str(group.group_name)


def gather_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """`value` of every rank of the mesh, in row-major order; outside any trace."""
    if mesh.size() == 1:
        return [value]
    out: list[Any] = [None] * mesh.size()
    dist.all_gather_object(out, value, group=_whole_group(mesh))
    return out


def same_everywhere(text: str, mesh: DeviceMesh) -> bool:
    """Whether a text is the same on every rank of the mesh; 32 bytes of each, outside any trace."""
    if mesh.size() == 1:
        return True
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.int64).to(mesh.device_type)
    everyone = mine.repeat(mesh.size())  # a fake process group writes nothing: its ranks agree
    dist.all_gather_single(everyone, mine, group=_whole_group(mesh))
    return bool((everyone.view(-1, mine.numel()) == mine).all())


def _whole_group(mesh: DeviceMesh) -> Any:
    names = _names(mesh)
    return mesh.get_group("_".join(names)) if len(names) > 1 else mesh.get_group(0)


def sum_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """Steps that sum a tensor over mesh axes, innermost first; axes of size 1 cost nothing."""
    steps: list[tuple[Any, ...]] = []
    for axis in reversed(axes):
        if mesh.shape[axis] > 1:
            steps += [("all_reduce", mesh.shape[axis], axis_group(mesh, axis)), ("wait",)]
    return tuple(steps)


class MeshSum:
    """A sum over some axes of a mesh, as a constant.

    Args:
        mesh: The mesh.
        axes: A name or index, or several; None for all axes.
        where: The function that asks, for the message.
    """

    def __init__(self, mesh: DeviceMesh, axes: int | str | tuple[int | str, ...] | None, where: str) -> None:
        names = mesh.mesh_dim_names or ()
        listed = range(mesh.ndim) if axes is None else axes if isinstance(axes, tuple | list) else (axes,)
        unknown = [a for a in listed if a not in names and a not in range(mesh.ndim)]
        if unknown:
            raise PlacementError(
                explain(
                    where,
                    "no such mesh axis.",
                    got=f"{unknown}",
                    need=f"names or indices of axes {names}",
                    fix=f"axes={names[:1]}",
                )
            )
        self.mesh = mesh
        self.axes = tuple(sorted({names.index(a) if isinstance(a, str) else a for a in listed}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshSum) and self.axes == other.axes and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((self.mesh, self.axes))

    def num_ranks(self) -> int:
        """Ranks that the sum runs over."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def steps(self) -> tuple[tuple[Any, ...], ...]:
        """The steps, innermost axis first."""
        return sum_over(self.mesh, self.axes)


register_constant(MeshSum, ("num_ranks", "steps", "__eq__", "__hash__"))
