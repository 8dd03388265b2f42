"""The zoo's own models: recurrent networks, PyTorch's transformer, and modules that other tools have modified."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tenterhook import testing
from zoo.case import Case

__all__ = ["build", "names"]

WIDTH = 16
CASES: dict[str, Callable[[], Case]] = {}


def names() -> Iterator[tuple[str, str]]:
    """Yield each name with its family."""
    yield from ((name, name.split("-")[0]) for name in CASES)


def build(name: str) -> Case:
    """Return the case of that name."""
    torch.manual_seed(0)
    return CASES[name]()


def _case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__.strip("_").replace("_", "-")] = function
    return function


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())


def _recurrent(kind: type[nn.RNNBase]) -> Case:
    return Case(kind(WIDTH, WIDTH, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True), (_x(2, 5, WIDTH),))


CASES["lstm"] = lambda: _recurrent(nn.LSTM)
CASES["gru"] = lambda: _recurrent(nn.GRU)
CASES["rnn"] = lambda: _recurrent(nn.RNN)


@_case
def _lstm_projected() -> Case:
    return Case(nn.LSTM(WIDTH, WIDTH, proj_size=4).train(), (_x(5, 2, WIDTH),))


class Packed(nn.Module):
    """An LSTM over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Pack, run, unpack."""
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        return self.head(output)


@_case
def _lstm_packed() -> Case:
    return Case(Packed(), (_x(5, 2, WIDTH),))


@_case
def _cell_loop() -> Case:
    return Case(testing.Cell(), (_x(4, 3, 4),))


@_case
def _residual_inplace() -> Case:
    return Case(testing.Residual(), (_x(3, 4),))


@_case
def _mixed_structures() -> Case:
    return Case(testing.Mixed(), (_x(3, 4),))


@_case
def _convolution_train() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(),
        nn.LazyLinear(4),
    )  # fmt: skip
    model(_x(2, 3, 8, 8))
    return Case(model.train(), (_x(2, 3, 8, 8),))


def _encoder(*, train: bool, mask: bool, norm_first: bool = False) -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that nested tensors are off with norm_first.
        model = nn.TransformerEncoder(layer, 2).train(train)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return Case(model, (_x(2, 5, WIDTH),), {"src_key_padding_mask": padding} if mask else {})


for _train in (False, True):
    for _mask in (False, True):
        for _first in (False, True):
            _name = f"encoder-{'train' if _train else 'eval'}{'-mask' * _mask}{'-norm-first' * _first}"
            CASES[_name] = lambda t=_train, m=_mask, f=_first: _encoder(train=t, mask=m, norm_first=f)


def _transformer(*, train: bool) -> Case:
    model = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True).train(train)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    return Case(model, (_x(2, 5, WIDTH), _x(2, 4, WIDTH)), {"tgt_mask": causal, "tgt_is_causal": True})


CASES["transformer-eval"] = lambda: _transformer(train=False)
CASES["transformer-train"] = lambda: _transformer(train=True)


@_case
def _attention_weights() -> Case:
    x = _x(2, 5, WIDTH)
    return Case(nn.MultiheadAttention(WIDTH, 4, batch_first=True), (x, x, x))


@_case
def _quantised_mlp() -> Case:
    return Case(_quantised(_mlp(), {nn.Linear}), (_x(2, WIDTH),), backward=False)


@_case
def _quantised_lstm() -> Case:
    return Case(_quantised(nn.LSTM(WIDTH, WIDTH), {nn.LSTM}), (_x(5, 2, WIDTH),), backward=False)


def _quantised(model: nn.Module, kinds: set[type[nn.Module]]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it moves to another package.
        return torch.ao.quantization.quantize_dynamic(model.eval(), kinds, dtype=torch.qint8)


def _parametrized(function: Callable[..., nn.Module], *, train: bool) -> Case:
    model = _mlp()
    function(model[0])
    return Case(model.train(train), (_x(2, WIDTH),))


CASES["parametrized-weight-norm"] = lambda: _parametrized(parametrizations.weight_norm, train=False)
CASES["parametrized-spectral-norm"] = lambda: _parametrized(parametrizations.spectral_norm, train=False)
CASES["parametrized-spectral-norm-train"] = lambda: _parametrized(parametrizations.spectral_norm, train=True)
CASES["parametrized-orthogonal"] = lambda: _parametrized(parametrizations.orthogonal, train=False)


@_case
def _hooked_weight_norm() -> Case:
    model = _mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The old implementation, with a forward pre-hook.
        nn.utils.weight_norm(model[0])
    return Case(model, (_x(2, WIDTH),))


@_case
def _hooked_spectral_norm() -> Case:
    model = _mlp()
    nn.utils.spectral_norm(model[0])
    return Case(model.eval(), (_x(2, WIDTH),))


@_case
def _pruned_unstructured() -> Case:
    model = _mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return Case(model, (_x(2, WIDTH),))


@_case
def _pruned_structured() -> Case:
    model = _mlp()
    prune.ln_structured(model[2], "weight", amount=0.25, n=2, dim=0)
    return Case(model, (_x(2, WIDTH),))


class Tied(nn.Module):
    """An embedding that shares its weight with the head, and one block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.block = _mlp()
        self.again = self.block
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embed the ids, apply the same block three times, and return the logits."""
        x = self.embedding(ids)
        for block in (self.block, self.again, self.block):
            x = x + block(x)
        return self.head(x)


@_case
def _tied_weights() -> Case:
    return Case(Tied(), (torch.arange(8).view(2, 4),))


class Checkpointed(nn.Module):
    """Two blocks that are recomputed in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_mlp(), _mlp()])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run each block inside a checkpoint."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


CASES["checkpoint-reentrant"] = lambda: Case(Checkpointed(reentrant=True), (_x(2, WIDTH).requires_grad_(),))
CASES["checkpoint-plain"] = lambda: Case(Checkpointed(reentrant=False), (_x(2, WIDTH).requires_grad_(),))


@_case
def _embedding_bag() -> Case:
    return Case(nn.EmbeddingBag(20, WIDTH), (torch.arange(8).view(2, 4),))


def _lora() -> Case:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_mlp(), LoraConfig(target_modules=["0", "2"], r=2, lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return Case(model.train(), (_x(2, WIDTH),))


def _lora_gpt2() -> Case:
    from peft import LoraConfig, get_peft_model

    from zoo import hugging

    case = hugging.build("gpt2")
    config = LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    return Case(get_peft_model(case.model, config).train(), case.args, case.kwargs)


CASES["lora-mlp"] = _lora
CASES["lora-gpt2"] = _lora_gpt2
