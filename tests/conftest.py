"""Markers and hypothesis profiles. Tests of several ranks call `dbuf.testing.run`: there is no fixture."""

from __future__ import annotations

import collections
import functools
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from dbuf import compat

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the processor's vector units are not tried out with g++


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    pyfuncitem.obj = functools.partial(compat.call_with_room, pyfuncitem.obj)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first, so that parallel workers end together; skip what needs a GPU where there is none."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])  # stable: files, and tests in them, keep their order otherwise
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
