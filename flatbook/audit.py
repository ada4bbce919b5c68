"""Attack every model of an ensemble with the help of the others."""

from collections.abc import Iterator, Sequence

import numpy as np

from flatbook import checks
from flatbook.arrays import as_array, checked_design, listed, whole
from flatbook.membership import (
    confidence,
    lira,
    logit_signal,
    modified_entropy,
    rmia,
    threshold_attack,
)

__all__ = ["ATTACKS", "attack_each", "in_turn"]

ATTACKS = ("confidence", "entropy", "rmia", "lira", "lira-pooled", "lira-offline")
"""The names of the attacks.

``confidence`` and ``entropy`` are `threshold_attack` on `logit_signal` and on the negative
`modified_entropy`; ``lira`` is the online form with a spread for each point, ``lira-pooled`` with
one for all, and ``lira-offline`` the offline form with one for all.
"""


def attack_each(
    logits,
    labels,
    design,
    eval_logits,
    eval_labels,
    *,
    attacks: Sequence[str] = ATTACKS,
    gamma: float = 1.0,
    a: float = 1.0,
) -> dict[str, np.ndarray]:
    """Take each model in turn as the target and all others as its shadow models.

    In a design with each point in exactly half of the models, a member has one shadow model less
    inside than outside, and what is fitted to fewer comes out narrower. Where nothing leaks, that
    pulls the area of ``lira``, and less so of ``lira-pooled``, below one half: by some hundredths
    with 8 models, by hardly any with 32.

    Args:
        logits: Of each model on all points, as in `flatbook.ensembles.Ensemble`. Shape
            ``(models, points, classes)``.
        labels: The classes of the points. Shape ``(points,)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        eval_logits: On points that no model was trained on, the population of
            `flatbook.membership.rmia`; only that reads them. Shape
            ``(models, evaluated, classes)``.
        eval_labels: Their classes. Shape ``(evaluated,)``.
        attacks: Some of :data:`ATTACKS`.
        gamma: Of RMIA.
        a: Of RMIA.

    Returns:
        The scores of each attack, by name, in float64; higher for members. Arrays of shape
        ``(models, points)``.

    Raises:
        ValueError: If the shapes disagree, a logit is not finite, an attack is unknown, a point is
            in or out of fewer than two models, or three for ``lira``, or what remains without a
            target does not do for one of the attacks, see their pages.

    Example:
        Every model is surer of what it has seen.

        >>> from flatbook import balanced_design, roc
        >>> design, labels = balanced_design(8, 20), np.arange(20) % 2
        >>> logits = np.zeros((8, 20, 2))
        >>> logits[:, np.arange(20), labels] = 1.0 + design
        >>> scores = attack_each(logits, labels, design, logits, labels)
        >>> roc(scores["confidence"], design).auc
        1.0
    """
    attacks = checks.words("attacks", attacks, ATTACKS)
    logits = as_array("logits", logits, ("models", "points", "classes"))
    models, points, classes = logits.shape
    labels = whole("labels", labels, (points,))
    signals = logit_signal(logits, labels)
    included = checked_design(design, models, points, least=3 if "lira" in attacks else 2)
    entropies = -modified_entropy(logits, labels) if "entropy" in attacks else None
    if "rmia" in attacks:
        eval_logits = as_array("eval_logits", eval_logits, (models, "evaluated", classes))
        evaluated = eval_logits.shape[1]
        eval_labels = checks.labels(
            "eval_labels", listed("eval_labels", eval_labels), classes, samples=evaluated
        )
        confidences = confidence(logits, labels)
        population = confidence(eval_logits, eval_labels.cpu().numpy())
    found = {attack: np.empty((models, points)) for attack in attacks}
    for target, others in in_turn(models):
        own, shadows, seen = signals[target], signals[others], included[others]
        for attack, scores in found.items():
            if attack == "confidence":
                scores[target] = threshold_attack(own, shadows, seen, labels)
            elif attack == "entropy":
                scores[target] = threshold_attack(
                    entropies[target], entropies[others], seen, labels
                )
            elif attack == "rmia":
                scores[target] = rmia(
                    confidences[target],
                    confidences[others],
                    seen,
                    population[target],
                    population[others],
                    gamma=gamma,
                    a=a,
                )
            else:
                scores[target] = lira(
                    own,
                    shadows,
                    seen,
                    mode="offline" if attack == "lira-offline" else "online",
                    variance="per-example" if attack == "lira" else "pooled",
                    log=True,
                )
    return found


def in_turn(models: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each model's number with those of all others.

    Example:
        >>> [(target, others.tolist()) for target, others in in_turn(3)]
        [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])]
    """
    for target in range(models):
        yield target, np.delete(np.arange(models), target)
