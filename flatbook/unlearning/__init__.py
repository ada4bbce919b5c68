"""Make a trained model forget some of its training data, and measure how well it did.

- ``loop``: `unlearn`, one call for every method; it resumes and survives divergence.
- ``methods``: fine-tuning, NegGrad, random labels, SalUn, L1-sparse and SCRUB, a small class each.
- ``influence``: one Newton step with the WoodFisher recursion.
- ``saliency``: which weights the forgotten data pull at most.
- ``sharp_minmax``: flatten the loss of the retained data, sharpen that of the forgotten.
- ``metrics``: tug-of-war, membership attacks on the forgotten data, relearning time.
- ``entanglement``: how far the features of the two sets are from being apart.
- ``report``: two models side by side, as a table and a figure.
- ``sets``: what may be forgotten, and in which batches.

The reference of all of them is a model trained on the retained data alone.
"""

import importlib

_NAMES = {
    "loop": ("Unlearned", "unlearn"),
    "methods": ("Method",),
    "influence": ("woodfisher",),
    "saliency": ("saliency_mask",),
    "metrics": (
        "accuracies",
        "tug_of_war",
        "mia_correctness",
        "u_lira",
        "Relearning",
        "relearning_time",
    ),
    "entanglement": ("variance_entanglement", "wasserstein_entanglement"),
    "report": ("Report", "compare"),
}
_PARTS = (*_NAMES, "sets", "sharp_minmax")
_HOME = {name: part for part, names in _NAMES.items() for name in names}

__all__ = [*_HOME, *_PARTS]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
