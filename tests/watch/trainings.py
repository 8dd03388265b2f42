"""Trainings with a planted illness, and healthy ones. Each takes a seed and returns the finished watch."""

import torch
from torch import nn
from torch.nn import functional as F

import tenterhook as th


def train(model, batch, loss, optimizer, *selectors, steps=60, before_step=None, logs=False, **options):
    with th.watch(model, *selectors, optimizer=optimizer, on_nan="record", **options) as watch:
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            found = loss(model(x), y)
            if logs:
                watch.log_loss(found)
            found.backward()
            if before_step is not None:
                before_step(step)
            optimizer.step()
    return watch


def regression(seed, width=16, size=64):
    """Batches of a linear task with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(width, 4, generator=generator)

    def batch(_step):
        x = torch.randn(size, width, generator=generator)
        return x, x @ target / width**0.5 + 0.1 * torch.randn(size, 4, generator=generator)

    return batch


def mlp(*, depth=3, width=32, activation=nn.ReLU, norm=True):
    layers = [nn.Linear(16, width), activation()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), *([nn.LayerNorm(width)] if norm else []), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr)


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr)


class Attention(nn.Module):
    """One layer of attention of a language model, whose softmax has a meaning."""

    def __init__(self, width=16, words=20, sharpness=1.0):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, words)
        with torch.no_grad():
            self.attention.in_proj_weight[: 2 * width] *= sharpness

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def words(seed, most=20, size=16):
    generator = torch.Generator().manual_seed(seed)

    def batch(_step):
        ids = torch.randint(0, most, (size, 12), generator=generator)
        return ids, ids.roll(1, dims=1)

    return batch


def next_word(out, ids):
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


# -- illnesses --------------------------------------------------------------------------------------------------------


def dead_units(seed):
    model = mlp(norm=False)
    with torch.no_grad():
        model[2].bias[:12] = -50.0
    return train(model, regression(seed), F.mse_loss, sgd(model))


def saturated_activation(seed):
    model = mlp(activation=nn.Tanh, norm=False)
    with torch.no_grad():
        model[0].weight *= 40
    return train(model, regression(seed), F.mse_loss, sgd(model, 1e-3), steps=20)


def vanishing_gradient(seed):
    model = mlp(depth=24, activation=nn.Sigmoid, norm=False)
    return train(model, regression(seed), F.mse_loss, sgd(model), steps=20)


def exploding_gradient(seed):
    model = mlp(depth=14, norm=False, activation=nn.Identity)
    with torch.no_grad():
        for layer in model[2:-1:2]:
            layer.weight *= 8
    return train(model, regression(seed), lambda out, y: F.mse_loss(out, y) * 1e-20, sgd(model, 1e-9), steps=10)


def large_update(seed):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.3, weight_decay=3.0)
    return train(model, regression(seed), F.mse_loss, optimizer)


def no_update(seed):
    """Weights in bfloat16 that lose every update in rounding."""
    model = mlp().to(torch.bfloat16)
    data = regression(seed)
    batch = lambda step: tuple(each.to(torch.bfloat16) for each in data(step))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return train(model, batch, F.mse_loss, sgd(model, 1e-12))


def loss_spike(seed):
    model = mlp(norm=False)
    data = regression(seed)

    def batch(step):
        x, y = data(step)
        return x, y

    def disturb(step):
        if step == 48:  # The second layer is damaged, and the loss rises in the next step.
            with torch.no_grad():
                model[2].weight *= 30

    return train(model, batch, F.mse_loss, sgd(model, 1e-3), steps=52, before_step=disturb, logs=True)


def unused_embedding_rows(seed):
    model = Attention(words=400)
    return train(model, words(seed), next_word, adam(model), steps=120)


def attention_entropy_collapse(seed):
    model = Attention(words=400, sharpness=300.0)  # Many words: equal ones would share the attention.
    return train(model, words(seed, most=400), next_word, adam(model), "**", "attention@pattern", steps=40)


def low_precision_overflow(seed):
    model = mlp(norm=False, activation=nn.Identity).to(torch.float16)
    data = regression(seed)
    with torch.no_grad():
        model[0].weight *= 60000 / model[0](data(0)[0].half()).abs().max()
        model[0].bias.zero_()
    batch = lambda step: (data(step)[0].half() / 1.3, data(step)[1].half())
    return train(model, batch, lambda out, y: F.mse_loss(out.float() / 1e5, y.float()), sgd(model, 1e-9), steps=10)


def low_precision_underflow(seed):
    model = mlp().to(torch.float16)
    data = regression(seed)
    batch = lambda step: tuple(each.half() for each in data(step))
    return train(model, batch, lambda out, y: F.mse_loss(out, y) * 1e-4, sgd(model), steps=30)


def noisy_gradients(seed):
    model = mlp(activation=nn.GELU)
    generator = torch.Generator().manual_seed(seed)
    batch = lambda _: (torch.randn(2, 16, generator=generator), torch.randn(2, 4, generator=generator) * 3)
    return train(model, batch, F.mse_loss, sgd(model, 3e-3), steps=600)


ILLNESSES = {
    "dead units": (dead_units, "3"),
    "saturated activation": (saturated_activation, "1"),
    "vanishing gradient": (vanishing_gradient, "0"),
    "exploding gradient": (exploding_gradient, "0"),
    "large update": (large_update, "2.weight"),
    "no update": (no_update, "2.weight"),
    "loss spike": (loss_spike, "2"),
    "unused embedding rows": (unused_embedding_rows, "embedding"),
    "attention entropy collapse": (attention_entropy_collapse, "attention@pattern"),
    "low-precision overflow": (low_precision_overflow, "0"),
    "low-precision underflow": (low_precision_underflow, "3"),
    "noisy gradients": (noisy_gradients, "parameters"),
}


# -- healthy trainings ------------------------------------------------------------------------------------------------


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 4),
    )  # fmt: skip


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 20)
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(20, 16),
            nn.LSTM(16, 32, batch_first=True),
            nn.Linear(32, 20),
        )

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


def classes(seed):
    data = regression(seed)

    def batch(step):
        x, y = data(step)
        return x, y.argmax(1)

    return batch


def adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr)


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)


HEALTHY = {
    "relu and sgd": (mlp, regression, F.mse_loss, sgd),
    "leaky relu and adam": (lambda: mlp(activation=nn.LeakyReLU), regression, F.mse_loss, adam),
    "gelu and adamw": (lambda: mlp(activation=nn.GELU), classes, F.cross_entropy, adamw),
    "tanh and momentum": (lambda: mlp(activation=nn.Tanh), regression, F.mse_loss, momentum),
    "deep with norms": (lambda: mlp(depth=8, activation=nn.GELU), regression, F.mse_loss, adam),
    "convolutions": (convolutions, classes, F.cross_entropy, adam),
    "transformer": (transformer, words, next_word, adamw),
    "recurrent": (Recurrent, words, next_word, adam),
    "attention": (Attention, words, next_word, adam),
    "bfloat16 autocast": (lambda: mlp(activation=nn.SiLU), classes, F.cross_entropy, adamw),
}


def healthy(name, seed, steps=200):
    torch.manual_seed(seed)
    build, data, loss, optimizer = HEALTHY[name]
    model = build()
    watched = ["**", "attention@pattern"] if name == "attention" else []
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
        return train(model, data(seed), loss, optimizer(model), *watched, steps=steps, logs=True)


def ill(kind, seed):
    torch.manual_seed(seed)
    return ILLNESSES[kind][0](seed)
