"""The same code on a GPU with NCCL: movements, and a compiled ZeRO-3 step, against the CPU."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

STEP = textwrap.dedent(
    """
    import sys
    import torch
    import dbuf

    def block(p, h):
        return h + torch.tanh(h @ p["w"]) @ p["v"] + p["b"]

    def run(device):
        torch.manual_seed(0)
        weights = [{"w": torch.randn(32, 64) / 6, "v": torch.randn(64, 32) / 8, "b": torch.zeros(32)} for _ in range(3)]
        batch = torch.randn(24, 32)
        mesh = dbuf.init_mesh(("dp",), device_type=device)
        params = [
            dbuf.shard({k: t.to(device) for k, t in group.items()}, mesh, dbuf.RowAtomic()) for group in weights
        ]
        opt = dbuf.optim.sgd(0.1)
        state = opt.init(params)

        def loss_fn(params, x):
            for buf in params:
                x = dbuf.gathered(block)(buf, x)
            return x.square().mean()

        @dbuf.jit
        def step(params, state, x):
            loss, grads = dbuf.value_and_grad(loss_fn)(params, x)
            updates, state = opt.update(grads, state, params)
            return dbuf.optim.apply_updates(params, updates), state, dbuf.pmean(loss, mesh)

        x = batch.to(device).chunk(mesh.size())[mesh.get_rank()]
        losses = []
        for _ in range(5):
            params, state, loss = step(params, state, x)
            losses.append(loss.item())
        full = [dbuf.unpack(dbuf.allgather(buf)) for buf in params]
        return losses, [t.cpu() for group in full for t in group.values()]

    losses, tensors = run(sys.argv[1])
    torch.save((losses, tensors), f"{sys.argv[2]}.{torch.distributed.get_rank()}")
    torch.distributed.destroy_process_group()
    """
)


def run_step(tmp_path, device, ranks):
    script, out = tmp_path / "step.py", tmp_path / f"{device}{ranks}"
    script.write_text(STEP)
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([*launch, str(script), device, str(out)], check=True, timeout=300, env=env)
    return torch.load(f"{out}.0")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_step_on_gpu_equals_cpu(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs needed, {torch.cuda.device_count()} found")
    losses, tensors = run_step(tmp_path, "cuda", ranks)
    cpu_losses, cpu_tensors = run_step(tmp_path, "cpu", 1)
    torch.testing.assert_close(losses, cpu_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensors, cpu_tensors, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_script_itself_on_the_cpu(tmp_path):
    """Not a GPU test of its own: it keeps the script above from rotting where there is none."""
    losses, _ = run_step(tmp_path, "cpu", 1)
    assert losses[-1] < losses[0]
