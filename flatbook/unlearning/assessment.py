"""One model, all measures."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flatbook import checks
from flatbook.membership import logit_signal
from flatbook.models import evaluating
from flatbook.unlearning.entanglement import variance_entanglement, wasserstein_entanglement
from flatbook.unlearning.metrics import mia_correctness
from flatbook.unlearning.sets import checked


@dataclass(frozen=True, eq=False)
class Assessment:
    """What a model does on the retained, the forgotten and test data.

    Of no measure but the accuracies on R and test data is more, or less, better in itself: the
    aim is the value of a model retrained without F.

    Attributes:
        accuracy: Under ``"retain"``, ``"forget"`` and ``"test"``.
        mia: The `flatbook.unlearning.mia_correctness` of the scaled logits.
        variance: The `flatbook.unlearning.variance_entanglement` of the features.
        wasserstein: Their `flatbook.unlearning.wasserstein_entanglement`; nan where a point has no
            active feature, and so no direction.
        signals: `flatbook.membership.logit_signal` of the forgotten data, for
            `flatbook.unlearning.u_lira`. Shape ``(forgotten,)``.
    """

    accuracy: dict[str, float]
    mia: float
    variance: float
    wasserstein: float
    signals: np.ndarray

    @property
    def attacked(self) -> dict[str, float]:
        """What ``tug_of_war(..., forget="mia")`` takes: the accuracies and ``"mia"``."""
        return self.accuracy | {"mia": self.mia}


def assess(
    model: nn.Module,
    *,
    retain,
    forget,
    test,
    max_points: int = 500,
    seed: int = 0,
    batch_size: int = 512,
) -> Assessment:
    """Measure a model on all three sets in one pass.

    Args:
        model: Maps inputs to logits through ``features``, the inputs of its last layer, and
            ``head``, as those of `flatbook.models` do; taken in evaluation mode and left untouched.
        retain: A TensorDataset or a pair (x, y).
        forget: Likewise.
        test: Likewise.
        max_points: Features of each set in the entanglements at most.
        seed: Of their choice.
        batch_size: Samples per pass.

    Raises:
        ValueError: If a set is empty or does not fit the model, or a number is out of range.

    Example:
        >>> from flatbook.models import build
        >>> model = build("mlp", num_classes=2, input_shape=(3,), width=4, seed=0)
        >>> x, y = torch.rand(9, 3), torch.arange(9) % 2
        >>> sets = {"retain": (x[:4], y[:4]), "forget": (x[4:6], y[4:6]), "test": (x[6:], y[6:])}
        >>> found = assess(model, **sets)
        >>> sorted(found.accuracy), found.signals.shape
        (['forget', 'retain', 'test'], (2,))
    """
    checks.module("model", model)
    checks.count("max_points", max_points)
    checks.count("batch_size", batch_size)
    for part in ("features", "head"):
        if not hasattr(model, part):
            raise ValueError(
                f"model must have a method features and a layer head; it has no {part}."
            )
    accuracy, signals, features = {}, {}, {}
    for name, data in (("retain", retain), ("forget", forget), ("test", test)):
        (x, y), _ = checked(model, name, data)
        with evaluating(model), torch.no_grad():
            features[name] = torch.cat([model.features(part) for part in x.split(batch_size)])
            logits = model.head(features[name])
        accuracy[name] = float((logits.argmax(dim=1) == y).double().mean())
        signals[name] = logit_signal(logits, y).cpu().numpy()
    random = np.random.default_rng(checks.count("seed", seed, at_least=0))
    pair = []
    for name in ("retain", "forget"):
        rows = features[name].cpu().numpy()
        pair.append(rows[np.sort(random.permutation(len(rows))[:max_points])])
    return Assessment(
        accuracy,
        mia_correctness(signals["retain"], signals["test"], signals["forget"]),
        variance_entanglement(*pair),
        wasserstein_entanglement(*pair) if all(r.any(axis=1).all() for r in pair) else np.nan,
        signals["forget"],
    )
