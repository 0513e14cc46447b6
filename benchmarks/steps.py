"""Times whole training steps beside plain PyTorch, for `benchmarks.speed`.

``python -m benchmarks.steps REQUEST`` takes a JSON object with the arguments of
`measure_steps` and prints the result as the last line.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.measure import describe_machine
from relattn import command
from relattn import data as data_lib
from relattn.training.config_file import read_config
from relattn.training.devices import make_training_parallel
from relattn.training.seeds import make_task

# Configurations with batches of 32.
MODELS = {
    "vit": "configs/translution_vit.py:static,A/12,self_attention,cpu",
    "performer": "configs/performer.py:fashion_mnist,learnable_sincos,cpu",
}


def measure_steps(
    model: str, *, cores: int, steps: int = 5, rounds: int = 7
) -> dict[str, Any]:
    """Times the steps of a model in relattn and in PyTorch, in alternating rounds.

    Both run on the CPU. A step is forward, backward and update, by the recipe's
    optimiser, on one batch.

    Args:
        model: Key of `MODELS`.
        cores: Number of cores to use.
        steps: Steps per round.
        rounds: Rounds of each framework, after one that is not timed.

    Returns:
        ``relattn_ms`` and ``torch_ms``, medians of the time of a step, and ``ratio``,
        the median over rounds of relattn's time divided by PyTorch's.
    """
    # Before any thread starts, so that every thread pool has that many threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    jax.config.update("jax_platforms", "cpu")
    # As train.py; PyTorch shares the heap.
    command.keep_heap()
    runs = {"torch": _torch_step(model, cores), "relattn": _relattn_step(model)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(steps)
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    ratios = [a / b for a, b in zip(times["relattn"], times["torch"], strict=True)]
    return {
        "model": model,
        "cores": cores,
        "relattn_ms": statistics.median(times["relattn"]),
        "torch_ms": statistics.median(times["torch"]),
        "ratio": statistics.median(ratios),
        "machine": describe_machine(jax.devices()[0]),
    }


def _relattn_step(model: str) -> Callable[[int], None]:
    """Returns a function that runs a number of updates."""
    config = read_config(MODELS[model], [])
    parallel = make_training_parallel(config)
    data = data_lib.load_data(config.data)
    task = make_task(config, data.info)
    step = parallel.compile_train_step(task.train_step)
    state = parallel.create(task.create_state)
    with task.loader(data, 0, parallel.shard, parallel.shard_index) as batches:
        _, batch = next(iter(batches))

    def run(steps):
        nonlocal state
        for _ in range(steps):
            state, _ = step(state, batch, task.key)
        jax.block_until_ready(state)

    return run


def _torch_step(model: str, cores: int) -> Callable[[int], None]:
    """Returns a function that runs a number of updates."""
    import torch

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    config = read_config(MODELS[model], [])
    options, optimizer = config.model, config.optimizer
    side = config.data.image_size // options.patch_size
    network = make_torch_model(options, (side, side))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer.name]
    updates = kind(
        network.parameters(),
        lr=optimizer.learning_rate,
        betas=(optimizer.b1, optimizer.b2),
        # 0 with Adam.
        weight_decay=optimizer.weight_decay,
    )
    pixels = (config.batch_size, 1, config.data.image_size, config.data.image_size)
    images, labels = torch.rand(pixels), torch.arange(config.batch_size) % 10

    def run(steps):
        for _ in range(steps):
            updates.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            loss.backward()
            if optimizer.clip_norm:
                torch.nn.utils.clip_grad_norm_(
                    network.parameters(), optimizer.clip_norm
                )
            updates.step()

    return run


def make_torch_model(options: Any, grid: tuple[int, int]) -> Any:
    """Makes a model of `MODELS` in plain PyTorch, with the same parameters.

    Args:
        options: The configuration's ``model``.
        grid: Height and width in patches.

    Returns:
        A `torch.nn.Module` from images ``[batch, 1, height, width]`` to 10 logits.
    """
    import torch
    from torch import nn

    performer = options.name == "performer"
    dim, heads, patch = options.dim, options.num_heads, options.patch_size
    head_dim = dim // heads

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (
                nn.Linear(dim, dim, bias=performer) for _ in range(3)
            )
            self.out = nn.Linear(dim, dim)
            if performer:
                features = int(head_dim * math.log(head_dim))
                self.register_buffer("projection", torch.randn(features, head_dim))

        def features(self, x):
            x = x * head_dim**-0.25
            return x @ self.projection.T - x.square().sum(-1, keepdim=True) / 2

        def forward(self, x):
            batch, n, _ = x.shape
            q, k, v = (
                project(x).view(batch, n, heads, head_dim).transpose(1, 2)
                for project in (self.q, self.k, self.v)
            )
            if performer:
                # Exponents of the features, shifted by their maxima.
                q, k = self.features(q), self.features(k)
                shift = k.detach().amax(-2, keepdim=True)
                k, q = (k - shift).exp(), q + shift
                q = (q - q.detach().amax(-1, keepdim=True)).exp()
                total = q @ k.sum(-2)[..., None]
                out = q @ (k.transpose(-2, -1) @ v) / total
            else:
                out = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(out.transpose(1, 2).reshape(batch, n, dim))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attention = Attention()
            self.dropout = nn.Dropout(options.attention_dropout)
            self.feed_forward = nn.Sequential(
                nn.Linear(dim, options.mlp_dim),
                nn.GELU(),
                nn.Dropout(options.dropout),
                nn.Linear(options.mlp_dim, dim),
            )

        def forward(self, x):
            x = x + self.dropout(self.attention(self.attention_norm(x)))
            return x + self.feed_forward(self.norm(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            pixels, n = patch * patch, math.prod(grid)
            self.embedding = nn.Linear(pixels, dim)
            if not performer:
                self.embedding = nn.Sequential(
                    nn.LayerNorm(pixels), self.embedding, nn.LayerNorm(dim)
                )
            self.cls = nn.Parameter(torch.randn(1, 1, dim))
            if performer:
                steps = torch.arange(dim // 4) / (dim // 4)
                self.frequencies = nn.Parameter(32000**-steps)
                rows = torch.cartesian_prod(*(torch.arange(s) for s in grid))
                self.register_buffer("positions", rows.float())
            else:
                self.positions = nn.Parameter(0.02 * torch.randn(1, n, dim))
            self.blocks = nn.Sequential(*(Block() for _ in range(options.num_layers)))
            self.norm = nn.Identity() if performer else nn.LayerNorm(dim)
            self.head = nn.Linear(dim, 10)

        def forward(self, images):
            x = nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)
            x = self.embedding(x)
            if performer:
                angles = self.positions[..., None] * self.frequencies
                x = x + torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
            else:
                x = x + self.positions
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
            return self.head(self.norm(self.blocks(x)[:, 0]))

    return Model()


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints one measurement."""
    parser = command.Parser("python -m benchmarks.steps", __doc__)
    parser.add_argument("request", type=_request, help="a JSON object")
    print(json.dumps(measure_steps(**parser.parse_args(argv).request)))


def _request(text: str) -> dict[str, Any]:
    request = json.loads(text)
    if not isinstance(request, dict) or request.get("model") not in MODELS:
        raise ValueError("no such request")
    return request


if __name__ == "__main__":
    main()
