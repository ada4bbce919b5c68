"""NegGrad and Sharp MinMax on a residual network, tuned alike.

The same as `flatbook.experiments.unlearning`, on one forget set and without its sweeps;
memorization is estimated with the small network, as one does where the large one is dear.
"""

from flatbook.experiments.unlearning import Config, run

__all__ = ["CONFIGS", "Config", "run"]

_ALONE = {
    "methods": ("neg_grad", "sharp_minmax"),
    "optimizers": ("sgd", "asam"),
    "sets": ("high",),
    "pretraining": ("sgd",),
    "variants": (),
}
CONFIGS = {
    "quick": Config(
        seeds=3, dataset="fashion-mnist", images=120, tests=100, share=0.05, model="resnet18",
        width=4, epochs=2, lr=0.05, batch_size=32, unlearn_epochs=1, trials=1, scorers=10,
        scorer=("mlp", 32), scorer_epochs=10, relearn_epochs=2, **_ALONE,
    ),
    "laptop": Config(
        seeds=3, dataset="cifar10", images=640, tests=1000, share=0.05, model="resnet18",
        width=16, epochs=14, lr=0.1, batch_size=64, unlearn_epochs=2, trials=3, scorers=24,
        scorer=("small-cnn", 16), scorer_epochs=40, **_ALONE,
    ),
    "gpu": Config(
        seeds=3, dataset="cifar100", images=50_000, tests=10_000, share=0.05, model="resnet18",
        width=64, epochs=100, lr=0.1, batch_size=128, unlearn_epochs=5, trials=6, scorers=100,
        scorer=("small-cnn", 64), scorer_epochs=60, **_ALONE,
    ),
}  # fmt: skip
