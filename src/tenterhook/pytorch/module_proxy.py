"""A module that stands in for another one in its parent, and looks like it to the code of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn

from tenterhook.pytorch.module_calls import children_of
from tenterhook.pytorch.names import attribute

__all__ = ["ContainerProxy", "ModuleProxy", "is_container"]

attribute("nn.Module", "_load_from_state_dict")


class _SameClass:
    """``isinstance`` also finds the class of the wrapped module. A class of its own, because of ``super()``."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        inner = self.__dict__.get("_modules", {}).get("spliced")
        return type(self) if inner is None else inner.__class__


class ModuleProxy(_SameClass, nn.Module):
    """A module around the module ``spliced``, with other modules beside it.

    The names of parameters, of submodules and in the state dict are those of the wrapped module. Attributes are read
    from it and set at it, and so are its mode and its class for ``isinstance``.
    """

    spliced: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.spliced = module
        self.training = module.training

    def put_beside(self, name: str, module: nn.Module) -> None:
        """Add a module beside the wrapped one."""
        super().add_module(name, module)

    def others(self) -> list[tuple[str, nn.Module]]:
        """Return the modules beside the wrapped one."""
        return [(name, each) for name, each in children_of(self).items() if name != "spliced" and each is not None]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module. The code of the model may read attributes of its layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("spliced"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped module, unless it is one of the proxy's own."""
        children = self.__dict__.get("_modules")
        if not children or name in self.__dict__ or name in children or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.spliced, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the wrapped module, unless it is one of the proxy's own."""
        if name in self.__dict__ or name in children_of(self):
            super().__delattr__(name)
        else:
            delattr(self.spliced, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the wrapped module: a copy of the model is one without the proxy."""
        return copy.deepcopy(self.spliced, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.spliced.__reduce_ex__(protocol)

    def __bool__(self) -> bool:
        return bool(self.spliced)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  # The signature of nn.Module.
        """Set the mode of the wrapped module, and of nothing beside it."""
        self.spliced.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Any) -> Self:
        """Call a function with the wrapped module and the modules inside it."""
        self.spliced.apply(fn)
        return self

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002  # The signature of nn.Module.
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapped module and those inside it under their own names, then the modules beside it."""
        memo = set() if memo is None else memo
        yield from self.spliced.named_modules(memo, prefix, remove_duplicate)
        for name, each in self.others():
            yield from each.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of :meth:`named_modules`, or those of the wrapped module alone."""
        if not recurse:
            return self.spliced.named_parameters(prefix, recurse, remove_duplicate)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of :meth:`named_modules`, or those of the wrapped module alone."""
        if not recurse:
            return self.spliced.named_buffers(prefix, recurse, remove_duplicate)
        return super().named_buffers(prefix, recurse, remove_duplicate)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the wrapped module."""
        self.spliced.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:  # noqa: FBT001, FBT002
        """Add a buffer to the wrapped module."""
        self.spliced.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the wrapped module."""
        self.spliced.add_module(name, module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the wrapped module, so that the state of the model has no other names."""
        return self.spliced.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Pass the state to the wrapped module. PyTorch reads the entries below a child's name afterwards."""
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}spliced.{name.removeprefix(prefix)}"] = state.pop(name)
        for name, each in self.others():  # They keep their own tensors.
            state.update({f"{prefix}{name}.{key}": own for key, own in each.state_dict(keep_vars=True).items()})
        super()._load_from_state_dict(state, prefix, *args)

    def _get_name(self) -> str:
        return type(self).__name__


class ContainerProxy(ModuleProxy):
    """A proxy of a module with items, such as ``nn.Sequential``."""

    def __getitem__(self, key: Any) -> Any:
        return self.spliced[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.spliced)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.spliced)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, item: Any) -> bool:
        return item in self.spliced  # type: ignore[operator]


def is_container(module: nn.Module) -> bool:
    """Return whether a module has items."""
    return hasattr(type(module), "__getitem__")
