"""PGD beside public libraries at the same robust accuracy, its record, and certificates."""

import foolbox
import pytest
import torch
import torchattacks

from flatbook import TrainConfig, build, certified_radius, fit, pgd
from flatbook.data import load

IMAGES, STEPS, EPSILON, STEP = 500, 40, 8 / 255, 2 / 255
ATTACK, CERTIFICATE = "PGD-40, small CNN, 500 images", "certified radius, 10,000 samples"
ROUNDS = 5


@pytest.fixture(scope="module")
def victim():
    """Return a small CNN that knows Fashion-MNIST, and images that it was not shown."""
    data = load("fashion-mnist", n_train=2000, n_test=IMAGES)
    model = build("small-cnn", num_classes=10, in_channels=1, width=16, seed=0)
    config = TrainConfig(epochs=8, batch_size=64, lr=0.05)
    fit(model, data.train.x, data.train.y, config, device="cpu", progress=False)
    return model, data.test.x, data.test.y


def ours(model, x, y, **options):
    attack = pgd(model, x, y, norm="linf", epsilon=EPSILON, step_size=STEP, steps=STEPS, **options)
    return attack.x_adv


def recorded(model, x, y):
    return ours(model, x, y, record=True)


def theirs(model, x, y):
    attack = torchattacks.PGD(model, eps=EPSILON, alpha=STEP, steps=STEPS, random_start=False)
    return attack(x, y)


def foolboxes(model, x, y):
    attack = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS, random_start=False)
    return attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=EPSILON)[1]


CONTENDERS = {
    "flatbook": ours,
    "flatbook, recording": recorded,
    "torchattacks": theirs,
    "foolbox": foolboxes,
}


@pytest.mark.parametrize("name", CONTENDERS)
def bench_pgd(compare, benchmark, victim, name):
    model, x, y = victim
    found = compare(ATTACK, name, lambda: CONTENDERS[name](model, x, y), rounds=ROUNDS)
    clean, robust, expected = (hits(model, inputs, y) for inputs in (x, found, ours(*victim)))
    assert robust < clean - 50  # it is an attack
    assert abs(robust - expected) <= 1  # as good as each other's, up to one image
    assert (found - x).abs().max() <= EPSILON + 1e-6
    benchmark.extra_info["robust_accuracy"] = robust / len(x)


def hits(model, x, y):
    with torch.no_grad():
        return int((model(x).argmax(dim=1) == y).sum())


def bench_certificate(compare, generator):
    """From the outputs of a forward pass: 64 features, 10 classes."""
    samples = 10_000
    weight, bias = torch.randn(10, 64, generator=generator), torch.randn(10, generator=generator)
    features = torch.rand(samples, 64, generator=generator)
    labels = (features @ weight.T + bias).argmax(dim=1)
    labels[::7] = (labels[::7] + 1) % 10  # some are wrong

    def certify():
        return certified_radius(weight, features, labels, 0.5, 3.0, bias=bias)

    found = compare(CERTIFICATE, "flatbook", certify, rounds=15)
    assert found.shape == (samples,)
    assert (found > 0).all()
