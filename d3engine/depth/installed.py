"""Policies that other installed packages offer, found by name in the entry-point group `d3engine.policies`.

The one idea: nothing of a package is imported before somebody asks for its policy by name, and whatever then fails
names the package, since the reader of the message may never have heard of it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from d3engine.errors import D3EngineError

GROUP = "d3engine.policies"


class PolicyLoadError(D3EngineError):
    """A policy that an installed package offers cannot be used; the message names the package."""


def installed_names() -> list[str]:
    """The names that installed packages offer, sorted; none of them is imported."""
    return sorted(entry_points(group=GROUP).names)


def load_installed(name: str) -> object:
    """What the one installed package that offers `name` has under it: a policy's class, if the package is right."""
    offers = list({_package(entry): entry for entry in entry_points(group=GROUP, name=name)}.values())
    if len(offers) != 1:
        packages = " and ".join(sorted(_package(entry) for entry in offers))
        raise PolicyLoadError(f"the policy {name!r} is offered by more than one installed package: {packages}")
    (entry,) = offers
    try:
        return entry.load()
    except Exception as error:
        raise PolicyLoadError(
            f"the policy {name!r} of the package {_package(entry)} cannot be imported from {entry.value}: {error!r}"
        ) from error


def package_of(name: str) -> str:
    """The package that offers `name`."""
    return _package(next(iter(entry_points(group=GROUP, name=name))))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(".")[0]
