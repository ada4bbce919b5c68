"""Many models trained at once: their weights stacked, each step one batched computation."""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from flatbook import runtime
from flatbook.config import TrainConfig, learning_rate
from flatbook.training import DivergenceError, epoch_seeds


def obstacle(model: nn.Module, config: TrainConfig) -> str | None:
    """Say what keeps models like this one from being trained at once; None if nothing does.

    Example:
        >>> obstacle(nn.Linear(2, 2), TrainConfig(optimizer="sam"))
        "optimizer='sam'"
    """
    plain = {
        "optimizer": "sgd",
        "precision": "float32",
        "augment": None,
        "stop_at_interpolation": False,
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            return f"{name}={getattr(config, name)!r}"
    for layer in model.modules():
        if isinstance(layer, _BatchNorm | _DropoutNd | nn.RNNBase):
            return f"a layer {type(layer).__name__}"
    return None


def fit_together(
    models: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    design: np.ndarray,
    config: TrainConfig,
    seeds: Sequence[int],
    *,
    tick: Callable[[int], object] = lambda models: None,
) -> None:
    """Train models of one architecture by SGD, in place, as `flatbook.training.fit` would one.

    Every model sees its own batches in its own order and has its own learning rate, so training
    sets may differ in size. Memory: three copies of all weights, and the batches of all models.

    Args:
        models: On the device of the data.
        x: Inputs of all points. Shape ``(points, ...)``.
        y: Their labels. Shape ``(points,)``.
        design: Which model is trained on which point. Shape ``(models, points)``.
        config: The hyper-parameters; see :func:`obstacle` for what they may not ask.
        seeds: Of the data order, one a model.
        tick: Called after each epoch with the number of models.

    Raises:
        DivergenceError: If a model's mean loss or a weight is not finite after an epoch; its note
            tells which.
    """
    parameters, buffers = stack_module_state(list(models))
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    weights = {name: p.detach().clone() for name, p in parameters.items() if name in trained}
    fixed = {name: p.detach() for name, p in parameters.items() if name not in trained} | buffers
    speed = {name: torch.zeros_like(w) for name, w in weights.items()}
    skeleton = copy.deepcopy(models[0]).train().to("meta")

    def loss_of(weights, fixed, inputs, labels, share):
        logits = functional_call(skeleton, (weights, fixed), (inputs,))
        each = cross_entropy(
            logits, labels, reduction="none", label_smoothing=config.label_smoothing
        )
        return each @ share

    gradients = vmap(grad_and_value(loss_of))
    rows = [torch.from_numpy(np.flatnonzero(row)) for row in design]
    sizes = torch.tensor([len(own) for own in rows], device=x.device)
    places = torch.arange(config.batch_size, device=x.device)
    steps = [math.ceil(len(own) / config.batch_size) for own in rows]
    for epoch in range(config.epochs):
        order = torch.zeros(len(models), max(steps) * config.batch_size, dtype=torch.long)
        for number, (own, seed) in enumerate(zip(rows, seeds, strict=True)):
            shuffled = torch.randperm(
                len(own), generator=runtime.generator(epoch_seeds(seed, epoch)[0])
            )
            order[number, : len(own)] = own[shuffled]
        order = order.to(x.device)
        total = torch.zeros(len(models), device=x.device)
        for step in range(max(steps)):
            start = step * config.batch_size
            width = min(max(map(len, rows)) - start, config.batch_size)
            batch = order[:, start : start + width]
            count = (sizes - start).clamp(0, width)[:, None]
            # Points beyond the end of a smaller set weigh nothing.
            share = (places[:width] < count).to(x.dtype) / count.clamp(min=1)
            change, loss = gradients(weights, fixed, x[batch], y[batch], share)
            total += loss.detach()  # which only has to be finite
            rates = [learning_rate(config, epoch * own + step, own) for own in steps]
            over = None if step < min(steps) else (count == 0)[:, 0]
            _descend(weights, change, speed, config, x.new_tensor(rates), over)
        _refuse_divergence(total, weights, config, epoch, steps)
        tick(len(models))
    with torch.no_grad():
        for number, model in enumerate(models):
            for name, own in model.named_parameters():
                if name in trained:
                    own.copy_(weights[name][number])
            model.eval()


@torch.no_grad()
def _descend(weights, change, speed, config, rates, over) -> None:
    """Take a step of SGD for each model, but for those whose epoch is over."""
    if over is not None:
        rates = rates.masked_fill(over, 0)
    for name, weight in weights.items():
        shape = (-1,) + (1,) * (weight.ndim - 1)
        velocity = change[name].add_(weight, alpha=config.weight_decay)
        if config.momentum:
            velocity.add_(speed[name], alpha=config.momentum)
            if over is not None:
                velocity = torch.where(over.view(shape), speed[name], velocity)
            speed[name] = velocity
        weight.sub_(rates.view(shape) * velocity)


def _refuse_divergence(total, weights, config, epoch, steps) -> None:
    whole = torch.stack([w.isfinite().flatten(1).all(1) for w in weights.values()]).all(0)
    for what, sound in (("the mean loss", total.isfinite()), ("a weight", whole)):
        if not sound.all():
            number = int((~sound).nonzero()[0, 0])
            own = steps[number]
            error = DivergenceError(what, epoch + 1, learning_rate(config, epoch * own, own))
            error.add_note(f"This was model {number} of those trained at once.")
            raise error
