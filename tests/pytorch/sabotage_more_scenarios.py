"""More scenarios: hooks of others, stops, replays, sweeps, watches, audits, transforms, tracers and compiled models."""

import contextlib
import threading
import warnings

import torch
from sabotage_scenarios import Scenario, X, by_hand, gradients_of, loss_of, made, scenario
from torch import nn

__all__: list[str] = []


def _rounded(value):
    return float(f"{float(value):.5g}")


# -- hooks of other libraries ------------------------------------------------------------------------------------------


def _tripled(_module, _args, out):
    return out * 3


@scenario("a forward hook of another library")
def foreign_hook():
    model, x = made()
    model.first.register_forward_hook(_tripled)
    seen = by_hand(model, x, first=lambda v: v * 3)
    edited = by_hand(model, x, first=lambda v: v * 3 + 1)
    truth = [seen["first"].detach(), seen[":return"].detach(), edited[":return"].detach()]

    def run(th):
        with th.record(model, "first") as tape:
            out = model(x).detach()
        with th.edit(model, {"first": th.add(1.0)}):
            changed = model(x).detach()
        return [tape["first"], out, changed]

    return Scenario(truth, run, (model,))


@scenario("a forward hook added in a session")
def foreign_hook_later():
    model, x = made()
    truth = by_hand(model, x, first=lambda v: v * 3)["first"].detach()

    def run(th):
        with th.record(model, "first") as tape:
            handle = model.first.register_forward_hook(_tripled)
            try:
                model(x)
            finally:
                handle.remove()
        return tape["first"]

    return Scenario(truth, run, (model,))


@scenario("a hook for all modules")
def foreign_hook_everywhere():
    model, x = made()

    def hook(module, _args, out):
        return out * 3 if module is model.first else None

    truth = by_hand(model, x, first=lambda v: v * 3)["first"].detach()

    def run(th):
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            with th.record(model, "first") as tape:
                model(x)
        finally:
            handle.remove()
        return tape["first"]

    return Scenario(truth, run, (model,))


@scenario("a backward hook for all modules")
def foreign_backward_hook_everywhere():
    model, x = made()
    values = by_hand(model, x)
    truth = [*torch.autograd.grad(loss_of(values[":return"]), values["first"]), 6]

    def run(th):
        seen = []
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: seen.append(1))
        try:
            with th.record(model, "first", grad=True) as tape:
                loss_of(model(x)).backward()
        finally:
            handle.remove()
        return [tape.grad["first"], len(seen)]

    return Scenario(truth, run, (model,))


# -- stops -------------------------------------------------------------------------------------------------------------


@scenario("stop")
def stop():
    model, x = made()
    seen = []
    model.register_forward_hook(
        lambda _module, args, kwargs, out: seen.append((len(args), kwargs, out)), always_call=True, with_kwargs=True
    )
    model.first.register_forward_hook(lambda _module, args, _out: seen.append(len(args)), always_call=True)
    model.second.register_forward_pre_hook(lambda *_: seen.append("never"))
    truth = [by_hand(model, x)["first"].detach(), [1, (1, {}, None)]]

    def run(th):
        seen.clear()
        with th.record(model, "first", stop=True) as tape:
            model(x)
        return [tape["first"], list(seen)]

    return Scenario(truth, run, (model,))


@scenario("stop with a hook for all modules that always runs")
def stop_everywhere():
    model, x = made()
    seen = []
    truth = [by_hand(model, x)["first.lin"].detach(), ["Linear", "Block", "Net"]]

    def run(th):
        seen.clear()
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(type(module).__name__), always_call=True
        )
        try:
            with th.record(model, "first:inner", stop=True) as tape:
                model(x)
        finally:
            handle.remove()
        return [tape["first:inner"], list(seen)]

    return Scenario(truth, run, (model,))


# -- replays and sweeps ------------------------------------------------------------------------------------------------


@scenario("replay with an edit")
def replay():
    model, x = made()
    truth = [by_hand(model, x, second=torch.sin)[":return"].detach(), True]

    def run(th):
        with torch.no_grad(), th.record(model, replay=True) as tape:
            model(x)
        with torch.no_grad(), th.replay(model, tape) as session, th.edit(model, {"second": torch.sin}):
            out = model(x)
        return [out, "first" in session.served.calls]

    return Scenario(truth, run, (model,))


@scenario("sweep")
def sweep():
    model, x = made()
    truth = [
        torch.stack([_without_unit(model, x, unit)[0, 1] for unit in range(4)]).detach(),
    ]

    def run(th):
        cases = th.grid(lambda unit: {"first": th.zero(at=th.at[:, unit])}, unit=range(4))
        return [th.sweep(model, cases, lambda out: out[0, 1], x.detach()).values]

    return Scenario(truth, run, (model,))


def _without_unit(model, x, unit):
    keep = torch.ones(4, dtype=torch.float64)
    keep[unit] = 0
    return by_hand(model, x, first=lambda v: v * keep)[":return"]


# -- watches -----------------------------------------------------------------------------------------------------------

STATISTICS = ("count", "mean", "std", "min", "max", "norm")


def _statistics(tensors):
    every = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    found = (every.numel(), every.mean(), every.std(correction=0), every.min(), every.max(), every.norm())
    return [_rounded(each) for each in found]


class Nested(torch.optim.SGD):
    """Its step calls that of its base class, so that hooks of steps run twice for one step."""

    def step(self, closure=None):
        return super().step(closure)


@scenario("watch")
def watch():
    (model, x), (twin, _) = made(), made()
    twin.load_state_dict(model.state_dict())
    steps: dict[str, list] = {"values": [], "gradients": [], "parameters": []}
    for _ in range(3):
        values = by_hand(twin, x)
        values["first"].retain_grad()
        loss_of(values[":return"]).backward()
        steps["values"].append(values["first"])
        steps["gradients"].append(values["first"].grad)
        with torch.no_grad():  # As SGD does it; an optimizer would load the compiler.
            for each in twin.parameters():
                each.sub_(0.05 * each.grad)
                each.grad = None
        steps["parameters"].append(twin.head.weight.detach().clone())
    x.grad = None
    truth = {"steps": 3, **{kind: _statistics(found) for kind, found in steps.items()}}

    def run(th):
        optimizer = Nested(model.parameters(), lr=0.05)
        with th.watch(model, optimizer=optimizer, sample=None, slow=1) as found:
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model(x)).backward()
                optimizer.step()
        names = {"values": "first", "gradients": "first", "parameters": "head.weight"}
        rows = {kind: found.row(name, kind) for kind, name in names.items()}
        rounded = {kind: [_rounded(row[each]) for each in STATISTICS] for kind, row in rows.items()}
        return {"steps": rows["values"]["steps"], **rounded}

    return Scenario(truth, run, ())  # Training changes it.


# -- the classic hooks -------------------------------------------------------------------------------------------------


@scenario("hooks.register_backward_hook")
def backward_hook():
    model, x = made()
    values = by_hand(model, x)
    inner = torch.autograd.grad(loss_of(values[":return"]), [values["first.lin"], values["first"]])
    grads = gradients_of(model, x)
    truth = [inner[1], grads["x"], grads["x"]]

    def run(th):
        from tenterhook import hooks

        seen = []
        with hooks.register_backward_hook(model.first, lambda _module, given, out: seen.extend((*out, *given))):
            loss_of(model(x)).backward()
        seen.append(x.grad)
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        return seen

    return Scenario(truth, run, (model,))


@scenario("hooks.register_hook")
def tensor_hook():
    truth = [X * 0 + 2, X * 0 + 12]

    def run(th):
        from tenterhook import hooks

        x, seen = X.clone().requires_grad_(), []
        value = (x * 6)[...]
        hooks.register_hook(value, seen.append)
        value.mul_(2)
        value.sum().backward()
        return [seen[0], x.grad]

    return Scenario(truth, run, ())


# -- audits ------------------------------------------------------------------------------------------------------------


@scenario("audit")
def audit():
    model, _ = made()
    nothing = lambda *_: None
    handles = {
        "forward": model.first.register_forward_hook(nothing),
        "forward pre": model.first.register_forward_pre_hook(nothing),
        "backward": model.second.register_full_backward_hook(nothing),
        "backward pre": model.second.register_full_backward_pre_hook(nothing),
        "state dict": model.head.register_state_dict_post_hook(nothing),
        "state dict pre": model.head.register_state_dict_pre_hook(nothing),
        "load state dict pre": model.head.register_load_state_dict_pre_hook(nothing),
        "load state dict": model.head.register_load_state_dict_post_hook(nothing),
        "gradient": model.head.weight.register_hook(nothing),
        "accumulated": model.head.bias.register_post_accumulate_grad_hook(nothing),
    }
    truth = sorted(handle.id for handle in handles.values())

    def run(th):
        return sorted(row.key for row in th.audit(model) if row.address)

    return Scenario(truth, run, ())


@scenario("audit of the process")
def audit_process():
    model, _ = made()
    register = nn.modules.module
    truth = 6

    def run(th):
        nothing = lambda *_: None
        handles = [
            register.register_module_forward_hook(nothing),
            register.register_module_forward_pre_hook(nothing),
            register.register_module_full_backward_hook(nothing),
            register.register_module_full_backward_pre_hook(nothing),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.device("cpu"):
                return len(th.audit(model))
        finally:
            for handle in handles:
                handle.remove()

    return Scenario(truth, run, (model,))


# -- transforms, tracers, copies, threads ------------------------------------------------------------------------------


@scenario("record inside vmap")
def transform():
    model, x = made()
    truth = by_hand(model, x)["first"].detach()

    def run(th):
        with th.record(model, "first") as tape:
            torch.func.vmap(model)(X)
        return tape["first"]

    return Scenario(truth, run, (model,))


@scenario("a traced call is refused")
def traced():
    model, x = made()

    def run(th):
        refused = []
        with th.edit(model, {"first": th.scale(2)}):
            for trace in (torch.fx.symbolic_trace, lambda model: torch.jit.trace(model, (X,))):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        trace(model)
                except th.SessionError:
                    refused.append(True)
            model(x)  # An edit that is never reached is an error of its own.
        return refused

    return Scenario([True, True], run, (model,))


@scenario("a replica of DataParallel")
def replica():
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.float64)
    truth = [X.sum(1, keepdim=True).expand(3, 2) * 0 + 1, 1]

    def run(th):
        found = []
        with th.record(model, "**") as tape:
            model(X)
            copy = model._replicate_for_data_parallel()
            copy.weight, copy.bias = torch.zeros(2, 4, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
            thread = threading.Thread(target=lambda: found.append(copy(X)))
            thread.start()
            thread.join()
        return [found[0], len(tape.calls(":return"))]

    return Scenario(truth, run, (model,))


@scenario("a layer with a fused path")
def fused():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    x = X[None]
    attended = model.norm1(x + model.self_attn(x, x, x)[0])
    truth = [model.linear1(attended).detach(), model(x).detach()]

    def run(th):
        with torch.no_grad(), th.record(model, "linear1") as tape:
            out = model(x)
        return [tape["linear1"], out]

    return Scenario(truth, run, (model,))


@scenario("features")
def features():
    model, x = made()
    truth = [by_hand(model, x)["first"].detach(), gradients_of(model, x, second=lambda v: v)["x"], True]

    def run(th):
        module = th.features(model, {"first": "one", ":return": "out"})
        found = module(x)
        (gradient,) = torch.autograd.grad(loss_of(found["out"]), x)
        module.load_state_dict({name: tensor * 2 for name, tensor in module.state_dict().items()})
        doubled = by_hand(model, x)["first"].detach()
        again = module(x)["one"].detach()
        module.load_state_dict({name: tensor / 2 for name, tensor in module.state_dict().items()})
        return [found["one"].detach(), gradient, bool(torch.allclose(again, doubled))]

    return Scenario(truth, run, (model,))


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("as a model may")


@scenario("failure of a model")
def failure():
    model, _ = made()
    model.second.lin = Fails()

    def run(th):
        with contextlib.suppress(KeyError), th.record(model, "first") as tape:
            model(X)
        note = tape.notes["failure"]
        return [note["address"], note["kind"]]

    return Scenario(["second.lin", "Fails"], run, (model,))
