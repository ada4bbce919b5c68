r"""How far weights are from the gradients of candidate samples: what a search brings down.

.. math::
    L(x, \lambda) = \Bigl\| \vartheta - \sum_i \lambda_i \, g(x_i) \Bigr\|^2 , \qquad
    g(x_i) = \nabla_\theta \langle c_i, \Phi(\theta; x_i) \rangle ,

with candidates :math:`x_i`, multipliers :math:`\lambda_i`, and a **code** :math:`c_i` that picks
the margin out of the outputs: the label for one output, and :math:`e_y - e_j` for several, with
the runner-up :math:`j \ne y`. The target ϑ tells three attacks apart:

- the weights themselves, for a network trained to a KKT point (one output), with several classes
  or with weight decay (there the condition :math:`\vartheta \propto \sum_i \lambda_i g(x_i)` is
  that of any stationary point);
- the weights less their start, for an attacker who knows the initialization.

A second derivative in x must exist, so ReLU is replaced in the attack by
:math:`\sigma_\tau(z) = \log(1 + e^{\tau z}) / \tau`, whose derivative is the sigmoid of τz.

An objective has three methods, ``loss`` (differentiable), ``gradients`` (the loss and its
gradients in candidates and multipliers) and ``splitting`` (the products :math:`S_i v_i` with the
matrices of `flatbook.reconstruction.splitting`).
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatbook import checks


class TwoLayer(NamedTuple):
    r"""Weights of a network :math:`\Phi(x) = V [W x + c]_+`, with no bias in the second layer.

    Attributes:
        W: First layer. Shape ``(neurons, inputs)``.
        bias: c. Shape ``(neurons,)``.
        V: Second layer. Shape ``(outputs, neurons)``.
    """

    W: Tensor
    bias: Tensor
    V: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Return the outputs. Shape ``(samples, outputs)``."""
        return (X @ self.W.T + self.bias).clamp(min=0) @ self.V.T

    def minus(self, other: "TwoLayer") -> "TwoLayer":
        """Return the difference, layer by layer."""
        return TwoLayer(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def size(self) -> float:
        """Return the norm of all weights together."""
        return math.sqrt(sum(float(part.double().square().sum()) for part in self))


def codes(outputs: Tensor, labels: Tensor) -> Tensor:
    r"""Return what picks each candidate's margin out of the outputs.

    Args:
        outputs: Shape ``(candidates, outputs)``.
        labels: For one output −1 and 1, or any weights; for several the classes. Shape
            ``(candidates,)``.

    Returns:
        :math:`y_i`, or :math:`e_{y_i} - e_j` with the largest other output j. Shape
        ``(candidates, outputs)``.

    Raises:
        ValueError: If a label is none of several outputs.

    Example:
        >>> codes(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.tensor([0, 1]))
        tensor([[ 1.,  0., -1.],
                [-1.,  1.,  0.]])
    """
    if outputs.shape[1] == 1:
        return labels.to(outputs)[:, None]
    labels = checks.labels("labels", labels, outputs.shape[1], samples=len(outputs))
    rows = torch.arange(len(outputs), device=outputs.device)
    found, rival = torch.zeros_like(outputs), outputs.detach().clone()
    rival[rows, labels] = -torch.inf
    found[rows, labels] = 1.0
    found[rows, rival.argmax(dim=1)] = -1.0
    return found


class ShallowObjective:
    r"""The objective of a two-layer network, from inner products of candidates alone.

    With :math:`z_i = W x_i + c`, heads :math:`A_i = V^\top c_i`, slopes :math:`B_i = A_i \odot
    \sigma'(z_i)` and :math:`\tilde x = (x, 1)`, the tangent kernel of the network is

    .. math:: K_{ik} = \langle g(x_i), g(x_k) \rangle = \langle \tilde x_i, \tilde x_k \rangle
        \langle B_i, B_k \rangle + \langle c_i, c_k \rangle \langle \sigma(z_i), \sigma(z_k) \rangle

    and :math:`L = \|\vartheta\|^2 - 2 \lambda^\top G + \lambda^\top K \lambda` with
    :math:`G_i = \langle \vartheta, g(x_i) \rangle`. No gradient of the size of the weights is ever
    formed, and the gradients of L are written out.

    Args:
        network: The weights that the attacker has.
        start: Their initialization, if the attacker knows it.
        sharpness: τ of the smooth ReLU; infinite for ReLU itself, which has no second derivative.

    Raises:
        ValueError: If shapes disagree or a number is not finite.

    Example:
        One neuron, one candidate: the gradient is (σ'(z) x, σ'(z), σ(z)) with z = 2.

        >>> network = TwoLayer(torch.tensor([[2.0]]), torch.zeros(1), torch.ones(1, 1))
        >>> objective = ShallowObjective(network, sharpness=float("inf"))
        >>> x, one = torch.ones(1, 1), torch.ones(1)
        >>> objective.loss(x, one, one).item()  # |(2, 0, 1) - (1, 1, 2)|²
        3.0
    """

    def __init__(
        self, network: TwoLayer, *, start: TwoLayer | None = None, sharpness: float = 300.0
    ) -> None:
        network = _weights("network", network)
        self.network, self.sharpness = network, sharpness_of(sharpness)
        self.target = network
        if start is not None:
            start = TwoLayer(*(part.to(network.W) for part in _weights("start", start)))
            for name, mine, theirs in zip(network._fields, start, network, strict=True):
                checks.tensor(f"start.{name}", mine, theirs.shape)
            self.target = network.minus(start)
        self.square = self.target.size() ** 2

    @property
    def inputs(self) -> int:
        """Length of a candidate."""
        return self.network.W.shape[1]

    @property
    def same(self) -> bool:
        """Whether the target is the network itself, which saves a product with the weights."""
        return self.target is self.network

    @property
    def like(self) -> Tensor:
        """A tensor whose precision and device the candidates should have."""
        return self.network.W

    def within(self, basis: Tensor) -> "ShallowObjective":
        """Return the same objective for candidates in coordinates of a subspace.

        Args:
            basis: Orthonormal rows. Shape ``(dimensions, inputs)``.

        Raises:
            ValueError: If they are not.
        """
        basis = frame(basis, self.inputs, self.like)
        inside = copy.copy(self)
        inside.network = self.network._replace(W=self.network.W @ basis.T)
        inside.target = (
            inside.network if self.same else self.target._replace(W=self.target.W @ basis.T)
        )
        return inside

    def with_sharpness(self, sharpness: float) -> "ShallowObjective":
        """Return the same objective with another smoothing of ReLU."""
        other = copy.copy(self)
        other.sharpness = sharpness_of(sharpness)
        return other

    def outputs(self, X: Tensor) -> Tensor:
        """Return the outputs of the smooth network. Shape ``(candidates, outputs)``."""
        W, bias, V = self.network
        return self._activations(X @ W.T + bias, 0)[0] @ V.T

    def kernel(self, X: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute K and G, differentiable in candidates.

        Returns:
            Inner products of the candidates' gradients with each other, of shape ``(candidates,
            candidates)``, and with the target, of shape ``(candidates,)``.
        """
        code, along, (value, slope) = self._forward(X, labels, 1)
        B = (code @ self.network.V) * slope
        G = (B * along).sum(dim=1) + ((code @ self.target.V) * value).sum(dim=1)
        return (X @ X.T + 1) * (B @ B.T) + (code @ code.T) * (value @ value.T), G

    def loss(self, X: Tensor, multipliers: Tensor, labels: Tensor) -> Tensor:
        """Compute L, differentiable in candidates and multipliers."""
        kernel, G = self.kernel(X, labels)
        return self.square + multipliers @ (kernel @ multipliers - 2 * G)

    @torch.no_grad()
    def gradients(
        self, X: Tensor, multipliers: Tensor, labels: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """Compute L and its gradients in candidates and multipliers."""
        code, along, (value, slope, bend) = self._forward(X, labels, 2)
        A = code @ self.network.V
        B = A * slope
        heads = code @ self.target.V
        weighted = multipliers[:, None]
        gram, signs = X @ X.T + 1, code @ code.T
        slopes = B @ B.T
        first = along - (gram * multipliers) @ B  # what is left of the target, along candidates
        second = heads - (signs * multipliers) @ value
        G = torch.linalg.vecdot(B, along) + torch.linalg.vecdot(heads, value)
        pull = (gram * slopes) @ multipliers + ((signs * (value @ value.T)) @ multipliers)
        dz = -2 * weighted * (first.mul_(A).mul_(bend).add_(second.mul_(slope)))
        dB = (-2 * weighted) * B
        W = self.network.W
        dX = (dz.add_(dB) @ W) if self.same else torch.addmm(dz @ W, dB, self.target.W)
        dX += 2 * weighted * ((slopes * multipliers) @ X)
        loss = self.square + float(multipliers @ (pull - 2 * G))
        return loss, dX, 2 * (pull - G)

    @torch.no_grad()
    def splitting(self, X: Tensor, multipliers: Tensor, labels: Tensor):
        r"""Return the map from directions, a row for each candidate, to :math:`S_i v_i`.

        .. math::
            S_i = -2 \lambda_i \sum_j (A_{ij} \sigma'''(z_{ij}) r_{ij} + s_{ij} \sigma''(z_{ij}))
            w_j w_j^\top + A_{ij} \sigma''(z_{ij}) (w_j R_j^\top + R_j w_j^\top)

        with what the candidates leave of the target, R in the first layer (:math:`r_{ij} =
        \langle R_j, \tilde x_i \rangle`) and s in the second.
        """
        W = self.network.W
        code, along, (value, slope, bend, twist) = self._forward(X, labels, 3)
        A = code @ self.network.V
        B = A * slope * multipliers[:, None]
        first = along - (X @ X.T + 1) @ B
        second = code @ self.target.V - (code @ (code.T @ (multipliers[:, None] * value)))
        factor = -2 * multipliers[:, None]
        own, cross = factor * (A * twist * first + second * bend), factor * (A * bend)

        def apply(v: Tensor) -> Tensor:
            hidden = v @ W.T
            target = hidden if self.same else v @ self.target.W.T
            rest = target - (v @ X.T) @ B
            back = own * hidden + cross * rest
            crossed = cross * hidden
            out = (back + crossed) @ W if self.same else back @ W + crossed @ self.target.W
            return out - (crossed @ B.T) @ X

        return apply

    def _forward(self, X: Tensor, labels: Tensor, order: int):
        """Return the codes, what the first layer of the target makes of X, and activations."""
        W, bias, V = self.network
        z = X @ W.T + bias
        activations = self._activations(z, order)
        along = z if self.same else X @ self.target.W.T + self.target.bias
        return codes(activations[0] @ V.T, labels), along, activations

    def _activations(self, z: Tensor, order: int) -> list[Tensor]:
        """Return σ and its derivatives up to an order."""
        if self.sharpness == math.inf:
            found = [z.clamp(min=0), (z > 0).to(z)]
            return (found + [torch.zeros_like(z)] * 2)[: order + 1]
        tau = self.sharpness
        found = [nn.functional.softplus(z, beta=tau, threshold=40.0)]
        if order > 0:
            found.append(torch.sigmoid(tau * z))
        if order > 1:
            found.append(tau * found[1] * (1 - found[1]))
        if order > 2:
            found.append(tau * found[2] * (1 - 2 * found[1]))
        return found


def frame(basis, inputs: int | str, like: Tensor) -> Tensor:
    """Return orthonormal rows in the precision of an objective."""
    basis = checks.tensor("basis", basis, ("dimensions", inputs)).to(like)
    off = float((basis @ basis.T - torch.eye(len(basis)).to(basis)).abs().max())
    if off > 1e3 * torch.finfo(basis.dtype).eps * math.sqrt(basis.shape[1]):
        raise ValueError(f"basis must have orthonormal rows; they are {off:.2g} off.")
    return basis


def sharpness_of(value: float) -> float:
    """Return the sharpness of a smooth ReLU, which may be infinite."""
    endless = isinstance(value, float) and value == math.inf
    return value if endless else checks.positive("sharpness", value)


def _weights(name: str, network: TwoLayer) -> TwoLayer:
    checks.instance(name, network, TwoLayer, "train_two_layer")
    W = checks.tensor(f"{name}.W", network.W, ("neurons", "inputs"))
    bias = checks.tensor(f"{name}.bias", network.bias, (len(W),)).to(W)
    V = checks.tensor(f"{name}.V", network.V, ("outputs", len(W))).to(W)
    return TwoLayer(W.detach(), bias.detach(), V.detach())
