"""Models of learning small enough to be solved on paper, in float64.

``flatbook.theory.linear`` holds interpolating linear models: what a penalty on curvature does to
the outputs of unseen samples, and what an attacker gains by it. ``flatbook.theory.signal_noise``
holds the two-layer network that learns a signal and memorizes noise, in torch.
"""

from flatbook.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {}, ("linear", "signal_noise"))
