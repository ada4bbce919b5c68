"""Attacks, what happens along them, and how to tell masked gradients from robustness."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flatbook import checks
from flatbook.attacks import (
    AttackLoss,
    dlr_loss,
    log_odds,
    margin,
    pgd,
    zero_gradient_share,
)
from flatbook.blackbox import auto_attack, random_search
from flatbook.curvature import refused_by_name
from flatbook.masking import MaskingReport, masking_report, saturated
from flatbook.models import Classifier, headed
from flatbook.sharpness import SharpnessKind, doubt, relative_sharpness
from flatbook.threat import Attack, Norm, input_gradient, refuse_another_type, refuse_training

__all__ = [
    "Attack",
    "AttackLoss",
    "Detection",
    "MaskingReport",
    "Norm",
    "Walk",
    "auto_attack",
    "detect",
    "dlr_loss",
    "first_step",
    "input_gradient",
    "log_odds",
    "margin",
    "masking_report",
    "pgd",
    "random_search",
    "saturated",
    "scaled",
    "walk",
    "zero_gradient_share",
]


def scaled(model: Classifier, s: float) -> Classifier:
    r"""Return a copy of a classifier whose head, weight and bias, is multiplied by s.

    The logits become :math:`s\,z`, so every input keeps its class, its margin in the input space
    and its adversarial examples; only the confidence changes. (Scaling the weight alone would
    give another classifier.)

    Args:
        model: Has ``features`` and a linear ``head``; it is left as it is.
        s: Above 0.

    Raises:
        ValueError: If ``model`` has no linear head, its head computes something of its own, or
            ``s`` is out of range.

    Example:
        >>> from flatbook.models import build
        >>> model, x = build("mlp", num_classes=3, input_shape=(4,), seed=0), torch.rand(5, 4)
        >>> torch.allclose(scaled(model, 10)(x), 10 * model(x), atol=1e-5)
        True
    """
    checks.module("model", model)
    s = checks.positive("s", s)
    if not isinstance(getattr(model, "head", None), nn.Linear):
        raise ValueError(f"model must have a linear head to scale; got {type(model).__name__}.")
    if type(model.head).forward is not nn.Linear.forward:
        raise ValueError(
            "model must have a head that is linear in its weight; "
            f"{type(model.head).__name__} has a forward of its own."
        )
    head = {"weight": model.head.weight, "bias": model.head.bias}
    head = {name: value.detach() for name, value in head.items() if value is not None}
    values = {name: s * value for name, value in head.items()}
    for name, value in values.items():
        if not value.isfinite().all() or value.any() != head[name].any():
            raise ValueError(
                f"s must neither make the {name} of the head infinite in {value.dtype} nor round "
                f"all of it to 0; got {s:g}."
            )
    twin = copy.deepcopy(model)
    shape = (model.head.in_features, model.head.out_features)
    # On the meta device no weights are drawn.
    twin.head = nn.Linear(*shape, bias="bias" in head, device="meta").train(model.head.training)
    for name, value in values.items():
        trainable = getattr(model.head, name).requires_grad
        setattr(twin.head, name, nn.Parameter(value, trainable))
    return twin


@dataclass(frozen=True)
class Walk:
    """A classifier's view along a path of inputs, each array of shape ``(steps, samples)``.

    Attributes:
        loss: The cross-entropy in nats.
        sharpness: The relative sharpness of the last layer in nats.
        doubt: One minus the confidence, see :func:`flatbook.sharpness.doubt`.
        predicted: The predicted class.
        right: Whether that is the label.
    """

    loss: Tensor
    sharpness: Tensor
    doubt: Tensor
    predicted: Tensor
    right: Tensor

    @property
    def flipped(self) -> Tensor:
        """The first step at which the prediction is wrong; -1 if none. Shape ``(samples,)``."""
        return first_step(~self.right)

    @property
    def peak(self) -> Tensor:
        """The step at which the sharpness is greatest. Shape ``(samples,)``."""
        return self.sharpness.argmax(dim=0)


@torch.no_grad()
def walk(
    model: Classifier,
    path: Tensor,
    y: Tensor,
    *,
    kind: SharpnessKind = "neuronwise",
    batch_size: int = 512,
) -> Walk:
    """Look at a classifier along the path of an attack.

    Args:
        model: Has ``features`` and a linear ``head``; in evaluation mode.
        path: Inputs, such as :func:`pgd` records. Shape ``(steps, samples, ...)``.
        y: The labels. Shape ``(samples,)``.
        kind: Of relative sharpness, see :func:`flatbook.sharpness.relative_sharpness`.
        batch_size: Inputs per pass.

    Returns:
        Loss, sharpness, doubt and predictions. Each of shape ``(steps, samples)``.

    Raises:
        ValueError: If the model is in training mode or has no linear head, or the shapes disagree.

    Example:
        >>> from flatbook.models import build
        >>> model = build("mlp", num_classes=3, input_shape=(4,), seed=0).eval()
        >>> walk(model, torch.rand(6, 5, 4), torch.zeros(5).long()).loss.shape
        torch.Size([6, 5])
    """
    checks.count("batch_size", batch_size)
    refuse_training(headed(model))
    axes = max(getattr(path, "ndim", 3), 3)
    path = checks.tensor("path", path, ("steps", "samples", *[None] * (axes - 2)))
    steps, samples = path.shape[:2]
    refuse_another_type(model, path, name="path")
    one = path[0, :1]
    refused_by_name(lambda x: model.head(model.features(x)), one, name="path", size=samples)
    labels = checks.labels("y", y, model.head.out_features, samples=samples).to(path.device)
    columns = {name: [] for name in ("loss", "sharpness", "doubt", "predicted")}
    for x, own in zip(
        path.flatten(0, 1).split(batch_size), labels.repeat(steps).split(batch_size), strict=True
    ):
        features = model.features(x.clone())  # a copy, for it may work in place
        logits = model.head(features)
        losses = nn.functional.cross_entropy(logits, own, reduction="none")
        columns["loss"].append(losses)
        columns["sharpness"].append(
            relative_sharpness(model.head.weight, features, logits, kind=kind)
        )
        columns["doubt"].append(doubt(logits))
        columns["predicted"].append(logits.argmax(dim=1))
    table = {name: torch.cat(parts).view(steps, samples) for name, parts in columns.items()}
    return Walk(**table, right=table["predicted"] == labels)


def first_step(happened: Tensor) -> Tensor:
    """Return the first step at which something happened, -1 if it never does.

    Args:
        happened: True or False. Shape ``(steps, samples)``.

    Returns:
        Shape ``(samples,)``.

    Example:
        >>> first_step(torch.tensor([[False, False], [True, False], [True, False]]))
        tensor([ 1, -1])
    """
    happened = checks.tensor("happened", happened, ("steps", "samples"), floating=False).bool()
    return torch.where(happened.any(dim=0), happened.long().argmax(dim=0), -1)


@dataclass(frozen=True)
class Detection:
    """How well a threshold on one number tells clean inputs from attacked ones.

    Attributes:
        accuracies: The accuracy of a decision stump on each held-out fold.
        auc: Area under the ROC curve of "lower is attacked" or "higher is attacked", whichever
            the sign says: above .5 where attacked inputs tend to have greater values.
    """

    accuracies: tuple[float, ...]
    auc: float


def detect(clean, attacked, *, folds: int = 5, seed: int = 0) -> Detection:
    """Cross-validate a decision stump that tells attacked inputs by one number, such as sharpness.

    A clean input and its attacked twin stay in the same fold.

    Args:
        clean: The number at each clean input, tensor or array. Shape ``(samples,)``.
        attacked: The number at each attacked twin. Shape ``(samples,)``.
        folds: How many.
        seed: Of the assignment to folds.

    Returns:
        The accuracy on each fold, and the area under the ROC curve.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or there are fewer samples than
            folds.

    Example:
        >>> detect(torch.zeros(10), torch.ones(10)).accuracies
        (1.0, 1.0, 1.0, 1.0, 1.0)
        >>> detect(torch.arange(4.0), torch.arange(4.0), folds=2).auc
        0.5
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_score
    from sklearn.tree import DecisionTreeClassifier

    clean = checks.tensor("clean", clean, ("samples",)).detach().double().cpu()
    attacked = checks.tensor("attacked", attacked, (len(clean),)).detach().double().cpu()
    checks.count("folds", folds, at_least=2, at_most=len(clean))
    checks.count("seed", seed, at_least=0, at_most=2**32 - 1)
    values = torch.cat([clean, attacked]).numpy()
    # Trees compare in float32, in which the sharpness of confident inputs would be 0: take ranks.
    ranks = np.unique(values, return_inverse=True)[1]
    truth = np.repeat([0, 1], len(clean))
    groups = np.tile(np.arange(len(clean)), 2)
    accuracies = cross_val_score(
        DecisionTreeClassifier(max_depth=1, random_state=seed),
        ranks[:, None],
        truth,
        groups=groups,
        cv=GroupKFold(folds, shuffle=True, random_state=seed),
    )
    return Detection(tuple(map(float, accuracies)), float(roc_auc_score(truth, ranks)))
