"""`jit`: a whole step as one program, with donated state updated in its own memory; and `inspect` of it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dbuf import compat, schedule
from dbuf import mesh as meshes
from dbuf import tree as trees
from dbuf.agreement import check
from dbuf.buffer import DBuffer, buffers
from dbuf.donation import check_donation, check_memory, forms_of_donated, write_back
from dbuf.errors import DbufError, explain
from dbuf.inspection import Report, read_graph
from dbuf.schedule import Overlap

__all__ = ["Jitted", "disable_jit", "inspect", "jit"]

P = ParamSpec("P")
R = TypeVar("R")
_disabled = contextvars.ContextVar("jit runs eagerly", default=False)


def jit(
    fn: Callable[P, R],
    *,
    donate_argnums: int | Sequence[int] = (),
    overlap: bool | Overlap = True,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> Jitted[P, R]:
    """Compile a step into one program: `torch.compile(fullgraph=True)` with what a step of buffers needs.

    Before the first run with new specs it compares them across ranks and runs `fn` once on fake tensors, so that a
    mistake is an error with its own message and nothing has run.

    Args:
        fn: A pure function of pytrees. It may call `dbuf.value_and_grad`.
        donate_argnums: Positional arguments whose memory the results take over. The k-th of them pairs with the
            k-th element of the returned tuple (or with the result itself, if that is no tuple or list); both have the
            same structure, specs, shapes and dtypes. Only the returned buffers may be used afterwards.
        overlap: Whether collectives run behind compute, or an `Overlap` that says what does and within what memory.
            Numbers, and the collectives themselves, do not depend on it.
        dynamic: As in `torch.compile`: by default a second shape of a batch makes that dimension dynamic. Buffers
            never become dynamic: each set of specs has a program of its own.
        options: Settings of Inductor.

    Returns:
        A function like `fn`, with `compiles` (programs so far) and `inspect`.

    Raises:
        DbufError: What `fn` raises on these arguments; ranks that disagree; results that do not pair with what is
            donated, or donated tensors that share memory.

    Communication:
        That of `fn`; before the first run with new specs, one small exchange.

    Example:
        >>> import dbuf
        >>> buf = dbuf.shard({"w": torch.ones(3)}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> norm = dbuf.jit(dbuf.global_norm)
        >>> norm(buf), norm.compiles
        (tensor(1.7321), 1)
    """
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if not callable(fn) or not all(type(number) is int for number in numbers):
        raise DbufError(
            explain(
                "dbuf.jit",
                "no function, or no positions of its arguments.",
                got=f"{fn!r} with donate_argnums={donate_argnums!r}",
                need="a function, and the positions of the arguments whose memory the results take over",
                fix="dbuf.jit(step, donate_argnums=(0, 1))",
            )
        )
    return Jitted(fn, numbers, _overlap(overlap), dynamic, dict(options or {}))


def _overlap(overlap: bool | Overlap) -> Overlap:
    if isinstance(overlap, Overlap):
        return overlap
    if not isinstance(overlap, bool):
        raise DbufError(
            explain(
                "dbuf.jit",
                "no such overlap.",
                got=repr(overlap),
                need="True, False or a dbuf.schedule.Overlap",
                fix="overlap=dbuf.schedule.Overlap(groups_in_flight=3)",
            )
        )
    return Overlap(gathers=overlap, reductions=overlap)


@contextlib.contextmanager
def disable_jit() -> Iterator[None]:
    """While it is open, every `jit` function runs as plain Python, without donation: for a debugger or `print`."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def inspect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What a step does on these arguments, read from its graph: collectives, bytes, gathered weights alive.

    Args:
        fn: A function, or the result of `jit`.
        *args: As for a call. Nothing is run, and nothing is donated.
        **kwargs: As for a call.

    Returns:
        The report; `print` it, or count with it.

    Communication:
        Before a first run one small exchange, so all ranks call it alike.
    """
    jitted = fn if isinstance(fn, Jitted) else jit(fn)
    return jitted.inspect(*args, **kwargs)


class Jitted(Generic[P, R]):
    """A compiled function: one program for each structure and specs of its arguments."""

    def __init__(
        self,
        fn: Callable[P, R],
        donate_argnums: tuple[int, ...],
        overlap: Overlap,
        dynamic: bool | None,
        options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.donate_argnums = donate_argnums
        self._overlap = overlap
        self._dynamic = dynamic
        self._options = options
        self._programs: dict[Hashable, _Program] = {}
        self._world: Callable[[], Any] = lambda: None
        self._compiles_before = 0  # in worlds that have ended

    @property
    def compiles(self) -> int:
        """Programs compiled so far, those for further shapes of a batch included."""
        return self._compiles_before + sum(program.compiles for program in self._programs.values())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the program for these arguments, compiling it first when their structure or specs are new."""
        if torch.compiler.is_compiling() or _disabled.get():  # inside another jit: part of its program
            return self.fn(*args, **kwargs)
        if compat.inside_func_transform():
            raise DbufError(
                explain(
                    "dbuf.jit",
                    "called inside a torch.func transform.",
                    got="an outer torch.func.grad, vjp or vmap",
                    need="the outermost function: the transforms go into the program",
                    fix="dbuf.jit(torch.func.vmap(fn))",
                )
            )
        program = self._program(args, kwargs)
        if self.donate_argnums:
            check_memory(args, kwargs, self.donate_argnums)
        # Any call may meet a new shape of the batch and compile.
        try:
            with compat.trace_autograd():
                return program.run(*args, **kwargs)  # type: ignore[no-any-return]
        except compat.TracingFailed:
            self._try_out(args, kwargs)  # another branch than at the first call: its own error says more
            raise

    def inspect(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """See `dbuf.inspect`."""
        report = self._program(args, kwargs).report(args, kwargs)
        return dataclasses.replace(report, compiles=self.compiles)

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        if self._world() is not (world := meshes.world()):
            self._enter_world(world)
        key = (trees.signature((args, kwargs)), forms_of_donated(args, self.donate_argnums))
        program = self._programs.get(key)
        if program is None:
            check(
                {**{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs},
                f"dbuf.jit({getattr(self.fn, '__name__', 'fn')})",
            )
            compat.call_with_room(self._try_out, args, kwargs)

            def fn(*args: Any, **kwargs: Any) -> Any:
                return write_back(args, self.fn(*args, **kwargs), self.donate_argnums)

            program = _Program(fn, self._overlap, self._dynamic, self._options, _axes(buffers((args, kwargs))))
            self._programs[key] = program
        return program

    def _enter_world(self, world: Any) -> None:
        """Drop programs: they know groups by names, which in a new world may be those of other ranks."""
        self._compiles_before = self.compiles
        self._programs.clear()
        self._world = weakref.ref(world) if world is not None else lambda: None

    def _try_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let mistakes show before anything is traced: those of `fn`, and results that do not pair."""
        try:
            out = run_on_fakes(self.fn, args, kwargs)
        except compat.NeedsRealTensors as error:
            if self.donate_argnums:
                raise DbufError(
                    explain(
                        "dbuf.jit",
                        "a step that donates has to have results of known shapes.",
                        got=f"an operation whose result depends on values: {error}",
                        need="shapes that do not depend on values",
                        fix="torch.where or masks in place of .item() and boolean indexing, or no donate_argnums",
                    )
                ) from error
            return
        check_donation(args, kwargs, out, self.donate_argnums)


def run_on_fakes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on tensors without memory: its errors come out as they are, its result has shapes and dtypes."""
    # A jit function in `fn` would hand tensors without memory to its program.
    with disable_jit(), compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = trees.map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        return fn(*fake_args, **fake_kwargs)


class _Captured(Exception):
    """Ends a compilation whose graph has been read and whose program nobody wants."""


class _Program:
    """One `torch.compile` of a function for arguments with given specs."""

    def __init__(
        self,
        program: Callable[..., Any],
        overlap: Overlap,
        dynamic: bool | None,
        options: dict[str, Any],
        axis_of_group: dict[str, str],
    ) -> None:
        self.compiles = 0
        # A program from Inductor's cache has been ordered already, and could report nothing.
        self._options = options if overlap.report is None else {"fx_graph_cache": False, **options}
        self._overlap = overlap
        self._dynamic = dynamic
        self._report: Report | None = None  # of the last graph that was read
        self._reports: dict[Hashable, Report] = {}  # by the shapes of arguments
        self._axis_of_group = axis_of_group
        self._program = program
        self._compiled = compat.compile_program(program, dynamic=dynamic, backend=self._backend)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program; the first time that compiles it, later only for a new shape of a batch."""
        before = self.compiles
        out = self._compiled(*args, **kwargs) if before else compat.call_with_room(self._compiled, *args, **kwargs)
        if self.compiles > before and self._report is not None:
            self._reports[_shapes((args, kwargs))] = self._report
        return out

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiles += 1
        place = self._overlap.place
        return compat.call_with_room(compat.compile_inductor, gm, inputs, self._schedule, self._options, place)

    def _schedule(self, graph: torch.fx.Graph) -> Report:
        schedule.take_aliases_outside(graph)
        schedule.sink_gathers(graph)
        schedule.repeat_in_backward(graph)
        schedule.sink_gathers(graph)
        schedule.store_results(graph)
        schedule.anchor_padding(graph)
        schedule.take_before_writing(graph)
        self._overlap.prefetch(graph)
        self._report = read_graph(graph, self._axis_of_group)
        self._overlap.translate(graph)
        return self._report

    def report(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        """The report of the compilation for these shapes, or of one that ends once the graph has been read."""
        key = _shapes((args, kwargs))
        if key not in self._reports:
            self._reports[key] = self._read(args, kwargs)
        return self._reports[key]

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        found: list[Report] = []

        def read_only(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return compat.compile_inductor(gm, inputs, stop, self._options, self._overlap.place)

        def stop(graph: torch.fx.Graph) -> None:
            found.append(self._schedule(graph))
            raise _Captured

        try:
            compiled = compat.compile_program(self._program, dynamic=self._dynamic, backend=read_only)
            with compat.trace_autograd():
                compat.call_with_room(compiled, *args, **kwargs)
        except compat.BackendFailed:
            if not found:
                raise
        assert found, "the compiler never ran its passes"
        return found[0]


def _shapes(tree: Any) -> Hashable:
    return tuple([x.shape for x in trees.leaves(tree) if isinstance(x, torch.Tensor)])


def _axes(bufs: list[DBuffer]) -> dict[str, str]:
    """The axis, or axes, of each process group of the buffers' meshes."""
    out: dict[str, str] = {}
    for mesh in {buf.mesh for buf in bufs}:
        names = mesh.mesh_dim_names or ()
        for count in range(2, mesh.ndim + 1):
            out[meshes.suffix_group(mesh, count)] = "_".join(names[-count:])
        for axis, name in enumerate(names):
            out[meshes.axis_group(mesh, axis)] = name
    return out
