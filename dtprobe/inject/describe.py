"""What an injector can do, told from its dataclasses: for lists, help and dry runs."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from dtprobe.doctor import Doctor
from dtprobe.errors import UsageError
from dtprobe.inject import Injector
from dtprobe.inject.spec import closest


def chosen(name: str, injectors: Mapping[str, Injector]) -> Injector:
    """The injector of that name; raises UsageError with the closest names."""
    found = injectors.get(name.replace("_", "-"))
    if found is None:
        raise UsageError(f"no injector is called {name!r}", closest(name, injectors))
    return found


def as_json(injector: Injector) -> dict[str, Any]:
    """Name, layer, needs, whether it can be used here and why not, and every action with its parameters."""
    unmet = Doctor().unmet(injector.needs)
    reason = "; ".join(f"{need}: {why}" for need, why in unmet.items()) or None
    if reason is None and (unusable := injector.probe()):
        reason = str(unusable)
    return {
        "name": injector.name,
        "title": injector.title,
        "layer": injector.layer,
        "needs": list(injector.needs),
        "usable": reason is None,
        "reason": reason,
        "certifies_not": injector.certifies_not,
        "targets": list(injector.targets),
        "actions": [_action(name, action) for name, action in injector.actions.items()],
    }


def _action(name: str, action: type) -> dict[str, Any]:
    hints = typing.get_type_hints(action)
    return {
        "name": name,
        "help": " ".join((inspect.getdoc(action) or "").split("\n\n")[0].split()),
        "parameters": [
            {
                "name": item.name,
                "type": _type_name(hints[item.name]),
                "required": item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
                "default": None if item.default is dataclasses.MISSING else _plain(item.default),
                "help": item.metadata.get("help", ""),
            }
            for item in dataclasses.fields(typing.cast(Any, action))
        ],
    }


def _type_name(hint: Any) -> str:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(options)
    if typing.get_origin(hint) is tuple:
        return f"{_type_name(options[0])}+..."
    if options:
        return _type_name(options[0])
    values = getattr(hint, "__members__", None)
    return "|".join(member.value for member in values.values()) if values else hint.__name__


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
