"""Models of learning small enough to be solved on paper, in float64.

``flatbook.theory.linear`` holds interpolating linear models: what a penalty on curvature does to
the outputs of unseen samples, and what an attacker gains by it. ``flatbook.theory.signal_noise``
holds the two-layer network that learns a signal and memorizes noise, in torch.
"""

import importlib

_PARTS = ("linear", "signal_noise")

__all__ = [*_PARTS]


def __getattr__(name: str):
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
