"""Flat minima, measured. Names load on first use, so importing this stays light."""

import importlib

_NAMES = {
    "runtime": ("device", "scale", "seed_everything"),
    "data": ("load",),
    "models": ("build",),
    "sharpness": (
        "last_layer_hessian",
        "hessian_trace",
        "doubt",
        "hessian_eigenvalues",
        "relative_sharpness",
        "full_trace",
        "top_eigenvalue",
        "loss_landscape",
    ),
    "optim": ("SAM", "ASAM", "GSAM", "LookSAM", "MicroBatchSAM", "SharpnessMax"),
    "training": ("TrainConfig", "fit"),
    "ensembles": ("balanced_design", "subset_design", "train_ensemble"),
    "adversarial": ("pgd", "scaled", "masking_report", "zero_gradient_share", "walk", "detect"),
    "certificates": ("lipschitz_bound", "loss_bound", "certified_radius", "margin_radius"),
    "language": ("load_smollm2",),
    "prompts": ("suffix_search", "token_sharpness", "curvature_split"),
    "membership": ("logit_signal", "modified_entropy", "lira", "rmia", "roc"),
    "memorization": ("influence", "influence_entropy", "buckets"),
    "audit": ("attack_each",),
    "comparison": ("resamples", "mean_auc", "pooled_tpr"),
    "unlearning": ("unlearn",),
    "results": ("load_result",),
}
_MODULES = (
    *_NAMES,
    "checks",
    "cli",
    "experiments",
    "files",
    "notebook",
    "plotting",
    "theory",
    "units",
)
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOME, *_MODULES]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"flatbook.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"flatbook.{name}")
    raise AttributeError(f"module 'flatbook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
