"""Addresses: text and other selectors, and the points of a model that they select."""

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
