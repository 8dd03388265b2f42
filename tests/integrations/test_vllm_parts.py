"""The parts of the integration of vLLM that need no vLLM: tokens, edits as data, requests, tapes."""

import contextlib
from types import SimpleNamespace as Named

import numpy as np
import pytest
import torch

import tenterhook as th
from tenterhook.address import resolve
from tenterhook.address.grammar import CallRange
from tenterhook.address.meanings import register_meaning
from tenterhook.integrations.vllm import EngineTape, Worker, attach, declare
from tenterhook.integrations.vllm.admission import Admission, BlockEdits, OwnEdits
from tenterhook.integrations.vllm.engine_limits import refuse_engine
from tenterhook.integrations.vllm.messages import answer, answered, pack, unpack
from tenterhook.integrations.vllm.other_values import refuse_other_value
from tenterhook.integrations.vllm.row_edits import edit_data, row_edits, try_edit
from tenterhook.integrations.vllm.runner_rows import rows_of
from tenterhook.integrations.vllm.token_rows import token_rows

POINT = "model.layers.1@resid"


# -- which tokens --------------------------------------------------------------------------------------------------


def chosen(at, call, first, last, prompt=10):
    """The tokens of a part of a request that an edit changes."""
    rows, _ = token_rows(at, call, POINT)
    found = rows.choose(first, last, prompt)
    if found is None:
        return []
    index, _ = found
    tokens = list(range(first, last))
    return tokens[index] if isinstance(index, slice) else [tokens[row] for row in index]


@pytest.mark.parametrize(
    ("at", "call", "tokens"),
    [
        (None, None, list(range(14))),
        (3, None, [3]),
        (-1, None, [9]),
        (slice(2, 5), None, [2, 3, 4]),
        (slice(-3, None), None, [7, 8, 9, 10, 11, 12, 13]),
        (slice(1, None, 4), None, [1, 5, 9, 13]),
        ([0, 12], None, [0, 12]),
        ((slice(8, 11), slice(0, 2)), None, [8, 9, 10]),
        ((..., 0), None, list(range(14))),
        (None, 0, list(range(10))),
        (None, 1, [10]),
        (None, CallRange(3), [12, 13]),
        (None, CallRange(0, 2), list(range(12))),
        (slice(5, None), CallRange(0, 0), [5, 6, 7, 8, 9]),
    ],
)
def test_tokens_are_the_same_however_a_request_is_divided_into_parts(at, call, tokens):
    for size in (1, 3, 4, 14):
        parts = [chosen(at, call, first, min(first + size, 14)) for first in range(0, 14, size)]
        assert [token for part in parts for token in part] == tokens


def test_each_token_has_its_number_among_the_chosen_ones():
    rows, _ = token_rows(slice(2, 9, 2), None, POINT)
    assert [rows.choose(first, first + 3, 10) for first in (0, 3, 6)] == [
        (slice(2, 3, 2), range(1)),
        (slice(1, 3, 2), range(1, 2)),
        (slice(0, 3, 2), range(2, 4)),
    ]


@pytest.mark.parametrize(("at", "call", "depends"), [(3, None, False), (-1, None, True), (None, 0, True)])
def test_an_edit_depends_on_the_length_of_the_prompt_if_it_counts_from_its_end(at, call, depends):
    assert token_rows(at, call, POINT)[0].depends_on_prompt is depends


@pytest.mark.parametrize(
    ("at", "call", "prompt", "generated", "why"),
    [
        (None, None, 1, 1, ""),
        (9, None, 10, 1, ""),
        (10, None, 10, 1, "no token 10"),
        (10, None, 10, 2, ""),
        ([0, 50], None, 10, 6, "no token 50"),
        (50, None, 10, None, ""),
        (-1, None, 10, 1, ""),
        (slice(2, 90), None, 10, 1, ""),
        (slice(12, None), None, 10, 3, "selects no token"),
        (slice(5, 5), None, 10, 3, "selects no token"),
        (None, 0, 10, 1, ""),
        (None, CallRange(3), 10, 3, "selects no token"),
        (None, CallRange(3), 10, 4, ""),
        (12, 0, 10, 6, "selects no token"),
    ],
)
def test_an_edit_of_tokens_that_a_request_never_reads_says_why(at, call, prompt, generated, why):
    found = token_rows(at, call, POINT)[0].out_of_reach(prompt, generated)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("at", "fix"),
    [
        (th.at[:, -1], r"at=th.at\[-1\] for tokens, or at=th.at\[..., -1\] for columns"),
        (th.at[:, 2:9], r"at=th.at\[2:9\] for tokens"),
        (th.at[:, [1, 5]], r"at=th.at\[\[1, 5\]\] for tokens"),
        (th.at[:, 3, :64], r"Write at=th.at\[3, :64\]\."),
        (th.at[:, :, 7], r"Write at=th.at\[..., 7\]\."),
    ],
)
def test_an_index_with_a_batch_dimension_is_an_error_that_shows_it_without(at, fix):
    with pytest.raises(th.EditError, match=fix):
        edit_data({POINT: th.zero(at=at)})


@pytest.mark.parametrize("at", ["text", 1.5, slice(5, 2, -1), [[1]], True])
def test_an_index_that_selects_no_tokens_is_an_error(at):
    with pytest.raises(th.EditError, match="selects tokens of a request"):
        token_rows(at, None, POINT)


# -- edits as data -------------------------------------------------------------------------------------------------


def applied(edits, value, parts, prompt):
    """Apply edits to a request that is computed in parts."""
    found = row_edits(edit_data(edits))
    value = value.clone()
    for first, last in parts:
        for edit in found[POINT]:
            for index, new in edit.apply(value[first:last], first, prompt):
                value[first:last][index] = new
    return value


@pytest.mark.parametrize("parts", [[(0, 8)], [(0, 3), (3, 7), (7, 8)]])
def test_edits_change_the_rows_of_the_tokens_that_they_name(parts):
    value, rows = torch.randn(8, 4), torch.randn(2, 4)
    expected = value.clone()
    expected[2:5] += 1
    expected[5, 1:] = 0
    expected[6:8] = rows
    edits = [th.add(1.0, at=th.at[2:5]), th.zero(at=th.at[-1, 1:]), th.set(rows, at=th.at[[6, 7]])]
    assert torch.equal(applied({POINT: edits}, value, parts, prompt=6), expected)


def test_data_with_the_same_edits_has_the_same_digest():
    one, same, other = (edit_data({POINT: th.add(torch.full((4,), number))}) for number in (1.0, 1.0, 2.0))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (th.noise(), "random numbers"),
        (th.mean(), "mean over tokens"),
        (th.skip(), "skipped for all requests"),
        (lambda value: value, "a function is code"),
        (th.set(torch.ones(3, 4)), "at= must name as many tokens"),
        (th.set(torch.ones(3, 4), at=th.at[1:3]), "has 3 rows"),
        (th.add, "a function is code|is a class"),
        (torch.ones(4), "use th.set"),
    ],
)
def test_an_edit_that_cannot_be_applied_per_request_is_refused_with_the_reason(edit, text):
    with pytest.raises(th.EditError, match=text):
        edit_data({POINT: edit})


def test_edits_that_are_not_a_dict_are_refused():
    for given in ({}, "calm.edits", [th.zero()], None):
        with pytest.raises(th.EditError, match="edits are a dict of address to ready edit"):
            edit_data(given)


@pytest.mark.parametrize(
    "edit",
    [th.mask(torch.ones(2, 4)), th.mask(torch.ones(3, 4)), th.add([1.0]), th.set("text"), th.scale(torch.ones(5))],
)
def test_an_edit_that_does_not_fit_any_number_of_rows_is_refused(edit):
    (fitting,) = row_edits(edit_data({POINT: edit}))[POINT]
    with pytest.raises(th.EditError, match=POINT):
        try_edit(fitting, torch.zeros(2, 4))


def test_an_error_of_a_worker_is_raised_by_the_caller():
    def fail(kind):
        raise kind("why")

    assert answered([answer(len, "ab")]) == [2]
    with pytest.raises(th.AddressError, match="why"):
        answered([answer(len, "ab"), answer(fail, th.AddressError)])
    with pytest.raises(ValueError, match="why"):
        answered([answer(fail, ValueError)])
    with pytest.raises(th.SessionError, match="ZeroDivisionError in a worker: why"):
        answered([answer(fail, ZeroDivisionError)])


# -- rows of a batch -----------------------------------------------------------------------------------------------

STARTS, COMPUTED = np.array([0, 3, 4, 0, 0]), np.array([5, 0, 0])
EXPECTED = [("a", 0, 3, 5), ("b", 3, 4, 0)]


def test_the_first_runner_keeps_its_batch():
    batch = Named(req_ids=["a", "b", None], num_reqs=2, num_computed_tokens_cpu=COMPUTED)
    assert rows_of(Named(input_batch=batch, query_start_loc=Named(np=STARTS))).now() == EXPECTED


def test_the_second_runner_makes_a_batch_for_each_step():
    class Runner:
        def prepare_inputs(self, count):
            return Named(req_ids=["a", "b"], num_reqs=count, query_start_loc_np=STARTS, num_computed_tokens_np=COMPUTED)

    runner = Runner()
    rows = rows_of(runner)
    assert runner.prepare_inputs(2).num_reqs == 2
    assert rows.now() == EXPECTED
    rows.close()
    assert "prepare_inputs" not in vars(runner)


# -- values that differ from transformers --------------------------------------------------------------------------


class OPTAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Identity()


class DividingLayer(torch.nn.Module):
    """A layer that divides the stream in float16, as DeepSeek's do in vLLM."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.routed_scaling_factor = OPTAttention(), torch.nn.Linear(4, 4), 2.0

    def forward(self, value):
        divided = value / self.routed_scaling_factor if value.dtype == torch.float16 else value
        return divided + self.mlp(divided)


@pytest.mark.parametrize(
    ("address", "dtype", "text"),
    [
        ("0:return", torch.float16, r"divides the residual stream of this family by 2"),
        ("0.mlp", torch.float16, r"dtype=\"bfloat16\""),
        ("0:return", torch.bfloat16, None),
        ("0.self_attn.attn", torch.float16, None),
        ("0.self_attn@q", torch.float32, r"the output of '0.self_attn.qkv_proj'"),
        ("0.self_attn@k", torch.float32, None),
    ],
)
def test_a_value_that_differs_from_transformers_is_refused_with_the_reason(address, dtype, text):
    model = torch.nn.Sequential(DividingLayer())
    for meaning in ("q", "k"):
        register_meaning(OPTAttention, meaning, "attn:in")
    (point,) = resolve(model, [address])
    expected = pytest.raises(th.AddressError, match=text) if text else contextlib.nullcontext()
    with expected:
        refuse_other_value(model, point, dtype)


# -- requests ------------------------------------------------------------------------------------------------------


def request(prompt=10, **extra):
    params = Named(extra_args=extra or None, skip_reading_prefix_cache=None, max_tokens=6)
    return Named(request_id="7", prompt_token_ids=[1] * prompt, sampling_params=params, cache_salt=None)


@pytest.fixture
def admission():
    class Processor:
        @staticmethod
        def assign_request_id(request):
            request.request_id = f"{request.request_id}-abc"

    made = Admission(Processor())
    yield made
    made.close()


def own(admission, edits):
    data = edit_data(edits)
    made = OwnEdits(data)
    made.rows = data.rows
    made.admission = admission
    return made


def admitted(admission, given):
    admission._processor.assign_request_id(given)
    return given


def test_a_request_without_anything_open_is_left_alone(admission):
    given = admitted(admission, request())
    assert (given.request_id, given.cache_salt, given.sampling_params.extra_args) == ("7-abc", None, None)


def test_edits_separate_the_cached_prefixes_of_requests(admission):
    salts = {}
    edits = {"one": {POINT: th.add(1.0)}, "other": {POINT: th.add(2.0)}, "end": {POINT: th.add(1.0, at=th.at[-1])}}
    for name, each in edits.items():
        for prompt in (10, 20):
            salts[name, prompt] = admitted(admission, request(prompt, tenterhook=own(admission, each))).cache_salt
    assert salts["one", 10] == salts["one", 20] != salts["other", 10]
    assert salts["end", 10] != salts["end", 20]
    admission.edits.append(BlockEdits(edit_data(edits["one"])))
    assert admitted(admission, request()).cache_salt == salts["one", 10]


def test_a_recorded_request_bypasses_the_prefix_cache_if_asked_to(admission):
    admission.recordings["use"] = False
    assert admitted(admission, request()).sampling_params.skip_reading_prefix_cache is None
    admission.recordings["bypass"] = True
    given = admitted(admission, request()).sampling_params
    assert given.skip_reading_prefix_cache
    assert given.extra_args["tenterhook"] == {"request": "7", "recordings": ["use", "bypass"], "edits": []}


def test_a_mark_that_this_engine_did_not_make_is_refused(admission):
    for given, text in (({"edits": []}, "made by engine"), (own(object(), {POINT: th.zero()}), "another engine")):
        with pytest.raises(th.EditError, match=text):
            admission._mark(request(tenterhook=given))
    with pytest.raises(th.EditError, match="edits by name are off"):
        admission._mark(request(tenterhook_edits="calm"))
    with pytest.raises(th.EditError, match="has 10 tokens only"):
        admission._mark(request(tenterhook=own(admission, {POINT: th.zero(at=th.at[-11])})))


def test_an_edit_that_a_request_can_never_reach_is_an_error_when_it_is_added(admission):
    with pytest.raises(th.EditError, match="no token 15, counted from 0: the request reads 15 at most"):
        admission._mark(request(tenterhook=own(admission, {POINT: th.zero(at=th.at[15])})))
    with pytest.raises(th.EditError, match=f"{POINT}.*would have no effect"):
        admission._mark(request(tenterhook=own(admission, {f"{POINT}#6": th.zero()})))


def test_an_edit_of_a_block_must_have_an_effect_on_one_of_its_requests(admission):
    block = BlockEdits(edit_data({POINT: th.zero(at=th.at[20]), f"{POINT}#0": th.zero()}))
    with pytest.raises(th.NeverReached, match="no request was added"):
        block.check_reached()
    admission.edits.append(block)
    admitted(admission, request(10))
    with pytest.raises(th.NeverReached, match="no token 20"):
        block.check_reached()
    admitted(admission, request(30))
    block.check_reached()


def test_a_request_that_generates_nothing_is_refused_while_something_is_open(admission):
    pooling = Named(request_id="7", prompt_token_ids=[1], sampling_params=None)
    admission._mark(pooling)
    admission.recordings["one"] = True
    with pytest.raises(th.EditError, match="generates no tokens"):
        admission._mark(pooling)


# -- engines -------------------------------------------------------------------------------------------------------


class Derived(Worker):
    """An extension of a user, which has ours as its base."""


def engine_config(extension="tenterhook.integrations.vllm.Worker", speculative=None, **changed):
    """The part of an engine's configuration that attach() reads."""
    sizes = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
    parallel = {**dict.fromkeys((*sizes, "decode_context_parallel_size"), 1), "use_ubatching": False}
    parallel |= {name: value for name, value in changed.items() if name in parallel}
    return Named(
        parallel_config=Named(worker_extension_cls=extension, **parallel),
        cache_config=Named(kv_sharing_fast_prefill=changed.get("fast", False)),
        scheduler_config=Named(async_scheduling=changed.get("asynchronous", False)),
        model_config=Named(runner_type=changed.get("runner", "generate")),
        speculative_config=speculative,
    )


def test_engines_with_the_extension_or_one_derived_from_it_are_accepted():
    refuse_engine(engine_config())
    refuse_engine(engine_config(extension=f"{__name__}.Derived"))
    refuse_engine(engine_config(speculative="ngram"))
    refuse_engine(engine_config(asynchronous=True))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"extension": ""}, "have no tenterhook in them"),
        ({"extension": "torch.nn.Linear"}, "have no tenterhook in them"),
        ({"extension": "no.such.module.Worker"}, "have no tenterhook in them"),
        ({"pipeline_parallel_size": 2}, "tensor parallelism only"),
        ({"data_parallel_size": 2}, "tensor parallelism only"),
        ({"prefill_context_parallel_size": 2}, "tensor parallelism only"),
        ({"decode_context_parallel_size": 2}, "tensor parallelism only"),
        ({"use_ubatching": True}, "enable_dbo=False"),
        ({"fast": True}, "kv_sharing_fast_prefill=False"),
        ({"asynchronous": True, "speculative": "eagle"}, "async_scheduling=False"),
        ({"runner": "pooling"}, 'runner="generate"'),
    ],
)
def test_engines_whose_rows_have_no_known_request_are_refused_with_the_fix(given, text):
    with pytest.raises(th.SessionError, match=text):
        refuse_engine(engine_config(**given))


# -- tapes ---------------------------------------------------------------------------------------------------------

VALUES = torch.arange(24.0).reshape(12, 2)
FACTS = {"name": "7", "sample": 0, "prompt": 4, "cached": 0}


def part(rows, tensor=VALUES, facts=FACTS):
    return {"tensors": pack({POINT: tensor}), "rows": rows, "more": False, "requests": {"7-abc": facts}}


def tape_of(*parts, speculative=False):
    tape = EngineTape([POINT], None, speculative=speculative)
    for each in parts:
        tape.add(POINT, [each])
    tape.end()
    return tape


def test_parts_of_a_request_are_joined_in_the_order_of_its_tokens():
    tape = tape_of(part([["7-abc", 3, 0], ["7-abc", 2, 3], ["7-abc", 1, 5]], VALUES[:6]))
    assert torch.equal(tape.request("7")[POINT], VALUES[:6])


def test_a_token_that_was_computed_again_has_its_last_value():
    tape = tape_of(part([["7-abc", 3, 0]], VALUES[:3]), part([["7-abc", 4, 0]], VALUES[6:10]))
    assert torch.equal(tape.request("7")[POINT], VALUES[6:10])


def test_rows_of_rejected_drafts_are_cut_off_with_the_output_of_the_request():
    tape = tape_of(part([["7-abc", 6, 0]], VALUES[:6]), speculative=True)
    with pytest.raises(th.TapeError, match="decodes speculatively"):
        tape.request("7")
    output = Named(request_id="7", finished=True, prompt_token_ids=[1] * 4, outputs=[Named(index=0, token_ids=[5, 6])])
    assert torch.equal(tape.request(output)[POINT], VALUES[:5])


def test_a_gap_in_a_request_is_an_error():
    tape = tape_of(part([["7-abc", 2, 0], ["7-abc", 2, 3]], VALUES[:4]))
    with pytest.raises(th.TapeError, match="no value for token 2"):
        tape.request("7")[POINT]


def test_requests_that_had_the_same_id_are_named_by_what_distinguishes_them():
    tape = tape_of(part([["7-abc", 4, 0]], VALUES[:4]))
    tape.add(POINT, [part([["7-def", 4, 0]], VALUES[4:8]) | {"requests": {"7-def": FACTS}}])
    with pytest.raises(th.AmbiguousCall, match="'7-abc', '7-def'"):
        tape.request("7")
    assert torch.equal(tape.request("7-def")[POINT], VALUES[4:8])


def test_what_is_not_a_request_is_an_error_that_says_what_to_give():
    tape = tape_of(part([["7-abc", 4, 0]], VALUES[:4]))
    for given in (7, [Named(request_id="7")]):
        with pytest.raises(TypeError, match="the id of a request or its output"):
            tape.request(given)
    with pytest.raises(th.TapeError, match=r"tape.request\(output\)\['model.layers.1@resid'\]"):
        tape[POINT]


def test_values_that_workers_divide_are_joined():
    tape = EngineTape([POINT], None, speculative=False)
    tape.add(POINT, [part([["7-abc", 4, 0]], VALUES[:4]), part([["7-abc", 4, 0]], VALUES[4:8])])
    with pytest.raises(th.NotRecorded, match="read after its block"):
        tape.request("7")
    tape.end()
    assert torch.equal(tape.request("7")[POINT], torch.cat([VALUES[:4], VALUES[4:8]], dim=1))


def test_unknown_requests_and_points_are_errors_that_name_the_others():
    tape = tape_of(part([["7-abc", 4, 0]], VALUES[:4]))
    with pytest.raises(th.NotRecorded, match="It has these requests: 7"):
        tape.request("8")
    with pytest.raises(th.NotRecorded, match="Did you mean"):
        tape.request("7")["model.layers.2@resid"]


def test_tensors_travel_as_safetensors():
    given = {"a": torch.randn(3, 2).to(torch.bfloat16), "b": torch.arange(3)}
    assert all(torch.equal(tensor, given[name]) for name, tensor in unpack(pack(given)).items())


# -- options and errors --------------------------------------------------------------------------------------------


def test_declared_points_are_part_of_the_configuration_that_vllm_hashes():
    assert declare(POINT)["additional_config"]["tenterhook"]["points"] == [POINT]
    with pytest.raises(th.SessionError, match="name the points"):
        declare()
    with pytest.raises(th.AddressError):
        declare("model.{1..")


def test_attach_takes_an_engine():
    with pytest.raises(TypeError, match="takes an LLM or an AsyncLLM"):
        attach(torch.nn.Linear(1, 1))
