"""Curvature: the closed form and our matrix-free estimates beside public libraries."""

import pytest
import torch
from curvlinops import HessianLinearOperator, hutchinson_trace
from pyhessian import hessian as PyHessian
from torch import nn
from torch.nn.functional import cross_entropy

from flatbook import build, full_trace, hessian_trace

SAMPLES, CLASSES, PROBES = 1800, 10, 100
WIDTHS = (16, 32, 64, 128, 256)


def head_problem(width, generator):
    features = torch.rand(SAMPLES, width, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(width, CLASSES, bias=False)
    return head, features, labels


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["closed form", "autograd Hessian", "PyHessian", "curvlinops"])
def bench_last_layer_trace(compare, benchmark, generator, name, width):
    head, features, labels = head_problem(width, generator)
    logits = head(features).detach()
    weight = head.weight.detach()

    def closed_form():
        return hessian_trace(features, logits).mean()

    def autograd():
        dense = torch.func.hessian(lambda w: cross_entropy(features @ w.T, labels))(weight)
        return dense.reshape(weight.numel(), -1).trace()

    def pyhessian():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            estimator = PyHessian(head, cross_entropy, data=(features, labels), cuda=False)
            estimates = estimator.trace(maxIter=PROBES, tol=float("-inf"))
        head.zero_grad(set_to_none=True)
        return sum(estimates) / len(estimates)

    def curvlinops():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            operator = HessianLinearOperator(
                head,
                nn.CrossEntropyLoss(),
                list(head.parameters()),
                [(features, labels)],
                check_deterministic=False,
            )
            return hutchinson_trace(operator, num_matvecs=PROBES)

    contenders = {
        "closed form": closed_form,
        "autograd Hessian": autograd,
        "PyHessian": pyhessian,
        "curvlinops": curvlinops,
    }
    exact = float(closed_form())
    rounds = 50 if name == "closed form" else 3
    found = compare(f"last-layer trace, m={width}", name, contenders[name], rounds=rounds)
    error = abs(float(found) / exact - 1)
    assert error < (1e-4 if name == "autograd Hessian" else 0.2)
    benchmark.extra_info["relative_error"] = error


@pytest.mark.parametrize("name", ["forward pass", "trace from its outputs"])
def bench_trace_on_top_of_forward(compare, generator, name):
    """``width=64`` gives 256 features."""
    model = build("small-cnn", num_classes=CLASSES, in_channels=1, width=64, seed=0).eval()
    x = torch.rand(SAMPLES, 1, 28, 28, generator=generator)

    @torch.no_grad()
    def forward():
        features = model.features(x)
        return features, model.head(features)

    outputs = forward()
    function = forward if name == "forward pass" else lambda: hessian_trace(*outputs)
    compare("trace beside the forward pass", name, function, rounds=15)


def network(generator):
    model = build("small-cnn", num_classes=CLASSES, in_channels=1, width=16, seed=0).eval()
    x = torch.rand(512, 1, 28, 28, generator=generator)
    y = torch.randint(CLASSES, (512,), generator=generator)
    return model, x, y


@pytest.mark.parametrize("name", ["flatbook", "PyHessian", "curvlinops"])
def bench_full_trace(compare, generator, name):
    """Twenty Hessian–vector products of the whole small CNN each, forward pass included."""
    model, x, y = network(generator)
    products = 20

    def flatbook():
        return full_trace(model, x, y, probes=products).value

    def pyhessian():
        estimates = PyHessian(model, cross_entropy, data=(x, y), cuda=False).trace(
            maxIter=products, tol=float("-inf")
        )
        model.zero_grad(set_to_none=True)
        return sum(estimates) / len(estimates)

    def curvlinops():
        operator = HessianLinearOperator(
            model,
            nn.CrossEntropyLoss(),
            [p for p in model.parameters() if p.requires_grad],
            [(x, y)],
            check_deterministic=False,
        )
        return hutchinson_trace(operator, num_matvecs=products)

    contenders = {"flatbook": flatbook, "PyHessian": pyhessian, "curvlinops": curvlinops}
    compare("full-model trace, 20 products", name, contenders[name], rounds=7)
