"""Scenarios that load the compiler, torch.export or torch.distributed."""

import socket
import warnings

import torch
from sabotage_scenarios import Net, Scenario, X, by_hand, gradients_in, gradients_of, loss_of, made, scenario

__all__: list[str] = []


def _compiled_model(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def _compiled_in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


def _prefix(call):
    """The name under which a compiled model has the model itself; a sabotage may have given it another one."""
    names = [name for name, _ in call.named_children()]
    return f"{names[0]}." if len(names) == 1 else ""


@scenario("compiled model, record", slow=True)
def compiled_record():
    truth = []
    for _ in range(2):
        model, x = made()
        values = by_hand(model, x)
        truth += [values["first"].detach(), values["first.lin"].detach(), values[":return"].detach()]

    def run(th):
        found = []
        for way in (_compiled_model, _compiled_in_place):
            model, x = made()
            call = way(model)
            call(x)
            at = _prefix(call)
            with th.record(call, f"{at}first", f"{at}first:inner") as tape:
                out = call(x).detach()
            found += [tape[f"{at}first"], tape[f"{at}first:inner"], out]
        return found

    return Scenario(truth, run, ())


@scenario("compiled model, edit", slow=True)
def compiled_edit():
    model, x = made()
    wanted = by_hand(model, x, first=lambda v: v * 2)[":return"].detach()
    plain = by_hand(model, x)[":return"].detach()
    truth = [plain, wanted, plain, gradients_of(model, x, first=lambda v: v * 2)]

    def run(th):
        call = _compiled_model(model)
        before = call(x).detach()
        with th.edit(call, {f"{_prefix(call)}first": th.scale(2)}):
            out = call(x)
            loss_of(out).backward()
        return [before, out.detach(), call(x).detach(), gradients_in(model, x)]

    return Scenario(truth, run, (model.first, model.second))  # torch.compile marks the model itself.


@scenario("compiled model, stop", slow=True)
def compiled_stop():
    model, x = made()
    truth = by_hand(model, x)["first"].detach()

    def run(th):
        call = _compiled_model(model)
        call(x)
        with th.record(model, "first", stop=True) as tape:
            call(x)
        return tape["first"]

    return Scenario(truth, run, (model.first, model.second))


@scenario("compiled model, graph breaks", slow=True)
def compiled_breaks():
    model, x = made()
    truth = [by_hand(model, x)["first"].detach(), by_hand(model, x, first=lambda v: v * 2)[":return"].detach()]

    def breaks(x):
        out = model.first(x)
        torch._dynamo.graph_break()
        return model.head(model.second(out))

    def run(th):
        call = torch.compile(breaks, backend="eager")
        call(x)
        with th.record(model, "first") as tape:
            call(x)
        with th.edit(model, {"first": th.scale(2)}):
            out = call(x).detach()
        return [tape["first"], out]

    return Scenario(truth, run, (model,))


@scenario("an edit is not exported", slow=True)
def exported():
    model, x = made()

    def run(th):
        from torch.fx.experimental.proxy_tensor import make_fx

        refused = []
        with th.edit(model, {"first": th.scale(2)}):
            for trace in (lambda: torch.export.export(model, (X,), strict=False), lambda: make_fx(model)(X)):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        trace()
                except th.SessionError:
                    refused.append(True)
            model(x)
        return refused

    return Scenario([True, True], run, (model,))


def _sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    model, mesh = Net(), init_device_mesh("cpu", (1,))
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _is_spread(model):
    from torch.distributed.tensor import DTensor

    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@scenario("stop under FSDP2", slow=True)
def sharded_stop():
    plain, x = made()
    truth = [by_hand(plain, x)["second"].detach(), True]

    def run(th):
        model = _sharded()
        with th.record(model, "second.lin", stop=True):
            model(X)
        with th.record(model, "second") as tape:
            spread = _is_spread(model)
            model(X)
        return [tape["second"], spread]

    return Scenario(truth, run, ())
