"""Training data out of trained weights: when they determine it, and how to search for it.

- ``kkt``: the polynomial network, the conditions of Karush, Kuhn and Tucker, and the symmetric
  tensor that the training data make.
- ``fixture``: networks that meet those conditions exactly, in closed form or by Newton's method.
- ``continuation``: the same for samples that are not orthogonal, as far as there is one.
- ``multipliers``: the best multipliers for a given network and data, for any model in torch.
- ``clarke``: the same for a ReLU network, whose derivative at a kink is a whole interval.
- ``tensor``: `recover`, from the weights alone to the samples, or a refusal.
- ``interpolation``: a polynomial map through the values that the weights give; polarization.
- ``gram``: large systems with the Gram matrix of a polynomial kernel.
- ``symmetric``: the same for a symmetric tensor, which fewer neurons determine.
- ``trained``: networks that gradient descent makes, and how many of their neurons count.
- ``minima``: why these are few: local minima of the norm have no more neurons than samples.
- ``survivors``: which samples come back where neurons are too few.
- ``eigenvectors``: the real Z-eigenvectors of a tensor, which are all the neurons there can be.
- ``matching``: which guess shows which sample, and what the same score is worth without an attack.
- ``shallow``: two-layer ReLU networks trained to a stationary direction.
- ``objectives``: how far weights are from the gradients of candidates, for two layers.
- ``double_backward``: the same for any network.
- ``splitting``: where a candidate should become two.
- ``second_order``: a second-order point of the objective by doing so.
- ``attack``: `reconstruct`, the search for samples.
- ``similarity``: correlation, distance and structural similarity of images.
"""

from flatbook.lazy import attach

_NAMES = {
    "kkt": (
        "polynomial_network",
        "moment_tensor",
        "contraction",
        "kkt_residual",
        "KKTConditions",
        "kkt_conditions",
    ),
    "fixture": ("KKTNetwork", "exact_kkt"),
    "continuation": ("Continuation", "continue_kkt"),
    "multipliers": ("Multipliers", "fit_multipliers", "model_multipliers"),
    "clarke": ("ClarkeFit", "relu_multipliers"),
    "tensor": ("IdentifiabilityError", "Recovery", "recover"),
    "interpolation": ("monomial_count", "polarize"),
    "trained": ("train_polynomial", "Path", "ActiveNeurons", "active_neurons", "gram_spectrum"),
    "minima": ("norm_cost", "prune_neurons", "one_neuron"),
    "survivors": ("weighted_kkt", "coverage", "isolation", "Modes", "power_modes"),
    "eigenvectors": ("ZEigenvalues", "z_eigenvalues", "find_z_eigenvectors"),
    "matching": ("Matches", "match", "vote", "baselines"),
    "similarity": ("correlation", "distance", "ssim"),
    "shallow": ("train_two_layer", "row_space", "Training"),
    "objectives": ("TwoLayer", "ShallowObjective"),
    "double_backward": ("NetworkObjective",),
    "splitting": (
        "splitting_matrix",
        "least_curvatures",
        "SampleSplitting",
    ),
    "second_order": ("second_order_point", "SecondOrderPoint"),
    "attack": ("reconstruct", "Reconstruction"),
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, ("symmetric", "gram"))
