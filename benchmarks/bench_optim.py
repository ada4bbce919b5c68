"""Steps of the optimizers on the small CNN, batch 128."""

import pytest
import torch
from pytorch_optimizer import SAM as PeerSAM
from torch.nn.functional import cross_entropy

from flatbook import SAM, LookSAM, build

STEPS = 5  # one cycle of LookSAM


@pytest.mark.parametrize("name", ["plain", "flatbook SAM", "pytorch_optimizer SAM", "LookSAM, k=5"])
def bench_step(compare, generator, name):
    model = build("small-cnn", num_classes=10, in_channels=1, width=32, seed=0).train()
    x = torch.rand(128, 1, 28, 28, generator=generator)
    y = torch.randint(10, (128,), generator=generator)

    def sgd():
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    if name == "pytorch_optimizer SAM":
        optimizer = PeerSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=1e-3, momentum=0.9)

        def second():  # this peer wants the first gradient in place before its step
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        def step():
            optimizer.zero_grad()
            second()
            return optimizer.step(second)

    else:
        optimizer = {
            "plain": sgd,
            "flatbook SAM": lambda: SAM(sgd(), model=model),
            "LookSAM, k=5": lambda: LookSAM(sgd(), model=model, k=5),
        }[name]()

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        def step():
            return optimizer.step(closure)

    def cycle():
        for _ in range(STEPS):
            step()

    compare("five steps, small CNN, batch 128", name, cycle, rounds=25, warmup=3)
