"""The training state, and the update and evaluation steps as pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, Key

from relattn.data import Erase, Mix
from relattn.kernels.random_projections import redraw
from relattn.nn.device_axis import (
    device_index,
    mean_over_devices,
    roll_batch,
    sum_over_devices,
)
from relattn.training.draws import average_draws, stream_key
from relattn.training.metrics import (
    count_metric,
    cross_entropy,
    smoothed_cross_entropy,
)
from relattn.training.parameters import hold

Batch = dict[str, Any]
Metrics = dict[str, Array]

# The variable collections that training keeps in its state.
STATE_COLLECTIONS = ("params", "random_features", "batch_stats")

# Metrics that are finite in a good update, and their names in messages.
FINITE_METRICS = {"loss": "loss", "grad_norm": "gradient", "update_norm": "update"}


class TrainState(flax.struct.PyTreeNode):
    """Everything that an update changes.

    Attributes:
        step: Number of updates so far, int32; it determines the position in the data.
        params: The parameters.
        opt_state: The state of the optimiser.
        random_features: The collection of random projections; may be empty.
        batch_stats: The collection of moving statistics, float arrays; may be empty.
        ema: The moving average of the parameters; empty if none is kept.
    """

    step: Any
    params: Any
    opt_state: Any
    random_features: Any
    batch_stats: Any
    ema: Any = flax.struct.field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables to evaluate: with the average of the parameters if kept."""
        params = self.ema if jax.tree.leaves(self.ema) else self.params
        return {"params": params, **self.collections}

    @property
    def collections(self) -> dict[str, Any]:
        """The variables other than the parameters."""
        return {
            "random_features": self.random_features,
            "batch_stats": self.batch_stats,
        }


def create_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    input_shape: tuple[int, ...],
    dtype: Any = jnp.float32,
    *,
    ema: bool = False,
) -> TrainState:
    """Creates the state before the first update, a pure function of the key.

    Args:
        model: A model of inputs ``[batch, *input_shape]``.
        optimizer: The optimiser.
        key: The run's key.
        input_shape: Shape of one preprocessed input: ``(height, width, channels)`` of
            an image, for example, or ``(length,)`` of a text.
        dtype: The dtype of the inputs.
        ema: Whether to keep a moving average of the parameters.

    Returns:
        The state; random projections have redraw index 0.

    Raises:
        ValueError: If the model has a collection that is not in `STATE_COLLECTIONS`.

    Example:
        >>> state = create_state(
        ...     nn.Dense(3), optax.sgd(0.1), jax.random.key(0), (5, 7, 2))
        >>> state.params["kernel"].shape, state.random_features
        ((2, 3), {})
    """
    rngs = {
        "params": stream_key(key, "params"),
        "dropout": stream_key(key, "dropout"),
        "random_features": key,
    }
    variables = model.init(rngs, jnp.zeros((1, *input_shape), dtype))
    for collection in variables:
        if collection not in (*STATE_COLLECTIONS, "intermediates"):
            raise ValueError(
                f"the model has a collection {collection!r}; training supports only "
                f"{', '.join(map(repr, STATE_COLLECTIONS))}"
            )
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        random_features=redraw(variables.get("random_features", {}), key, 0),
        batch_stats=variables.get("batch_stats", {}),
        # Copies: the memory of each is reused for its update.
        ema=jax.tree.map(jnp.copy, params) if ema else {},
    )


TrainStep = Callable[[TrainState, Batch, Key[Array, "..."]], tuple[TrainState, Metrics]]
EvalStep = Callable[[Any, Batch], Metrics]
# Maps random features, a key and the step to new features.
Redraw = Callable[[Any, Any, Any], Any]
# Maps random features and a key to several draws, see
# `relattn.training.draws.draw_features`.
Draw = Callable[[Any, Any], Any]


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    preprocess: Callable[[Batch], Array],
    *,
    accumulate_steps: int = 1,
    skip_non_finite: bool = False,
    mix: Mix | None = None,
    erase: Erase | None = None,
    label_smoothing: float = 0.0,
    frozen: Callable[[Any], Any] | None = None,
    ema_decay: float = 0.0,
    metrics: Sequence[str] = ("accuracy",),
) -> Callable[[TrainState, Batch, Key[Array, ""]], tuple[TrainState, Metrics]]:
    """Makes the pure function of one update, ``step(state, batch, key)``.

    ``batch`` has ``label`` and the input of ``preprocess``; ``key`` is the run's key.
    All labels count equally: a batch with ``weight``, as in evaluation, raises
    ValueError. The dropout key is a function of (key, step, device, micro-batch).
    Random features do not change: `relattn.kernels.redraw` is called between updates.
    Moving statistics are updated once, by the mean of their updates over the devices
    and the micro-batches. Modules average moments over the devices by
    `relattn.nn.device_axis.mean_over_devices`, and over each micro-batch separately.

    The function can be compiled by ``jax.jit``, or mapped over devices by ``jax.pmap``
    with the axis `relattn.nn.device_axis.DEVICE_AXIS`, each with a shard of the batch.

    Args:
        model: The model, applied with ``deterministic=False`` and a ``dropout`` key.
        optimizer: The optimiser, applied to the gradients' mean over the devices.
        preprocess: Maps a batch to the model's inputs.
        accumulate_steps: Number of equal micro-batches that a device processes one
            after the other, with the memory of one; the update is that of the whole
            batch.
        skip_non_finite: Whether to change only the step if the loss or the gradient,
            averaged over the devices, or the change of the parameters is not finite.
        mix: Draws the mask that mixes each image with the one before it in the global
            batch, see `relattn.data.make_mix`, from a key of (key, step) that all
            devices and micro-batches share; None for no mixing. The loss is that of the
            soft labels, and metrics count the label of larger weight.
        erase: Draws which pixels of an image are erased, see `relattn.data.make_erase`,
            from a key of (key, step, index in the global batch); None for no erasing.
        label_smoothing: Fraction of each label that is spread over all classes, see
            `smoothed_cross_entropy`.
        frozen: Maps the parameters to booleans, see
            `relattn.training.parameters.is_frozen`: those that have no gradient; None
            if all have.
        ema_decay: Decay of the moving average of the parameters, see `average`; 0 if
            the state has none.
        metrics: Names in `relattn.training.metrics.METRICS` of what is counted, beside
            the loss, on the batch before the update.

    Returns:
        The function; its metrics are ``loss``, those of ``metrics``, ``grad_norm``
        (before clipping), ``update_norm`` (the norm of the change of the parameters)
        and the scalars that the model sows as ``intermediates``, averaged over the
        global batch.

    Raises:
        ValueError: If ``accumulate_steps`` is less than one.

    Example:
        >>> from relattn.training.step import create_state
        >>> class Linear(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, images, *, deterministic=True):
        ...         return nn.Dense(3)(images.reshape(len(images), -1))
        >>> model, optimizer, key = Linear(), optax.sgd(0.1), jax.random.key(0)
        >>> state = create_state(model, optimizer, key, (2, 2, 1))
        >>> images = lambda batch: batch["image"]
        >>> step = jax.jit(make_train_step(model, optimizer, images))
        >>> batch = {"image": jnp.ones((5, 2, 2, 1)), "label": jnp.arange(5) % 3}
        >>> state, metrics = step(state, batch, key)
        >>> int(state.step), sorted(metrics)
        (1, ['accuracy', 'grad_norm', 'loss', 'update_norm'])
    """
    if accumulate_steps < 1:
        raise ValueError(
            f"config.accumulate_steps must be at least 1, got {accumulate_steps}"
        )

    gradients = _make_gradients(
        model,
        preprocess,
        mix=mix,
        erase=erase,
        label_smoothing=label_smoothing,
        frozen=frozen,
        metrics=metrics,
    )

    def train_step(
        state: TrainState, batch: Batch, key: Key[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        if "weight" in batch:
            raise ValueError(
                "training counts all labels of a batch equally, but the batch has "
                "'weight', which only evaluation uses: yield training batches without "
                "it"
            )
        dropout_key = jax.random.fold_in(stream_key(key, "dropout"), state.step)
        dropout_key = jax.random.fold_in(dropout_key, device_index())
        mix_key = jax.random.fold_in(stream_key(key, "mix"), state.step)
        if erase is not None:
            erase_key = jax.random.fold_in(stream_key(key, "erase"), state.step)
            batch = {
                **batch,
                "erase_key": _example_keys(erase_key, len(batch["label"])),
            }
        if mix is not None:
            batch = {**batch, "previous": roll_batch(batch)}
        if accumulate_steps == 1:
            results = gradients(state, batch, dropout_key, mix_key)
        else:
            results = _mean_over_micro_batches(
                lambda micro_batch, index: gradients(
                    state,
                    micro_batch,
                    jax.random.fold_in(dropout_key, index),
                    mix_key,
                ),
                batch,
                accumulate_steps,
            )
        grads, measured, batch_stats = mean_over_devices(results)
        measured["grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        measured["update_norm"] = optax.tree.norm(updates)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema_decay:
            ema = average(ema, params, state.step, ema_decay)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            random_features=state.random_features,
            batch_stats=batch_stats,
            ema=ema,
        )
        if skip_non_finite:
            values = jnp.stack([measured[name] for name in FINITE_METRICS])
            finite = jnp.isfinite(values).all()
            new_state = _select(finite, new_state, state)
        return new_state, measured

    return train_step


def _make_gradients(
    model: nn.Module,
    preprocess: Callable[[Batch], Array],
    *,
    mix: Mix | None,
    erase: Erase | None,
    label_smoothing: float,
    frozen: Callable[[Any], Any] | None,
    metrics: Sequence[str],
) -> Callable[[TrainState, Batch, Array, Array], tuple[Any, Metrics, Any]]:
    """Makes the function of gradients, metrics and statistics; see `make_train_step`.

    It takes the state, a batch or micro-batch, the dropout key and the key of ``mix``.
    """
    label_loss = cross_entropy
    if label_smoothing:
        label_loss = functools.partial(
            smoothed_cross_entropy, smoothing=label_smoothing
        )

    def prepare(batch: Batch, impl: Any) -> Array:
        inputs = preprocess(batch)
        if erase is None:
            return inputs
        keys = jax.random.wrap_key_data(batch["erase_key"], impl=impl)
        return _erase_parts(inputs, keys, erase)

    def gradients(
        state: TrainState, batch: Batch, key: Key[Array, ""], mix_key: Key[Array, ""]
    ) -> tuple[Any, Metrics, Any]:
        impl = jax.random.key_impl(key)
        inputs, label = prepare(batch, impl), batch["label"]
        targets = [(1.0, label)]
        if mix is not None:
            previous = batch["previous"]
            *_, height, width, _ = inputs.shape
            mask = mix(mix_key, (height, width))[..., None]
            inputs = mask * inputs + (1 - mask) * prepare(previous, impl)
            share = mask.mean()
            targets = [(share, label), (1 - share, previous["label"])]
            label = jnp.where(share < 0.5, previous["label"], label)

        def loss_fn(params: Any) -> tuple[Array, tuple[Metrics, Any]]:
            if frozen is not None:
                params = hold(params, frozen(params))
            logits, updated = model.apply(
                {"params": params, **state.collections},
                inputs,
                deterministic=False,
                rngs={"dropout": key},
                mutable=["intermediates", "batch_stats"],
            )
            loss = sum(
                weight * label_loss(logits, target).mean() for weight, target in targets
            )
            means = {name: count_metric(name, logits, label).mean() for name in metrics}
            means |= scalars(updated.get("intermediates", {}))
            return cast(Array, loss), (means, updated.get("batch_stats", {}))

        (loss, (means, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        return grads, {**means, "loss": loss}, batch_stats

    return gradients


def _erase_parts(inputs: Array, keys: Array, erase: Erase) -> Array:
    """Sets parts of images to zero, each by its own key."""
    *_, height, width, _ = inputs.shape
    kept = jax.vmap(lambda key: erase(key, (height, width)))(keys)
    # The same part of each frame of a volume.
    frames = range(1, inputs.ndim - 3)
    return jnp.where(jnp.expand_dims(kept, (*frames, -1)) > 0, inputs, 0.0)


def _example_keys(key: Key[Array, ""], count: int) -> Array:
    """Returns the data of a key for each of the ``count`` examples on a device."""
    first = device_index() * count
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(
        first + jnp.arange(count)
    )
    return jax.random.key_data(keys)


def average(ema: Any, params: Any, step: Int[Array, ""], decay: float) -> Any:
    """Updates a moving average of parameters.

    ema <- d ema + (1 - d) params with d = min(decay, (1 + step) / (10 + step))

    Args:
        ema: The average before the update.
        params: The parameters after it.
        step: Number of updates before it. While there are few, the average forgets the
            start faster.
        decay: ``config.ema_decay``.

    Returns:
        The average after it.

    Example:
        >>> ema, params = {"w": jnp.zeros(())}, {"w": jnp.ones(())}
        >>> averages = [average(ema, params, jnp.array(s), 0.99) for s in (0, 10, 9999)]
        >>> [round(float(average["w"]), 3) for average in averages]
        [0.9, 0.45, 0.01]

    Source:
        TensorFlow, ``tf.train.ExponentialMovingAverage`` with ``num_updates``.
    """
    step = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    # The average of a parameter that never changes is this parameter, bit for bit.
    return jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)


def _select(finite: Bool[Array, ""], new: TrainState, old: TrainState) -> TrainState:
    """Selects the new parameters, optimiser state and statistics if they are finite."""
    changed = ("params", "opt_state", "batch_stats", "ema")
    chosen = {
        name: jax.tree.map(
            lambda x, y: jnp.where(finite, x, y), getattr(new, name), getattr(old, name)
        )
        for name in changed
    }
    return new.replace(**chosen)


def _mean_over_micro_batches(
    function: Callable[[Batch, Array], Any], batch: Batch, count: int
) -> Any:
    """Averages a function over equal micro-batches, one after the other."""
    size = len(batch["label"])
    if size % count:
        raise ValueError(
            f"config.accumulate_steps={count} does not divide the {size} examples of "
            "config.batch_size on a device: change one of them"
        )
    # Each takes every count-th example, so that it is on all devices of a mesh.
    split = jax.tree.map(
        lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch
    )
    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(function, first, jnp.int32(0)),
    )

    def add(total: Any, arguments: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*arguments)), None

    total, _ = jax.lax.scan(add, zeros, (split, jnp.arange(count)))
    return jax.tree.map(lambda x: x / count, total)


def make_eval_step(
    model: nn.Module,
    preprocess: Callable[[Batch], Array],
    *,
    metrics: Sequence[str] = ("loss", "accuracy"),
    draws: int = 1,
) -> Callable[[Any, Batch], Metrics]:
    """Makes the pure function ``step(variables, batch)`` of one evaluation batch.

    Args:
        model: The model, applied with ``deterministic=True``.
        preprocess: Maps a batch to the model's inputs.
        metrics: Names in `relattn.training.metrics.METRICS`.
        draws: Number of draws of the random features. With more than one, their
            collection has those of `relattn.training.draws.draw_features`, and the
            metrics are those of the probabilities averaged over them.

    Returns:
        The function. ``batch`` has the input of ``preprocess``, ``label``, and
        ``weight``, 0 for a label that does not count. The result is the sum of each
        metric's values over the labels of the global batch, and ``count``, the sum of
        the weights. Each device may have a shard of it, as in `make_train_step`. It
        raises ValueError if there is not one weight for each label.

    Example:
        >>> class Zeros(nn.Module):
        ...     def __call__(self, images, *, deterministic=True):
        ...         return jnp.zeros((len(images), 3))
        >>> step = make_eval_step(Zeros(), lambda batch: batch["image"])
        >>> batch = {"image": jnp.ones((2, 1, 1, 1)), "label": jnp.array([0, 0])}
        >>> float(step({}, {**batch, "weight": jnp.array([1.0, 0.0])})["accuracy"])
        1.0
    """
    apply = functools.partial(model.apply, deterministic=True)

    def eval_step(variables: Any, batch: Batch) -> Metrics:
        inputs = preprocess(batch)
        if draws == 1:
            logits = cast(Array, apply(variables, inputs))
        else:
            logits = average_draws(apply, variables, inputs)
        label, weight = batch["label"], batch["weight"]
        if jnp.shape(weight) != jnp.shape(label):
            raise ValueError(
                f"the batch has weights of the shape {jnp.shape(weight)} for labels of "
                f"the shape {jnp.shape(label)}: yield one weight for each label"
            )
        sums = {"count": jnp.sum(weight)}
        for name in metrics:
            # Padding may give values that are not finite.
            values = jnp.where(weight > 0, count_metric(name, logits, label), 0.0)
            sums[name] = jnp.sum(values * weight)
        return sum_over_devices(sums)

    return eval_step


def scalars(intermediates: Any) -> Metrics:
    """Returns the scalars that a model sowed by path, averaged if sown several times.

    Args:
        intermediates: The collection: tuples of values in nested dictionaries.

    Returns:
        For example ``{"block_0/attention/normalizer": ...}``; arrays are left out.

    Example:
        >>> one, two = jnp.array(1.0), jnp.array(2.0)
        >>> sown = {"block": {"norm": (one, two), "map": (jnp.ones(3),)}}
        >>> {name: float(value) for name, value in scalars(sown).items()}
        {'block/norm': 1.5}
    """
    found: dict[str, list[Array]] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(intermediates):
        keys = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
        if jnp.ndim(value) == 0:
            found.setdefault("/".join(keys), []).append(jnp.asarray(value, jnp.float32))
    return {
        name: cast(Array, sum(values)) / len(values) for name, values in found.items()
    }
