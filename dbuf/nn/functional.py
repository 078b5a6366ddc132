"""`functionalize`: a module as a pure function of buffers that gathers each group as it runs, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dbuf import tree as trees
from dbuf.buffer import DBuffer, unpack
from dbuf.creation import shard as shard_tensors
from dbuf.layout import GlobalLayout
from dbuf.mesh import DeviceMesh
from dbuf.movement import allgather
from dbuf.nn import refusals
from dbuf.nn.code import Running, copy_code, filled, install, version_of
from dbuf.nn.groups import Groups, choose_groups
from dbuf.nn.initialize import Initializer, made_by_group
from dbuf.nn.plan import Plan, plan_module
from dbuf.placement import Placement, Placements, ShardLayout

__all__ = ["Functional", "functionalize"]

Bufs = dict[str, DBuffer]
Rest = dict[str, Any]


def functionalize(module: nn.Module, groups: Groups = None, *, remat: bool | Iterable[str] = False) -> Functional:
    """Split a module into its code, a pure function, and its numbers, a dict of buffers.

        module                                  model.apply(params, x)
        ├── embed      Embedding                params["root"]      embed, head: gathered around the whole
        ├── blocks.0   Block            =>      params["blocks.0"]  gathered as block 0 runs
        ├── blocks.1   Block                    params["blocks.1"]  gathered as block 1 runs
        └── head       Linear

    Args:
        module: Any module, on any device; on the meta device for a model that no rank can hold. It is copied
            without its parameters, and not changed.
        groups: What is gathered together, as it runs: a class (each instance is a group), a module, a path as in
            `module.named_modules()`, an iterable of these, a rule (`path -> bool`, or the name of a group), or a
            mapping of names to any of these. A group inside another one is its own. What is in none is in
            `"root"`, which is gathered around the whole forward.
        remat: Recompute groups in the backward instead of keeping their activations: all but the root, or those
            named.

    Returns:
        The function, and the way in and out of it.

    Raises:
        TreeError: A group matches nothing, is never called, or holds several dtypes; a module in two groups.

    Example:
        >>> import dbuf
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> model = functionalize(net, groups=nn.Linear)
        >>> params, rest = model.shard(net, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> list(params), model.apply(params, torch.ones(3, 4)).shape
        (['0', '2'], torch.Size([3, 2]))
    """
    return Functional(module, groups, remat)


class Functional:
    """A module's code as pure functions of its numbers. Made by `functionalize`.

    Attributes:
        module: The copy of the code; `model.module.eval()` switches its mode.
        groups: For each buffer, the paths of its parameters. A tied parameter is in one buffer, under its first path
            there; frozen ones (`requires_grad=False`) have buffers of their own, named `"... (frozen)"`.
    """

    def __init__(self, module: nn.Module, groups: Groups, remat: bool | Iterable[str]) -> None:
        original = dict(module.named_modules())
        chosen = choose_groups(module, groups)
        self.module = copy_code(module)
        copies = dict(self.module.named_modules())
        here = {copies[path]: chosen[part] for path, part in original.items() if part in chosen}
        self._plan: Plan = plan_module(self.module, here)
        self._running = Running()
        named = {name for part, name in here.items() if part is not self.module} if remat is True else set(remat or ())
        if unknown := named - set(here.values()):
            refusals.refuse_names(unknown, here.values(), "dbuf.nn.functionalize: remat")
        install(self._plan, [part for part, name in here.items() if name in named], self._running)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """For each buffer, the paths of its parameters."""
        return {name: tuple(paths[0] for paths in entry.paths.values()) for name, entry in self._plan.entries.items()}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {len(entry.shapes)}" for name, entry in self._plan.entries.items())
        return f"Functional({type(self.module).__name__}, tensors by buffer {{{parts}}})"

    # -- in ---------------------------------------------------------------------------------------------------

    def tensors(self, source: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of each group, for a `dbuf.shard` of one's own.

        Args:
            source: A module like the one that was functionalized, or a state dict of one; it is read lazily.

        Returns:
            Buffer name -> key -> full tensor, detached, on memory of the source. Keys are paths within the group.

        Raises:
            TreeError: Something is missing, or has another shape.
        """
        found = _all_of(source)
        refusals.check_source(self._plan, found)
        return {name: _pick(found, entry.paths) for name, entry in self._plan.entries.items()}

    def shard(
        self,
        source: nn.Module | Mapping[str, torch.Tensor],
        mesh: DeviceMesh,
        placements: Placement | Placements,
        *,
        layout: ShardLayout | GlobalLayout = ShardLayout.PADDED,
        dp_size: int | None = None,
        align: int = 1,
        broadcast_from: int | None = None,
    ) -> tuple[Bufs, Rest]:
        """The numbers of a module, or of a state dict, as buffers.

        Args:
            source: A module like the one that was functionalized, or a state dict of one.
            mesh: From `init_mesh`.
            placements: One entry a mesh axis, for every group.
            layout: As in `dbuf.shard`, and so are the rest.
            dp_size: As in `dbuf.shard`.
            align: As in `dbuf.shard`.
            broadcast_from: As in `dbuf.shard`.

        Returns:
            `(params, rest)`. `params` are the buffers to train, by the name of their group. `rest` holds what is not
            trained: buffers of frozen parameters, and the module's own buffers as plain tensors by path.

        Communication:
            None; with `broadcast_from`, one broadcast a group. The module's own buffers are not sent.
        """
        found = _all_of(source)
        refusals.check_source(self._plan, found)
        device = torch.device(mesh.device_type)
        options: dict[str, Any] = {"layout": layout, "dp_size": dp_size, "align": align}
        options["broadcast_from"] = broadcast_from
        bufs = {}
        for name, entry in self._plan.entries.items():
            tensors = {key: tensor.to(device) for key, tensor in _pick(found, entry.paths).items()}
            bufs[name] = shard_tensors(tensors, mesh, placements, **options)
        states = {path: found[path] if path in found else old for path, old in self._constants().items()}
        return self._split(bufs, {path: tensor.detach().to(device, copy=True) for path, tensor in states.items()})

    def init(
        self,
        mesh: DeviceMesh,
        placements: Placement | Placements,
        *,
        init_module: Initializer | None = None,
        layout: ShardLayout | GlobalLayout = ShardLayout.PADDED,
        dp_size: int | None = None,
        align: int = 1,
        broadcast_from: int | None = None,
    ) -> tuple[Bufs, Rest]:
        """New numbers for the module, made group by group: no rank holds more than one whole group.

        Ranks draw the same random numbers only if they were seeded alike; or see `broadcast_from`.

        Args:
            mesh: From `init_mesh`.
            placements: One entry a mesh axis, for every group.
            init_module: `fn(module)` sets what a module holds itself, in place; called on every module, children
                first, one group after the other. By default the nearest `_init_weights` of a module at or above it,
                or else its own `reset_parameters`.
            layout: As in `dbuf.shard`, and so are the rest.
            dp_size: As in `dbuf.shard`.
            align: As in `dbuf.shard`.
            broadcast_from: As in `dbuf.shard`.

        Returns:
            `(params, rest)`, as `shard` gives.

        Raises:
            TreeError: A parameter or buffer that nothing has set.

        Communication:
            As `shard`.
        """
        device = torch.device(mesh.device_type)
        options: dict[str, Any] = {"layout": layout, "dp_size": dp_size, "align": align}
        options["broadcast_from"] = broadcast_from
        bufs: Bufs = {}
        states: dict[str, torch.Tensor] = {}
        with self._running.lock:
            for entries, made in made_by_group(self.module, self._plan, init_module, device):
                states |= made
                while entries:
                    name, tensors = entries.popitem()
                    bufs[name] = shard_tensors(tensors, mesh, placements, **options)
                    del tensors
        ordered = {name: bufs[name] for name in self._plan.entries}
        return self._split(ordered, {path: states[path] for path in self._plan.states})

    def _split(self, bufs: Bufs, states: dict[str, torch.Tensor]) -> tuple[Bufs, Rest]:
        trained = {name: buf for name, buf in bufs.items() if not self._plan.entries[name].frozen}
        return trained, {name: buf for name, buf in bufs.items() if name not in trained} | states

    def _constants(self) -> dict[str, torch.Tensor]:
        """The module's own buffers as they are in the code: copies of what they were, or on meta."""
        return {path: state.constant() for path, state in self._plan.states.items()}

    # -- run --------------------------------------------------------------------------------------------------

    def apply(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward on these numbers, each group gathered as its module runs.

        Args:
            params: Every buffer by name: `params`, or `params | rest` for a module with frozen parameters. Where the
                module's own buffers are not given, they are what they were when it was functionalized.
            *args: The module's.
            **kwargs: The module's.

        Returns:
            What the forward returns.

        Raises:
            TreeError: The buffers are not those of this module; the forward writes its parameters or buffers; a
                parameter is read outside of the module whose group holds it.

        Communication:
            For each sharded axis of each group that runs: one all-gather, another one in the backward (none where
            the backward reads no weight), and a reduce-scatter of the gradient (none for a frozen group).

        Gradient:
            That of the module. The gradients of a tied parameter add up.
        """
        if torch.compiler.is_compiling():
            return self._run(params, args, kwargs)[0]
        refusals.check_values(self._plan, params)
        refusals.check_statistics(self._plan)
        states = {path: params.get(path, constant) for path, constant in self._constants().items()}
        versions = {path: version_of(tensor) for path, tensor in states.items()}
        out, after = self._run(params, args, kwargs)
        refusals.check_unwritten(states, versions, after)
        return out

    def apply_and_update(self, params: Mapping[str, Any], rest: Rest, *args: Any, **kwargs: Any) -> tuple[Any, Rest]:
        """`apply(params | rest, ...)`, and `rest` with what the forward has written into the module's own buffers.

        Args:
            params: The trained buffers.
            rest: Frozen buffers, and all of the module's own as plain tensors; they are not written.
            *args: The module's.
            **kwargs: The module's.

        Returns:
            `(out, rest)`. Each rank has its own running statistics, from its own batches; `dbuf.pmean` averages them.
        """
        values = {**params, **rest}
        if not torch.compiler.is_compiling():
            refusals.check_values(self._plan, values, all_states=True)
        copies = {path: rest[path].clone() for path in self._plan.states}
        out, after = self._run({**values, **copies}, args, kwargs)
        return out, {**rest, **{path: tensor.detach() for path, tensor in after.items()}}

    def _run(self, values: Mapping[str, Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        if torch.compiler.is_compiling():
            return self._run_alone(values, args, kwargs)
        with self._running.lock:
            return self._run_alone(values, args, kwargs)

    def _run_alone(self, values: Mapping[str, Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        running = self._running
        before = running.bufs, running.open
        running.bufs, running.open = {name: values[name] for name in self._plan.entries}, {}
        states = self._plan.states
        places = [(part._buffers, name, path) for path, state in states.items() for part, name in state.places]
        constants = [buffers[name] for buffers, name, _ in places]
        try:
            for buffers, name, path in places:
                if path in values:
                    buffers[name] = values[path]
            out = self.module(*args, **kwargs)
            return out, {path: state.constant() for path, state in states.items()}
        finally:
            running.bufs, running.open = before
            for (buffers, name, _), constant in zip(places, constants, strict=True):
                buffers[name] = constant

    # -- out --------------------------------------------------------------------------------------------------

    def state_dict(self, values: Mapping[str, Any], *, rank: int | None = None) -> dict[str, Any]:
        """Full tensors under the names that the module's own `state_dict` has: `module.load_state_dict` takes it.

        Args:
            values: `params | rest`.
            rank: The one rank that gets it, on the CPU; by default all do.

        Returns:
            Copies; on the other ranks of `rank=`, an empty dict.

        Communication:
            One all-gather a group and sharded axis, one group after the other.
        """
        refusals.check_values(self._plan, values)
        wanted = rank is None or not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
        device = None if rank is None else torch.device("cpu")
        tensors = {}
        for name in self._plan.entries:
            full = unpack(allgather(values[name]))
            if wanted:
                tensors[name] = trees.map(lambda t: t.detach().to(device=device, copy=True), full)
        return self._named(tensors, values) if wanted else {}

    def local_state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As `state_dict`, with this rank's rows of each tensor: no communication."""
        refusals.check_values(self._plan, values)
        tensors = {name: trees.map(lambda t: t.detach().clone(), unpack(values[name])) for name in self._plan.entries}
        return self._named(tensors, values)

    def _named(self, tensors: dict[str, dict[str, torch.Tensor]], values: Mapping[str, Any]) -> dict[str, Any]:
        """What the module's own `state_dict` makes of these tensors."""
        slots = [slot for found in self._plan.slots.values() for slot in found]
        path_of = {path: paths[0] for paths in (s.paths for s in self._plan.states.values()) for path in paths}
        with self._running.lock, filled(slots, tensors):
            named = dict(self.module.state_dict())
        return {
            name: values.get(path_of[name], value).detach().clone() if name in path_of else value
            for name, value in named.items()
        }


def _all_of(source: nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Every parameter and buffer of a module under each of its paths; a state dict is that already."""
    if not isinstance(source, nn.Module):
        return source
    buffers = dict(source.named_buffers(remove_duplicate=False))
    return {**dict(source.named_parameters(remove_duplicate=False)), **buffers}


def _pick(found: Mapping[str, torch.Tensor], paths_of: Mapping[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of one group; a state dict may have a tied one under any of its paths."""
    return {key: found[next(path for path in paths if path in found)].detach() for key, paths in paths_of.items()}
