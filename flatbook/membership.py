"""Who was in the training set: signals, attacks and their scores.

Everything is a function of arrays: logits, or one signal per point, of the model under attack (the
target) and of models trained on known subsets of the same points (the shadows or references). The
higher a score, the more likely its point is a member. Inputs may be NumPy arrays or torch tensors;
one number per point comes back in float64, as a tensor on the CPU if any input was a tensor and as
an array otherwise.
"""

import numpy as np

from flatbook.arrays import checked_design, query_mean, returned, signal_array, whole
from flatbook.likelihood import Mode, Variance, Variant, lira, rmia
from flatbook.rates import Rate, Roc, balanced_accuracy, clopper_pearson, cumulated, roc
from flatbook.signals import confidence, logit_signal, modified_entropy

__all__ = [
    "Mode",
    "Rate",
    "Roc",
    "Variance",
    "Variant",
    "balanced_accuracy",
    "class_thresholds",
    "clopper_pearson",
    "confidence",
    "lira",
    "logit_signal",
    "modified_entropy",
    "rmia",
    "roc",
    "threshold_attack",
]


def class_thresholds(shadow_signals, design, labels):
    r"""Choose for each class the threshold that tells members best on the shadow models.

    .. math::
        \tau_c = \arg\max_\tau \; \Pr[\phi \ge \tau \mid \text{in}]
            - \Pr[\phi \ge \tau \mid \text{out}]

    over all pairs of a shadow model and a point of class c. The candidates are the signals
    themselves and ∞, which calls nobody a member; of equally good ones the greatest wins.

    Args:
        shadow_signals: Higher for members, such as :func:`logit_signal` or the negative of
            :func:`modified_entropy`. Queries are averaged. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        labels: The classes of the points. Shape ``(points,)``.

    Returns:
        nan for a class without points. Shape ``(classes,)``, up to the greatest label.

    Raises:
        ValueError: If the shapes disagree, a signal is not finite, or a class is never in or never
            out of the shadows' training sets.

    Reference:
        Song and Mittal (2021). Systematic evaluation of privacy risks of machine learning models.
        USENIX Security.

    Example:
        >>> signals = np.array([[4.0, 1.0], [1.5, 2.0]])
        >>> class_thresholds(signals, np.array([[True, False], [False, True]]), np.zeros(2, int))
        array([2.])
    """
    shadows = signal_array("shadow_signals", shadow_signals, ("models", "points"), queries=True)
    included = checked_design(design, *shadows.shape[:2], least=0)
    classes = whole("labels", labels, (shadows.shape[1],))
    if classes.min() < 0:
        raise ValueError(f"labels must not be negative; got {classes.min()}.")
    shadows = query_mean(shadows, axes=2)
    thresholds = np.full(classes.max() + 1, np.nan)
    for c in np.unique(classes):
        own = classes == c
        flags = included[:, own]
        if flags.all() or not flags.any():
            side = "left out of" if flags.all() else "included in"
            raise ValueError(
                f"design must have points of each class in and out; class {c} is "
                f"{side} no shadow model."
            )
        values, hits, alarms = cumulated(shadows[:, own].ravel(), flags.ravel())
        thresholds[c] = values[np.argmax(hits * alarms[-1] - alarms * hits[-1])]
    return returned(thresholds, shadow_signals, design, labels)


def threshold_attack(target_signal, shadow_signals, design, labels):
    r"""Score points by how far their signal exceeds the threshold of their class.

    .. math:: s = \phi - \tau_y

    with the thresholds of :func:`class_thresholds`, which never saw the target. A point is called a
    member if its score is at least 0; :func:`balanced_accuracy` of that is an honest figure, unlike
    :attr:`Roc.balanced_accuracy`.

    Args:
        target_signal: Signals of the model under attack. Shape ``(points,)`` or
            ``(points, queries)``.
        shadow_signals: Those of the shadow models. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        labels: The classes of the points. Shape ``(points,)``.

    Returns:
        −∞ where the class has threshold ∞. Shape ``(points,)``.

    Raises:
        ValueError: As for :func:`class_thresholds`.

    Example:
        >>> signals = np.array([[4.0, 1.0], [1.5, 2.0]])
        >>> design = np.array([[True, False], [False, True]])
        >>> threshold_attack(np.array([3.0, 1.0]), signals, design, np.zeros(2, int)) >= 0
        array([ True, False])
    """
    target = signal_array("target_signal", target_signal, ("points",), queries=True)
    signal_array("shadow_signals", shadow_signals, ("models", *target.shape))
    thresholds = np.asarray(class_thresholds(shadow_signals, design, labels))
    scores = query_mean(target, axes=1) - thresholds[whole("labels", labels, (len(target),))]
    return returned(scores, target_signal, shadow_signals, design, labels)
