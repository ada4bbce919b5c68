"""Make a trained model forget some of its training data, and measure how well it did.

- ``loop``: `unlearn`, one call for every method; it resumes and survives divergence.
- ``methods``: fine-tuning, NegGrad, random labels, SalUn, L1-sparse and SCRUB, a small class each.
- ``influence``: one Newton step with the WoodFisher recursion.
- ``saliency``: which weights the forgotten data pull at most.
- ``sharp_minmax``: flatten the loss of the retained data, sharpen that of the forgotten.
- ``metrics``: tug-of-war, membership attacks on the forgotten data, relearning time.
- ``entanglement``: how far the features of the two sets are from being apart.
- ``assessment``: all measures of one model in one call.
- ``report``: two models side by side, as a table and a figure.
- ``sets``: what may be forgotten, and in which batches.

The reference of all of them is a model trained on the retained data alone.
"""

from flatbook.lazy import attach

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
    "assessment": ("Assessment", "assess"),
    "report": ("Report", "compare"),
    "sets": ("by_memorization",),
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, ("sharp_minmax",))
