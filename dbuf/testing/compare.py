"""Comparisons of whole trees, with one stated tolerance a dtype and the first difference in the message."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dbuf import tree

_RTOL = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.complex128: 1e-12,
    torch.complex64: 1e-5,
}

LeafCheck = Callable[[object, object], str | None]


def assert_bitwise(got: object, expected: object) -> None:
    """Assert that two trees have the same structure and the same bits.

    Shapes and dtypes must be equal; devices may differ. A NaN equals any NaN, and `-0.0` differs from `0.0`.
    Buffers are compared with their specs. Leaves that are no tensors are compared by type and `==`.

    Args:
        got: What the code under test returned: a tree of tensors, buffers and plain values.
        expected: What it should have returned.

    Raises:
        AssertionError: At the first leaf that differs, with its path, index and values.
    """
    _compare("assert_bitwise", got, expected, _bitwise)


def assert_close(got: object, expected: object, *, rtol: float | None = None) -> None:
    """Assert that two trees agree within a fraction of each expected tensor's largest magnitude.

    `abs(got - expected) <= rtol * max(abs(expected))`, the largest magnitude taken over the finite elements
    of one leaf, so that an element that should be nearly zero is judged by the size of its neighbours. NaN
    equals NaN, an infinity equals itself, and where everything expected is zero so must be what was got.

    | dtype | rtol |
    |---|---|
    | float64, complex128 | 1e-12 |
    | float32, complex64, a Python float | 1e-5 |
    | float16 | 2e-3 |
    | bfloat16 | 2e-2 |
    | anything else (integers, bool, strings) | equal |

    Args:
        got: What the code under test returned: a tree of tensors, buffers and plain values.
        expected: What it should have returned.
        rtol: In place of the table, for every floating leaf.

    Raises:
        AssertionError: At the first leaf that differs, with its path, index, values and tolerance.
    """
    _compare("assert_close", got, expected, lambda g, e: _close(g, e, rtol))


def assert_same_on_all_ranks(results: Sequence[object]) -> None:
    """Assert that every rank returned the same bits as rank 0.

    Args:
        results: One result a rank, as `dbuf.testing.run` returns them.

    Raises:
        AssertionError: At the first rank that differs, with the first leaf that does.
    """
    for rank, result in enumerate(results):
        _compare(f"assert_same_on_all_ranks: rank {rank} (got) and rank 0", result, results[0], _bitwise)


def _compare(where: str, got: object, expected: object, check: LeafCheck) -> None:
    got_leaves, got_spec = tree.flatten_with_paths(got)
    expected_leaves, expected_spec = tree.flatten_with_paths(expected)
    if got_spec != expected_spec:
        raise AssertionError(f"{where}: {_structure_difference(got_leaves, expected_leaves)}")
    for (path, got_leaf), (_, expected_leaf) in zip(got_leaves, expected_leaves, strict=True):
        difference = check(got_leaf, expected_leaf)
        if difference is not None:
            raise AssertionError(f"{where}: {path or 'the value'} {difference}")


def _structure_difference(got: list[tuple[str, object]], expected: list[tuple[str, object]]) -> str:
    paths, wanted = [path for path, _ in got], [path for path, _ in expected]
    missing = [path for path in wanted if path not in paths]
    extra = [path for path in paths if path not in wanted]
    if missing or extra:
        return f"the trees differ.\n  missing:    {missing}\n  unexpected: {extra}"
    reason = "order of keys" if paths != wanted else "container types or static metadata (a buffer's spec)"
    return f"the trees differ in {reason}.\n  got:  {paths}\n  need: {wanted}"


def _bitwise(got: object, expected: object) -> str | None:
    if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return _plain(got, expected)
    if (difference := _kind(got, expected)) is not None:
        return difference
    got, expected = got.detach().cpu(), expected.detach().cpu()
    equal = _bits_equal(got, expected)
    if got.is_floating_point() or got.is_complex():
        equal |= _wide(got).isnan() & _wide(expected).isnan()
    return None if bool(equal.all()) else _first(got, expected, equal, "the same bits")


def _close(got: object, expected: object, rtol: float | None) -> str | None:
    if isinstance(got, float) and isinstance(expected, float):
        got, expected = torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
        return _close(got, expected, _RTOL[torch.float32] if rtol is None else rtol)
    if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return _plain(got, expected)
    if expected.dtype not in _RTOL:
        return _bitwise(got, expected)
    if (difference := _kind(got, expected)) is not None:
        return difference
    bound = _RTOL[expected.dtype] if rtol is None else rtol
    wide, target = _wide(got.detach().cpu()), _wide(expected.detach().cpu())
    finite = target.abs()[target.abs().isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    equal = (wide == target) | (wide.isnan() & target.isnan()) | ((wide - target).abs() <= bound * scale)
    if bool(equal.all()):
        return None
    worst = float((wide - target).abs()[~equal].max())
    need = f"within {bound * scale:.3g} ({bound:g} of the largest magnitude {scale:.6g}); worst {worst:.3g}"
    return _first(got.detach().cpu(), expected.detach().cpu(), equal, need)


def _plain(got: object, expected: object) -> str | None:
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        return f"differs in kind.\n  got:  {type(got).__name__}\n  need: {type(expected).__name__}"
    if type(got) is type(expected) and (got == expected or (_is_nan(got) and _is_nan(expected))):
        return None
    return f"differs.\n  got:  {got!r}\n  need: {expected!r}"


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _kind(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    have, want = (f"{tuple(t.shape)} {t.dtype}" for t in (got, expected))
    return None if have == want else f"differs in shape or dtype.\n  got:  {have}\n  need: {want}"


def _bits_equal(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Element-wise equality of the bits, in the tensors' shape."""
    if got.numel() == 0:
        return torch.ones(got.shape, dtype=torch.bool)
    rows = [t.contiguous().reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (got, expected)]
    return (rows[0] == rows[1]).all(dim=1).reshape(got.shape)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _first(got: torch.Tensor, expected: torch.Tensor, equal: torch.Tensor, need: str) -> str:
    index = tuple(int(i) for i in (~equal).nonzero()[0])
    count = int((~equal).sum())
    return (
        f"differs in {count} of {equal.numel()} elements, first at index {index}.\n"
        f"  got:  {got[index].item()!r}\n"
        f"  need: {expected[index].item()!r}, {need}"
    )
