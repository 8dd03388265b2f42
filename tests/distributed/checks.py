"""What two processes check together. Every function here runs in both of them, in the order of the file."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tenterhook as th


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b, self.head = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.b(self.act(self.a(x)))
        return self.head(hidden)


def net():
    torch.manual_seed(0)
    return Net()


def inputs(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def mine():
    """The inputs of this process: each has others, as in training."""
    return inputs(dist.get_rank())


def same_everywhere(tensor):
    both = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.contiguous())
    return torch.equal(*both)


def alone(*points, x=None, **options):
    """The same recording of the same model in one process."""
    model = net()
    with th.record(model, *points, grad=True, **options) as tape:
        model(mine() if x is None else x).sum().backward()
    return tape


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ddp(**options):
    return DistributedDataParallel(net(), **options)


def check_that_ddp_shows_the_values_and_gradients_of_this_process():
    model, wanted = ddp(), alone("a", "act", "b:in", ":hidden")
    with th.record(model, "module.a", "module.act", "module.b:in", "module:hidden", grad=True) as tape:
        model(mine()).sum().backward()
    for name in wanted:
        own = f"module{name}" if name.startswith(":") else f"module.{name}"
        assert torch.equal(tape[own], wanted[name])
        assert torch.equal(tape.grad[own], wanted.grad[name])


def check_that_ddp_shows_gradients_of_parameters_before_they_are_averaged():
    model, wanted = ddp(), alone("a.weight")
    with th.record(model, "module.a.weight", grad=True) as tape:
        model(mine()).sum().backward()
    assert torch.equal(tape.grad["module.a.weight"], wanted.grad["a.weight"])
    assert not same_everywhere(tape.grad["module.a.weight"])
    assert same_everywhere(model.module.a.weight.grad)


def check_that_an_edit_of_a_parameters_gradient_under_ddp_is_averaged_with_the_others():
    for way in ("grad", "accumulated"):
        model = ddp()
        with th.edit(model, **{way: {"module.head.bias": lambda g: torch.full_like(g, dist.get_rank())}}):
            model(mine()).sum().backward()
        assert torch.equal(model.module.head.bias.grad, torch.full((2,), 0.5))


def check_that_an_edit_under_ddp_takes_effect_and_the_gradients_are_still_averaged():
    model, plain = ddp(), net()
    with th.edit(model, {"module.act": th.scale(2), "module.a.weight": th.scale(3)}):
        found = model(mine())
        found.sum().backward()
    with th.edit(plain, {"act": th.scale(2), "a.weight": th.scale(3)}):
        assert torch.equal(found, plain(mine()))
    assert same_everywhere(model.module.a.weight.grad)


def check_that_ddp_goes_on_after_a_stop():
    model, wanted = ddp(), alone("act")
    for _ in range(2):
        with th.record(model, "module.act", stop=True) as tape:
            model(mine())
        assert torch.equal(tape["module.act"], wanted["act"])
        model(mine()).sum().backward()
    assert same_everywhere(model.module.a.weight.grad)


def check_that_a_session_may_be_opened_before_ddp_wraps_the_model():
    model, wanted = net(), alone("a")
    with th.record(model, "a", grad=True) as tape:
        DistributedDataParallel(model)(mine()).sum().backward()
    assert torch.equal(tape.grad["a"], wanted.grad["a"])


def check_that_ddp_has_the_names_of_the_plain_model():
    wanted = alone("**", "a.weight")
    for model in (ddp(), DistributedDataParallel(torch.compile(net(), backend="eager"))):
        with th.record(model, "**", "a.weight", grad=True) as tape:
            model(mine()).sum().backward()
        assert (list(tape), tape.in_order()) == (list(wanted), wanted.in_order())
        assert all(torch.equal(tape[name], wanted[name]) for name in wanted)


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def check_that_fsdp1_has_the_names_of_the_plain_model():
    inner, wanted = net(), alone("**", "head.bias")
    inner.a = FullyShardedDataParallel(inner.a, device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    with torch.no_grad(), th.record(model, "**") as tape:
        model(mine())
    assert set(tape) == set(wanted) - {"head.bias"}
    assert all(torch.equal(tape[name], wanted[name]) for name in tape)
    with torch.no_grad(), th.edit(model, {"act": th.zero()}), th.record(model, "b:in") as tape:
        model(mine())
    assert not tape["b:in"].any()


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def fsdp(*, layers=True):
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for layer in (model.a, model.b, model.head) if layers else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def all_spread(model):
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_that_fsdp_shows_the_values_and_gradients_of_this_process():
    model, wanted = fsdp(), alone("a", "act", "b:in", ":hidden")
    with th.record(model, "a", "act", "b:in", ":hidden", grad=True) as tape:
        model(mine()).sum().backward()
    for name in wanted:
        assert torch.equal(tape[name], wanted[name])
        assert torch.equal(tape.grad[name], wanted.grad[name])
    assert all_spread(model)


def check_that_fsdp_shows_a_parameter_as_a_dtensor_or_gathered():
    model, weight = fsdp(), net().a.weight
    with th.record(model, "a.weight") as tape:
        model(mine())
    with th.record(model, "a.weight", gather=True) as whole:
        model(mine())
    assert isinstance(tape["a.weight"], DTensor)
    assert tape["a.weight"].to_local().shape == (4, 4)
    assert type(whole["a.weight"]) is torch.Tensor
    assert torch.equal(whole["a.weight"], weight)


def check_that_an_edit_of_a_value_under_fsdp_takes_effect():
    model, plain = fsdp(), net()
    with th.edit(model, {"act": th.zero()}, grad={"b": th.scale(2)}):
        found = model(mine())
        found.sum().backward()
    with th.edit(plain, {"act": th.zero()}):
        assert torch.equal(found, plain(mine()))
    assert all_spread(model)


def check_that_an_edit_of_a_parameter_under_fsdp_gets_the_whole_one():
    for layers in (True, False):
        model, plain, seen = fsdp(layers=layers), net(), []

        def halve(weight, seen=seen):
            seen.append(weight.shape)
            return weight / 2

        with th.edit(model, {"b.weight": halve}):
            found = model(mine())
            found.sum().backward()
        with th.edit(plain, {"b.weight": lambda weight: weight / 2}):
            assert torch.equal(found, plain(mine()))
        assert seen[0] == (4, 8)
        assert all_spread(model)
        assert torch.equal(model(mine()), plain(mine()))


def check_that_gradients_of_parameters_under_fsdp_are_refused_before_and_open_after_the_reduction():
    model = fsdp()
    with pytest.raises(th.NeverReached), th.edit(model, grad={"b.bias": th.zero()}):
        model(mine()).sum().backward()
    with th.record(model, "b.bias", grad=True) as tape:
        model(mine()).sum().backward()
    with pytest.raises(th.GradientError):
        tape.grad["b.bias"]
    model.zero_grad()
    with th.edit(model, accumulated={"b.bias": lambda g: g * 0}):
        model(mine()).sum().backward()
    assert torch.equal(model.b.bias.grad.full_tensor().abs(), torch.zeros(4))


def check_that_a_stop_under_fsdp_leaves_no_parameter_gathered():
    wanted, plain = alone("act"), net()
    for layers in (True, False):
        model = fsdp(layers=layers)
        for _ in range(3):
            with th.record(model, "act", stop=True) as tape:
                model(mine())
            assert torch.equal(tape["act"], wanted["act"])
            assert all_spread(model)
        found = model(mine())
        found.sum().backward()
        assert torch.equal(found, plain(mine()))
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


# --- tensor parallel --------------------------------------------------------------------------------------------------


def tensor_parallel(*, local):
    plan = {"a": ColwiseParallel(use_local_output=local), "b": RowwiseParallel()}
    return parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)


def check_that_tensor_parallel_points_show_what_the_plan_says():
    x, wanted = inputs(), alone("a", "b", x=inputs())
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    model = tensor_parallel(local=True)
    with th.record(model, "a", "b", "b:in", grad=True) as tape:
        model(x).sum().backward()
    assert torch.allclose(tape["a"], wanted["a"][:, part])
    assert torch.allclose(tape.grad["a"], wanted.grad["a"][:, part])
    assert type(tape["b"]) is torch.Tensor  # Not the promise of one that is still on its way.
    assert torch.allclose(tape["b"], wanted["b"])
    assert isinstance(tape["b:in"], DTensor)


def check_that_gather_puts_a_spread_value_together():
    x, wanted = inputs(), alone("a", "b", x=inputs())
    model = tensor_parallel(local=False)
    with th.record(model, "a", "b", gather=True, grad=True) as tape:
        model(x).sum().backward()
    with th.record(model, "a") as parts:
        model(x)
    assert isinstance(parts["a"], DTensor)
    assert type(tape["a"]) is torch.Tensor
    assert torch.allclose(tape["a"], wanted["a"])
    assert type(tape.grad["a"]) is torch.Tensor
    assert torch.allclose(tape.grad["a"], wanted.grad["a"])
    with tempfile.TemporaryDirectory() as folder:
        tape_file = Path(folder) / "run.th"
        with pytest.raises(th.TapeFileError, match="full_tensor"):
            parts.save(tape_file)
        with th.record(model, "a", gather=True) as tape:
            model(x)
        tape.save(tape_file)
        assert torch.equal(th.load(tape_file)["a"], tape["a"])


def check_that_gather_puts_gradients_of_inputs_variables_and_parameters_together():
    names = ("b:in", "act", "a.weight", "b.bias", ":hidden")
    x, wanted = inputs(), alone(*names, x=inputs())
    for local in (True, False):
        model = tensor_parallel(local=local)
        with th.record(model, *names, gather=True, grad=True) as tape:
            model(x).sum().backward()
            model(x).sum().backward()
        for name in ("a.weight", "b.bias"):
            assert type(tape.grad[name]) is torch.Tensor, name
            assert torch.allclose(tape.grad[name], 2 * wanted.grad[name], atol=1e-6), name
        for name in ("b:in", "act", ":hidden"):
            if local and name == "act":  # A local part is a plain tensor, of which nobody knows that it is a part.
                assert tape.grad["act#0"].shape == (3, 4)
                continue
            for call in range(2):
                found = tape.grad[f"{name}#{call}"]
                assert type(found) is torch.Tensor, name
                assert torch.allclose(found, wanted.grad[name], atol=1e-6), name


def check_that_a_gathered_value_that_every_process_has_is_not_reached_by_a_later_change_in_place():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            y = self.inner(x)
            y.mul_(2)
            return y

    model, mesh, x = Doubles(), init_device_mesh("cpu", (2,)), inputs()
    with th.record(model, "inner", gather=True, copy="never") as tape:
        model(DTensor.from_local(x.clone(), mesh, [Replicate()], run_check=False))
    assert torch.equal(tape["inner"], x)


def check_that_gradients_are_spread_as_their_values_are_without_gather():
    x, wanted, model = inputs(), alone("a", "b:in", x=inputs()), tensor_parallel(local=False)
    with th.record(model, "a", "b:in", grad=True) as tape:
        model(x).sum().backward()
    for name in wanted:
        assert isinstance(tape.grad[name], DTensor)
        assert torch.allclose(tape.grad[name].full_tensor(), wanted.grad[name], atol=1e-6)


def check_that_ready_edits_of_a_spread_value_mean_the_whole_one():
    x, model, plain = inputs(), tensor_parallel(local=False), net()
    for edit in (th.zero(at=th.at[:, :3]), th.set(torch.ones(3, 8)), th.add(torch.ones(8)), th.noise(0.1), th.mean(1)):
        with th.edit(model, {"act": edit}):
            found = model(x)
        with th.edit(plain, {"act": edit}):
            assert torch.allclose(found, plain(x), atol=1e-6), edit


def check_that_ready_edits_of_a_local_part_mean_that_part():
    x, model, plain = inputs(), tensor_parallel(local=True), net()
    with th.edit(model, {"act": th.zero(at=th.at[:, 0])}):
        found = model(x)
    with th.edit(plain, {"act": th.zero(at=th.at[:, [0, 4]])}):
        assert torch.allclose(found, plain(x), atol=1e-6)


def check_that_a_function_that_gives_a_plain_tensor_for_a_spread_one_is_an_error():
    model = tensor_parallel(local=False)
    with pytest.raises(th.EditError, match="DTensor"), th.edit(model, {"act": lambda v: torch.zeros(v.shape)}):
        model(inputs())


def check_that_edits_of_parameters_and_gradients_under_tensor_parallel_are_those_of_one_process():
    x, model, plain = inputs(), tensor_parallel(local=True), net()
    for each in (model, plain):
        with th.edit(each, {"a.weight": lambda w: w * 2}, grad={"act": lambda g: g * 3}):
            each(x).sum().backward()
    assert torch.allclose(model.a.weight.grad.full_tensor(), plain.a.weight.grad, atol=1e-6)


def check_that_a_stop_under_tensor_parallel_hangs_nothing():
    x, model, wanted = inputs(), tensor_parallel(local=True), alone("b", x=inputs())
    for point in ("a", "b"):
        with th.record(model, point, stop=True) as tape:
            model(x)
    assert torch.allclose(tape["b"], wanted["b"])
    assert torch.allclose(model(x), net()(x), atol=1e-6)


# --- pipeline stages --------------------------------------------------------------------------------------------------


def pipeline(schedule):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())
    part = whole[:2] if dist.get_rank() == 0 else whole[2:]
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    return whole, part, schedule(stage, 2, loss_fn=nn.functional.mse_loss)


X4 = torch.linspace(-1, 1, 16).reshape(4, 4)


def run(schedule):
    return schedule.step(X4) if dist.get_rank() == 0 else schedule.step(target=torch.zeros(4, 4))


def check_that_a_pipeline_stage_shows_one_call_for_each_microbatch():
    for kind in (ScheduleGPipe, Schedule1F1B):
        whole, part, schedule = pipeline(kind)
        path = "0" if dist.get_rank() == 0 else "2"
        with th.record(whole, path) as wanted:
            whole(X4)
        with th.record(part, part_name(part), grad=True) as tape:
            run(schedule)
        calls = tape.calls(part_name(part))
        assert len(calls) == 3  # A new stage's first step makes one call more, which finds out the shapes.
        assert torch.allclose(torch.cat(calls[1:]), wanted[path])
        assert all(tape.grad[f"{part_name(part)}#{call}"].shape == calls[call].shape for call in (1, 2))


def check_that_a_stop_in_a_pipeline_says_that_it_cannot_and_nobody_waits():
    for kind in (ScheduleGPipe, Schedule1F1B):
        whole, part, schedule = pipeline(kind)
        path, point = ("0" if dist.get_rank() == 0 else "2"), part_name(part)
        with th.record(whole, path) as wanted:
            whole(X4)
        with pytest.warns(th.TenterhookWarning, match="pipeline stage"), th.record(part, point, stop=True) as tape:
            run(schedule)
            ended = False
        assert ended is False, "the block was ended before its last line"
        assert torch.allclose(torch.cat(tape.calls(point)[1:]), wanted[path])
        assert (found := run(schedule)) is None or torch.allclose(found, whole(X4))  # The schedule goes on as ever.


def check_that_the_module_of_a_stage_can_be_stopped_by_itself():
    _, part, _ = pipeline(ScheduleGPipe)
    given = torch.zeros(1, part[0].in_features)
    with th.record(part, part_name(part), stop=True) as tape:
        part(given)
        raise AssertionError("it went on")
    assert torch.equal(tape[part_name(part)], part[0](given))


def part_name(part):
    return next(name for name, _ in part.named_children())


def check_that_an_edit_of_one_stage_reaches_the_next():
    whole, part, schedule = pipeline(ScheduleGPipe)
    # Not zero(): what it gives takes part in no gradient, and PyTorch 2.12 refuses a stage that has none to send back.
    with th.edit(part, {"1": th.scale(0.0)}) if dist.get_rank() == 0 else contextlib.nullcontext():
        found = run(schedule)
    if dist.get_rank() == 1:
        assert torch.allclose(found, torch.tanh(whole[2].bias).expand(4, 4))


# --- features ---------------------------------------------------------------------------------------------------------


def check_that_features_train_under_ddp():
    # What lies after the last feature gets no gradient: it is frozen, or DDP is told to look for such.
    for frozen in (True, False):
        body = th.features(net(), {"act": "low", "b": "high"})
        body.head.requires_grad_(not frozen)
        train_features(body, DistributedDataParallel(body, find_unused_parameters=not frozen))


def train_features(body, model):
    for _ in range(3):
        model.zero_grad()
        found = model(mine())
        (found["high"].sum() + found["low"].square().sum()).backward()
    assert list(found) == ["low", "high"]
    gradients = []
    for rank in range(2):
        twin = net()
        low = twin.act(twin.a(inputs(rank)))
        (twin.b(low).sum() + low.square().sum()).backward()
        gradients.append(twin.a.weight.grad)
    assert torch.allclose(body.a.weight.grad, (gradients[0] + gradients[1]) / 2, atol=1e-6)
    assert same_everywhere(body.a.weight.grad)


# --- watch ------------------------------------------------------------------------------------------------------------


def watched(model, steps=3, **options):
    """Train on the inputs of this process. A unit of the activation is dead in rank 1 only."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with th.watch(model, optimizer=optimizer, ranks=True, on_nan="record", **options) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            model(mine()).sum().backward()
            optimizer.step()
    return watch


def check_that_a_watch_reduces_its_statistics_over_ranks():
    model = DistributedDataParallel(net())
    watch = watched(model)
    with torch.no_grad():
        both = net().a(torch.cat([inputs(0), inputs(1)]))
    row = watch.pages[0].column("count", "values"), watch.pages[0].column("norm", "values")
    assert row[0]["a"] == both.numel()
    assert row[1]["a"] == pytest.approx(float(both.norm()), rel=1e-5)
    assert watch.pages[0].column("mean", "values")["a"] == pytest.approx(float(both.mean()), rel=1e-4)
    # Every process has the same parameters and, after the exchange of DDP, the same gradients: they are not added up.
    assert watch.pages[0].column("count", "parameters")["a.weight"] == 32
    assert watch.pages[0].column("count", "gradients")["a.weight"] == 32
    assert same_everywhere(torch.tensor([watch.pages[-1].column("norm", "values")["head"]]))


def check_that_a_finding_names_its_rank():
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act, self.out = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.act(self.fc(x - 1e6 * dist.get_rank())))

    torch.manual_seed(0)
    watch = watched(DistributedDataParallel(Rectified()), steps=4, thresholds={"dead_steps": 3, "vanishing": 0})
    [dead] = [each for each in watch.findings if each.kind == "dead units" and each.evidence["dead"] > 2]
    assert 1 in dead.ranks
    assert "on rank" in str(dead)


def check_that_a_nan_of_one_rank_is_known_everywhere():
    class Breaks(nn.Linear):
        def forward(self, x):
            return super().forward(x).log() if dist.get_rank() else super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Breaks(4, 2))
    watch = watched(model, steps=1)
    assert watch.nonfinite.rank == 1
    assert watch.nonfinite.address == "1"
    assert "on rank 1" in str(watch.nonfinite)


def check_that_a_watch_adds_up_the_shards_of_fsdp():
    model = net()
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    watch = watched(model)
    plain = net()
    assert watch.pages[0].column("count", "parameters")["a.weight"] == plain.a.weight.numel()
    assert watch.pages[0].column("norm", "parameters")["a.weight"] == pytest.approx(
        float(plain.a.weight.norm()), rel=1e-2
    )


def check_that_only_the_first_rank_writes():
    class Keeps:
        def __init__(self):
            self.steps = []

        def write(self, page, _findings, _history):
            self.steps.append(page.step)

        def close(self):
            pass

    sink = Keeps()
    watched(DistributedDataParallel(net()), sinks=[sink])
    assert sink.steps == ([0, 1, 2] if dist.get_rank() == 0 else [])


CHECKS = {name: function for name, function in globals().items() if name.startswith("check_that_")}
