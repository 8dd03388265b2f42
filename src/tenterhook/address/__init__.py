"""Addresses: from text and other selectors to the points of a model."""

from tenterhook.address.grammar import Address, escape, parse
from tenterhook.address.match import Selector, canonical, resolve
from tenterhook.address.point import Point, Site
from tenterhook.address.selection import Selection, select
from tenterhook.address.walk import aliases

__all__ = [
    "Address",
    "Point",
    "Selection",
    "Selector",
    "Site",
    "aliases",
    "canonical",
    "escape",
    "parse",
    "resolve",
    "select",
]
