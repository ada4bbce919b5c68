"""Prompt attacks on a language model, and the sharpness of its last layer along them.

A suffix of tokens is searched that makes the model give an answer of our choice. A model here
is anything with an ``embedding``, ``features`` and a linear ``head``, such as those of
``flatbook.language``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.models import evaluating
from flatbook.sharpness import doubt, relative_sharpness

Proposals = Literal["gradient", "random"]


@dataclass(frozen=True, eq=False)
class SuffixSearch:
    """What a search for a suffix found, step by step; entry 0 is the start.

    Attributes:
        path: The suffix kept after each step. Shape ``(steps + 1, suffix length)``.
        losses: Its mean loss per target token, in nats; it never rises. Shape ``(steps + 1,)``.
        reached: Whether greedy decoding then yields the target. Shape ``(steps + 1,)``.
        evaluations: Suffixes whose loss was computed, the start included.
    """

    path: Tensor
    losses: Tensor
    reached: Tensor
    evaluations: int

    @property
    def suffix(self) -> Tensor:
        """The suffix kept last. Shape ``(suffix length,)``."""
        return self.path[-1]

    @property
    def first_success(self) -> int | None:
        """The first step after which greedy decoding yields the target; None if none does."""
        steps = self.reached.nonzero()
        return int(steps[0]) if len(steps) else None


def suffix_search(
    model: nn.Module,
    prompt: Tensor,
    target: Tensor,
    *,
    after: Tensor | Sequence[int] = (),
    suffix_length: int = 8,
    initial: Tensor | None = None,
    steps: int = 50,
    candidates: int = 64,
    top_k: int = 16,
    allowed: Tensor | None = None,
    proposals: Proposals = "gradient",
    batch_size: int = 64,
    seed: int = 0,
) -> SuffixSearch:
    r"""Search a suffix of the prompt after which the model answers with the target.

    Greedy coordinate gradient. A suffix is a list of one-hot rows :math:`x_i` that enter as
    :math:`x_i E` with the embedding matrix E, so the loss :math:`\ell` of the target has a
    gradient in them, and to first order replacing token i by v changes it by

    .. math::
        \langle e_v - e_{s_i}, \nabla_{e_i} \ell \rangle .

    Each step draws ``candidates`` swaps, each at a random place and uniformly from the ``top_k``
    tokens that this promises most for there, computes their losses, and keeps the best if it is
    better than what there is. (The published algorithm keeps it even if it is worse.)

    Args:
        model: Has ``embedding``, ``features`` and ``head``, as :class:`TinyTransformer
            <flatbook.language.TinyTransformer>`.
        prompt: Tokens before the suffix. Shape ``(length,)``.
        target: Tokens of the answer to provoke. Shape ``(length,)``.
        after: Tokens between the suffix and the answer, such as the mark of the other speaker.
        suffix_length: Tokens of the suffix.
        initial: The suffix to start from; by default drawn from ``allowed``.
        steps: How many.
        candidates: Suffixes tried a step.
        top_k: Tokens considered at each place.
        allowed: Tokens the suffix may use; by default all.
        proposals: ``"random"`` draws from all allowed tokens instead: the same search without
            the gradient, at the same number of evaluations.
        batch_size: Suffixes per forward pass.
        seed: Of the start and the candidates.

    Returns:
        The suffixes kept, their losses, and when they reached the target.

    Raises:
        ValueError: If a token is unknown, ``allowed`` has fewer than two tokens, or an option is
            out of range.

    Reference:
        Zou et al. (2023). Universal and transferable adversarial attacks on aligned language
        models. arXiv:2307.15043.

    Example:
        >>> from flatbook.language import WORDS, TinyTransformer, encode
        >>> model = TinyTransformer(len(WORDS), width=24, seed=0)
        >>> prompt, target = encode("what colour is the sky ?"), encode("green")
        >>> found = suffix_search(model, prompt, target, after=encode(":"), steps=10)
        >>> found.path.shape, found.evaluations, bool(found.losses[-1] < found.losses[0])
        (torch.Size([11, 8]), 641, True)
    """
    for name, value in (("suffix_length", suffix_length), ("steps", steps)):
        checks.count(name, value)
    for name, value in (("candidates", candidates), ("top_k", top_k), ("batch_size", batch_size)):
        checks.count(name, value)
    checks.choice("proposals", proposals, get_args(Proposals))
    embedding, vocabulary = _taken_apart(model)
    prompt = _tokens("prompt", prompt, vocabulary)
    target = _tokens("target", target, vocabulary)
    after = _tokens("after", after, vocabulary, may_be_empty=True)
    allowed = torch.arange(vocabulary) if allowed is None else allowed
    allowed = _tokens("allowed", allowed, vocabulary).unique()
    if len(allowed) < 2:
        raise ValueError(f"allowed must hold at least 2 tokens; got {len(allowed)}.")
    random = runtime.generator(seed)
    if initial is None:
        suffix = allowed[torch.randint(len(allowed), (suffix_length,), generator=random)]
    else:
        suffix = _tokens("initial", initial, vocabulary)
    length, where = len(suffix), len(prompt)
    around = torch.cat([prompt, suffix, after, target])

    def losses_of(suffixes: Tensor) -> tuple[Tensor, Tensor]:
        tokens = around.repeat(len(suffixes), 1)
        tokens[:, where : where + length] = suffixes
        found = [_answer(model, t, len(target)) for t in tokens.split(batch_size)]
        return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])

    def gradient(suffix: Tensor) -> Tensor:
        """Return the gradient of the loss in the one-hot rows, at the allowed tokens."""
        tokens = around.clone()
        tokens[where : where + length] = suffix
        with torch.enable_grad():
            x = embedding(tokens[None, :-1].to(embedding.weight.device)).detach().requires_grad_()
            logits = model.head(model.features(x)[0, -len(target) :])
            loss = cross_entropy(logits, target.to(logits.device))
            slope = torch.autograd.grad(loss, x)[0][0, where : where + length]
        return (slope @ embedding.weight[allowed.to(slope.device)].T).detach().cpu()

    with evaluating(model), torch.no_grad():
        loss, hit = losses_of(suffix[None])
        kept = suffix, loss[0], hit[0]
        history = [kept]
        for _ in range(steps):
            if proposals == "gradient":
                promise = gradient(suffix).masked_fill(allowed == suffix[:, None], torch.inf)
                k = min(top_k, len(allowed) - 1)
                best = allowed[promise.topk(k, largest=False).indices]  # (length, k)
            else:
                best = allowed.expand(length, -1)
            places = torch.randint(length, (candidates,), generator=random)
            picks = torch.randint(best.shape[1], (candidates,), generator=random)
            tried = suffix.repeat(candidates, 1)
            tried[torch.arange(candidates), places] = best[places, picks]
            loss, hit = losses_of(tried)
            winner = int(loss.argmin())
            if loss[winner] < kept[1]:
                kept = suffix, *_ = tried[winner], loss[winner], hit[winner]
            history.append(kept)
    return SuffixSearch(*map(torch.stack, zip(*history, strict=True)), 1 + steps * candidates)


@dataclass(frozen=True, eq=False)
class TokenSharpness:
    """Measures of the last layer at each predicted token. Each has shape ``(batch, tokens)``.

    Attributes:
        neuronwise: Relative sharpness, in nats.
        frobenius: Its Frobenius form, in nats.
        doubt: One minus the highest probability.
        probability: That of the token that stands there.
    """

    neuronwise: Tensor
    frobenius: Tensor
    doubt: Tensor
    probability: Tensor


@torch.no_grad()
def token_sharpness(
    model: nn.Module, tokens: Tensor, *, last: int | None = None, batch_size: int = 64
) -> TokenSharpness:
    r"""Measure relative sharpness where each token of a sequence is predicted.

    Predicting a token is a classification among the vocabulary, so the closed forms of
    :func:`relative_sharpness <flatbook.sharpness.relative_sharpness>` hold with the features of
    the token before it. They are evaluated in float64, whatever the model computes in.

    Args:
        model: Has ``embedding``, ``features`` and ``head``.
        tokens: Sequences of one length. Shape ``(batch, length)``.
        last: Measure only the last so many tokens; by default all but the first, which nothing
            predicts.
        batch_size: Sequences per forward pass.

    Returns:
        Measures of shape ``(batch, last)``, or ``(batch, length − 1)``.

    Raises:
        ValueError: If a token is unknown or ``last`` out of range.

    Example:
        >>> from flatbook.language import WORDS, TinyTransformer, encode
        >>> model = TinyTransformer(len(WORDS), width=24, seed=0)
        >>> found = token_sharpness(model, encode("the sky is blue .")[None])
        >>> found.neuronwise.shape, bool((found.neuronwise <= found.frobenius).all())
        (torch.Size([1, 4]), True)
    """
    embedding, vocabulary = _taken_apart(model)
    tokens = torch.stack([_tokens("tokens", row, vocabulary) for row in _rows(tokens)])
    length = tokens.shape[1]
    if length < 2:
        raise ValueError(f"tokens must hold at least 2 a sequence; got {length}.")
    last = checks.count("last", length - 1 if last is None else last, at_most=length - 1)
    checks.count("batch_size", batch_size)
    with evaluating(model):
        features = [
            model.features(batch.to(embedding.weight.device))[:, -last:]
            for batch in tokens[:, :-1].split(batch_size)
        ]
    features = runtime.widened(torch.cat(features)).flatten(0, 1)
    weight = runtime.widened(model.head.weight)
    chosen = tokens[:, -last:].reshape(-1, 1).to(features.device)
    measures = []
    # A few at a time, because the logits of a large vocabulary take much room.
    for phi, token in zip(features.split(batch_size), chosen.split(batch_size), strict=True):
        logits = phi @ weight.T
        measures.append(
            torch.stack(
                [
                    relative_sharpness(weight, phi, logits),
                    relative_sharpness(weight, phi, logits, kind="frobenius"),
                    doubt(logits),
                    logits.softmax(dim=1).gather(1, token)[:, 0],
                ]
            )
        )
    return TokenSharpness(*torch.cat(measures, dim=1).view(4, len(tokens), last).cpu())


@dataclass(frozen=True, eq=False)
class CurvatureSplit:
    """Second derivative of the loss along each direction, in two parts. Shape ``(directions,)``.

    Attributes:
        total: The whole, in nats per unit length of the direction squared.
        last_layer: What the last layer explains.
    """

    total: Tensor
    last_layer: Tensor

    @property
    def rest(self) -> Tensor:
        """What comes from the bending of the features; zero if they are piecewise linear."""
        return self.total - self.last_layer


def curvature_split(
    model: nn.Module,
    tokens: Tensor,
    directions: Tensor,
    *,
    last: int = 1,
    frozen: Collection[str] = (),
) -> CurvatureSplit:
    r"""Split the curvature of the loss in the embeddings by where it comes from.

    Along a direction d the features move as :math:`\phi(t) = \phi(e + t d)`, and the loss of the
    token y has, at t = 0,

    .. math::
        \frac{d^2 \ell}{dt^2} = \underbrace{\operatorname{Var}_p(W \dot\phi)}_{\text{last layer}}
            + \underbrace{\langle \bar w - w_y, \ddot\phi \rangle}_{\text{rest}} .

    Relative sharpness sees only the first. The second vanishes for networks of ReLUs, whose
    features are piecewise linear; attention and norms make it.

    Args:
        model: Has ``embedding``, ``features`` and ``head``.
        tokens: A sequence. Shape ``(length,)``.
        directions: Changes of the embeddings of all tokens but the last. Shape
            ``(directions, length − 1, width)``.
        last: The loss is the mean over the last so many tokens.
        frozen: Passed to ``model.features``: parts taken for constant.

    Returns:
        The second derivative along each direction and the last layer's part of it.

    Raises:
        ValueError: If a token is unknown, ``last`` out of range, or a shape wrong.

    Example:
        >>> from flatbook.language import WORDS, TinyTransformer, encode
        >>> model = TinyTransformer(len(WORDS), width=24, seed=0)
        >>> d = torch.randn(5, 4, 24, generator=torch.Generator().manual_seed(0))
        >>> split = curvature_split(model, encode("the sky is blue ."), d)
        >>> bool((split.last_layer > 0).all()), bool((split.rest.abs() > 1e-3).all())
        (True, True)
    """
    embedding, vocabulary = _taken_apart(model)
    tokens = _tokens("tokens", tokens, vocabulary).to(embedding.weight.device)
    last = checks.count("last", last, at_most=len(tokens) - 1)
    shape = ("directions", len(tokens) - 1, embedding.weight.shape[1])
    directions = checks.tensor("directions", directions, shape)
    directions = directions.to(embedding.weight.device, embedding.weight.dtype)
    base = embedding(tokens[None, :-1]).detach()
    options = {"frozen": frozen} if frozen else {}
    target = tokens[-last:].repeat(len(directions))

    def logits_at(t: Tensor) -> Tensor:
        moved = base + t[:, None, None] * directions
        return model.head(model.features(moved, **options)[:, -last:])

    t = directions.new_zeros(len(directions))
    with evaluating(model), torch.enable_grad():
        logits, change = torch.autograd.functional.jvp(logits_at, t, torch.ones_like(t))
        t = t.requires_grad_()
        # Sequences of a batch do not see each other, so one pass serves all directions.
        loss = cross_entropy(logits_at(t).flatten(0, 1), target, reduction="sum") / last
        slope = torch.autograd.grad(loss, t, create_graph=True)[0]
        total = torch.autograd.grad(slope.sum(), t)[0]
    p = logits.softmax(dim=-1)
    change = change - (p * change).sum(dim=-1, keepdim=True)
    return CurvatureSplit(total, (p * change.square()).sum(dim=-1).mean(dim=1))


def _answer(model: nn.Module, tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the last ``length`` tokens, and whether all of them come first.

    They are what greedy decoding gives if and only if each is the likeliest after those before.
    """
    tokens = tokens.to(model.head.weight.device)
    logits = model.head(model.features(tokens[:, :-1])[:, -length:])
    target = tokens[:, -length:]
    loss = cross_entropy(logits.mT, target, reduction="none").mean(dim=1)
    return loss.cpu(), (logits.argmax(dim=-1) == target).all(dim=1).cpu()


def _taken_apart(model: nn.Module) -> tuple[nn.Embedding, int]:
    checks.module("model", model)
    embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
    fits = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    if not (fits and callable(getattr(model, "features", None))):
        raise ValueError(
            "model must have an embedding, features and a linear head, as those of "
            f"flatbook.language have; got {type(model).__name__}."
        )
    return embedding, len(embedding.weight)


def _tokens(name: str, value, vocabulary: int, *, may_be_empty: bool = False) -> Tensor:
    """Return ``value`` as int64 tokens on the CPU, shape ``(length,)``."""
    if may_be_empty and len(value) == 0:
        return torch.zeros(0, dtype=torch.long)
    return checks.labels(name, value, vocabulary).cpu()


def _rows(tokens: Tensor) -> Tensor:
    return checks.tensor("tokens", tokens, ("batch", "length"), floating=False)
