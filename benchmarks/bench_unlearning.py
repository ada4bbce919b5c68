"""Unlearning beside plain training on as many samples, and the signal–noise model's maps."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from flatbook import build
from flatbook.theory.coordinates import of_network
from flatbook.theory.descent import train
from flatbook.theory.signal_noise import TwoLayerCNN, compose, decompose, sample
from flatbook.theory.wishart import sample_problems
from flatbook.unlearning import unlearn

RETAINED, FORGOTTEN, BATCH = 1920, 128, 64
EPOCHS = {
    "small CNN": ("small-cnn", 16, (3, 32, 32)),
    "MLP": ("mlp", 64, (1, 28, 28)),
}
MAP, DECOMPOSITION = "error map of 400 signal–noise problems", "decomposition of 100 checkpoints"


def epoch_of(network: str) -> str:
    return f"an epoch of unlearning, {network}"


@pytest.mark.parametrize("network", EPOCHS)
@pytest.mark.parametrize("name", ["plain", "NegGrad", "Sharp MinMax"])
def bench_epoch(compare, generator, network, name):
    """Time an epoch; the plain one goes through as many samples as NegGrad's batches hold."""
    kind, width, shape = EPOCHS[network]
    model = build(
        kind, num_classes=10, in_channels=shape[0], input_shape=shape, width=width, seed=0
    )
    x = torch.rand(RETAINED + FORGOTTEN, *shape, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)

    def plain():
        model.train()
        sgd = optimizer(model.parameters())
        for _ in range(2):
            for rows in torch.randperm(RETAINED, generator=generator).split(BATCH):
                sgd.zero_grad()
                loss = cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                sgd.step()
                loss.item()  # as whoever watches for divergence does

    def unlearned(method):
        retain, forget = (x[:RETAINED], y[:RETAINED]), (x[RETAINED:], y[RETAINED:])
        options = {"epochs": 1, "optimizer": optimizer, "batch_size": BATCH, "alpha": 0.99}
        return unlearn(model, retain, forget, method=method, **options)

    contenders = {
        "plain": plain,
        "NegGrad": partial(unlearned, "neg_grad"),
        "Sharp MinMax": partial(unlearned, "sharp_minmax"),
    }
    compare(epoch_of(network), name, contenders[name], rounds=9)


@pytest.mark.parametrize("name", ["gradient descent", "SAM"])
def bench_map(compare, name):
    d = np.repeat(np.geomspace(200, 20_000, 20).round(), 20)
    signal = np.tile(np.linspace(1, 12, 20), 20)
    problems = sample_problems(20, d=d, patches=2, signal=signal, noise=1.0)
    lr = 5.0 / torch.maximum(torch.tensor(d) / 20, torch.tensor(signal) ** 2)
    init = 0.1 / np.sqrt(d)
    radius = 0.0 if name == "gradient descent" else torch.tensor(4 * init * np.sqrt(10 * 20))
    steps = 400 if name == "gradient descent" else 1600
    work = partial(train, problems, steps=steps, lr=lr, radius=radius, stop_loss=0.05)
    compare(MAP, name, work, rounds=3)


def bench_decomposition(compare):
    data = sample(40, d=2000, patches=2, signal=6.0, noise=1.0)
    start = TwoLayerCNN(2000)
    run = train(of_network(start, data), steps=100, lr=0.1, every=1)
    filters = compose(run.path_kappa[:100, 0], run.path_zeta[:100, 0], start, data)

    def work():
        data.__dict__.pop("span", None)  # so that each call factors, once
        return decompose(filters, start, data)

    compare(DECOMPOSITION, "flatbook", work, rounds=9)
