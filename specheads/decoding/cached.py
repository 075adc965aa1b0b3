"""A cached property that torch.compile can trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """functools.cached_property without the lock that it takes before Python 3.12, which torch cannot trace."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = self.make(instance)
        instance.__dict__[self.name] = value  # from now on found before this descriptor
        return value
