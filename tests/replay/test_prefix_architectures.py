"""Sweeps over the last positions of many causal architectures give what whole runs give, whichever way they run."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import tenterhook as th
from tests.batch.test_batch_architectures import CAUSAL, EXPERTS, SEQUENCES, model_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# These have no key-value cache, or more state than that, and run whole sequences.
OTHER_STATE = {"mamba", "falcon_mamba", "recurrent_gemma", "bart"}


def metric(output):
    return output.logits[0, -1].logsumexp(0) + output.logits[0, 2, 5]


@pytest.mark.parametrize("name", [*CAUSAL, *SEQUENCES, "mixtral", "granitemoe"])
def test_late_cases(name):
    kind = AutoModelForSeq2SeqLM if name in SEQUENCES else AutoModelForCausalLM
    model = model_of(kind, name, {**CAUSAL, **SEQUENCES}.get(name, EXPERTS))
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    block = next(str(point) for point in th.points(model, "**.1") if "." in str(point))
    with torch.no_grad(), th.record(model, block) as tape:
        model(ids)
    part = 0 if isinstance(tape[block], tuple) and isinstance(tape[block][1], torch.Tensor) else None
    cases = [{block: th.scale(1 + number / 4, at=th.at[:, -1 - number % 2], part=part)} for number in range(1, 13)]
    found = th.sweep(model, cases, metric, ids)
    served = any("on a shared prefix" in line for line in found.how)
    assert served == (name not in OTHER_STATE), found.how
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            assert abs(metric(model(ids)) - value) < 1e-4
