"""``th.cost`` on small models, against PyTorch's own counters and counts by hand."""

import pytest
import torch
from counters import counted
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import Mixed, Residual, no_leak, untouched

WIDTH, BATCH = 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        wide = self.up(self.norm(x))
        wide = torch.tanh(wide)
        return x + self.drop(self.down(wide))


class Net(nn.Module):
    """A stack of blocks, some of them under activation checkpointing."""

    def __init__(self, reentrant=None, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def inputs():
    return torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH).requires_grad_()


UP, HEAD = 2 * BATCH * WIDTH * 64, 2 * BATCH * WIDTH * 2  # FLOPs of the layers, by hand
FORWARD = 3 * 2 * UP + HEAD


def test_flops_of_each_module_are_those_counted_by_hand():
    cost = th.cost(Net(), inputs())
    assert (cost.flops, cost.backward_flops) == (FORWARD, 2 * FORWARD)
    assert (cost["blocks.0"].flops, cost["blocks.0.up"].flops, cost["head"].flops) == (2 * UP, UP, HEAD)
    assert cost["blocks.0.up"].backward_flops == 2 * UP
    assert cost["blocks.0"].own_flops == 0
    assert sum(each.own_flops for each in cost) == cost.flops


def test_parameters_and_calls_are_counted():
    net = Net()
    cost = th.cost(net, inputs())
    assert cost.parameters == sum(each.numel() for each in net.parameters())
    assert (cost["blocks.1"].calls, cost["blocks.1.up"].parameters) == (1, WIDTH * 64 + 64)
    assert cost["blocks.1.up"].activation_bytes == BATCH * 64 * 4
    assert cost["blocks.1.up"].input_bytes == BATCH * WIDTH * 4


def test_saved_bytes_name_the_line_that_saved_them():
    cost = th.cost(Net(), inputs())
    [tanh] = [each for each in cost.saved if "torch.tanh" in str(each.line) and each.address == "blocks.0"]
    assert (tanh.bytes, tanh.shape, tanh.dtype) == (BATCH * 64 * 4, (BATCH, 64), "float32")
    assert cost["blocks.0"].own_saved_bytes == tanh.bytes
    assert sum(each.bytes for each in cost.saved) == cost.saved_bytes == sum(each.own_saved_bytes for each in cost)


def test_memory_that_two_operations_save_is_counted_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x.exp()  # saves y
            return y.sin() + y.cos() + y * y  # each saves y

    cost = th.cost(Twice(), torch.ones(5, requires_grad=True))
    assert cost.saved_bytes == 5 * 4
    assert cost.saved[0].tensors == 5


def test_memory_of_a_branch_that_is_dropped_is_not_saved():
    class Drops(nn.Module):
        def forward(self, x):
            x.exp().detach()
            return x.sin()

    x = torch.ones(5, requires_grad=True)
    assert th.cost(Drops(), x).saved_bytes == x.nbytes


@pytest.mark.parametrize("build", [Net, lambda: Net(False), lambda: Net(True), Mixed, Residual])
def test_totals_equal_the_counters_of_pytorch(build):
    torch.manual_seed(0)
    model = build()
    x = inputs() if isinstance(model, Net) else torch.ones(2, 4)
    cost = th.cost(model, x)
    assert (cost.flops, cost.backward_flops, cost.saved_bytes) == counted(model, lambda: model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_belongs_to_its_modules_and_is_counted_apart(reentrant):
    plain, cost = th.cost(Net(), inputs()), th.cost(Net(reentrant), inputs())
    again = 3 * 2 * UP
    assert cost.totals.recomputed_flops == again
    assert cost.backward_flops == plain.backward_flops + again
    assert cost["blocks.1"].recomputed_flops * 3 == again
    assert cost[""].backward_flops == cost.backward_flops
    assert cost.saved_bytes < plain.saved_bytes / 3


def test_the_model_is_as_before():
    net, x = Net(), inputs()
    net(x).sum().backward()
    before = [each.grad.clone() for each in net.parameters()]
    x.grad = None
    with untouched(net), no_leak():
        th.cost(net, x, time=True, try_advice=True)
    assert all(torch.equal(each.grad, was) for each, was in zip(net.parameters(), before, strict=True))
    assert x.grad is None


def test_the_model_is_as_before_after_an_error():
    net = Net()
    with untouched(net), pytest.raises(th.CostError):
        th.cost(net, torch.ones(2, 3))


def test_a_hook_that_steps_an_optimizer_does_not_run():
    net = nn.Linear(2, 2)
    net.weight.register_post_accumulate_grad_hook(lambda weight: weight.data.zero_())
    with untouched(net):
        assert th.cost(net, torch.ones(1, 2)).backward_flops == 8


def test_without_backward_nothing_is_saved():
    cost = th.cost(Net(), inputs(), backward=False)
    assert cost.flops == FORWARD
    with pytest.raises(th.NotRecorded, match="backward=True"):
        _ = cost.saved_bytes


def test_the_meta_device_gives_everything_but_the_time():
    torch.manual_seed(0)
    real = th.cost(Net(), inputs())
    cost = th.cost(Net().to("meta"), inputs())  # The input may be on the CPU.
    assert (cost.flops, cost.backward_flops, cost.saved_bytes) == (real.flops, real.backward_flops, real.saved_bytes)
    assert abs(cost.peak_bytes - real.peak_bytes) < 0.02 * real.peak_bytes
    with pytest.raises(th.NotRecorded, match="time=True"):
        _ = cost.seconds
    with pytest.raises(th.CostError, match="meta device"):
        th.cost(Net().to("meta"), inputs(), time=True)


def test_a_model_much_larger_than_the_memory_has_a_cost_on_the_meta_device():
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(8)))
    cost = th.cost(net, torch.empty(4, 100_000, device="meta"))
    assert cost.flops == 8 * 2 * 4 * 100_000**2
    assert cost.peak_bytes > 2 * 8 * 4 * 100_000**2  # Weights and their gradients: 640 GB.


def test_the_peak_is_that_of_the_allocations():
    net = nn.Sequential(nn.Linear(100, 100, bias=False), nn.ReLU())
    x = torch.ones(10, 100)
    cost = th.cost(net, x)
    weight, rows = 100 * 100 * 4, 10 * 100 * 4
    assert cost.totals.base_bytes == weight + rows
    # The gradient of the weight joins the weight, x, the gradient of the ReLU's input, the loss and its gradient.
    assert cost.peak_bytes == 2 * weight + 2 * rows + 2 * 4
    assert max(each.bytes for each in cost.timeline) == cost.peak_bytes


def test_autocast_is_counted_as_it_runs():
    net, x = Net(), inputs()
    plain = th.cost(net, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cost = th.cost(net, x)
        assert counted(net, lambda: net(x))[2] == cost.saved_bytes
    assert cost.flops == plain.flops
    assert {"bfloat16"} < {each.dtype for each in cost.saved}


def test_composite_operations_are_counted_in_inference_mode():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.ones(2, 4, 8)
    with torch.inference_mode():
        cost = th.cost(attention, x, x, x, backward=False, need_weights=False)
        with FlopCounterMode(display=False) as mode:
            attention(x, x, x, need_weights=False)
    assert cost.flops == mode.get_total_flops() > 0


def test_keyword_arguments_reach_the_model_and_a_loss_is_differentiated():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale):
            return super().forward(x) * scale

    cost = th.cost(Scaled(2, 1), torch.ones(4, 2), scale=3, loss=lambda y: (y @ y.T).mean())
    assert cost.flops == 2 * 4 * 2 + 2 * 4 * 4  # The loss is outside of the model.
    assert cost[""].flops == 2 * 4 * 2


def test_edits_that_are_open_are_part_of_the_cost():
    net = Net()
    with th.edit(net, {"blocks.1": th.skip()}):
        assert th.cost(net, inputs()).flops == FORWARD - 2 * UP


def test_a_recording_must_be_closed_first():
    net = Net()
    session = th.record(net).start()
    try:
        with pytest.raises(th.SessionError, match="record session"):
            th.cost(net, inputs())
    finally:
        net(inputs())
        session.close()


# -- lines, tables, advice --------------------------------------------------------------------------------------------


def test_lines_of_a_forward_have_the_costs_of_what_they_call():
    cost = th.cost(Net(), inputs(), lines="blocks.*")
    up, tanh, down = cost.lines("blocks.2")
    assert "self.up" in up.line.source
    assert "tanh" in tanh.line.source
    assert "self.down" in down.line.source
    assert (up.flops, up.backward_flops, tanh.flops, down.flops) == (UP, 2 * UP, 0, UP)
    assert tanh.saved_bytes == BATCH * 64 * 4
    assert sum(each.saved_bytes for each in (up, tanh, down)) == cost["blocks.2"].saved_bytes
    with pytest.raises(th.NotRecorded, match="lines='head'"):
        cost.lines("head")


def test_equal_siblings_are_one_row_of_the_tree():
    text = str(th.cost(Net(), inputs()))
    assert "0 … 2, each" in text
    assert text.count("up ") == 1


def test_modules_are_sorted_by_any_column():
    cost = th.cost(Net(), inputs())
    assert [each.address for each in cost.by("own_flops", 2)] == ["blocks.0.up", "blocks.0.down"]
    assert "blocks.0.up" in str(cost.sorted_table("own_flops", 3))
    with pytest.raises(ValueError, match="saved_bytes"):
        cost.by("flop")
    with pytest.raises(th.NotRecorded, match=r"no module has 'seconds': .*time=True"):
        cost.sorted_table("seconds")


def test_an_unknown_address_is_answered_with_the_nearest():
    with pytest.raises(th.AddressError, match=r"blocks\.1"):
        _ = th.cost(Net(), inputs())["blocks.7"]


def test_advice_is_computed_and_when_tried_it_is_what_checkpointing_does():
    net, x = Net(blocks=8), inputs().detach().repeat(64, 1)
    [advice] = th.cost(net, x).advice
    assert advice.blocks == tuple(f"blocks.{each}" for each in range(8))
    assert not advice.measured
    before, after = th.cost(net, x), th.cost(net, x, checkpoint=list(advice.blocks))
    [tried] = th.cost(net, x, try_advice=True).advice
    assert tried.measured
    assert tried.saves_bytes == before.peak_bytes - after.peak_bytes > 0
    assert abs(tried.saves_bytes - advice.saves_bytes) < 0.3 * tried.saves_bytes
    assert after.totals.recomputed_flops == 64 * 8 * 2 * UP


def test_time_is_measured_for_the_whole_and_for_each_module():
    cost = th.cost(Net(), inputs(), time=True)
    assert cost.seconds > 0
    assert cost.backward_seconds > 0
    block = cost["blocks.0"]
    inside = [cost[f"blocks.0.{name}"] for name in ("norm", "up", "down", "drop")]
    assert all(each.seconds > 0 and each.backward_seconds > 0 for each in inside)
    assert block.seconds > sum(each.seconds for each in inside)
    assert cost[""].seconds > sum(cost[f"blocks.{each}"].seconds for each in range(3))


def test_the_share_of_the_peak_needs_a_known_peak():
    from tenterhook.cost.peaks import Peak

    cost = th.cost(Net(), inputs(), time=True)
    assert cost["head"].roofline is None
    assert any("peak speed of cpu is not known" in note for note in cost.notes)
    given = th.cost(Net(), inputs(), time=True, peak=Peak({torch.float32: 1e12}, 1e11))
    assert 0 < given["head"].roofline < 1


# -- what cannot be measured ------------------------------------------------------------------------------------------


def test_a_missing_input_is_named_and_the_parameters_are_given():
    with pytest.raises(th.CostError, match=r"Net needs x: th\.cost\(model, x\)") as caught:
        th.cost(Net())
    assert caught.value.cost["head"].parameters == 2 * WIDTH + 2
    assert "not run" in str(caught.value.cost)
    with pytest.raises(th.NotRecorded):
        _ = caught.value.cost.flops


def test_a_model_that_cannot_run_on_the_meta_device_says_so_and_gives_what_is_known():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return self.second(x[x.nonzero()[:, 0]])

    with pytest.raises(th.CostError, match=r"cannot run on meta.*\n.*with weights") as caught:
        th.cost(Picks().to("meta"), torch.ones(3, 4))
    assert caught.value.cost["first"].flops == 2 * 3 * 4 * 4
    assert caught.value.cost["second"].parameters == 20


def test_on_the_meta_device_a_model_may_look_at_its_inputs_and_at_positions():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, mask):
            positions = torch.arange(4, device=x.device)
            if bool((positions.diff() == 1).all()) and not bool(mask.all()):
                x = self.fc(x)
            positions += 1
            return self.fc(x) if int(positions[-1]) == 4 else x

    x = torch.ones(3, 4)
    for mask, calls in ((torch.tensor([True, False]), 2), (torch.tensor([True, True]), 1)):
        assert th.cost(Looks(), x, mask)["fc"].calls == calls
        assert th.cost(Looks().to("meta"), x, mask)["fc"].calls == calls


@pytest.mark.filterwarnings("ignore")
def test_a_language_model_on_the_meta_device_has_the_cost_that_it_has_with_a_fused_kernel():
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, attn_pdrop=0.0)  # The kernel of the CPU takes no dropout.
    ids = torch.arange(32).reshape(2, 16)
    real = th.cost(GPT2LMHeadModel(config), ids, labels=ids)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    found = th.cost(model, ids, labels=ids)
    # PyTorch does not count that kernel's operations, but those of its products in single steps.
    assert found.flops == th.cost(GPT2LMHeadModel(GPT2Config(**sizes)), ids, labels=ids).flops
    assert 0 <= found.saved_bytes - real.saved_bytes < 64 * 2  # In each block, the state of the random numbers.
    assert found["transformer.h.0.attn"].saved_bytes < 1.01 * real["transformer.h.0.attn"].saved_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_mask_saves_no_products_on_the_meta_device(dtype):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8, dtype=dtype)

        def forward(self, x, mask=None):
            x = self.fc(x)
            return F.scaled_dot_product_attention(x, x, x, mask, dropout_p=0.1)

    x, mask = torch.randn(2, 4, 128, 8, dtype=dtype), torch.ones(128, 128, dtype=torch.bool)
    products = 2 * 4 * 128 * 128 * x.itemsize
    assert th.cost(Attends(), x).saved_bytes > products
    model = Attends().to("meta")
    assert th.cost(model, x).saved_bytes < products
    assert th.cost(model, x, mask).saved_bytes < products


def test_an_error_of_the_model_names_its_module():
    with pytest.raises(th.CostError, match=r"cannot run on cpu in 'blocks\.0\.norm'") as caught:
        th.cost(Net(), torch.ones(3, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(th.SelectorError):
        th.cost(torch.ones(2), torch.ones(2))


# -- compiled models --------------------------------------------------------------------------------------------------


def test_a_compiled_model_has_the_costs_of_its_modules_and_the_totals_of_its_graphs():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    compiled, x = torch.compile(net, backend="aot_eager"), torch.ones(3, 4)
    plain = th.cost(net, x)
    cost = th.cost(compiled, x)
    assert (cost.flops, cost["2"].flops, cost.saved_bytes) == (plain.flops, plain["2"].flops, plain.saved_bytes)
    assert 0 < cost.totals.compiled.saved_bytes <= plain.saved_bytes
    assert "Compiled: " in str(cost)
