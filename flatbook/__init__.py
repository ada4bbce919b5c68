"""Flat minima, measured. Names load on first use, so importing this stays light."""

from flatbook.lazy import attach

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
    "checks",
    "cli",
    "experiments",
    "files",
    "notebook",
    "plotting",
    "theory",
    "units",
)

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, _MODULES)
__version__ = "0.1.0"
