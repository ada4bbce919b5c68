"""How well was it forgotten? Each measure says which way is better.

The yardstick is a model trained on the retained data alone. A lower accuracy on the forgotten data
than *its* is no success: who looks finds a hole.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbook import checks, runtime
from flatbook.arrays import returned, signal_array
from flatbook.membership import class_thresholds, lira
from flatbook.models import evaluating
from flatbook.training import epoch_seeds
from flatbook.unlearning.methods import ce, step
from flatbook.unlearning.saliency import builder
from flatbook.unlearning.sets import Pair, batches, checked

SETS = ("retain", "forget", "test")


def accuracies(model: nn.Module, *, batch_size: int = 512, **sets) -> dict[str, float]:
    """Measure the accuracy of a model on named sets.

    Args:
        model: Maps inputs to logits; taken in evaluation mode and left untouched.
        batch_size: Samples per pass.
        **sets: A TensorDataset or a pair (x, y) each, such as ``retain``, ``forget``, ``test``.

    Returns:
        The share of right answers in each set. On ``retain`` and ``test``, higher is better; on
        ``forget``, nearer to that of a retrained model.

    Raises:
        ValueError: If a set is empty or does not fit the model.

    Example:
        >>> x, y = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1])
        >>> accuracies(nn.Identity(), test=(x, y))
        {'test': 0.5}
    """
    checks.module("model", model)
    checks.count("batch_size", batch_size)
    found = {}
    for name, data in sets.items():
        (x, y), _ = checked(model, name, data)
        found[name] = float(right(model, (x, y), batch_size).double().mean())
    return found


@torch.no_grad()
def right(model: nn.Module, data: Pair, batch_size: int = 512) -> Tensor:
    """Return which samples a model gets right. Shape ``(samples,)``."""
    with evaluating(model):
        parts = zip(*(part.split(batch_size) for part in data), strict=True)
        return torch.cat([model(x.clone()).argmax(dim=1) == y for x, y in parts])


def tug_of_war(
    acc: Mapping[str, float],
    acc_retrain: Mapping[str, float],
    *,
    forget: Literal["forget", "mia"] = "forget",
) -> float:
    r"""Compare a model with a retrained one on three sets at once. Higher is better, 1 the best.

    .. math:: \prod_{D \in \{R, F, \text{test}\}}
        \bigl(1 - \lvert a_u(D) - a_{\text{retrain}}(D) \rvert\bigr)

    Some print it times 100. One public code leaves out the absolute values, and can exceed 1.

    Args:
        acc: Accuracies on ``"retain"``, ``"forget"`` and ``"test"``, each in [0, 1].
        acc_retrain: Those of the model retrained without F.
        forget: ``"mia"`` compares the two under that key in place of the accuracy on F, such as
            the success of an attack, in [0, 1]: ToW-MIA.

    Returns:
        In [0, 1].

    Raises:
        ValueError: If a number is missing or not in [0, 1].

    Reference:
        Zhao et al. (2024). What makes unlearning hard and what to do about it. NeurIPS.

    Example:
        >>> retrained = {"retain": 1.0, "forget": 0.5, "test": 0.75}
        >>> tug_of_war({"retain": 0.5, "forget": 1.0, "test": 0.75}, retrained)
        0.25
    """
    checks.choice("forget", forget, ("forget", "mia"))
    product = 1.0
    for key in ("retain", forget, "test"):
        values = []
        for name, given in (("acc", acc), ("acc_retrain", acc_retrain)):
            if not isinstance(given, Mapping) or key not in given:
                held = ", ".join(map(str, given)) if isinstance(given, Mapping) else repr(given)
                raise ValueError(f"{name} must have an entry {key!r}; got {held or 'none'}.")
            values.append(checks.fraction(f"{name}[{key!r}]", given[key]))
        product *= 1 - abs(values[0] - values[1])
    return product


def mia_correctness(retain_signal, test_signal, forget_signal) -> float:
    r"""Measure how much of the forgotten data an attack still takes for members.

    The attack is the threshold that best tells R, members, from test data, none:

    .. math:: \tau = \arg\max_\tau \Pr_R[\phi \ge \tau] - \Pr_{\text{test}}[\phi \ge \tau],
        \qquad \text{result} = \Pr_F[\phi \ge \tau].

    Lower means better hidden, but the aim is the value of a retrained model. Other work prints one
    minus it, the *efficacy*: the share of F taken for non-members. The threshold is chosen on the
    very points of R and the test set.

    Args:
        retain_signal: Higher for members, such as `flatbook.membership.logit_signal`. Shape
            ``(retained,)``.
        test_signal: Of points no model has seen. Shape ``(tested,)``.
        forget_signal: Shape ``(forgotten,)``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: If an array is empty, not one-dimensional or not finite.

    Example:
        The threshold is 2.

        >>> mia_correctness([2.0, 3.0], [0.0, 1.0], [1.5, 2.0, 4.0, 5.0])
        0.75
    """
    retain = signal_array("retain_signal", retain_signal, ("retained",))
    test = signal_array("test_signal", test_signal, ("tested",))
    forget = signal_array("forget_signal", forget_signal, ("forgotten",))
    signals = np.concatenate([retain, test]).astype(np.float64)
    members = np.arange(len(signals)) < len(retain)
    (threshold,) = class_thresholds(signals[None], members[None], np.zeros(len(signals), int))
    return float((forget >= threshold).mean())


def u_lira(
    target_signal,
    unlearned_signals,
    retrained_signals,
    *,
    variance: Literal["per-example", "pooled"] = "per-example",
):
    r"""Ask of each forgotten point whether the model forgot it or never saw it.

    .. math::
        s = \log \frac{N(\phi;\, \mu_{\text{unlearned}}, \sigma_{\text{unlearned}}^2)}
            {N(\phi;\, \mu_{\text{retrained}}, \sigma_{\text{retrained}}^2)}

    with the laws of the point's signal under models that were trained on it and then unlearned it
    by the method under attack, and under models that never saw it. That is
    `flatbook.membership.lira` with the two kinds as its in and out. Higher means forgotten rather
    than never seen; above 0 the attack says so. The method is good if scores of its models and of
    retrained ones cannot be told apart: an area of 0.5 in `flatbook.membership.roc`.

    Args:
        target_signal: Of the model under attack, such as `flatbook.membership.logit_signal`. Shape
            ``(points,)``.
        unlearned_signals: Of other models that unlearned the points. Shape ``(models, points)``.
        retrained_signals: Of models trained without them. Shape ``(models, points)``; the number
            of models may differ.
        variance: A spread for each point needs two models of each kind at least; with few, pool.

    Returns:
        In nats. Shape ``(points,)``.

    Raises:
        ValueError: If the shapes disagree, a signal is not finite, or there are too few models.

    Reference:
        Hayes et al. (2025). Inexact unlearning needs more careful evaluations to avoid a false
        sense of privacy. SaTML; Kurmanji et al. (2023), appendix.

    Example:
        Means 4 and 0, spreads 1, and a signal of 4: half of 4².

        >>> u_lira(np.array([4.0]), np.array([[3.0], [5.0]]), np.array([[-1.0], [1.0]]))
        array([8.])
    """
    target = signal_array("target_signal", target_signal, ("points",))
    seen = signal_array("unlearned_signals", unlearned_signals, ("models", len(target)))
    unseen = signal_array("retrained_signals", retrained_signals, ("models", len(target)))
    shadows = np.concatenate([seen, unseen])
    design = np.repeat([True, False], [len(seen), len(unseen)])[:, None].repeat(len(target), axis=1)
    scores = lira(target, shadows, design, variance=variance)
    return returned(scores, target_signal, unlearned_signals, retrained_signals)


@dataclass(frozen=True)
class Relearning:
    """How fast a forgotten set comes back.

    Attributes:
        epochs: Passes through the set until the accuracy asked for; 0 if the model has it anyway,
            infinity if it was not reached. Lower means less forgotten; the aim is the value of a
            retrained model.
        accuracy: On the set, before the first epoch and after each.
    """

    epochs: float
    accuracy: tuple[float, ...]


def relearning_time(
    model: nn.Module,
    forget,
    *,
    accuracy: float,
    max_epochs: int = 50,
    optimizer: Callable[[list], Optimizer] | None = None,
    batch_size: int = 128,
    seed: int = 0,
) -> Relearning:
    """Train a copy of a model on the forgotten data alone until it knows them again.

    Compare models under the same optimizer, batch size and seed only.

    Args:
        model: Maps inputs to logits; left untouched.
        forget: A TensorDataset or a pair (x, y).
        accuracy: When to stop: the share of right answers in evaluation mode, in [0, 1].
        max_epochs: When to give up.
        optimizer: As for `flatbook.unlearning.unlearn`; None is SGD at 0.01 with momentum 0.9.
        batch_size: Samples per step.
        seed: Of the order and of dropout.

    Raises:
        ValueError: If an argument is out of range, or the data do not fit the model.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> relearning_time(nn.Linear(1, 2), (x, torch.tensor([0, 1])), accuracy=0.0).epochs
        0
    """
    checks.module("model", model)
    goal = checks.fraction("accuracy", accuracy)
    checks.count("max_epochs", max_epochs, at_least=0)
    checks.count("batch_size", batch_size)
    checks.count("seed", seed, at_least=0)
    data, _ = checked(model, "forget", forget)
    student = deepcopy(model)
    parameters = [p for p in student.parameters() if p.requires_grad]
    moving = builder(optimizer)(parameters)
    reached = [float(right(student, data).double().mean())]
    while reached[-1] < goal and len(reached) <= max_epochs:
        order_seed, _, dropout_seed = epoch_seeds(seed, len(reached) - 1)
        student.train()
        with runtime.forked_seed(dropout_seed), torch.enable_grad():
            for rows in batches(len(data[0]), batch_size, runtime.generator(order_seed)):
                batch = tuple(part.index_select(0, rows.to(part.device)) for part in data)
                step(moving, lambda: ce(student, batch))  # noqa: B023 -- used at once
        reached.append(float(right(student, data).double().mean()))
    epochs = len(reached) - 1 if reached[-1] >= goal else math.inf
    return Relearning(epochs, tuple(reached))
