"""Signals of membership: one number for how well a model knows a labelled point."""

import numpy as np
import torch
from torch import Tensor

from flatbook import checks
from flatbook.arrays import listed, returned

__all__ = ["confidence", "logit_signal", "modified_entropy"]

_BLOCK = 16_384  # predictions taken at a time


def logit_signal(logits, labels):
    r"""Compute the log-odds of the label, the signal that is closest to normal across models.

    .. math:: \phi = \log \frac{p_y}{1 - p_y} = z_y - \log \sum_{i \ne y} e^{z_i}

    Probabilities are never formed: 1 − p rounds to 0 once a model is certain.

    Args:
        logits: Shape ``(points, classes)``, ``(points, queries, classes)``,
            ``(models, points, classes)`` or ``(models, points, queries, classes)``. Three axes are
            models first if the second is as long as ``labels``.
        labels: The true classes. Shape ``(points,)``, or that of the logits less the classes.

    Returns:
        In nats. The shape of the logits less the classes.

    Raises:
        ValueError: If the shapes disagree, there is a single class, a label is not one, or a logit
            is infinite or nan.

    Reference:
        Carlini et al. (2022). Membership inference attacks from first principles. IEEE S&P.

    Example:
        >>> logit_signal(np.array([[0.0, 0.0], [60.0, 0.0]]), np.array([1, 0]))
        array([ 0., 60.])
    """

    def log_odds(z, y):
        return z.gather(1, y)[:, 0] - _log_sum_without(z, y)

    return _by_rows(log_odds, logits, labels)


def confidence(logits, labels):
    """Compute the probability of the label, from the logits and in float64.

    Args:
        logits: As for :func:`logit_signal`.
        labels: As for :func:`logit_signal`.

    Returns:
        Between 0 and 1. The shape of the logits less the classes.

    Raises:
        ValueError: As for :func:`logit_signal`.

    Example:
        >>> confidence(np.zeros((1, 4)), np.array([2]))
        array([0.25])
    """

    def own_probability(z, y):
        return z.log_softmax(1).gather(1, y)[:, 0].exp()

    return _by_rows(own_probability, logits, labels)


def modified_entropy(logits, labels):
    r"""Compute the entropy of a prediction, modified so that it knows the label.

    .. math::
        -(1 - p_y) \log p_y - \sum_{i \ne y} p_i \log (1 - p_i)

    It is 0 for a prediction that is certain and right, and grows without bound for one that is
    certain and wrong. Higher is more uncertain: the score of its attack is the negative.

    Args:
        logits: As for :func:`logit_signal`.
        labels: As for :func:`logit_signal`.

    Returns:
        In nats, at least 0. The shape of the logits less the classes.

    Raises:
        ValueError: As for :func:`logit_signal`.

    Reference:
        Song and Mittal (2021). Systematic evaluation of privacy risks of machine learning models.
        USENIX Security.

    Example:
        Two classes, undecided: each term is log(2) / 2.

        >>> modified_entropy(np.zeros((1, 2)), np.array([0])) / np.log(2)
        array([1.])
    """

    def entropy(z, y):
        log_p = z.log_softmax(1)
        # For the top class the complement is the sum of the others, and p is one less that sum.
        top = z.argmax(1, keepdim=True)
        doubt = (_log_sum_without(z, top) - z.logsumexp(1))[:, None]
        log_rest = (-log_p.exp()).log1p().scatter(1, top, doubt)
        log_p = log_p.scatter(1, top, (-doubt.exp()).log1p())
        own = log_rest.gather(1, y).exp() * log_p.gather(1, y)
        others = (log_p.exp() * log_rest).scatter(1, y, 0.0)
        return -(own[:, 0] + others.sum(1))

    return _by_rows(entropy, logits, labels)


def _by_rows(function, logits, labels):
    """Apply a function of float64 logits and labels a block at a time; the logits may be many."""
    z, labels_given = listed("logits", logits), listed("labels", labels)
    axes = np.ndim(z)
    z = checks.tensor("logits", z, (*(None,) * (min(max(axes, 2), 4) - 2), "points", "classes"))
    z = z.detach().cpu()
    *shape, classes = z.shape
    if classes < 2:
        raise ValueError(f"logits must have at least 2 classes; got {classes}.")
    if len(shape) == 1 or np.ndim(labels_given) == len(shape):
        y = checks.tensor("labels", labels_given, tuple(shape), floating=False)
        y = checks.labels("labels", y.reshape(-1), classes)
    else:
        models_first = axes == 4 or np.shape(labels_given) == (shape[1],)
        points = shape[models_first]
        y = checks.labels("labels", labels_given, classes, samples=points)
        y = y.view(*(1,) * models_first, points, *(1,) * (axes - 2 - models_first))
        y = y.expand(shape).reshape(-1)
    values = [
        function(some.double(), own[:, None])
        for some, own in zip(
            z.reshape(-1, classes).split(_BLOCK), y.cpu().split(_BLOCK), strict=True
        )
    ]
    return returned(torch.cat(values).view(shape).numpy(), logits, labels)


def _log_sum_without(z: Tensor, index: Tensor) -> Tensor:
    return z.scatter(1, index, -torch.inf).logsumexp(1)
