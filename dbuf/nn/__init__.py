"""Any `torch.nn.Module` in, as a pure function of sharded buffers, and out again."""

from dbuf.nn.functional import Functional, functionalize

__all__ = ["Functional", "functionalize"]
