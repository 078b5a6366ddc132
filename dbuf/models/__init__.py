"""What tensors a model has, as units: from a name, a config, a file's header, or a function."""

from dbuf.models.builtin import builtin_names
from dbuf.models.source import read_model
from dbuf.models.units import Model, Unit, group

__all__ = ["Model", "Unit", "builtin_names", "group", "read_model"]
