"""The fault grammar, one everywhere: `name:action,key=value,...` to a typed fault and back."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dtprobe.errors import UsageError
from dtprobe.inject import TARGETS, Injector, Target

SEPARATOR = "+"
"""Joins several values of one key: `rank=1+3`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A parsed fault: which injector, the action's configuration, where and when."""

    injector: Injector
    action: str
    config: object
    target: Target

    def __str__(self) -> str:
        """The fault in the grammar; parsing it again gives an equal fault."""
        words = [
            f"{item.name}={_written(value)}"
            for source in (self.target, self.config)
            for item in dataclasses.fields(typing.cast(typing.Any, source))
            if (value := getattr(source, item.name)) != item.default
        ]
        return ",".join([f"{self.injector.name}:{self.action}", *words])

    def at(self, nth: Sequence[int], rank: int | None) -> Fault:
        """The same fault bound to exact calls of one rank, for a replay: no chance is left in it."""
        target = replace(
            self.target,
            nth=tuple(nth),
            rank=self.target.rank if rank is None else (rank,),
            probability=None,
            every=None,
            times=None,
            after_s=None,
        )
        return replace(self, target=target)


def parse(text: str, injectors: Mapping[str, Injector], *, world_size: int | None = None) -> Fault:
    """A fault from its text.

    Raises UsageError, with the closest names, for an unknown injector, action or key, a value of the wrong type or out of
    range, a target key that the injector cannot honour, and a rank outside `world_size` where that is known.
    """
    head, *words = text.strip().split(",")
    name, colon, action = (part.strip() for part in head.partition(":"))
    injector = injectors.get(name.replace("_", "-"))
    if injector is None:
        raise UsageError(f"fault {text!r}: no injector is called {name!r}", closest(name, injectors))
    if not colon or action not in injector.actions:
        raise UsageError(f"fault {text!r}: {name} has no action {action!r}", closest(action, injector.actions))
    config_type = injector.actions[action]
    parameters = {item.name: item for item in dataclasses.fields(config_type)}
    hints = typing.get_type_hints(config_type)
    target_hints = typing.get_type_hints(Target)
    config: dict[str, object] = {}
    target: dict[str, object] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise UsageError(f"fault {text!r}: {word!r} is no key=value")
        if key in config or key in target:
            raise UsageError(f"fault {text!r}: {key} is given twice", "keep one")
        if key in parameters:
            config[key] = _value(text, key, value, hints[key])
        elif key in injector.targets:
            target[key] = _value(text, key, value, target_hints[key])
        elif key in TARGETS:
            raise UsageError(
                f"fault {text!r}: {name} cannot aim by {key}", f"it aims by {', '.join(injector.targets) or 'nothing'}"
            )
        else:
            raise UsageError(
                f"fault {text!r}: {name}:{action} has no parameter {key!r}", closest(key, [*parameters, *injector.targets])
            )
    missing = [
        item.name
        for item in parameters.values()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING and item.name not in config
    ]
    if missing:
        raise UsageError(f"fault {text!r}: {name}:{action} needs {', '.join(missing)}", f"add {missing[0]}=...")
    try:
        made = typing.cast(typing.Any, config_type)(**config)
        fault = Fault(injector=injector, action=action, config=made, target=Target(**typing.cast(typing.Any, target)))
        injector.check(fault)
    except ValueError as error:
        raise UsageError(f"fault {text!r}: {error}") from error
    _check_target(text, fault.target, world_size)
    return fault


def _check_target(text: str, target: Target, world_size: int | None) -> None:
    if target.rank and world_size is not None and max(target.rank) >= world_size:
        raise UsageError(
            f"fault {text!r}: rank {max(target.rank)} is outside world size {world_size}", f"use 0 to {world_size - 1}"
        )
    if target.probability is not None and not 0 <= target.probability <= 1:
        raise UsageError(f"fault {text!r}: probability {target.probability} is not between 0 and 1")
    if target.probability is not None and (target.nth or target.every):
        raise UsageError(f"fault {text!r}: probability contradicts nth and every", "keep one of them")
    if target.nth and target.every:
        raise UsageError(f"fault {text!r}: nth contradicts every", "keep one of them")
    for key in ("every", "times"):
        value = getattr(target, key)
        if value is not None and value < 1:
            raise UsageError(f"fault {text!r}: {key}={value} is less than 1")
    if target.nth and min(target.nth) < 1:
        raise UsageError(f"fault {text!r}: calls are counted from 1, nth={min(target.nth)} never comes")
    for key in ("after_s", "for_s"):
        value = getattr(target, key)
        if value is not None and value < 0:
            raise UsageError(f"fault {text!r}: {key}={value:g} is negative")


def _value(text: str, key: str, value: str, hint: object) -> object:
    """A value of the type that the field declares: str, int, float, bool, an enum, a tuple of one of them, or None beside one."""
    options = [option for option in (typing.get_args(hint) if _is_union(hint) else (hint,)) if option is not type(None)]
    wanted = options[0]
    if typing.get_origin(wanted) is tuple:
        inner = typing.get_args(wanted)[0]
        return tuple(_value(text, key, part, inner) for part in value.split(SEPARATOR))
    if typing.get_origin(wanted) is typing.Literal:
        choices = typing.get_args(wanted)
        if value not in choices:
            raise UsageError(f"fault {text!r}: {key}={value} is unknown", closest(value, choices))
        return value
    assert isinstance(wanted, type), f"{key}: a field of type {wanted} cannot be written in a fault"
    if issubclass(wanted, StrEnum):
        choices = tuple(member.value for member in wanted)
        if value not in choices:
            raise UsageError(f"fault {text!r}: {key}={value} is unknown", closest(value, choices))
        return wanted(value)
    if wanted is bool:
        if value.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise UsageError(f"fault {text!r}: {key}={value} is neither yes nor no")
        return value.lower() in ("true", "yes", "1")
    try:
        made = typing.cast(typing.Any, wanted)(value)
    except ValueError as error:
        raise UsageError(f"fault {text!r}: {key}={value} is no {wanted.__name__}") from error
    if isinstance(made, float) and not math.isfinite(made):
        raise UsageError(f"fault {text!r}: {key}={value} is not finite")
    if key == "rank" and isinstance(made, int) and made < 0:
        raise UsageError(f"fault {text!r}: rank {made} is negative", "ranks count from 0")
    return made


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return SEPARATOR.join(_written(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def closest(name: str, names: typing.Iterable[str]) -> str:
    """A remedy for a name that does not exist: the closest ones, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(sorted(names))}"
