"""Attribution of text: how much each token of the context contributes to each generated token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes._figures import Pictured, heatmap
from tenterhook.recipes._inputs import lone, steady
from tenterhook.recipes._readout import name_of
from tenterhook.recipes._residual import TOLERANCE
from tenterhook.recipes.path import quadrature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TextAttribution", "text"]

Method = Literal["ig", "gradient", "input-x-gradient", "attention-rollout", "erasure"]
Prompt = str | Sequence[int] | Tensor
NO_IDS = (
    "the tokenizer gave {given} for a prompt. A tokenizer of transformers is needed: a function from text to "
    "{{'input_ids': ...}}, with decode(). Without one (tokenizer=None), give token ids as prompt and output."
)
NOT_IDS = "token ids are integers, in one row for each text; got {given}"
NOT_CAUSAL = (
    "{kind} is no causal language model with scores for each token (.logits of [examples, tokens, words]): {given}"
)
NO_PATTERN = (
    "{kind} has no attention patterns that are known, so method='attention-rollout' cannot be used: {why}\n"
    "The other methods need no attention."
)
TOP = 3


@dataclass(frozen=True)
class TextAttribution(Pictured):
    """The result of :func:`text`, for each example a matrix of context tokens and generated tokens.

    ``values``: for each example ``[context tokens, generated tokens]``. The context is the prompt, followed by the
    generated tokens except the last; a token has no value for those before it. ``error``: for integrated gradients, the
    sum of each column minus the change of its score, for each example.
    """

    method: Method
    prompts: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    values: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    error: tuple[Tensor, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def matrix(self, example: int = 0) -> Tensor:
        """Return the part of the prompt, ``[prompt tokens, generated tokens]``."""
        return self.values[example][: len(self.prompts[example])]

    def context(self, example: int = 0) -> tuple[str, ...]:
        """Return the tokens of the context: the rows of ``values``."""
        return (*self.prompts[example], *self.outputs[example][:-1])

    def show(self, example: int = 0, *, title: str = "", whole: bool = False) -> Figure:
        """Return a matplotlib figure: context tokens as rows, generated tokens as columns.

        Args:
            example: the index of the example.
            title: the title; by default the method.
            whole: also show the generated tokens that are part of the context.
        """
        shown = self.values[example] if whole else self.matrix(example)
        rows = self.context(example)[: len(shown)]
        signed = bool((shown < 0).any())
        return heatmap(shown, rows, self.outputs[example], title=title or self._title(example), signed=signed)

    def _title(self, example: int) -> str:
        if self.error is None:
            return self.method
        return f"{self.method}, completeness error {float(self.error[example].abs().max()):.2g}"

    def __repr__(self) -> str:
        lines = []
        for example, (found, output) in enumerate(zip(self.values, self.outputs, strict=True)):
            lines.append(f"{self._title(example)}, example {example}")
            tokens = self.context(example)
            for place, token in enumerate(output):
                best = found[:, place].abs().argsort(descending=True)[:TOP].tolist()
                why = ", ".join(f"{tokens[row]!r} {float(found[row, place]):+.3g}" for row in best)
                lines.append(f"  {token!r:<14} {why}")
        return "\n".join(map(printable, lines))


def text(  # noqa: PLR0913
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt | Sequence[Prompt],
    output: Prompt | Sequence[Prompt] | None = None,
    *,
    method: Method = "ig",
    baseline: int | None = None,
    steps: int = 50,
    batch: int = 50,
    score: Literal["logprob", "logit"] = "logprob",
    max_new_tokens: int = 16,
) -> TextAttribution:
    """Return how much each token of a prompt contributes to each generated token.

    >>> import torch, tenterhook as th
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> _ = torch.manual_seed(0)
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16)).eval()
    >>> found = th.recipes.text(model, None, [3, 7, 1, 4], [5, 9])
    >>> found.matrix().shape, bool(found.error[0].abs().max() < 1e-4)
    (torch.Size([4, 2]), True)

    Args:
        model: a causal language model, in eval mode.
        tokenizer: the tokenizer; None if prompts and outputs are token ids.
        prompt: a text, or a list of texts of any lengths. It may also be what the tokenizer made of them, with padding.
        output: the text that follows the prompt, or one for each prompt. By default, what the model generates.
        method: ``"ig"``, integrated gradients of the embeddings; ``"gradient"``, the size of the gradient;
            ``"input-x-gradient"``; ``"attention-rollout"``, over all layers and heads; ``"erasure"``, the change of the
            score if the embedding of one token is replaced by the baseline.
        baseline: for ``"ig"`` and ``"erasure"``, the token whose embedding is the baseline. By default zeros.
        steps: the number of places on the path of ``"ig"``.
        batch: the number of rows to run at once.
        score: the score of a token: its log probability, or its logit.
        max_new_tokens: the number of tokens to generate if there is no output.

    Returns:
        A :class:`TextAttribution`.

    Raises:
        RecipeError: the model is no causal language model, or an argument is wrong.
    """
    if method not in get_args(Method):
        raise th.RecipeError(f"method= is one of {', '.join(map(repr, get_args(Method)))}; got {method!r:.40}")
    if score not in ("logprob", "logit"):
        raise th.RecipeError(f"score= is 'logprob' or 'logit'; got {score!r:.40}")
    for name, value in (("batch", batch), ("max_new_tokens", max_new_tokens)):
        if type(value) is not int or value < 1:
            raise th.RecipeError(f"{name}= is a positive integer; got {value!r:.40}")
    # Gradients are enabled where they are needed, wherever this is called.
    with torch.inference_mode(mode=False), torch.no_grad(), steady(model):
        return _attributed(
            _Run(model, _Texts(model, tokenizer, prompt, output, max_new_tokens), score), method, baseline, steps, batch
        )


def _attributed(run: _Run, method: Method, baseline: int | None, steps: int, batch: int) -> TextAttribution:
    texts = run.texts
    computed: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
        "ig": lambda: _integrated(run, baseline, steps, batch),
        "gradient": lambda: (_gradients(run, run.embedded, None).norm(dim=-1), None),
        "input-x-gradient": lambda: ((_gradients(run, run.embedded, None) * run.embedded[:, None]).sum(-1), None),
        "attention-rollout": lambda: (_rollout(run), None),
        "erasure": lambda: (_erasure(run, baseline, batch), None),
    }
    found, error = computed[method]()
    scores = run.scores(run.embedded.detach(), None).detach()
    sizes = list(zip(texts.before, texts.after, strict=True))
    values = tuple(
        each[:after, : before + after - 1].T.detach() for each, (before, after) in zip(found, sizes, strict=True)
    )
    settings = {"steps": steps, "baseline": baseline} if method == "ig" else {}
    return TextAttribution(
        method, texts.named_prompts, texts.named_outputs, values,
        tuple(each[:after] for each, after in zip(scores, texts.after, strict=True)),
        None if error is None else tuple(each[:after] for each, after in zip(error, texts.after, strict=True)),
        settings,
    )  # fmt: skip


class _Texts:
    """The token ids of prompts and outputs, each pair in one row, filled at the end."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompt: Any, output: Any, new: int) -> None:
        self._tokenizer = tokenizer
        prompts = [self._ids(each, special=True) for each in _listed(prompt)]
        self._check(model, prompts)
        if output is None:
            outputs = [_generated(model, ids, new) for ids in prompts]
        else:
            outputs = [self._ids(each, special=False) for each in _listed(output)]
        if len(prompts) != len(outputs) or not prompts:
            raise th.RecipeError(f"give one output for each prompt; got {len(prompts)} and {len(outputs)}")
        if not all(len(each) for each in (*prompts, *outputs)):
            raise th.RecipeError("a prompt or an output is empty: at least one token is needed in each")
        self._check(model, outputs)
        device = next(model.parameters()).device
        rows = [torch.cat(pair) for pair in zip(prompts, outputs, strict=True)]
        self.ids = pad_sequence(rows, batch_first=True).to(device)
        self.mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        self.before, self.after = [len(each) for each in prompts], [len(each) for each in outputs]
        self.named_prompts = tuple(tuple(map(self._name, each.tolist())) for each in prompts)
        self.named_outputs = tuple(tuple(map(self._name, each.tolist())) for each in outputs)

    def _ids(self, given: Any, *, special: bool) -> Tensor:
        if isinstance(given, Mapping) and len(texts := _without_padding(given)) == 1:
            given = texts[0]
        if not isinstance(given, str):
            return _as_ids(given)
        if not callable(self._tokenizer):
            raise th.RecipeError(NO_IDS.format(given=f"a {type(self._tokenizer).__name__}"))
        found = self._tokenizer(given, **({} if special else {"add_special_tokens": False}))
        if not isinstance(found, Mapping) or "input_ids" not in found:
            raise th.RecipeError(NO_IDS.format(given=f"a {type(found).__name__}"))
        return torch.as_tensor(found["input_ids"], dtype=torch.long).reshape(-1)

    def _name(self, token: int) -> str:
        return str(token) if self._tokenizer is None else str(self._tokenizer.decode([token]))

    @staticmethod
    def _check(model: nn.Module, rows: Sequence[Tensor]) -> None:
        for row in rows:
            check_tokens(model, row.tolist())


def check_tokens(model: nn.Module, tokens: Sequence[int]) -> None:
    """Raise if a token is not in the vocabulary of a model, as far as that is known."""
    ask = getattr(model, "get_input_embeddings", None)
    count = getattr(ask(), "num_embeddings", None) if callable(ask) else None
    wrong = next((token for token in tokens if token < 0 or (count is not None and token >= count)), None)
    if wrong is not None:
        known = "a token is 0 or more" if count is None else f"the vocabulary has 0 to {count - 1}"
        raise th.RecipeError(f"there is no token {wrong}: {known}")


def _as_ids(given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise th.RecipeError(NOT_IDS.format(given=f"a {type(given).__name__}")) from error
    if ids.dim() > 2 or (ids.dim() == 2 and len(ids) > 1):  # noqa: PLR2004
        raise th.RecipeError(NOT_IDS.format(given=f"a tensor of {list(ids.shape)} for one text"))
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise th.RecipeError(NOT_IDS.format(given=str(ids.dtype)))
    return ids.reshape(-1).long().cpu()


def _listed(given: Any) -> list[Any]:
    """Return the texts: of one text, of a list of them, or of what a tokenizer has made of them."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping):
        return _without_padding(given)
    if isinstance(given, Tensor):
        return [given] if given.dim() < 2 else list(given)  # noqa: PLR2004
    given = given.tolist() if hasattr(given, "__array__") else given  # Of numbers or of texts.
    try:
        found = list(given)
    except TypeError as error:
        raise th.RecipeError(NOT_IDS.format(given=f"a {type(given).__name__}")) from error
    return [torch.tensor([int(each) for each in found])] if found and all(map(_is_number, found)) else found


def _is_number(given: Any) -> bool:
    return getattr(given, "ndim", 0) == 0 and hasattr(given, "__index__")


def _without_padding(given: Mapping[str, Any]) -> list[Any]:
    """Return the token ids in the output of a tokenizer, without those that its attention mask leaves out."""
    if "input_ids" not in given:
        raise th.RecipeError(f"a dict of a tokenizer has 'input_ids'; got one with {', '.join(map(repr, given))}")
    rows, masks = _listed(given["input_ids"]), given.get("attention_mask")
    if masks is None:
        return rows
    return [_as_ids(row)[_as_ids(mask).bool()] for row, mask in zip(rows, _listed(masks), strict=True)]


def _generated(model: nn.Module, ids: Tensor, new: int) -> Tensor:
    generate: Any = getattr(model, "generate", None)
    if not callable(generate):
        raise th.RecipeError(f"{type(model).__name__} cannot generate; give output=")
    given = ids[None].to(next(model.parameters()).device)
    made = generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return made[0, len(ids) :].cpu()  # type: ignore[no-any-return]


class _Run:
    """Runs of the model with other embeddings, and the scores of the generated tokens."""

    def __init__(self, model: nn.Module, texts: _Texts, score: str) -> None:
        self.model, self.texts, self._score = model, texts, score
        self._arguments = signature(model.forward).parameters
        ask = getattr(model, "get_input_embeddings", None)
        point = name_of(model, ask()) if callable(ask) else None
        if point is None:
            raise th.RecipeError(
                f"the embedding of {type(model).__name__} is not known: it has no get_input_embeddings()"
            )
        self.point = point
        if _is_encoder_decoder(model):
            raise th.RecipeError(NOT_CAUSAL.format(kind=type(model).__name__, given="it has an encoder and a decoder"))
        with torch.no_grad(), th.record(model, point) as tape:
            output = model(**self.inputs(None))
        logits = _logits(output)
        if not isinstance(logits, Tensor) or logits.shape[:2] != texts.ids.shape or logits.dim() != 3:  # noqa: PLR2004
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise th.RecipeError(NOT_CAUSAL.format(kind=type(model).__name__, given=f"its output is {shape}"))
        self._check_causal(logits)
        self.embedded = lone(tape[point], point)
        most = max(texts.after)
        columns = torch.arange(most, device=self.embedded.device)
        starts = torch.tensor(texts.before, device=self.embedded.device)[:, None]
        self.at = (starts + columns - 1).clamp(max=texts.ids.shape[1] - 1)  # where each token is predicted
        self._tokens = texts.ids.gather(1, (starts + columns).clamp(max=texts.ids.shape[1] - 1))

    def _check_causal(self, logits: Tensor) -> None:
        """Raise if another last token of the first text changes the scores before it."""
        last, row = self.texts.before[0] + self.texts.after[0] - 1, torch.zeros(1, dtype=torch.long)
        given = self.inputs(row.to(self.texts.ids.device))
        name = self._ids_name()
        given[name] = given[name].clone()
        given[name][0, last] = 1 - given[name][0, last].clamp(max=1)  # Token 0 or 1.
        with torch.no_grad():
            other = _logits(self.model(**given))
        change = (other[0, :last] - logits[0, :last]).abs().max()
        if change > TOLERANCE.get(logits.dtype, 1e-1) * logits[0].abs().max():
            why = f"its output at a token changes by {float(change):.2g} with the tokens after it"
            raise th.RecipeError(NOT_CAUSAL.format(kind=type(self.model).__name__, given=why))

    def inputs(self, rows: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the model, with rows repeated."""
        given = {self._ids_name(): self.texts.ids}
        if self._takes("attention_mask", unnamed=True):
            given["attention_mask"] = self.texts.mask
        if rows is not None:
            given = {name: value[rows] for name, value in given.items()}
        return given | ({"use_cache": False} if self._takes("use_cache") else {})

    def _ids_name(self) -> str:
        """Return the name of the argument that takes the tokens."""
        return "input_ids" if self._takes("input_ids", unnamed=True) else next(iter(self._arguments), "input_ids")

    def _takes(self, name: str, *, unnamed: bool = False) -> bool:
        kinds = [each.kind for each in self._arguments.values()]
        return name in self._arguments or (unnamed and Parameter.VAR_KEYWORD in kinds)

    def scores(self, embedded: Tensor, rows: Tensor | None) -> Tensor:
        """Return the score of each generated token, ``[row, token]``."""
        with th.edit(self.model, {self.point: th.set(embedded)}):
            output = self.model(**self.inputs(rows))
        return self.of_output(output, rows)

    def of_output(self, output: Any, rows: Tensor | None) -> Tensor:
        """Return the score of each generated token in an output."""
        at, tokens = (self.at, self._tokens) if rows is None else (self.at[rows], self._tokens[rows])
        logits = _wide(_logits(output))  # In half precision, a log probability has two or three digits.
        logits = logits.log_softmax(-1) if self._score == "logprob" else logits
        found = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        return found.gather(2, tokens[..., None])[..., 0]

    @property
    def tokens(self) -> int:
        """The largest number of generated tokens."""
        return max(self.texts.after)

    def start(self, baseline: int | None) -> Tensor:
        """Return the embeddings of the baseline."""
        if baseline is None:
            return torch.zeros_like(self.embedded)
        if type(baseline) is not int:
            raise th.RecipeError(f"baseline= is a token id, or None for zeros; got {baseline!r:.40}")
        check_tokens(self.model, [baseline])
        with torch.no_grad():
            token: Tensor = self.model.get_submodule(self.point)(self.texts.ids.new_full((1,), baseline))
        return token.expand_as(self.embedded).clone()


def _logits(output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _gradients(run: _Run, embedded: Tensor, rows: Tensor | None) -> Tensor:
    """Return the gradient of the score of each generated token, ``[row, generated token, context token, size]``."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = embedded.detach().clone().requires_grad_()
        scores = run.scores(leaf, rows)
        found = [
            torch.autograd.grad(scores[:, place].sum(), leaf, retain_graph=place + 1 < run.tokens)[0]
            for place in range(run.tokens)
        ]
    return _wide(torch.stack(found, 1))


def _integrated(run: _Run, baseline: int | None, steps: int, batch: int) -> tuple[Tensor, Tensor]:
    start, count = _wide(run.start(baseline)), len(run.embedded)
    gap = _wide(run.embedded) - start
    places, weights = quadrature(steps, gap)
    total: Any = 0.0
    for some, weight in zip(places.split(max(1, batch // count)), weights.split(max(1, batch // count)), strict=True):
        rows = torch.arange(count, device=gap.device).repeat(len(some))
        at = some.repeat_interleave(count)[:, None, None]
        path = torch.addcmul(start[rows], gap[rows], at).to(run.embedded.dtype)
        slopes = _gradients(run, path, rows).unflatten(0, (len(some), count))
        total = total + torch.einsum("s,sn...->n...", weight, slopes)
    found = (total * gap[:, None]).sum(-1)
    with torch.no_grad():
        change = run.scores(run.embedded, None) - run.scores(start.to(run.embedded.dtype), None)
    return found, found.sum(-1) - change


def _rollout(run: _Run) -> Tensor:
    kind, tokens = type(run.model).__name__, run.texts.ids.shape[1]
    try:
        with th.record(run.model, "**@pattern") as tape:
            run.model(**run.inputs(None))
    except (th.AddressError, th.NeverReached) as error:
        raise th.RecipeError(NO_PATTERN.format(kind=kind, why=error)) from error
    found: Any = None
    for point in tape.in_order():  # Layers may run in another order than they are built.
        pattern = lone(tape[point], point).float().mean(1)
        if pattern.shape[-2:] != (tokens, tokens):
            why = f"{point!r} is {list(pattern.shape[-2:])} and not [{tokens}, {tokens}]."
            raise th.RecipeError(NO_PATTERN.format(kind=kind, why=why))
        pattern = pattern / pattern.sum(-1, keepdim=True)  # With attention sinks, the sum is less than 1.
        mixed = (pattern + torch.eye(pattern.shape[-1], device=pattern.device)) / 2
        found = mixed if found is None else mixed @ found
    at = run.at[..., None].expand(-1, -1, found.shape[-1])
    return found.gather(1, at)  # type: ignore[no-any-return]


def _erasure(run: _Run, baseline: int | None, batch: int) -> Tensor:
    start = run.start(baseline)
    cases = th.grid(
        lambda token: {run.point: th.set(start[:, token], at=th.at[:, token])}, token=range(start.shape[1])
    )  # fmt: skip

    def metric(output: Any) -> Tensor:
        return run.of_output(output, None)

    inputs = run.inputs(None)
    size = max(1, batch // len(start))
    found = th.sweep(run.model, cases, metric, batch=size, progress=False, **inputs)
    if found.failed:
        raise next(iter(found.failed.values()))
    change = torch.as_tensor(found.base) - torch.stack(list(found.values))  # [context, example, generated]
    return change.permute(1, 2, 0)
