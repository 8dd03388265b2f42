"""Planted illnesses are found by name, and healthy trainings have no finding."""

import pytest
import torch
from torch import nn
from trainings import HEALTHY, ILLNESSES, healthy, ill

import tenterhook as th


def check(kind, seed):
    watch = ill(kind, seed)
    found = {(each.kind, each.address): each for each in watch.findings}
    assert (kind, ILLNESSES[kind][1]) in found, [str(each) for each in watch.findings]
    finding = found[kind, ILLNESSES[kind][1]]
    assert finding.evidence
    assert finding.cause
    assert finding.remedy in watch.finding_groups[0].to_dict()["remedy"] or len(watch.finding_groups) > 1
    assert finding.remedy in str(watch)


@pytest.mark.parametrize("kind", ILLNESSES)
def test_a_planted_illness_is_found_by_name(kind):
    check(kind, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("kind", ILLNESSES)
def test_a_planted_illness_is_found_with_any_seed(kind, seed):
    check(kind, seed)


@pytest.mark.parametrize("name", ["leaky relu and adam", "transformer"])
def test_a_healthy_training_has_no_finding(name):
    assert [str(each) for each in healthy(name, 0, steps=80).findings] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_have_no_finding_with_any_seed(name, seed):
    assert [str(each) for each in healthy(name, seed).findings] == []


def test_a_loss_spike_names_the_layer_that_moved_first():
    [spike] = [each for each in ill("loss spike", 3).findings if each.kind == "loss spike"]
    assert spike.evidence["moved first"] == "2"
    assert spike.evidence["at step"] == 49
    assert "moved first" in str(spike)


def test_a_loss_that_is_changed_in_place_after_it_was_logged_counts_as_it_was():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with th.watch(model) as watch:
        for step in range(40):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            watch.log_loss(loss)
            with torch.no_grad():
                loss.mul_(1 if step < 30 else 1000)  # After it was logged.
            model.zero_grad()
    assert [each.kind for each in watch.findings] == []
