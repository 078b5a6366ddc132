"""Of the running torch, optree and Python: fake tensors, storages, process groups, pytree keys, the frame stack."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from optree.registry import __GLOBAL_NAMESPACE as OPTREE_GLOBAL
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group,
    _world,
)
from torch.utils._pytree import GetAttrKey, TreeSpec

__all__ = [
    "OPTREE_GLOBAL",
    "FakeTensor",
    "FakeTensorMode",
    "GetAttrKey",
    "NeedsRealTensors",
    "TreeSpec",
    "call_with_room",
    "destroy_subgroups",
    "flatten_mesh",
    "group_backend",
    "group_rank",
    "inside_func_transform",
    "release_groups",
    "storage_id",
    "version_of",
]

_R = TypeVar("_R")
_ROOM = 2**18  # slots of 8 bytes: Python takes the next power of two, and the rest of it is left for other frames
_OBJECTS = 1_000_000  # new ones from one collection to the next

# What an operation raises on fake tensors when its result depends on values (2.13, 2.14).
NeedsRealTensors = (DataDependentOutputException, DynamicOutputShapeException)


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


_call_in_large_frame = types.FunctionType(_call.__code__.replace(co_stacksize=_ROOM), {}, "call_with_room")


def call_with_room(fn: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """`fn(*args, **kwargs)` with 2 MB of memory for the frames of what it calls, and rare collections of garbage.

    For calls that compile. Compilers make many objects that live on, and the collector looks through all of them again
    and again: a tenth of the time of a compile.

    Python keeps frames in chunks of 16 KiB, and gives a chunk back to the system when the first frame in it returns. A
    loop at that depth maps, touches and unmaps one at each call: a sixth of the time of a compile. A frame that asks
    for a large stack gets a large chunk, which those of its callees share (CPython 3.11 to 3.14).
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0 if somebody has switched it off
        gc.set_threshold(max(_OBJECTS, thresholds[0]), *thresholds[1:])
    try:
        return _call_in_large_frame(fn, *args, **kwargs)  # type: ignore[no-any-return]
    finally:
        gc.set_threshold(*thresholds)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share while, and only while, they look at one storage (2.13, 2.14)."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often the memory of a tensor has been written in place, by this view of it or another (2.13, 2.14)."""
    return tensor._version


def inside_func_transform() -> bool:
    """Whether a `torch.func` transform (grad, vjp, vmap) is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def flatten_mesh(mesh: DeviceMesh, axis_names: tuple[str, ...], name: str) -> None:
    """Make the process group over several axes of `mesh`; `mesh.get_group(name)` finds it from then on."""
    mesh[axis_names]._flatten(name)


def group_backend(name: str) -> str:
    """`"gloo"`, `"nccl"`, ... of the process group that a collective in a graph names (2.13, 2.14)."""
    return torch.distributed.get_backend(_resolve_process_group(name))  # type: ignore[arg-type]


def group_rank(name: str) -> int:
    """This process's rank in the process group that a collective in a graph names (2.13, 2.14)."""
    return torch.distributed.get_rank(_resolve_process_group(name))  # type: ignore[arg-type]


def destroy_subgroups() -> None:
    """End every process group but the default one; torch itself only lists them in `_world` (2.13, 2.14)."""
    for group in list(_world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def release_groups() -> None:
    """Have the meshes that the collector sees let go of their groups, whose threads end when nobody has them.

    Dynamo's guards keep the specs that they compare with, and their meshes, for ever: each is registered to be told
    of the end of a class (2.13, 2.14).
    """
    for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
