"""Training steps as data: a strategy is three placement tuples, and one pure step serves them all."""

from dbuf.train.state import TrainState, init
from dbuf.train.step import make_train_step
from dbuf.train.strategy import Strategy

__all__ = ["Strategy", "TrainState", "init", "make_train_step"]
