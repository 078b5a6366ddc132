"""A torch.nn.Module as it is: split into code and sharded numbers, trained, and put back.

python examples/08_module.py
torchrun --standalone --nproc-per-node=2 examples/08_module.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import dbuf
import dbuf.testing

LAYERS, WIDTH, CLASSES, BATCH, CONTEXT, STEPS, RATE = 2, 16, 10, 12, 6, 5, 0.1  # BATCH divides by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    """Code that has never heard of dbuf; its output layer is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)  # the same module and the same whole batch on every rank
    net = Net()
    tokens = torch.randint(CLASSES, (BATCH, CONTEXT))

    # Code and numbers: every layer is a group, gathered as it runs; the rest is the group "root".
    model = dbuf.nn.functionalize(net, groups=nn.TransformerEncoderLayer)
    params, rest = model.shard(net, mesh, dbuf.RowAtomic())
    assert list(params) == ["root", "layers.0", "layers.1"] and rest == {}  # no frozen parameters, no buffers
    print(f"rank {rank} of {ranks} holds {sum(buf.local.numel() for buf in params.values())} elements of {model}")

    # `apply` is a function: same numbers in, same numbers out, and the module is not touched.
    dbuf.testing.assert_close(model.apply(params, tokens), net(tokens))

    # A step like any other.
    optimizer = dbuf.optim.sgd(RATE)

    def loss_fn(params: dict[str, dbuf.DBuffer], tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(model.apply(params, tokens), tokens)

    state = optimizer.init(params)
    for _ in range(STEPS):
        _, grads = dbuf.value_and_grad(loss_fn)(params, tokens.chunk(ranks)[rank])
        updates, state = optimizer.update(grads, state, params)
        params = dbuf.optim.apply_updates(params, updates)

    # Back into a module: full tensors, under the names that it knows.
    trained = Net()
    trained.load_state_dict(model.state_dict(params))

    # Which is where one process with the whole batch arrives.
    optimizer_of_one = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer_of_one.zero_grad()
        loss_of(net(tokens), tokens).backward()
        optimizer_of_one.step()
    dbuf.testing.assert_close(dict(trained.state_dict()), dict(net.state_dict()), rtol=1e-5)
    print(f"rank {rank} of {ranks}: trained like a single process", flush=True)


if __name__ == "__main__":
    main()
