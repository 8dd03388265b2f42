"""Backward hooks in random programs, compared with a run without hooks, with copies, or with PyTorch's hooks."""

import pytest
import torch
from hook_networks import NATIVE, OURS, differentiate
from hook_programs import MODULES, Program, by_copies, edit, edit_input, edit_output, observe

import tenterhook as th

# These return new memory, so a copy of the output makes no difference to other code.
OWN = ("linear", "product", "two", "views of its own", "changes its own", "a whole and its sum")
CHANGE_INPUT = ("changes its input", "changes a part", "uses and changes")
# The others that change their input also return it, so a copy of the output makes a difference to the caller.
COPYABLE = [kind for kind in MODULES if "change" not in kind or kind in OWN + CHANGE_INPUT]
SEEDS = range(12)


def attempt(run):
    try:
        return run()
    except th.TenterhookError:
        raise
    except RuntimeError:  # An error of autograd: the program changed a tensor that a gradient needs.
        return None


def computes(plain, copies):
    """Return whether the run with copies computed the same loss. It does not if the module stored a changed tensor."""
    return copies is not None and torch.allclose(plain[0], copies[0])


def same(ours, truth):
    assert len(ours) == len(truth)
    for one, other in zip(ours, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", MODULES)
def test_hooks_that_look_change_no_gradient_whatever_is_changed_in_place(kind):
    compared = 0
    for seed in SEEDS:
        plain = attempt(Program(seed, kind).run)
        try:
            hooked = attempt(lambda seed=seed: Program(seed, kind).run(observe))
        except th.HookError:
            assert kind == "expand"  # Its elements share memory.
            continue
        assert (plain is None) == (hooked is None), seed
        if plain is not None:
            same(hooked, plain)
            compared += 1
    assert compared


@pytest.mark.parametrize("kind", COPYABLE)
def test_hooks_see_the_gradients_that_copies_of_inputs_and_outputs_have(kind):
    often, compared = 0.4 if kind in OWN + CHANGE_INPUT else 0, 0
    for seed in SEEDS:
        log, incoming, outgoing = [], {}, {}
        plain = attempt(lambda seed=seed: Program(seed, kind).run(change=often))
        copies = by_copies(incoming.__setitem__, outgoing.__setitem__)
        truth = attempt(lambda seed=seed, copies=copies: Program(seed, kind).run(around=copies, change=often))
        if plain is None or not computes(plain, truth):
            continue
        Program(seed, kind).run(lambda module, log=log: observe(module, log), change=often)
        assert [entry[0] for entry in log] == ["pre", "post"]
        same([g for g in log[1][1] if g is not None], [incoming[n] for n in sorted(incoming)])
        same([g for g in log[1][2] if g is not None], [outgoing[n] for n in sorted(outgoing)])
        same(log[0][1], log[1][2])
        compared += 1
    assert compared


@pytest.mark.parametrize("kind", COPYABLE)
def test_hooks_that_edit_have_the_effect_of_edits_written_out(kind):
    often, compared = 0.4 if kind in OWN + CHANGE_INPUT else 0, 0
    written_out = by_copies(lambda _, gradient: edit_input(gradient), lambda _, gradient: edit_output(gradient))
    for seed in SEEDS:
        truth = attempt(lambda seed=seed: Program(seed, kind).run(around=written_out, change=often))
        plain = attempt(lambda seed=seed: Program(seed, kind).run(change=often))
        if plain is None or not computes(plain, truth):
            continue
        same(Program(seed, kind).run(edit, change=often), truth)
        compared += 1
    assert compared


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_under_first_to_third_derivatives_hooks_are_those_of_pytorch(seed, edits):
    (ours, our_gradients), (theirs, their_gradients) = (
        differentiate(seed, register, edits=edits) for register in (OURS, NATIVE)
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        same(mine, other)
    same(our_gradients, their_gradients)
